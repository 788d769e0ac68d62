// grpc.reflection: queried by grpcurl before a call. v1 has the messages of v1alpha, bit for bit.
#include <assert.h>
#include <stdlib.h>

#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "server/handlers/control.h"
#include "server/handlers/descriptors.h"
#include "server/handlers/handlers.h"

#define REQUEST(kind) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##kind
#define RESPONSE(kind) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##kind

typedef Grpc__Reflection__V1alpha__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1alpha__ServerReflectionResponse reflection_response;

// Storage for the parts of a response.
typedef struct response_parts {
  Grpc__Reflection__V1alpha__FileDescriptorResponse files;
  qkv_segment segments[QKVI_DESCRIPTOR_FILES_MAX];
  ProtobufCBinaryData data[QKVI_DESCRIPTOR_FILES_MAX];
  Grpc__Reflection__V1alpha__ListServiceResponse list;
  char names[QKVI_DESCRIPTOR_SERVICES_MAX][QKVI_DESCRIPTOR_NAME_MAX];
  Grpc__Reflection__V1alpha__ServiceResponse services[QKVI_DESCRIPTOR_SERVICES_MAX];
  Grpc__Reflection__V1alpha__ServiceResponse *service_pointers[QKVI_DESCRIPTOR_SERVICES_MAX];
  Grpc__Reflection__V1alpha__ErrorResponse error;
  qkv_error reason;
} response_parts;

static void answer_error(reflection_response *response, response_parts *parts) {
  grpc__reflection__v1alpha__error_response__init(&parts->error);
  parts->error.error_code = (int32_t)parts->reason.status;
  parts->error.error_message = parts->reason.text;
  response->message_response_case = RESPONSE(ERROR_RESPONSE);
  response->error_response = &parts->error;
}

static void answer_file(size_t file, reflection_response *response, response_parts *parts) {
  grpc__reflection__v1alpha__file_descriptor_response__init(&parts->files);
  size_t count = qkvi_descriptors_with_imports(file, parts->segments);
  for (size_t i = 0; i < count; i++) {
    parts->data[i] =
        (ProtobufCBinaryData){.data = (uint8_t *)parts->segments[i].data, .len = parts->segments[i].length};
  }
  parts->files.n_file_descriptor_proto = count;
  parts->files.file_descriptor_proto = parts->data;
  response->message_response_case = RESPONSE(FILE_DESCRIPTOR_RESPONSE);
  response->file_descriptor_response = &parts->files;
}

static void answer_services(reflection_response *response, response_parts *parts) {
  grpc__reflection__v1alpha__list_service_response__init(&parts->list);
  size_t count = qkvi_descriptors_services(parts->names);
  for (size_t i = 0; i < count; i++) {
    grpc__reflection__v1alpha__service_response__init(&parts->services[i]);
    parts->services[i].name = parts->names[i];
    parts->service_pointers[i] = &parts->services[i];
  }
  parts->list.n_service = count;
  parts->list.service = parts->service_pointers;
  response->message_response_case = RESPONSE(LIST_SERVICES_RESPONSE);
  response->list_services_response = &parts->list;
}

static void answer(const reflection_request *request, reflection_response *response, response_parts *parts) {
  size_t file;
  qkv_error *reason = &parts->reason;
  switch (request->message_request_case) {
    case REQUEST(FILE_BY_FILENAME):
      if (qkvi_descriptors_file(request->file_by_filename, &file)) {
        answer_file(file, response, parts);
        return;
      }
      (void)qkv_fail(reason, QKV_NOT_FOUND, "no file %s", request->file_by_filename);
      break;
    case REQUEST(FILE_CONTAINING_SYMBOL):
      if (qkvi_descriptors_symbol(request->file_containing_symbol, &file)) {
        answer_file(file, response, parts);
        return;
      }
      (void)qkv_fail(reason, QKV_NOT_FOUND, "no symbol %s", request->file_containing_symbol);
      break;
    case REQUEST(LIST_SERVICES):
      answer_services(response, parts);
      return;
    case REQUEST(FILE_CONTAINING_EXTENSION):
    case REQUEST(ALL_EXTENSION_NUMBERS_OF_TYPE):
      (void)qkv_fail(reason, QKV_NOT_FOUND, "this contract has no extensions");
      break;
    default:
      (void)qkv_fail(reason, QKV_INVALID_ARGUMENT, "the request asks for nothing");
      break;
  }
  answer_error(response, parts);
}

static void on_request(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  reflection_request *request =
      qkvi_control_unpack_here(message, &grpc__reflection__v1alpha__server_reflection_request__descriptor, &error);
  if (request == NULL) {
    qkvi_control_fail(call, &error);
    return;
  }
  response_parts *parts = calloc(1, sizeof(*parts));
  assert(parts != NULL);
  reflection_response response;
  grpc__reflection__v1alpha__server_reflection_response__init(&response);
  response.valid_host = request->host;
  response.original_request = request;
  answer(request, &response, parts);

  uint8_t *packed = malloc(grpc__reflection__v1alpha__server_reflection_response__get_packed_size(&response));
  assert(packed != NULL);
  size_t length = grpc__reflection__v1alpha__server_reflection_response__pack(&response, packed);
  free(parts);
  qkvi_control_free(request);
  qkv_rpc_send_bytes(call, packed, length);
  free(packed);
}

static void on_end(qkv_rpc_call *call) {
  qkv_rpc_finish(call, QKV_OK, "");
}

const qkv_rpc_method qkvi_reflection_methods[] = {
    {.path = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
     .message = on_request,
     .end = on_end,
     .sent = qkv_rpc_next},
    {.path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
     .message = on_request,
     .end = on_end,
     .sent = qkv_rpc_next},
    {0},
};
