#include "engine/codec/pq_book.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/tensor.h"
#include "engine/codec/calibration_internal.h"
#include "engine/codec/commvq_book.h"
#include "engine/codec/hadamard.h"
#include "engine/codec/random.h"
#include "engine/codec/schedule.h"
#include "engine/kernel/kernel.h"

enum { SAMPLES = 24576, ROUNDS = 20, WIDTHS = QKV_DIM_MAX / QKV_BAND, SUB_WIDTHS = 3, CODE_BITS = 8 };

static const uint64_t SEED = 0x5051626f6f6b;

// Where a sub-vector's numbers begin, by kind.
static size_t numbers_of(size_t width) {
  return (2 * width + 1) * QKV_PQ_POINTS;
}

// Of x [n][width], with a sub-vector's numbers.
static void find_nearest(const float *numbers, size_t width, const float *x, size_t n, uint8_t *codes) {
  const float *columns = numbers + width * QKV_PQ_POINTS;
  qkv_kernels_get()->nearest_points(columns, columns + width * QKV_PQ_POINTS, width, x, n, codes);
}

uint8_t qkv_pq_nearest(const qkv_pq_book *book, size_t sub, const float *x) {
  uint8_t code;
  find_nearest(qkv_pq_points(book, sub), book->width, x, 1, &code);
  return code;
}

// ---- Training ----

// Sub-vectors of points on the sphere.
static void draw(float *samples, size_t dim, size_t width) {
  uint64_t state = SEED + dim;
  double row[QKV_DIM_MAX];
  for (size_t done = 0; done < SAMPLES;) {
    double square = 0;
    for (size_t c = 0; c < dim; c++) {
      row[c] = qkvi_random_gaussian(&state);
      square += row[c] * row[c];
    }
    const double scale = sqrt((double)dim / square);
    for (size_t c = 0; c + width <= dim && done < SAMPLES; c += width, done++) {
      for (size_t j = 0; j < width; j++) samples[done * width + j] = (float)(row[c + j] * scale);
    }
  }
}

// How codebooks are found from a calibration: rows that are drawn, those of them that seeds are drawn from, and
// rounds of k-means.
typedef struct effort {
  size_t rows, seeding, rounds;
} effort;

static const effort of_first_formats = {8192, 8192, 8}, of_sections = {8192, 1024, 8};

// What a codebook is found from.
typedef struct training {
  const float *samples;  // [count][width]
  size_t count, seeding, width;
  float *numbers;  // of the sub-vector
} training;

static void set_point(const training *of, size_t p, const float *x) {
  float square = 0;
  for (size_t j = 0; j < of->width; j++) {
    of->numbers[p * of->width + j] = of->numbers[(of->width + j) * QKV_PQ_POINTS + p] = x[j];
    square += x[j] * x[j];
  }
  of->numbers[2 * of->width * QKV_PQ_POINTS + p] = square / 2;
}

// Each next seed is a sample, drawn by its squared distance to the nearest seed so far.
static void seed(const training *of) {
  uint64_t state = SEED;
  float *nearest = malloc(of->seeding * sizeof *nearest);
  if (nearest == NULL) abort();
  for (size_t i = 0; i < of->seeding; i++) nearest[i] = INFINITY;
  size_t chosen = 0;
  for (size_t p = 0; p < QKV_PQ_POINTS; p++) {
    const float *point = of->samples + chosen * of->width;
    double total = 0;
    set_point(of, p, point);
    for (size_t i = 0; i < of->seeding; i++) {
      float square = 0;
      for (size_t j = 0; j < of->width; j++) {
        const float off = of->samples[i * of->width + j] - point[j];
        square += off * off;
      }
      nearest[i] = square < nearest[i] ? square : nearest[i];
      total += (double)nearest[i];
    }
    double left = qkvi_random_uniform(&state) * total;
    for (chosen = 0; chosen + 1 < of->seeding && left >= (double)nearest[chosen]; chosen++)
      left -= (double)nearest[chosen];
  }
  free(nearest);
}

static void move(const training *of) {
  double sums[QKV_PQ_POINTS * QKV_PQ_WIDTH_MAX] = {0};
  uint32_t counts[QKV_PQ_POINTS] = {0};
  uint8_t *codes = malloc(of->count);
  if (codes == NULL) abort();
  find_nearest(of->numbers, of->width, of->samples, of->count, codes);
  for (size_t i = 0; i < of->count; i++) {
    const uint8_t p = codes[i];
    counts[p]++;
    for (size_t j = 0; j < of->width; j++) sums[p * of->width + j] += (double)of->samples[i * of->width + j];
  }
  for (size_t p = 0; p < QKV_PQ_POINTS; p++) {
    float mean[QKV_PQ_WIDTH_MAX];
    for (size_t j = 0; j < of->width; j++) mean[j] = (float)(sums[p * of->width + j] / counts[p]);
    if (counts[p] > 0) set_point(of, p, mean);
  }
  free(codes);
}

static void train(const training *of, size_t rounds) {
  seed(of);
  for (size_t round = 0; round < rounds; round++) move(of);
}

static size_t book_bytes(size_t width, size_t subs) {
  const size_t bytes = sizeof(qkv_pq_book) + subs * numbers_of(width) * sizeof(float);
  return (bytes + 63) / 64 * 64;
}

static qkv_pq_book *allocate(size_t width, size_t subs) {
  qkv_pq_book *book = aligned_alloc(64, book_bytes(width, subs));
  if (book == NULL) abort();
  memset(book, 0, book_bytes(width, subs));
  book->width = width;
  book->stride = subs == 1 ? 0 : numbers_of(width);
  return book;
}

static float *allocate_samples(size_t count) {
  float *samples = malloc(count * sizeof *samples);
  if (samples == NULL) abort();
  return samples;
}

static qkv_pq_book *make(size_t dim, size_t width) {
  qkv_pq_book *book = allocate(width, 1);
  float *samples = allocate_samples(SAMPLES * width);
  draw(samples, dim, width);
  train(&(training){samples, SAMPLES, SAMPLES, width, book->numbers}, ROUNDS);
  free(samples);
  return book;
}

const qkv_pq_book *qkv_pq_book_get(size_t dim, size_t width) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static qkv_pq_book *made[WIDTHS][SUB_WIDTHS];
  assert(width == 2 || width == 4 || width == 8);
  (void)pthread_mutex_lock(&lock);
  qkv_pq_book **found = &made[dim / QKV_BAND - 1][width / 4];
  if (*found == NULL) *found = make(dim, width);
  const qkv_pq_book *book = *found;
  (void)pthread_mutex_unlock(&lock);
  return book;
}

// ---- Of a calibration ----

static size_t dim_of(const qkv_calibration_shape *shape, qkv_part part) {
  return part == QKV_K ? shape->key_dim : shape->value_dim;
}

static unsigned bits_of(size_t width) {
  return (unsigned)(CODE_BITS / width);
}

// Where keys or values begin in a head's bytes of a section.
static size_t section_place(const qkv_calibration_shape *shape, qkv_part part) {
  return part == QKV_K ? 0 : shape->key_dim * QKV_PQ_POINTS * sizeof(uint16_t);
}

// All points of a book, in fp16: [subs][256][width].
static void write_points(const qkv_pq_book *book, size_t dim, uint8_t *out) {
  const size_t count = QKV_PQ_POINTS * book->width;
  for (size_t s = 0; s < dim / book->width; s++)
    qkv_from_float(QKV_FP16, qkv_pq_points(book, s), out + s * count * sizeof(uint16_t), count);
}

static void read_points(const uint8_t *in, qkv_pq_book *book, size_t dim) {
  const size_t count = QKV_PQ_POINTS * book->width;
  for (size_t s = 0; s < dim / book->width; s++) {
    float points[QKV_PQ_POINTS * QKV_PQ_WIDTH_MAX];
    const training of = {.width = book->width, .numbers = book->numbers + s * book->stride};
    qkv_to_float(QKV_FP16, in + s * count * sizeof(uint16_t), points, count);
    for (size_t p = 0; p < QKV_PQ_POINTS; p++) set_point(&of, p, points + p * book->width);
  }
}

// To what a section would have.
static void round_points(qkv_pq_book *book, size_t dim) {
  uint16_t *points = malloc(QKV_PQ_POINTS * dim * sizeof *points);
  if (points == NULL) abort();
  write_points(book, dim, (uint8_t *)points);
  read_points((const uint8_t *)points, book, dim);
  free(points);
}

// Turns the pairs of a key that turn far within some thousand tokens by random angles.
static void turn(const qkv_rope *rope, const uint16_t *pairs, uint64_t *state, float *row) {
  enum { STILL = 1024 };  // tokens for a radian
  for (uint32_t pair = 0; pair < rope->width / 2; pair++) {
    float *a = &row[pairs[2 * pair]], *b = &row[pairs[2 * pair + 1]];
    const double x = qkvi_random_gaussian(state), y = qkvi_random_gaussian(state);
    const double size = sqrt(x * x + y * y);
    if (qkv_rope_frequency(rope, 0, pair) * STILL < 1 || !(size > 1e-6)) continue;
    const float cosine = (float)(x / size), sine = (float)(y / size);
    const float first = *a * cosine - *b * sine, second = *a * sine + *b * cosine;
    *a = first;
    *b = second;
  }
}

// samples [dim / width][rows][width] of rows whose RMS is 1, rotated; `rope` NULL: as they are.
static void draw_rows(const qkv_transform *transform, const qkv_rope *rope, size_t dim, size_t width, size_t rows,
                      float *samples) {
  uint64_t state = SEED + dim;
  uint16_t pairs[QKV_DIM_MAX] = {0};
  float row[QKV_DIM_MAX];
  if (rope != NULL) qkv_commvq_pairs(rope, dim, pairs);
  for (size_t i = 0; i < rows; i++) {
    double square = 1e-30;
    memcpy(row, transform->mean, dim * sizeof *row);
    for (size_t c = 0; c < dim; c++) {
      const float z = (float)qkvi_random_gaussian(&state);
      for (size_t j = 0; j < dim; j++) row[j] += z * transform->synthesis[c * dim + j];
    }
    if (rope != NULL) turn(rope, pairs, &state, row);
    for (size_t c = 0; c < dim; c++) square += (double)row[c] * (double)row[c];
    const float scale = (float)(1 / sqrt(square / (double)dim));
    for (size_t c = 0; c < dim; c++) row[c] *= scale;
    qkv_hadamard_forward(row, 1, dim);
    for (size_t c = 0; c < dim; c++) samples[(c / width * rows + i) * width + c % width] = row[c];
  }
}

static qkv_pq_book *make_calibrated(const qkv_transform *transform, const qkv_rope *rope, size_t dim, size_t width,
                                    const effort *by) {
  qkv_pq_book *book = allocate(width, dim / width);
  float *samples = allocate_samples(by->rows * dim);
  draw_rows(transform, rope, dim, width, by->rows, samples);
  for (size_t s = 0; s < dim / width; s++) {
    const training of = {.samples = samples + s * by->rows * width,
                         .count = by->rows,
                         .seeding = by->seeding,
                         .width = width,
                         .numbers = book->numbers + s * book->stride};
    train(&of, by->rounds);
  }
  free(samples);
  return book;
}

// One head's keys or values. NULL: the calibration says nothing of them.
static qkv_pq_book *make_for(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head, qkv_part part,
                             size_t width, const effort *by) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  const qkv_transform *transform =
      qkv_calibration_transform(calibration, layer, kv_head, part == QKV_K ? QKV_PART_K_ARCHIVE : QKV_PART_V);
  if (transform->analysis == NULL) return NULL;
  const bool turns = part == QKV_K && shape->rope.theta != 0;
  return make_calibrated(transform, turns ? &shape->rope : NULL, dim_of(shape, part), width, by);
}

const qkv_pq_book *qkv_pq_book_calibrated(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                          qkv_part part, size_t width) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  const size_t dim = dim_of(shape, part);
  const qkvi_derived kind = QKVI_DERIVED_PQ + (unsigned)part * SUB_WIDTHS + (unsigned)width / 4;
  _Atomic(void *) *kept = qkvi_calibration_derived(calibration, layer, kv_head, kind);
  void *found = atomic_load_explicit(kept, memory_order_acquire);
  if (found != NULL) return found;
  const uint8_t *section = qkvi_calibration_section(calibration, QKV_PQ_CODEC, bits_of(width), layer, kv_head);
  const bool sections = qkvi_calibration_format(calibration) >= QKV_CALIBRATION_FORMAT_SECTIONS;
  qkv_pq_book *book = NULL;
  if (section != NULL) {
    book = allocate(width, dim / width);
    read_points(section + section_place(shape, part), book, dim);
  } else {
    book = make_for(calibration, layer, kv_head, part, width, sections ? &of_sections : &of_first_formats);
  }
  if (book == NULL) return qkv_pq_book_get(dim, width);
  if (section == NULL && sections) round_points(book, dim);
  // Another thread may have made the same book meanwhile.
  if (atomic_compare_exchange_strong(kept, &found, book)) {
    qkvi_calibration_count_derived(calibration, book_bytes(width, dim / width));
    return book;
  }
  free(book);
  return found;
}

// ---- Sections ----

size_t qkv_pq_section_bytes(const qkv_calibration_shape *shape, unsigned bits) {
  (void)bits;
  return (size_t)(shape->key_dim + shape->value_dim) * QKV_PQ_POINTS * sizeof(uint16_t);
}

void qkv_pq_section_make(const qkv_calibration *calibration, unsigned bits, uint32_t layer, uint32_t kv_head,
                         uint8_t *out) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t dim = dim_of(shape, part), width = CODE_BITS / bits;
    qkv_pq_book *made = make_for(calibration, layer, kv_head, part, width, &of_sections);
    const qkv_pq_book *book = made != NULL ? made : qkv_pq_book_get(dim, width);
    write_points(book, dim, out + section_place(shape, part));
    free(made);
  }
}

void qkv_pq_section_clear(const qkv_calibration_shape *shape, unsigned bits, bool keys, uint8_t *head) {
  const qkv_part part = keys ? QKV_K : QKV_V;
  const size_t dim = dim_of(shape, part);
  write_points(qkv_pq_book_get(dim, CODE_BITS / bits), dim, head + section_place(shape, part));
}

const char *qkv_pq_section_validate(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *head) {
  enum { STEP = 256 };
  const size_t bytes = qkv_pq_section_bytes(shape, bits);
  for (size_t at = 0; at < bytes; at += STEP * sizeof(uint16_t)) {
    float numbers[STEP];
    qkv_to_float(QKV_FP16, head + at, numbers, STEP);
    for (size_t i = 0; i < STEP; i++) {
      if (!(fabsf(numbers[i]) <= QKV_PQ_COORDINATE_MAX)) return "a point's coordinate is not within -64 to 64";
    }
  }
  return NULL;
}
