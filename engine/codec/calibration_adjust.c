// A calibration of which some parts are data-free, or have other bits, or whose archive codec is refused.
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"

static void clear_part(const qkvi_part_view *part) {
  const size_t dim = part->dim;
  memset(part->header, 0, sizeof *part->header);
  memset(part->order, 0, part->order_count);
  memset(part->mean, 0, dim * sizeof *part->mean);
  memset(part->weights, 0, dim * sizeof *part->weights);
  memset(part->analysis, 0, dim * dim * sizeof *part->analysis);
  memset(part->synthesis, 0, dim * dim * sizeof *part->synthesis);
  if (part->anchor == NULL) return;
  memset(part->pair_indices, 0, QKV_ANCHOR_PAIRS_MAX * sizeof *part->pair_indices);
  memset(part->anchor, 0, 2 * QKV_ANCHOR_PAIRS_MAX * sizeof *part->anchor);
}

uint8_t *qkvi_calibration_take(const qkv_calibration **calibration) {
  qkv_calibration *from = (qkv_calibration *)(uintptr_t)*calibration;
  uint8_t *bytes = from->bytes;
  if (atomic_load_explicit(&from->references, memory_order_acquire) == 1) {
    from->bytes = NULL;
  } else {
    bytes = aligned_alloc(64, from->size);  // a multiple of it
    if (bytes == NULL) abort();
    memcpy(bytes, from->bytes, from->size);
  }
  qkv_calibration_unref(calibration);
  return bytes;
}

qkv_status qkv_calibration_adjust(const qkv_calibration **calibration, const bool *drop, const int8_t *offsets,
                                  const bool *forget, qkv_calibration **out, qkv_error *error) {
  const qkv_calibration_shape shape = (*calibration)->shape;
  const size_t heads = (size_t)shape.layers * shape.kv_heads;
  uint8_t *bytes = qkvi_calibration_take(calibration);
  *out = NULL;
  for (size_t i = 0; i < heads * QKV_CALIBRATION_PARTS; i++) {
    const qkv_calibration_part part = i % QKV_CALIBRATION_PARTS;
    if (part == QKV_PART_K_ARCHIVE && shape.rope.theta == 0) continue;
    const uint32_t head = (uint32_t)(i / QKV_CALIBRATION_PARTS);
    const qkvi_part_view view =
        qkvi_calibration_part(&shape, bytes, head / shape.kv_heads, head % shape.kv_heads, part);
    if (drop != NULL && drop[i]) {
      const qkvi_part_header before = *view.header;
      const bool keys = part == (shape.rope.theta == 0 ? QKV_PART_K_ATTEND : QKV_PART_K_ARCHIVE);
      clear_part(&view);
      qkvi_calibration_write_data_free(&view);
      if (keys || part == QKV_PART_V)
        qkvi_calibration_clear_sections(&shape, bytes, head / shape.kv_heads, head % shape.kv_heads, keys);
      view.header->tier_offset = before.tier_offset;
      view.header->heavy_least = before.heavy_least;
    }
    if (forget != NULL && forget[head] && view.heavy != NULL) {
      memset(view.heavy, 0, view.dim * sizeof *view.heavy);
      view.header->heavy_least = 0;
    }
    if (offsets != NULL) view.header->tier_offset = offsets[i];
  }
  return qkvi_calibration_finish(bytes, out, error);
}

qkv_status qkv_calibration_refuse_archive(const qkv_calibration **calibration, qkv_calibration **out,
                                          qkv_error *error) {
  uint8_t *bytes = qkvi_calibration_take(calibration);
  ((qkvi_calibration_header *)bytes)->archive_refused = 1;
  return qkvi_calibration_finish(bytes, out, error);
}
