#include <assert.h>
#include <stdlib.h>

#include "engine/codec/codebook.h"
#include "tests/checkkern/checkkern.h"

enum { GUARD = 80, ALIGN = 64 };  // 80: the data begins 16 bytes past a multiple of 64

static uint8_t guard_byte(size_t i) {
  return (uint8_t)(0xa5 ^ (i * 29));
}

guarded guarded_make(size_t bytes) {
  const size_t total = (bytes + 2 * GUARD + ALIGN - 1) / ALIGN * ALIGN;
  guarded buffer = {.bytes = bytes, .memory = aligned_alloc(ALIGN, total)};
  assert(buffer.memory != NULL);
  buffer.data = buffer.memory + GUARD;
  for (size_t i = 0; i < GUARD; i++) buffer.memory[i] = buffer.data[bytes + i] = guard_byte(i);
  for (size_t i = 0; i < bytes; i++) buffer.data[i] = guard_byte(i + 7);
  return buffer;
}

guarded guarded_copy(const guarded *from) {
  guarded copy = guarded_make(from->bytes);
  memcpy(copy.data, from->data, from->bytes);
  return copy;
}

bool guarded_intact(const guarded *buffer) {
  for (size_t i = 0; i < GUARD; i++) {
    if (buffer->memory[i] != guard_byte(i) || buffer->data[buffer->bytes + i] != guard_byte(i)) return false;
  }
  return true;
}

void guarded_free(guarded *buffer) {
  free(buffer->memory);
  *buffer = (guarded){0};
}

void page_part_init(page_part *page, naive_random *random, qkv_part part, const qkv_schedule *schedule,
                    const uint8_t tiers[QKV_PAGE_GROUPS]) {
  page->part = part;
  page->schedule = *schedule;
  page->gains = guarded_make(QKV_PAGE_TOKENS);
  // In one page of three all gains are nearly alike, so that weights can be.
  const bool alike = naive_below(random, 3) == 0;
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    page->gains.data[t] = (uint8_t)(alike ? 128 + naive_below(random, 2) : naive_below(random, 256));
  }
  page->codes = (qkv_page_codes){.gains = page->gains.data, .schedule = &page->schedule};
  size_t bytes = 0, at = 0;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) bytes += qkv_schedule_group_bytes(schedule, tiers[g]);
  page->groups = guarded_make(bytes);
  for (size_t i = 0; i < bytes; i++) page->groups.data[i] = (uint8_t)naive_next(random);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    page->codes.groups[g] = page->groups.data + at;
    page->codes.tiers[g] = tiers[g];
    at += qkv_schedule_group_bytes(schedule, tiers[g]);
  }
}

void page_part_deinit(page_part *page) {
  guarded_free(&page->gains);
  guarded_free(&page->groups);
}

void fill_input(naive_random *random, input_kind kind, float *numbers, size_t n) {
  static const float extremes[] = {0, -0.0f, 1e-45f, -1e-38f, 32768, -32768, 1e6f, -1e-20f, 1, -1};
  for (size_t i = 0; i < n; i++) {
    numbers[i] = (float)naive_gaussian(random);
    if (kind == INPUT_OUTLIERS && naive_below(random, 30) == 0) numbers[i] *= 40;
    if (kind == INPUT_EXTREME && naive_below(random, 2) == 0) {
      numbers[i] = extremes[naive_below(random, sizeof extremes / sizeof *extremes)];
    }
  }
}

void fill_scores(naive_random *random, input_kind kind, float *scores, size_t n) {
  for (size_t row = 0; row < n; row++, scores += QKV_PAGE_TOKENS) {
    const bool alike = naive_below(random, 4) == 0;
    fill_input(random, kind, scores, QKV_PAGE_TOKENS);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      if (kind == INPUT_GAUSSIAN) scores[t] *= 20;
      if (alike) scores[t] = 3;
      if (naive_below(random, 8) == 0) scores[t] = -INFINITY;
    }
    scores[naive_below(random, QKV_PAGE_TOKENS)] = 3;
  }
}

// The smallest number of a random cell, or a neighbour of it, times a power of two: the scale that the encoder
// tries is then one as well, and the boundary is met to the bit.
static float near_boundary(naive_random *random) {
  const unsigned code = 129 + naive_below(random, 127);
  float low = 0, high = 8;
  for (;;) {
    const float middle = (low + high) / 2;
    if (middle == low || middle == high) break;
    *(qkv_codebook_code(middle) >= code ? &high : &low) = middle;
  }
  const float sign = naive_below(random, 2) == 0 ? 1 : -1;
  return sign * (naive_below(random, 2) == 0 ? high : low);
}

void fill_rows(naive_random *random, input_kind kind, float *rows, size_t dim) {
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    float *row = rows + t * dim;
    const float factor = (float)exp(3 * naive_gaussian(random));
    fill_input(random, kind == INPUT_EXTREME && t % 2 == 0 ? INPUT_GAUSSIAN : kind, row, dim);
    for (size_t i = 0; i < dim; i++) row[i] *= factor;
    if (kind != INPUT_EXTREME) continue;
    const float constant = t == 0 ? 0 : ldexpf(1, (int)naive_below(random, 40) - 24);
    if (t % 8 == 0) {
      for (size_t i = 0; i < dim; i++) row[i] = constant;
    } else if (t % 4 == 2) {
      for (size_t i = 0; i < dim; i++) row[i] = constant * near_boundary(random);
    }
  }
}
