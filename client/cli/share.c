// qkvctl share and unshare: lets all tenants use a model of the default one, and ends that.
#include <stdio.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/admin.pb-c.h"
#include "qkv/v1/kv_cache.pb-c.h"

// Registers the model as the daemon has it once more, as one that is shared.
static qkv_code share_model(qkv_client *client, const char *name, qkv_call_error *error) {
  Qkv__V1__GetModelRequest get = QKV__V1__GET_MODEL_REQUEST__INIT;
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  ProtobufCMessage *found = NULL, *answer = NULL;
  get.name = (char *)(uintptr_t)name;
  qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetModel", &get.base,
                                          &qkv__v1__get_model_response__descriptor, &found, error);
  if (code != 0) return code;
  request.model = ((Qkv__V1__GetModelResponse *)found)->model;
  if (request.model != NULL) {
    request.model->shared = true;
    code = qkv_client_call_message(client, "/qkv.v1.KvCache/RegisterModel", &request.base,
                                   &qkv__v1__register_model_response__descriptor, &answer, error);
  } else {
    code = error->code = QKV_INTERNAL;
    (void)snprintf(error->text, sizeof error->text, "the daemon does not describe model %s", name);
  }
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  protobuf_c_message_free_unpacked(found, NULL);
  return code;
}

static qkv_code unshare_model(qkv_client *client, const char *name, qkv_call_error *error) {
  Qkv__V1__UnshareModelRequest request = QKV__V1__UNSHARE_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.name = (char *)(uintptr_t)name;
  const qkv_code code = qkv_client_call_message(client, "/qkv.v1.Admin/UnshareModel", &request.base,
                                                &qkv__v1__unshare_model_response__descriptor, &answer, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static int change(const qkvctl_values *values, const char *name, bool shared) {
  qkv_call_error error = {0};
  int status = QKV_EXIT_OK;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  if ((shared ? share_model : unshare_model)(client, name, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  if (status == QKV_EXIT_OK && values->program.json) {
    status = qkv_json_line(json_pack("{s:s, s:b}", "model", name, "shared", shared)) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  } else if (status == QKV_EXIT_OK) {
    printf(shared ? "%s is shared with all tenants\n" : "%s is the tenant default's alone\n", name);
  }
  qkv_client_close(&client);
  return status;
}

int qkvctl_share(void *values, const qkv_option_list *arguments) {
  return change(values, arguments->items[0], true);
}

int qkvctl_unshare(void *values, const qkv_option_list *arguments) {
  return change(values, arguments->items[0], false);
}
