#include "engine/codec/walk.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "engine/kernel/kernel.h"

enum { STATIC = QKV_TURN_LEVELS };  // the sums of what never changes lie behind those of all levels
enum { OF_BLOCKS, OF_PAGES };       // qkv_walk.spans

static const uint64_t NONE = UINT64_MAX;
// From here on sums of angles are not exact enough (phases.h).
static const uint64_t FAR = (uint64_t)1 << 32;

static size_t padded(size_t coordinates) {
  return (coordinates + QKVI_DENSE_OUTPUTS - 1) / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS;
}

// ---- Start ----

static double length_of(const float *row, size_t dim) {
  double squares = 0;
  for (size_t i = 0; i < dim; i++) squares += (double)row[i] * (double)row[i];
  return sqrt(squares);
}

static void take_rows(qkv_walk *walk, const float *queries) {
  const qkv_rope *rope = qkv_phases_rope(walk->phases);
  const size_t pairs = rope->width / 2;
  for (size_t i = 0; i < walk->n; i++, queries += walk->dim) {
    float *row = walk->rows + i * walk->dim;
    for (uint32_t pair = 0; pair < pairs; pair++) {
      row[pair] = queries[qkv_rope_first(rope, pair)];
      row[pairs + pair] = queries[qkv_rope_second(rope, pair)];
    }
    memcpy(row + rope->width, queries + rope->width, (walk->dim - rope->width) * sizeof *row);
    const double length = length_of(queries, walk->dim);
    const bool counts = length * length >= (double)QKVI_DENSE_SQUARE_LEAST;
    walk->factors[i] = counts ? (float)((double)QKVI_DENSE_ROW_LENGTH / length) : 0;
    walk->scales[i] = counts ? (float)(length / (double)QKVI_DENSE_ROW_LENGTH) : 0;
    double share = 0;
    for (size_t c = 0; c < walk->dim; c++) share += (double)queries[c] * (double)walk->transform->mean[c];
    walk->shares[i] = (float)share;
  }
}

// With query (a, b) and anchor (x, y) in a pair, q . R_t mu = (ax + by) cos(wt) + (bx - ay) sin(wt).
static void find_products(qkv_walk *walk) {
  const qkv_transform *transform = walk->transform;
  const size_t pairs = qkv_phases_rope(walk->phases)->width / 2, stride = qkv_phases_waves(walk->phases)->stride;
  const double magnitude = qkv_rope_magnitude(qkv_phases_rope(walk->phases));
  memset(walk->products, 0, walk->n * 2 * stride * sizeof *walk->products);
  for (size_t i = 0; i < walk->n; i++) {
    const float *row = walk->rows + i * walk->dim;
    float *products = walk->products + i * 2 * stride;
    for (size_t j = 0; j < transform->anchor_pairs; j++) {
      const size_t pair = qkv_transform_anchored(transform, j);
      const float x = (float)(magnitude * (double)transform->anchor[2 * j]);
      const float y = (float)(magnitude * (double)transform->anchor[2 * j + 1]);
      products[pair] = row[pair] * x + row[pairs + pair] * y;
      products[stride + pair] = row[pairs + pair] * x - row[pair] * y;
    }
  }
}

static int32_t *sums_of(qkv_walk *walk, unsigned level) {
  return walk->sums + (walk->keeps ? level * walk->n * padded(walk->coordinates) : 0);
}

// Inputs that never change, [first, first + count) of the matrix, the i-th lying at at[i] of a row.
static void add_static(qkv_walk *walk, size_t first, size_t count, const int32_t *before) {
  const qkv_rope *rope = qkv_phases_rope(walk->phases);
  int16_t words[QKV_QUERY_BLOCK * QKV_DIM_MAX];
  for (size_t i = 0; i < walk->n; i++) {
    const float *row = walk->rows + i * walk->dim;
    for (size_t j = 0; j < count; j++) {
      const size_t input = first + j;
      const size_t at = input >= rope->width ? input : input % 2 * (rope->width / 2) + input / 2;
      words[i * count + j] = (int16_t)nearbyintf(row[at] * walk->factors[i]);
    }
  }
  qkv_kernels_get()->add_products(walk->transform->turning, walk->coordinates, first, count, words, walk->n, before,
                                  sums_of(walk, STATIC));
}

static void sum_static(qkv_walk *walk) {
  const size_t width = qkv_phases_rope(walk->phases)->width;
  add_static(walk, 0, 2 * (size_t)walk->transform->plan->begins[0], NULL);
  if (width < walk->dim) add_static(walk, width, walk->dim - width, sums_of(walk, STATIC));
}

void qkv_walk_start(qkv_walk *walk, const qkv_phases *phases, const qkv_transform *transform, const float *queries,
                    size_t n, size_t coordinates) {
  assert(n <= QKV_QUERY_BLOCK && qkv_transform_by_blocks(transform) && transform->turning != NULL);
  walk->phases = phases;
  walk->transform = transform;
  walk->n = n;
  walk->dim = transform->schedule->dim;
  walk->coordinates = coordinates;
  walk->keeps = (QKV_TURN_LEVELS + 1) * n * padded(coordinates) <= QKV_WALK_SUMS;
  walk->spans[OF_BLOCKS] = walk->spans[OF_PAGES] = NONE;
  for (unsigned level = 0; level < QKV_TURN_LEVELS; level++) walk->blocks[level] = NONE;
  take_rows(walk, queries);
  find_products(walk);
  if (walk->keeps) sum_static(walk);
}

// ---- Codes ----

// Turns to a span's beginning, which most pages share.
static qkv_pair_turns turns_to(qkv_walk *walk, int which, uint64_t base) {
  if (walk->spans[which] != base) {
    walk->spans[which] = base;
    walk->turns[which] = qkv_phases_turns_at(walk->phases, base, walk->buffer[which]);
  }
  return walk->turns[which];
}

static void sum_pairs(qkv_walk *walk, const qkv_walk_level *levels, size_t count, const int32_t *before,
                      float *codes) {
  const qkv_walk_queries queries = {.n = walk->n,
                                    .stride = walk->dim,
                                    .apart = qkv_phases_rope(walk->phases)->width / 2,
                                    .rows = walk->rows,
                                    .factors = walk->factors,
                                    .scales = walk->scales};
  qkv_kernels_get()->sum_levels(walk->transform->turning, walk->coordinates, &queries, levels, count, before, codes);
}

// All pairs by their angles, as keys are turned: where rows turn with frequencies of their own, and far away.
static void sum_anew(qkv_walk *walk, uint64_t position, float *codes) {
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2], ones[QKV_DIM_MAX / 2];
  static const float zeros[QKV_DIM_MAX / 2];
  const qkv_turn_plan *plan = walk->transform->plan;
  qkv_phases_frame(walk->phases, plan, position, cosines, sines);
  for (size_t i = 0; i < QKV_DIM_MAX / 2; i++) ones[i] = 1;
  const qkv_walk_level all = {
      .first = plan->begins[0], .end = plan->begins[QKV_TURN_LEVELS], .base = {cosines, sines}, .on = {ones, zeros}};
  sum_pairs(walk, &all, 1, sums_of(walk, STATIC), codes);
}

// A level as it turns to the middle of a block.
static qkv_walk_level level_of(qkv_walk *walk, unsigned level, uint64_t block) {
  const uint64_t middle = qkv_turn_middle(block, level);
  const uint64_t base = middle / QKV_TURN_SPAN * QKV_TURN_SPAN;
  const size_t half_pages = (size_t)(middle - base) / (QKV_PAGE_TOKENS / 2);
  return (qkv_walk_level){.first = walk->transform->plan->begins[level],
                          .end = walk->transform->plan->begins[level + 1],
                          .base = turns_to(walk, OF_BLOCKS, base),
                          .on = qkv_phases_half_pages(walk->phases, half_pages),
                          .sums = walk->keeps && level > 0 ? sums_of(walk, level) : NULL};
}

static bool is_empty(const qkv_turn_plan *plan, unsigned level) {
  return plan->begins[level] == plan->begins[level + 1];
}

// From the longest blocks that have changed to the shortest: sums of longer ones are reused, as blocks nest. The last
// level, which changes with every page, is not kept.
static void sum_levels(qkv_walk *walk, uint64_t position, float *codes) {
  qkv_walk_level levels[QKV_TURN_LEVELS];
  const qkv_turn_plan *plan = walk->transform->plan;
  const int32_t *before = sums_of(walk, STATIC);
  unsigned changed = 0;  // levels
  for (; changed < QKV_TURN_LEVELS; changed++) {
    if (is_empty(plan, changed)) continue;
    const uint64_t block = qkv_turn_block(position, changed);
    if (walk->keeps && changed > 0 && walk->blocks[changed] == block) {
      before = sums_of(walk, changed);
      break;
    }
    walk->blocks[changed] = block;
  }
  size_t count = 0;
  for (unsigned level = changed; level-- > 0;) {
    if (!is_empty(plan, level)) levels[count++] = level_of(walk, level, walk->blocks[level]);
  }
  sum_pairs(walk, levels, count, before, codes);
}

void qkv_walk_codes(qkv_walk *walk, uint64_t position, float *codes) {
  if (!walk->keeps) sum_static(walk);
  if (qkv_phases_steady(walk->phases, position) && position + QKV_PAGE_TOKENS / 2 < FAR) {
    sum_levels(walk, position, codes);
  } else {
    sum_anew(walk, position, codes);
  }
}

void qkv_walk_exact(qkv_walk *walk, uint64_t position, const float *queries, float *codes) {
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  const qkv_rope *rope = qkv_phases_rope(walk->phases);
  qkv_phases_frame(walk->phases, walk->transform->plan, position, cosines, sines);
  memcpy(codes, queries, walk->n * walk->dim * sizeof *codes);
  for (size_t i = 0; i < walk->n; i++) {
    for (uint32_t pair = walk->transform->plan->begins[0]; pair < rope->width / 2; pair++) {
      float *first = codes + i * walk->dim + qkv_rope_first(rope, pair);
      float *second = codes + i * walk->dim + qkv_rope_second(rope, pair);
      const float a = *first, b = *second, c = cosines[pair], s = sines[pair];
      *first = a * c + b * s;
      *second = b * c - a * s;
    }
  }
  qkv_kernels_get()->multiply(walk->transform->synthesis, walk->dim, walk->coordinates, codes, walk->n);
}

// ---- Turns of a page ----

static void join_turns(qkv_pair_turns base, qkv_pair_turns on, size_t first, size_t end, float *cosines,
                       float *sines) {
  for (size_t pair = first; pair < end; pair++) {
    cosines[pair] = base.cosines[pair] * on.cosines[pair] - base.sines[pair] * on.sines[pair];
    sines[pair] = base.cosines[pair] * on.sines[pair] + base.sines[pair] * on.cosines[pair];
  }
}

bool qkv_walk_turns(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position,
                    qkv_walk_page_turns *turns) {
  float buffer[QKV_DIM_MAX];
  if (!qkv_phases_steady(phases, position) || position + QKV_PAGE_TOKENS / 2 >= FAR) return false;
  if (turns == NULL) return true;
  for (size_t pair = 0; pair < plan->begins[0]; pair++) {
    turns->cosines[0][pair] = 1;
    turns->sines[0][pair] = 0;
  }
  for (unsigned level = 0; level < QKV_TURN_LEVELS; level++) {
    const uint64_t middle = qkv_turn_middle(qkv_turn_block(position, level), level);
    const uint64_t base = middle / QKV_TURN_SPAN * QKV_TURN_SPAN;
    join_turns(qkv_phases_turns_at(phases, base, buffer),
               qkv_phases_half_pages(phases, (size_t)(middle - base) / (QKV_PAGE_TOKENS / 2)), plan->begins[level],
               plan->begins[level + 1], turns->cosines[0], turns->sines[0]);
  }
  const size_t page = position / QKV_PAGE_TOKENS % QKV_PHASES_PAGES;
  join_turns(qkv_phases_turns_at(phases, position - page * QKV_PAGE_TOKENS, buffer), qkv_phases_middle(phases, page),
             0, qkv_phases_rope(phases)->width / 2, turns->cosines[1], turns->sines[1]);
  return true;
}

// ---- Scores ----

static void add_shares(const qkv_walk *walk, float *scores) {
  for (size_t i = 0; i < walk->n; i++, scores += QKV_PAGE_TOKENS) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) scores[t] += walk->shares[i];
  }
}

// Pair by pair, as pages of other frames are.
static void add_unsteady(const qkv_walk *walk, uint64_t position, float *scores) {
  const qkv_rope *rope = qkv_phases_rope(walk->phases);
  float query[QKV_DIM_MAX], turned[QKV_DIM_MAX];
  qkv_phases_walk centre;
  qkv_phases_start(&centre);
  for (size_t i = 0; i < walk->n; i++) {
    const float *row = walk->rows + i * walk->dim;
    for (size_t j = 0; j < walk->dim; j++) {
      const size_t at = j >= rope->width ? j : j % 2 * (rope->width / 2) + j / 2;
      query[qkv_turn_input(rope, j)] = row[at];
    }
    qkv_phases_turn_queries(walk->phases, &centre, position, 1, walk->dim, query, turned);
    qkv_phases_add_scores(walk->phases, walk->transform, position, 1, turned, scores + i * QKV_PAGE_TOKENS);
  }
}

// A page's middle is between slots 31 and 32.
void qkv_walk_add_scores(qkv_walk *walk, uint64_t position, float *scores) {
  if (walk->transform->anchor_pairs == 0) return add_shares(walk, scores);
  if (!qkv_phases_steady(walk->phases, position)) {
    add_shares(walk, scores);
    return add_unsteady(walk, position, scores);
  }
  const size_t page = position < FAR ? position / QKV_PAGE_TOKENS % QKV_PHASES_PAGES : 0;
  qkv_kernels_get()->add_anchors(
      qkv_phases_waves(walk->phases), turns_to(walk, OF_PAGES, position - page * QKV_PAGE_TOKENS),
      qkv_phases_middle(walk->phases, page), walk->products, walk->n, walk->shares, scores);
}
