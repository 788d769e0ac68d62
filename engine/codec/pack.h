// The codes of a group, between one byte a code and the packed bytes that page.h draws.
//
// Unpacked codes are a tile [coordinate][slot of the group]: QKV_GROUP_TOKENS codes of one coordinate lie
// together. The scalar code here defines the bytes; kernels with layouts of their own in registers need not
// go through it.
#ifndef QKV_ENGINE_CODEC_PACK_H
#define QKV_ENGINE_CODEC_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/codec/page.h"

typedef uint8_t qkvi_codes[QKV_GROUP_TOKENS];  // one coordinate's

// `codes` [schedule->dim] has codes at QKV_DEPTH_MAX bits; what is deeper than the tier is dropped.
// Fills qkv_schedule_group_bytes(schedule, tier).
void qkvi_pack(qkv_part part, const qkv_schedule *schedule, unsigned tier, const qkvi_codes *codes, uint8_t *bytes);

// One line of 16 * width bytes (page.h), width 4, 2 or 1, of the codes at full depth of its coordinates.
void qkvi_pack_line(qkv_part part, unsigned pair, bool wide, unsigned width, const qkvi_codes *codes, uint8_t *bytes);

// `codes` [schedule->dim] gets each coordinate's code at its own depth (0 at depth 0).
void qkvi_unpack(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes, qkvi_codes *codes);

// Unpacks one slot of the group: codes [schedule->dim].
void qkvi_unpack_slot(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes, unsigned slot,
                      uint8_t *codes);

// The bytes of a group at a lower tier, out of those at `tier`: what the lower one does not have is left out, which
// takes a copy for pairs of bits that stay as they are.
void qkvi_narrow(qkv_part part, const qkv_schedule *schedule, unsigned tier, const uint8_t *bytes, unsigned lower,
                 uint8_t *out);

#endif
