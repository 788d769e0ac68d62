// server/handlers/control.h and contract.h: requests without tensors. No string reaches a handler cut short, and a
// model that is taken can be written back.
#include "server/handlers/control.h"

#include <stdlib.h>

#include "engine/codec/codec.h"
#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "qkv/v1/admin.pb-c.h"
#include "qkv/v1/objects.pb-c.h"
#include "server/handlers/contract.h"
#include "tests/fuzz/fuzz.h"

// What was read is written, and read again the same.
static void write_and_read(const qkv_model *model) {
  qkv_error error = {0};
  qkvi_model_message parts;
  qkvi_model_write(model, &parts);
  qkv_model again;
  if (qkvi_model_read(&parts.model, &again, &error) != QKV_OK || !qkv_model_equal(model, &again)) __builtin_trap();
  qkvi_model_clear(&again);
  qkvi_model_message_clear(&parts);
}

static void read_model(const void *request) {
  const Qkv__V1__RegisterModelRequest *message = request;
  qkv_error error = {0};
  qkv_model model;
  if (message->model == NULL) return;
  if (qkvi_model_read(message->model, &model, &error) != QKV_OK || qkv_model_resolve(&model, &error) != QKV_OK) {
    if (error.text[0] == '\0') __builtin_trap();
  } else {
    const qkv_policy fallback = {.codec = qkv_codec_at(0), .bits_k = 4, .bits_v = 4, .recent_window = 64};
    qkv_policy_merge(&model.policy, &fallback);
    write_and_read(&model);
  }
  qkvi_model_clear(&model);
}

static void read_policy(const void *request) {
  const Qkv__V1__OpenSessionRequest *message = request;
  qkv_error error = {0};
  qkv_policy policy;
  if (qkvi_policy_read(message->policy, &policy, &error) != QKV_OK && error.text[0] == '\0') __builtin_trap();
}

static const struct {
  const ProtobufCMessageDescriptor *type;
  void (*read)(const void *request);  // or NULL
} requests[] = {
    {&qkv__v1__register_model_request__descriptor, read_model},
    {&qkv__v1__open_session_request__descriptor, read_policy},
    {&qkv__v1__close_session_request__descriptor, NULL},
    {&qkv__v1__list_sessions_request__descriptor, NULL},
    {&qkv__v1__fetch_request__descriptor, NULL},
    {&qkv__v1__truncate_request__descriptor, NULL},
    {&qkv__v1__touch_request__descriptor, NULL},
    {&qkv__v1__get_session_request__descriptor, NULL},
    {&qkv__v1__has_sessions_request__descriptor, NULL},
    {&qkv__v1__demote_request__descriptor, NULL},
    {&qkv__v1__prefetch_request__descriptor, NULL},
    {&qkv__v1__get_attention_stats_request__descriptor, NULL},
    {&qkv__v1__pin_request__descriptor, NULL},
    {&qkv__v1__fork_request__descriptor, NULL},
    {&qkv__v1__match_request__descriptor, NULL},
    {&qkv__v1__watch_request__descriptor, NULL},
    {&qkv__v1__get_calibration_request__descriptor, NULL},
    {&qkv__v1__session_info__descriptor, NULL},  // what the journal has of a session
    {&qkv__v1__get_status_request__descriptor, NULL},
    {&qkv__v1__object_info__descriptor, NULL},  // what the journal has of an object
    {&qkv__v1__get_objects_request__descriptor, NULL},
    {&qkv__v1__has_objects_request__descriptor, NULL},
    {&qkv__v1__delete_objects_request__descriptor, NULL},
    {&qkv__v1__list_objects_request__descriptor, NULL},
    {&grpc__reflection__v1alpha__server_reflection_request__descriptor, NULL},
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz_message message;
  fuzz_message_init(&message, data, size);
  for (size_t i = 0; i < sizeof requests / sizeof requests[0]; i++) {
    qkv_error error = {0};
    void *request = qkvi_control_unpack(message.bytes, requests[i].type, &error);
    if ((request == NULL) != (error.status != QKV_OK)) __builtin_trap();
    if (request == NULL) continue;
    if (requests[i].read != NULL) requests[i].read(request);
    qkvi_control_free(request);
  }
  fuzz_message_deinit(&message);
  return 0;
}
