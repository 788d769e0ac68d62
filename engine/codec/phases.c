#include "engine/codec/phases.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "engine/kernel/kernel.h"

enum { CENTRE = QKV_PAGE_TOKENS / 2, ALIGN = 64 };  // slot, bytes

// From here on a double counts angles in steps of 5e-7 radians and more: the angle of a page is then no longer that
// of the first page of its span and the way from there. Keys and queries have to be turned by the same one.
static const uint64_t FAR = (uint64_t)1 << 32;
// What a pair turns by in half a page, in radians, for its wave to be a polynomial.
static const double POLYNOMIAL_MOST = 2;
// Terms below this are left out.
static const double TERM_LEAST = 2e-6;

typedef struct turn {
  double c, s;
} turn;

struct qkv_phases {
  uint64_t number;  // no other has it; not 0
  qkv_rope rope;
  uint32_t pairs;
  double magnitude;
  double *frequencies;                // [pairs], where steady
  double *page_cosines, *page_sines;  // [page][pair]: of 64 * page positions
  float (*cosines)[QKV_PAGE_TOKENS];  // [pairs][slot]: of its distance to the centre
  float (*sines)[QKV_PAGE_TOKENS];
  float *slot_cosines, *slot_sines;      // the same, [slot][pair]
  float *half_cosines, *half_sines;      // [half page][pair]: of so many half pages' positions
  float *middle_cosines, *middle_sines;  // [page][pair]: of the middle of a span's page
  float *span_cosines, *span_sines;      // [span][pair]: of so many spans' positions
  float *wave_cosines, *wave_sines;      // what `waves` points to
  float *even, *odd;
  qkv_page_waves waves;
};

static turn turn_of(double angle) {
  return (turn){cos(angle), sin(angle)};
}

static void *array(size_t count, size_t size) {
  assert(count > 0 && size > 0);
  const size_t bytes = (count * size + ALIGN - 1) / ALIGN * ALIGN;  // vectors of 64 bytes read tables
  void *made = aligned_alloc(ALIGN, bytes);
  if (made == NULL) abort();
  return memset(made, 0, bytes);
}

static void fill_pair(qkv_phases *phases, uint32_t pair) {
  const double frequency = phases->frequencies[pair] = qkv_rope_frequency(&phases->rope, 0, pair);
  for (size_t i = 0; i < QKV_PHASES_PAGES; i++) {
    const turn page = turn_of((double)(i * QKV_PAGE_TOKENS) * frequency);
    phases->page_cosines[i * phases->pairs + pair] = page.c;
    phases->page_sines[i * phases->pairs + pair] = page.s;
  }
  for (size_t i = 0; i < 2 * (size_t)QKV_PHASES_PAGES; i++) {
    const turn at = turn_of((double)i * (0.5 * QKV_PAGE_TOKENS) * frequency);
    phases->half_cosines[i * phases->pairs + pair] = (float)at.c;
    phases->half_sines[i * phases->pairs + pair] = (float)at.s;
  }
  for (size_t i = 0; i < QKV_PHASES_PAGES; i++) {
    const turn at = turn_of(((double)(i * QKV_PAGE_TOKENS) + QKV_WAVE_SLOTS - 0.5) * frequency);
    phases->middle_cosines[i * phases->pairs + pair] = (float)at.c;
    phases->middle_sines[i * phases->pairs + pair] = (float)at.s;
  }
  for (size_t i = 0; i < QKV_PHASES_SPANS; i++) {
    const turn at = turn_of((double)(i * QKV_PHASES_SPAN) * frequency);
    phases->span_cosines[i * phases->pairs + pair] = (float)at.c;
    phases->span_sines[i * phases->pairs + pair] = (float)at.s;
  }
  for (size_t slot = 0; slot < QKV_PAGE_TOKENS; slot++) {
    const turn at = turn_of(((double)slot - CENTRE) * frequency);
    phases->cosines[pair][slot] = (float)at.c;
    phases->sines[pair][slot] = (float)at.s;
    phases->slot_cosines[slot * phases->pairs + pair] = (float)at.c;
    phases->slot_sines[slot * phases->pairs + pair] = (float)at.s;
  }
}

// ---- Waves within a page ----

static void fill_wave(qkv_phases *phases, uint32_t pair) {
  for (size_t i = 0; i < QKV_WAVE_SLOTS; i++) {
    const turn at = turn_of(((double)i + 0.5) * phases->frequencies[pair]);
    phases->wave_cosines[pair * QKV_WAVE_SLOTS + i] = (float)at.c;
    phases->wave_sines[pair * QKV_WAVE_SLOTS + i] = (float)at.s;
  }
}

// A slow pair's cosine and sine as polynomials: with h what it turns by in half a page (Jacobi and Anger),
//   cos(hv) = J_0(h) + 2 sum_k (-1)^k J_2k(h) T_2k(v)    sin(hv) = 2 sum_k (-1)^k J_2k+1(h) T_2k+1(v)
// and T Chebyshev's polynomials. Up to v^7 the first misses 4.5e-5 at most at h = 2, and the second 5e-6.
static void fill_terms(qkv_phases *phases, uint32_t pair) {
  static const int even[QKV_WAVE_TERMS][QKV_WAVE_TERMS] = {{1}, {-1, 2}, {1, -8, 8}, {-1, 18, -48, 32}};
  static const int odd[QKV_WAVE_TERMS][QKV_WAVE_TERMS] = {{1}, {-3, 4}, {5, -20, 16}, {-7, 56, -112, 64}};
  const double h = CENTRE * phases->frequencies[pair];
  double sums[2][QKV_WAVE_TERMS] = {{0}};
  for (int k = 0; k < QKV_WAVE_TERMS; k++) {
    const double sign = k % 2 == 0 ? 2 : -2;
    for (int i = 0; i <= k; i++) {
      sums[0][i] += (k == 0 ? 1 : sign) * jn(2 * k, h) * even[k][i];
      sums[1][i] += sign * jn(2 * k + 1, h) * odd[k][i];
    }
  }
  for (size_t i = 0; i < QKV_WAVE_TERMS; i++) {
    phases->even[i * phases->waves.stride + pair] = (float)sums[0][i];
    phases->odd[i * phases->waves.stride + pair] = (float)sums[1][i];
    if (fabs(sums[0][i]) > TERM_LEAST || fabs(sums[1][i]) > TERM_LEAST) phases->waves.ends[i] = pair + 1;
  }
}

static void fill_waves(qkv_phases *phases) {
  const size_t stride = (phases->pairs + QKV_BAND - 1) / QKV_BAND * QKV_BAND;
  size_t fast = 0;
  while (fast < phases->pairs && CENTRE * phases->frequencies[fast] > POLYNOMIAL_MOST) fast++;
  phases->wave_cosines = array(fast + 1, QKV_WAVE_SLOTS * sizeof(float));
  phases->wave_sines = array(fast + 1, QKV_WAVE_SLOTS * sizeof(float));
  phases->even = array(QKV_WAVE_TERMS, stride * sizeof(float));
  phases->odd = array(QKV_WAVE_TERMS, stride * sizeof(float));
  phases->waves = (qkv_page_waves){.pairs = phases->pairs,
                                   .stride = stride,
                                   .fast = fast,
                                   .cosines = phases->wave_cosines,
                                   .sines = phases->wave_sines,
                                   .even = phases->even,
                                   .odd = phases->odd};
  for (uint32_t pair = 0; pair < fast; pair++) fill_wave(phases, pair);
  for (uint32_t pair = (uint32_t)fast; pair < phases->pairs; pair++) fill_terms(phases, pair);
}

qkv_phases *qkv_phases_create(const qkv_rope *rope) {
  assert(rope->theta != 0 && rope->width > 0);
  static atomic_uint_least64_t created;
  qkv_phases *phases = array(1, sizeof *phases);
  phases->number = atomic_fetch_add_explicit(&created, 1, memory_order_relaxed) + 1;
  phases->rope = *rope;
  phases->pairs = rope->width / 2;
  phases->magnitude = qkv_rope_magnitude(rope);
  phases->frequencies = array(phases->pairs, sizeof *phases->frequencies);
  phases->page_cosines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->page_cosines);
  phases->page_sines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->page_sines);
  phases->cosines = array(phases->pairs, sizeof *phases->cosines);
  phases->sines = array(phases->pairs, sizeof *phases->sines);
  phases->slot_cosines = array(phases->pairs, QKV_PAGE_TOKENS * sizeof *phases->slot_cosines);
  phases->slot_sines = array(phases->pairs, QKV_PAGE_TOKENS * sizeof *phases->slot_sines);
  phases->half_cosines = array(phases->pairs, (size_t)2 * QKV_PHASES_PAGES * sizeof *phases->half_cosines);
  phases->half_sines = array(phases->pairs, (size_t)2 * QKV_PHASES_PAGES * sizeof *phases->half_sines);
  phases->middle_cosines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->middle_cosines);
  phases->middle_sines = array(phases->pairs, QKV_PHASES_PAGES * sizeof *phases->middle_sines);
  phases->span_cosines = array(phases->pairs, QKV_PHASES_SPANS * sizeof *phases->span_cosines);
  phases->span_sines = array(phases->pairs, QKV_PHASES_SPANS * sizeof *phases->span_sines);
  for (uint32_t pair = 0; pair < phases->pairs; pair++) fill_pair(phases, pair);
  fill_waves(phases);
  return phases;
}

void qkv_phases_destroy(qkv_phases **phases) {
  qkv_phases *old = *phases;
  if (old == NULL) return;
  *phases = NULL;
  free(old->frequencies);
  free(old->page_cosines);
  free(old->page_sines);
  free(old->cosines);
  free(old->sines);
  free(old->slot_cosines);
  free(old->slot_sines);
  free(old->half_cosines);
  free(old->half_sines);
  free(old->middle_cosines);
  free(old->middle_sines);
  free(old->span_cosines);
  free(old->span_sines);
  free(old->wave_cosines);
  free(old->wave_sines);
  free(old->even);
  free(old->odd);
  free(old);
}

// Whether a page's rows all turn with the same frequencies.
static bool steady(const qkv_phases *phases, uint64_t position) {
  return qkv_rope_steady(&phases->rope, position + QKV_PAGE_TOKENS);
}

static double angle_at(const qkv_phases *phases, uint64_t position, uint32_t pair) {
  const bool same = qkv_rope_steady(&phases->rope, position + 1);
  return (double)position * (same ? phases->frequencies[pair] : qkv_rope_frequency(&phases->rope, position, pair));
}

// cosines and sines [tokens] of one pair, of what turns a row from the page's centre to its position.
static void fill_slots(const qkv_phases *phases, uint64_t position, size_t tokens, uint32_t pair, float *cosines,
                       float *sines) {
  if (steady(phases, position)) {
    memcpy(cosines, phases->cosines[pair], tokens * sizeof *cosines);
    memcpy(sines, phases->sines[pair], tokens * sizeof *sines);
    return;
  }
  const double centre = angle_at(phases, position + CENTRE, pair);
  for (size_t t = 0; t < tokens; t++) {
    const turn at = turn_of(angle_at(phases, position + t, pair) - centre);
    cosines[t] = (float)at.c;
    sines[t] = (float)at.s;
  }
}

// The pairs of a row, each by its angle: cosines and sines [pairs].
static void turn_row(const qkv_phases *phases, const float *restrict cosines, const float *restrict sines,
                     float *restrict row) {
  const size_t pairs = phases->pairs;
  if (phases->rope.interleaved) {
    for (size_t i = 0; i < pairs; i++) {
      const float a = row[2 * i], b = row[2 * i + 1], c = cosines[i], s = sines[i];
      row[2 * i] = a * c - b * s;
      row[2 * i + 1] = a * s + b * c;
    }
    return;
  }
  for (size_t i = 0; i < pairs; i++) {
    const float a = row[i], b = row[i + pairs], c = cosines[i], s = sines[i];
    row[i] = a * c - b * s;
    row[i + pairs] = a * s + b * c;
  }
}

// ---- Archive frame ----

static float scale_of(const qkv_phases *phases, bool back) {
  return (float)(back ? 1 / phases->magnitude : phases->magnitude);
}

// What turns a pair to the page's centre; `scale` multiplies what turned.
static void find_centre(const qkv_phases *phases, uint64_t position, uint32_t pair, float scale, float *cosine,
                        float *sine) {
  const turn centre = turn_of(angle_at(phases, position + CENTRE, pair));
  *cosine = (float)centre.c * scale;
  *sine = (float)centre.s * scale;
}

// Of all pairs of a page. A thread keeps those of the last page, whose heads follow each other: 64 pairs take as long
// as 20 rows do to be turned.
typedef struct page_centre {
  uint64_t phases, position;  // whose; 0: of none
  float scale;
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
} page_centre;

static const page_centre *centre_of(const qkv_phases *phases, uint64_t position, float scale) {
  static _Thread_local page_centre kept;
  if (kept.phases == phases->number && kept.position == position && kept.scale == scale) return &kept;
  kept.phases = phases->number;
  kept.position = position;
  kept.scale = scale;
  for (uint32_t pair = 0; pair < phases->pairs; pair++)
    find_centre(phases, position, pair, scale, &kept.cosines[pair], &kept.sines[pair]);
  return &kept;
}

// direction 1 or -1; `scale` multiplies what turned. Where frequencies change, row by row.
static void turn_unsteady(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float direction,
                          float scale, float *rows) {
  float cosines[QKV_PAGE_TOKENS], sines[QKV_PAGE_TOKENS];
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    float *first = rows + qkv_rope_first(&phases->rope, pair), *second = rows + qkv_rope_second(&phases->rope, pair);
    float cc, cs;
    find_centre(phases, position, pair, scale, &cc, &cs);
    fill_slots(phases, position, tokens, pair, cosines, sines);
    for (size_t t = 0; t < tokens; t++, first += dim, second += dim) {
      const float c = cc * cosines[t] - cs * sines[t], s = direction * (cc * sines[t] + cs * cosines[t]);
      const float a = *first, b = *second;
      *first = a * c - b * s;
      *second = a * s + b * c;
    }
  }
}

// What turns a page's rows; `slots` of rows, [slot][pair].
static qkv_row_turns row_turns(const qkv_phases *phases, const float *cosines, const float *sines,
                               qkv_pair_turns slots) {
  const bool interleaved = phases->rope.interleaved;
  return (qkv_row_turns){.pairs = phases->pairs,
                         .step = interleaved ? 2 : 1,
                         .apart = interleaved ? 1 : phases->pairs,
                         .page = {cosines, sines},
                         .slots = slots};
}

static void turn_rows(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, bool back, float scale,
                      float *rows) {
  assert(tokens <= QKV_PAGE_TOKENS && phases->rope.width <= dim);
  if (!steady(phases, position)) return turn_unsteady(phases, position, tokens, dim, back ? -1 : 1, scale, rows);
  const page_centre *centre = centre_of(phases, position, scale);
  const qkv_pair_turns slots = {phases->slot_cosines, phases->slot_sines};
  const qkv_row_turns turns = row_turns(phases, centre->cosines, centre->sines, slots);
  qkv_kernels_get()->turn_rows(&turns, back, tokens, dim, rows);
}

void qkv_phases_forward(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows) {
  turn_rows(phases, position, tokens, dim, false, scale_of(phases, false), rows);
}

void qkv_phases_inverse(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows) {
  turn_rows(phases, position, tokens, dim, true, scale_of(phases, true), rows);
}

// ---- Attend frame ----

// What turns a page's rows back, pair by pair, and the anchor at its centre, turned back likewise.
typedef struct frame_turns {
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  float anchor_x[QKV_DIM_MAX / 2], anchor_y[QKV_DIM_MAX / 2];
} frame_turns;

// The angle that a pair is turned back by; `plan` NULL: the page's centre.
static double frame_angle(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position, uint32_t pair) {
  const bool by_blocks = plan != NULL && plan->rule == QKV_TURN_BLOCKS;
  if (by_blocks && pair < plan->begins[0]) return 0;
  if (!by_blocks || !steady(phases, position)) return angle_at(phases, position + CENTRE, pair);
  unsigned level = 0;
  while (pair >= plan->begins[level + 1]) level++;
  return (double)qkv_turn_middle(qkv_turn_block(position, level), level) * phases->frequencies[pair];
}

// Of all pairs of a page: the frame's turn, and that from there to the centre. As page_centre.
typedef struct page_frame {
  uint64_t phases, position;
  qkv_turn_plan plan;
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  double rest_cosines[QKV_DIM_MAX / 2], rest_sines[QKV_DIM_MAX / 2];
} page_frame;

static const page_frame *frame_of(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position) {
  static _Thread_local page_frame kept;
  static const qkv_turn_plan by_page = {.rule = QKV_TURN_PAGE};
  if (plan == NULL) plan = &by_page;
  if (kept.phases == phases->number && kept.position == position && memcmp(&kept.plan, plan, sizeof *plan) == 0)
    return &kept;
  kept.phases = phases->number;
  kept.position = position;
  kept.plan = *plan;
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const double angle = frame_angle(phases, plan, position, pair);
    const turn at = turn_of(angle), rest = turn_of(angle_at(phases, position + CENTRE, pair) - angle);
    kept.cosines[pair] = (float)at.c;
    kept.sines[pair] = (float)at.s;
    kept.rest_cosines[pair] = rest.c;
    kept.rest_sines[pair] = rest.s;
  }
  return &kept;
}

static void find_turns(const qkv_phases *phases, const qkv_transform *transform, uint64_t position,
                       frame_turns *turns) {
  const page_frame *frame = frame_of(phases, transform->plan, position);
  memcpy(turns->cosines, frame->cosines, phases->pairs * sizeof *turns->cosines);
  memcpy(turns->sines, frame->sines, phases->pairs * sizeof *turns->sines);
  memset(turns->anchor_x, 0, phases->pairs * sizeof *turns->anchor_x);
  memset(turns->anchor_y, 0, phases->pairs * sizeof *turns->anchor_y);
  for (size_t i = 0; i < transform->anchor_pairs; i++) {
    const uint32_t pair = qkv_transform_anchored(transform, i);
    const turn at = {frame->rest_cosines[pair], frame->rest_sines[pair]};
    const double x = phases->magnitude * (double)transform->anchor[2 * i];
    const double y = phases->magnitude * (double)transform->anchor[2 * i + 1];
    turns->anchor_x[pair] = (float)(x * at.c - y * at.s);
    turns->anchor_y[pair] = (float)(x * at.s + y * at.c);
  }
}

// Cosines and sines of the slots of a page, [slot][pair].
typedef struct slot_rows {
  float cosines[QKV_PAGE_TOKENS * QKV_DIM_MAX / 2], sines[QKV_PAGE_TOKENS * QKV_DIM_MAX / 2];
} slot_rows;

static void fill_slot_rows(const qkv_phases *phases, uint64_t position, size_t tokens, slot_rows *rows) {
  float cosines[QKV_PAGE_TOKENS], sines[QKV_PAGE_TOKENS];
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    fill_slots(phases, position, tokens, pair, cosines, sines);
    for (size_t t = 0; t < tokens; t++) {
      rows->cosines[t * phases->pairs + pair] = cosines[t];
      rows->sines[t * phases->pairs + pair] = sines[t];
    }
  }
}

static void move_rows(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                      bool out, float *rows) {
  frame_turns frame;
  slot_rows own;
  qkv_pair_turns slots = {phases->slot_cosines, phases->slot_sines};
  find_turns(phases, transform, position, &frame);
  if (!steady(phases, position)) {
    fill_slot_rows(phases, position, tokens, &own);
    slots = (qkv_pair_turns){own.cosines, own.sines};
  }
  const qkv_row_turns turns = row_turns(phases, frame.cosines, frame.sines, slots);
  qkv_kernels_get()->frame_rows(&turns, frame.anchor_x, frame.anchor_y, out, tokens, transform->schedule->dim, rows);
}

void qkv_phases_to_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                        float *rows) {
  move_rows(phases, transform, position, tokens, false, rows);
}

void qkv_phases_from_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                          float *rows) {
  move_rows(phases, transform, position, tokens, true, rows);
}

// ---- For devices ----

void qkv_phases_row_turns(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, bool back,
                          float *turns) {
  const size_t pairs = phases->pairs;
  frame_turns frame;
  if (transform != NULL) {
    find_turns(phases, transform, position, &frame);
    memcpy(turns, frame.cosines, pairs * sizeof *turns);
    memcpy(turns + pairs, frame.sines, pairs * sizeof *turns);
    memcpy(turns + 2 * pairs, frame.anchor_x, pairs * sizeof *turns);
    memcpy(turns + 3 * pairs, frame.anchor_y, pairs * sizeof *turns);
  } else {
    memset(turns, 0, 4 * pairs * sizeof *turns);
  }
  for (uint32_t pair = 0; pair < pairs; pair++)
    find_centre(phases, position, pair, scale_of(phases, back), &turns[4 * pairs + pair], &turns[5 * pairs + pair]);
}

void qkv_phases_slot_turns(const qkv_phases *phases, uint64_t position, float *cosines, float *sines) {
  for (uint32_t pair = 0; pair < phases->pairs; pair++)
    fill_slots(phases, position, QKV_PAGE_TOKENS, pair, cosines + (size_t)pair * QKV_PAGE_TOKENS,
               sines + (size_t)pair * QKV_PAGE_TOKENS);
}

// ---- For walks over pages ----

const qkv_page_waves *qkv_phases_waves(const qkv_phases *phases) {
  return &phases->waves;
}

bool qkv_phases_steady(const qkv_phases *phases, uint64_t position) {
  return steady(phases, position);
}

const qkv_rope *qkv_phases_rope(const qkv_phases *phases) {
  return &phases->rope;
}

qkv_pair_turns qkv_phases_turns_at(const qkv_phases *phases, uint64_t position, float *space) {
  const size_t pairs = phases->pairs, span = position / QKV_PHASES_SPAN;
  if (position % QKV_PHASES_SPAN == 0 && span < QKV_PHASES_SPANS) {
    return (qkv_pair_turns){phases->span_cosines + span * pairs, phases->span_sines + span * pairs};
  }
  for (size_t pair = 0; pair < pairs; pair++) {
    const turn at = turn_of((double)position * phases->frequencies[pair]);
    space[pair] = (float)at.c;
    space[pairs + pair] = (float)at.s;
  }
  return (qkv_pair_turns){space, space + pairs};
}

qkv_pair_turns qkv_phases_half_pages(const qkv_phases *phases, size_t i) {
  assert(i < 2 * (size_t)QKV_PHASES_PAGES);
  return (qkv_pair_turns){phases->half_cosines + i * phases->pairs, phases->half_sines + i * phases->pairs};
}

qkv_pair_turns qkv_phases_middle(const qkv_phases *phases, size_t page) {
  assert(page < QKV_PHASES_PAGES);
  return (qkv_pair_turns){phases->middle_cosines + page * phases->pairs, phases->middle_sines + page * phases->pairs};
}

void qkv_phases_frame(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position, float *cosines,
                      float *sines) {
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const turn at = turn_of(frame_angle(phases, plan, position, pair));
    cosines[pair] = (float)at.c;
    sines[pair] = (float)at.s;
  }
}

// ---- Queries turned back by the page ----

void qkv_phases_start(qkv_phases_walk *walk) {
  walk->base = UINT64_MAX;
}

static void rebase(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t base) {
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const turn centre = turn_of(angle_at(phases, base + CENTRE, pair));
    walk->cosines[pair] = centre.c;
    walk->sines[pair] = centre.s;
  }
  walk->base = base;
}

void qkv_phases_turn_queries(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t position, size_t n, size_t dim,
                             const float *queries, float *turned) {
  // Of the position alone: so are the bits of what is turned, whichever pages came before.
  const bool spans = position < FAR && steady(phases, position);
  const size_t page = spans ? position / QKV_PAGE_TOKENS % QKV_PHASES_PAGES : 0;
  const uint64_t base = position - page * QKV_PAGE_TOKENS;
  memcpy(turned, queries, n * dim * sizeof *turned);
  if (walk->base != base) rebase(phases, walk, base);
  float cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];
  const double *page_c = phases->page_cosines + page * phases->pairs;
  const double *page_s = phases->page_sines + page * phases->pairs;
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    const double c = walk->cosines[pair], s = walk->sines[pair];
    cosines[pair] = (float)(c * page_c[pair] - s * page_s[pair]);
    sines[pair] = -(float)(c * page_s[pair] + s * page_c[pair]);
  }
  for (size_t i = 0; i < n; i++) turn_row(phases, cosines, sines, turned + i * dim);
}

// ---- Scores ----

// Cosines and sines of the slots of a page that is not steady.
typedef struct slot_buffer {
  float cosines[QKV_DIM_MAX / 2][QKV_PAGE_TOKENS], sines[QKV_DIM_MAX / 2][QKV_PAGE_TOKENS];
} slot_buffer;

static qkv_slot_turns slot_turns(const qkv_phases *phases, uint64_t position, slot_buffer *buffer) {
  qkv_slot_turns turns = {.pairs = phases->pairs,
                          .step = phases->rope.interleaved ? 2 : 1,
                          .apart = phases->rope.interleaved ? 1 : phases->pairs,
                          .cosines = phases->cosines[0],
                          .sines = phases->sines[0]};
  if (steady(phases, position)) return turns;
  for (uint32_t pair = 0; pair < phases->pairs; pair++) {
    fill_slots(phases, position, QKV_PAGE_TOKENS, pair, buffer->cosines[pair], buffer->sines[pair]);
  }
  turns.cosines = buffer->cosines[0];
  turns.sines = buffer->sines[0];
  return turns;
}

// With query (a, b) and anchor (x, y) in a pair, q . R_u mu = (ax + by) cos(u w) + (bx - ay) sin(u w).
void qkv_phases_add_scores(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t n,
                           const float *turned, float *scores) {
  enum { TOGETHER = 4 };
  float factors[TOGETHER * QKV_DIM_MAX];
  uint16_t pairs[QKV_DIM_MAX / 2];
  slot_buffer buffer;
  const size_t count = transform->anchor_pairs, dim = transform->schedule->dim;
  const qkv_slot_turns turns = slot_turns(phases, position, &buffer);
  for (size_t j = 0; j < count; j++) pairs[j] = (uint16_t)qkv_transform_anchored(transform, j);
  for (size_t first = 0, some; first < n && count > 0; first += some) {
    some = n - first < TOGETHER ? n - first : TOGETHER;
    for (size_t i = 0; i < some; i++) {
      const float *query = turned + (first + i) * dim;
      for (size_t j = 0; j < count; j++) {
        const uint32_t pair = pairs[j];
        const float a = query[qkv_rope_first(&phases->rope, pair)], b = query[qkv_rope_second(&phases->rope, pair)];
        const float x = (float)phases->magnitude * transform->anchor[2 * j];
        const float y = (float)phases->magnitude * transform->anchor[2 * j + 1];
        factors[(i * count + j) * 2] = a * x + b * y;
        factors[(i * count + j) * 2 + 1] = b * x - a * y;
      }
    }
    qkv_kernels_get()->add_waves(&turns, pairs, count, factors, some, scores + first * QKV_PAGE_TOKENS);
  }
}

void qkv_phases_score_columns(const qkv_phases *phases, uint64_t position, size_t dim, const float *columns,
                              const float *means, size_t n, float *turned, float *scores) {
  slot_buffer buffer;
  const qkv_slot_turns turns = slot_turns(phases, position, &buffer);
  if (phases->magnitude != 1) {
    for (size_t i = 0; i < n; i++) {
      for (size_t j = 0; j < 2 * (size_t)phases->pairs; j++) turned[i * dim + j] *= (float)phases->magnitude;
    }
  }
  qkv_kernels_get()->score_columns(columns, dim, means, &turns, turned, n, scores);
}

size_t qkv_phases_bytes(const qkv_rope *rope) {
  // Frequency, turns of pages, cosines and sines of slots (twice) and of waves, turns of half pages, middles and
  // spans.
  const size_t floats = 2 * (2 * QKV_PAGE_TOKENS + QKV_WAVE_SLOTS + 3 * QKV_PHASES_PAGES + QKV_PHASES_SPANS);
  const size_t pair = sizeof(double) * (1 + 2 * QKV_PHASES_PAGES) + floats * sizeof(float);
  return rope->width / 2 * pair;
}
