#include "engine/base/cpu.h"

#include <assert.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>

// Saving the tiles takes 8 KiB a thread, for which the system has to be asked, once a process.
static bool may_use_tiles(void) {
  enum { REQUEST = 0x1023, TILE_DATA = 18 };    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: no header has them
  const unsigned wanted = 1u << 24 | 1u << 25;  // of cpuid 7: AMX-TILE, AMX-INT8
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if ((edx & wanted) != wanted) return false;
  return syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
}

// The compiler's table checks with XGETBV that the OS saves the registers.
static uint32_t detect(void) {
  uint32_t flags = 0;
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2")) flags |= QKV_CPU_AVX2;
  if (__builtin_cpu_supports("fma")) flags |= QKV_CPU_FMA;
  // Not every compiler's table knows F16C. It works on AVX registers, which AVX2 has checked.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if ((flags & QKV_CPU_AVX2) != 0 && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C) != 0) {
    flags |= QKV_CPU_F16C;
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    flags |= QKV_CPU_AVX512;
    if (__builtin_cpu_supports("avx512vnni")) flags |= QKV_CPU_VNNI;
    if (__builtin_cpu_supports("avx512vbmi")) flags |= QKV_CPU_VBMI;
    if (may_use_tiles()) flags |= QKV_CPU_AMX;
  }
  return flags;
}

bool qkv_cpu_intel(void) {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

// What the processor has and the kernel saves, as reported by the kernel.
static uint32_t detect(void) {
  const unsigned long has = getauxval(AT_HWCAP);
  uint32_t flags = 0;
  if ((has & HWCAP_ASIMD) != 0) flags |= QKV_CPU_NEON;
  if ((has & HWCAP_ASIMDDP) != 0) flags |= QKV_CPU_DOTPROD;
  return flags;
}
#else
static uint32_t detect(void) {
  return 0;
}
#endif

#if !defined(__x86_64__)
bool qkv_cpu_intel(void) {
  return false;
}
#endif

static uint32_t detected;

static void detect_once(void) {
  detected = detect();
}

uint32_t qkv_cpu_flags(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, detect_once);
  return detected;
}

static const struct {
  uint32_t flag;
  const char *name;
} rows[] = {
#define X(id, name, bit) {QKV_CPU_##id, name},
    QKV_CPU_MAP(X)
#undef X
};

static uint32_t flag_of(const char *name, size_t length) {
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if (strlen(rows[i].name) == length && memcmp(rows[i].name, name, length) == 0) return rows[i].flag;
  }
  return 0;
}

qkv_status qkv_cpu_parse(const char *text, uint32_t *flags) {
  *flags = 0;
  if (strcmp(text, "none") == 0) return QKV_OK;
  for (;;) {
    const size_t length = strcspn(text, ",");
    const uint32_t flag = flag_of(text, length);
    if (flag == 0) return QKV_INVALID_ARGUMENT;
    *flags |= flag;
    if (text[length] == '\0') return QKV_OK;
    text += length + 1;
  }
}

void qkv_cpu_text(uint32_t flags, char *text, uint64_t size) {
  assert(size > 0);
  text[0] = '\0';
  uint64_t length = 0;
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    if ((flags & rows[i].flag) == 0) continue;
    int n = snprintf(text + length, size - length, "%s%s", length > 0 ? "," : "", rows[i].name);
    length += (uint64_t)n;
    if (length >= size) return;  // cut
  }
  if (length == 0) (void)snprintf(text, size, "none");
}

int qkv_cpu_count(void) {
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof set, &set) == 0) return CPU_COUNT(&set);
  const long online = sysconf(_SC_NPROCESSORS_ONLN);  // more of them than fit in the set
  return online > 0 ? (int)online : 1;
}

bool qkv_cpu_pin(size_t index) {
  cpu_set_t all, one;
  if (sched_getaffinity(getpid(), sizeof all, &all) != 0) return false;
  size_t left = index % (size_t)CPU_COUNT(&all);
  int cpu = 0;
  while (!CPU_ISSET(cpu, &all) || left-- > 0) cpu++;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  return sched_setaffinity(0, sizeof one, &one) == 0;
}
