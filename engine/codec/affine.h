// Codes of evenly spaced levels, value = zero + scale * code, in a codec of parts: groups of lanes share a scale and
// a zero for every step (parts.h says which is which). With keys, groups of tokens for each channel; with values,
// groups of channels for each token. A block:
//
//   scales  [groups][steps]  fp16 or fp32
//   zeros   [groups][steps]  the same
//   codes   [lanes][steps]   a matrix (kernel/mix.h)
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_AFFINE_H
#define QKV_ENGINE_CODEC_AFFINE_H

#include "engine/codec/parts.h"

// What a codec's blocks are like.
typedef struct qkvi_affine_kind {
  size_t group;         // lanes that share a scale; 0: all of them
  qkv_dtype dtype;      // of scales and zeros
  unsigned drift_keys;  // a key's codes may be so far from those of its row: codes that were rescaled
} qkvi_affine_kind;

// What a qkv_part_codec takes from here: its init calls qkvi_affine_init with a kind that lasts.
#define QKVI_AFFINE_FUNCTIONS                                                                       \
  .scores = qkvi_affine_scores, .accumulate = qkvi_affine_accumulate, .decode = qkvi_affine_decode, \
  .matches = qkvi_affine_matches, .validate = qkvi_affine_validate

void qkvi_affine_init(qkv_part_coder *coder, const qkvi_affine_kind *kind);
// Scales and zeros are those of a group's least and largest numbers, without regard to slots from `tokens` on.
void qkvi_affine_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
// Of qkv_part_codec, of codecs that code so. Keys share their ranges. In a loop a difference is out of its range by
// no more than half a step: as those of exact rows are within it, what is missed then is not missed more by the next.
void qkvi_affine_share(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
void qkvi_affine_encode_shared(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
void qkvi_affine_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                            float *decoded);
void qkvi_affine_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                        qkv_precision precision, float *scores);
void qkvi_affine_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                            qkv_precision precision, float *sums);
void qkvi_affine_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows);
bool qkvi_affine_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row);
const char *qkvi_affine_validate(const qkv_part_coder *coder, const uint8_t *block);

// For codecs that find scales of their own: the nearest code of x, 0 to `most`; 0 where the scale is; and a block of
// one group, with scales and zeros [steps] and codes [64][dim].
uint8_t qkvi_affine_code(float x, float scale, float zero, unsigned most);
void qkvi_affine_write_one(const qkv_part_coder *coder, const float *scales, const float *zeros, const uint8_t *codes,
                           uint8_t *block);

#endif
