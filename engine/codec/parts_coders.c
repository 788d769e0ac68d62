// The coders of pages of parts: made for all layers of a model together.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/parts_internal.h"

typedef struct made_coders {
  qkv_phases *phases;
  uint32_t layers;
  qkvi_parts_coder coders[];  // [layers]
} made_coders;

bool qkvi_whole_bits_valid(double bits) {
  return bits >= 1 && bits <= QKV_DEPTH_MAX && bits == floor(bits);
}

// With so many query heads on one KV head an error is seen as often: a bit more halves it twice.
static double bits_of(const qkv_coder_spec *spec, const qkv_policy *policy, const qkv_codec *codec, double bits) {
  const uint32_t group = spec->q_heads / spec->kv_heads;
  for (uint64_t seen = 1; policy->gqa_compensation && seen < group; seen *= 4) {
    if (bits + 1 <= QKV_DEPTH_MAX && codec->bits_valid(bits + 1)) bits += 1;
  }
  return bits;
}

static void init_part(const qkv_coder_spec *spec, const qkv_policy *policy, qkv_part part, qkv_part_coder *coder) {
  const qkv_codec *codec = qkv_policy_codec(policy, part);
  const double bits = bits_of(spec, policy, codec, part == QKV_K ? policy->bits_k : policy->bits_v);
  *coder = (qkv_part_coder){.codec = codec->part,
                            .part = part,
                            .dim = (uint16_t)(part == QKV_K ? spec->key_dim : spec->value_dim),
                            .bits = (uint8_t)bits,
                            .tier = (uint8_t)(bits * QKV_TIER_BIT)};
  memcpy(coder->parameters, policy->parameters[part], sizeof coder->parameters);
  qkvi_part_defaults(codec, coder->parameters);
  coder->codec->init(coder);
  coder->block_bytes = (coder->block_bytes + QKVI_PARTS_ALIGN - 1) / QKVI_PARTS_ALIGN * QKVI_PARTS_ALIGN;
}

// Of one head; 0: it has none.
static size_t tables_bytes(const qkv_part_coder *of) {
  return of->codec->head == NULL
             ? 0
             : (of->codec->head_bytes(of) + QKVI_PARTS_ALIGN - 1) / QKVI_PARTS_ALIGN * QKVI_PARTS_ALIGN;
}

uint64_t qkvi_parts_cost(const qkv_coder_spec *spec) {
  uint64_t bytes = sizeof(made_coders) + spec->layers * sizeof(qkvi_parts_coder);
  if (spec->rope->theta != 0) bytes += qkv_phases_bytes(spec->rope);
  for (uint32_t layer = 0; layer < spec->layers; layer++) {
    const qkv_policy *policy = &spec->policies[layer];
    qkv_part_coder of;
    for (qkv_part part = QKV_K; part <= QKV_V && policy->codec->part != NULL; part++) {
      init_part(spec, policy, part, &of);
      bytes += (uint64_t)spec->kv_heads * tables_bytes(&of);
    }
  }
  return bytes;
}

// Tables of each head.
static uint64_t init_heads(const qkv_coder_spec *spec, qkvi_parts_coder *coder) {
  const qkv_codec *codec = coder->base.codec;
  const qkv_calibration *calibration = codec->calibrated ? spec->calibration : NULL;
  uint64_t bytes = 0;
  if (calibration != NULL) coder->base.calibration = qkv_calibration_version(calibration);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder *of = &coder->parts[part];
    if (of->codec->head == NULL) continue;
    const size_t each = coder->head_bytes[part] = tables_bytes(of);
    coder->heads[part] = aligned_alloc(QKVI_PARTS_ALIGN, spec->kv_heads * each);
    if (coder->heads[part] == NULL) abort();
    memset(coder->heads[part], 0, spec->kv_heads * each);
    bytes += spec->kv_heads * each;
    for (uint32_t h = 0; h < spec->kv_heads; h++) {
      uint8_t *tables = coder->heads[part] + h * each;
      if (h > 0 && calibration == NULL && of->codec->copies)
        memcpy(tables, coder->heads[part], each);
      else
        of->codec->head(of, spec, calibration, coder->base.layer, h, tables);
    }
  }
  return bytes;
}

void *qkvi_parts_create(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes) {
  made_coders *made = calloc(1, sizeof *made + spec->layers * sizeof *made->coders);
  if (made == NULL) abort();
  made->layers = spec->layers;
  if (spec->rope->theta != 0) made->phases = qkv_phases_create(spec->rope);
  for (uint32_t layer = 0; layer < spec->layers; layer++) {
    const qkv_policy *policy = &spec->policies[layer];
    qkvi_parts_coder *coder = &made->coders[layer];
    if (policy->codec->part == NULL) continue;
    *coder = (qkvi_parts_coder){.base = {.codec = policy->codec,
                                         .layer = layer,
                                         .kv_heads = (uint16_t)spec->kv_heads,
                                         .key_dim = (uint16_t)spec->key_dim,
                                         .value_dim = (uint16_t)spec->value_dim},
                                .phases = made->phases};
    for (qkv_part part = QKV_K; part <= QKV_V; part++) init_part(spec, policy, part, &coder->parts[part]);
    *bytes += init_heads(spec, coder);
    coder->base.kind = (uint32_t)policy->codec->id << 24 | (uint32_t)coder->parts[QKV_V].codec->id << 16 |
                       (uint32_t)coder->parts[QKV_K].tier << 8 | coder->parts[QKV_V].tier;
    coders[layer] = &coder->base;
  }
  const size_t phases = made->phases != NULL ? qkv_phases_bytes(spec->rope) : 0;
  *bytes += sizeof *made + spec->layers * sizeof *made->coders + phases;
  return made;
}

void qkvi_parts_destroy(void *of) {
  made_coders *made = of;
  for (uint32_t layer = 0; layer < made->layers; layer++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) free(made->coders[layer].heads[part]);
  }
  qkv_phases_destroy(&made->phases);
  free(made);
}
