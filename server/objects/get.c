// GetObjects: sends objects in messages of about 1 MiB; the next one is built when the last one has been sent.
#include <stdlib.h>
#include <string.h>

#include "qkv/v1/objects.pb-c.h"
#include "server/handlers/block.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/objects/names.h"

enum { MESSAGE_BYTES = QKVI_OBJECT_PART, PIECES_MAX = 4096 };  // of a message

typedef struct get_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  Qkv__V1__GetObjectsRequest *request;
  const char *tenant;
  size_t next;          // name
  qkvi_object *object;  // of that, once a part of it was sent; else NULL
  size_t part;          // the next one
  qkv_wire_writer *writer;
} get_stream;

enum { INDEX = 1, INFO = 2, MISSING = 3, DATA = 15 };

static void begin_piece(const get_stream *stream) {
  qkv_wire_begin(stream->writer, 1);
  qkv_wire_put_varint(stream->writer, INDEX, stream->next);
}

// Fields of ObjectInfo (objects.proto).
static void put_info(const get_stream *stream) {
  qkv_wire_writer *writer = stream->writer;
  qkvi_object_info info;
  qkvi_object_read_info(stream->daemon->objects, stream->object, &info);
  qkv_wire_begin(writer, INFO);
  qkv_wire_put_string(writer, 61, info.config.name);
  qkv_wire_put_string(writer, 62, info.config.tenant);
  qkv_wire_put_varint(writer, 63, info.config.bytes);
  qkv_wire_put_fixed64(writer, 64, info.config.checksum);
  qkv_wire_end(writer);
}

static void put_missing(get_stream *stream) {
  begin_piece(stream);
  qkv_wire_put_varint(stream->writer, MISSING, 1);
  qkv_wire_end(stream->writer);
  qkvi_object_unref(stream->daemon->objects, &stream->object);
  stream->next++;
}

// The next part of the next object, where it fits behind `*used` bytes of the block; false where it does not.
static qkv_status put_part(get_stream *stream, qkvi_response_block *block, uint64_t *used, bool *fits,
                           qkv_error *error) {
  qkv_daemon *daemon = stream->daemon;
  const bool first = stream->object == NULL;
  if (first) {
    stream->object = qkvi_objects_find(daemon->objects, stream->tenant, stream->request->objects[stream->next], true);
    stream->part = 0;
  }
  if (stream->object == NULL) {
    put_missing(stream);
    return QKV_OK;
  }
  const uint64_t bytes = qkvi_object_part_bytes(stream->object, stream->part);
  *fits = *used == 0 || *used + bytes <= MESSAGE_BYTES;
  if (!*fits) {
    if (first) qkvi_object_unref(daemon->objects, &stream->object);
    return QKV_OK;
  }
  qkv_error reason = {0};
  const qkv_status status =
      qkvi_object_read(daemon->objects, stream->object, stream->part, block->data + *used, &reason);
  if (status == QKV_NOT_FOUND) {
    put_missing(stream);
    return QKV_OK;
  }
  if (status != QKV_OK) return qkv_fail(error, status, "%s", reason.text);
  begin_piece(stream);
  if (stream->part == 0) put_info(stream);
  qkvi_block_hold(block);
  qkv_wire_put_reference(stream->writer, DATA, block->data + *used, bytes, block);
  qkv_wire_end(stream->writer);
  *used += bytes;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_OBJECT_GET_BYTES], (int64_t)bytes);
  if (++stream->part < qkvi_object_parts(qkvi_object_config_of(stream->object)->bytes)) return QKV_OK;
  qkv_metric_add(&daemon->metrics[QKV_METRIC_OBJECT_HITS], 1);
  qkvi_object_unref(daemon->objects, &stream->object);
  stream->next++;
  return QKV_OK;
}

static void send_job(void *context) {
  get_stream *stream = context;
  qkvi_response_block *block = NULL;
  qkv_error error = {0};
  uint64_t used = 0;
  bool fits = true;
  if (!qkvi_job_wanted(stream->call)) return;
  qkv_status status = qkvi_block_create(stream->call, MESSAGE_BYTES,
                                        (uint64_t)stream->daemon->options->limit_response_bytes, &block, &error);
  qkv_wire_writer_clear(stream->writer);
  for (int i = 0; i < PIECES_MAX && status == QKV_OK && fits && stream->next < stream->request->n_objects; i++)
    status = put_part(stream, block, &used, &fits, &error);
  if (status != QKV_OK) {
    // The references of the writer are not sent.
    size_t count;
    const qkv_wire_piece *pieces = qkv_wire_writer_pieces(stream->writer, &count);
    for (size_t i = 0; i < count; i++) {
      if (pieces[i].reference) qkvi_block_release(pieces[i].owner);
    }
    qkvi_block_release(block);
    return qkvi_control_fail(stream->call, &error);
  }
  const bool last = stream->next == stream->request->n_objects;
  (last ? qkv_rpc_reply : qkv_rpc_send)(stream->call, stream->writer, qkvi_block_release);
  qkvi_block_release(block);
}

static void on_sent(qkv_rpc_call *call) {
  get_stream *stream = qkv_rpc_state(call);
  qkv_error error = {0};
  if (qkvi_job_try(call, qkvi_work_of(qkvi_session_waits(call), true), send_job, stream, &error) != QKV_OK)
    qkvi_control_fail(call, &error);
}

// The call's state is its request so far.
static get_stream *begin(qkv_rpc_call *call) {
  qkv_error error = {0};
  qkv_daemon *daemon = qkv_rpc_context(call);
  Qkv__V1__GetObjectsRequest *request = qkv_rpc_state(call);
  get_stream *stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  *stream = (get_stream){.call = call, .daemon = daemon, .request = request, .writer = qkv_wire_writer_create()};
  qkv_rpc_set_state(call, stream);
  if (qkvi_object_names_check(call, request->tenant, request->objects, request->n_objects, &stream->tenant, &error) !=
      QKV_OK) {
    qkvi_control_fail(call, &error);
    return NULL;
  }
  qkv_metric_add(&daemon->metrics[QKV_METRIC_OBJECT_GETS], (int64_t)request->n_objects);
  if (request->n_objects > 0) return stream;
  qkv_rpc_finish(call, QKV_OK, "");
  return NULL;
}

static void begin_job(void *context) {
  get_stream *stream = begin(context);
  if (stream != NULL) send_job(stream);
}

static void on_message(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_later(call, message, &qkv__v1__get_objects_request__descriptor, qkvi_control_unpack,
                     qkvi_work_of(qkvi_session_waits(call), true), begin_job);
}

static void destroy(void *state) {
  get_stream *stream = state;
  if (stream == NULL) return;
  qkvi_object_unref(stream->daemon->objects, &stream->object);
  qkv_wire_writer_destroy(&stream->writer);
  qkvi_control_free(stream->request);
  free(stream);
}

const qkv_rpc_method qkvi_get_objects_methods[] = {
    {.path = "/qkv.v1.Objects/GetObjects", .message = on_message, .sent = on_sent, .destroy = destroy}, {0}};
