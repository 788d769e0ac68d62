#include "engine/kernel/entries.h"

#include "engine/codec/page.h"

QKV_DECLARE_SUM_ENTRIES(qkvi_sum_entries_reference) {
  for (size_t j = 0; j < QKV_ENTRY_WIDTH; j++) {
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
      float sum = 0;
      for (size_t r = 0; r < rounds; r++) {
        const uint8_t code = codes[r * QKV_PAGE_TOKENS + t];
        sum += entries[r]->of[0][j][code % QKV_ENTRIES] + entries[r]->of[1][j][code / QKV_ENTRIES];
      }
      columns[j][t] = sizes[t] * sum;
    }
  }
}
