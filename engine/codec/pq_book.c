#include "engine/codec/pq_book.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/random.h"
#include "engine/codec/schedule.h"

enum {
  SAMPLES = 24576,
  ROUNDS = 20,
  LANES = 4,
  BLOCKS = QKV_PQ_POINTS / LANES,
  WIDTHS = QKV_DIM_MAX / QKV_BAND,
  SUB_WIDTHS = 3
};

static const uint64_t SEED = 0x5051626f6f6b;

// LANES points at once; said to the compiler, which does not find it by itself.
typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t integers __attribute__((vector_size(LANES * sizeof(int32_t))));

static inline floats choose(integers mask, floats yes, floats no) {
  return (floats)((mask & (integers)yes) | (~mask & (integers)no));
}

uint8_t qkv_pq_nearest(const qkv_pq_book *book, const float *x) {
  const floats *squares = (const floats *)book->squares, *columns = (const floats *)book->columns;
  floats least = {INFINITY, INFINITY, INFINITY, INFINITY};
  integers at = {0};
  for (int32_t block = 0; block < BLOCKS; block++) {
    floats far = squares[block];
    for (size_t j = 0; j < book->width; j++) far -= x[j] * columns[j * BLOCKS + (size_t)block];
    const integers nearer = far < least;
    least = choose(nearer, far, least);
    at = (nearer & block) | (~nearer & at);
  }
  int best = 0;
  for (int i = 1; i < LANES; i++) {
    if (least[i] < least[best] || (least[i] <= least[best] && at[i] < at[best])) best = i;
  }
  return (uint8_t)(at[best] * LANES + best);
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

static void set_point(qkv_pq_book *book, size_t p, const float *x) {
  float square = 0;
  for (size_t j = 0; j < book->width; j++) {
    book->points[p * book->width + j] = book->columns[j * QKV_PQ_POINTS + p] = x[j];
    square += x[j] * x[j];
  }
  book->squares[p] = square / 2;
}

// Each next seed is a sample, drawn by its squared distance to the nearest seed so far.
static void seed(qkv_pq_book *book, const float *samples) {
  uint64_t state = SEED;
  float *nearest = malloc(SAMPLES * sizeof *nearest);
  if (nearest == NULL) abort();
  for (size_t i = 0; i < SAMPLES; i++) nearest[i] = INFINITY;
  size_t chosen = 0;
  for (size_t p = 0; p < QKV_PQ_POINTS; p++) {
    const float *point = samples + chosen * book->width;
    double total = 0;
    set_point(book, p, point);
    for (size_t i = 0; i < SAMPLES; i++) {
      float square = 0;
      for (size_t j = 0; j < book->width; j++) {
        const float off = samples[i * book->width + j] - point[j];
        square += off * off;
      }
      nearest[i] = square < nearest[i] ? square : nearest[i];
      total += (double)nearest[i];
    }
    double left = qkvi_random_uniform(&state) * total;
    for (chosen = 0; chosen + 1 < SAMPLES && left >= (double)nearest[chosen]; chosen++)
      left -= (double)nearest[chosen];
  }
  free(nearest);
}

static void move(qkv_pq_book *book, const float *samples) {
  double sums[QKV_PQ_POINTS * QKV_PQ_WIDTH_MAX] = {0};
  uint32_t counts[QKV_PQ_POINTS] = {0};
  for (size_t i = 0; i < SAMPLES; i++) {
    const uint8_t p = qkv_pq_nearest(book, samples + i * book->width);
    counts[p]++;
    for (size_t j = 0; j < book->width; j++) sums[p * book->width + j] += (double)samples[i * book->width + j];
  }
  for (size_t p = 0; p < QKV_PQ_POINTS; p++) {
    float mean[QKV_PQ_WIDTH_MAX];
    for (size_t j = 0; j < book->width; j++) mean[j] = (float)(sums[p * book->width + j] / counts[p]);
    if (counts[p] > 0) set_point(book, p, mean);
  }
}

static qkv_pq_book *make(size_t dim, size_t width) {
  qkv_pq_book *book = aligned_alloc(64, sizeof *book);
  float *samples = malloc(SAMPLES * width * sizeof *samples);
  if (book == NULL || samples == NULL) abort();
  memset(book, 0, sizeof *book);
  book->width = width;
  draw(samples, dim, width);
  seed(book, samples);
  for (int round = 0; round < ROUNDS; round++) move(book, samples);
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
