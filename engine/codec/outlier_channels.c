#include "engine/codec/outlier_channels.h"

#include <stdlib.h>
#include <string.h>

#include "engine/codec/commvq_book.h"
#include "engine/codec/sphere.h"
#include "engine/codec/turboquant.h"
#include "engine/codec/turboquant_ip.h"

enum { ID = 10, IP_ID = 11, VERSION = 1, ALIGN = 64, SETS = 2, BITS_MAX = 4 };

// A head's tables.
typedef struct channel_sets {
  qkv_part_coder sets[SETS];  // of dim 0: there is no such set
  uint16_t channels[];        // [dim]: those of the first set, then those of the other one
} channel_sets;

static bool bits_valid(double bits) {
  return bits <= BITS_MAX && qkvi_whole_bits_valid(bits);
}

static bool n_out_valid(uint32_t n_out) {
  return n_out >= QKV_BAND && n_out < QKV_DIM_MAX && n_out % QKV_BAND == 0;
}

// By default a quarter of the channels.
static const qkv_parameter parameters[] = {
    {.name = "n_out", .fallback = 0, .valid = n_out_valid, .text = "multiples of 8 from 8 to 1016"}};

static bool ip_bits_valid(double bits) {
  return bits >= 2 && bits_valid(bits);
}

// ---- The sets ----

static void init_sets(const qkv_part_coder *coder, const qkv_part_codec *inner, uint8_t least,
                      qkv_part_coder sets[SETS]) {
  const uint16_t quarter = (uint16_t)((coder->dim / 4 + QKV_BAND / 2) / QKV_BAND * QKV_BAND);
  const uint16_t most = (uint16_t)(coder->dim - QKV_BAND), said = (uint16_t)coder->parameters[0];
  const uint16_t wanted = said != 0 ? said : quarter < QKV_BAND ? QKV_BAND : quarter;
  const uint16_t first = wanted < most ? wanted : most;
  const uint8_t more = coder->bits < BITS_MAX ? coder->bits + 1 : BITS_MAX;
  const uint8_t fewer = coder->bits - 1 > least ? coder->bits - 1 : least;
  for (size_t s = 0; s < SETS; s++) {
    sets[s] = *coder;
    sets[s].codec = inner;
    sets[s].dim = s == 0 ? first : coder->dim - first;
    sets[s].bits = s == 0 ? more : first == 0 ? coder->bits : fewer;
    sets[s].parameters[0] = coder->parameters[1] != 0 ? coder->parameters[1] : qkvi_turboquant_parameters[0].fallback;
    sets[s].block_bytes = 0;
    if (sets[s].dim > 0) inner->init(&sets[s]);
    sets[s].block_bytes = (sets[s].block_bytes + ALIGN - 1) / ALIGN * ALIGN;
  }
}

static void sets_of(const qkv_part_coder *coder, qkv_part_coder sets[SETS]);

static void outliers_init(qkv_part_coder *coder) {
  qkv_part_coder sets[SETS];
  sets_of(coder, sets);
  coder->block_bytes = sets[0].block_bytes + sets[1].block_bytes;
}

static size_t outliers_head_bytes(const qkv_part_coder *coder) {
  return sizeof(channel_sets) + coder->dim * sizeof(uint16_t);
}

// Mean squares of channels, less where they are one of a pair.
static void read_squares(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_transform *transform,
                         double *squares) {
  const size_t dim = coder->dim;
  uint16_t pairs[QKV_DIM_MAX];
  for (size_t j = 0; j < dim; j++) {
    squares[j] = (double)transform->mean[j] * (double)transform->mean[j];
    for (size_t c = 0; c < dim; c++)
      squares[j] += (double)transform->synthesis[c * dim + j] * (double)transform->synthesis[c * dim + j];
  }
  if (coder->part == QKV_V || spec->rope->theta == 0) return;
  qkv_commvq_pairs(spec->rope, dim, pairs);
  for (size_t i = 0; i < spec->rope->width; i += 2)
    squares[pairs[i]] = squares[pairs[i + 1]] = (squares[pairs[i]] + squares[pairs[i + 1]]) / 2;
}

static void outliers_head(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
                          uint32_t layer, uint32_t kv_head, void *tables) {
  channel_sets *made = tables;
  double squares[QKV_DIM_MAX] = {0};
  bool taken[QKV_DIM_MAX] = {false};
  sets_of(coder, made->sets);
  if (calibration != NULL) {
    const qkv_calibration_part part = coder->part == QKV_V ? QKV_PART_V : QKV_PART_K_ARCHIVE;
    const qkv_transform *transform = qkv_calibration_transform(calibration, layer, kv_head, part);
    if (transform->analysis != NULL) read_squares(coder, spec, transform, squares);
  }
  for (size_t i = 0; i < made->sets[0].dim; i++) {
    size_t largest = coder->dim;
    for (size_t c = 0; c < coder->dim; c++) {
      if (!taken[c] && (largest == coder->dim || squares[c] > squares[largest])) largest = c;
    }
    taken[largest] = true;
  }
  size_t count = 0;
  for (size_t set = 0; set < SETS; set++) {
    for (size_t c = 0; c < coder->dim; c++) {
      if (taken[c] == (set == 0)) made->channels[count++] = (uint16_t)c;
    }
  }
}

// A set's coder, and where its channels and its block are.
typedef struct view {
  const qkv_part_coder *set;
  const uint16_t *channels;
  size_t offset;
} view;

static view view_of(const qkv_part_coder *coder, size_t s) {
  const channel_sets *tables = coder->tables;
  const qkv_part_coder *sets = tables->sets;
  return (view){.set = &sets[s],
                .channels = tables->channels + (s == 0 ? 0 : sets[0].dim),
                .offset = s == 0 ? 0 : sets[0].block_bytes};
}

// The channels of a set, of rows [n][dim], and back.
static void gather(const qkv_part_coder *coder, const view *of, const float *rows, size_t n, float *out) {
  for (size_t i = 0; i < n; i++, rows += coder->dim, out += of->set->dim) {
    for (size_t c = 0; c < of->set->dim; c++) out[c] = rows[of->channels[c]];
  }
}

static void scatter(const qkv_part_coder *coder, const view *of, const float *in, size_t n, float *rows) {
  for (size_t i = 0; i < n; i++, rows += coder->dim, in += of->set->dim) {
    for (size_t c = 0; c < of->set->dim; c++) rows[of->channels[c]] = in[c];
  }
}

// ---- Rows ----

static void outliers_encode(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block) {
  float part[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    gather(coder, &of, rows, QKV_PAGE_TOKENS, part);
    if (of.set->dim > 0) of.set->codec->encode(of.set, part, tokens, block + of.offset);
  }
}

static void outliers_decode(const qkv_part_coder *coder, const uint8_t *block, float *rows) {
  float part[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    if (of.set->dim > 0) of.set->codec->decode(of.set, block + of.offset, part);
    scatter(coder, &of, part, QKV_PAGE_TOKENS, rows);
  }
}

static void outliers_round_trip(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                                float *decoded) {
  float part[QKV_DIM_MAX], coded[QKV_DIM_MAX];
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    if (of.set->dim == 0) continue;
    gather(coder, &of, row, 1, part);
    of.set->codec->round_trip(of.set, block + of.offset, slot, part, coded);
    scatter(coder, &of, coded, 1, decoded);
  }
}

static bool outliers_match(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row) {
  float part[QKV_DIM_MAX];
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    gather(coder, &of, row, 1, part);
    if (of.set->dim > 0 && !of.set->codec->matches(of.set, block + of.offset, slot, part)) return false;
  }
  return true;
}

static const char *outliers_validate(const qkv_part_coder *coder, const uint8_t *block) {
  const char *wrong = NULL;
  for (size_t s = 0; s < SETS && wrong == NULL; s++) {
    const view of = view_of(coder, s);
    if (of.set->dim > 0) wrong = of.set->codec->validate(of.set, block + of.offset);
  }
  return wrong;
}

// ---- Attention ----

// What the sets' queries take, in floats: as of turboquant-ip, which has two for each coordinate.
static size_t ready_floats(const view *of, size_t n) {
  return 2 * n * of->set->dim;
}

static void outliers_query(const qkv_part_coder *coder, const float *queries, size_t n, float *ready) {
  float part[QKV_QUERY_BLOCK * QKV_DIM_MAX];
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    gather(coder, &of, queries, n, part);
    if (of.set->dim > 0) of.set->codec->query(of.set, part, n, ready);
    ready += ready_floats(&of, n);
  }
}

static void outliers_scores(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                            qkv_precision precision, float *scores) {
  float part[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  memset(scores, 0, n * QKV_PAGE_TOKENS * sizeof *scores);
  for (size_t s = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    if (of.set->dim == 0) continue;
    of.set->codec->scores(of.set, block + of.offset, queries, n, precision, part);
    for (size_t i = 0; i < n * QKV_PAGE_TOKENS; i++) scores[i] += part[i];
    queries += ready_floats(&of, n);
  }
}

// Sums in code space have the coordinates of the first set, then those of the other one.
static void outliers_accumulate(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                                qkv_precision precision, float *sums) {
  float part[QKV_QUERY_BLOCK * QKV_DIM_MAX];
  for (size_t s = 0, begin = 0; s < SETS; s++) {
    const view of = view_of(coder, s);
    const size_t dim = of.set->dim;
    if (dim == 0) continue;
    memset(part, 0, n * dim * sizeof *part);
    of.set->codec->accumulate(of.set, block + of.offset, weights, n, precision, part);
    for (size_t i = 0; i < n * dim; i++) sums[i / dim * coder->dim + begin + i % dim] += part[i];
    begin += dim;
  }
}

static void outliers_turn(const qkv_part_coder *coder, const float *rows, size_t n, float *turned) {
  float part[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++) {
    for (size_t s = 0; s < SETS; s++) {
      const view of = view_of(coder, s);
      if (of.set->dim == 0) continue;
      gather(coder, &of, rows + i * coder->dim, 1, part);
      of.set->codec->query(of.set, part, 1, turned);
      turned += of.set->dim;
    }
  }
}

static void outliers_output(const qkv_part_coder *coder, float *sums, size_t n) {
  float part[QKV_DIM_MAX], row[QKV_DIM_MAX];
  for (size_t i = 0; i < n; i++, sums += coder->dim) {
    for (size_t s = 0, begin = 0; s < SETS; s++) {
      const view of = view_of(coder, s);
      if (of.set->dim == 0) continue;
      memcpy(part, sums + begin, of.set->dim * sizeof *part);
      of.set->codec->output(of.set, part, 1);
      scatter(coder, &of, part, 1, row);
      begin += of.set->dim;
    }
    memcpy(sums, row, coder->dim * sizeof *row);
  }
}

// ---- The codecs ----

#define FUNCTIONS                                                                                                   \
  .version = VERSION, .head_bytes = outliers_head_bytes, .head = outliers_head, .encode = outliers_encode,          \
  .query = outliers_query, .scores = outliers_scores, .accumulate = outliers_accumulate, .output = outliers_output, \
  .decode = outliers_decode, .matches = outliers_match, .validate = outliers_validate

static const qkv_part_codec part = {
    .id = ID, .init = outliers_init, .turn = outliers_turn, .round_trip = outliers_round_trip, FUNCTIONS};

// Values are those of turboquant-outliers.
static void ip_init(qkv_part_coder *coder) {
  if (coder->part == QKV_V) coder->codec = &part;
  outliers_init(coder);
}

static const qkv_part_codec ip_part = {.id = IP_ID, .init = ip_init, FUNCTIONS};

static void sets_of(const qkv_part_coder *coder, qkv_part_coder sets[SETS]) {
  const bool ip = coder->codec == &ip_part;
  init_sets(coder, ip ? qkvi_codec_turboquant_ip.part : &qkvi_part_turboquant, ip ? 2 : 1, sets);
}

// Of rows whose channels are alike, a quarter of which have a bit more.
static double bound_of(double bits, double least, double (*inner)(double)) {
  const double more = bits < BITS_MAX ? bits + 1 : BITS_MAX, fewer = bits - 1 > least ? bits - 1 : least;
  return inner(more) / 4 + inner(fewer) * 3 / 4;
}

static double outliers_error_bound(double bits) {
  return bound_of(bits, 1, qkvi_codec_turboquant.error_bound);
}

static double ip_error_bound(double bits) {
  return bound_of(bits, 2, qkvi_codec_turboquant_ip.error_bound);
}

const qkv_codec qkvi_codec_turboquant_outliers = {.id = ID,
                                                  .name = "turboquant-outliers",
                                                  .calibrated = true,
                                                  .bits_valid = bits_valid,
                                                  .bits_text = "1, 2, 3 and 4 with turboquant-outliers",
                                                  .parameters = parameters,
                                                  .parameter_count = sizeof parameters / sizeof *parameters,
                                                  .inner = &qkvi_codec_turboquant,
                                                  .error_bound = outliers_error_bound,
                                                  .part = &part,
                                                  QKV_CODEC_OF_PARTS};

const qkv_codec qkvi_codec_turboquant_ip_outliers = {.id = IP_ID,
                                                     .name = "turboquant-ip-outliers",
                                                     .calibrated = true,
                                                     .bits_valid = ip_bits_valid,
                                                     .bits_text = "2, 3 and 4 with turboquant-ip-outliers",
                                                     .parameters = parameters,
                                                     .parameter_count = sizeof parameters / sizeof *parameters,
                                                     .inner = &qkvi_codec_turboquant_ip,
                                                     .error_bound = ip_error_bound,
                                                     .part = &ip_part,
                                                     QKV_CODEC_OF_PARTS};
