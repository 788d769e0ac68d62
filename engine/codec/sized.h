// Codes of rows with a size each, row = size * values[codes], in a codec of parts. A block:
//
//   sizes  [64] fp16
//   codes  [lanes][steps]  a matrix (parts.h)
//
// `tables` of the part's coder begins with the values of the codes, float [1 << bits]. Codes of another kind may come
// after the sizes: functions for a block's sizes alone are at the end.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_SIZED_H
#define QKV_ENGINE_CODEC_SIZED_H

#include "engine/codec/parts.h"

size_t qkvi_sized_bytes(const qkv_part_coder *coder);
// sizes [64], codes [64][dim].
void qkvi_sized_write(const qkv_part_coder *coder, const float *sizes, const uint8_t *codes, uint8_t *block);
// As of qkv_part_codec, of rows as they were coded.
void qkvi_sized_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                       qkv_precision precision, float *scores);
void qkvi_sized_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                           qkv_precision precision, float *sums);
void qkvi_sized_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows);
// A row of this size, as it would be stored, and these codes [dim].
void qkvi_sized_round_trip(const qkv_part_coder *coder, float size, const uint8_t *codes, float *row);
// Whether a slot has this size, as it would be stored, and these codes [dim].
bool qkvi_sized_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, float size,
                        const uint8_t *codes);

// ---- Sizes ----

#define QKVI_SIZES_BYTES ((size_t)2 * QKV_PAGE_TOKENS)

void qkvi_sizes_read(const uint8_t *block, float sizes[QKV_PAGE_TOKENS]);
void qkvi_sizes_write(const float sizes[QKV_PAGE_TOKENS], uint8_t *block);
bool qkvi_sizes_match(const uint8_t *block, uint32_t slot, float size);
const char *qkvi_sizes_validate(const qkv_part_coder *coder, const uint8_t *block);
// The RMS of a row, and the row over it; 0 and zeros of a row of zeros, or nearly.
float qkvi_size_of(const float *row, size_t dim, float *direction);

#endif
