#include "engine/codec/calibration.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "engine/codec/calibration_internal.h"

static _Atomic uint64_t held;

uint64_t qkv_calibration_memory(const qkv_calibration *calibration) {
  const qkv_calibration_shape *shape = &calibration->shape;
  const size_t heads = (size_t)shape->layers * shape->kv_heads;
  const size_t parts = shape->rope.theta != 0 ? QKV_CALIBRATION_PARTS : QKV_CALIBRATION_PARTS - 1;
  return sizeof *calibration + calibration->size + heads * sizeof(qkvi_head_view) +
         heads * (parts * sizeof(qkv_schedule) + QKVI_DERIVED_KINDS * sizeof *calibration->derived) +
         calibration->whole_bytes + atomic_load_explicit(&calibration->derived_bytes, memory_order_relaxed);
}

void qkvi_calibration_count(const qkv_calibration *calibration, bool more) {
  const uint64_t bytes = qkv_calibration_memory(calibration);
  if (more) {
    (void)atomic_fetch_add_explicit(&held, bytes, memory_order_relaxed);
  } else {
    (void)atomic_fetch_sub_explicit(&held, bytes, memory_order_relaxed);
  }
}

void qkv_calibration_count_for(qkv_calibration *calibration, void (*released)(void *owner, uint64_t bytes),
                               void *owner, uint64_t bytes) {
  assert(calibration->released == NULL);
  calibration->released = released;
  calibration->owner = owner;
  calibration->owned_bytes = bytes;
}

uint64_t qkv_calibration_bytes_held(void) {
  return atomic_load_explicit(&held, memory_order_relaxed);
}

const qkv_calibration *qkv_calibration_ref(const qkv_calibration *calibration) {
  if (calibration == NULL) return NULL;
  // The count is the one thing that changes.
  qkv_calibration *shared = (qkv_calibration *)calibration;
  const uint64_t before = atomic_fetch_add_explicit(&shared->references, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
  return calibration;
}

void qkv_calibration_unref(const qkv_calibration **calibration) {
  qkv_calibration *left = (qkv_calibration *)*calibration;
  *calibration = NULL;
  if (left == NULL || atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) != 1) return;
  qkvi_calibration_count(left, false);
  const size_t heads = (size_t)left->shape.layers * left->shape.kv_heads;
  for (size_t i = 0; i < heads * QKVI_DERIVED_KINDS; i++) free(left->derived[i]);
  free(left->derived);
  free(left->heads);
  free(left->schedules);
  free(left->whole);
  free(left->bytes);
  if (left->released != NULL) left->released(left->owner, left->owned_bytes);
  free(left);
}

const void *qkv_calibration_bytes(const qkv_calibration *calibration, size_t *size) {
  *size = calibration->size;
  return calibration->bytes;
}

uint32_t qkv_calibration_version(const qkv_calibration *calibration) {
  return calibration->version;
}

uint64_t qkv_calibration_hash(const qkv_calibration *calibration) {
  return ((const qkvi_calibration_header *)calibration->bytes)->checksum;
}

uint64_t qkv_calibration_tokens(const qkv_calibration *calibration) {
  return ((const qkvi_calibration_header *)calibration->bytes)->tokens;
}

bool qkv_calibration_archive_refused(const qkv_calibration *calibration) {
  return ((const qkvi_calibration_header *)calibration->bytes)->archive_refused != 0;
}

const qkv_calibration_shape *qkv_calibration_shape_of(const qkv_calibration *calibration) {
  return &calibration->shape;
}

static const qkvi_head_view *head_of(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head) {
  assert(layer < calibration->shape.layers && kv_head < calibration->shape.kv_heads);
  return &calibration->heads[(size_t)layer * calibration->shape.kv_heads + kv_head];
}

const qkv_transform *qkv_calibration_transform(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                               qkv_calibration_part part) {
  return &head_of(calibration, layer, kv_head)->transforms[part];
}

_Atomic(void *) *qkvi_calibration_derived(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                          qkvi_derived kind) {
  assert(layer < calibration->shape.layers && kv_head < calibration->shape.kv_heads);
  return &calibration->derived[((size_t)layer * calibration->shape.kv_heads + kv_head) * QKVI_DERIVED_KINDS + kind];
}

void qkvi_calibration_count_derived(const qkv_calibration *calibration, size_t bytes) {
  // Like the count of references, no part of what is read.
  qkv_calibration *shared = (qkv_calibration *)calibration;
  (void)atomic_fetch_add_explicit(&shared->derived_bytes, bytes, memory_order_relaxed);
  (void)atomic_fetch_add_explicit(&held, bytes, memory_order_relaxed);
}

int qkv_calibration_tier_offset(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                qkv_calibration_part part) {
  return head_of(calibration, layer, kv_head)->tier_offsets[part];
}

const float *qkv_calibration_heavy(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                   float *least) {
  const qkvi_head_view *head = head_of(calibration, layer, kv_head);
  *least = head->heavy_least;
  return head->heavy;
}

// The first field of the ropes that differs; NULL where they are the same.
static const char *rope_difference(const qkv_rope *a, const qkv_rope *b) {
  const struct {
    const char *field;
    bool same;
  } rows[] = {{"theta", a->theta == b->theta},
              {"width", a->width == b->width},
              {"pairing", a->interleaved == b->interleaved},
              {"scaling", a->scaling == b->scaling},
              {"factor", a->factor == b->factor},
              {"original_max_position", a->original_max_position == b->original_max_position},
              {"low_freq_factor", a->low_freq_factor == b->low_freq_factor},
              {"high_freq_factor", a->high_freq_factor == b->high_freq_factor},
              {"beta_fast", a->beta_fast == b->beta_fast},
              {"beta_slow", a->beta_slow == b->beta_slow},
              {"attention_factor", a->attention_factor == b->attention_factor}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (!rows[i].same) return rows[i].field;
  }
  return NULL;
}

qkv_status qkv_calibration_check(const qkv_calibration *calibration, const qkv_calibration_shape *model,
                                 qkv_error *error) {
  const qkv_calibration_shape *shape = &calibration->shape;
  const struct {
    const char *field;
    uint32_t ours, models;
  } rows[] = {{"layers", shape->layers, model->layers},
              {"kv_heads", shape->kv_heads, model->kv_heads},
              {"q_heads", shape->q_heads, model->q_heads},
              {"key_dim", shape->key_dim, model->key_dim},
              {"value_dim", shape->value_dim, model->value_dim}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (rows[i].ours == rows[i].models) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.%s is %" PRIu32 ", the model has %" PRIu32,
                    rows[i].field, rows[i].ours, rows[i].models);
  }
  const char *field = rope_difference(&shape->rope, &model->rope);
  if (field == NULL) return QKV_OK;
  if (shape->rope.theta != model->rope.theta) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.rope.theta is %g, the model has %g", shape->rope.theta,
                    model->rope.theta);
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.rope.%s is not the model's", field);
}
