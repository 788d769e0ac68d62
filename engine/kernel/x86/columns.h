// What both integer kernels share: products of centroids with the columns of a chunk, sums, prefetches.
#ifndef QKV_ENGINE_KERNEL_X86_COLUMNS_H
#define QKV_ENGINE_KERNEL_X86_COLUMNS_H

#include "engine/kernel/x86/bytes.h"

#if defined(__AVX2__)
#include "engine/kernel/x86/mixed.h"
#include "engine/kernel/x86/narrow.h"

enum { LINE = 64 };

// ---- Columns ----

#if BYTE_DOTS
#define COLUMN_BYTES 4
#else
#define COLUMN_BYTES 8
// Four bytes of a column, widened: 0, 2, 1, 3.
static void widen_columns(const uint8_t *from, size_t words_count, bool is_signed, int16_t *out) {
  for (size_t i = 0; i < words_count; i++, from += 4, out += 4) {
    static const uint8_t order[4] = {0, 2, 1, 3};
    for (size_t j = 0; j < 4; j++) out[j] = is_signed ? (int16_t)(int8_t)from[order[j]] : (int16_t)from[order[j]];
  }
}
#endif

// Sums [column] of some groups of K or blocks of V. Several sets of them, to be added in the end, keep enough sums
// going side by side: an addition takes four or five cycles, and two can begin in each.
enum { SETS_MAX = 4, TOGETHER_MAX = 4 };
typedef words column_sums[QKV_INTEGER_COLUMNS];

// sums[i][column] += centroids[i] . column, for i < count and the columns from `first` on, every `step`th.
INLINE void add_some_dots(qkv_part part, const bytes *centroids, size_t count, const uint8_t *columns, size_t first,
                          size_t step, size_t width, column_sums *sums) {
  plane planes[TOGETHER_MAX];
  UNROLL
  for (size_t i = 0; i < count; i++) planes[i] = plane_of(centroids[i]);
  UNROLL
  for (size_t column = first; column < width; column += step) {
#if BYTE_DOTS
    const bytes all = repeat_word(columns + column * COLUMN_BYTES);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      const bytes sum = (bytes)sums[i][column];
      sums[i][column] = (words)(part == QKV_K ? dot_keys(sum, planes[i], all) : dot_values(sum, planes[i], all));
    }
#else
    (void)part;
    const bytes even = repeat_word(columns + column * COLUMN_BYTES);
    const bytes odd = repeat_word(columns + column * COLUMN_BYTES + 4);
    for (size_t i = 0; i < count; i++) {
      const words evens = (words)MULTIPLY_HALVES(planes[i].even, even);
      sums[i][column] += evens + (words)MULTIPLY_HALVES(planes[i].odd, odd);
    }
#endif
  }
}

INLINE void add_dots(qkv_part part, const bytes *centroids, size_t count, const uint8_t *columns, size_t width,
                     column_sums *sums) {
  add_some_dots(part, centroids, count, columns, 0, 1, width, sums);
}

#if LANES == 8
INLINE void add_narrow_dots(qkv_part part, const bytes *centroids, size_t count, const uint8_t *columns, size_t width,
                            column_sums *sums) {
  UNROLL
  for (size_t column = 0; column < width; column++) {
    const bytes numbers = repeat_word(columns + column * 4);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      sums[i][column] = (words)narrow_dot(part, (bytes)sums[i][column], centroids[i], numbers);
    }
  }
}
#endif

#if STEADY_LOOPS
// add_dots with split_columns (narrow.h), for the `quad`th four numbers, which lie at `columns`; `split`: perhaps
// they are in halves for the shape.
INLINE void add_split_dots(qkv_part part, qkvi_block_shape shape, const bytes *centroids, size_t count,
                           const uint8_t *columns, size_t quad, bool split, size_t width, column_sums *sums) {
#if BYTE_DOTS
  (void)shape, (void)quad, (void)split;
  add_dots(part, centroids, count, columns, width, sums);
#else
  const size_t at = quad * width * 4;
  const split_columns *halves = (const void *)(columns - at);
  if (split && (halves->split[quad] & split_bit(shape)) != 0) {
    add_narrow_dots(part, centroids, count, halves->first + at, width, sums);
    columns = halves->second + at;
  }
  add_narrow_dots(part, centroids, count, columns, width, sums);
#endif
}

// Whether any of the four fours from the `quad`th on are. Those of up to two bits never need to be.
INLINE bool are_split(qkvi_block_shape shape, const uint8_t *columns, size_t quad, size_t width) {
#if BYTE_DOTS
  (void)shape, (void)columns, (void)quad, (void)width;
  return false;
#else
  return shape != QKVI_BLOCK_FIELDS && any_split((const void *)(columns - quad * width * 4), shape, quad);
#endif
}

// add_some_dots of K with signed_columns.
INLINE void add_signed_dots(const bytes *centroids, size_t count, const uint8_t *columns, size_t first, size_t step,
                            size_t width, column_sums *sums) {
#if BYTE_DOTS
  add_some_dots(QKV_K, centroids, count, columns, first, step, width, sums);
#else
  UNROLL
  for (size_t column = first; column < width; column += step) {
    const bytes numbers = repeat_word(columns + column * 8), magnitudes = repeat_word(columns + column * 8 + 4);
    UNROLL
    for (size_t i = 0; i < count; i++) {
      sums[i][column] = (words)signed_dot((bytes)sums[i][column], centroids[i], numbers, magnitudes);
    }
  }
#endif
}
#endif

INLINE void clear_sums(column_sums *sums, size_t count, size_t width) {
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t column = 0; column < width; column++) sums[i][column] = (words){0};
  }
}

INLINE void add_sums(column_sums *to, const column_sums *from, size_t count, size_t width) {
  UNROLL
  for (size_t i = 0; i < count; i++) {
    UNROLL
    for (size_t column = 0; column < width; column++) to[i][column] += from[i][column];
  }
}

// ---- Groups ----

// The groups of a page by what their codes lie like.
typedef struct page_groups {
  const qkvi_tier_blocks *layouts[QKV_PAGE_GROUPS];
  const uint8_t *groups[QKV_PAGE_GROUPS];
  bool alike;     // all of one tier
  bool plain;     // qkvi_blocks_are_plain of all
  bool steady;    // qkvi_blocks_are_steady of all, which have as many blocks
  bool spread;    // their blocks are once halves have been spread, but for deep ones of groups that are alike
  size_t blocks;  // of the group that has most
  uint8_t shape;  // what plain blocks of all groups can be taken for: the largest
} page_groups;

INLINE void find_groups(const qkv_page_codes *codes, qkv_layouts *layouts, page_groups *page) {
  const qkvi_tier_blocks *layout = NULL;
  bool alike = true, plain = true, steady = true, deep = false, scattered = false;
  size_t blocks = 0;
  uint8_t shape = 0;
  ROLLED
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    if (g == 0 || codes->tiers[g] != codes->tiers[g - 1]) {
      layout = qkvi_layouts_find(layouts, codes->schedule, codes->tiers[g]);
      alike &= g == 0;
      plain &= qkvi_blocks_are_plain(layout);
      steady &= qkvi_blocks_are_steady(layout) && (g == 0 || layout->count == blocks);
      deep |= layout->deep > 0;
      scattered |= layout->scattered > 0;
      blocks = layout->count > blocks ? layout->count : blocks;
      shape = layout->shape > shape ? layout->shape : shape;
    }
    page->layouts[g] = layout;
    // A group without codes needs 64 readable bytes, too, where others have codes.
    page->groups[g] = layout->count > 0 ? codes->groups[g] : codes->gains;
  }
  page->alike = alike;
  page->plain = plain;
  page->steady = steady;
  page->spread = !plain && !scattered && (alike || !deep);
  page->blocks = blocks;
  page->shape = shape;
}

// What `spread` asks for; then groups have 64 bytes to read where there are no halves.
static void spread_groups(qkv_part part, const qkv_page_codes *codes, page_groups *page,
                          spread_lines out[QKV_PAGE_GROUPS]) {
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    if (part == QKV_K) {
      spread_halves(QKV_K, page->layouts[g], page->groups[g], out[g]);
    } else {
      spread_halves(QKV_V, page->layouts[g], page->groups[g], out[g]);
    }
    if (qkv_schedule_group_bytes(codes->schedule, codes->tiers[g]) < LINE) page->groups[g] = codes->gains;
  }
}

// The end of the run of blocks of one shape that begins with b.
INLINE size_t run_end(const qkvi_tier_blocks *layout, size_t b, size_t end) {
  const uint8_t shape = layout->blocks[b].shape;
  while (b < end && layout->blocks[b].shape == shape) b++;
  return b;
}

// ---- Prefetch ----

typedef struct prefetching {
  const uint8_t *at, *end;
  size_t step;  // bytes
} prefetching;

// In so many steps, or all in the first.
static prefetching prefetching_of(qkv_ahead ahead, size_t steps) {
  const uint8_t *from = ahead.from;
  if (ahead.bytes == 0) return (prefetching){0};
  if (steps == 0) steps = 1;
  const size_t lines = (ahead.bytes + LINE - 1) / LINE;
  return (prefetching){.at = from, .end = from + ahead.bytes, .step = (lines + steps - 1) / steps * LINE};
}

INLINE void prefetch_some(prefetching *ahead) {
  for (size_t i = 0; i < ahead->step && ahead->at < ahead->end; i += LINE, ahead->at += LINE) {
    _mm_prefetch((const char *)ahead->at, _MM_HINT_T0);
  }
}

// ---- Steady blocks ----

#if STEADY_LOOPS
enum { VECTORS = GROUP / LANES };  // of a group's tokens (K) or a block's coordinates (V)
// As many go together as there are registers for: with one column or two, with four or eight.
enum { STEADY_MANY = BYTE_DOTS ? 4 : 2, STEADY_FEW = BYTE_DOTS ? 2 : 1 };

// A group of steady blocks: its codes and tables are found once, and not block by block.
typedef struct steady_group {
  const uint8_t *pairs[2];  // block 0's lines; the next block's are a line behind
#if BYTE_DOTS
  const uint8_t *tables;  // [64] for each field that has one of its own
#else
  bytes tables[2];  // of even fields, of odd ones
#endif
} steady_group;

INLINE steady_group steady_of(qkv_part part, qkvi_block_shape shape, const page_groups *page, size_t g) {
  const qkvi_block *block = &page->layouts[g]->blocks[0];
  steady_group found = {.pairs = {page->groups[g] + block->lines[0], page->groups[g] + block->lines[1]}};
#if BYTE_DOTS
  found.tables = shape == QKVI_BLOCK_FIELDS ? qkvi_integers.fields[part][block->kind][0]
                                            : qkvi_integers.sixes[part][block->kind][0];
#else
  for (size_t odd = 0; odd < 2; odd++) {
    found.tables[odd] = narrow_table(part, shape, qkvi_integers.sixes[QKV_V][block->kind][odd]);
  }
#endif
  return found;
}

// What lies `at` bytes behind its pairs' beginnings.
INLINE joined steady_codes(qkvi_block_shape shape, const steady_group *group, size_t at) {
  const bytes first = load_bytes(group->pairs[0] + at);
  if (shape == QKVI_BLOCK_FIELDS) return (joined){first, first};
  return join(first, load_bytes(group->pairs[1] + at));
}

INLINE bytes steady_centroids(qkvi_block_shape shape, const steady_group *group, const joined *codes, size_t field) {
#if BYTE_DOTS
  if (shape == QKVI_BLOCK_NIBBLES) {
    return look_up_byte(load_bytes(group->tables + field % 2 * 64), nibble_of(codes, field));
  }
  const size_t place = field < QKVI_FIELD_PLACES ? field : QKVI_FIELD_PLACES - 1;
  const bytes index = field < QKVI_FIELD_PLACES ? codes->even : down(codes->even, 2);
  return look_up_byte(load_bytes(group->tables + place * 64), index);
#else
  (void)shape;
  return look_up_byte(group->tables[field % 2], nibble_of(codes, field));
#endif
}

INLINE void add_steady_fields(qkv_part part, qkvi_block_shape shape, const steady_group *groups, size_t each,
                              const joined *codes, size_t count, const uint8_t *columns, size_t quad, bool split,
                              size_t width, size_t sets, column_sums (*sums)[TOGETHER_MAX]) {
  UNROLL
  for (size_t f = 0; f < FIELDS; f++) {
    bytes centroids[TOGETHER_MAX];
    UNROLL
    for (size_t i = 0; i < count; i++) centroids[i] = steady_centroids(shape, &groups[i / each], &codes[i], f);
    add_split_dots(part, shape, centroids, count, columns + f * width * 4, quad + f, split, width, sums[f % sets]);
  }
}

// sums[set][i][column] += codes[i] . the 16 numbers of a chunk from 4 * `quad` on, which lie at `columns`. The codes
// are of groups[i / each].
INLINE void add_steady(qkv_part part, qkvi_block_shape shape, const steady_group *groups, size_t each,
                       const joined *codes, size_t count, const uint8_t *columns, size_t quad, size_t width,
                       size_t sets, column_sums (*sums)[TOGETHER_MAX]) {
  if (are_split(shape, columns, quad, width)) {
    add_steady_fields(part, shape, groups, each, codes, count, columns, quad, true, width, sets, sums);
  } else {
    add_steady_fields(part, shape, groups, each, codes, count, columns, quad, false, width, sets, sums);
  }
}

INLINE prefetching prefetching_all(qkv_ahead ahead) {
  if (ahead.bytes == 0) return (prefetching){0};
  return (prefetching){.at = ahead.from, .end = (const uint8_t *)ahead.from + ahead.bytes};
}

// So many lines, if any are left to fetch; a constant number, perhaps beyond the end.
INLINE void prefetch_lines(prefetching *ahead, size_t lines) {
  if (ahead->at >= ahead->end) return;
  UNROLL
  for (size_t i = 0; i < lines; i++) _mm_prefetch((const char *)ahead->at + i * LINE, _MM_HINT_T0);
  ahead->at += lines * LINE;
}

INLINE void prefetch_rest(prefetching *ahead) {
  for (; ahead->at < ahead->end; ahead->at += LINE) _mm_prefetch((const char *)ahead->at, _MM_HINT_T0);
}
#endif

// ---- Sums to floats ----

// A row's total from the sums of its one or two columns; `low` NULL: 0.
INLINE lanes total_of(const words *x, const words *low, unsigned parts) {
  lanes totals[QKV_INTEGER_PARTS];
  for (unsigned p = 0; p < parts; p++) {
    totals[p] = __builtin_convertvector((signed_words)x[p], lanes);
    if (low != NULL) totals[p] += __builtin_convertvector((signed_words)low[p], lanes) * QKVI_LOW_PLANE;
  }
  return parts == 1 ? totals[0] : totals[0] * QKVI_HIGH_BYTE + totals[1];
}

#endif
#endif
