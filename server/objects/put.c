// PutObjects: a stream of pieces of objects.
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/base/clock.h"
#include "qkv/v1/objects.pb-c.h"
#include "server/auth/identity.h"
#include "server/handlers/contract.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/objects/pieces.h"
#include "server/reserve.h"

enum { TURN_MS = 50 };  // a job takes pieces of a message for so long

// The object that is being put.
typedef struct put_object {
  qkvi_object *object;  // NULL: none is
  bool replace;
  uint64_t checksum;  // as declared; 0: not declared
  uint64_t held;      // bytes received
  uint8_t *part;      // that is being filled; NULL: none is
  XXH3_state_t *hash;
} put_object;

typedef struct put_stream {
  qkv_rpc_call *call;
  qkv_daemon *daemon;
  qkvi_put_pieces pieces;  // of the message
  put_object at;
  uint64_t objects, existing;  // whole ones
} put_stream;

// ---- Memory ----

static qkv_status take_block(const put_stream *stream, uint64_t bytes, uint8_t **block, qkv_error *error) {
  qkv_arena *arena = qkvi_object_arena(stream->at.object);
  QKV_TRY(qkvi_reserve(stream->call, qkv_account_of(arena), qkv_arena_cost(bytes), error));
  *block = qkv_arena_alloc(arena, bytes);
  return QKV_OK;
}

// ---- One object ----

static void drop_object(put_stream *stream) {
  put_object *at = &stream->at;
  if (at->part != NULL) {
    const size_t part = (size_t)(at->held / QKVI_OBJECT_PART);
    qkv_arena_free(qkvi_object_arena(at->object), at->part, qkvi_object_part_bytes(at->object, part));
  }
  // An object that was refused as a whole, or that exists and is not durable, is not incomplete.
  if (at->object != NULL && at->held < qkvi_object_config_of(at->object)->bytes)
    qkv_metric_add(&stream->daemon->metrics[QKV_METRIC_OBJECTS_INCOMPLETE], 1);
  qkvi_object_unref(stream->daemon->objects, &at->object);
  (void)XXH3_freeState(at->hash);
  *at = (put_object){0};
}

static qkv_status read_config(const qkv_rpc_call *call, const Qkv__V1__ObjectInfo *begin, qkvi_object_config *config,
                              qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const char *tenant = NULL;
  const uint64_t most = (uint64_t)daemon->options->limit_object_bytes;
  QKV_TRY(qkv_name_check(begin->object, "object", error));
  QKV_TRY(qkvi_request_tenant(call, begin->tenant, &tenant, error));
  if (begin->bytes < 1 || begin->bytes > most)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "bytes is %" PRIu64 ", allowed are 1 to limit-object-bytes %" PRIu64,
                    begin->bytes, most);
  if ((unsigned)begin->durability > QKV_DURABILITY_SYNC)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "durability is %d, known are 1 (memory), 2 (async) and 3 (sync)",
                    (int)begin->durability);
  if (daemon->residency == NULL && (unsigned)begin->durability > QKV_DURABILITY_MEMORY)
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "durability is %s, the daemon has no data-dir",
                    begin->durability == QKV__V1__DURABILITY__DURABILITY_SYNC ? "SYNC" : "ASYNC");
  *config = (qkvi_object_config){.bytes = begin->bytes,
                                 .ttl_ms = begin->ttl_ms,
                                 .durability = begin->durability == 0 ? qkv_server_options_durability(daemon->options)
                                                                      : (qkv_durability)begin->durability};
  QKV_TRY(
      qkvi_retention_read(begin->retention, qkv_server_options_evict(daemon->options), &config->evictable, error));
  (void)snprintf(config->name, sizeof config->name, "%s", begin->object);
  (void)snprintf(config->tenant, sizeof config->tenant, "%s", tenant);
  return QKV_OK;
}

static qkv_status begin_object(put_stream *stream, const Qkv__V1__ObjectInfo *begin, bool replace, qkv_error *error) {
  qkv_daemon *daemon = stream->daemon;
  qkvi_object_config config = {0};
  if (stream->at.object != NULL) {
    const qkvi_object_config *last = qkvi_object_config_of(stream->at.object);
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "object %s has %" PRIu64 " of its %" PRIu64 " bytes, and another begins", last->name,
                    stream->at.held, last->bytes);
  }
  QKV_TRY(read_config(stream->call, begin, &config, error));
  if (daemon->options->limit_objects == 0)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "limit-objects is 0: this daemon keeps none");
  qkv_account *account = qkv_accounts_join(qkv_store_accounts(daemon->store), config.tenant);
  const qkv_status status = qkvi_reserve(stream->call, account, qkvi_object_fixed_cost(config.bytes), error);
  qkvi_object *object = status == QKV_OK ? qkvi_object_create(daemon->objects, account, &config) : NULL;
  qkv_account_unref(&account);
  QKV_TRY(status);
  stream->at =
      (put_object){.object = object, .replace = replace, .checksum = begin->checksum, .hash = XXH3_createState()};
  if (stream->at.hash == NULL) abort();
  (void)XXH3_64bits_reset(stream->at.hash);
  return QKV_OK;
}

static qkv_status end_object(put_stream *stream, qkv_error *error) {
  put_object *at = &stream->at;
  const uint64_t checksum = XXH3_64bits_digest(at->hash);
  bool existing = false;
  if (at->checksum != 0 && at->checksum != checksum)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "object %s: checksum is %016" PRIx64 ", that of its bytes %016" PRIx64,
                    qkvi_object_config_of(at->object)->name, at->checksum, checksum);
  QKV_TRY(qkvi_object_publish(stream->daemon->objects, stream->call, at->object, checksum, at->replace, &existing,
                              error));
  stream->objects++;
  stream->existing += existing;
  qkvi_object_unref(stream->daemon->objects, &at->object);
  (void)XXH3_freeState(at->hash);
  *at = (put_object){0};
  return QKV_OK;
}

static qkv_status take_data(put_stream *stream, qkv_bytes data, qkv_error *error) {
  put_object *at = &stream->at;
  if (at->object == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "data has %zu bytes, no object begins", data.length);
  const qkvi_object_config *config = qkvi_object_config_of(at->object);
  if (data.length > config->bytes - at->held)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "data has %zu bytes, object %s has %" PRIu64 " to come", data.length,
                    config->name, config->bytes - at->held);
  for (size_t done = 0; done < data.length;) {
    const size_t part = (size_t)(at->held / QKVI_OBJECT_PART), inside = (size_t)(at->held % QKVI_OBJECT_PART);
    const size_t size = (size_t)qkvi_object_part_bytes(at->object, part);
    const size_t more = size - inside < data.length - done ? size - inside : data.length - done;
    if (at->part == NULL) QKV_TRY(take_block(stream, size, &at->part, error));
    qkv_bytes_copy(data, done, more, at->part + inside);
    (void)XXH3_64bits_update(at->hash, at->part + inside, more);
    if (inside + more == size) {
      qkvi_object_fill(stream->daemon->objects, at->object, part, at->part);
      at->part = NULL;
    }
    at->held += more;
    done += more;
  }
  qkv_metric_add(&stream->daemon->metrics[QKV_METRIC_OBJECT_PUT_BYTES], (int64_t)data.length);
  return at->held == config->bytes ? end_object(stream, error) : QKV_OK;
}

// ---- Messages ----

static qkv_status apply_piece(void *context, const qkvi_put_piece *piece, qkv_error *error) {
  put_stream *stream = context;
  if (piece->begin != NULL && begin_object(stream, piece->begin, piece->replace, error) != QKV_OK)
    return qkv_error_prefix(error, "begin: ");
  return piece->data.length > 0 ? take_data(stream, piece->data, error) : QKV_OK;
}

static void fail(put_stream *stream, const qkv_error *error) {
  drop_object(stream);
  qkvi_control_fail(stream->call, error);
}

static void apply_job(void *context);

static void submit(put_stream *stream) {
  qkv_error error = {0};
  const qkv_work work = qkvi_work_of(qkvi_session_waits(stream->call) | QKVI_WAIT_MEMORY, true);
  if (qkvi_job_try(stream->call, work, apply_job, stream, &error) != QKV_OK) fail(stream, &error);
}

// A message may have a million objects: other jobs run in between, and a client that has gone is noticed.
static void apply_job(void *context) {
  put_stream *stream = context;
  qkv_error error = {0};
  if (!qkvi_job_wanted(stream->call)) return;
  const int64_t until = qkv_now_ms() + TURN_MS;
  for (bool more = true; more;) {
    if (qkvi_put_pieces_next(&stream->pieces, apply_piece, stream, &more, &error) != QKV_OK)
      return fail(stream, &error);
    if (more && qkv_now_ms() >= until) return submit(stream);
  }
  qkv_rpc_next(stream->call);
}

static put_stream *stream_of(qkv_rpc_call *call) {
  put_stream *stream = qkv_rpc_state(call);
  if (stream != NULL) return stream;
  stream = calloc(1, sizeof *stream);
  if (stream == NULL) abort();
  stream->call = call;
  stream->daemon = qkv_rpc_context(call);
  qkv_rpc_set_state(call, stream);
  return stream;
}

static void on_message(qkv_rpc_call *call, qkv_bytes message) {
  put_stream *stream = stream_of(call);
  qkvi_put_pieces_init(&stream->pieces, message);
  submit(stream);
}

static void on_end(qkv_rpc_call *call) {
  put_stream *stream = stream_of(call);
  if (stream->at.object != NULL) {
    qkv_error error = {0};
    const qkvi_object_config *config = qkvi_object_config_of(stream->at.object);
    (void)qkv_fail(&error, QKV_FAILED_PRECONDITION,
                   "object %s has %" PRIu64 " of its %" PRIu64 " bytes: it is dropped", config->name, stream->at.held,
                   config->bytes);
    drop_object(stream);
    return qkvi_control_fail(call, &error);
  }
  Qkv__V1__PutObjectsResponse response = QKV__V1__PUT_OBJECTS_RESPONSE__INIT;
  response.objects = stream->objects;
  response.existing = stream->existing;
  qkvi_control_reply(call, &response.base);
}

static void destroy(void *state) {
  put_stream *stream = state;
  if (stream == NULL) return;
  drop_object(stream);  // the client has gone
  free(stream);
}

const qkv_rpc_method qkvi_put_objects_methods[] = {
    {.path = "/qkv.v1.Objects/PutObjects", .message = on_message, .end = on_end, .destroy = destroy}, {0}};
