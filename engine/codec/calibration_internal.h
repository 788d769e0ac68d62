// Between the files of a calibration: where things lie in its bytes, and the object over them.
#ifndef QKV_ENGINE_CODEC_CALIBRATION_INTERNAL_H
#define QKV_ENGINE_CODEC_CALIBRATION_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>

#include "engine/codec/calibration.h"

typedef struct qkvi_calibration_header {
  uint32_t magic, format;
  uint64_t bytes;
  uint64_t checksum;
  uint32_t layers, kv_heads, q_heads, key_dim, value_dim;
  uint8_t band_k, band_v;
  uint16_t archive_refused;
  uint64_t tokens;
  double theta;
  uint32_t width;
  uint8_t interleaved, scaling;
  uint16_t reserved1;
  double factor;
  uint64_t original_max_position;
  double low_freq_factor, high_freq_factor, beta_fast, beta_slow, attention_factor;
  uint64_t reserved2[8];
} qkvi_calibration_header;
_Static_assert(sizeof(qkvi_calibration_header) == 192, "calibration header");

typedef struct qkvi_part_header {
  uint16_t anchor_pairs;
  int8_t tier_offset;
  uint8_t reserved0;
  float heavy_least;
  uint8_t reserved[56];
} qkvi_part_header;
_Static_assert(sizeof(qkvi_part_header) == 64, "calibration part");

typedef struct qkvi_section_header {
  uint8_t codec, version, bits, reserved[5];
  uint64_t bytes;
  uint8_t none[48];
} qkvi_section_header;
_Static_assert(sizeof(qkvi_section_header) == 64, "calibration section");

// One part, found in the bytes.
typedef struct qkvi_part_view {
  uint16_t dim;
  uint8_t band;
  size_t order_count;  // 8 * dim / band
  qkvi_part_header *header;
  uint8_t *order;
  float *mean, *weights, *analysis, *synthesis;
  uint16_t *pair_indices;  // of format 1; NULL for parts without a rotating anchor, like the next
  float *anchor;
  float *heavy;  // of format 2, keys in the attend frame; else NULL
} qkvi_part_view;

// What codecs derive from a head's numbers.
typedef enum qkvi_derived {
  QKVI_DERIVED_COMMVQ,                        // of 1 bit, and of 2
  QKVI_DERIVED_PQ = QKVI_DERIVED_COMMVQ + 2,  // [part][width / 4], widths 2, 4 and 8
  QKVI_DERIVED_KINDS = QKVI_DERIVED_PQ + 2 * 3
} qkvi_derived;

typedef struct qkvi_head_view {
  qkv_transform transforms[QKV_CALIBRATION_PARTS];
  int8_t tier_offsets[QKV_CALIBRATION_PARTS];
  const float *heavy;  // NULL: none
  float heavy_least;
  // What transforms point to.
  qkv_dense forward[QKV_CALIBRATION_PARTS], backward[QKV_CALIBRATION_PARTS], turning;
} qkvi_head_view;

struct qkv_calibration {
  _Atomic uint64_t references;
  uint32_t version;
  qkv_calibration_shape shape;
  qkv_turn_plan plan;  // of the attend frame, with RoPE
  uint8_t *bytes;      // 64-byte aligned
  size_t size;
  qkvi_head_view *heads;    // [layers][kv_heads]
  qkv_schedule *schedules;  // [layers][kv_heads][parts that the file has]
  uint8_t *whole;           // of all heads: matrices in whole numbers, and other data made from a file's bytes
  size_t whole_bytes;
  // [layers][kv_heads][QKVI_DERIVED_KINDS], what codecs have made of a head's numbers; NULL: nothing so far
  _Atomic(void *) *derived;
  _Atomic uint64_t derived_bytes;
  void (*released)(void *owner, uint64_t bytes);  // NULL: it is counted for nobody
  void *owner;
  uint64_t owned_bytes;
};

// The bands of bits that coordinates may share, for rows of this width.
bool qkvi_band_valid(uint32_t band, uint32_t dim);
// Bytes of a file without sections; 0 where it would be above QKV_CALIBRATION_BYTES_MAX. The shape is within limits.
size_t qkvi_calibration_size(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k, uint8_t band_v);
// Where a part lies. Without RoPE both parts of keys are one.
qkvi_part_view qkvi_calibration_part(const qkv_calibration_shape *shape, uint8_t *bytes, uint32_t layer,
                                     uint32_t kv_head, qkv_calibration_part part);

// Zeroed bytes with a header (tokens 0); parts are then written through the views, and the whole
// becomes a calibration by qkvi_calibration_finish, which takes the bytes, sets the checksum and checks everything as
// a reader does. INVALID_ARGUMENT for what the limits do not allow. tests/ writes files with these, too.
qkv_status qkvi_calibration_begin(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k, uint8_t band_v,
                                  uint8_t **bytes, qkv_error *error);
qkv_status qkvi_calibration_finish(uint8_t *bytes, qkv_calibration **out, qkv_error *error);

// What may follow on `size` bytes of header and heads: DATA_LOSS, or INVALID_ARGUMENT for sections of another
// version.
qkv_status qkvi_calibration_check_sections(const qkv_calibration_shape *shape, const uint8_t *bytes, size_t size,
                                           qkv_error *error);
// A head's bytes in a codec's section; NULL: there is no such section.
const uint8_t *qkvi_calibration_section(const qkv_calibration *calibration, uint8_t codec, unsigned bits,
                                        uint32_t layer, uint32_t kv_head);
// In the sections of a whole file's bytes: a head's keys or values become data-free.
void qkvi_calibration_clear_sections(const qkv_calibration_shape *shape, uint8_t *bytes, uint32_t layer,
                                     uint32_t kv_head, bool keys);
uint32_t qkvi_calibration_format(const qkv_calibration *calibration);
// A calibration's bytes, whose reference goes: its own where that is the last one, else a copy.
uint8_t *qkvi_calibration_take(const qkv_calibration **calibration);

// The transform of the data-free code, in a calibration's words, into a part that is all 0 (calibrate.c).
void qkvi_calibration_write_data_free(const qkvi_part_view *part);

// Counts a calibration in or out: qkv_calibration_bytes_held.
void qkvi_calibration_count(const qkv_calibration *calibration, bool more);

// The place for data that a codec derives for a head, freed with the calibration; and counts bytes of it.
_Atomic(void *) *qkvi_calibration_derived(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                          qkvi_derived kind);
void qkvi_calibration_count_derived(const qkv_calibration *calibration, size_t bytes);

// Sets the checksum of `size` bytes that begin with a header.
void qkvi_calibration_seal(uint8_t *bytes, size_t size);

// The schedule that an order of bands means. The order is valid.
void qkvi_schedule_from_order(const uint8_t *order, size_t count, uint16_t dim, uint8_t band, qkv_schedule *schedule);

#endif
