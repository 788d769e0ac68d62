#include "storage/gpu/heap.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

enum { MIB = 1 << 20, PIECES_MAX = 64, BLOCKS = 400, STEPS = 20000 };

// Pieces at addresses in no order, some of which touch.
typedef struct device {
  struct {
    uint64_t at, bytes;
  } pieces[PIECES_MAX];
  size_t count, most;
  uint64_t given;
} device;

static uint64_t take(void *context, uint64_t bytes) {
  device *of = context;
  if (of->count == of->most) return 0;
  const uint64_t place = of->count % 3 == 0 ? of->count + 5 : of->count - 1;
  of->pieces[of->count].at = (UINT64_C(1) << 40) + place * QKV_GPU_PIECE_BYTES;
  of->pieces[of->count].bytes = bytes;
  return of->pieces[of->count++].at;
}

static void give(void *context, uint64_t at, uint64_t bytes) {
  device *of = context;
  for (size_t i = 0; i < of->count; i++) of->given += of->pieces[i].at == at && of->pieces[i].bytes == bytes;
}

static qkv_gpu_heap *make(device *of, uint64_t bytes_max) {
  return qkv_gpu_heap_create(bytes_max, (qkv_gpu_pieces){.take = take, .give = give, .context = of});
}

static void budget_and_device_bound_it(void **state) {
  (void)state;
  device of = {.most = 2};
  qkv_gpu_heap *heap = make(&of, 100 * (uint64_t)MIB);
  assert_int_equal(qkv_gpu_heap_alloc(heap, UINT64_MAX), 0);
  assert_int_equal(qkv_gpu_heap_alloc(heap, 101 * (uint64_t)MIB), 0);
  const uint64_t first = qkv_gpu_heap_alloc(heap, 60 * MIB);
  assert_int_not_equal(first, 0);
  assert_int_equal(of.pieces[0].bytes, 64 * MIB);
  assert_int_equal(qkv_gpu_heap_alloc(heap, 40 * MIB), 0);  // 36 MiB are left, and 4
  const uint64_t second = qkv_gpu_heap_alloc(heap, 36 * MIB);
  assert_int_not_equal(second, 0);
  assert_int_equal(of.pieces[1].bytes, 36 * MIB);
  assert_int_equal(qkv_gpu_heap_alloc(heap, 5 * MIB), 0);
  qkv_gpu_heap_free(heap, first, 60 * MIB);
  assert_int_not_equal(qkv_gpu_heap_alloc(heap, 64 * MIB), 0);
  assert_int_equal(qkv_gpu_heap_read(heap).bytes_used, 100 * (uint64_t)MIB);
  assert_null(qkv_gpu_heap_validate(heap));
  qkv_gpu_heap_destroy(&heap);
  assert_null(heap);
  assert_int_equal(of.given, 2);
}

static void a_device_without_memory_is_no_error(void **state) {
  (void)state;
  device of = {.most = 0};
  qkv_gpu_heap *heap = make(&of, 100 * (uint64_t)MIB);
  assert_int_equal(qkv_gpu_heap_alloc(heap, 1), 0);
  assert_int_equal(qkv_gpu_heap_read(heap).bytes_held, 0);
  qkv_gpu_heap_free(heap, 0, 1);
  qkv_gpu_heap_destroy(&heap);
}

static void a_block_may_be_larger_than_a_piece(void **state) {
  (void)state;
  device of = {.most = 4};
  qkv_gpu_heap *heap = make(&of, 300 * (uint64_t)MIB);
  const uint64_t large = qkv_gpu_heap_alloc(heap, 200 * (uint64_t)MIB);
  assert_int_not_equal(large, 0);
  assert_int_equal(of.pieces[0].bytes, 200 * (uint64_t)MIB);
  qkv_gpu_heap_free(heap, large, 200 * (uint64_t)MIB);
  assert_null(qkv_gpu_heap_validate(heap));
  qkv_gpu_heap_destroy(&heap);
}

static uint64_t random_below(uint64_t *seed, uint64_t bound) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (*seed >> 33) % bound;
}

// Random blocks never share a byte, lie in one piece each, and are counted.
static void random_blocks(void **state) {
  (void)state;
  device of = {.most = PIECES_MAX};
  qkv_gpu_heap *heap = make(&of, 1000 * (uint64_t)MIB);
  struct {
    uint64_t at, bytes;
  } blocks[BLOCKS] = {0};
  uint64_t seed = 7, failed = 0;
  for (int step = 0; step < STEPS; step++) {
    const size_t i = random_below(&seed, BLOCKS);
    if (blocks[i].at != 0) {
      qkv_gpu_heap_free(heap, blocks[i].at, blocks[i].bytes);
      blocks[i].at = 0;
      continue;
    }
    blocks[i].bytes = 1 + random_below(&seed, 8 * MIB);
    blocks[i].at = qkv_gpu_heap_alloc(heap, blocks[i].bytes);
    failed += blocks[i].at == 0;
    bool inside = blocks[i].at == 0;
    for (size_t j = 0; j < of.count; j++)
      inside |=
          blocks[i].at >= of.pieces[j].at && blocks[i].at + blocks[i].bytes <= of.pieces[j].at + of.pieces[j].bytes;
    assert_true(inside);
    for (size_t j = 0; j < BLOCKS; j++) {
      if (j != i && blocks[j].at != 0 && blocks[i].at != 0)
        assert_true(blocks[i].at + blocks[i].bytes <= blocks[j].at || blocks[j].at + blocks[j].bytes <= blocks[i].at);
    }
    if (step % 100 == 0) assert_null(qkv_gpu_heap_validate(heap));
  }
  assert_true(failed > 0);  // the budget was met
  for (size_t i = 0; i < BLOCKS; i++) qkv_gpu_heap_free(heap, blocks[i].at, blocks[i].bytes);
  const qkv_gpu_heap_stats stats = qkv_gpu_heap_read(heap);
  assert_int_equal(stats.bytes_used, 0);
  assert_int_equal(stats.blocks, 0);
  assert_true(stats.bytes_held <= stats.bytes_max);
  assert_null(qkv_gpu_heap_validate(heap));
  qkv_gpu_heap_destroy(&heap);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(budget_and_device_bound_it), cmocka_unit_test(a_device_without_memory_is_no_error),
      cmocka_unit_test(a_block_may_be_larger_than_a_piece), cmocka_unit_test(random_blocks)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
