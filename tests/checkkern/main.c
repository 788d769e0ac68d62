// Usage: checkkern [--bench [KERNEL]] [--cpu-mask LIST] [--rung NAME] [--every N]
// N, 1 to 9: one of so many widths and tiers is checked.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "tests/checkkern/checkkern.h"

// Of one rung, possibly the reference itself, or, where `rung` is NULL, of all the others.
static int check(uint32_t cpu_flags, const char *rung, unsigned every) {
  size_t failures = check_conversions(cpu_flags);
  for (size_t row = rung != NULL ? 0 : 1; qkv_kernels_at(row) != NULL; row++) {
    const qkv_kernels *variant = qkv_kernels_at(row);
    if (rung != NULL && strcmp(rung, variant->name) != 0) continue;
    if ((variant->needs & ~cpu_flags) != 0) {
      printf("%s: skipped, this machine or the mask lacks it\n", variant->name);
      continue;
    }
    uint64_t digest;
    const size_t failed = check_rung(variant, every, &digest);
    printf("%s: %s, %016" PRIx64 "\n", variant->name, failed == 0 ? "equal to the reference" : "FAILED", digest);
    failures += failed;
  }
  return failures == 0 ? 0 : 1;
}

int main(int argc, char **argv) {
  uint32_t cpu_flags = qkv_cpu_flags();
#if defined(QKV_CHECKKERN_EMULATED)
  cpu_flags |= QKV_CPU_AVX512 | QKV_CPU_VNNI | QKV_CPU_VBMI;
#endif
  bool measure = false;
  unsigned every = 1;
  const char *filter = NULL, *rung = NULL;
  for (int i = 1; i < argc; i++) {
    uint32_t mask;
    if (strcmp(argv[i], "--bench") == 0) {
      measure = true;
      if (i + 1 < argc && argv[i + 1][0] != '-') filter = argv[++i];
    } else if (strcmp(argv[i], "--cpu-mask") == 0 && i + 1 < argc && qkv_cpu_parse(argv[i + 1], &mask) == QKV_OK) {
      cpu_flags &= mask;
      i++;
    } else if (strcmp(argv[i], "--rung") == 0 && i + 1 < argc) {
      rung = argv[++i];
    } else if (strcmp(argv[i], "--every") == 0 && i + 1 < argc && argv[i + 1][0] >= '1' && argv[i + 1][0] <= '9') {
      every = (unsigned)(argv[++i][0] - '0');
    } else {
      fprintf(stderr, "usage: checkkern [--bench [KERNEL]] [--cpu-mask LIST] [--rung NAME] [--every N]\n");
      return 2;
    }
  }
  if (measure) {
    bench(cpu_flags, filter);
    return 0;
  }
  return check(cpu_flags, rung, every);
}
