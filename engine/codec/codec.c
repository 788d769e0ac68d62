#include "engine/codec/codec.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/codec/commvq.h"
#include "engine/codec/delta.h"
#include "engine/codec/ecsq.h"
#include "engine/codec/embedded.h"
#include "engine/codec/int8.h"
#include "engine/codec/kivi.h"
#include "engine/codec/low_rank_stage.h"
#include "engine/codec/outlier_channels.h"
#include "engine/codec/polarquant.h"
#include "engine/codec/pq.h"
#include "engine/codec/running_u8.h"
#include "engine/codec/turboquant.h"
#include "engine/codec/turboquant_ip.h"

static bool any_bits(double bits) {
  return bits > 0;
}

// Layers of exact rows have a coder that says so.
static void *exact_create(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes) {
  qkv_coder *made = calloc(spec->layers, sizeof *made);
  if (made == NULL) abort();
  for (uint32_t layer = 0; layer < spec->layers; layer++) {
    if (!qkv_codec_is_exact(spec->policies[layer].codec)) continue;
    made[layer] =
        (qkv_coder){.codec = spec->policies[layer].codec,
                    .layer = layer,
                    .kv_heads = (uint16_t)spec->kv_heads,
                    .key_dim = (uint16_t)spec->key_dim,
                    .value_dim = (uint16_t)spec->value_dim,
                    .calibration = spec->calibration == NULL ? 0 : qkv_calibration_version(spec->calibration)};
    coders[layer] = &made[layer];
  }
  *bytes += spec->layers * sizeof *made;
  return made;
}

static uint64_t exact_cost(const qkv_coder_spec *spec) {
  return spec->layers * sizeof(qkv_coder);
}

static const qkv_codec exact = {.id = 0,
                                .name = "exact",
                                .calibrated = true,  // so that none holds on to a coding that is not used any more
                                .bits_valid = any_bits,
                                .bits_text = "numbers above 0",
                                .create = exact_create,
                                .cost = exact_cost,
                                .destroy = free};

static const qkv_codec *const codecs[] = {
    &qkvi_codec_embedded,
    &exact,
    &qkvi_codec_kivi,
    &qkvi_codec_turboquant,
    &qkvi_codec_polarquant,
    &qkvi_codec_running_u8,
    &qkvi_codec_turboquant_ip,
    &qkvi_codec_pq,
    &qkvi_codec_int8,
    &qkvi_codec_commvq,
    &qkvi_codec_turboquant_outliers,
    &qkvi_codec_turboquant_ip_outliers,
    &qkvi_codec_turboquant_low_rank,
    &qkvi_codec_kivi_low_rank,
    &qkvi_codec_turboquant_delta,
    &qkvi_codec_int8_delta,
    &qkvi_codec_polarquant_low_rank,
    &qkvi_codec_int8_low_rank,
    &qkvi_codec_running_u8_low_rank,
    &qkvi_codec_kivi_delta,
    &qkvi_codec_polarquant_delta,
    &qkvi_codec_turboquant_outliers_delta,
    &qkvi_codec_ecsq,
};
enum { CODECS = sizeof codecs / sizeof *codecs };
_Static_assert(CODECS <= QKV_CODECS_MAX, "qkv_section_wants has a row for each");

const qkv_codec *qkv_codec_by_id(uint8_t id) {
  for (size_t row = 0; row < CODECS; row++) {
    if (codecs[row]->id == id) return codecs[row];
  }
  return NULL;
}

const qkv_codec *qkv_codec_by_name(const char *name) {
  for (size_t row = 0; row < CODECS; row++) {
    if (strcmp(codecs[row]->name, name) == 0) return codecs[row];
  }
  return NULL;
}

const qkv_codec *qkv_codec_at(size_t row) {
  return row < CODECS ? codecs[row] : NULL;
}

char *qkv_codec_names(char names[QKV_CODEC_NAMES_MAX]) {
  names[0] = '\0';
  for (size_t row = 0, length = 0; row < CODECS && length < QKV_CODEC_NAMES_MAX; row++) {
    const char *join = row == 0 ? "" : row + 1 == CODECS ? " and " : ", ";
    length += (size_t)snprintf(names + length, QKV_CODEC_NAMES_MAX - length, "%s%s", join, codecs[row]->name);
  }
  return names;
}

static void want(qkv_section_wants *wants, const qkv_codec *codec, double bits) {
  if (codec->section == NULL || !codec->bits_valid(bits)) return;
  for (size_t row = 0; row < CODECS; row++) {
    if (codecs[row] == codec) wants->bits[row] |= (uint16_t)(1u << (unsigned)bits);
  }
}

void qkv_section_want(qkv_section_wants *wants, const qkv_policy *policy) {
  want(wants, policy->codec, policy->bits_k);
  const bool both = policy->codec_v == NULL || policy->codec_v == policy->codec;
  if (both && policy->codec->section != NULL && !policy->codec->section->keys_only)
    want(wants, policy->codec, policy->bits_v);
}

double qkv_codec_bits_default(const qkv_codec *codec) {
  return codec->bits_valid(4) ? 4 : codec->bits_valid(8) ? 8 : 2;
}
