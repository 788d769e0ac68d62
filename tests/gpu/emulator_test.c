// The emulator's own tests: what kernels may rely on, and mistakes that have to end the run.
#include "tests/gpu/emulator.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "engine/kernel/simt/simt.h"

enum { ORDERS = 6 };

static uint64_t state = 1;
static uint32_t any_word(void) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(state >> 32);
}

static void run(emulator_kernel *kernel, const void *args, unsigned threads, size_t shared, uint64_t order) {
  emulator_run(&(emulator_launch){
      .kernel = kernel, .args = args, .blocks = 2, .threads = threads, .shared_bytes = shared, .order = order});
}

// ---- prmt ----

static void test_choose(void **unused) {
  (void)unused;
  assert_int_equal(simt_choose(0x33221100, 0x77665544, 0x7250), 0x77225500);
  assert_int_equal(simt_choose(0x008000ff, 0x7f00ff80, 0xfedc), 0x0000ffff);
  assert_int_equal(simt_choose(0x008000ff, 0x7f00ff80, 0xba98), 0x00ff00ff);
  for (int i = 0; i < 1000; i++) {
    const uint32_t low = any_word(), high = any_word(), choice = any_word();
    uint32_t expected = 0;
    uint8_t bytes[8];
    memcpy(bytes, &low, 4);
    memcpy(bytes + 4, &high, 4);
    for (unsigned b = 0; b < 4; b++) {
      const unsigned nibble = choice >> (4 * b) & 15;
      const uint8_t byte = nibble < 8 ? bytes[nibble] : (int8_t)bytes[nibble - 8] < 0 ? 255 : 0;
      expected |= (uint32_t)byte << (8 * b);
    }
    assert_int_equal(simt_choose(low, high, choice), expected);
  }
}

// ---- Products ----

typedef struct product_args {
  const int8_t (*a)[32];  // [16]
  const uint8_t (*b)[8];  // [32]
  bool a_signed, b_signed;
  int32_t (*sums)[8];  // [16], read and written
} product_args;

static uint32_t word_of(const void *from) {
  uint32_t word;
  memcpy(&word, from, sizeof word);
  return word;
}

static uint32_t column_word(const uint8_t (*b)[8], unsigned k, unsigned column) {
  const uint8_t bytes[4] = {b[k][column], b[k + 1][column], b[k + 2][column], b[k + 3][column]};
  return word_of(bytes);
}

SIMT_KERNEL(product_kernel, product_args, 32, 1) {
  if (simt_block() > 0) return;
  const unsigned g = simt_thread() / 4, t = simt_thread() % 4;
  const uint32_t a[SIMT_A_WORDS] = {word_of(&args->a[g][4 * t]), word_of(&args->a[g + 8][4 * t]),
                                    word_of(&args->a[g][16 + 4 * t]), word_of(&args->a[g + 8][16 + 4 * t])};
  const uint32_t b[SIMT_B_WORDS] = {column_word(args->b, 4 * t, g), column_word(args->b, 16 + 4 * t, g)};
  int32_t sums[SIMT_SUMS];
  for (unsigned i = 0; i < SIMT_SUMS; i++) sums[i] = args->sums[g + i / 2 * 8][2 * t + i % 2];
  if (!args->a_signed) {
    simt_multiply_u8_s8(sums, a, b);
  } else if (args->b_signed) {
    simt_multiply_s8(sums, a, b);
  } else {
    simt_multiply_u8(sums, a, b);
  }
  for (unsigned i = 0; i < SIMT_SUMS; i++) args->sums[g + i / 2 * 8][2 * t + i % 2] = sums[i];
}

static void test_product(void **unused) {
  (void)unused;
  for (uint64_t order = 0; order < 2 * ORDERS; order++) {
    int8_t a[16][32];
    uint8_t b[32][8];
    int32_t sums[16][8], expected[16][8];
    const bool a_signed = order % 3 != 2, b_signed = order % 3 != 1;
    for (unsigned i = 0; i < 16 * 32; i++) a[i / 32][i % 32] = (int8_t)any_word();
    for (unsigned i = 0; i < 32 * 8; i++) b[i / 8][i % 8] = (uint8_t)any_word();
    for (unsigned i = 0; i < 16 * 8; i++) {
      expected[i / 8][i % 8] = sums[i / 8][i % 8] = (int32_t)any_word() / 4;
      for (unsigned k = 0; k < 32; k++)
        expected[i / 8][i % 8] +=
            (a_signed ? a[i / 8][k] : (uint8_t)a[i / 8][k]) * (b_signed ? (int8_t)b[k][i % 8] : b[k][i % 8]);
    }
    const product_args args = {(const int8_t(*)[32])a, (const uint8_t(*)[8])b, a_signed, b_signed, sums};
    run(product_kernel, &args, 32, 0, order);
    assert_memory_equal(sums, expected, sizeof sums);
  }
}

// ---- Exchanges, votes, barriers ----

typedef struct exchange_args {
  uint32_t *out;  // [2 blocks][threads][3]
} exchange_args;

SIMT_KERNEL(exchange_kernel, exchange_args, 96, 1) {
  uint32_t *shared = (uint32_t *)(void *)simt_shared();
  const unsigned thread = simt_thread(), threads = simt_threads();
  uint32_t sum = thread;
  for (unsigned mask = 1; mask < SIMT_LANES; mask *= 2) sum += simt_exchange(sum, mask);
  const bool any = simt_any(thread == 40);
  shared[thread] = sum + any;
  simt_sync_block();
  uint32_t *out = args->out + (simt_block() * threads + thread) * 3;
  out[0] = shared[(thread + 32) % threads];
  out[1] = any;
  simt_sync_block();
  shared[thread] = thread;
  simt_sync_warp();
  out[2] = shared[thread ^ 31];
}

static void test_exchange(void **unused) {
  (void)unused;
  for (uint64_t order = 0; order < ORDERS; order++) {
    uint32_t out[2][96][3];
    run(exchange_kernel, &(exchange_args){&out[0][0][0]}, 96, 96 * 4, order);
    for (unsigned i = 0; i < 2 * 96; i++) {
      const unsigned thread = i % 96, other = (thread + 32) % 96 / 32;
      assert_int_equal(out[i / 96][thread][0], 32 * 32 * other + 31 * 16 + (other == 1));
      assert_int_equal(out[i / 96][thread][1], thread / 32 == 1);
      assert_int_equal(out[i / 96][thread][2], thread ^ 31);
    }
  }
}

// ---- Copies ----

enum { COPIED = 512 };

typedef struct copy_args {
  const uint8_t *from;  // [4][COPIED]
  uint8_t *out;         // [4][COPIED]
  uint8_t *early;       // what lies at the target before the wait
} copy_args;

typedef struct copy_shared {
  _Alignas(16) uint8_t bytes[COPIED + 64];
  simt_gate gate;
} copy_shared;

SIMT_KERNEL(copy_kernel, copy_args, 32, 1) {
  copy_shared *shared = (copy_shared *)(void *)simt_shared();
  const unsigned lane = simt_thread();
  if (lane == 0) simt_gate_init(&shared->gate);
  simt_sync_warp();
  for (unsigned i = 0; i < 4; i++) {
    // Two pieces, 64 bytes apart.
    const unsigned half = lane % 2 * (COPIED / 2);
    simt_copy(&shared->gate, 2, COPIED, shared->bytes + half + lane % 2 * 64, args->from + i * COPIED + half,
              COPIED / 2);
#if !defined(__SANITIZE_THREAD__)  // which would complain
    if (lane == 0) *args->early = shared->bytes[0];
    simt_sync_warp();
#endif
    simt_copy_wait(&shared->gate, i);
    for (unsigned b = lane; b < COPIED; b += SIMT_LANES)
      args->out[i * COPIED + b] = shared->bytes[b + (b < COPIED / 2 ? 0 : 64)];
  }
}

static void test_copy(void **unused) {
  (void)unused;
  _Alignas(16) uint8_t from[4 * COPIED];
  for (size_t i = 0; i < sizeof from; i++) from[i] = (uint8_t)(any_word() | 1) == 0xa5 ? 3 : (uint8_t)any_word();
  for (uint64_t order = 0; order < ORDERS; order++) {
    uint8_t out[4 * COPIED] = {0}, early = 0xa5;
    run(copy_kernel, &(copy_args){from, out, &early}, 32, sizeof(copy_shared), order);
    assert_memory_equal(out, from, sizeof out);
    assert_int_equal(early, 0xa5);
  }
}

// ---- Banks ----

SIMT_KERNEL(bank_kernel, exchange_args, 32, 1) {
  const unsigned lane = simt_thread();
  for (unsigned i = lane; i < 32 * 32; i += SIMT_LANES) ((uint32_t *)(void *)simt_shared())[i] = i;
  simt_sync_warp();
  const simt_quad near = simt_load_quad(simt_shared() + 16 * lane);
  const simt_quad far = simt_load_quad(simt_shared() + 128 * lane);
  const simt_quad same = simt_load_quad(simt_shared());
  args->out[lane] = near.words[0] + far.words[0] + same.words[3];
}

static void test_banks(void **unused) {
  (void)unused;
  uint32_t out[32];
  emulator_loads loads;
  run(bank_kernel, &(exchange_args){out}, 32, 4096, 0);
  for (unsigned lane = 0; lane < 32; lane++) assert_int_equal(out[lane], 4 * lane + 32 * lane + 3);
  static const uint64_t expected[] = {4, 32, 4};
  for (size_t i = 0; i < 3; i++) {
    assert_true(emulator_loads_at(i, &loads));
    assert_int_equal(loads.loads, 2);
    assert_int_equal(loads.steps, 2 * expected[i]);
  }
  assert_false(emulator_loads_at(3, &loads));
}

// ---- Mistakes ----

typedef struct mistake_args {
  int which;
  const uint8_t *from;
} mistake_args;

static void copy_mistake(const mistake_args *args, copy_shared *shared) {
  if (simt_thread() == 0 && args->which != 6) simt_gate_init(&shared->gate);
  simt_sync_block();
  if (simt_thread() >= SIMT_LANES) return;
  if (args->which != 5) simt_copy(&shared->gate, 1, args->which == 8 ? 32 : 16, shared->bytes, args->from, 16);
  if (args->which == 7) simt_copy(&shared->gate, 1, 16, shared->bytes, args->from, 16);
  simt_copy_wait(&shared->gate, args->which == 9 ? 1 : 0);
  if (args->which == 10) simt_copy(&shared->gate, 1, 16, shared->bytes + 8, args->from, 16);
}

SIMT_KERNEL(mistake_kernel, mistake_args, 64, 1) {
  const unsigned lane = simt_thread() % SIMT_LANES;
  const uint32_t value = lane;
  switch (args->which) {
    case 0:  // half a warp
      if (lane < 16) (void)simt_exchange(value, 1);
      break;
    case 1:  // two halves at two places
      if (lane < 16) {
        simt_sync_warp();
      } else {
        simt_sync_warp();
      }
      break;
    case 2:  // a thread leaves before a barrier
      if (simt_thread() == 63) return;
      simt_sync_block();
      break;
    case 3:  // a vote and an exchange
      if (lane == 7) {
        (void)simt_any(true);
      } else {
        (void)simt_exchange(value, 1);
      }
      break;
    case 4:
      (void)simt_exchange(value, 32);
      break;
    case 11:  // reads what nothing has ordered behind its being written
      simt_shared()[simt_thread()] = 1;
      (void)simt_exchange(value, 1);
      if (simt_shared()[simt_thread() ^ 1] == 0) abort();
      break;
    case 12:  // one byte too far
      simt_shared()[sizeof(copy_shared) + simt_thread() / 63] = 1;
      break;
    case 13:  // one writes, the other reads, between the same two barriers
      simt_sync_block();
      if (simt_thread() == 0) simt_shared()[0] = 1;
      if (simt_thread() == 7 && simt_shared()[0] == 2) abort();
      simt_sync_block();
      break;
    case 14:  // the same without barriers
      if (simt_thread() == 0) simt_shared()[0] = 1;
      if (simt_thread() == 7 && simt_shared()[0] == 2) abort();
      break;
    default:
      copy_mistake(args, (copy_shared *)(void *)simt_shared());
  }
}

// The child's message, which must have `text`.
static void expect_end(int which, const char *text) {
  int pipes[2], status;
  char said[4096];
  size_t length = 0;
  ssize_t got;
  _Alignas(16) static const uint8_t from[16];
  assert_int_equal(pipe(pipes), 0);
  const pid_t child = fork();
  if (child == 0) {
    (void)setrlimit(RLIMIT_CORE, &(struct rlimit){0});
    (void)dup2(pipes[1], STDERR_FILENO);
    run(mistake_kernel, &(mistake_args){which, from}, 64, sizeof(copy_shared), 0);
    _exit(0);
  }
  close(pipes[1]);
  while ((got = read(pipes[0], said + length, sizeof said - 1 - length)) > 0) length += (size_t)got;
  said[length] = 0;
  close(pipes[0]);
  assert_int_equal(waitpid(child, &status, 0), child);
  if (strstr(said, text) == NULL) fail_msg("mistake %d was not found, but: %s", which, said);
}

static void test_mistakes(void **unused) {
  (void)unused;
  static const char *const texts[] = {
      "a thread has ended that others wait for",
      "others of these threads wait elsewhere",
      "a thread has ended that others wait for",
      "others of these threads wait elsewhere",
      "an exchange beyond the warp",
      "a wait for a copy that nobody begins",
      "a gate that nobody made",
      "a copy of this gate is under way",
      "pieces of less than their total",
      "copies waited for out of order",
      "a piece that is not aligned to 16",
  };
  for (int i = 0; i < (int)(sizeof texts / sizeof *texts); i++) expect_end(i, texts[i]);
#if defined(__SANITIZE_THREAD__)
  expect_end(11, "data race");
  expect_end(13, "data race");
  expect_end(14, "data race");
#endif
#if defined(__SANITIZE_ADDRESS__)
  expect_end(12, "heap-buffer-overflow");
#endif
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_choose), cmocka_unit_test(test_product), cmocka_unit_test(test_exchange),
      cmocka_unit_test(test_copy),   cmocka_unit_test(test_banks),   cmocka_unit_test(test_mistakes),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
