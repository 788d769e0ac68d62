// What a device needs of a coder to make rows of its pages (engine/kernel/simt/rows.h), whatever the code.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CACHE_DEVICE_ROWS_H
#define QKV_ENGINE_CACHE_DEVICE_ROWS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/tensor.h"
#include "engine/codec/page.h"
#include "engine/kernel/simt/rows.h"

struct qkv_coder;

// Whether the kernels make rows of a coder's pages: the embedded codec's, of widths that fit.
bool qkv_device_takes_rows(const struct qkv_coder *coder);

// One head's code, qkv_simt_code and what its offsets lead to: its bytes, a multiple of 16; fills them.
size_t qkv_device_code_bytes(const struct qkv_coder *coder, uint16_t kv_head, qkv_part part);
void qkv_device_fill_code(const struct qkv_coder *coder, uint16_t kv_head, qkv_part part, void *to);

// The same to encode rows of the head at its tier: the analysis in place of the synthesis, and weights.
size_t qkv_device_encoder_bytes(const struct qkv_coder *coder, uint16_t kv_head, qkv_part part);
void qkv_device_fill_encoder(const struct qkv_coder *coder, uint16_t kv_head, qkv_part part, void *to);
// Flags of a job that encodes. Where they are not 0 it has turns and slots, those of rows before RoPE.
uint32_t qkv_device_encode_flags(const struct qkv_coder *coder, qkv_part part);

// What a head's keys turn by on their way to rows as attended, or to rows before RoPE: the flags of a job. 0:
// nothing, and a job needs neither turns nor slots.
uint32_t qkv_device_row_flags(const struct qkv_coder *coder, qkv_part part, bool before_rope);
// Floats of a page's turns and of its slots; fills them. Slots are the same for all pages where RoPE's frequencies
// are steady; without RoPE all are.
size_t qkv_device_turn_floats(const struct qkv_coder *coder);
size_t qkv_device_slot_floats(const struct qkv_coder *coder);
bool qkv_device_slots_steady(const struct qkv_coder *coder, uint64_t position);
void qkv_device_fill_turns(const struct qkv_coder *coder, uint16_t kv_head, uint64_t position, bool before_rope,
                           float *turns);
void qkv_device_fill_slots(const struct qkv_coder *coder, uint64_t position, float *slots);

#endif
