#include "server/check_health.h"

#include <assert.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/time.h>
#include <stdbool.h>
#include <string.h>

#include "grpc/health/v1/health.pb-c.h"
#include "server/http/probe.h"

enum { TIMEOUT_S = 5, OPS = 6 };

// A call that is under way, and its response.
typedef struct question {
  grpc_byte_buffer *request, *response;
  grpc_metadata_array initial, trailing;
  grpc_status_code status;
  grpc_slice details;
} question;

static bool is_unix(const char *address) {
  return strncmp(address, "unix:", strlen("unix:")) == 0;
}

static grpc_channel *open_channel(const char *address) {
  // The environment's proxies are for other hosts.
  grpc_arg direct = {.type = GRPC_ARG_INTEGER, .key = (char *)GRPC_ARG_ENABLE_HTTP_PROXY, .value.integer = 0};
  const grpc_channel_args arguments = {.num_args = 1, .args = &direct};
  grpc_channel_credentials *plain = grpc_insecure_credentials_create();
  grpc_channel *channel = grpc_channel_create(address, plain, &arguments);
  grpc_channel_credentials_release(plain);
  return channel;
}

// The request is an empty message: the whole daemon is meant.
static void ask(grpc_channel *channel, question *asked) {
  const gpr_timespec until =
      gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(TIMEOUT_S, GPR_TIMESPAN));
  grpc_completion_queue *queue = grpc_completion_queue_create_for_pluck(NULL);
  grpc_call *call =
      grpc_channel_create_call(channel, NULL, GRPC_PROPAGATE_DEFAULTS, queue,
                               grpc_slice_from_static_string("/grpc.health.v1.Health/Check"), NULL, until, NULL);
  const grpc_op ops[OPS] = {
      {.op = GRPC_OP_SEND_INITIAL_METADATA},
      {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = asked->request},
      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
      {.op = GRPC_OP_RECV_INITIAL_METADATA, .data.recv_initial_metadata.recv_initial_metadata = &asked->initial},
      {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &asked->response},
      {.op = GRPC_OP_RECV_STATUS_ON_CLIENT,
       .data.recv_status_on_client = {&asked->trailing, &asked->status, &asked->details, NULL}},
  };
  const grpc_call_error begun = grpc_call_start_batch(call, ops, OPS, asked, NULL);
  assert(begun == GRPC_CALL_OK);
  (void)begun;
  (void)grpc_completion_queue_pluck(queue, asked, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
  grpc_call_unref(call);
  grpc_completion_queue_shutdown(queue);
  (void)grpc_completion_queue_pluck(queue, NULL, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
  grpc_completion_queue_destroy(queue);
}

static bool is_serving(grpc_byte_buffer *response) {
  grpc_byte_buffer_reader reader;
  if (response == NULL || !grpc_byte_buffer_reader_init(&reader, response)) return false;
  const grpc_slice all = grpc_byte_buffer_reader_readall(&reader);
  grpc_byte_buffer_reader_destroy(&reader);
  Grpc__Health__V1__HealthCheckResponse *answer =
      grpc__health__v1__health_check_response__unpack(NULL, GRPC_SLICE_LENGTH(all), GRPC_SLICE_START_PTR(all));
  const bool serving =
      answer != NULL && answer->status == GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING;
  if (answer != NULL) grpc__health__v1__health_check_response__free_unpacked(answer, NULL);
  grpc_slice_unref(all);
  return serving;
}

static qkv_status judge(const char *address, const question *asked, qkv_error *error) {
  if (asked->status != GRPC_STATUS_OK)
    return qkv_fail(error, QKV_UNAVAILABLE, "%s: %.*s", address, (int)GRPC_SLICE_LENGTH(asked->details),
                    (const char *)GRPC_SLICE_START_PTR(asked->details));
  if (!is_serving(asked->response)) return qkv_fail(error, QKV_UNAVAILABLE, "%s is not ready: it drains", address);
  return QKV_OK;
}

static qkv_status ask_calls(const char *address, qkv_error *error) {
  grpc_init();
  grpc_channel *channel = open_channel(address);
  question asked = {.details = grpc_empty_slice(), .request = grpc_raw_byte_buffer_create(NULL, 0)};
  grpc_metadata_array_init(&asked.initial);
  grpc_metadata_array_init(&asked.trailing);
  ask(channel, &asked);
  const qkv_status status = judge(address, &asked, error);
  grpc_byte_buffer_destroy(asked.request);
  if (asked.response != NULL) grpc_byte_buffer_destroy(asked.response);
  grpc_metadata_array_destroy(&asked.initial);
  grpc_metadata_array_destroy(&asked.trailing);
  grpc_slice_unref(asked.details);
  grpc_channel_destroy(channel);
  grpc_shutdown();
  return status;
}

qkv_status qkvi_check_health(const qkv_server_options *options, qkv_error *error) {
  if (options->admin_listen != NULL) return qkvi_probe(options->admin_listen, options->admin_tls, error);
  for (size_t i = 0; i < options->listen.count; i++) {
    const char *address = options->listen.items[i];
    if (options->tls_cert == NULL || is_unix(address)) return ask_calls(address, error);
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "--check-health cannot ask by TLS: it needs an --admin-listen, or a unix socket in --listen");
}
