// Codebooks of product quantization: 256 points for `width` neighbouring coordinates of rows that are rotated and
// have RMS 1. By k-means from k-means++ seeds on drawn points.
//
// Without a calibration: of uniform points on the sphere of a width d, times sqrt(d), so that all sub-vectors are
// alike and share one codebook; found once for a d and a width, in less than a tenth of a second. With one: a
// codebook for each sub-vector of a head's keys or values, of rows drawn from the mean and the covariance that it
// knows; of keys after RoPE, whose pairs of coordinates are turned by random angles, but for those that turn by less
// than a radian in 1024 tokens, which are left as they are. Calibrations that are made for sessions with pq have them
// in a section, of which the content is, for a number of bits:
//
//   points  [layers][kv_heads][keys, values][dim / width][256][width] fp16
//
// From others the same points are found when a head's first page is coded or read. Calibrations of the formats before
// sections keep the points that pages were coded with: their seeds are drawn from all rows, and points are not
// rounded.
//
// Sums, products, quotients and square roots without contraction, so that a codebook is the same on every machine.
// The points are written into no page: they must not change.
//
// Source: Jegou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search" (2011); Arthur, Vassilvitskii,
// "k-means++" (2007).
//
// Threads: any.
#ifndef QKV_ENGINE_CODEC_PQ_BOOK_H
#define QKV_ENGINE_CODEC_PQ_BOOK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/calibration.h"
#include "engine/codec/page.h"
#include "engine/kernel/points.h"

#define QKV_PQ_POINTS QKV_POINTS
#define QKV_PQ_WIDTH_MAX QKV_POINT_WIDTH_MAX

typedef struct qkv_pq_book {
  size_t width;
  size_t stride;                 // from one sub-vector's numbers to the next's; 0: all share them
  _Alignas(64) float numbers[];  // [256][width] points, [width][256] the same, [256] half of |point|^2
} qkv_pq_book;

// A sub-vector's points [256][width].
static inline const float *qkv_pq_points(const qkv_pq_book *book, size_t sub) {
  return book->numbers + sub * book->stride;
}

// `dim` a multiple of 8 up to QKV_DIM_MAX; width 2, 4 or 8. Stays for ever.
const qkv_pq_book *qkv_pq_book_get(size_t dim, size_t width);
// Of a head of a calibration, from its section where it has one; kept as long as that.
const qkv_pq_book *qkv_pq_book_calibrated(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                          qkv_part part, size_t width);

// Sections of calibrations: qkv_codec_section (codec.h).
#define QKV_PQ_CODEC 7  // in the codec table
#define QKV_PQ_SECTION_VERSION 1
#define QKV_PQ_COORDINATE_MAX 64.0f  // of points: rows have RMS 1, and up to QKV_DIM_MAX coordinates
size_t qkv_pq_section_bytes(const qkv_calibration_shape *shape, unsigned bits);
void qkv_pq_section_make(const qkv_calibration *calibration, unsigned bits, uint32_t layer, uint32_t kv_head,
                         uint8_t *out);
void qkv_pq_section_clear(const qkv_calibration_shape *shape, unsigned bits, bool keys, uint8_t *head);
const char *qkv_pq_section_validate(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *head);

// The point of a sub-vector nearest to x [width]; of equally near ones the first.
uint8_t qkv_pq_nearest(const qkv_pq_book *book, size_t sub, const float *x);

#endif
