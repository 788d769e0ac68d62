#include "client/cli/target.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/message.h"
#include "client/cli/cli.h"
#include "client/cli/held.h"
#include "client/common/interrupt.h"
#include "engine/codec/page.h"

// Pages of one message: small enough for any daemon's limit-message, large enough to be quick.
enum { PAGES_MAX = 1024, MESSAGE_BYTES = 4 << 20 };

struct qkvctl_target {
  qkvctl_target_config config;
  uint64_t *lengths;  // [layers]
  size_t layers;
  qkv_client_page pages[PAGES_MAX];  // of one layer, that wait to be sent
  size_t count;
  uint8_t *images;
  size_t bytes, capacity;
  uint64_t brought[64];  // hashes of calibrations
  size_t brought_count;
  qkvctl_target_totals totals;
};

static void fail(qkv_call_error *error, qkv_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

static void fail(qkv_call_error *error, qkv_code code, const char *format, ...) {
  va_list arguments;
  error->code = code;
  va_start(arguments, format);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
}

qkv_code qkvctl_interrupted(qkv_call_error *error) {
  if (!qkv_interrupted()) return 0;
  fail(error, QKV_CANCELLED, "interrupted");
  return QKV_CANCELLED;
}

int qkvctl_incomplete(const qkv_call_error *error, const char *session) {
  return qkv_program_failed(
      "%s (what has arrived stays in session %.128s of the target; the same command goes on from there)", error->text,
      session);
}

// ---- The model ----

static qkv_code register_model(qkvctl_target *target, const Qkv__V1__Model *model, qkv_call_error *error) {
  Qkv__V1__RegisterModelRequest request = QKV__V1__REGISTER_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.model = (Qkv__V1__Model *)(uintptr_t)model;
  const qkv_code code = qkv_client_call_message(target->config.client, "/qkv.v1.KvCache/RegisterModel", &request.base,
                                                &qkv__v1__register_model_response__descriptor, &answer, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static bool same_message(const ProtobufCMessage *a, const ProtobufCMessage *b) {
  if (a == NULL || b == NULL) return a == b;
  const size_t bytes = protobuf_c_message_get_packed_size(a);
  if (protobuf_c_message_get_packed_size(b) != bytes) return false;
  uint8_t *packed = malloc(2 * bytes + 1);
  assert(packed != NULL);
  (void)protobuf_c_message_pack(a, packed);
  (void)protobuf_c_message_pack(b, packed + bytes);
  const bool same = memcmp(packed, packed + bytes, bytes) == 0;
  free(packed);
  return same;
}

// What pages depend on. The session brings its policy, so that of the model may differ, but for the layers' own.
static bool same_model(const Qkv__V1__Model *a, const Qkv__V1__Model *b) {
  bool same = a->layers == b->layers && a->kv_heads == b->kv_heads && a->q_heads == b->q_heads &&
              a->key_dim == b->key_dim && a->value_dim == b->value_dim && a->dtype == b->dtype &&
              a->n_overrides == b->n_overrides &&
              same_message(a->rope == NULL ? NULL : &a->rope->base, b->rope == NULL ? NULL : &b->rope->base);
  for (size_t i = 0; i < a->n_overrides && same; i++)
    same = same_message(&a->overrides[i]->base, &b->overrides[i]->base);
  return same;
}

static qkv_code find_model(qkvctl_target *target, qkv_call_error *error) {
  const Qkv__V1__Model *model = target->config.model;
  Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.name = model->name;
  qkv_code code = qkv_client_call_message(target->config.client, "/qkv.v1.KvCache/GetModel", &request.base,
                                          &qkv__v1__get_model_response__descriptor, &answer, error);
  if (code == QKV_NOT_FOUND) return register_model(target, model, error);
  if (code != 0) return code;
  const Qkv__V1__Model *there = ((const Qkv__V1__GetModelResponse *)answer)->model;
  if (there == NULL || !same_model(model, there)) {
    fail(error, QKV_ALREADY_EXISTS, "the target has another model %s", model->name);
    code = QKV_ALREADY_EXISTS;
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

// ---- The session ----

static qkv_code open_session(qkvctl_target *target, ProtobufCMessage **answer, qkv_call_error *error) {
  const Qkv__V1__SessionInfo *info = target->config.info;
  Qkv__V1__OpenSessionRequest request = QKV__V1__OPEN_SESSION_REQUEST__INIT;
  request.session = (char *)(uintptr_t)target->config.session;
  request.model = target->config.model->name;
  if (target->config.salt != NULL) {
    request.salt.data = (uint8_t *)(uintptr_t)target->config.salt;
    request.salt.len = strlen(target->config.salt);
  }
  request.purpose = info->purpose;
  request.policy = info->policy;
  request.first_position = info->first_position;
  request.durability = (Qkv__V1__Durability)target->config.durability;
  request.max_attention_error = info->max_attention_error;
  request.ttl_ms = info->ttl_ms;
  request.tier_bits_set_case = QKV__V1__OPEN_SESSION_REQUEST__TIER_BITS_SET_TIER_BITS;
  request.tier_bits = info->tier_bits;
  request.keep_full_set_case = QKV__V1__OPEN_SESSION_REQUEST__KEEP_FULL_SET_KEEP_FULL;
  request.keep_full = info->keep_full;
  request.retention = info->retention;
  return qkv_client_call_message(target->config.client, "/qkv.v1.KvCache/OpenSession", &request.base,
                                 &qkv__v1__open_session_response__descriptor, answer, error);
}

static bool same_session(const Qkv__V1__SessionInfo *a, const Qkv__V1__SessionInfo *b) {
  return strcmp(a->model, b->model) == 0 && a->purpose == b->purpose && a->first_position == b->first_position &&
         a->policy != NULL && b->policy != NULL && same_message(&a->policy->base, &b->policy->base);
}

static bool same_root(const ProtobufCBinaryData *a, const ProtobufCBinaryData *b) {
  return a->len > 0 && a->len == b->len && memcmp(a->data, b->data, a->len) == 0;
}

// `opened`: this program has opened it, so that it is empty.
static qkv_code take_session(qkvctl_target *target, const Qkv__V1__SessionInfo *there, bool opened,
                             qkv_call_error *error) {
  if (there == NULL || !same_session(target->config.info, there) ||
      there->n_lengths != target->config.model->layers) {
    fail(error, QKV_ALREADY_EXISTS, "the target has another session %s, of another model, purpose or policy",
         target->config.session);
    return QKV_ALREADY_EXISTS;
  }
  target->layers = there->n_lengths;
  target->lengths = calloc(target->layers + 1, sizeof *target->lengths);
  assert(target->lengths != NULL);
  memcpy(target->lengths, there->lengths, target->layers * sizeof *target->lengths);
  const qkvctl_held held = {.lengths = target->lengths,
                            .layers = target->layers,
                            .same_root = same_root(&there->prefix_root, &target->config.info->prefix_root)};
  const qkv_code code = opened ? 0 : qkvctl_held_check(&target->config, &held, error);
  if (!held.same_root) target->config.token_count = 0;
  return code;
}

static qkv_code find_session(qkvctl_target *target, qkv_call_error *error) {
  Qkv__V1__GetSessionRequest request = QKV__V1__GET_SESSION_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = (char *)(uintptr_t)target->config.session;
  qkv_code code = qkv_client_call_message(target->config.client, "/qkv.v1.KvCache/GetSession", &request.base,
                                          &qkv__v1__session_info__descriptor, &answer, error);
  const Qkv__V1__SessionInfo *there = (const Qkv__V1__SessionInfo *)answer;
  const bool absent = code == QKV_NOT_FOUND;
  if (absent) {
    code = open_session(target, &answer, error);
    there = code == 0 ? ((const Qkv__V1__OpenSessionResponse *)answer)->info : NULL;
  }
  if (code == 0) code = take_session(target, there, absent, error);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

qkv_code qkvctl_target_open(const qkvctl_target_config *config, qkvctl_target **out, qkv_call_error *error) {
  qkvctl_target *target = calloc(1, sizeof *target);
  assert(target != NULL);
  target->config = *config;
  qkv_code code = find_model(target, error);
  if (code == 0) code = find_session(target, error);
  if (code != 0) qkvctl_target_close(&target);
  *out = target;
  return code;
}

void qkvctl_target_close(qkvctl_target **target) {
  qkvctl_target *left = *target;
  if (left == NULL) return;
  *target = NULL;
  free(left->lengths);
  free(left->images);
  free(left);
}

uint64_t qkvctl_target_length(const qkvctl_target *target, uint32_t layer) {
  assert(layer < target->layers);
  return target->lengths[layer];
}

// ---- Calibrations ----

static bool was_brought(const qkvctl_target *target, uint64_t hash) {
  size_t i = 0;
  while (i < target->brought_count && target->brought[i] != hash) i++;
  return i < target->brought_count;
}

static qkv_code bring(qkvctl_target *target, uint32_t version, uint64_t hash, qkv_call_error *error) {
  Qkv__V1__Model model = *target->config.model;
  uint8_t *bytes = NULL;
  size_t count = 0;
  qkv_code code = target->config.calibration(target->config.context, version, &bytes, &count, error);
  if (code == 0) {
    // Of the model as the target has it: its policy may be another one.
    Qkv__V1__GetModelRequest request = QKV__V1__GET_MODEL_REQUEST__INIT;
    ProtobufCMessage *answer = NULL;
    request.name = model.name;
    code = qkv_client_call_message(target->config.client, "/qkv.v1.KvCache/GetModel", &request.base,
                                   &qkv__v1__get_model_response__descriptor, &answer, error);
    const Qkv__V1__Model *there = code == 0 ? ((const Qkv__V1__GetModelResponse *)answer)->model : NULL;
    if (there != NULL) {
      model = *there;
      model.calibration.data = bytes;
      model.calibration.len = count;
      model.calibration_kept = true;
      code = register_model(target, &model, error);
    } else if (code == 0) {
      code = QKV_INTERNAL;
      fail(error, code, "the target does not describe model %s", target->config.model->name);
    }
    if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  }
  free(bytes);
  if (code == 0) target->brought[target->brought_count++ % 64] = hash;
  if (target->brought_count > 64) target->brought_count = 64;
  return code;
}

// Brings the calibrations of the waiting pages that were not brought yet. False where all of them were.
static bool bring_missing(qkvctl_target *target, qkv_code *code, qkv_call_error *error) {
  bool any = false;
  *code = 0;
  for (size_t i = 0; i < target->count && *code == 0; i++) {
    qkv_page_header header;
    const uint64_t hash = target->pages[i].calibration_hash;
    memcpy(&header, target->pages[i].image, sizeof header);
    if (hash == 0 || was_brought(target, hash)) continue;
    *code = bring(target, header.calibration, hash, error);
    any = true;
  }
  return any;
}

// ---- Pages and rows ----

static qkv_code append(qkvctl_target *target, const qkv_client_item *item, qkv_call_error *error) {
  uint64_t appended = 0;
  const qkv_code code = qkv_client_append(target->config.client, item, 1, &appended, error);
  target->totals.tokens += appended;
  return code;
}

// The ids of [position, position + tokens), or NULL where some are not known.
static const uint32_t *ids_of(const qkvctl_target *target, uint64_t position, uint64_t tokens) {
  const uint64_t known = target->config.token_count;
  return position < known && tokens <= known - position ? target->config.token_ids + position : NULL;
}

qkv_code qkvctl_target_flush(qkvctl_target *target, qkv_call_error *error) {
  qkv_code code = 0;
  if (target->count == 0) return 0;
  const uint8_t *at = target->images;
  uint64_t tokens = 0;
  for (size_t i = 0; i < target->count; i++) {
    tokens += target->pages[i].tokens;
    target->pages[i].image = at;
    at += target->pages[i].bytes;
  }
  const qkv_client_item item = {.session = target->config.session,
                                .layer = target->pages[0].layer,
                                .position = target->pages[0].position,
                                .token_ids = ids_of(target, target->pages[0].position, tokens),
                                .pages = target->pages,
                                .page_count = target->count};
  code = append(target, &item, error);
  qkv_code brought = 0;
  if (code == QKV_FAILED_PRECONDITION && bring_missing(target, &brought, error))
    code = brought != 0 ? brought : append(target, &item, error);
  target->totals.pages += target->count;
  target->totals.bytes += target->bytes;
  target->count = target->bytes = 0;
  return code;
}

// Whether it is what comes next. Where the target's rows are exact they cannot be replaced by a page.
static qkv_code check_place(const qkvctl_target *target, uint32_t layer, uint64_t position, uint64_t tokens,
                            qkv_call_error *error) {
  const uint64_t length = layer < target->layers ? target->lengths[layer] : 0;
  if (layer < target->layers && position == length && tokens > 0) return 0;
  fail(error, QKV_FAILED_PRECONDITION,
       "layer %" PRIu32 " of the target ends at position %" PRIu64 ", the next page begins at %" PRIu64
       "; truncate the target to %" PRIu64 " and copy again",
       layer, length, position, position < length ? position : length);
  return QKV_FAILED_PRECONDITION;
}

qkv_code qkvctl_target_page(qkvctl_target *target, const qkv_client_page *page, qkv_call_error *error) {
  qkv_code code = check_place(target, page->layer, page->position, page->tokens, error);
  const bool full = target->count == PAGES_MAX || target->bytes + page->bytes > MESSAGE_BYTES ||
                    (target->count > 0 && target->pages[0].layer != page->layer) ||
                    (target->count > 0 && target->pages[0].position < target->config.token_count &&
                     page->position + page->tokens > target->config.token_count);
  if (code == 0 && full) code = qkvctl_target_flush(target, error);
  if (code != 0) return code;
  if (target->bytes + page->bytes > target->capacity) {
    target->capacity = target->bytes + page->bytes + MESSAGE_BYTES;
    target->images = realloc(target->images, target->capacity);
    assert(target->images != NULL);
  }
  memcpy(target->images + target->bytes, page->image, page->bytes);
  target->pages[target->count++] = *page;
  target->bytes += page->bytes;
  target->lengths[page->layer] += page->tokens;
  return 0;
}

static void leave_out(qkv_client_tensor *rows, uint64_t tokens) {
  const size_t skipped = rows->bytes / (size_t)rows->dims[0] * (size_t)tokens;
  rows->data = (const uint8_t *)rows->data + skipped;
  rows->bytes -= skipped;
  rows->dims[0] -= (int64_t)tokens;
}

// Rows that an earlier attempt has brought are skipped.
qkv_code qkvctl_target_rows(qkvctl_target *target, const qkv_client_rows *given, qkv_call_error *error) {
  qkv_client_rows left = *given, *rows = &left;
  qkv_code code = qkvctl_target_flush(target, error);
  if (code == 0 && (rows->k.rank != 3 || rows->v.rank != 3 || rows->k.dims[0] != rows->v.dims[0])) {
    code = QKV_INTERNAL;
    fail(error, code, "layer %" PRIu32 ": keys and values of position %" PRIu64 " do not belong together",
         rows->layer, rows->position);
  }
  if (code != 0) return code;
  const uint64_t length = rows->layer < target->layers ? target->lengths[rows->layer] : 0;
  if (rows->position < length && length - rows->position < (uint64_t)rows->k.dims[0]) {
    leave_out(&rows->k, length - rows->position);
    leave_out(&rows->v, length - rows->position);
    rows->position = length;
  }
  const uint64_t tokens = (uint64_t)rows->k.dims[0];
  if (code == 0) code = check_place(target, rows->layer, rows->position, tokens, error);
  if (code != 0) return code;
  const qkv_client_item item = {.session = target->config.session,
                                .layer = rows->layer,
                                .position = rows->position,
                                .token_ids = ids_of(target, rows->position, tokens),
                                .k = rows->k,
                                .v = rows->v};
  target->lengths[rows->layer] += tokens;
  target->totals.bytes += rows->k.bytes + rows->v.bytes;
  return append(target, &item, error);
}

qkvctl_target_totals qkvctl_target_totals_of(const qkvctl_target *target) {
  return target->totals;
}
