// Keys, values and queries of any model, from a safetensors file: rows as qkvctl fetch writes them, and queries.
//
//   layers.N.k  [tokens, kv_heads, key_dim]
//   layers.N.v  [tokens, kv_heads, value_dim]
//   layers.N.q  [queries, q_heads, key_dim]     of the last tokens, so at most as many; optional
//
// Metadata, all optional: first_position (0), layout (tokens_first, or heads_first: the first two dims change
// places), rope (after or before).
//
// Threads: one at a time for each dump.
#ifndef QKV_CLIENT_FORMAT_DUMP_H
#define QKV_CLIENT_FORMAT_DUMP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

#define QKV_DUMP_LAYERS_MAX 1024

typedef enum qkv_dump_kind { QKV_DUMP_K, QKV_DUMP_V, QKV_DUMP_Q } qkv_dump_kind;

typedef struct qkv_dump qkv_dump;

// Maps the file and checks that its layers go together. NOT_FOUND, INVALID_ARGUMENT; on failure *dump is NULL.
qkv_status qkv_dump_open(const char *path, qkv_dump **dump, qkv_error *error);
void qkv_dump_close(qkv_dump **dump);

// Layers that the file has, and whether they have queries.
size_t qkv_dump_layers(const qkv_dump *dump);
bool qkv_dump_has_queries(const qkv_dump *dump);
// Whether keys and queries are from before RoPE.
bool qkv_dump_before_rope(const qkv_dump *dump);
uint64_t qkv_dump_first_position(const qkv_dump *dump);
// Of every layer; 0 for queries that are not there.
uint32_t qkv_dump_heads(const qkv_dump *dump, qkv_dump_kind kind);
uint32_t qkv_dump_width(const qkv_dump *dump, qkv_dump_kind kind);

// Of the layer `index`, in the order of the file: its number in the model, and its rows of one kind.
uint32_t qkv_dump_number(const qkv_dump *dump, size_t index);
uint64_t qkv_dump_tokens(const qkv_dump *dump, size_t index, qkv_dump_kind kind);
// Rows as the file has them, but in fp32 and tokens first: out [tokens][heads][width]. The file must have them
// (asserted).
void qkv_dump_read(const qkv_dump *dump, size_t index, qkv_dump_kind kind, uint64_t first, uint64_t tokens,
                   float *out);

#endif
