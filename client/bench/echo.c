#include "client/bench/echo.h"

#include <assert.h>
#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/bench/bench.h"
#include "client/bench/raw.h"

static const char method[] = "/bench.Echo/Exchange";

static gpr_timespec never(void) {
  return gpr_inf_future(GPR_CLOCK_MONOTONIC);
}

static void still_ours(void *buffer) {
  (void)buffer;
}

// The buffer's first `bytes` bytes, by reference.
static grpc_byte_buffer *message_of(char *buffer, size_t bytes) {
  grpc_slice slice = grpc_slice_new_with_user_data(buffer, bytes, still_ours, buffer);
  grpc_byte_buffer *message = grpc_raw_byte_buffer_create(&slice, 1);
  grpc_slice_unref(slice);
  return message;
}

// Reads what came; returns how much that was.
static size_t read_lines(const grpc_byte_buffer *message) {
  const grpc_slice_buffer *slices = &message->data.raw.slice_buffer;
  size_t bytes = 0;
  for (size_t i = 0; i < slices->count; i++) {
    const volatile uint8_t *data = GRPC_SLICE_START_PTR(slices->slices[i]);
    size_t length = GRPC_SLICE_LENGTH(slices->slices[i]);
    for (size_t at = 0; at < length; at += 64) (void)data[at];
    bytes += length;
  }
  return bytes;
}

static void run_batch(grpc_call *call, grpc_completion_queue *queue, const grpc_op *ops, size_t count) {
  grpc_call_error started = grpc_call_start_batch(call, ops, count, call, NULL);
  assert(started == GRPC_CALL_OK);
  (void)started;
  (void)grpc_completion_queue_pluck(queue, call, never(), NULL);
}

static grpc_channel_args *unlimited(void) {
  static grpc_arg arguments[] = {
      {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, .value.integer = -1},
      {.type = GRPC_ARG_STRING, .key = (char *)GRPC_ARG_DEFAULT_AUTHORITY, .value.string = (char *)"localhost"}};
  static grpc_channel_args all = {.num_args = sizeof arguments / sizeof *arguments, .args = arguments};
  return &all;
}

// ---- The peer ----

static void answer(grpc_call *call, grpc_completion_queue *queue, qkv_echo *echo) {
  grpc_byte_buffer *request = NULL, *response = message_of(echo->buffer, echo->down);
  int cancelled = 0;
  grpc_op receive = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &request};
  grpc_op ops[4] = {
      {.op = GRPC_OP_SEND_INITIAL_METADATA},
      {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = response},
      {.op = GRPC_OP_SEND_STATUS_FROM_SERVER, .data.send_status_from_server.status = GRPC_STATUS_OK},
      {.op = GRPC_OP_RECV_CLOSE_ON_SERVER, .data.recv_close_on_server.cancelled = &cancelled},
  };
  run_batch(call, queue, &receive, 1);
  if (request != NULL) grpc_byte_buffer_destroy(request);
  run_batch(call, queue, ops, sizeof ops / sizeof *ops);
  grpc_byte_buffer_destroy(response);
  grpc_call_unref(call);
}

// Until it is killed.
static _Noreturn void serve(qkv_echo *echo, int socket) {
  grpc_init();
  grpc_server *server = grpc_server_create(unlimited(), NULL);
  grpc_completion_queue *calls = grpc_completion_queue_create_for_pluck(NULL);
  grpc_server_register_completion_queue(server, calls, NULL);
  grpc_server_start(server);
  grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
  grpc_server_add_channel_from_fd(server, socket, credentials);
  for (;;) {
    grpc_call *call = NULL;
    grpc_call_details details;
    grpc_metadata_array metadata;
    grpc_call_details_init(&details);
    grpc_metadata_array_init(&metadata);
    (void)grpc_server_request_call(server, &call, &details, &metadata, calls, calls, &details);
    if (!grpc_completion_queue_pluck(calls, &details, never(), NULL).success) _exit(1);
    grpc_call_details_destroy(&details);
    grpc_metadata_array_destroy(&metadata);
    answer(call, calls, echo);
  }
}

// ---- This side ----

bool qkv_echo_start(qkv_echo *echo, bool tcp, size_t up, size_t down) {
  *echo = (qkv_echo){.up = up, .down = down};
  int pair[2];
  if (!qkv_raw_pair(tcp, pair)) return false;
  for (int i = 0; i < 2; i++) (void)fcntl(pair[i], F_SETFL, fcntl(pair[i], F_GETFL) | O_NONBLOCK);
  echo->buffer = qkv_bench_rows(up > down ? up : down, 7);
  echo->peer = fork();
  if (echo->peer < 0) return false;
  if (echo->peer == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(pair[0]);
    serve(echo, pair[1]);
  }
  close(pair[1]);
  grpc_init();
  echo->queue = grpc_completion_queue_create_for_pluck(NULL);
  grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
  echo->channel = grpc_channel_create_from_fd("echo", pair[0], credentials, unlimited());
  grpc_channel_credentials_release(credentials);
  return true;
}

double qkv_echo_exchange(qkv_echo *echo) {
  double begin = qkv_bench_now();
  grpc_byte_buffer *request = message_of(echo->buffer, echo->up), *response = NULL;
  grpc_metadata_array initial, trailing;
  grpc_status_code status = GRPC_STATUS_UNKNOWN;
  grpc_slice details = grpc_empty_slice();
  grpc_metadata_array_init(&initial);
  grpc_metadata_array_init(&trailing);
  grpc_call *call = grpc_channel_create_call(echo->channel, NULL, GRPC_PROPAGATE_DEFAULTS, echo->queue,
                                             grpc_slice_from_static_string(method), NULL, never(), NULL);
  grpc_op ops[6] = {
      {.op = GRPC_OP_SEND_INITIAL_METADATA},
      {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = request},
      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
      {.op = GRPC_OP_RECV_INITIAL_METADATA, .data.recv_initial_metadata.recv_initial_metadata = &initial},
      {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &response},
      {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
       .data.recv_status_on_client = {.trailing_metadata = &trailing, .status = &status, .status_details = &details}},
  };
  run_batch(call, echo->queue, ops, sizeof ops / sizeof *ops);
  bool ok = status == GRPC_STATUS_OK && response != NULL && read_lines(response) == echo->down;
  if (response != NULL) grpc_byte_buffer_destroy(response);
  grpc_byte_buffer_destroy(request);
  grpc_call_unref(call);
  grpc_metadata_array_destroy(&initial);
  grpc_metadata_array_destroy(&trailing);
  grpc_slice_unref(details);
  return ok ? qkv_bench_now() - begin : -1;
}

void qkv_echo_stop(qkv_echo *echo) {
  if (echo->channel != NULL) {
    grpc_channel_destroy(echo->channel);
    grpc_completion_queue_shutdown(echo->queue);
    grpc_completion_queue_destroy(echo->queue);
    grpc_shutdown();
  }
  if (echo->peer > 0) {
    kill(echo->peer, SIGKILL);
    waitpid(echo->peer, NULL, 0);
  }
  free(echo->buffer);
  *echo = (qkv_echo){0};
}
