// checkkern: all kernel variants against the scalar reference, bit by bit, and how fast each is.
#ifndef QKV_TESTS_CHECKKERN_CHECKKERN_H
#define QKV_TESTS_CHECKKERN_CHECKKERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/kernel/kernel.h"
#include "tests/engine/codec/naive.h"

// Bytes between guards. `data` is 16-byte aligned and deliberately no better.
typedef struct guarded {
  uint8_t *data;
  size_t bytes;
  uint8_t *memory;
} guarded;

guarded guarded_make(size_t bytes);
guarded guarded_copy(const guarded *from);
bool guarded_intact(const guarded *buffer);
void guarded_free(guarded *buffer);

// One head's K or V with codes of its own.
typedef struct page_part {
  qkv_part part;
  qkv_schedule schedule;
  guarded gains, groups;  // one group after the other, as in a page
  qkv_page_codes codes;
} page_part;

// Random codes and gains under `schedule`; the gains of one page in three are nearly alike.
void page_part_init(page_part *page, naive_random *random, qkv_part part, const qkv_schedule *schedule,
                    const uint8_t tiers[QKV_PAGE_GROUPS]);
void page_part_deinit(page_part *page);

// What the numbers are like.
typedef enum input_kind { INPUT_GAUSSIAN, INPUT_OUTLIERS, INPUT_EXTREME, INPUT_KINDS } input_kind;
void fill_input(naive_random *random, input_kind kind, float *numbers, size_t n);

// Rows to encode: INPUT_EXTREME has rows of zeros, constants, and numbers next to cell boundaries.
void fill_rows(naive_random *random, input_kind kind, float *rows, size_t dim);

// Scores [n][64] of tiles, some of them masked; those of one row in four are alike.
void fill_scores(naive_random *random, input_kind kind, float *scores, size_t n);

typedef struct checking {
  const qkv_kernels *variant;
  naive_random random;
  unsigned every;  // of so many widths and tiers one is checked
  size_t failures;
  uint64_t digest;  // of what the reference wrote: the same on every machine
} checking;

// What a kernel variant wrote against what the reference wrote, byte by byte. Counts and prints failures.
void check_same(checking *c, const char *kernel, const page_part *page, size_t n, const guarded *expected,
                const guarded *got);
// Whether two arrays differ, which is printed.
bool check_equal_floats(const checking *c, const char *kernel, const float *expected, const float *got, size_t n);
// Every so many tiers are checked: wide rows take the reference long.
unsigned check_tier_step(const checking *c, const qkv_schedule *schedule);
void check_integer(checking *c, const qkv_schedule *schedule);
void check_rows_of(checking *c, uint16_t dim, input_kind kind);
void check_mix(checking *c, uint16_t dim, input_kind kind);
void check_walk_of(checking *c, uint16_t dim, size_t n, input_kind kind);

// A matrix of 16-bit numbers, whose memory is to be freed.
typedef struct made_matrix {
  void *memory;
  qkv_dense matrix;
} made_matrix;
made_matrix make_matrix(checking *c, size_t dim, size_t outputs, input_kind kind);

// Conversions of elements (engine/base/tensor.h) with what the processor has against those without. The number of
// failures, which are printed.
size_t check_conversions(uint32_t cpu_flags);
// The number of failures, which are printed; `*digest` gets that of what the reference wrote.
size_t check_rung(const qkv_kernels *variant, unsigned every, uint64_t *digest);
// Prints a table for every rung of `cpu_flags`, of the kernels whose names begin with `filter` (NULL: all).
void bench(uint32_t cpu_flags, const char *filter);

#endif
