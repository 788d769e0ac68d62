#include "engine/codec/kivi.h"

#include "engine/codec/affine.h"

enum { ID = 2, VERSION = 1 };

static bool group_size_valid(uint32_t size) {
  return size == 32 || size == 64;
}

static const qkv_parameter parameters[] = {
    {.name = "q_group_size", .fallback = 32, .valid = group_size_valid, .text = "32 and 64"}};

static bool bits_valid(double bits) {
  return bits >= 2 && qkvi_whole_bits_valid(bits);
}

static void kivi_init(qkv_part_coder *coder) {
  static const qkvi_affine_kind by_32 = {.group = 32, .dtype = QKV_FP16}, by_64 = {.group = 64, .dtype = QKV_FP16};
  qkvi_affine_init(coder, coder->parameters[0] == 32 ? &by_32 : &by_64);
}

// Of N(0, 1): an even error over the range of a group, which is 4.2 of 32 numbers and 4.7 of 64, in 2^b - 1 steps.
static double kivi_error_bound(double bits) {
  const double levels = (double)(1u << (unsigned)bits) - 1;
  return 2 / (levels * levels);
}

static const qkv_part_codec part = {.id = ID,
                                    .version = VERSION,
                                    .init = kivi_init,
                                    .encode = qkvi_affine_encode,
                                    .round_trip = qkvi_affine_round_trip,
                                    .share = qkvi_affine_share,
                                    .encode_shared = qkvi_affine_encode_shared,
                                    QKVI_AFFINE_FUNCTIONS};

const qkv_codec qkvi_codec_kivi = {.id = ID,
                                   .name = "kivi",
                                   .bits_valid = bits_valid,
                                   .bits_text = "whole numbers from 2 to 8 with kivi",
                                   .parameters = parameters,
                                   .parameter_count = sizeof parameters / sizeof *parameters,
                                   .error_bound = kivi_error_bound,
                                   .part = &part,
                                   QKV_CODEC_OF_PARTS};
