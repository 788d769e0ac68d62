// Rows that are sums of looked-up entries, as columns: those of a group of eight coordinates in 64 slots,
//
//   columns[j][t] = sizes[t] * (sum over rounds of entries[round][0][j][code % 16] + entries[round][1][j][code / 16])
//
// with the code of the round and the slot. Rounds in order, fp32 without contraction; every version gives the same
// bits.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_KERNEL_ENTRIES_H
#define QKV_ENGINE_KERNEL_ENTRIES_H

#include <stddef.h>
#include <stdint.h>

#define QKV_ENTRIES 16
#define QKV_ENTRY_WIDTH 8

// One round's.
typedef struct qkv_entries {
  _Alignas(64) float of[2][QKV_ENTRY_WIDTH][QKV_ENTRIES];
} qkv_entries;

// codes [rounds][64], sizes [64]; at least one round.
#define QKV_DECLARE_SUM_ENTRIES(name)                                                                   \
  void name(const qkv_entries *const *entries, size_t rounds, const uint8_t *codes, const float *sizes, \
            float *const columns[QKV_ENTRY_WIDTH])

QKV_DECLARE_SUM_ENTRIES(qkvi_sum_entries_reference);

#endif
