#include "engine/codec/outliers.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "engine/codec/calibration.h"
#include "engine/codec/codec.h"
#include "engine/codec/row.h"

enum { WIDE = QKV_OUTLIER_WIDE, SLOT = QKV_OUTLIER_SLOT, NARROW_MOST = 127, WIDE_MOST = 32767, PAGE_ALIGN = 64 };

// Largest numbers of rows, twice as large as what encoders write and more, so that scores and sums of other rows stay
// finite with whatever is read: keys are as attended, values less an anchor and in steps (calibration.h).
#define KEY_MAX (2.0 * QKV_ROW_MAX)
#define VALUE_MAX (4 * QKV_CALIBRATION_COORDINATE_MAX)

static size_t align_to(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// Rows and wide rows before a head.
typedef struct before {
  uint16_t rows, wide;
} before;

static size_t index_entries(uint16_t kv_heads) {
  return 2 * ((size_t)kv_heads + 1);
}

static before read_before(const uint8_t *section, size_t entry) {
  before found;
  memcpy(&found, section + entry * sizeof found, sizeof found);
  return found;
}

// Where the arrays of a section are.
typedef struct places {
  size_t slots, scales, rows, value_rows, end;
} places;

static places place(uint16_t kv_heads, before keys, before values, uint16_t key_dim, uint16_t value_dim) {
  const size_t count = (size_t)keys.rows + values.rows;
  places at = {.slots = index_entries(kv_heads) * sizeof(before)};
  at.scales = align_to(at.slots + count, sizeof(float));
  at.rows = align_to(at.scales + count * sizeof(float), 8);
  at.value_rows = at.rows + ((size_t)keys.rows + keys.wide) * key_dim;
  at.end = align_to(at.value_rows + ((size_t)values.rows + values.wide) * value_dim, PAGE_ALIGN);
  return at;
}

// ---- Reading ----

bool qkv_outliers_find(const void *page, uint16_t kv_head, qkv_part part, qkv_outliers *found) {
  const qkv_page_header *header = page;
  *found = (qkv_outliers){0};
  if (header->outliers == 0) return false;
  const uint8_t *section = (const uint8_t *)page + header->outliers;
  const size_t heads = (size_t)header->kv_heads + 1, first = part == QKV_K ? 0 : heads;
  const before begin = read_before(section, first + kv_head), end = read_before(section, first + kv_head + 1);
  if (begin.rows == end.rows) return false;
  const before keys = read_before(section, heads - 1), values = read_before(section, 2 * heads - 1);
  const places at = place(header->kv_heads, keys, values, header->key_dim, header->value_dim);
  const size_t entry = (part == QKV_K ? 0 : keys.rows) + (size_t)begin.rows;
  found->count = (size_t)(end.rows - begin.rows);
  found->dim = part == QKV_K ? header->key_dim : header->value_dim;
  found->slots = section + at.slots + entry;
  found->scales = section + at.scales + entry * sizeof(float);
  found->rows = section + (part == QKV_K ? at.rows : at.value_rows) + ((size_t)begin.rows + begin.wide) * found->dim;
  return true;
}

// The i-th row in floats, `*from` its bytes, which moves on to the next; returns its slot.
static size_t load_row(const qkv_outliers *outliers, size_t i, const uint8_t **from, const float *steps, float *row) {
  const size_t dim = outliers->dim;
  float scale;
  memcpy(&scale, outliers->scales + i * sizeof scale, sizeof scale);
  if ((outliers->slots[i] & WIDE) != 0) {
    for (size_t c = 0; c < dim; c++) {
      int16_t number;
      memcpy(&number, *from + c * sizeof number, sizeof number);
      row[c] = (float)number * scale;
    }
    *from += dim * sizeof(int16_t);
  } else {
    for (size_t c = 0; c < dim; c++) row[c] = (float)(int8_t)(*from)[c] * scale;
    *from += dim;
  }
  for (size_t c = 0; steps != NULL && c < dim; c++) row[c] *= steps[c];
  return outliers->slots[i] & SLOT;
}

void qkv_outliers_rows(const qkv_outliers *outliers, const float *steps, float *rows) {
  float row[QKV_DIM_MAX];
  const uint8_t *from = outliers->rows;
  for (size_t i = 0; i < outliers->count; i++) {
    const size_t slot = load_row(outliers, i, &from, steps, row);
    memcpy(rows + slot * outliers->dim, row, outliers->dim * sizeof *rows);
  }
}

uint64_t qkv_outliers_mask(const qkv_outliers *outliers) {
  uint64_t mask = 0;
  for (size_t i = 0; i < outliers->count; i++) mask |= (uint64_t)1 << (outliers->slots[i] & SLOT);
  return mask;
}

// ---- Writing ----

// The value of 1 in a row whose largest number is `most`; `*inverse` its inverse, 0 for a row of zeros.
static float scale_of(const float *row, size_t dim, int most, float *inverse) {
  const float largest = qkvi_row_largest(row, dim), least = 1e-30f;
  *inverse = largest > least ? (float)most / largest : 0;
  return largest > least ? largest / (float)most : 0;
}

typedef int32_t quad_words __attribute__((vector_size(sizeof(qkvi_quad))));

// x where the mask is all ones, else y.
static inline qkvi_quad choose(quad_words mask, qkvi_quad x, qkvi_quad y) {
  return (qkvi_quad)((mask & (quad_words)x) | (~mask & (quad_words)y));
}

// To the nearest whole numbers of at most `most`, ties away from 0.
static inline quad_words nearest(qkvi_quad x, float most) {
  const qkvi_quad zero = {0}, top = zero + most;
  x = choose(x < top, x, top);
  x = choose(x > -top, x, -top);
  return __builtin_convertvector(x + choose(x < zero, zero - 0.5f, zero + 0.5f), quad_words);
}

void qkv_outlier_units(const float *row, const float *steps, size_t dim, float *units) {
  if (steps == NULL) {
    if (units != row) memcpy(units, row, dim * sizeof *units);
    return;
  }
  for (size_t c = 0; c < dim; c += QKVI_QUAD) {
    qkvi_quad x, step;
    qkvi_quad_load(row + c, &x);
    qkvi_quad_load(steps + c, &step);
    x /= step;
    memcpy(units + c, &x, sizeof x);
  }
}

static void store_numbers(const float *units, float inverse, bool wide, size_t dim, uint8_t *to) {
  typedef int16_t four_words __attribute__((vector_size(QKVI_QUAD * sizeof(int16_t))));
  typedef int8_t four_bytes __attribute__((vector_size(QKVI_QUAD)));
  for (size_t c = 0; c < dim; c += QKVI_QUAD) {
    qkvi_quad x;
    qkvi_quad_load(units + c, &x);
    const quad_words numbers = nearest(x * inverse, wide ? WIDE_MOST : NARROW_MOST);
    if (wide) {
      const four_words all = __builtin_convertvector(numbers, four_words);
      memcpy(to + c * sizeof(int16_t), &all, sizeof all);
    } else {
      const four_bytes all = __builtin_convertvector(numbers, four_bytes);
      memcpy(to + c, &all, sizeof all);
    }
  }
}

void qkv_outlier_set_add(qkv_outlier_set *set, uint8_t slot, bool wide, const float *row, const float *steps,
                         size_t dim) {
  assert(set->count < QKV_OUTLIERS_MAX && slot < QKV_PAGE_TOKENS && dim % QKVI_QUAD == 0);
  assert(set->count == 0 || (set->slots[set->count - 1] & SLOT) < slot);
  float units[QKV_DIM_MAX], inverse;
  uint8_t *to = set->rows;
  for (size_t i = 0; i < set->count; i++) to += dim * (set->slots[i] & WIDE ? sizeof(int16_t) : 1);
  qkv_outlier_units(row, steps, dim, units);
  set->scales[set->count] = scale_of(units, dim, wide ? WIDE_MOST : NARROW_MOST, &inverse);
  set->slots[set->count] = (uint8_t)(slot | (wide ? WIDE : 0));
  set->count++;
  store_numbers(units, inverse, wide, dim, to);
}

float qkv_outlier_error(const float *row, size_t dim) {
  float inverse;
  const float scale = scale_of(row, dim, NARROW_MOST, &inverse);
  // Of numbers that are spread evenly between two steps.
  return scale * scale * (float)dim / 12;
}

static before totals_of(const qkv_outlier_set *sets, uint16_t kv_heads, qkv_part part) {
  before totals = {0};
  for (size_t h = 0; h < kv_heads; h++) {
    const qkv_outlier_set *set = &sets[2 * h + part];
    totals.rows = (uint16_t)(totals.rows + set->count);
    for (size_t i = 0; i < set->count; i++) totals.wide = (uint16_t)(totals.wide + (set->slots[i] & WIDE ? 1 : 0));
  }
  return totals;
}

size_t qkv_outliers_bytes(const qkv_outlier_set *sets, uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim) {
  const before keys = totals_of(sets, kv_heads, QKV_K), values = totals_of(sets, kv_heads, QKV_V);
  if (keys.rows + values.rows == 0) return 0;
  return place(kv_heads, keys, values, key_dim, value_dim).end;
}

size_t qkv_outliers_bytes_max(uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim) {
  const uint16_t rows = (uint16_t)(kv_heads * QKV_OUTLIERS_MAX);
  const before most = {rows, rows};
  return place(kv_heads, most, most, key_dim, value_dim).end;
}

void qkv_outliers_write(const qkv_outlier_set *sets, uint16_t kv_heads, uint16_t key_dim, uint16_t value_dim,
                        uint8_t *section) {
  const before keys = totals_of(sets, kv_heads, QKV_K), values = totals_of(sets, kv_heads, QKV_V);
  const places at = place(kv_heads, keys, values, key_dim, value_dim);
  memset(section, 0, at.end);
  uint8_t *index = section, *slots = section + at.slots, *scales = section + at.scales, *rows = section + at.rows;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    before so_far = {0};
    for (size_t h = 0; h <= kv_heads; h++) {
      memcpy(index, &so_far, sizeof so_far);
      index += sizeof so_far;
      if (h == kv_heads) break;
      const qkv_outlier_set *set = &sets[2 * h + part];
      const before own = totals_of(set - part, 1, part);
      const size_t bytes = ((size_t)own.rows + own.wide) * (part == QKV_K ? key_dim : value_dim);
      memcpy(slots, set->slots, set->count);
      memcpy(scales, set->scales, set->count * sizeof(float));
      if (bytes > 0) memcpy(rows, set->rows, bytes);
      slots += set->count;
      scales += set->count * sizeof(float);
      rows += bytes;
      so_far.rows = (uint16_t)(so_far.rows + own.rows);
      so_far.wide = (uint16_t)(so_far.wide + own.wide);
    }
  }
}

// ---- Bytes from outside ----

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

// One head's part, of `total` rows of all heads: counts, and slots in order.
static qkv_status validate_head(const uint8_t *section, const uint8_t *slots, size_t entry, unsigned total,
                                uint32_t tokens, qkv_error *error) {
  const before begin = read_before(section, entry), end = read_before(section, entry + 1);
  if (end.rows < begin.rows || end.rows - begin.rows > QKV_OUTLIERS_MAX || end.rows > total) {
    REFUSE("page.outliers.before[%zu] has %u rows after %u, at most %d are one head's and %u all heads'", entry + 1,
           end.rows, begin.rows, QKV_OUTLIERS_MAX, total);
  }
  unsigned wide = 0;
  int last = -1;
  for (size_t i = begin.rows; i < end.rows; i++) {
    const int slot = slots[i] & ~WIDE;
    if (slot <= last || slot >= (int)tokens) {
      REFUSE("page.outliers.slots[%zu] is %d after %d, the page has %" PRIu32 " tokens", i, slot, last, tokens);
    }
    last = slot;
    wide += (slots[i] & WIDE) != 0;
  }
  if (end.wide - begin.wide != (int)wide) {
    REFUSE("page.outliers.before[%zu] has %d wide rows, its slots have %u", entry + 1, end.wide - begin.wide, wide);
  }
  return QKV_OK;
}

// Of rows [count], of which the first ones are keys.
static qkv_status validate_scales(const uint8_t *scales, const uint8_t *slots, size_t keys, size_t count,
                                  qkv_error *error) {
  for (size_t i = 0; i < count; i++) {
    const double most = (i < keys ? KEY_MAX : VALUE_MAX) / ((slots[i] & WIDE) != 0 ? WIDE_MOST : NARROW_MOST);
    float scale;
    memcpy(&scale, scales + i * sizeof scale, sizeof scale);
    if (!(scale >= 0 && (double)scale <= most))
      REFUSE("page.outliers.scales[%zu] is %g, allowed are 0 to %g", i, (double)scale, most);
  }
  return QKV_OK;
}

qkv_status qkv_outliers_validate(const uint8_t *section, size_t bytes, uint16_t kv_heads, uint16_t key_dim,
                                 uint16_t value_dim, uint32_t tokens, qkv_error *error) {
  const size_t heads = (size_t)kv_heads + 1, index = index_entries(kv_heads) * sizeof(before);
  if (bytes < index) REFUSE("page.outliers has %zu bytes, its index is %zu", bytes, index);
  const before keys = read_before(section, heads - 1), values = read_before(section, 2 * heads - 1);
  const places at = place(kv_heads, keys, values, key_dim, value_dim);
  if (keys.rows + values.rows == 0) REFUSE("page.outliers has no rows");
  if (bytes != at.end) REFUSE("page.outliers has %zu bytes, its rows make %zu", bytes, at.end);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const size_t first = part == QKV_K ? 0 : heads;
    const before none = read_before(section, first);
    if (none.rows != 0 || none.wide != 0) REFUSE("page.outliers.before[%zu] is not 0", first);
    const uint8_t *slots = section + at.slots + (part == QKV_K ? 0 : keys.rows);
    const unsigned total = part == QKV_K ? keys.rows : values.rows;
    for (size_t h = 0; h < kv_heads; h++) QKV_TRY(validate_head(section, slots, first + h, total, tokens, error));
  }
  return validate_scales(section + at.scales, section + at.slots, keys.rows, (size_t)keys.rows + values.rows, error);
}
