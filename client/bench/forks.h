// The part of qkv-bench share that is about forks: what they cost, and what sessions take that have nothing yet.
#ifndef QKV_CLIENT_BENCH_FORKS_H
#define QKV_CLIENT_BENCH_FORKS_H

#include "client/bench/bench.h"

// Adds to `result`, all measured in process, bytes as counted by the arena and by malloc together:
//   idle_session_bytes  an open session of 32 layers without rows
//   fork_us_p50, _p99   a fork of 131072 tokens in 32 layers, forked at a page's end
//   fork_bytes          what it takes
//   memory_ratio        1000 forks of 32768 tokens, each with 512 tokens of its own, over the prefix and 1000
//                       times what 512 tokens take in a session that shares nothing
void qkvi_bench_forks(json_t *result);

// The same over a real storage in a directory that is made here and removed (sunk.c), of 128 sessions of 32 layers
// and 1024 tokens with ids, of which nothing is in memory:
//   sunk_session_bytes        all of it, the storage's index included
//   folded_session_bytes      once it is folded (session_fold.h), the index included
//   unfold_us_p50             making its layers again
//   sunk_session_index_bytes  that index alone
// And of 1000 forks of a session of 4096 tokens with ids, which stays in memory:
//   idle_fork_bytes           a fork that has nothing of its own
//   folded_fork_bytes         once it is folded
//   fork_unfold_us_p50        making its layers again
void qkvi_bench_sunk(json_t *result);

#endif
