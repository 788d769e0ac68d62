// Keys, values and queries of any model, from a safetensors file: rows as qkvctl fetch writes them, and queries
// beside them, whose attention is then measured, too.
//
//   layers.N.k  [tokens, kv_heads, key_dim]     metadata, all optional: first_position (0), layout (tokens_first or
//   layers.N.v  [tokens, kv_heads, value_dim]   heads_first: the first two dims change places), rope (after or
//   before) layers.N.q  [queries, q_heads, key_dim]     of the last tokens, so at most as many; optional
//
// Threads: one at a time for each dump.
#ifndef QKV_CLIENT_BENCH_DUMP_H
#define QKV_CLIENT_BENCH_DUMP_H

#include "client/bench/probe.h"

enum { QKVI_DUMP_QUERIES = 256 };  // of a layer; more are not looked at, the last ones count

typedef struct qkvi_dump qkvi_dump;

// Maps the file and checks that its layers go together. NOT_FOUND, INVALID_ARGUMENT; on failure *dump is NULL.
qkv_status qkvi_dump_open(const char *path, qkvi_dump **dump, qkv_error *error);
void qkvi_dump_close(qkvi_dump **dump);

size_t qkvi_dump_layers(const qkvi_dump *dump);
bool qkvi_dump_has_queries(const qkvi_dump *dump);
// The model as far as the file tells: geometry, with as many layers as its highest number asks for, and without
// RoPE. Not resolved.
qkv_model qkvi_dump_model(const qkvi_dump *dump);

// Measures layer `index` (not its number) of a model for each of the codings; adds to sums[coding].
// FAILED_PRECONDITION where rows are from before RoPE and the model has none.
qkv_status qkvi_dump_measure(const qkvi_dump *dump, const qkv_model *model, size_t index, qkv_dtype dtype,
                             qkv_coding *const *codings, size_t count, qkvi_probe_layer *sums, qkv_error *error);

#endif
