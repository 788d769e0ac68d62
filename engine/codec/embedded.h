// The codec "embedded": an orthogonal or calibrated transform, one gain byte per row, nested scalar codes, whose
// first bits are themselves a code. One row of the codec table; see codec.h for what its functions do and
// docs/page-format.md for its pages.
#ifndef QKV_ENGINE_CODEC_EMBEDDED_H
#define QKV_ENGINE_CODEC_EMBEDDED_H

#include <assert.h>

#include "engine/codec/codec.h"
#include "engine/codec/phases.h"
#include "engine/codec/rebuild.h"
#include "engine/codec/transform.h"

extern const qkv_codec qkvi_codec_embedded;

typedef struct qkv_head_coder {
  const qkv_transform *transforms[2];  // by qkv_part
  const qkv_schedule *schedules[2];    // theirs
  uint8_t tiers[2];                    // what rows are coded with
  float query_limit;                   // that integers need (precision.h); 0: the most
  uint8_t weight_bytes;                // the same; 0: two
  const qkv_rebuild *rebuild;          // archive frame; NULL: keys become rows before they are attended
  // A row whose squared error, weighted as in encoding, is above limit * its squared length is kept as an outlier
  // (outliers.h), and so is one that errs far more than the page's other rows. 0: none is.
  float outlier_limits[2];
  float error_scales[2];       // weighted squared error that counts as much as 1 of a row as attended
  const float *outlier_steps;  // [value_dim], of values; NULL: all 1
  const float *heavy;          // [key_dim], the predictor of heavy hitters (heavy.h); NULL: none
  float heavy_least;           // score that they are above
} qkv_head_coder;

typedef struct qkv_embedded_coder {
  qkv_coder base;
  uint8_t tier_k, tier_v;         // the budget; heads may have more or less
  qkv_frame frame;                // of the keys
  uint32_t sinks;                 // rows at positions below are kept as outliers, whatever their error
  const qkv_phases *phases;       // of models with RoPE
  qkv_low_rank_options low_rank;  // of keys and values
  qkv_anchor_options anchors[2];  // by qkv_part
  const qkv_head_coder *heads;    // [kv_heads]
} qkv_embedded_coder;

// A coder of this codec's (asserted).
static inline const qkv_embedded_coder *qkv_embedded(const qkv_coder *coder) {
  assert(coder->codec == &qkvi_codec_embedded);
  return (const qkv_embedded_coder *)coder;
}

// One head's keys or values as a device has coded them at the head's tier, with the bits of the kernels encode_rows,
// or load_rows and encode (engine/kernel/simt/rows.h).
typedef struct qkv_coded_rows {
  const uint8_t *gains, *codes;   // [64]; of four groups, one after the other
  const float *errors, *squares;  // [64]
} qkv_coded_rows;

typedef struct qkv_device_page {
  uint64_t position;
  uint32_t tokens;
  qkv_dtype dtype;
  const void *rows[2];          // by qkv_part: [tokens][kv_heads][dim]
  const qkv_coded_rows *parts;  // [kv_heads][2]
} qkv_device_page;

// Whether pages are made of such rows: those without anchors and factors, of heads that have bits.
bool qkv_embedded_takes_coded(const qkv_coder *coder);
// The page, the same that encode makes of the rows: image [page_bytes_max]. Returns its bytes.
size_t qkv_embedded_place_coded(const qkv_coder *coder, const qkv_device_page *page, void *image);

// The data-free transform of a row width.
const qkv_transform *qkv_transform_uniform(uint16_t dim);

// The data-free code of one head, at the bits that the head has; `head` and `coder` live as long as `made`.
void qkv_embedded_data_free(const qkv_coder *coder, uint16_t index, qkv_head_coder *head, qkv_embedded_coder *made);

#endif
