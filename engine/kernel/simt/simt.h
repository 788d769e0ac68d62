// Kernels for GPUs in the common subset of C17 and CUDA C++.
//
// One source is compiled twice: by nvcc for the GPU (-x cu), and by a C compiler for the emulator
// (tests/gpu/emulator.h), where each thread of a block is a fiber. What a GPU has and C lacks comes from this file:
// on the GPU each function is an instruction or an intrinsic, on the emulator a call.
//
//   block      simt_threads() threads in warps of 32, one dimension
//   warp       all 32 threads take part in each warp function: exchange, vote, product, copy. Anything else ends the
//              emulator with a message
//   memory     what a thread wrote to shared memory is read by others after simt_sync_block, simt_sync_warp or
//              simt_copy_wait; exchanges, votes and products order nothing. ThreadSanitizer checks this on the
//              emulator
//   floats     IEEE single and double, to nearest, contracted by simt_fused alone: nvcc -fmad=false,
//              gcc -ffp-contract=off; so the bits are the same on the GPU, on the emulator and in the CPU's kernels
//   alignment  loads of 16 bytes and copies are aligned to 16
#ifndef QKV_ENGINE_KERNEL_SIMT_SIMT_H
#define QKV_ENGINE_KERNEL_SIMT_SIMT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIMT_LANES 32u

#ifdef __cplusplus
#define SIMT_ALIGNED alignas
#else
#define SIMT_ALIGNED _Alignas
#endif

// 16 bytes, loaded at once.
typedef struct simt_quad {
  SIMT_ALIGNED(16) uint32_t words[4];
} simt_quad;

// A gate in shared memory: copies into shared memory complete on it, one copy at a time.
typedef uint64_t simt_gate;

// A product's operands and sums (below).
#define SIMT_A_WORDS 4
#define SIMT_B_WORDS 2
#define SIMT_SUMS 4

#ifdef __CUDACC__

#define SIMT_INLINE static __device__ __forceinline__
#define SIMT_UNROLL _Pragma("unroll")
#define SIMT_LOOP _Pragma("unroll 1")
// SIMT_KERNEL(name, arguments' type, threads of a block at most, blocks on a multiprocessor at least) { body }; the
// body has `args`, a pointer to the arguments.
#define SIMT_KERNEL(name, type, threads, blocks) SIMT_KERNEL_(name, type, threads, blocks)
#define SIMT_KERNEL_(name, type, threads, blocks)                                                          \
  SIMT_INLINE void name##_of(const type *args);                                                            \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ type given) { \
    name##_of(&given);                                                                                     \
  }                                                                                                        \
  SIMT_INLINE void name##_of(const type *args)

extern __shared__ simt_quad simt_shared_quads[];

SIMT_INLINE unsigned simt_thread(void) {
  return threadIdx.x;
}
SIMT_INLINE unsigned simt_threads(void) {
  return blockDim.x;
}
SIMT_INLINE unsigned simt_block(void) {
  return blockIdx.x;
}
// The shared memory of the block, of the size given at launch, aligned to 128.
SIMT_INLINE uint8_t *simt_shared(void) {
  return (uint8_t *)simt_shared_quads;
}
// Says that a pointer is one to shared memory, where the compiler would not find out.
SIMT_INLINE void simt_is_shared(const void *at) {
  __builtin_assume(__isShared(at));
}
SIMT_INLINE void simt_sync_block(void) {
  __syncthreads();
}
SIMT_INLINE void simt_sync_warp(void) {
  __syncwarp();
}
// What lane ^ mask brings.
SIMT_INLINE uint32_t simt_exchange(uint32_t value, unsigned mask) {
  return __shfl_xor_sync(~0u, value, mask);
}
SIMT_INLINE bool simt_any(bool value) {
  return __any_sync(~0u, value);
}
SIMT_INLINE uint32_t simt_bits(float value) {
  return __float_as_uint(value);
}
SIMT_INLINE float simt_float(uint32_t bits) {
  return __uint_as_float(bits);
}
// The larger of two that are numbers.
SIMT_INLINE float simt_larger(float a, float b) {
  return fmaxf(a, b);
}
// The square root, to nearest.
SIMT_INLINE float simt_root(float value) {
  return __fsqrt_rn(value);
}
// a b + c, rounded once.
SIMT_INLINE float simt_fused(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
// The same number, which the compiler does not know anything of: what is computed from it is computed here and not
// kept in registers from before a loop.
SIMT_INLINE uint32_t simt_anew(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
// PTX prmt: nibble i of `choice` chooses byte i of the result from the eight bytes of low and high; where the
// nibble's highest bit is set, the byte's sign fills the result's byte.
SIMT_INLINE uint32_t simt_choose(uint32_t low, uint32_t high, uint32_t choice) {
  uint32_t out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(choice));
  return out;
}
SIMT_INLINE simt_quad simt_load_quad(const void *from) {
  return *(const simt_quad *)from;
}

// sums [16][8] += a [16][32] . b [32][8], bytes by bytes: signed or unsigned ones. Lane 4 g + t has, i = 0..3:
//   a[0] a[g][4t + i]   a[1] a[g + 8][4t + i]   a[2] a[g][16 + 4t + i]   a[3] a[g + 8][16 + 4t + i]
//   b[0] b[4t + i][g]   b[1] b[16 + 4t + i][g]
//   sums[0..1] [g][2t..2t + 1]   sums[2..3] [g + 8][2t..2t + 1]
#define SIMT_MULTIPLY(name, types)                                             \
  SIMT_INLINE void name(int32_t *sums, const uint32_t *a, const uint32_t *b) { \
    asm("mma.sync.aligned.m16n8k32.row.col.s32." types                         \
        ".s32 "                                                                \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"      \
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));   \
  }
SIMT_MULTIPLY(simt_multiply_s8, "s8.s8")
SIMT_MULTIPLY(simt_multiply_u8, "s8.u8")
SIMT_MULTIPLY(simt_multiply_u8_s8, "u8.s8")

// ---- Copies from global to shared memory ----
//
// From compute capability 9.0 on bulk copies, which arrive once at the gate; before that 16 bytes a thread and step,
// after which all threads of the warp arrive.

#define SIMT_BULK (__CUDA_ARCH__ >= 900)

SIMT_INLINE uint32_t simt_shared_address(const void *at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

// By one thread; simt_sync_warp before the gate's first copy.
SIMT_INLINE void simt_gate_init(simt_gate *gate) {
  const unsigned arrivals = SIMT_BULK ? 1 : SIMT_LANES;
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(simt_shared_address(gate)), "r"(arrivals) : "memory");
#if SIMT_BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// By a whole warp: its first `pieces` lanes name a piece each, `total` bytes together. The warp has read what lay at
// `to`. simt_copy_wait(gate) before `to` is read.
SIMT_INLINE void simt_copy(simt_gate *gate, unsigned pieces, uint32_t total, void *to, const void *from,
                           uint32_t bytes) {
  const unsigned lane = threadIdx.x % SIMT_LANES;
  const uint32_t target = simt_shared_address(to), at = simt_shared_address(gate);
  const uint64_t source = __cvta_generic_to_global(from);
  __syncwarp();
#if SIMT_BULK
  if (lane == 0)
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(total) : "memory");
  if (lane < pieces)
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
        "l"(source), "r"(bytes), "r"(at)
        : "memory");
#else
  for (unsigned i = 0; i < pieces; i++) {
    const uint32_t target_i = __shfl_sync(~0u, target, i), bytes_i = __shfl_sync(~0u, bytes, i);
    const uint64_t source_i = __shfl_sync(~0u, source, i);
    for (uint32_t b = 16 * lane; b < bytes_i; b += 16 * SIMT_LANES)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target_i + b), "l"(source_i + b) : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
#endif
}

// Until copy number `count` of the gate, counted from 0, is done; by each thread that reads it, in order.
SIMT_INLINE void simt_copy_wait(simt_gate *gate, uint32_t count) {
  const uint32_t at = simt_shared_address(gate), parity = count & 1;
  uint32_t done = 0;
  while (done == 0) {
#if SIMT_BULK
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
#else
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done)
                 : "r"(at), "r"(parity)
                 : "memory");
#endif
  }
}

#else  // The emulator, tests/gpu/emulator.c. `place` is where a call stands, for messages.

#include <math.h>
#include <string.h>

#define SIMT_INLINE static inline __attribute__((unused))
#define SIMT_UNROLL
#define SIMT_LOOP
#define SIMT_KERNEL(name, type, threads, blocks) SIMT_KERNEL_(name, type)
#define SIMT_KERNEL_(name, type)                \
  SIMT_INLINE void name##_of(const type *args); \
  void name(const void *given);                 \
  void name(const void *given) {                \
    name##_of((const type *)given);             \
  }                                             \
  SIMT_INLINE void name##_of(const type *args)

typedef struct simt_position {
  unsigned thread, threads, block;
  uint8_t *shared;
} simt_position;
extern simt_position simt_now;  // of the thread that runs

SIMT_INLINE unsigned simt_thread(void) {
  return simt_now.thread;
}
SIMT_INLINE unsigned simt_threads(void) {
  return simt_now.threads;
}
SIMT_INLINE unsigned simt_block(void) {
  return simt_now.block;
}
SIMT_INLINE uint8_t *simt_shared(void) {
  return simt_now.shared;
}
SIMT_INLINE void simt_is_shared(const void *at) {
  (void)at;
}
SIMT_INLINE uint32_t simt_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
SIMT_INLINE float simt_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
SIMT_INLINE uint32_t simt_anew(uint32_t value) {
  return value;
}
SIMT_INLINE float simt_larger(float a, float b) {
  return a > b || (a == b && simt_bits(a) >> 31 == 0) ? a : b;
}
SIMT_INLINE float simt_root(float value) {
  return sqrtf(value);
}
SIMT_INLINE float simt_fused(float a, float b, float c) {
  return fmaf(a, b, c);
}
SIMT_INLINE uint32_t simt_choose(uint32_t low, uint32_t high, uint32_t choice) {
  const uint64_t bytes = (uint64_t)high << 32 | low;
  uint32_t out = 0;
  for (unsigned i = 0; i < 4; i++) {
    const uint32_t nibble = choice >> (4 * i) & 15, byte = (uint32_t)(bytes >> (nibble % 8 * 8)) & 255;
    out |= (nibble < 8 ? byte : (byte >> 7) * 255) << (8 * i);
  }
  return out;
}

void simt_emulate_sync_block(const char *place);
void simt_emulate_sync_warp(const char *place);
uint32_t simt_emulate_exchange(const char *place, uint32_t value, unsigned mask);
bool simt_emulate_any(const char *place, bool value);
simt_quad simt_emulate_load_quad(const char *place, const void *from);
void simt_emulate_multiply(const char *place, bool a_signed, bool b_signed, int32_t *sums, const uint32_t *a,
                           const uint32_t *b);
void simt_emulate_gate_init(const char *place, simt_gate *gate);
void simt_emulate_copy(const char *place, simt_gate *gate, unsigned pieces, uint32_t total, void *to,
                       const void *from, uint32_t bytes);
void simt_emulate_copy_wait(const char *place, simt_gate *gate, uint32_t count);

#define SIMT_TEXT_(x) #x
#define SIMT_TEXT(x) SIMT_TEXT_(x)
#define SIMT_PLACE __FILE__ ":" SIMT_TEXT(__LINE__)
#define simt_sync_block() simt_emulate_sync_block(SIMT_PLACE)
#define simt_sync_warp() simt_emulate_sync_warp(SIMT_PLACE)
#define simt_exchange(value, mask) simt_emulate_exchange(SIMT_PLACE, value, mask)
#define simt_any(value) simt_emulate_any(SIMT_PLACE, value)
#define simt_load_quad(from) simt_emulate_load_quad(SIMT_PLACE, from)
#define simt_multiply_s8(sums, a, b) simt_emulate_multiply(SIMT_PLACE, true, true, sums, a, b)
#define simt_multiply_u8(sums, a, b) simt_emulate_multiply(SIMT_PLACE, true, false, sums, a, b)
#define simt_multiply_u8_s8(sums, a, b) simt_emulate_multiply(SIMT_PLACE, false, true, sums, a, b)
#define simt_gate_init(gate) simt_emulate_gate_init(SIMT_PLACE, gate)
#define simt_copy(gate, pieces, total, to, from, bytes) \
  simt_emulate_copy(SIMT_PLACE, gate, pieces, total, to, from, bytes)
#define simt_copy_wait(gate, count) simt_emulate_copy_wait(SIMT_PLACE, gate, count)

#endif

// Floats through simt_exchange.
#define simt_exchange_float(value, mask) simt_float(simt_exchange(simt_bits(value), mask))

#endif
