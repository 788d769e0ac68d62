#include "engine/codec/anchor.h"

#include <assert.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "engine/codec/anchor_scale.h"
#include "engine/codec/row.h"
#include "engine/kernel/kernel.h"

enum { ALIGN = 16, MASK_BYTES = sizeof(uint64_t) };

static size_t align_up(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

// Where the rows of a section begin.
static size_t rows_offset(qkv_anchor_kind kind, size_t count) {
  return kind == QKV_ANCHOR_CHAIN && count > 1 ? MASK_BYTES + count : 0;
}

static const char *const names[] = {[QKV_ANCHOR_NONE] = "none",
                                    [QKV_ANCHOR_MEAN] = "mean",
                                    [QKV_ANCHOR_GROUP] = "group",
                                    [QKV_ANCHOR_CHAIN] = "chain",
                                    [QKV_ANCHOR_AUTO] = "auto"};
enum { NAMES = sizeof names / sizeof *names };

const char *qkv_anchor_name(qkv_anchor_kind kind) {
  return (unsigned)kind < NAMES ? names[kind] : NULL;
}

bool qkv_anchor_parse(const char *name, qkv_anchor_kind *kind) {
  for (unsigned i = 0; i < NAMES; i++) {
    if (strcmp(name, names[i]) != 0) continue;
    *kind = (qkv_anchor_kind)i;
    return true;
  }
  return false;
}

size_t qkv_anchor_bytes(qkv_anchor_kind kind, size_t count, size_t dim) {
  return kind == QKV_ANCHOR_NONE ? 0 : align_up(rows_offset(kind, count) + count * dim);
}

size_t qkv_anchor_bytes_max(size_t dim) {
  return qkv_anchor_bytes(QKV_ANCHOR_CHAIN, QKV_PAGE_TOKENS, dim);
}

size_t qkv_anchor_find(uint8_t byte, const uint8_t *section, uint16_t dim, qkv_anchor *anchor) {
  const unsigned unit = byte >> QKVI_ANCHOR_KIND_BITS;
  *anchor = (qkv_anchor){.kind = qkv_anchor_kind_of(byte), .dim = dim, .unit = qkvi_anchor_unit(unit), .count = 1};
  switch (anchor->kind) {
    case QKV_ANCHOR_MEAN:
      break;
    case QKV_ANCHOR_GROUP:
      anchor->count = QKV_PAGE_GROUPS;
      break;
    case QKV_ANCHOR_CHAIN:
      anchor->starts = 1;
      if (unit > 0) break;
      memcpy(&anchor->starts, section, MASK_BYTES);
      anchor->count = (size_t)__builtin_popcountll(anchor->starts);
      anchor->scales = section + MASK_BYTES;
      break;
    case QKV_ANCHOR_NONE:
    case QKV_ANCHOR_AUTO:
      anchor->count = 0;
      break;
  }
  anchor->rows = (const int8_t *)section + rows_offset(anchor->kind, anchor->count);
  return qkv_anchor_bytes(anchor->kind, anchor->count, dim);
}

// ---- Bytes from outside ----

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

static qkv_status validate_mask(const uint8_t *section, size_t bytes, uint32_t tokens, uint64_t *mask,
                                qkv_error *error) {
  if (bytes < MASK_BYTES) REFUSE("a chain's mask takes %d bytes, there are %zu", MASK_BYTES, bytes);
  memcpy(mask, section, MASK_BYTES);
  if ((*mask & 1) == 0 || *mask == 1) {
    REFUSE("a chain's mask is 0x%016" PRIx64 ", it must begin a segment at token 0 and another one", *mask);
  }
  if (tokens < QKV_PAGE_TOKENS && *mask >> tokens != 0) {
    REFUSE("a chain's mask is 0x%016" PRIx64 ", there are %" PRIu32 " tokens", *mask, tokens);
  }
  return QKV_OK;
}

qkv_status qkv_anchor_validate(uint8_t byte, const uint8_t *section, size_t bytes, uint32_t tokens, uint16_t dim,
                               size_t *used, qkv_error *error) {
  assert(tokens >= 1 && tokens <= QKV_PAGE_TOKENS);
  const qkv_anchor_kind kind = qkv_anchor_kind_of(byte);
  *used = 0;
  if (kind == QKV_ANCHOR_NONE) {
    if (byte != 0) REFUSE("an anchor byte is 0x%02x, a kind of 0 has no unit", byte);
    return QKV_OK;
  }
  size_t count = kind == QKV_ANCHOR_GROUP ? QKV_PAGE_GROUPS : 1;
  if (byte == QKV_ANCHOR_CHAIN) {
    uint64_t mask = 0;
    QKV_TRY(validate_mask(section, bytes, tokens, &mask, error));
    count = (size_t)__builtin_popcountll(mask);
  }
  const size_t need = qkv_anchor_bytes(kind, count, dim);
  if (need > bytes) REFUSE("an anchor section of %zu rows takes %zu bytes, there are %zu", count, need, bytes);
  const size_t begin = rows_offset(kind, count), end = begin + count * dim;
  for (size_t i = begin; i < end; i++) {
    if (section[i] == 0x80) REFUSE("byte %zu of an anchor section is -128, at least -127 is allowed", i);
  }
  for (size_t i = end; i < need; i++) {
    if (section[i] != 0) REFUSE("byte %zu of an anchor section is padding and not 0", i);
  }
  *used = need;
  return QKV_OK;
}

// ---- Attending and decoding ----

// The slots [begin, end) that go by an anchor row.
typedef struct span {
  size_t begin, end;
} span;

// That of row `index`, after `last`'s.
static span next_span(const qkv_anchor *anchor, size_t index, span last) {
  if (anchor->kind == QKV_ANCHOR_MEAN) return (span){0, QKV_PAGE_TOKENS};
  if (anchor->kind == QKV_ANCHOR_GROUP) {
    return (span){index * QKV_GROUP_TOKENS, (index + 1) * QKV_GROUP_TOKENS};
  }
  span found = {index == 0 ? 0 : last.end, QKV_PAGE_TOKENS};
  if (found.begin + 1 < QKV_PAGE_TOKENS) {
    const uint64_t later = anchor->starts >> (found.begin + 1);
    if (later != 0) found.end = found.begin + 1 + (size_t)__builtin_ctzll(later);
  }
  return found;
}

static void load_row(const qkv_anchor *anchor, size_t index, float *row) {
  qkvi_row_widen(row, anchor->rows + index * anchor->dim, qkvi_anchor_row_unit(anchor, index), anchor->dim);
}

static void add_share(float *scores, float share, size_t n) {
  for (size_t t = 0; t < n; t++) scores[t] += share;
}

static void sum_up(float *scores, float share, size_t n) {
  for (size_t t = 0; t < n; t++) scores[t] = share += scores[t];
}

void qkv_anchor_values(const qkv_anchor *anchor, float *rows) {
  for (size_t r = 0; r < anchor->count; r++) load_row(anchor, r, rows + r * anchor->dim);
}

void qkv_anchor_scores(const qkv_anchor *anchor, const float *queries, size_t n, float *scores) {
  float row[QKV_DIM_MAX];
  span slots = {0};
  for (size_t r = 0; r < anchor->count; r++) {
    slots = next_span(anchor, r, slots);
    load_row(anchor, r, row);
    for (size_t i = 0; i < n; i++) {
      const float share = qkvi_row_dot(queries + i * anchor->dim, row, anchor->dim);
      float *to = scores + i * QKV_PAGE_TOKENS + slots.begin;
      if (anchor->kind == QKV_ANCHOR_CHAIN) {
        sum_up(to, share, slots.end - slots.begin);
      } else {
        add_share(to, share, slots.end - slots.begin);
      }
    }
  }
}

// to_t = from_t + from_(t+1) + ... up to the span's end; returns the first.
static float suffix_sums(const float *from, float *to, span slots) {
  float sum = 0;
  for (size_t t = slots.end; t-- > slots.begin;) to[t] = sum += from[t];
  return sum;
}

const float *qkv_anchor_weights(const qkv_anchor *anchor, const float *weights, size_t n, float *scratch,
                                float *sums) {
  float row[QKV_DIM_MAX];
  span slots = {0};
  const bool chain = anchor->kind == QKV_ANCHOR_CHAIN;
  for (size_t r = 0; r < anchor->count; r++) {
    slots = next_span(anchor, r, slots);
    load_row(anchor, r, row);
    for (size_t i = 0; i < n; i++) {
      const float *from = weights + i * QKV_PAGE_TOKENS;
      const float total = chain ? suffix_sums(from, scratch + i * QKV_PAGE_TOKENS, slots)
                                : qkvi_row_sum(from + slots.begin, slots.end - slots.begin);
      qkvi_row_add(sums + i * anchor->dim, row, total, anchor->dim);
    }
  }
  return chain ? scratch : weights;
}

void qkv_anchor_add_mean(const qkv_anchor *anchor, const float *totals, size_t n, float *sums) {
  assert(anchor->kind == QKV_ANCHOR_MEAN);
  float row[QKV_DIM_MAX];
  load_row(anchor, 0, row);
  for (size_t i = 0; i < n; i++) qkvi_row_add(sums + i * anchor->dim, row, totals[i], anchor->dim);
}

void qkv_anchor_rows(const qkv_anchor *anchor, float *rows) {
  const size_t dim = anchor->dim;
  float row[QKV_DIM_MAX];
  span slots = {0};
  for (size_t r = 0; r < anchor->count; r++) {
    slots = next_span(anchor, r, slots);
    load_row(anchor, r, row);
    for (size_t t = slots.begin; t < slots.end; t++) {
      float *to = rows + t * dim;
      const float *before = anchor->kind == QKV_ANCHOR_CHAIN && t > slots.begin ? to - dim : row;
      qkvi_row_add(to, before, 1, dim);
    }
  }
}
