#include "engine/codec/calibrate.h"
#include "engine/codec/heavy.h"

#include <assert.h>
#include <cblas.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/codebook.h"
#include "engine/codec/hadamard.h"
#include "engine/codec/lapack.h"
#include "engine/codec/page.h"
#include "engine/codec/turned.h"

// Rows without variance are given one: STILL times the energy of their mean, at least STILL_LEAST.
static const double STILL = 1e-6, STILL_LEAST = 1e-10;

// Matrices [dim][dim] of the head at hand.
typedef struct workspace {
  double *mean, *values, *variances, *vector, *image;  // [dim]
  double *rows, *queries;                              // C and S before RoPE
  double *covariance, *metric;                         // C and S in a frame
  double *root, *inverse_root, *product, *basis;       // S^{1/2}, S^{-1/2}
  void *block;
} workspace;

// Distances of up to 131072. Measured, 1024 gives the same.
enum { DISTANCE_OCTAVES = 18 };

// Few rows say little: as many times dim / rows is added to the ridge.
static const double FEW = 0.02;

// One calibration in the making.
typedef struct calibrator {
  const qkv_moments *moments;
  const qkv_calibration_shape *shape;
  const qkv_calibrate_options *options;
  uint8_t *bytes;
  workspace space;
  qkv_turn_plan plan;               // of the attend frame
  qkvi_turns *planned, *distances;  // NULL without RoPE
  double rows;                      // that C is of
} calibrator;

static void workspace_init(workspace *space, size_t dim) {
  enum { VECTORS = 5, MATRICES = 8 };
  double *next = calloc(dim * (VECTORS + MATRICES * dim), sizeof *next);
  if (next == NULL) abort();
  space->block = next;
  double **const vectors[VECTORS] = {&space->mean, &space->values, &space->variances, &space->vector, &space->image};
  double **const matrices[MATRICES] = {&space->rows, &space->queries,      &space->covariance, &space->metric,
                                       &space->root, &space->inverse_root, &space->product,    &space->basis};
  for (size_t i = 0; i < VECTORS; i++, next += dim) *vectors[i] = next;
  for (size_t i = 0; i < MATRICES; i++, next += dim * dim) *matrices[i] = next;
}

static double trace(const double *matrix, size_t dim) {
  double sum = 0;
  for (size_t i = 0; i < dim; i++) sum += matrix[i * dim + i];
  return sum;
}

static bool all_finite(const double *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (!isfinite(values[i])) return false;
  }
  return true;
}

// out = a b, all symmetric or not, [dim][dim].
static void multiply(const double *a, const double *b, size_t dim, double *out) {
  const int n = (int)dim;
  cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, n, n, 1, a, n, b, n, 0, out, n);
}

// The eigenvectors of a symmetric matrix, which they replace, one a row, by ascending eigenvalue.
static qkv_status decompose(double *matrix, size_t dim, double *values, qkv_error *error) {
  const int info = qkvi_lapack_eigen(matrix, dim, values);
  if (info == 0) return QKV_OK;
  return qkv_fail(error, QKV_INTERNAL, "the eigen-decomposition ended with %d", info);
}

// ---- The transform ----

static void add_ridge(double *matrix, size_t dim, double part) {
  const double ridge = part * trace(matrix, dim) / (double)dim;
  for (size_t i = 0; i < dim; i++) matrix[i * dim + i] += ridge;
}

// M^{1/2} and its inverse, M = S^power; space->metric is S and is overwritten.
static qkv_status find_roots(workspace *space, size_t dim, double ridge, double power, qkv_error *error) {
  if (!(trace(space->metric, dim) > 0)) {
    memset(space->metric, 0, dim * dim * sizeof *space->metric);
    for (size_t i = 0; i < dim; i++) space->metric[i * dim + i] = 1;
  }
  const double least = ridge * trace(space->metric, dim) / (double)dim;
  add_ridge(space->metric, dim, ridge);
  QKV_TRY(decompose(space->metric, dim, space->values, error));
  memset(space->root, 0, dim * dim * sizeof *space->root);
  memset(space->inverse_root, 0, dim * dim * sizeof *space->inverse_root);
  for (size_t c = 0; c < dim; c++) {
    const double *row = space->metric + c * dim, root = pow(fmax(space->values[c], least), power / 2);
    cblas_dger(CblasRowMajor, (int)dim, (int)dim, root, row, 1, row, 1, space->root, (int)dim);
    cblas_dger(CblasRowMajor, (int)dim, (int)dim, 1 / root, row, 1, row, 1, space->inverse_root, (int)dim);
  }
  return QKV_OK;
}

// Rows that hardly vary get a variance that is small relative to their mean.
static void loosen(double *covariance, const double *mean, size_t dim) {
  double energy = 0;
  for (size_t i = 0; i < dim; i++) energy += mean[i] * mean[i];
  const double least = fmax(STILL * energy / (double)dim, STILL_LEAST);
  if (trace(covariance, dim) >= least * (double)dim * STILL) return;
  memset(covariance, 0, dim * dim * sizeof *covariance);
  for (size_t i = 0; i < dim; i++) covariance[i * dim + i] = least;
}

// The variances [dim], largest first, as weights: a part that goes beyond their limits is scaled as a whole.
static void write_weights(const qkvi_part_view *part, const double *variances) {
  const double scale = fmin(1, QKV_CALIBRATION_WEIGHT_MAX / variances[0]);
  for (size_t c = 0; c < part->dim; c++) {
    part->weights[c] = (float)fmax(variances[c] * scale, QKV_CALIBRATION_WEIGHT_MIN * 1.001);
  }
}

// A coordinate of code space: a direction of the mixed ones, or one that stays by itself.
typedef struct direction {
  double variance;
  const double *row;  // eigenvector [mixed]; NULL: plain
  size_t plain;       // the coordinate
  size_t found;       // of those that are as large the first one comes first
} direction;

static int by_variance(const void *a, const void *b) {
  const direction *x = a, *y = b;
  if (x->variance != y->variance) return x->variance < y->variance ? 1 : -1;
  return (x->found > y->found) - (x->found < y->found);
}

// Which coordinates of a part are mixed with each other; the others are coded one by one, as pairs of RoPE that turn
// at any angle have nothing to do with others.
typedef struct mixing {
  size_t mixed, plain;
  uint16_t mixed_at[QKV_DIM_MAX], plain_at[QKV_DIM_MAX];
} mixing;

static void mix_all(mixing *all, size_t dim) {
  all->mixed = dim;
  all->plain = 0;
  for (size_t i = 0; i < dim; i++) all->mixed_at[i] = (uint16_t)i;
}

static void mix_planned(mixing *made, const qkv_rope *rope, const qkv_turn_plan *plan, size_t dim) {
  made->mixed = made->plain = 0;
  for (size_t i = 0; i < dim; i++) {
    const uint16_t at = (uint16_t)qkv_turn_input(rope, i);
    if (i < 2 * (size_t)plan->begins[0]) {
      made->plain_at[made->plain++] = at;
    } else {
      made->mixed_at[made->mixed++] = at;
    }
  }
}

// image [dim] of a direction: a matrix of S applied to an eigenvector, nothing where that has nothing.
static void put_image(const workspace *space, const mixing *mix, const double *matrix, double scale,
                      const direction *from, size_t dim, float *out) {
  double *row = space->vector, *image = space->image;
  memset(out, 0, dim * sizeof *out);
  if (from->row == NULL) {
    out[from->plain] = (float)(scale * matrix[from->plain * dim + from->plain]);
    return;
  }
  memset(row, 0, dim * sizeof *row);
  for (size_t i = 0; i < mix->mixed; i++) row[mix->mixed_at[i]] = from->row[i];
  cblas_dgemv(CblasRowMajor, CblasNoTrans, (int)dim, (int)dim, scale, matrix, (int)dim, row, 1, 0, image, 1);
  for (size_t i = 0; i < mix->mixed; i++) out[mix->mixed_at[i]] = (float)image[mix->mixed_at[i]];
}

// Attention takes up to six bits of a coordinate with one look-up and one product, and several times that for more.
// So where codes are attended, bits beyond must lower the error 4 times as much as others do. Rows of 128 of which
// some channels are eight times as large, 4 bits (`qkv-bench attend --calibrated --tokens 16384`): 2.0 ms and an
// error of 0.049; without it 2.5 ms and 0.042, with 24 in place of 4 1.7 ms and 0.067. At 2 bits all are the same.
enum { SHALLOW = 6, BEYOND_ATTENDED = 4, BEYOND_REBUILT = 1 };

static void write_order(const qkvi_part_view *part, const double *variances, int beyond) {
  double sums[QKV_DIM_MAX / QKV_BAND] = {0};
  uint8_t depths[QKV_DIM_MAX / QKV_BAND] = {0};
  const size_t bands = part->dim / part->band;
  for (size_t c = 0; c < part->dim; c++) sums[c / part->band] += variances[c];
  for (size_t i = 0; i < part->order_count; i++) {
    size_t best = bands;
    double most = -1;
    for (size_t b = 0; b < bands; b++) {
      if (depths[b] == QKV_DEPTH_MAX || (b > 0 && depths[b] == depths[b - 1])) continue;
      const double lowered = qkv_codebook_distortion[depths[b]] - qkv_codebook_distortion[depths[b] + 1];
      const double gain = sums[b] * lowered / (depths[b] < SHALLOW ? 1 : beyond);
      if (gain <= most) continue;
      best = b;
      most = gain;
    }
    assert(best < bands);
    part->order[i] = (uint8_t)best;
    depths[best]++;
  }
}

// The variance of each coordinate of code space, largest first, and where it comes from; space->product is
// S^{1/2} C S^{1/2}.
static qkv_status find_directions(const workspace *space, const mixing *mix, size_t dim, direction *found,
                                  qkv_error *error) {
  const size_t mixed = mix->mixed;
  for (size_t i = 0; i < mixed; i++) {
    for (size_t j = 0; j < mixed; j++) {
      space->basis[i * mixed + j] = space->product[mix->mixed_at[i] * dim + mix->mixed_at[j]];
    }
  }
  // Its rounding is not symmetric; what is below the diagonal is not read.
  if (mixed > 0) QKV_TRY(decompose(space->basis, mixed, space->values, error));
  for (size_t i = 0; i < mixed; i++) {
    found[i] = (direction){space->values[mixed - 1 - i], space->basis + (mixed - 1 - i) * mixed, 0, i};
  }
  for (size_t i = 0; i < mix->plain; i++) {
    const size_t at = mix->plain_at[i];
    found[mixed + i] = (direction){space->product[at * dim + at], NULL, at, mixed + i};
  }
  qsort(found, dim, sizeof *found, by_variance);
  return QKV_OK;
}

// space->covariance and space->metric are the frame's, and are overwritten.
static qkv_status write_part(calibrator *job, const qkvi_part_view *part, const mixing *mix, int beyond,
                             qkv_error *error) {
  workspace *space = &job->space;
  direction directions[QKV_DIM_MAX];
  const size_t dim = part->dim;
  for (size_t i = 0; i < dim; i++) part->mean[i] = (float)space->mean[i];
  loosen(space->covariance, space->mean, dim);
  add_ridge(space->covariance, dim, job->options->ridge_rows + FEW * (double)dim / job->rows);
  QKV_TRY(find_roots(space, dim, job->options->ridge_queries, job->options->metric_power, error));
  multiply(space->root, space->covariance, dim, space->basis);
  multiply(space->basis, space->root, dim, space->product);
  QKV_TRY(find_directions(space, mix, dim, directions, error));
  // Whatever was rounded stays positive.
  double *variances = space->variances;
  const double least = 1e-12 * directions[0].variance;
  for (size_t c = 0; c < dim; c++) {
    variances[c] = fmax(directions[c].variance, least);
    const double sigma = sqrt(variances[c]);
    put_image(space, mix, space->root, 1 / sigma, &directions[c], dim, part->analysis + c * dim);
    put_image(space, mix, space->inverse_root, sigma, &directions[c], dim, part->synthesis + c * dim);
  }
  write_weights(part, variances);
  write_order(part, variances, beyond);
  return QKV_OK;
}

// ---- Frames ----

// S as errors meet it: turned by distances; without RoPE as it is.
static void set_metric(calibrator *job, size_t dim) {
  memcpy(job->space.metric, job->space.queries, dim * dim * sizeof(double));
  if (job->distances != NULL) qkvi_turn_second(job->distances, job->space.metric);
}

// Rows from before RoPE grow with it (YaRN), too, so that scores meet their errors once more so large.
static void grow_metric(const calibrator *job, size_t dim) {
  const qkv_rope *rope = &job->shape->rope;
  const double magnitude = qkv_rope_magnitude(rope);
  for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
    const size_t places[] = {qkv_rope_first(rope, pair), qkv_rope_second(rope, pair)};
    for (size_t i = 0; i < 2; i++) {
      cblas_dscal((int)dim, magnitude, job->space.metric + places[i] * dim, 1);
      cblas_dscal((int)dim, magnitude, job->space.metric + places[i], (int)dim);
    }
  }
}

// The mean before RoPE is taken off, that of pairs by the rotating anchor.
static qkv_status write_attend(calibrator *job, const qkvi_part_view *part, qkv_error *error) {
  workspace *space = &job->space;
  const size_t dim = part->dim;
  mixing mix;
  set_metric(job, dim);
  memcpy(space->covariance, space->rows, dim * dim * sizeof *space->rows);
  if (job->planned == NULL) {
    mix_all(&mix, dim);
  } else {
    mix_planned(&mix, &job->shape->rope, &job->plan, dim);
    qkvi_turn_second(job->planned, space->covariance);
    qkvi_turn_grown(job->planned, space->metric);  // what errors meet is turned back with them
  }
  return write_part(job, part, &mix, BEYOND_ATTENDED, error);
}

static qkv_status write_archive(calibrator *job, const qkvi_part_view *part, qkv_error *error) {
  workspace *space = &job->space;
  mixing mix;
  mix_all(&mix, part->dim);
  set_metric(job, part->dim);
  grow_metric(job, part->dim);
  memcpy(space->covariance, space->rows, (size_t)part->dim * part->dim * sizeof(double));
  return write_part(job, part, &mix, BEYOND_REBUILT, error);
}

// ---- Heads and layers ----

static void hold(const calibrator *job, uint32_t layer, bool holds) {
  if (job->options->hold != NULL) job->options->hold(job->options->context, layer, holds);
}

static double count_tokens(const calibrator *job) {
  for (uint32_t layer = 0; layer < job->shape->layers; layer++) hold(job, layer, true);
  const double tokens = qkv_moments_tokens(job->moments);
  for (uint32_t layer = 0; layer < job->shape->layers; layer++) hold(job, layer, false);
  return tokens;
}

static qkv_status read_moments(calibrator *job, uint32_t layer, uint32_t kv_head, qkv_moments_kind kind, double *mean,
                               double *second, qkv_error *error) {
  static const char *const names[] = {"keys", "values", "queries"};
  const size_t dim = kind == QKV_MOMENTS_V ? job->shape->value_dim : job->shape->key_dim;
  hold(job, layer, true);
  const double rows = qkv_moments_read(job->moments, layer, kv_head, kind, mean, second);
  hold(job, layer, false);
  if (kind != QKV_MOMENTS_Q) job->rows = rows;
  if (all_finite(mean, dim) && all_finite(second, dim * dim)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "the moments of %s of layer %" PRIu32 ", KV head %" PRIu32 " are not finite", names[kind], layer,
                  kv_head);
}

static qkv_status write_values(calibrator *job, const qkvi_part_view *part, uint32_t layer, uint32_t kv_head,
                               qkv_error *error) {
  workspace *space = &job->space;
  QKV_TRY(read_moments(job, layer, kv_head, QKV_MOMENTS_V, space->mean, space->covariance, error));
  memset(space->metric, 0, (size_t)part->dim * part->dim * sizeof *space->metric);
  mixing mix;
  mix_all(&mix, part->dim);
  return write_part(job, part, &mix, BEYOND_ATTENDED, error);
}

// All coordinates weigh the same, so that bands get their bits in turn.
void qkvi_calibration_write_data_free(const qkvi_part_view *part) {
  const size_t dim = part->dim;
  double variances[QKV_DIM_MAX] = {0};
  for (size_t c = 0; c < dim; c++) {
    float *row = part->analysis + c * dim;
    row[c] = 1;
    qkv_hadamard_inverse(row, 1, dim);  // row c of the forward transform, whose inverse is its transpose
    memcpy(part->synthesis + c * dim, row, dim * sizeof *row);
    variances[c] = 1;
  }
  write_weights(part, variances);
  write_order(part, variances, BEYOND_ATTENDED);
}

// ---- Heavy hitters ----

// What YaRN makes of the product of two rows from before RoPE that are turned, coordinate by coordinate.
static void grow_products(const calibrator *job, double *factors, size_t dim) {
  const qkv_rope *rope = &job->shape->rope;
  const double square = rope->theta != 0 ? qkv_rope_magnitude(rope) * qkv_rope_magnitude(rope) : 1;
  for (size_t i = 0; i < dim; i++) factors[i] = 1;
  for (uint32_t pair = 0; rope->theta != 0 && pair < rope->width / 2; pair++) {
    factors[qkv_rope_first(rope, pair)] = factors[qkv_rope_second(rope, pair)] = square;
  }
}

// `query` [dim], the mean of queries before RoPE, becomes what RoPE leaves of it; space->mean and space->rows are the
// keys'. The predictor's scores are in standard deviations of the keys'.
static void write_heavy(calibrator *job, const qkvi_part_view *part, double *query) {
  const workspace *space = &job->space;
  const size_t dim = part->dim;
  double factors[QKV_DIM_MAX], mean = 0, variance = 0, most = 0;
  grow_products(job, factors, dim);
  if (job->distances != NULL) qkvi_turn_mean(job->distances, query);
  for (size_t i = 0; i < dim; i++) {
    query[i] /= sqrt(factors[i]);  // that turning has grown, too
    mean += factors[i] * query[i] * space->mean[i];
  }
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = 0; j < dim; j++) {
      variance += factors[i] * query[i] * space->rows[i * dim + j] * factors[j] * query[j];
    }
  }
  const double deviation = sqrt(fmax(variance, 0)), least = mean / deviation + QKV_HEAVY_DEVIATIONS;
  for (size_t i = 0; i < dim; i++) most = fmax(most, fabs(query[i]) / deviation);
  // Not of keys that are all alike, where both are infinite or nan.
  if (!(most <= (double)QKV_CALIBRATION_MEAN_MAX && fabs(least) <= (double)QKV_CALIBRATION_HEAVY_MAX)) return;
  for (size_t i = 0; i < dim; i++) part->heavy[i] = (float)(query[i] / deviation);
  part->header->heavy_least = (float)least;
}

static qkv_status write_head(calibrator *job, uint32_t layer, uint32_t kv_head, qkv_error *error) {
  workspace *space = &job->space;
  qkvi_part_view parts[QKV_CALIBRATION_PARTS];
  double query[QKV_DIM_MAX];
  for (unsigned i = 0; i < QKV_CALIBRATION_PARTS; i++) {
    parts[i] = qkvi_calibration_part(job->shape, job->bytes, layer, kv_head, i);
  }
  QKV_TRY(read_moments(job, layer, kv_head, QKV_MOMENTS_Q, query, space->queries, error));
  QKV_TRY(read_moments(job, layer, kv_head, QKV_MOMENTS_K, space->mean, space->rows, error));
  if (job->rows == 0) {
    qkvi_calibration_write_data_free(&parts[QKV_PART_K_ATTEND]);
    if (job->distances != NULL) qkvi_calibration_write_data_free(&parts[QKV_PART_K_ARCHIVE]);
    qkvi_calibration_write_data_free(&parts[QKV_PART_V]);
    return QKV_OK;
  }
  write_heavy(job, &parts[QKV_PART_K_ATTEND], query);
  QKV_TRY(write_attend(job, &parts[QKV_PART_K_ATTEND], error));
  if (job->distances != NULL) QKV_TRY(write_archive(job, &parts[QKV_PART_K_ARCHIVE], error));
  return write_values(job, &parts[QKV_PART_V], layer, kv_head, error);
}

static qkv_status write_layer(calibrator *job, uint32_t layer, qkv_error *error) {
  const _Atomic bool *cancelled = job->options->cancelled;
  for (uint32_t head = 0; head < job->shape->kv_heads; head++) {
    if (cancelled != NULL && atomic_load(cancelled)) return qkv_fail(error, QKV_CANCELLED, "it was called off");
    QKV_TRY(write_head(job, layer, head, error));
  }
  return QKV_OK;
}

// Distances of queries and keys: 0, 1, 2 to 3, 4 to 7, ..., each range alike.
static qkvi_turns *turns_of_distances(const qkv_calibration_shape *shape) {
  qkvi_span spans[DISTANCE_OCTAVES] = {{0, 1, 1}};
  for (unsigned i = 1; i < DISTANCE_OCTAVES; i++) {
    spans[i] = (qkvi_span){(int64_t)1 << (i - 1), (int64_t)1 << i, 1};
  }
  return qkvi_turns_create(&shape->rope, shape->key_dim, spans, DISTANCE_OCTAVES);
}

static qkv_status check_part_of(const char *name, double value, double least, qkv_error *error) {
  if (value >= least && value <= 1) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %g, allowed are %g to 1", name, value, least);
}

// Blocks of 16 coordinates whose halves have depths of their own take the kernels longer. In rows of 64, where a
// block is a quarter of them, larger bands cost too much: 10 % of the error, and 2 to 3 % in rows of 128.
static uint8_t band_of(uint8_t asked, uint32_t dim) {
  if (asked != 0) return asked;
  return dim >= 128 && dim % (2 * QKV_BAND) == 0 ? 2 * QKV_BAND : QKV_BAND;
}

qkv_status qkv_calibrate(const qkv_moments *moments, const qkv_calibrate_options *options, qkv_calibration **out,
                         qkv_error *error) {
  const double ridge_least = 1e-9;  // roots must have an inverse
  calibrator job = {.moments = moments, .shape = qkv_moments_shape(moments), .options = options};
  *out = NULL;
  QKV_TRY(check_part_of("ridge_queries", options->ridge_queries, ridge_least, error));
  QKV_TRY(check_part_of("metric_power", options->metric_power, 0, error));
  QKV_TRY(check_part_of("ridge_rows", options->ridge_rows, ridge_least, error));
  const double tokens = count_tokens(&job);
  if (tokens == 0) return qkv_fail(error, QKV_FAILED_PRECONDITION, "there are no rows to learn from");
  const uint8_t band_k = band_of(options->band_k, job.shape->key_dim);
  const uint8_t band_v = band_of(options->band_v, job.shape->value_dim);
  QKV_TRY(qkvi_calibration_begin(job.shape, QKV_CALIBRATION_FORMAT, band_k, band_v, &job.bytes, error));
  ((qkvi_calibration_header *)job.bytes)->tokens = (uint64_t)tokens;
  const size_t widest = job.shape->key_dim > job.shape->value_dim ? job.shape->key_dim : job.shape->value_dim;
  workspace_init(&job.space, widest);
  if (job.shape->rope.theta != 0) {
    job.plan = qkv_turn_plan_of(&job.shape->rope, QKV_TURN_BLOCKS);
    job.planned = qkvi_turns_create_planned(&job.shape->rope, job.shape->key_dim, &job.plan);
    job.distances = turns_of_distances(job.shape);
  }
  qkv_status status = QKV_OK;
  for (uint32_t layer = 0; status == QKV_OK && layer < job.shape->layers; layer++) {
    status = write_layer(&job, layer, error);
  }
  qkvi_turns_destroy(&job.planned);
  qkvi_turns_destroy(&job.distances);
  free(job.space.block);
  if (status == QKV_OK) return qkvi_calibration_finish(job.bytes, out, error);
  free(job.bytes);
  return status;
}
