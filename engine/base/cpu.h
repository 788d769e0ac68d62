// What the processor can do and the operating system lets us use.
#ifndef QKV_ENGINE_BASE_CPU_H
#define QKV_ENGINE_BASE_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

// name as in --cpu-mask, bit
#define QKV_CPU_MAP(X)                                \
  X(AVX2, "avx2", 0)                                  \
  X(FMA, "fma", 1)                                    \
  X(F16C, "f16c", 2)                                  \
  X(AVX512, "avx512", 3) /* F, BW, VL, DQ together */ \
  X(VNNI, "avx512-vnni", 4)                           \
  X(VBMI, "avx512-vbmi", 5)                           \
  X(NEON, "neon", 6)                                  \
  X(DOTPROD, "neon-dotprod", 7)                       \
  X(AMX, "amx-int8", 8) /* and the system lets us use its tiles */

typedef enum qkv_cpu_flag {
#define X(id, name, bit) QKV_CPU_##id = 1u << (bit),
  QKV_CPU_MAP(X)
#undef X
} qkv_cpu_flag;

// The flags of this machine; detected once, with the check that the OS saves the registers. Asks the system for AMX's
// tiles, where there are any: no kernel of theirs may run before.
uint32_t qkv_cpu_flags(void);
// "avx2,fma,f16c"; "none". `text` takes at most `size` bytes with the NUL.
void qkv_cpu_text(uint32_t flags, char *text, uint64_t size);
// The reverse: "avx2,fma", "none". INVALID_ARGUMENT for a name that is none of these.
qkv_status qkv_cpu_parse(const char *text, uint32_t *flags);

// Whether Intel made the processor: for kernels that choose between instructions which all processors have.
bool qkv_cpu_intel(void);

// Processors that this process, by its first thread, may run on; >= 1.
int qkv_cpu_count(void);
// The calling thread runs on one of them alone from now on: on number `index` modulo their count. False where the
// system refuses. Threads that it starts inherit that.
bool qkv_cpu_pin(size_t index);

#endif
