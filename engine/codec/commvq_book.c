#include "engine/codec/commvq_book.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/random.h"

enum {
  ENTRIES = QKV_COMMVQ_ENTRIES,
  WIDTH = QKV_COMMVQ_WIDTH,
  PAIRS = WIDTH / 2,
  SAMPLES = 1024,
  SOFT_STEPS = 8,
  HARD_STEPS = 6,
  WIDTHS = QKV_DIM_MAX / WIDTH,
  HALVINGS = 10
};

static const uint64_t SEED = 0x436f6d6d5651;
// Temperatures as parts of what a sample's distance is at first, and how they fall.
static const double HOT = 0.1, COOLING = 0.6;
// A pair counts at least as much as this part of the one that counts most.
static const double WEIGHT_LEAST = 1e-3;

static size_t book_bytes(size_t dim, unsigned bits) {
  const size_t bytes = sizeof(qkv_commvq_book) + dim / WIDTH * bits * sizeof(qkv_commvq_round);
  return (bytes + 63) / 64 * 64;
}

// ---- Search ----

// near[a] = rest . entry a, of both kinds.
static inline void multiply(const qkv_commvq_round *round, const float *rest, float near[2][ENTRIES]) {
  memset(near, 0, 2 * sizeof *near);
  for (size_t kind = 0; kind < 2; kind++) {
    for (size_t j = 0; j < WIDTH; j++) {
      for (size_t a = 0; a < ENTRIES; a++) near[kind][a] += rest[j] * round->columns[kind][j][a];
    }
  }
}

uint8_t qkv_commvq_nearest(const qkv_commvq_round *round, const float *rest) {
  float near[2][ENTRIES], least[ENTRIES];
  int32_t at[ENTRIES] = {0};
  multiply(round, rest, near);
  for (size_t b = 0; b < ENTRIES; b++) least[b] = INFINITY;
  for (int32_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) {
      const float far = round->squares[a][b] - near[0][a] - near[1][b];
      const int32_t nearer = -(int32_t)(far < least[b]);
      least[b] = far < least[b] ? far : least[b];
      at[b] = (nearer & a) | (~nearer & at[b]);
    }
  }
  size_t best = 0;
  for (size_t b = 1; b < ENTRIES; b++) {
    if (least[b] < least[best]) best = b;
  }
  return (uint8_t)((size_t)at[best] | best << 4);
}

// Entries of the search to a round: x of each, [16][8], in coordinates times roots.
static void set_entries(qkv_commvq_round *round, float scaled[ENTRIES][WIDTH], const float *roots) {
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t pair = 0; pair < PAIRS; pair++) {
      const float x = scaled[a][2 * pair], y = scaled[a][2 * pair + 1];
      round->columns[0][2 * pair][a] = x;
      round->columns[0][2 * pair + 1][a] = y;
      round->columns[1][2 * pair][a] = -y;
      round->columns[1][2 * pair + 1][a] = x;
    }
    for (size_t j = 0; j < WIDTH; j++) {
      for (size_t kind = 0; kind < 2; kind++) round->entries.of[kind][j][a] = round->columns[kind][j][a] / roots[j];
    }
  }
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) {
      float square = 0;
      for (size_t j = 0; j < WIDTH; j++) {
        const float c = round->columns[0][j][a] + round->columns[1][j][b];
        square += c * c;
      }
      round->squares[a][b] = square / 2;
    }
  }
}

// ---- EM ----

// What a step of EM sums up: how much belongs to each pair of entries, and samples by their entries.
typedef struct sums {
  double counts[ENTRIES][ENTRIES];
  double rows[2][ENTRIES][WIDTH];
} sums;

static void add_hard(sums *into, const qkv_commvq_round *round, const float *sample) {
  const uint8_t code = qkv_commvq_nearest(round, sample);
  into->counts[code % ENTRIES][code / ENTRIES] += 1;
  for (size_t j = 0; j < WIDTH; j++) {
    into->rows[0][code % ENTRIES][j] += (double)sample[j];
    into->rows[1][code / ENTRIES][j] += (double)sample[j];
  }
}

// Shares of all centres, softmax(-distance / temperature), by (1 - x / 1024)^1024 for exp(-x): functions of the C
// library differ between machines.
static void add_soft(sums *into, const qkv_commvq_round *round, const float *sample, float temperature) {
  float near[2][ENTRIES], shares[ENTRIES][ENTRIES], least = INFINITY;
  multiply(round, sample, near);
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) {
      shares[a][b] = round->squares[a][b] - near[0][a] - near[1][b];
      least = shares[a][b] < least ? shares[a][b] : least;
    }
  }
  const float factor = 2 / (temperature * (1 << HALVINGS));
  float total = 0;
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) {
      float share = 1 - (shares[a][b] - least) * factor;
      share = share > 0 ? share : 0;
      for (int i = 0; i < HALVINGS; i++) share *= share;
      shares[a][b] = share;
    }
  }
  float of[2][ENTRIES] = {{0}};
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) {
      of[0][a] += shares[a][b];
      of[1][b] += shares[a][b];
    }
    total += of[0][a];
  }
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t b = 0; b < ENTRIES; b++) into->counts[a][b] += (double)(shares[a][b] / total);
    for (size_t kind = 0; kind < 2; kind++) {
      const float share = of[kind][a] / total;
      for (size_t j = 0; j < WIDTH; j++) into->rows[kind][a][j] += (double)(share * sample[j]);
    }
  }
}

// A complex number, and a row of the equations: the matrix, and a right side for each pair.
typedef struct number {
  double re, im;
} number;

static number times(number x, number y) {
  return (number){x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
}

static number over(number x, number y) {
  const double square = y.re * y.re + y.im * y.im;
  const number product = times(x, (number){y.re, -y.im});
  return (number){product.re / square, product.im / square};
}

typedef number equation[ENTRIES + PAIRS];

// The least-squares entries: with z_a as complex numbers, centres z_a + i z_b and shares n_ab of samples x,
//   (sum_b n_ab + n_ba) z_a + i sum_b (n_ab - n_ba) z_b = x_a. - i x_.a
static void write_equations(const sums *of, equation *rows) {
  for (size_t a = 0; a < ENTRIES; a++) {
    double count = 1e-3;
    for (size_t b = 0; b < ENTRIES; b++) {
      count += of->counts[a][b] + of->counts[b][a];
      rows[a][b] = (number){0, of->counts[a][b] - of->counts[b][a]};
    }
    rows[a][a].re += count;
    for (size_t pair = 0; pair < PAIRS; pair++) {
      const double *first = &of->rows[0][a][2 * pair], *second = &of->rows[1][a][2 * pair];
      rows[a][ENTRIES + pair] = (number){first[0] + second[1], first[1] - second[0]};
    }
  }
}

// The matrix is positive definite: no pivoting.
static void solve(equation *rows) {
  for (size_t at = 0; at < ENTRIES; at++) {
    const number pivot = rows[at][at];
    for (size_t i = at; i < ENTRIES + PAIRS; i++) rows[at][i] = over(rows[at][i], pivot);
    for (size_t row = 0; row < ENTRIES; row++) {
      const number factor = rows[row][at];
      for (size_t i = at; row != at && i < ENTRIES + PAIRS; i++) {
        const number product = times(factor, rows[at][i]);
        rows[row][i].re -= product.re;
        rows[row][i].im -= product.im;
      }
    }
  }
}

static void maximize(const sums *of, qkv_commvq_round *round, const float *roots) {
  equation rows[ENTRIES];
  float scaled[ENTRIES][WIDTH];
  write_equations(of, rows);
  solve(rows);
  for (size_t a = 0; a < ENTRIES; a++) {
    for (size_t pair = 0; pair < PAIRS; pair++) {
      scaled[a][2 * pair] = (float)rows[a][ENTRIES + pair].re;
      scaled[a][2 * pair + 1] = (float)rows[a][ENTRIES + pair].im;
    }
  }
  set_entries(round, scaled, roots);
}

// Entries of which centre aa is a sample: z = (1 - i) / 2 x.
static void seed(qkv_commvq_round *round, const float *samples, const float *roots) {
  float scaled[ENTRIES][WIDTH];
  for (size_t a = 0; a < ENTRIES; a++) {
    const float *sample = samples + a * (SAMPLES / ENTRIES) * WIDTH;
    for (size_t j = 0; j < WIDTH; j += 2) {
      scaled[a][j] = (sample[j] + sample[j + 1]) / 2;
      scaled[a][j + 1] = (sample[j + 1] - sample[j]) / 2;
    }
  }
  set_entries(round, scaled, roots);
}

// samples [1024][8] in coordinates times roots; they become what the round leaves.
static void train_round(qkv_commvq_round *round, float *samples, const float *roots) {
  double square = 0;
  for (size_t i = 0; i < SAMPLES * WIDTH; i++) square += (double)samples[i] * (double)samples[i];
  double temperature = HOT * square / SAMPLES + 1e-30;
  seed(round, samples, roots);
  for (int step = 0; step < SOFT_STEPS + HARD_STEPS; step++) {
    sums of = {0};
    for (size_t i = 0; i < SAMPLES; i++) {
      if (step >= SOFT_STEPS) add_hard(&of, round, samples + i * WIDTH);
      if (step < SOFT_STEPS) add_soft(&of, round, samples + i * WIDTH, (float)temperature);
    }
    maximize(&of, round, roots);
    temperature *= COOLING;
  }
  for (size_t i = 0; i < SAMPLES; i++) {
    const uint8_t code = qkv_commvq_nearest(round, samples + i * WIDTH);
    for (size_t j = 0; j < WIDTH; j++)
      samples[i * WIDTH + j] -= round->columns[0][j][code % ENTRIES] + round->columns[1][j][code / ENTRIES];
  }
}

// ---- Samples ----

void qkv_commvq_pairs(const qkv_rope *rope, size_t dim, uint16_t *coordinates) {
  const size_t turning = rope->theta == 0 ? 0 : rope->width / 2;
  for (size_t pair = 0; pair < dim / 2; pair++) {
    const bool turns = pair < turning;
    coordinates[2 * pair] = (uint16_t)(turns ? qkv_rope_first(rope, (uint32_t)pair) : 2 * pair);
    coordinates[2 * pair + 1] = (uint16_t)(turns ? qkv_rope_second(rope, (uint32_t)pair) : 2 * pair + 1);
  }
}

// Deals pairs out to groups, those that count most first, forth and back: of each four, groups get one.
static void deal(qkv_commvq_book *book, const double *counts) {
  const size_t groups = book->groups;
  bool dealt[QKV_DIM_MAX / 2] = {false};
  for (size_t i = 0; i < book->dim / 2; i++) {
    size_t most = 0;
    while (dealt[most]) most++;
    for (size_t pair = most + 1; pair < book->dim / 2; pair++) {
      if (!dealt[pair] && counts[pair] > counts[most]) most = pair;
    }
    const size_t row = i / groups, group = row % 2 == 0 ? i % groups : groups - 1 - i % groups;
    book->pairs[group * PAIRS + row] = (uint16_t)most;
    dealt[most] = true;
  }
}

// Of each pair the mean of a matrix' diagonal, rows^T diag(scales) rows; scales NULL: 1.
static void diagonal(const float *rows, const float *scales, size_t dim, const uint16_t *coordinates, double *pairs) {
  double squares[QKV_DIM_MAX] = {0};
  for (size_t c = 0; c < dim; c++) {
    const double scale = scales == NULL ? 1 : (double)scales[c];
    for (size_t j = 0; j < dim; j++) squares[j] += scale * (double)rows[c * dim + j] * (double)rows[c * dim + j];
  }
  for (size_t pair = 0; pair < dim / 2; pair++)
    pairs[pair] = (squares[coordinates[2 * pair]] + squares[coordinates[2 * pair + 1]]) / 2;
}

// Pairs count by what queries make of them, analysis^T weights analysis, and are dealt out by that times how much
// they vary.
static void set_weights(qkv_commvq_book *book, const qkv_transform *transform, const uint16_t *coordinates) {
  double weights[QKV_DIM_MAX / 2] = {0}, counts[QKV_DIM_MAX / 2] = {0}, most = 1e-300;
  diagonal(transform->analysis, transform->weights, book->dim, coordinates, weights);
  diagonal(transform->synthesis, NULL, book->dim, coordinates, counts);
  for (size_t pair = 0; pair < book->dim / 2; pair++) most = weights[pair] > most ? weights[pair] : most;
  for (size_t pair = 0; pair < book->dim / 2; pair++) {
    weights[pair] = weights[pair] > WEIGHT_LEAST * most ? weights[pair] / most : WEIGHT_LEAST;
    counts[pair] *= weights[pair];
  }
  deal(book, counts);
  for (size_t at = 0; at < book->dim; at++) {
    book->roots[at] = (float)sqrt(weights[book->pairs[at / 2]]);
    book->mean[at] = transform->mean[coordinates[2 * book->pairs[at / 2] + at % 2]];
  }
}

// A row without its mean: drawn [dim].
static void draw_row(const qkv_transform *transform, size_t dim, uint64_t *state, float *drawn) {
  memset(drawn, 0, dim * sizeof *drawn);
  for (size_t c = 0; c < dim; c++) {
    const float z = (float)qkvi_random_gaussian(state);
    const float *synthesis = transform->synthesis + c * dim;
    for (size_t j = 0; j < dim; j++) drawn[j] += z * synthesis[j];
  }
}

// samples [groups][1024][8] of rows whose RMS is 1, times roots.
static void draw(const qkv_commvq_book *book, const qkv_transform *transform, const uint16_t *coordinates,
                 float *samples) {
  uint64_t state = SEED + book->dim;
  for (size_t i = 0; i < SAMPLES; i++) {
    float row[QKV_DIM_MAX];
    double square = 1e-30;
    draw_row(transform, book->dim, &state, row);
    for (size_t c = 0; c < book->dim; c++) square += (double)row[c] * (double)row[c];
    const float scale = (float)(1 / sqrt(square / (double)book->dim));
    for (size_t at = 0; at < book->dim; at++)
      samples[(at / WIDTH * SAMPLES + i) * WIDTH + at % WIDTH] =
          row[coordinates[2 * book->pairs[at / 2] + at % 2]] * scale * book->roots[at];
  }
}

static void train(qkv_commvq_book *book, size_t group, float *samples) {
  for (size_t round = 0; round < book->bits; round++)
    train_round(&book->rounds[group * book->bits + round], samples, book->roots + group * WIDTH);
}

static qkv_commvq_book *allocate(size_t dim, unsigned bits) {
  qkv_commvq_book *book = aligned_alloc(64, book_bytes(dim, bits));
  if (book == NULL) abort();
  memset(book, 0, book_bytes(dim, bits));
  book->dim = dim;
  book->groups = dim / WIDTH;
  book->bits = bits;
  assert(book->groups > 0);
  for (size_t at = 0; at < dim; at++) book->roots[at] = 1;
  for (size_t pair = 0; pair < dim / 2; pair++) book->pairs[pair] = (uint16_t)pair;
  return book;
}

static float *allocate_samples(size_t groups) {
  float *samples = malloc(groups * SAMPLES * WIDTH * sizeof *samples);
  if (samples == NULL) abort();
  return samples;
}

static void read_entries(qkv_commvq_book *book, const uint8_t *section) {
  for (size_t i = 0; i < book->groups * book->bits; i++) {
    float scaled[ENTRIES][WIDTH];
    memcpy(scaled, section + i * sizeof scaled, sizeof scaled);
    set_entries(&book->rounds[i], scaled, book->roots + i / book->bits * WIDTH);
  }
}

static void write_entries(const qkv_commvq_book *book, uint8_t *section) {
  for (size_t i = 0; i < book->groups * book->bits; i++) {
    float scaled[ENTRIES][WIDTH];
    for (size_t at = 0; at < ENTRIES * WIDTH; at++)
      scaled[at / WIDTH][at % WIDTH] = book->rounds[i].columns[0][at % WIDTH][at / WIDTH];
    memcpy(section + i * sizeof scaled, scaled, sizeof scaled);
  }
}

static bool is_clear(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *section) {
  uint8_t any = 0;
  for (size_t i = 0; i < qkv_commvq_section_bytes(shape, bits); i++) any |= section[i];
  return any == 0;
}

// One head's, from a section's bytes or trained. NULL: it has the data-free one.
static qkv_commvq_book *make_for(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head, unsigned bits,
                                 const uint8_t *section) {
  const qkv_calibration_shape *shape = qkv_calibration_shape_of(calibration);
  const qkv_transform *transform = qkv_calibration_transform(calibration, layer, kv_head, QKV_PART_K_ARCHIVE);
  uint16_t coordinates[QKV_DIM_MAX] = {0};
  if (transform->analysis == NULL || (section != NULL && is_clear(shape, bits, section))) return NULL;
  qkv_commvq_book *book = allocate(shape->key_dim, bits);
  qkv_commvq_pairs(&shape->rope, shape->key_dim, coordinates);
  set_weights(book, transform, coordinates);
  if (section != NULL) {
    read_entries(book, section);
    return book;
  }
  float *samples = allocate_samples(book->groups);
  draw(book, transform, coordinates, samples);
  for (size_t group = 0; group < book->groups; group++) train(book, group, samples + group * SAMPLES * WIDTH);
  free(samples);
  return book;
}

const qkv_commvq_book *qkv_commvq_book_get(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                           unsigned bits) {
  const size_t dim = qkv_calibration_shape_of(calibration)->key_dim;
  assert(bits >= 1 && bits <= QKV_COMMVQ_ROUNDS);
  _Atomic(void *) *kept = qkvi_calibration_derived(calibration, layer, kv_head, QKVI_DERIVED_COMMVQ + bits - 1);
  void *found = atomic_load_explicit(kept, memory_order_acquire);
  if (found != NULL) return found;
  const uint8_t *section = qkvi_calibration_section(calibration, QKV_COMMVQ_CODEC, bits, layer, kv_head);
  qkv_commvq_book *book = make_for(calibration, layer, kv_head, bits, section);
  if (book == NULL) return qkv_commvq_book_data_free(dim, bits);
  // Another thread may have made the same book meanwhile.
  if (atomic_compare_exchange_strong(kept, &found, book)) {
    qkvi_calibration_count_derived(calibration, book_bytes(dim, bits));
    return book;
  }
  free(book);
  return found;
}

// All groups are alike: what one of them has is that of all.
static qkv_commvq_book *make_data_free(size_t dim, unsigned bits) {
  float *samples = allocate_samples(1);
  qkv_commvq_book *book = allocate(dim, bits);
  uint64_t state = SEED;
  for (size_t i = 0; i < SAMPLES; i++) {
    double row[QKV_DIM_MAX] = {0}, square = 1e-30;
    for (size_t c = 0; c < dim; c++) {
      row[c] = qkvi_random_gaussian(&state);
      square += row[c] * row[c];
    }
    const double scale = sqrt((double)dim / square);
    for (size_t j = 0; j < WIDTH; j++) samples[i * WIDTH + j] = (float)(row[j] * scale);
  }
  train(book, 0, samples);
  free(samples);
  for (size_t group = 1; group < book->groups; group++)
    memcpy(&book->rounds[group * bits], book->rounds, bits * sizeof *book->rounds);
  return book;
}

const qkv_commvq_book *qkv_commvq_book_data_free(size_t dim, unsigned bits) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static qkv_commvq_book *made[WIDTHS][QKV_COMMVQ_ROUNDS];
  (void)pthread_mutex_lock(&lock);
  qkv_commvq_book **found = &made[dim / WIDTH - 1][bits - 1];
  if (*found == NULL) *found = make_data_free(dim, bits);
  const qkv_commvq_book *book = *found;
  (void)pthread_mutex_unlock(&lock);
  return book;
}

// ---- Sections ----

size_t qkv_commvq_section_bytes(const qkv_calibration_shape *shape, unsigned bits) {
  return (size_t)shape->key_dim * bits * ENTRIES * sizeof(float);
}

void qkv_commvq_section_make(const qkv_calibration *calibration, unsigned bits, uint32_t layer, uint32_t kv_head,
                             uint8_t *out) {
  qkv_commvq_book *book = make_for(calibration, layer, kv_head, bits, NULL);
  if (book != NULL) write_entries(book, out);
  free(book);
}

void qkv_commvq_section_clear(const qkv_calibration_shape *shape, unsigned bits, bool keys, uint8_t *head) {
  if (keys) memset(head, 0, qkv_commvq_section_bytes(shape, bits));
}

const char *qkv_commvq_section_validate(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *head) {
  for (size_t at = 0; at < qkv_commvq_section_bytes(shape, bits); at += sizeof(float)) {
    float entry;
    memcpy(&entry, head + at, sizeof entry);
    if (!(fabsf(entry) <= QKV_COMMVQ_ENTRY_MAX)) return "an entry's coordinate is not within -1e8 to 1e8";
  }
  return NULL;
}
