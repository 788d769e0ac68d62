// qkv-bench: measures the daemon, and the machine's own limit beside it. One subcommand a question.
#include "client/bench/bench.h"

int main(int argc, char **argv) {
  static qkv_bench_settings settings;
  const qkv_command commands[] = {qkvi_bench_rpc, qkvi_bench_append, qkvi_bench_fetch, qkvi_bench_attend};
  const qkv_command_set set = {.program = "qkv-bench",
                               .summary = "Measures a qkvd, and the machine's own limit beside it.",
                               .commands = commands,
                               .command_count = sizeof commands / sizeof *commands,
                               .values = &settings};
  return qkv_program_run(&set, argc, argv);
}
