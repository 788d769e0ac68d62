#include "engine/codec/commvq.h"

#include <math.h>
#include <string.h>

#include "engine/codec/commvq_book.h"
#include "engine/codec/hadamard.h"
#include "engine/codec/sized.h"
#include "engine/kernel/kernel.h"

enum { ID = QKV_COMMVQ_CODEC, VERSION = 1 };

#define SIZE_MAX_CODED 65504.0f  // fp16

typedef struct key_tables {
  const qkv_calibration *calibration;
  uint32_t layer, kv_head;
  uint16_t coordinates[];  // [dim / 2][2], of pairs
} key_tables;

typedef struct value_tables {
  const qkv_transform *transform;      // NULL: Hadamard
  uint16_t begins[QKV_DEPTH_MAX + 2];  // axes with b bits are begins[b + 1] ... begins[b]
  float size;                          // RMS of rows without their mean, as the calibration has them
} value_tables;

static bool bits_valid(double bits) {
  return bits == 1 || bits == 2;
}

static void commvq_init(qkv_part_coder *coder) {
  coder->block_bytes = (uint32_t)(QKVI_SIZES_BYTES + qkvi_part_code_bytes(coder));
}

static float limited(float size) {
  return size < SIZE_MAX_CODED ? size : SIZE_MAX_CODED;
}

// ---- Keys ----

static const qkv_commvq_book *book_of(const qkv_part_coder *coder) {
  const key_tables *tables = coder->tables;
  if (tables->calibration == NULL) return qkv_commvq_book_data_free(coder->dim, coder->bits);
  return qkv_commvq_book_get(tables->calibration, tables->layer, tables->kv_head, coder->bits);
}

// The coordinate at a place of a row's groups.
static inline size_t coordinate_of(const qkv_part_coder *coder, const qkv_commvq_book *book, size_t at) {
  const key_tables *tables = coder->tables;
  return tables->coordinates[2 * book->pairs[at / 2] + at % 2];
}

static const uint8_t *key_codes(const uint8_t *block) {
  return block + QKVI_SIZES_BYTES;
}

// A row's codes [groups][bits], and its size.
static float code_key(const qkv_part_coder *coder, const qkv_commvq_book *book, const float *row, uint8_t *codes) {
  float rest[QKV_DIM_MAX], direction[QKV_DIM_MAX];
  for (size_t at = 0; at < coder->dim; at++) rest[at] = row[coordinate_of(coder, book, at)] - book->mean[at];
  const float size = limited(qkvi_size_of(rest, coder->dim, direction));
  memset(codes, 0, book->groups * coder->bits);
  if (size == 0) return 0;
  for (size_t at = 0; at < coder->dim; at++) direction[at] *= book->roots[at];
  for (size_t group = 0; group < book->groups; group++) {
    float *left = direction + group * QKV_COMMVQ_WIDTH;
    for (size_t r = 0; r < coder->bits; r++) {
      const qkv_commvq_round *round = &book->rounds[group * book->bits + r];
      const uint8_t code = codes[group * coder->bits + r] = qkv_commvq_nearest(round, left);
      for (size_t j = 0; j < QKV_COMMVQ_WIDTH; j++)
        left[j] -= round->columns[0][j][code % QKV_COMMVQ_ENTRIES] + round->columns[1][j][code / QKV_COMMVQ_ENTRIES];
    }
  }
  return size;
}

static void encode_keys(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const qkv_commvq_book *book = book_of(coder);
  float sizes[QKV_PAGE_TOKENS] = {0};
  uint8_t codes[QKV_DIM_MAX], *out = (uint8_t *)key_codes(block);
  for (uint32_t t = 0; t < tokens; t++) {
    sizes[t] = code_key(coder, book, rows + t * coder->dim, codes);
    for (size_t i = 0; i < book->groups * coder->bits; i++) out[i * QKV_PAGE_TOKENS + t] = codes[i];
  }
  qkvi_sizes_write(sizes, block);
}

static bool keys_match(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const qkv_commvq_book *book = book_of(coder);
  uint8_t codes[QKV_DIM_MAX];
  if (!qkvi_sizes_match(block, slot, code_key(coder, book, row, codes))) return false;
  for (size_t i = 0; i < book->groups * coder->bits; i++) {
    if (key_codes(block)[i * QKV_PAGE_TOKENS + slot] != codes[i]) return false;
  }
  return true;
}

static void commvq_columns(const qkv_part_coder *coder, const uint8_t *block, float *columns, float *mean) {
  const qkv_commvq_book *book = book_of(coder);
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t at = 0; at < coder->dim; at++) mean[coordinate_of(coder, book, at)] = book->mean[at];
  for (size_t group = 0; group < book->groups; group++) {
    const qkv_commvq_round *rounds = &book->rounds[group * book->bits];
    const qkv_entries *const entries[QKV_COMMVQ_ROUNDS] = {&rounds[0].entries, &rounds[book->bits - 1].entries};
    float *out[QKV_COMMVQ_WIDTH];
    for (size_t j = 0; j < QKV_COMMVQ_WIDTH; j++)
      out[j] = columns + coordinate_of(coder, book, group * QKV_COMMVQ_WIDTH + j) * QKV_PAGE_TOKENS;
    qkv_kernels_get()->sum_entries(entries, coder->bits, key_codes(block) + group * coder->bits * QKV_PAGE_TOKENS,
                                   sizes, out);
  }
}

static void decode_keys(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  _Alignas(64) float columns[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  float mean[QKV_DIM_MAX] = {0};
  memset(columns, 0, (size_t)coder->dim * QKV_PAGE_TOKENS * sizeof *columns);
  commvq_columns(coder, block, columns, mean);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t c = 0; c < coder->dim; c++) rows[t * coder->dim + c] = columns[c * QKV_PAGE_TOKENS + t] + mean[c];
  }
}

// ---- Values ----

// The step of the evenly spaced levels that are best for N(0, 1). Source: Max, "Quantizing for Minimum Distortion"
// (1960), and the same minimum for more bits.
static const float steps[QKV_DEPTH_MAX + 1] = {0,       1.5958f, 0.9957f, 0.5860f, 0.3352f,
                                               0.1881f, 0.1041f, 0.0569f, 0.0308f};

static float level(unsigned bits, uint8_t code) {
  return steps[bits] * ((float)code - (float)((1u << bits) - 1) / 2);
}

static uint8_t code_level(unsigned bits, float z) {
  const float last = (float)((1u << bits) - 1), at = z / steps[bits] + last / 2;
  if (!(at > 0)) return 0;
  if (at >= last) return (uint8_t)last;
  const uint8_t below = (uint8_t)at;
  return below + (at - (float)below >= 0.5f);
}

// The matrix of the axes with so many bits; false: there are none. Matrices come one after the other.
static bool matrix_of(const qkv_part_coder *coder, unsigned bits, const uint8_t **codes, qkv_code_matrix *matrix) {
  const value_tables *tables = coder->tables;
  const size_t axes = tables->begins[bits] - tables->begins[bits + 1];
  *matrix = (qkv_code_matrix){.codes = *codes, .bits = bits, .lanes = axes, .steps = QKV_PAGE_TOKENS};
  *codes += qkv_code_matrix_bytes(axes, QKV_PAGE_TOKENS, bits);
  return axes > 0;
}

// x [dim] to the axes; 8 sums at a time, in this order.
static void to_axes(const qkv_part_coder *coder, const float *x, float *z) {
  const value_tables *tables = coder->tables;
  const size_t dim = coder->dim;
  if (tables->transform == NULL) {
    memcpy(z, x, dim * sizeof *z);
    return qkv_hadamard_forward(z, 1, dim);
  }
  for (size_t axis = 0; axis < dim; axis++) {
    const float *row = tables->transform->analysis + axis * dim;
    float sums[QKV_BAND] = {0}, sum = 0;
    for (size_t c = 0; c < dim; c += QKV_BAND) {
      for (size_t i = 0; i < QKV_BAND; i++) sums[i] += row[c + i] * x[c + i];
    }
    for (size_t i = 0; i < QKV_BAND; i++) sum += sums[i];
    z[axis] = sum;
  }
}

// rows [n][dim] in place, from the axes; without the mean.
static void from_axes(const qkv_part_coder *coder, float *rows, size_t n) {
  const value_tables *tables = coder->tables;
  const size_t dim = coder->dim;
  if (tables->transform == NULL) return qkv_hadamard_inverse(rows, n, dim);
  for (size_t i = 0; i < n; i++) {
    float out[QKV_DIM_MAX] = {0}, *row = rows + i * dim;
    for (size_t axis = 0; axis < dim; axis++) {
      const float *synthesis = tables->transform->synthesis + axis * dim;
      for (size_t c = 0; c < dim; c++) out[c] += row[axis] * synthesis[c];
    }
    memcpy(row, out, dim * sizeof *row);
  }
}

// A row's codes [dim], by axis, and its size.
static float code_value(const qkv_part_coder *coder, const float *row, uint8_t *codes) {
  const value_tables *tables = coder->tables;
  float rest[QKV_DIM_MAX], direction[QKV_DIM_MAX], z[QKV_DIM_MAX];
  for (size_t c = 0; c < coder->dim; c++)
    rest[c] = row[c] - (tables->transform == NULL ? 0 : tables->transform->mean[c]);
  const float rms = qkvi_size_of(rest, coder->dim, direction), size = limited(rms / tables->size);
  memset(codes, 0, coder->dim);
  if (size == 0) return 0;
  to_axes(coder, direction, z);
  for (unsigned bits = 1; bits <= QKV_DEPTH_MAX; bits++) {
    for (size_t axis = tables->begins[bits + 1]; axis < tables->begins[bits]; axis++)
      codes[axis] = code_level(bits, z[axis] * tables->size);
  }
  return size;
}

static void encode_values(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  const value_tables *tables = coder->tables;
  uint8_t codes[QKV_DIM_MAX], columns[QKV_DIM_MAX * QKV_PAGE_TOKENS] = {0};
  float sizes[QKV_PAGE_TOKENS] = {0};
  for (uint32_t t = 0; t < tokens; t++) {
    sizes[t] = code_value(coder, rows + t * coder->dim, codes);
    for (size_t axis = 0; axis < coder->dim; axis++) columns[axis * QKV_PAGE_TOKENS + t] = codes[axis];
  }
  qkvi_sizes_write(sizes, block);
  const uint8_t *at = block + QKVI_SIZES_BYTES;
  for (unsigned bits = QKV_DEPTH_MAX; bits >= 1; bits--) {
    qkv_code_matrix matrix;
    uint8_t *out = (uint8_t *)at;
    if (!matrix_of(coder, bits, &at, &matrix)) continue;
    qkv_mix_pack(columns + (size_t)tables->begins[bits + 1] * QKV_PAGE_TOKENS, matrix.lanes, matrix.steps, bits, out);
  }
}

static bool values_match(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  const value_tables *tables = coder->tables;
  uint8_t codes[QKV_DIM_MAX];
  if (!qkvi_sizes_match(block, slot, code_value(coder, row, codes))) return false;
  const uint8_t *at = block + QKVI_SIZES_BYTES;
  for (unsigned bits = QKV_DEPTH_MAX; bits >= 1; bits--) {
    qkv_code_matrix matrix;
    if (!matrix_of(coder, bits, &at, &matrix)) continue;
    for (size_t lane = 0; lane < matrix.lanes; lane++) {
      if (qkv_mix_code(matrix.codes, matrix.steps, bits, lane, slot) != codes[tables->begins[bits + 1] + lane])
        return false;
    }
  }
  return true;
}

static void commvq_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                              qkv_precision precision, float *sums) {
  (void)precision;  // sums of table entries, in floats
  const value_tables *tables = coder->tables;
  float sizes[QKV_PAGE_TOKENS], scaled[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t i = 0; i < n; i++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
      scaled[i * QKV_PAGE_TOKENS + t] = weights[i * QKV_PAGE_TOKENS + t] * sizes[t];
  }
  const uint8_t *at = block + QKVI_SIZES_BYTES;
  for (unsigned bits = QKV_DEPTH_MAX; bits >= 1; bits--) {
    qkv_code_matrix matrix;
    float values[1 << QKV_DEPTH_MAX];
    if (!matrix_of(coder, bits, &at, &matrix)) continue;
    for (unsigned code = 0; code < 1u << bits; code++) values[code] = level(bits, (uint8_t)code);
    matrix.values = values;
    qkv_mix(&matrix, scaled, n, sums + tables->begins[bits + 1], coder->dim);
  }
}

static void commvq_output(const qkv_part_coder *coder, float *sums, const double *totals, size_t n) {
  const value_tables *tables = coder->tables;
  from_axes(coder, sums, n);
  for (size_t i = 0; tables->transform != NULL && i < n; i++) {
    for (size_t c = 0; c < coder->dim; c++)
      sums[i * coder->dim + c] += (float)(totals[i] * (double)tables->transform->mean[c]);
  }
}

static void decode_values(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const value_tables *tables = coder->tables;
  const size_t dim = coder->dim;
  uint8_t codes[QKV_DIM_MAX * QKV_PAGE_TOKENS];
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  memset(rows, 0, QKV_PAGE_TOKENS * dim * sizeof *rows);
  const uint8_t *at = block + QKVI_SIZES_BYTES;
  for (unsigned bits = QKV_DEPTH_MAX; bits >= 1; bits--) {
    qkv_code_matrix matrix;
    if (!matrix_of(coder, bits, &at, &matrix)) continue;
    qkv_mix_unpack(matrix.codes, matrix.lanes, matrix.steps, bits, codes);
    for (size_t i = 0; i < matrix.lanes * QKV_PAGE_TOKENS; i++) {
      const size_t t = i % QKV_PAGE_TOKENS;
      rows[t * dim + tables->begins[bits + 1] + i / QKV_PAGE_TOKENS] = sizes[t] * level(bits, codes[i]);
    }
  }
  from_axes(coder, rows, QKV_PAGE_TOKENS);
  for (size_t i = 0; tables->transform != NULL && i < QKV_PAGE_TOKENS * dim; i++)
    rows[i] += tables->transform->mean[i % dim];
}

// ---- Both ----

static size_t commvq_head_bytes(const qkv_part_coder *coder) {
  return coder->part == QKV_K ? sizeof(key_tables) + coder->dim * sizeof(uint16_t) : sizeof(value_tables);
}

static void head_of_values(const qkv_part_coder *coder, const qkv_transform *transform, value_tables *tables) {
  *tables = (value_tables){.transform = transform, .size = 1};
  tables->begins[0] = coder->dim;
  for (unsigned bits = 1; bits <= QKV_DEPTH_MAX; bits++) {
    const unsigned tier = coder->bits * QKV_TIER_BIT;
    tables->begins[bits] = transform != NULL     ? transform->schedule->reach[tier][bits]
                           : bits <= coder->bits ? coder->dim
                                                 : 0;
  }
  double square = 0;
  for (size_t i = 0; transform != NULL && i < (size_t)coder->dim * coder->dim; i++)
    square += (double)transform->synthesis[i] * (double)transform->synthesis[i];
  if (square > 0) tables->size = (float)sqrt(square / coder->dim);
}

static void commvq_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                        uint32_t layer, uint32_t kv_head, void *made) {
  if (coder->part == QKV_V) {
    const qkv_transform *transform =
        calibration == NULL ? NULL : qkv_calibration_transform(calibration, layer, kv_head, QKV_PART_V);
    const bool data_free = transform == NULL || transform->analysis == NULL;  // a trial may have left it so
    return head_of_values(coder, data_free ? NULL : transform, made);
  }
  key_tables *tables = made;
  *tables = (key_tables){.calibration = calibration, .layer = layer, .kv_head = kv_head};
  qkv_commvq_pairs(spec->rope, coder->dim, tables->coordinates);
}

static void commvq_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  if (coder->part == QKV_K) return encode_keys(coder, rows, tokens, block);
  encode_values(coder, rows, tokens, block);
}

static void commvq_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  if (coder->part == QKV_K) return decode_keys(coder, block, rows);
  decode_values(coder, block, rows);
}

static bool commvq_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  return coder->part == QKV_K ? keys_match(coder, block, slot, row) : values_match(coder, block, slot, row);
}

// What was measured of Gaussian rows without a calibration, and 3 %.
static double commvq_error_bound(double bits) {
  return bits >= 2 ? 0.123 : 0.375;
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = commvq_init,
                                    .head_bytes = commvq_head_bytes,
                                    .head = commvq_head,
                                    .encode = commvq_encode,
                                    .columns = commvq_columns,
                                    .accumulate = commvq_accumulate,
                                    .output_mean = commvq_output,
                                    .decode = commvq_decode,
                                    .matches = commvq_matches,
                                    .validate = qkvi_sizes_validate};

static const qkv_codec_section section = {.version = QKV_COMMVQ_SECTION_VERSION,
                                          .keys_only = true,
                                          .bytes = qkv_commvq_section_bytes,
                                          .make = qkv_commvq_section_make,
                                          .clear = qkv_commvq_section_clear,
                                          .validate = qkv_commvq_section_validate};

const qkv_codec qkvi_codec_commvq = {.id = ID,
                                     .name = "commvq",
                                     .calibrated = true,
                                     .section = &section,
                                     .needs_rope = true,
                                     .bits_valid = bits_valid,
                                     .bits_text = "1 and 2 with commvq",
                                     .error_bound = commvq_error_bound,
                                     .part = &part,
                                     QKV_CODEC_OF_PARTS};
