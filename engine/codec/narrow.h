// Narrowing: a page at lower tiers, by dropping planes.
//
// Codes are prefixes, so the bits that stay are those that were there: nothing is coded again and no error is added.
// Gains and sections are copied. What may be dropped is what the anchor allows (anchor.h): a part whose rows are a
// chain keeps its tiers, whatever is asked.
//
// Cost: a copy of the codes that stay; pairs of bits of which one goes are repacked. 8 heads of 128 + 128, 64 tokens,
// from 4 bits to 3: see narrow_test.c, which prints it.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_NARROW_H
#define QKV_ENGINE_CODEC_NARROW_H

#include <stdbool.h>

#include "engine/codec/codec.h"

// A tier for every group of every part of one head.
struct qkv_head_tiers {
  uint8_t tiers[2][QKV_PAGE_GROUPS];  // [part][group]
};

// Those that a valid page has: heads [kv_heads].
void qkv_page_tiers(const void *page, qkv_head_tiers *heads);

// Whether a part's groups may go to lower tiers.
bool qkv_page_part_narrows(const void *page, uint16_t kv_head, qkv_part part);

// qkv_codec.narrow of the embedded codec.
size_t qkvi_narrow_page(const qkv_coder *coder, const void *page, const qkv_head_tiers *heads, void *image);

#endif
