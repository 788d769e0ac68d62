// Codebooks of product quantization: 256 points for `width` neighbouring coordinates of a uniform point on the sphere
// of a width d, times sqrt(d), as rotated rows have them. By k-means from k-means++ seeds on drawn points, so no
// calibration is needed; all sub-vectors of a row are alike and share one.
//
// Found once for a d and a width, in a few tenths of a second; sums, products and square roots without contraction,
// so that it is the same on every machine. The points are written into no page: they must not change.
//
// Source: Jegou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search" (2011); Arthur, Vassilvitskii,
// "k-means++" (2007).
//
// Threads: any.
#ifndef QKV_ENGINE_CODEC_PQ_BOOK_H
#define QKV_ENGINE_CODEC_PQ_BOOK_H

#include <stddef.h>
#include <stdint.h>

#define QKV_PQ_POINTS 256
#define QKV_PQ_WIDTH_MAX 8

typedef struct qkv_pq_book {
  size_t width;
  _Alignas(64) float points[QKV_PQ_POINTS * QKV_PQ_WIDTH_MAX];   // [256][width]
  _Alignas(64) float columns[QKV_PQ_WIDTH_MAX * QKV_PQ_POINTS];  // [width][256], the same
  _Alignas(64) float squares[QKV_PQ_POINTS];                     // half of |point|^2
} qkv_pq_book;

// `dim` a multiple of 8 up to QKV_DIM_MAX; width 2, 4 or 8. Stays for ever.
const qkv_pq_book *qkv_pq_book_get(size_t dim, size_t width);

// The point nearest to x [width]; of equally near ones the first.
uint8_t qkv_pq_nearest(const qkv_pq_book *book, const float *x);

#endif
