#include "engine/codec/pq.h"

#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/pq_book.h"
#include "engine/codec/sized.h"
#include "engine/kernel/kernel.h"

// Queries are taken LANES at a time, so that a look-up is of all of them.
enum { ID = QKV_PQ_CODEC, VERSION = 1, CODE_BITS = 8, LANES = QKV_POINT_QUERIES };

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

static bool bits_valid(double bits) {
  return bits == 1 || bits == 2 || bits == 4;
}

typedef struct head_tables {
  const qkv_calibration *calibration;  // NULL:
  const qkv_pq_book *data_free;
  uint32_t layer, kv_head;
} head_tables;

static size_t width_of(const qkv_part_coder *coder) {
  return CODE_BITS / coder->bits;
}

static const qkv_pq_book *book_of(const qkv_part_coder *coder) {
  const head_tables *tables = coder->tables;
  if (tables->calibration == NULL) return tables->data_free;
  return qkv_pq_book_calibrated(tables->calibration, tables->layer, tables->kv_head, coder->part, width_of(coder));
}

static size_t subs_of(const qkv_part_coder *coder) {
  return (size_t)coder->dim * coder->bits / CODE_BITS;
}

static const uint8_t *codes_of(const uint8_t *block) {
  return block + QKVI_SIZES_BYTES;
}

static void pq_init(qkv_part_coder *coder) {
  coder->block_bytes = (uint32_t)(QKVI_SIZES_BYTES + subs_of(coder) * QKV_PAGE_TOKENS);
}

static size_t pq_head_bytes(const qkv_part_coder *coder) {
  (void)coder;
  return sizeof(head_tables);
}

static void pq_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                    uint32_t layer, uint32_t kv_head, void *tables) {
  (void)spec;
  *(head_tables *)tables = (head_tables){.calibration = calibration,
                                         .data_free = qkv_pq_book_get(coder->dim, width_of(coder)),
                                         .layer = layer,
                                         .kv_head = kv_head};
}

// The codes of a row's sub-vectors, and its RMS.
static float code_row(const qkv_part_coder *coder, const float *row, uint8_t *codes) {
  const qkv_pq_book *book = book_of(coder);
  float turned[QKV_DIM_MAX];
  const float rms = qkvi_size_of(row, coder->dim, turned);
  memset(codes, 0, subs_of(coder));
  if (rms == 0) return 0;
  qkv_hadamard_forward(turned, 1, coder->dim);
  for (size_t s = 0; s < subs_of(coder); s++) codes[s] = qkv_pq_nearest(book, s, turned + s * book->width);
  return rms;
}

static void pq_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  float sizes[QKV_PAGE_TOKENS] = {0};
  uint8_t codes[QKV_DIM_MAX], *out = (uint8_t *)codes_of(block);
  for (uint32_t t = 0; t < tokens; t++) {
    sizes[t] = code_row(coder, rows + t * coder->dim, codes);
    for (size_t s = 0; s < subs_of(coder); s++) out[s * QKV_PAGE_TOKENS + t] = codes[s];
  }
  qkvi_sizes_write(sizes, block);
}

// ---- Scores ----

static size_t groups_of(size_t n) {
  return (n + LANES - 1) / LANES;
}

// Whether the tables of so many queries fit into QKV_QUERY_OWN_MAX bytes.
static bool has_tables(const qkv_part_coder *coder, size_t n) {
  return groups_of(n) * LANES * subs_of(coder) * QKV_PQ_POINTS * sizeof(float) <= QKV_QUERY_OWN_MAX;
}

// Of a point with a sub-vector of LANES queries [width][LANES].
static inline lanes multiply(const float *point, size_t width, const lanes *queries) {
  lanes sum = {0};
  for (size_t j = 0; j < width; j++) sum += point[j] * queries[j];
  return sum;
}

// `ready`: tables [groups][subs][256][LANES] or, where these do not fit, queries [groups][dim][LANES], rotated.
static void pq_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  const qkv_pq_book *book = book_of(coder);
  const size_t dim = coder->dim, width = book->width, subs = subs_of(coder);
  const bool tables = has_tables(coder, n);
  lanes *out = (lanes *)ready, together[QKV_DIM_MAX];
  float turned[QKV_DIM_MAX];
  for (size_t group = 0; group < groups_of(n); group++) {
    memset(together, 0, sizeof together);
    for (size_t i = 0; i < LANES && group * LANES + i < n; i++) {
      memcpy(turned, queries + (group * LANES + i) * dim, dim * sizeof *turned);
      qkv_hadamard_forward(turned, 1, dim);
      for (size_t c = 0; c < dim; c++) together[c][i] = turned[c];
    }
    if (!tables) memcpy(out + group * dim, together, dim * sizeof *together);
    for (size_t i = 0; tables && i < subs * QKV_PQ_POINTS; i++) {
      const float *points = qkv_pq_points(book, i / QKV_PQ_POINTS);
      out[group * subs * QKV_PQ_POINTS + i] =
          multiply(points + i % QKV_PQ_POINTS * width, width, together + i / QKV_PQ_POINTS * width);
    }
  }
}

static void pq_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                      qkv_precision precision, float *scores) {
  (void)precision;  // sums of table entries, in floats
  const qkv_pq_book *book = book_of(coder);
  const size_t subs = subs_of(coder), width = book->width;
  const lanes *ready = (const lanes *)queries;
  const bool tables = has_tables(coder, n);
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t group = 0; group < groups_of(n); group++) {
    lanes sums[QKV_PAGE_TOKENS] = {{0}};
    if (tables)
      qkv_kernels_get()->sum_look_ups((const float *)(ready + group * subs * QKV_PQ_POINTS), subs, codes_of(block),
                                      (float *)sums);
    for (size_t s = group * subs; !tables && s < (group + 1) * subs; s++) {
      const uint8_t *codes = codes_of(block) + s % subs * QKV_PAGE_TOKENS;
      const float *points = qkv_pq_points(book, s % subs);
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
        sums[t] += multiply(points + codes[t] * width, width, ready + s * width);
    }
    for (size_t i = 0; i < LANES && group * LANES + i < n; i++) {
      float *row = scores + (group * LANES + i) * QKV_PAGE_TOKENS;
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) row[t] = sizes[t] * sums[t][i];
    }
  }
}

// ---- Values ----

static void pq_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                          qkv_precision precision, float *sums) {
  (void)precision;  // sums of table entries, in floats
  const qkv_pq_book *book = book_of(coder);
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t group = 0; group < groups_of(n); group++) {
    const size_t count = n - group * LANES < LANES ? n - group * LANES : LANES;
    lanes scaled[QKV_PAGE_TOKENS] = {{0}};
    for (size_t i = 0; i < count; i++) {
      const float *row = weights + (group * LANES + i) * QKV_PAGE_TOKENS;
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) scaled[t][i] = row[t] * sizes[t];
    }
    lanes found[QKV_DIM_MAX];
    qkv_kernels_get()->weigh_points(book->numbers, book->stride, book->width, subs_of(coder), codes_of(block),
                                    (const float *)scaled, (float *)found);
    for (size_t i = 0; i < count; i++) {
      float *row = sums + (group * LANES + i) * coder->dim;
      for (size_t c = 0; c < coder->dim; c++) row[c] += found[c][i];
    }
  }
}

static void pq_output(const qkv_part_coder *coder, float *sums, size_t n) {
  qkv_hadamard_inverse(sums, n, coder->dim);
}

// ---- Rows ----

static void pq_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  const qkv_pq_book *book = book_of(coder);
  const uint8_t *codes = codes_of(block);
  float sizes[QKV_PAGE_TOKENS];
  qkvi_sizes_read(block, sizes);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    for (size_t c = 0; c < coder->dim; c++) {
      const uint8_t code = codes[c / book->width * QKV_PAGE_TOKENS + t];
      const float *points = qkv_pq_points(book, c / book->width);
      rows[t * coder->dim + c] = sizes[t] * points[code * book->width + c % book->width];
    }
  }
  qkv_hadamard_inverse(rows, QKV_PAGE_TOKENS, coder->dim);
}

static bool pq_matches(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  uint8_t codes[QKV_DIM_MAX];
  if (!qkvi_sizes_match(block, slot, code_row(coder, row, codes))) return false;
  for (size_t s = 0; s < subs_of(coder); s++) {
    if (codes_of(block)[s * QKV_PAGE_TOKENS + slot] != codes[s]) return false;
  }
  return true;
}

// What was measured of Gaussian rows of 128, and 3 %.
static double pq_error_bound(double bits) {
  return bits >= 4 ? 0.0095 : bits >= 2 ? 0.105 : 0.34;
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = pq_init,
                                    .head_bytes = pq_head_bytes,
                                    .head = pq_head,
                                    .encode = pq_encode,
                                    .query = pq_query,
                                    .scores = pq_scores,
                                    .accumulate = pq_accumulate,
                                    .output = pq_output,
                                    .decode = pq_decode,
                                    .matches = pq_matches,
                                    .validate = qkvi_sizes_validate};

static const qkv_codec_section section = {.version = QKV_PQ_SECTION_VERSION,
                                          .bytes = qkv_pq_section_bytes,
                                          .make = qkv_pq_section_make,
                                          .clear = qkv_pq_section_clear,
                                          .validate = qkv_pq_section_validate};

const qkv_codec qkvi_codec_pq = {.id = ID,
                                 .name = "pq",
                                 .calibrated = true,
                                 .section = &section,
                                 .bits_valid = bits_valid,
                                 .bits_text = "1, 2 and 4 with pq",
                                 .error_bound = pq_error_bound,
                                 .part = &part,
                                 QKV_CODEC_OF_PARTS};
