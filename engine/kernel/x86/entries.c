// Sums of looked-up entries: entries.h says what. Compiled once for each family.
#include "engine/kernel/entries.h"

#include "engine/codec/page.h"
#include "engine/kernel/x86/lookup.h"
#include "engine/kernel/x86/variants.h"

#define INLINE static inline __attribute__((always_inline))

enum { INDEX_BITS = 4, VECTORS = QKV_PAGE_TOKENS / LANES, ROUNDS_MAX = 2 };

INLINE float_table table_of(const float entries[QKV_ENTRIES]) {
  float_table table = {.values = entries};
  for (size_t v = 0; v < QKV_ENTRIES / LANES; v++) table.parts[v] = load_lanes(entries + v * LANES);
  return table;
}

// Both halves of the codes of a round, slot by slot.
typedef struct halves {
  words low[VECTORS], high[VECTORS];
} halves;

INLINE void sum_column(const qkv_entries *const *entries, size_t rounds, size_t j, const halves *codes,
                       const float *sizes, float *column) {
  lanes sums[VECTORS] = {{0}};
  for (size_t r = 0; r < rounds; r++) {
    const float_table a = table_of(entries[r]->of[0][j]), b = table_of(entries[r]->of[1][j]);
    UNROLL
    for (size_t v = 0; v < VECTORS; v++)
      sums[v] += find_floats(&a, codes[r].low[v], INDEX_BITS) + find_floats(&b, codes[r].high[v], INDEX_BITS);
  }
  UNROLL
  for (size_t v = 0; v < VECTORS; v++) store_lanes(column + v * LANES, load_lanes(sizes + v * LANES) * sums[v]);
}

INLINE void sum_rounds(const qkv_entries *const *entries, size_t rounds, const uint8_t *codes, const float *sizes,
                       float *const columns[QKV_ENTRY_WIDTH]) {
  halves split[ROUNDS_MAX];
  for (size_t r = 0; r < rounds; r++) {
    for (size_t v = 0; v < VECTORS; v++) {
      split[r].low[v] = load_bytes(codes + r * QKV_PAGE_TOKENS + v * LANES, sizeof(uint64_t));
      split[r].high[v] = split[r].low[v] >> INDEX_BITS;
    }
  }
  for (size_t j = 0; j < QKV_ENTRY_WIDTH; j++) sum_column(entries, rounds, j, split, sizes, columns[j]);
}

QKV_DECLARE_SUM_ENTRIES(VARIANT(qkvi_sum_entries)) {
  if (rounds == 1) return sum_rounds(entries, 1, codes, sizes, columns);
  if (rounds == 2) return sum_rounds(entries, 2, codes, sizes, columns);
  qkvi_sum_entries_reference(entries, rounds, codes, sizes, columns);
}
