// What codes cost keys and values of any model, from a file (client/format/dump.h); with its queries their attention,
// too.
//
// Threads: one at a time for each dump.
#ifndef QKV_CLIENT_BENCH_DUMP_H
#define QKV_CLIENT_BENCH_DUMP_H

#include "client/bench/probe.h"
#include "client/format/dump.h"

enum { QKVI_DUMP_QUERIES = 256 };  // of a layer; more are not looked at, the last ones count

// The model as far as the file tells: geometry, with as many layers as its highest number asks for; and what the
// calibration (or NULL) says where the file does not. `rope_theta` 0: RoPE is the calibration's. Not resolved.
qkv_model qkvi_dump_model(const qkv_dump *dump, const qkv_calibration *calibration, double rope_theta);

// Measures layer `index` (not its number) of a model for each of the codings; adds to sums[coding].
// FAILED_PRECONDITION where rows are from before RoPE and the model has none.
qkv_status qkvi_dump_measure(const qkv_dump *dump, const qkv_model *model, size_t index, qkv_dtype dtype,
                             qkv_coding *const *codings, size_t count, qkvi_probe_layer *sums, qkv_error *error);

#endif
