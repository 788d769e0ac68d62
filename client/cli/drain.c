// qkvctl drain: ends a daemon.
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/admin.pb-c.h"

// Its last answer is that it drains; then nobody answers, or another one that was started in its place. What else
// goes wrong with a call does not tell.
static int await_end(qkv_client *client) {
  const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
  const Qkv__V1__GetStatusRequest request = QKV__V1__GET_STATUS_REQUEST__INIT;
  for (bool drained = false;;) {
    ProtobufCMessage *answer = NULL;
    qkv_call_error error = {0};
    const qkv_code code = qkv_client_call_message(client, "/qkv.v1.Admin/GetStatus", &request.base,
                                                  &qkv__v1__get_status_response__descriptor, &answer, &error);
    const bool drains = code == 0 ? strcmp(((const Qkv__V1__GetStatusResponse *)answer)->state, "draining") == 0
                                  : strncmp(error.text, "draining", 8) == 0;
    if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
    if (!drains && (code == QKV_UNAVAILABLE || (code == 0 && drained))) return QKV_EXIT_OK;
    if (code != 0 && code != QKV_DEADLINE_EXCEEDED && code != QKV_RESOURCE_EXHAUSTED && !drains)
      return qkv_program_failed("the daemon drains, whether it has ended is not known: %s", error.text);
    drained |= drains;
    (void)nanosleep(&pause, NULL);
  }
}

int qkvctl_drain(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  Qkv__V1__DrainRequest request = QKV__V1__DRAIN_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  (void)arguments;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  request.grace_ms = (uint64_t)values->grace;
  request.notice_ms = (uint64_t)values->notice;
  int status = QKV_EXIT_OK;
  if (qkv_client_call_message(client, "/qkv.v1.Admin/Drain", &request.base, &qkv__v1__drain_response__descriptor,
                              &answer, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  if (status == QKV_EXIT_OK && values->wait) status = await_end(client);
  if (status == QKV_EXIT_OK && values->program.json) {
    status = qkv_json_line(json_pack("{s:b}", "ended", (int)values->wait)) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  } else if (status == QKV_EXIT_OK) {
    puts(values->wait ? "the daemon has ended" : "the daemon drains");
  }
  qkv_client_close(&client);
  return status;
}
