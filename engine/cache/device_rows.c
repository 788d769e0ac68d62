#include "engine/cache/device_rows.h"

#include <assert.h>
#include <string.h>

#include "engine/codec/embedded_internal.h"
#include "engine/kernel/encode_plain.h"
#include "engine/kernel/plain.h"

_Static_assert((int)QKV_SIMT_TIERS == QKV_TIER_MAX + 1 && (int)QKV_SIMT_DEPTHS == QKV_DEPTH_MAX + 1, "schedules");
_Static_assert((int)QKV_SIMT_ROW_TURNS == (int)QKV_PHASES_ROW_TURNS, "turns");
_Static_assert(sizeof(qkv_simt_code) % 16 == 0, "code");

bool qkv_device_takes_rows(const qkv_coder *coder) {
  return coder->codec == &qkvi_codec_embedded && coder->key_dim <= QKV_SIMT_ROWS_DIM_MAX &&
         coder->value_dim <= QKV_SIMT_ROWS_DIM_MAX;
}

// ---- Codes ----

// Of one of the transform's matrices and the mean; 0: Hadamard.
static size_t matrix_bytes(const qkv_transform *transform) {
  const size_t dim = transform->schedule->dim;
  return transform->analysis == NULL ? 0 : dim * dim * sizeof(int16_t) + 2 * dim * sizeof(float);
}

// By input, so that threads of neighbouring outputs read neighbouring words; then scales and the mean.
static void fill_matrix(const qkv_transform *transform, const qkv_dense *matrix, uint8_t *to) {
  int16_t *words = (int16_t *)(void *)to;
  const size_t dim = matrix->dim;
  float *scales = (float *)(void *)(words + dim * dim);
  assert(matrix->outputs == dim);
  for (size_t output = 0; output < dim; output++) {
    const int16_t *block = matrix->words + output / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * dim;
    for (size_t input = 0; input < dim; input++)
      words[input * dim + output] =
          block[(input / 2 * QKVI_DENSE_OUTPUTS + output % QKVI_DENSE_OUTPUTS) * 2 + input % 2];
  }
  memcpy(scales, matrix->scales, dim * sizeof *scales);
  memcpy(scales + dim, transform->mean, dim * sizeof *scales);
}

static const float *steps_of(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  return part == QKV_V ? qkv_embedded(coder)->heads[kv_head].outlier_steps : NULL;
}

size_t qkv_device_code_bytes(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[part];
  const size_t steps = steps_of(coder, kv_head, part) == NULL ? 0 : transform->schedule->dim * sizeof(float);
  return (sizeof(qkv_simt_code) + matrix_bytes(transform) + steps + 15) / 16 * 16;
}

static void fill_signs(size_t dim, uint32_t signs[32]) {
  uint64_t state = dim;
  for (size_t word = 0; word * 64 < dim; word++) {
    const uint64_t bits = splitmix64(&state);
    signs[2 * word] = (uint32_t)bits;
    signs[2 * word + 1] = (uint32_t)(bits >> 32);
  }
}

static void fill_pairs(const qkv_coder *coder, qkv_simt_code *code) {
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  if (phases == NULL) return;
  const qkv_rope *rope = qkv_phases_rope(phases);
  code->pairs = (uint16_t)(rope->width / 2);
  code->step = rope->interleaved ? 2 : 1;
  code->apart = (uint16_t)(qkv_rope_second(rope, 0) - qkv_rope_first(rope, 0));
}

// What rows to be decoded and rows to be encoded need alike.
static void fill_head(const qkv_coder *coder, uint16_t kv_head, qkv_part part, qkv_simt_code *code) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  const size_t dim = head->transforms[part]->schedule->dim;
  code->dim = (uint16_t)dim;
  code->key_dim = coder->key_dim;
  code->value_dim = coder->value_dim;
  code->coded = (uint16_t)qkvi_coded_most(coder, kv_head, part);
  fill_pairs(coder, code);
  fill_signs(dim, code->signs);
  memcpy(code->reach, head->schedules[part]->reach, sizeof code->reach);
  for (qkv_part of = QKV_K; of <= QKV_V; of++)
    memcpy(code->bytes[of], head->schedules[of]->group_bytes, sizeof code->bytes[of]);
}

void qkv_device_fill_code(const qkv_coder *coder, uint16_t kv_head, qkv_part part, void *to) {
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[part];
  const float *steps = steps_of(coder, kv_head, part);
  const size_t dim = transform->schedule->dim;
  uint8_t *next = (uint8_t *)to + sizeof(qkv_simt_code);
  qkv_simt_code *code = to;
  memset(to, 0, qkv_device_code_bytes(coder, kv_head, part));
  fill_head(coder, kv_head, part, code);
  if (transform->synthesis != NULL) {
    code->synthesis = (uint32_t)(next - (uint8_t *)to);
    fill_matrix(transform, transform->backward, next);
    next += matrix_bytes(transform);
  }
  if (steps != NULL) {
    code->outlier_steps = (uint32_t)(next - (uint8_t *)to);
    memcpy(next, steps, dim * sizeof *steps);
  }
}

// ---- Encoding ----

size_t qkv_device_encoder_bytes(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  const qkv_transform *transform = qkv_embedded(coder)->heads[kv_head].transforms[part];
  const size_t dim = transform->schedule->dim;
  size_t bytes = sizeof(qkv_simt_code) + matrix_bytes(transform);
  if (transform->weights != NULL) bytes += (4 + dim + dim / 4) * sizeof(float);
  return (bytes + 15) / 16 * 16;
}

// As weigh_coordinates of engine/kernel/encode_plain.h makes them.
static void fill_weights(const qkv_transform *transform, unsigned tier, float *to) {
  const size_t dim = transform->schedule->dim;
  row_weights made;
  weigh_coordinates(transform->schedule->reach[tier], transform->weights, &made);
  to[0] = made.sum;
  memcpy(to + 4, transform->weights, dim * sizeof *to);
  memcpy(to + 4 + dim, made.fours, transform->schedule->reach[tier][1] / 4 * sizeof *to);
}

void qkv_device_fill_encoder(const qkv_coder *coder, uint16_t kv_head, qkv_part part, void *to) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[kv_head];
  const qkv_transform *transform = head->transforms[part];
  uint8_t *next = (uint8_t *)to + sizeof(qkv_simt_code);
  qkv_simt_code *code = to;
  memset(to, 0, qkv_device_encoder_bytes(coder, kv_head, part));
  fill_head(coder, kv_head, part, code);
  if (transform->analysis != NULL) {
    code->analysis = (uint32_t)(next - (uint8_t *)to);
    fill_matrix(transform, transform->forward, next);
    next += matrix_bytes(transform);
  }
  if (transform->weights != NULL) {
    code->weights = (uint32_t)(next - (uint8_t *)to);
    fill_weights(transform, head->tiers[part], (float *)(void *)next);
  }
}

uint32_t qkv_device_encode_flags(const qkv_coder *coder, qkv_part part) {
  const qkv_frame frame = qkv_embedded(coder)->frame;
  if (part == QKV_V || frame == QKV_FRAME_PLAIN) return 0;
  return frame == QKV_FRAME_ATTEND ? QKV_SIMT_ROWS_FRAME : QKV_SIMT_ROWS_TURN;
}

// ---- Turns ----

uint32_t qkv_device_row_flags(const qkv_coder *coder, qkv_part part, bool before_rope) {
  const qkv_embedded_coder *own = qkv_embedded(coder);
  if (part == QKV_V || own->phases == NULL) return 0;
  if (own->frame == QKV_FRAME_ARCHIVE)
    return before_rope ? QKV_SIMT_ROWS_TURN_KEPT | QKV_SIMT_ROWS_BACK : QKV_SIMT_ROWS_TURN;
  return (own->frame == QKV_FRAME_ATTEND ? QKV_SIMT_ROWS_FRAME : 0) |
         (before_rope ? QKV_SIMT_ROWS_TURN | QKV_SIMT_ROWS_TURN_KEPT | QKV_SIMT_ROWS_BACK : 0);
}

static size_t pairs_of(const qkv_coder *coder) {
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  return phases == NULL ? 0 : qkv_phases_rope(phases)->width / 2;
}

size_t qkv_device_turn_floats(const qkv_coder *coder) {
  return QKV_SIMT_ROW_TURNS * pairs_of(coder);
}

size_t qkv_device_slot_floats(const qkv_coder *coder) {
  return (size_t)2 * QKV_PAGE_TOKENS * pairs_of(coder);
}

bool qkv_device_slots_steady(const qkv_coder *coder, uint64_t position) {
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  return phases == NULL || qkv_phases_steady(phases, position);
}

void qkv_device_fill_turns(const qkv_coder *coder, uint16_t kv_head, uint64_t position, bool before_rope,
                           float *turns) {
  const qkv_embedded_coder *own = qkv_embedded(coder);
  const bool framed = own->frame == QKV_FRAME_ATTEND;
  qkv_phases_row_turns(own->phases, framed ? own->heads[kv_head].transforms[QKV_K] : NULL, position, before_rope,
                       turns);
}

void qkv_device_fill_slots(const qkv_coder *coder, uint64_t position, float *slots) {
  qkv_phases_slot_turns(qkv_embedded(coder)->phases, position, slots, slots + QKV_PAGE_TOKENS * pairs_of(coder));
}
