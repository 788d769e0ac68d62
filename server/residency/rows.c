#include "server/residency/rows.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

#include "engine/cache/session_spill.h"
#include "server/auth/identity.h"
#include "server/metrics.h"

#define ROWS_MAGIC UINT64_C(0x0053574f52564b51)  // "QKVROWS\0"

enum { ROWS_VERSION = 1, ROWS_VERSION_IDS = 2 };

typedef struct rows_header {
  uint64_t magic;
  uint16_t version, dtype;
  uint32_t kv_heads, key_dim, value_dim;
  uint64_t position;
  uint32_t tokens, layer;
} rows_header;

_Static_assert(sizeof(rows_header) == 40, "the header is 40 bytes without padding");

static uint64_t token_bytes(const qkv_model *model, uint32_t dim) {
  return (uint64_t)model->kv_heads * dim * qkv_dtype_size(model->dtype);
}

// Where the ids are.
static uint64_t rows_end(const qkv_model *model, uint32_t tokens) {
  return sizeof(rows_header) + tokens * (token_bytes(model, model->key_dim) + token_bytes(model, model->value_dim));
}

static uint64_t payload_bytes(const qkv_model *model, uint32_t tokens, bool has_ids) {
  return rows_end(model, tokens) + (has_ids ? tokens * sizeof(uint32_t) : 0);
}

uint64_t qkvi_rows_put(void *context, uint64_t session, const qkv_model *model, uint32_t layer, uint64_t position,
                       uint32_t *taken, const void *k, const void *v, const uint32_t *ids) {
  const qkvi_backing *backing = context;
  const uint64_t record_max = qkv_storage_record_bytes_max(backing->residency->storage);
  if (qkvi_write_back_refuses(backing->residency, session)) return 0;
  while (*taken > 1 && payload_bytes(model, *taken, ids != NULL) > record_max) *taken -= 1;
  const uint32_t tokens = *taken;
  const uint64_t bytes = payload_bytes(model, tokens, ids != NULL), ids_at = rows_end(model, tokens);
  const uint64_t k_bytes = tokens * token_bytes(model, model->key_dim);
  const rows_header header = {.magic = ROWS_MAGIC,
                              .version = ids != NULL ? ROWS_VERSION_IDS : ROWS_VERSION,
                              .dtype = (uint16_t)model->dtype,
                              .kv_heads = model->kv_heads,
                              .key_dim = model->key_dim,
                              .value_dim = model->value_dim,
                              .position = position,
                              .tokens = tokens,
                              .layer = layer};
  uint8_t *payload = malloc(bytes);
  if (payload == NULL) abort();
  memcpy(payload, &header, sizeof header);
  memcpy(payload + sizeof header, k, k_bytes);
  memcpy(payload + sizeof header + k_bytes, v, ids_at - sizeof header - k_bytes);
  if (ids != NULL) memcpy(payload + ids_at, ids, tokens * sizeof *ids);
  const qkv_record_meta meta = {
      .session = session, .position = position, .layer = layer, .tokens = tokens, .kind = QKVI_RECORD_ROWS};
  const uint64_t record = qkvi_write_back_put(backing, &meta, &(qkvi_payload){.copy = payload}, bytes);
  if (record != 0) qkv_metric_add(&backing->residency->metrics[QKV_METRIC_SPILL_ROW_RECORDS], 1);
  return record;
}

// ---- Found again ----

typedef struct found_record {
  uint64_t record;
  uint64_t sessions;  // that it was reported for
  bool needed;        // by one of them
  UT_hash_handle hh;
} found_record;

// Of one layer of one session, in the order of positions.
typedef struct found_piece {
  qkv_record_info info;
  uint64_t ids_end;
  struct found_piece *next;
} found_piece;

typedef struct layer_key {
  uint64_t session;
  uint64_t layer;
} layer_key;

typedef struct found_layer {
  layer_key key;
  found_piece *first, *last;
  UT_hash_handle hh;
} found_layer;

struct qkvi_found_rows {
  found_record *records;
  found_layer *layers;
};

qkvi_found_rows *qkvi_found_rows_create(void) {
  qkvi_found_rows *found = calloc(1, sizeof *found);
  if (found == NULL) abort();
  return found;
}

void qkvi_found_rows_destroy(qkvi_found_rows **found) {
  // Clearing frees the tables alone; the entries stay linked.
  found_record *record = (*found)->records, *next_record;
  HASH_CLEAR(hh, (*found)->records);
  for (; record != NULL; record = next_record) {
    next_record = record->hh.next;
    free(record);
  }
  found_layer *layer = (*found)->layers, *next_layer;
  HASH_CLEAR(hh, (*found)->layers);
  for (; layer != NULL; layer = next_layer) {
    next_layer = layer->hh.next;
    for (found_piece *piece = layer->first, *next; piece != NULL; piece = next) {
      next = piece->next;
      free(piece);
    }
    free(layer);
  }
  free(*found);
  *found = NULL;
}

static found_record *find_record(const qkvi_found_rows *found, uint64_t record) {
  found_record *there;
  HASH_FIND(hh, found->records, &record, sizeof record, there);
  return there;
}

static found_layer *find_layer(const qkvi_found_rows *found, uint64_t session, uint32_t layer) {
  const layer_key key = {.session = session, .layer = layer};
  found_layer *there;
  // NOLINTNEXTLINE(clang-analyzer-core.UndefinedBinaryOperatorResult): the key has no padding
  HASH_FIND(hh, found->layers, &key, sizeof key, there);
  return there;
}

static void count_record(qkvi_found_rows *found, uint64_t record) {
  found_record *there = find_record(found, record);
  if (there == NULL) {
    there = calloc(1, sizeof *there);
    if (there == NULL) abort();
    there->record = record;
    HASH_ADD(hh, found->records, record, sizeof there->record, there);
  }
  there->sessions++;
}

void qkvi_found_rows_add(qkvi_found_rows *found, const qkv_record_info *info, uint64_t ids_end) {
  found_layer *layer = find_layer(found, info->meta.session, info->meta.layer);
  if (layer == NULL) {
    layer = calloc(1, sizeof *layer);
    if (layer == NULL) abort();
    layer->key = (layer_key){.session = info->meta.session, .layer = info->meta.layer};
    HASH_ADD(hh, found->layers, key, sizeof layer->key, layer);
  }
  found_piece *piece = calloc(1, sizeof *piece);
  if (piece == NULL) abort();
  piece->info = *info;
  piece->ids_end = ids_end;
  *(layer->first == NULL ? &layer->first : &layer->last->next) = piece;
  layer->last = piece;
  count_record(found, info->record);
}

static qkv_status check_header(const rows_header *header, const qkv_model *model, const qkv_record_info *info,
                               qkv_error *error) {
  if (header->magic != ROWS_MAGIC || header->version < ROWS_VERSION || header->version > ROWS_VERSION_IDS)
    return qkv_fail(error, QKV_DATA_LOSS, "they are of another version");
  if (header->dtype != model->dtype || header->kv_heads != model->kv_heads || header->key_dim != model->key_dim ||
      header->value_dim != model->value_dim)
    return qkv_fail(error, QKV_DATA_LOSS, "they are of another model");
  if (header->position != info->meta.position || header->layer != info->meta.layer || header->tokens < 1 ||
      header->tokens > QKV_PAGE_TOKENS || header->tokens < info->meta.tokens ||
      payload_bytes(model, header->tokens, header->version == ROWS_VERSION_IDS) != info->bytes)
    return qkv_fail(error, QKV_DATA_LOSS, "they are not of this place");
  return QKV_OK;
}

// NULL, with *error filled, where it cannot be read. The caller frees it.
static uint8_t *read_payload(qkv_storage *storage, const qkv_model *model, const qkv_record_info *info,
                             qkv_error *error) {
  if (info->bytes < sizeof(rows_header) || info->bytes > payload_bytes(model, QKV_PAGE_TOKENS, true)) {
    (void)qkv_fail(error, QKV_DATA_LOSS, "they are not of this model");
    return NULL;
  }
  rows_header header;
  uint8_t *payload = malloc(info->bytes);
  if (payload == NULL) abort();
  qkv_storage_batch *batch = qkv_storage_batch_create(storage, &info->record, 1, 0);
  qkv_status status = qkv_storage_batch_wait(batch, 0, payload, info->bytes, error);
  qkv_storage_batch_destroy(&batch);
  if (status == QKV_OK) {
    memcpy(&header, payload, sizeof header);
    status = check_header(&header, model, info, error);
  }
  if (status == QKV_OK) return payload;
  free(payload);
  return NULL;
}

// Appends the record's rows [begin, end).
static qkv_status append_rows(qkv_session *session, uint32_t layer, const qkv_record_info *info,
                              const uint8_t *payload, bool shared, uint64_t begin, uint64_t end, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  rows_header header;
  memcpy(&header, payload, sizeof header);
  const uint64_t k_bytes = token_bytes(model, model->key_dim), v_bytes = token_bytes(model, model->value_dim);
  const uint64_t skipped = begin - info->meta.position, tokens = end - begin;
  const uint8_t *k_rows = payload + sizeof header, *v_rows = k_rows + header.tokens * k_bytes;
  const qkv_segment k_bytes_of = {.data = k_rows + skipped * k_bytes, .length = tokens * k_bytes};
  const qkv_segment v_bytes_of = {.data = v_rows + skipped * v_bytes, .length = tokens * v_bytes};
  const int64_t k_dims[] = {(int64_t)tokens, model->kv_heads, model->key_dim};
  const int64_t v_dims[] = {(int64_t)tokens, model->kv_heads, model->value_dim};
  const qkv_tensor k = qkv_tensor_dense(model->dtype, 3, k_dims, &k_bytes_of);
  const qkv_tensor v = qkv_tensor_dense(model->dtype, 3, v_dims, &v_bytes_of);
  return qkv_session_adopt_rows(session, layer, info->record, begin, shared, &k, &v, error);
}

// Keeps the ids of the record's positions below `end`, as far as they continue what the session holds. Without memory
// for them the session is found up to there.
static void keep_ids(qkv_session *session, const qkv_record_info *info, const uint8_t *payload, uint64_t end) {
  qkv_session_tokens *tokens = qkv_session_tokens_of(session);
  const uint64_t position = info->meta.position;
  uint32_t ids[QKV_PAGE_TOKENS];
  rows_header header;
  memcpy(&header, payload, sizeof header);
  if (header.version != ROWS_VERSION_IDS || end <= position) return;
  const size_t count = (size_t)(end - position);
  memcpy(ids, payload + rows_end(qkv_session_model(session), header.tokens), count * sizeof *ids);
  const uint64_t cost = qkv_session_tokens_cost(tokens, position, count);
  if (qkv_arena_reserve(tokens->config.arena, cost, NULL) != QKV_OK) return;
  uint64_t reserved = cost;
  qkv_session_tokens_keep(tokens, qkv_session_tokens_cuts(tokens), position, ids, count, &reserved);
  qkv_arena_unreserve(tokens->config.arena, reserved);
}

static void report_lost(qkv_session *session, uint32_t layer, uint64_t length, const qkv_error *reason) {
  qkv_log(QKV_LOG_WARN, "exact rows of a session cannot be read, it ends before them", "{s:s, s:s*, s:I, s:I, s:s}",
          "session", qkv_session_name(session), "tenant", qkvi_tenant_to_log(qkv_session_config_of(session)->tenant),
          "layer", (json_int_t)layer, "length", (json_int_t)length, "reason", reason->text);
}

// Appends what the record has beyond `*length`, up to `end`.
static qkv_status take_record(qkvi_found_rows *found, qkv_storage *storage, qkv_session *session, uint32_t layer,
                              const found_piece *piece, uint64_t end, uint64_t *length, bool *readable,
                              qkv_error *error) {
  const qkv_record_info *info = &piece->info;
  qkv_error reason = {0};
  uint8_t *payload = read_payload(storage, qkv_session_model(session), info, &reason);
  *readable = payload != NULL;
  if (payload == NULL) {
    report_lost(session, layer, *length, &reason);
    return QKV_OK;
  }
  const bool shared = find_record(found, info->record)->sessions > 1;
  const qkv_status status = append_rows(session, layer, info, payload, shared, *length, end, error);
  if (status == QKV_OK) keep_ids(session, info, payload, end < piece->ids_end ? end : piece->ids_end);
  free(payload);
  if (status == QKV_OK) *length = end;
  return status;
}

qkv_status qkvi_found_rows_take(qkvi_found_rows *found, qkv_storage *storage, qkv_session *session, uint64_t number,
                                uint32_t layer, uint64_t tokens_max, uint64_t *length, uint64_t *beyond,
                                bool *readable, qkv_error *error) {
  const found_layer *there = find_layer(found, number, layer);
  *length = qkv_session_layer_length(session, layer);
  *readable = true;
  const uint64_t most = tokens_max < UINT64_MAX - *length ? *length + tokens_max : UINT64_MAX;
  for (const found_piece *piece = there == NULL ? NULL : there->first; piece != NULL; piece = piece->next) {
    const qkv_record_meta *meta = &piece->info.meta;
    const uint64_t last = meta->position + meta->tokens, end = last < most ? last : most;
    if (last > *beyond) *beyond = last;
    if (end <= *length) continue;
    find_record(found, piece->info.record)->needed = true;
    if (!*readable || meta->position > *length) continue;
    QKV_TRY(take_record(found, storage, session, layer, piece, end, length, readable, error));
  }
  return QKV_OK;
}

// Records of a layer that could not be read stay for the next start.
void qkvi_found_rows_drop(qkvi_found_rows *found, qkv_storage *storage) {
  for (const found_record *record = found->records; record != NULL; record = record->hh.next) {
    if (!record->needed) qkv_storage_drop(storage, record->record);
  }
}
