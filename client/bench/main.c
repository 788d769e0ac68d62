// qkv-bench: measures the daemon, and the machine's own limit. One subcommand a question.
#include <malloc.h>

#include "client/bench/bench.h"

// Messages of a MiB come and go: glibc would hand their pages back to the system and fault them in again for
// each. The daemon sets the same.
static void setup_malloc(void) {
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

int main(int argc, char **argv) {
  static qkv_bench_settings settings;
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
