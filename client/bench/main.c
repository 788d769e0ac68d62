// qkv-bench: measures the daemon, and the machine's own limit. One subcommand a question.
#include <malloc.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/bench/bench.h"

// Messages of a MiB come and go: glibc would hand their pages back to the system and fault them in again for
// each. The daemon sets the same.
static void setup_malloc(void) {
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

// malloc counts what it caches for each thread, up to 70 KB, as used memory: as much as `share` measures. The caches
// can be switched off only by the environment.
static void leave_out_thread_caches(int argc, char **argv) {
  static const char name[] = "GLIBC_TUNABLES";
  if (argc < 2 || strcmp(argv[1], "share") != 0 || getenv(name) != NULL) return;
  if (setenv(name, "glibc.malloc.tcache_count=0", 1) == 0) (void)execv("/proc/self/exe", argv);
}

int main(int argc, char **argv) {
  static qkv_bench_settings settings;
  leave_out_thread_caches(argc, argv);
  setup_malloc();
  const qkv_command commands[] = {
      qkvi_bench_rpc,    qkvi_bench_append,       qkvi_bench_fetch,   qkvi_bench_step,    qkvi_bench_attend,
      qkvi_bench_encode, qkvi_bench_decode,       qkvi_bench_entropy, qkvi_bench_quality, qkvi_bench_storage,
      qkvi_bench_spill,  qkvi_bench_interference, qkvi_bench_heap,    qkvi_bench_share,   qkvi_bench_share_append};
  const qkv_command_set set = {.program = "qkv-bench",
                               .summary = "Measures a qkvd, the machine's own limits, and the codes.",
                               .commands = commands,
                               .command_count = sizeof commands / sizeof *commands,
                               .values = &settings};
  return qkv_program_run(&set, argc, argv);
}
