// qkvctl share: lets all tenants use a model of the default one.
#include <stdio.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/kv_cache.pb-c.h"

// Registers the model as the daemon has it once more, as one that is shared.
static qkv_code share(qkv_client *client, const char *name, qkv_call_error *error) {
  Qkv__V1__GetModelRequest get = QKV__V1__GET_MODEL_REQUEST__INIT;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  ProtobufCMessage *found = NULL, *answer = NULL;
  get.name = (char *)(uintptr_t)name;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetModel", &get.base,
                                          &qkv__v1__get_model_response__descriptor, &found, error);
  if (code != 0) return code;
  request.model = ((Qkv__V1__GetModelResponse *)found)->model;
  request.model->shared = true;
  code = qkv_client_call_message(client, "/qkv.v1.KvCache/RegisterModel", &request.base,
                                 &qkv__v1__register_model_response__descriptor, &answer, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  protobuf_c_message_free_unpacked(found, NULL);
  return code;
}

int qkvctl_share(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *name = arguments->items[0];
  qkv_call_error error = {0};
  int status = QKV_EXIT_OK;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  if (share(client, name, &error) != 0) status = qkv_program_failed("%s", error.text);
  if (status == QKV_EXIT_OK && values->program.json) {
    status = qkv_json_line(json_pack("{s:s, s:b}", "model", name, "shared", 1)) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  } else if (status == QKV_EXIT_OK) {
    printf("%s is shared with all tenants\n", name);
  }
  qkv_client_close(&client);
  return status;
}
