#include "engine/kernel/simt/operands.h"

#include <assert.h>
#include <string.h>

#include "engine/kernel/table.h"

#define SHAPE(dim, rows, query_parts, weight_parts)                       \
  {"qkv_simt_attend_" #dim "x" #rows "_q" #query_parts "w" #weight_parts, \
   dim,                                                                   \
   rows,                                                                  \
   query_parts,                                                           \
   weight_parts,                                                          \
   QKV_SIMT_SHARED_BYTES(dim),                                            \
   NULL},
#define CALIBRATED(dim)                                                                           \
  {"qkv_simt_calibrated_" #dim, dim, QKV_SIMT_FRAME_ROWS, 2, 2, QKV_SIMT_FRAME_SHARED_BYTES(dim), \
   "qkv_simt_turn_" #dim},
static const qkv_simt_shape shapes[] = {QKV_SIMT_SHAPES(SHAPE) QKV_SIMT_CALIBRATED(CALIBRATED)};
enum { SHAPE_COUNT = sizeof shapes / sizeof *shapes };

const qkv_simt_shape *qkv_simt_shape_at(size_t n) {
  return n < SHAPE_COUNT ? &shapes[n] : NULL;
}

const qkv_simt_shape *qkv_simt_shape_for(unsigned dim, unsigned query_parts, unsigned weight_parts, unsigned rows) {
  const qkv_simt_shape *found = NULL;
  for (size_t i = 0; i < SHAPE_COUNT; i++) {
    const qkv_simt_shape *shape = &shapes[i];
    if (shape->turn != NULL || shape->dim != dim || shape->query_parts != query_parts ||
        shape->weight_parts != weight_parts)
      continue;
    if (found == NULL || rows > found->rows) found = shape;  // from few rows to more
  }
  return found;
}

const qkv_simt_shape *qkv_simt_shape_calibrated(unsigned dim) {
  for (size_t i = 0; i < SHAPE_COUNT; i++) {
    if (shapes[i].turn != NULL && shapes[i].dim == dim) return &shapes[i];
  }
  return NULL;
}

size_t qkv_simt_query_bytes(const qkv_simt_shape *shape) {
  const size_t dim = shape->dim;
  return shape->turn != NULL ? QKV_SIMT_FRAME_QUERY_BYTES(dim) : QKV_SIMT_QUERY_BYTES(dim);
}

// ---- Tables ----

static uint32_t word_of(const int8_t bytes[4]) {
  uint32_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

// Two entries for the nibbles n and n + 8, whose centroids are `low` and `high`. Each choice gives its own entry on
// its half of the nibbles, and on the other the entry's sign, 0 or -1 (attend.c):
//   low = first + sign(second)     high = second + sign(first)
static void split(int low, int high, int8_t *first, int8_t *second) {
  for (int signs = 0; signs < 4; signs++) {
    const int a = low + signs % 2, b = high + signs / 2;
    if ((b < 0) != (signs % 2 == 1) || (a < 0) != (signs / 2 == 1)) continue;
    assert(a >= INT8_MIN && a <= INT8_MAX && b >= INT8_MIN && b <= INT8_MAX);
    *first = (int8_t)a;
    *second = (int8_t)b;
    return;
  }
  assert(false);  // a centroid of -1 may have none
}

static void fill_nibbles(const uint8_t centroids[16], uint32_t entries[4]) {
  int8_t first[8], second[8];
  for (size_t n = 0; n < 8; n++) split((int8_t)centroids[n], (int8_t)centroids[n + 8], &first[n], &second[n]);
  for (size_t i = 0; i < 2; i++) {
    entries[i] = word_of(first + 4 * i);
    entries[2 + i] = word_of(second + 4 * i);
  }
}

void qkv_simt_tables_fill(qkv_simt_tables *tables) {
  _Static_assert((int)QKV_SIMT_KINDS == (int)QKVI_BLOCK_NIBBLE_KINDS, "kinds");
  memset(tables, 0, sizeof *tables);
  for (size_t kind = 0; kind < QKV_SIMT_KINDS; kind++) {
    fill_nibbles(qkvi_integers.sixes[QKV_V][kind][QKVI_EVEN_FIELDS], tables->nibbles[kind].even);
    fill_nibbles(qkvi_integers.sixes[QKV_V][kind][QKVI_ODD_FIELDS], tables->nibbles[kind].odd);
  }
  for (size_t kind = 0; kind <= QKVI_BLOCK_2; kind++)
    tables->fields[kind] = word_of((const int8_t *)qkvi_integers.fields[QKV_V][kind][0]);
  memcpy(tables->gains, qkvi_integers.gains, sizeof tables->gains);
  tables->step = qkvi_integers.step;
}

void qkv_simt_row_tables_fill(qkv_simt_row_tables *tables) {
  _Static_assert(sizeof tables->gains == sizeof qkvi_integers.gains, "gains");
  memset(tables, 0, sizeof *tables);
  for (size_t depth = 1; depth <= QKV_DEPTH_MAX; depth++)
    memcpy(tables->values + ((size_t)1 << depth) - 2, qkvi_tables.values[depth], sizeof(float) << depth);
  memcpy(tables->gains, qkvi_integers.gains, sizeof tables->gains);
}

void qkv_simt_encode_tables_fill(qkv_simt_encode_tables *tables) {
  _Static_assert((int)QKV_SIMT_ENCODE_SCALES == QKVI_SCALES && sizeof *tables % 16 == 0, "tables");
  memset(tables, 0, sizeof *tables);
  qkv_simt_row_tables_fill(&tables->rows);
  memcpy(tables->scales, qkvi_tables.scales, sizeof tables->scales);
  tables->step = qkvi_integers.step;
  tables->inverse_step = qkvi_tables.inverse_step;
  memcpy(tables->gain_middles, qkvi_tables.gain_middles, sizeof tables->gain_middles);
  for (size_t depth = 2; depth <= QKV_DEPTH_MAX; depth++) {
    const size_t cells = (size_t)1 << (depth - 2);
    memcpy(tables->middles + cells, qkvi_tables.middles[depth], cells * sizeof *tables->middles);
  }
  memcpy(tables->cells, qkvi_tables.cells, sizeof tables->cells);
  memcpy(tables->units, qkvi_integers.units, sizeof tables->units);
}

// ---- Queries and results ----

void qkv_simt_queries_fill(const qkv_simt_shape *shape, const qkv_integer_queries *integers, const float *rows,
                           size_t first, size_t count, void *out) {
  const size_t dim = shape->dim, parts = shape->query_parts, length = qkvi_column_bytes(dim);
  assert(integers->parts == parts && integers->dim == dim && length == dim);
  assert(count <= shape->rows && first + count <= integers->count);
  memset(out, 0, QKV_SIMT_QUERY_BYTES(dim));
  float *floats = (float *)((uint8_t *)out + QKV_SIMT_COLUMNS * dim), *scales = floats + QKV_SIMT_COLUMNS * dim;
  for (size_t row = 0; row < count; row++) {
    const qkvi_chunk chunk = qkvi_chunk_of(first + row, integers->count, integers->parts);
    const int8_t *from = integers->bytes + chunk.first * parts * length;
    for (size_t p = 0; p < parts; p++) {
      const size_t column = (first + row - chunk.first) * parts + p;
      for (size_t i = 0; i < dim / 4; i++)
        memcpy((int8_t *)out + (row * parts + p) * dim + 4 * i, from + (i * chunk.columns + column) * 4, 4);
    }
    memcpy(floats + row * dim, rows + (first + row) * dim, dim * sizeof *floats);
    scales[row] = integers->scales[first + row];
  }
}

void qkv_simt_frame_queries_fill(const qkv_simt_frame_queries *head, const float *rows, size_t count, size_t dim,
                                 void *out, uint8_t **behind) {
  _Static_assert(sizeof *head == 64, "head");
  assert(count <= QKV_SIMT_FRAME_ROWS);
  memset(out, 0, QKV_SIMT_FRAME_QUERY_BYTES(dim));
  memcpy(out, head, sizeof *head);
  memcpy((uint8_t *)out + sizeof *head, rows, count * dim * sizeof *rows);
  *behind = (uint8_t *)out + sizeof *head + QKV_SIMT_FRAME_ROWS * dim * sizeof *rows;
}

// Where products want a coordinate of 16 (calibrated.h).
static size_t turned_place(size_t c) {
  return 4 * (c / 8 * 2 + c % 4 / 2) + c % 2 * 2 + c / 4 % 2;
}

void qkv_simt_turned_fill(const qkv_integer_queries *integers, const float *added, size_t first, size_t count,
                          uint8_t *out) {
  const size_t dim = integers->dim, parts = integers->parts, length = qkvi_column_bytes(dim);
  float *sums = (float *)(void *)out;
  uint8_t *bytes = out + sizeof(float) * QKV_SIMT_FRAME_ROWS * QKV_PAGE_TOKENS;
  float *scales = (float *)(void *)(bytes + QKV_SIMT_COLUMNS * dim);
  for (size_t row = 0; row < count; row++) {
    const qkvi_chunk chunk = qkvi_chunk_of(first + row, integers->count, integers->parts);
    const int8_t *from = integers->bytes + chunk.first * parts * length;
    for (size_t p = 0; p < parts; p++) {
      const size_t column = (first + row - chunk.first) * parts + p;
      uint8_t *to = bytes + (2 * row + 2 - parts + p) * dim;  // of one byte: the lower one
      for (size_t c = 0; c < dim; c++)
        to[c / 16 * 16 + turned_place(c % 16)] = (uint8_t)from[(c / 4 * chunk.columns + column) * 4 + c % 4];
    }
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) sums[row * QKV_PAGE_TOKENS + t] = added[first + row];
    scales[row] = integers->scales[first + row];
  }
}

const float *qkv_simt_partial_row(const qkv_simt_shape *shape, const void *partial, unsigned row, float *peak,
                                  double *total) {
  const size_t dim = shape->dim, rows = shape->rows;
  const float *sums = partial;
  *peak = sums[rows * dim + row];
  memcpy(total, sums + rows * (dim + 1) + 2 * (size_t)row, sizeof *total);
  return sums + row * dim;
}
