#include "engine/codec/rebuild.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/precision.h"
#include "engine/kernel/kernel.h"

enum { ALIGN = 64 };

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
  if (made == NULL) abort();
  return made;
}

// columns [dim][dim]: column j of the synthesis, the data-free one included; 0 for coordinates without bits.
static void fill_columns(const qkv_transform *keys, size_t coded, float *columns) {
  const size_t dim = keys->schedule->dim;
  memset(columns, 0, dim * dim * sizeof *columns);
  for (size_t c = 0; c < coded; c++) {
    float row[QKV_DIM_MAX] = {0};
    if (keys->synthesis == NULL) {
      row[c] = 1;
      qkv_hadamard_inverse(row, 1, dim);
    } else {
      memcpy(row, keys->synthesis + c * dim, dim * sizeof *row);
    }
    for (size_t j = 0; j < dim; j++) columns[j * dim + c] = row[j];
  }
}

// E[q_j^2] of the queries that the weights are for.
static double query_moment(const qkv_transform *keys, size_t j) {
  if (keys->analysis == NULL) return 1;
  const size_t dim = keys->schedule->dim;
  double sum = 0;
  for (size_t c = 0; c < dim; c++) {
    const double entry = keys->analysis[c * dim + j];
    sum += (double)keys->weights[c] * entry * entry;
  }
  return sum;
}

static unsigned parts_for(const qkv_transform *keys, unsigned tier, size_t coded, const float *columns) {
  const size_t dim = keys->schedule->dim;
  double added = 0;
  for (size_t j = 0; j < dim; j++) {
    double top = 0;
    for (size_t c = 0; c < coded; c++) top = fmax(top, fabs((double)columns[j * dim + c]));
    const double step = top / (double)QKVI_LIMIT_1;
    added += query_moment(keys, j) * step * step / 12 * (double)coded;  // rounding errs by step / sqrt(12)
  }
  return qkvi_bytes_for(keys, tier, added);
}

static size_t columns_bytes(size_t dim, size_t parts) {
  return (dim + QKV_INTEGER_COLUMNS) * parts * qkvi_column_bytes(dim);
}

static size_t offsets_bytes(size_t dim, size_t parts) {
  return (dim + QKV_INTEGER_COLUMNS) * parts * (qkvi_column_bytes(dim) / QKVI_BLOCK_WIDTH + 1) * sizeof(int32_t);
}

size_t qkv_rebuild_cost(size_t dim) {
  enum { PARTS_MOST = 2 };
  return sizeof(qkv_rebuild) + dim * sizeof(float) + offsets_bytes(dim, PARTS_MOST) + columns_bytes(dim, PARTS_MOST);
}

qkv_rebuild *qkv_rebuild_create(const qkv_transform *keys, unsigned tier) {
  const size_t dim = keys->schedule->dim, coded = keys->schedule->reach[tier][1];
  float *columns = allocate(dim * dim * sizeof *columns);
  fill_columns(keys, coded, columns);
  const unsigned parts = parts_for(keys, tier, coded, columns);
  // Chunks are whole: of up to QKV_INTEGER_COLUMNS columns.
  const size_t bytes = columns_bytes(dim, parts), offsets = offsets_bytes(dim, parts);
  qkv_rebuild *made = allocate(sizeof *made);
  *made = (qkv_rebuild){
      .columns = {.scales = allocate(dim * sizeof(float)), .offsets = allocate(offsets), .bytes = allocate(bytes)},
      .bytes = sizeof *made + dim * sizeof(float) + offsets + bytes};
  qkv_kernels_get()->prepare(columns, dim, (uint16_t)dim, parts == 1 ? QKVI_LIMIT_1 : QKVI_LIMIT_2, &made->columns);
  free(columns);
  return made;
}

void qkv_rebuild_destroy(qkv_rebuild **rebuild) {
  qkv_rebuild *old = *rebuild;
  if (old == NULL) return;
  *rebuild = NULL;
  free(old->columns.scales);
  free(old->columns.offsets);
  free(old->columns.bytes);
  free(old);
}
