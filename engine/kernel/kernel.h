// The kernels on codes, behind one dispatch table.
//
// The scalar reference (reference.c) defines the bytes and the arithmetic; every faster variant is declared by the
// same macros and gives the same bits (tests/checkkern). All work on one head's K or V of one page, in code space.
// Sums run over coordinates in order (scores) and over tokens in order (accumulate), in fp32 without contraction.
//
// Threads: pure functions. Tiles of one group live on the stack (16 x QKV_DIM_MAX floats at most).
#ifndef QKV_ENGINE_KERNEL_KERNEL_H
#define QKV_ENGINE_KERNEL_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/codec/outliers.h"
#include "engine/codec/page.h"
#include "engine/kernel/dense.h"
#include "engine/kernel/entries.h"
#include "engine/kernel/integer.h"
#include "engine/kernel/mix.h"
#include "engine/kernel/points.h"

// scores[n][64] = gain_t * sum_c queries[n][c] * value(code_tc).
#define QKV_DECLARE_SCORES(name) void name(const qkv_page_codes *keys, const float *queries, size_t n, float *scores)
// sums[n][dim] += sum_t weights[n][t] * gain_t * value(code_tc).
#define QKV_DECLARE_ACCUMULATE(name) \
  void name(const qkv_page_codes *values, const float *weights, size_t n, float *sums)
// rows [64][dim], transformed, to gains [64] and the codes of four groups at `tier`, one after the other. Gains make
// the squared error least with these weights [dim] of coordinates; NULL: all 1. errors [64], about, of coordinates
// that have bits (encode_plain.h).
#define QKV_DECLARE_ENCODE(name)                                                                                 \
  void name(qkv_part part, const qkv_schedule *schedule, unsigned tier, const float *weights, const float *rows, \
            uint8_t *gains, uint8_t *codes, float *errors)
// Rows that may lie apart.
typedef struct qkv_rows {
  qkv_dtype dtype;
  const uint8_t *data;
  size_t stride, bytes;         // from one to the next; of one
  const struct qkv_rows *next;  // those of the same tokens that are wanted next; NULL: none
} qkv_rows;

// Rows of one head lie apart in memory, which hardware prefetchers do not predict: the next ones are prefetched here.
static inline void qkvi_fetch_row(const qkv_rows *rows, size_t t) {
  enum { LINE = 64 };
  const uint8_t *at = rows->data + t * rows->stride;
  for (size_t i = 0; i < rows->bytes; i += LINE) __builtin_prefetch(at + i);
}

// Encodes `tokens` rows as they came, through the Hadamard transform; slots behind them count as zeros. squares [64]:
// the rows' squared lengths; errors [64]: squared errors over all coordinates, those without bits included.
#define QKV_DECLARE_ENCODE_ROWS(name)                                                                        \
  void name(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkv_rows *rows, size_t tokens, \
            uint8_t *gains, uint8_t *codes, float *errors, float *squares)
// out [tokens][dim]: rows in floats; squares [tokens]: their squared lengths (qkvi_row_dot of engine/codec/row.h).
#define QKV_DECLARE_LOAD_ROWS(name) \
  void name(const qkv_rows *rows, size_t tokens, size_t dim, float *out, float *squares)
// rows [64][dim] = gain_t * value(code_tc), by slot.
#define QKV_DECLARE_DECODE(name) void name(qkv_part part, const qkv_page_codes *codes, float *rows)

// The largest of a tile's scores [64].
#define QKV_DECLARE_LARGEST(name) float name(const float *scores)
// Scores [64] become weights exp(score - peak), peak the largest so far; returns their sum.
#define QKV_DECLARE_WEIGH(name) double name(float *scores, float peak)
// engine/codec/hadamard.h: rows [n][dim] in place.
#define QKV_DECLARE_HADAMARD(name) void name(float *rows, size_t n, size_t dim)
// What anchors are chosen by, of rows [tokens][dim]: sums [4][dim] of each group's rows; with weights [dim], the sum
// of all squares and that of the squares of differences between neighbours.
#define QKV_DECLARE_SUMS(name)                                                                                \
  void name(const float *rows, size_t tokens, size_t dim, const float *weights, float *sums, double *squares, \
            double *steps)
// out [n][dim] = rows [n][dim] less one row.
#define QKV_DECLARE_SUBTRACT(name) void name(const float *rows, size_t n, size_t dim, const float *row, float *out)
// Dense transforms of rows [n][dim] in place, matrix [dim][dim]. `multiply`: products with the matrix's first
// `coordinates` rows, then zeros; each is a sum over 16 lanes, j % 16, which are then added by halves. `combine`:
// sum_c row[c] matrix[c] over the first `coordinates`, in their order.
#define QKV_DECLARE_DENSE(name) void name(const float *matrix, size_t dim, size_t coordinates, float *rows, size_t n)
// `multiply` in whole numbers (dense.h), with the matrix's first `coordinates` outputs, of rows less `mean` [dim]; to
// these outputs `added` [dim] is added. NULL: zeros.
#define QKV_DECLARE_MULTIPLY_INTEGER(name) \
  void name(const qkv_dense *matrix, size_t coordinates, const float *mean, const float *added, float *rows, size_t n)

// How the slots of a page turn from its centre: pair p of coordinates, p * step and p * step + apart, by angles whose
// cosines and sines are [pairs][64]. Coordinates from 2 * pairs on do not turn.
typedef struct qkv_slot_turns {
  size_t pairs, step, apart;
  const float *cosines, *sines;
} qkv_slot_turns;

// scores [n][64] += factors[i][j][0] cosine + factors[i][j][1] sine of pair pairs[j] of `count`; factors
// [n][count][2].
#define QKV_DECLARE_ADD_WAVES(name)                                                                           \
  void name(const qkv_slot_turns *turns, const uint16_t *pairs, size_t count, const float *factors, size_t n, \
            float *scores)
// scores [n][64] = query . row_t, the rows given as columns [dim][64], with the means [4][dim] of their groups added
// and then turned.
#define QKV_DECLARE_SCORE_COLUMNS(name)                                                                              \
  void name(const float *columns, size_t dim, const float *means, const qkv_slot_turns *turns, const float *queries, \
            size_t n, float *scores)

// Cosines and sines [pairs] of turns.
typedef struct qkv_pair_turns {
  const float *cosines, *sines;
} qkv_pair_turns;

// How rows turn, pair p of coordinates being p * step and p * step + apart: by the page's angles [pairs] and the
// slots' [rows][pairs]. Coordinates from 2 * pairs on do not turn.
typedef struct qkv_row_turns {
  size_t pairs, step, apart;
  qkv_pair_turns page, slots;
} qkv_row_turns;

// rows [n][dim] in place: pairs turn by the page's angle and the slot's together, or, with `back`, by as much back.
#define QKV_DECLARE_TURN_ROWS(name) \
  void name(const qkv_row_turns *turns, bool back, size_t n, size_t dim, float *rows)
// The attend frame, rows [n][dim] in place: pairs turn back by the page's angle, and then the anchor (x, y) [pairs],
// turned by the slot's angle, is taken off; or, with `out`, it is added, and then pairs turn by the page's angle.
#define QKV_DECLARE_FRAME_ROWS(name) \
  void name(const qkv_row_turns *turns, const float *x, const float *y, bool out, size_t n, size_t dim, float *rows)

// ---- Walks over pages (engine/codec/walk.h) ----

// after = before (NULL: 0) + products with inputs [first, first + count) of a matrix, both even, in whole numbers
// (dense.h): numbers [n][count], sums [n][coordinates up to 16s]. `before` may be `after`.
#define QKV_DECLARE_ADD_PRODUCTS(name)                                                                       \
  void name(const qkv_dense *matrix, size_t coordinates, size_t first, size_t count, const int16_t *numbers, \
            size_t n, const int32_t *before, int32_t *after)
// Queries whose pairs turn, and what makes them whole numbers, and floats again.
typedef struct qkv_walk_queries {
  size_t n, stride, apart;        // a pair's first coordinate lies at its number, the second `apart` behind it
  const float *rows;              // [n][stride]
  const float *factors, *scales;  // [n]
} qkv_walk_queries;

// Pairs [first, end), turned back by `base` and from there by `on`: a pair (a, b) becomes two numbers, rounded,
//   (a cosine + b sine) factor, (b cosine - a sine) factor
typedef struct qkv_walk_level {
  size_t first, end;
  qkv_pair_turns base, on;
  int32_t *sums;  // NULL: not kept
} qkv_walk_level;

// Sums [n][coordinates up to 16s] of each level: `before` + products with the numbers of its pairs and of those of
// all levels before it, pair p being inputs 2 p and 2 p + 1 of the matrix (dense.h). A level ends where the one
// before it begins. rows [n][matrix->dim]: the last sums times the matrix's scales and the queries', then zeros.
#define QKV_DECLARE_SUM_LEVELS(name)                                                      \
  void name(const qkv_dense *matrix, size_t coordinates, const qkv_walk_queries *queries, \
            const qkv_walk_level *levels, size_t count, const int32_t *before, float *rows)

enum {
  QKV_WAVE_SLOTS = QKV_PAGE_TOKENS / 2,  // distances to the middle of a page: 0.5, 1.5, ..., 31.5
  QKV_WAVE_TERMS = 4,                    // of polynomials
};

// How pairs' cosines and sines look within a page, whose middle is between slots 31 and 32: of the first ones, which
// turn fast, as waves, and of the others as polynomials of v = distance / 32.
typedef struct qkv_page_waves {
  size_t pairs, stride;          // stride: pairs up to 8s
  size_t fast;                   // the first ones, which have waves
  const float *cosines, *sines;  // [fast][QKV_WAVE_SLOTS]
  size_t ends[QKV_WAVE_TERMS];   // pairs from here on have nothing of that term
  const float *even, *odd;       // [QKV_WAVE_TERMS][stride]: of v^2i and of v^(2i + 1); 0 of the fast ones
} qkv_page_waves;

// scores [n][64] += shares[i] + a cosine + b sine of all pairs at the slot's distance to the middle, (a, b) being
// products [n][2][stride] turned back by `base` and from there by `on`:
//   a' = a cosine + b sine, b' = b cosine - a sine
// Further products are added by fmaf. A term's sums over pairs are kept in 8 lanes, which are then added by halves;
// then, slot by slot, polynomials and the fast pairs in their order.
#define QKV_DECLARE_ADD_ANCHORS(name)                                                                             \
  void name(const qkv_page_waves *waves, qkv_pair_turns base, qkv_pair_turns on, const float *products, size_t n, \
            const float *shares, float *scores)

// In integers (integer.h): rows [n][dim] in code space become `queries`, whose memory is the caller's, of whole
// numbers up to `limit`: of a byte a coordinate up to QKVI_LIMIT_1, else of two, up to QKVI_LIMIT_2.
#define QKV_DECLARE_PREPARE(name) \
  void name(const float *rows, size_t n, uint16_t dim, float limit, qkv_integer_queries *queries)
// scores [count][64] of all the queries, in one pass over the codes for every chunk of them.
#define QKV_DECLARE_SCORES_INTEGER(name)                                                                           \
  void name(const qkv_page_codes *keys, const qkv_integer_queries *queries, qkv_layouts *layouts, qkv_ahead ahead, \
            float *scores)
// peaks [n]: the largest of each row's scores [64].
#define QKV_DECLARE_PEAKS(name) void name(const float *scores, size_t n, float *peaks)
// weights = exp(score - peak) * gain of scores [n][64] and the gains [64] of the values; totals [n] = the sums of
// exp(score - peak). What is 2^-100 or less of the peak counts 2^-100, so a row that sees no token is better left
// out: its peak is -inf, its total nearly 0.
#define QKV_DECLARE_WEIGH_INTEGER(name)                                                              \
  void name(const float *scores, const float *peaks, size_t n, const uint8_t *gains, unsigned parts, \
            qkv_integer_weights *weights, float *totals)
// sums [count][dim] += the weighted sum of the values; their gains are in the weights.
#define QKV_DECLARE_ACCUMULATE_INTEGER(name)                                                                         \
  void name(const qkv_page_codes *values, const qkv_integer_weights *weights, qkv_layouts *layouts, qkv_ahead ahead, \
            float *sums)

// Outlier rows (engine/codec/outliers.h). scores [n][64]: those of outlier slots become query . row; queries
// [n][dim].
#define QKV_DECLARE_SCORE_OUTLIERS(name) \
  void name(const qkv_outliers *keys, const float *queries, size_t n, float *scores)
// sums [n][dim] += sum over outlier slots of exp(score - peak) . row, as `weigh_integer` computes it of scores
// [n][64] and peaks [n]; peaks NULL: the scores are weights. steps [dim], NULL: all 1. n <= QKV_INTEGER_ROWS.
#define QKV_DECLARE_WEIGH_OUTLIERS(name)                                                                       \
  void name(const qkv_outliers *values, const float *steps, const float *scores, const float *peaks, size_t n, \
            float *sums)

typedef struct qkv_kernels {
  const char *name;  // "reference", "avx2", "avx512", "avx512-vnni", "amx", "neon", "neon-dotprod"
  uint32_t needs;    // processor flags (engine/base/cpu.h), all of them
  QKV_DECLARE_SCORES((*scores));
  QKV_DECLARE_ACCUMULATE((*accumulate));
  QKV_DECLARE_ENCODE((*encode));
  QKV_DECLARE_ENCODE_ROWS((*encode_rows));
  QKV_DECLARE_LOAD_ROWS((*load_rows));
  QKV_DECLARE_DECODE((*decode));
  QKV_DECLARE_LARGEST((*largest));
  QKV_DECLARE_WEIGH((*weigh));
  QKV_DECLARE_HADAMARD((*hadamard_forward));
  QKV_DECLARE_HADAMARD((*hadamard_inverse));
  QKV_DECLARE_SUMS((*sums));
  QKV_DECLARE_SUBTRACT((*subtract));
  QKV_DECLARE_DENSE((*multiply));
  QKV_DECLARE_DENSE((*combine));
  QKV_DECLARE_MULTIPLY_INTEGER((*multiply_integer));
  QKV_DECLARE_ADD_WAVES((*add_waves));
  QKV_DECLARE_SCORE_COLUMNS((*score_columns));
  QKV_DECLARE_TURN_ROWS((*turn_rows));
  QKV_DECLARE_FRAME_ROWS((*frame_rows));
  QKV_DECLARE_ADD_PRODUCTS((*add_products));
  QKV_DECLARE_SUM_LEVELS((*sum_levels));
  QKV_DECLARE_ADD_ANCHORS((*add_anchors));
  QKV_DECLARE_PREPARE((*prepare));
  QKV_DECLARE_SCORES_INTEGER((*scores_integer));
  QKV_DECLARE_PEAKS((*peaks));
  QKV_DECLARE_WEIGH_INTEGER((*weigh_integer));
  QKV_DECLARE_ACCUMULATE_INTEGER((*accumulate_integer));
  QKV_DECLARE_SCORE_OUTLIERS((*score_outliers));
  QKV_DECLARE_WEIGH_OUTLIERS((*weigh_outliers));
  QKV_DECLARE_MIX((*mix));
  QKV_DECLARE_MIX((*mix_integer));
  QKV_DECLARE_SCALE_FACTORS((*scale_factors));
  QKV_DECLARE_SUM_ENTRIES((*sum_entries));
  QKV_DECLARE_NEAREST_POINTS((*nearest_points));
  QKV_DECLARE_SUM_LOOK_UPS((*sum_look_ups));
  QKV_DECLARE_WEIGH_POINTS((*weigh_points));
} qkv_kernels;

// The ladder: tables from the reference upward, as built for this processor family. NULL beyond the end.
const qkv_kernels *qkv_kernels_at(size_t row);
// The highest table whose needs are all in `cpu_flags`.
const qkv_kernels *qkv_kernels_for(uint32_t cpu_flags);

// From here on the kernels of the machine's instructions that `cpu_mask` allows are used, and the conversions of
// engine/base/tensor.h likewise. To be called at start: calls that run at the time may use either table.
void qkv_kernels_setup(uint32_t cpu_mask);
// The table in use. Without a setup before, that for all instructions of the machine.
const qkv_kernels *qkv_kernels_get(void);

extern const qkv_kernels qkvi_kernels_reference;
extern const qkv_kernels qkvi_kernels_avx2, qkvi_kernels_avx512, qkvi_kernels_avx512_vnni;
extern const qkv_kernels qkvi_kernels_neon, qkvi_kernels_neon_dotprod;
QKV_DECLARE_LOAD_ROWS(qkvi_load_rows_reference);
QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_reference);
QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_avx512_vnni);
QKV_DECLARE_MULTIPLY_INTEGER(qkvi_multiply_integer_amx);
QKV_DECLARE_ADD_PRODUCTS(qkvi_add_products_reference);
QKV_DECLARE_SUM_LEVELS(qkvi_sum_levels_reference);
QKV_DECLARE_SCORES_INTEGER(qkvi_scores_integer_reference);
QKV_DECLARE_ACCUMULATE_INTEGER(qkvi_accumulate_integer_reference);

// exp(x) for x <= 0, as `weigh` computes it.
float qkv_exp_negative(float x);
// scores [n] to cap * tanh(score / cap), cap > 0, within 4 ulp. Plain arithmetic, so that every machine gets the same
// numbers.
void qkv_soft_cap(float *scores, size_t n, float cap);
// 2^((gain - 128) / 8); 0 for gain 0.
float qkv_gain_value(uint8_t gain);
// The gain byte, 1 to 255, whose value is nearest to `factor` > 0; the lower one of two as near.
uint8_t qkvi_gain_nearest(float factor);

// What decode gives for a row [dim] that encode coded at `tier` >= 1: for closed loops (engine/codec/anchor.h).
void qkvi_row_round_trip(const qkv_schedule *schedule, unsigned tier, const float *weights, const float *row,
                         float *decoded);
// decoded [dim] of a row's codes [dim], each at its own depth (qkvi_unpack_slot), and its gain.
void qkvi_row_decode(const qkv_schedule *schedule, unsigned tier, const uint8_t *codes, uint8_t gain, float *decoded);
// 1 for every coordinate: what weights NULL stand for.
extern const float qkvi_weights_alike[QKV_DIM_MAX];

#endif
