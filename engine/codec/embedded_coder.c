// The embedded codec: its coders.
#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/codec/bit_budget.h"
#include "engine/codec/codebook.h"
#include "engine/codec/embedded.h"
#include "engine/codec/embedded_internal.h"

// All of one spec's coders, and what they point to.
typedef struct made_coders {
  const qkv_coder_spec *spec;               // while they are made
  int mean_offsets[QKV_CALIBRATION_PARTS];  // of the calibration's tiers, in eighths
  qkv_phases *phases;
  qkv_head_coder *heads;   // [layers][kv_heads]
  float *outlier_steps;    // [layers][kv_heads][value_dim]; NULL: data-free
  qkv_rebuild **rebuilds;  // of heads, the archive frame's; one for all that are data-free
  size_t rebuild_count;
  qkv_embedded_coder coders[];  // [layers]
} made_coders;

enum { WIDTHS = QKV_DIM_MAX / QKV_BAND };

// The data-free transform of every valid width.
static qkv_schedule uniform_schedules[WIDTHS];
static qkv_transform uniform_transforms[WIDTHS];

static void fill_uniform(void) {
  for (size_t i = 0; i < WIDTHS; i++) {
    qkv_schedule_uniform(&uniform_schedules[i], (uint16_t)((i + 1) * QKV_BAND));
    uniform_transforms[i].schedule = &uniform_schedules[i];
  }
}

const qkv_transform *qkv_transform_uniform(uint16_t dim) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_uniform);
  assert(dim >= QKV_BAND && dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  return &uniform_transforms[dim / QKV_BAND - 1];
}

static qkv_frame frame_of(const qkv_coder_spec *spec) {
  if (spec->rope->theta == 0) return QKV_FRAME_PLAIN;
  if (spec->purpose == QKV_PURPOSE_FETCH) return QKV_FRAME_ARCHIVE;
  return spec->calibration != NULL ? QKV_FRAME_ATTEND : QKV_FRAME_PLAIN;
}

static uint8_t tier_of(double bits) {
  return (uint8_t)(bits * QKV_TIER_BIT);
}

// A budget in bits as a tier. With so many query heads on one KV head its error is seen as often: one bit more halves
// it twice (algorithms: GQA compensation).
static uint8_t budget_of(const qkv_coder_spec *spec, const qkv_policy *policy, double bits) {
  uint32_t group = spec->q_heads / spec->kv_heads;
  if (policy->gqa_compensation) {
    for (uint64_t seen = 1; seen < group; seen *= 4) bits += 1;
  }
  return tier_of(bits < QKV_DEPTH_MAX ? bits : QKV_DEPTH_MAX);
}

// Half a bit: what no head's budget is lowered below.
enum { TIER_LEAST = QKV_TIER_BIT / 2 };

// Mean over all heads of what the calibration adds to a part's tier, in eighths.
static int mean_offset(const qkv_coder_spec *spec, const qkv_calibration *calibration, qkv_calibration_part part) {
  const uint32_t heads = spec->layers * spec->kv_heads;
  double sum = 0;
  for (uint32_t i = 0; i < heads; i++) {
    sum += qkv_calibration_tier_offset(calibration, i / spec->kv_heads, i % spec->kv_heads, part);
  }
  return (int)lround(sum / heads);
}

// A budgeted tier with a head's share of what the calibration gives to some and takes from others; between keys and
// values, too, unless the policy tells them apart.
static uint8_t head_tier(const made_coders *made, uint32_t layer, uint32_t head, qkv_calibration_part part,
                         uint8_t budget) {
  const int least = budget < TIER_LEAST ? budget : TIER_LEAST;
  const qkv_policy *policy = &made->spec->policies[layer];
  const int shared = policy->bits_k == policy->bits_v ? 0 : made->mean_offsets[part];
  const int offset = qkv_calibration_tier_offset(made->spec->calibration, layer, head, part) - shared;
  int tier = budget + (int)qkv_bit_faded(offset, (double)budget / QKV_TIER_BIT);
  if (tier < least) tier = least;
  return (uint8_t)(tier > QKV_TIER_MAX ? QKV_TIER_MAX : tier);
}

static qkv_head_coder calibrated_head(const made_coders *made, const qkv_embedded_coder *coder, uint32_t head) {
  const qkv_calibration *calibration = made->spec->calibration;
  const uint32_t layer = coder->base.layer;
  const qkv_calibration_part key_part = coder->frame == QKV_FRAME_ARCHIVE ? QKV_PART_K_ARCHIVE : QKV_PART_K_ATTEND;
  const qkv_transform *k = qkv_calibration_transform(calibration, layer, head, key_part);
  const qkv_transform *v = qkv_calibration_transform(calibration, layer, head, QKV_PART_V);
  float least = 0;
  const float *heavy = qkv_calibration_heavy(calibration, layer, head, &least);
  return (qkv_head_coder){.transforms = {k, v},
                          .schedules = {k->schedule, v->schedule},
                          .tiers = {head_tier(made, layer, head, key_part, coder->tier_k),
                                    head_tier(made, layer, head, QKV_PART_V, coder->tier_v)},
                          .heavy = heavy,
                          .heavy_least = least};
}

static qkv_head_coder uniform_head(const qkv_embedded_coder *coder) {
  const qkv_transform *k = qkv_transform_uniform(coder->base.key_dim);
  const qkv_transform *v = qkv_transform_uniform(coder->base.value_dim);
  return (qkv_head_coder){
      .transforms = {k, v}, .schedules = {k->schedule, v->schedule}, .tiers = {coder->tier_k, coder->tier_v}};
}

static qkv_embedded_coder coder_of(const made_coders *made, uint32_t layer) {
  const qkv_coder_spec *spec = made->spec;
  const qkv_policy *policy = &spec->policies[layer];
  qkv_embedded_coder coder = {
      .base = {.codec = policy->codec,
               .layer = layer,
               .kv_heads = (uint16_t)spec->kv_heads,
               .key_dim = (uint16_t)spec->key_dim,
               .value_dim = (uint16_t)spec->value_dim,
               .calibration = spec->calibration != NULL ? qkv_calibration_version(spec->calibration) : 0},
      .tier_k = budget_of(spec, policy, policy->bits_k),
      .tier_v = budget_of(spec, policy, policy->bits_v),
      .frame = frame_of(spec),
      .sinks = policy->sink_tokens > 0 ? (uint32_t)policy->sink_tokens : 0,
      .phases = made->phases,
      .low_rank = policy->low_rank,
      .anchors = {policy->anchor, policy->anchor},
      .heads = made->heads + (size_t)layer * spec->kv_heads};
  coder.base.kind = (uint32_t)coder.frame << 16 | (uint32_t)coder.tier_k << 8 | coder.tier_v;
  return coder;
}

// What attending keys of the archive frame takes. Heads that are data-free differ in tiers only.
static void make_rebuilds(made_coders *made, size_t heads) {
  if (frame_of(made->spec) != QKV_FRAME_ARCHIVE) return;
  made->rebuilds = calloc(heads, sizeof *made->rebuilds);
  if (made->rebuilds == NULL) abort();
  for (size_t i = 0; i < heads; i++) {
    qkv_head_coder *head = &made->heads[i];
    const qkv_head_coder *before = i > 0 ? head - 1 : NULL;
    if (head->transforms[QKV_K] == NULL) continue;  // of another codec's layer
    const bool alike = before != NULL && before->transforms[QKV_K] == head->transforms[QKV_K] &&
                       before->tiers[QKV_K] == head->tiers[QKV_K];
    head->rebuild = alike ? before->rebuild : qkv_rebuild_create(head->transforms[QKV_K], head->tiers[QKV_K]);
    if (!alike) made->rebuilds[made->rebuild_count++] = (qkv_rebuild *)head->rebuild;
  }
}

// Allowed squared error of a row, in units of the data-free code's average at the same bits.
static const double OUTLIER_ERRORS[] = {[QKV_K] = 1.5, [QKV_V] = 3}, OUTLIER_ERROR_DATA_FREE = 3;

// What a row's squared error in code space counts as a part of its squared length: for rows of usual shape the
// transform's metric makes that much of a unit.
static double error_scale(const qkv_transform *transform) {
  const size_t dim = transform->schedule->dim;
  double weighted = 0, plain = 0;
  if (transform->analysis == NULL) return 1;
  for (size_t c = 0; c < dim; c++) {
    weighted += (double)transform->weights[c];
    for (size_t i = 0; i < dim; i++) {
      plain += (double)transform->synthesis[c * dim + i] * (double)transform->synthesis[c * dim + i];
    }
  }
  return weighted / plain;
}

static double data_free_error(unsigned tier) {
  const unsigned whole = tier / QKV_TIER_BIT;
  const double rest = (double)(tier % QKV_TIER_BIT) / QKV_TIER_BIT;
  if (rest == 0) return qkv_codebook_distortion[whole];
  return (1 - rest) * qkv_codebook_distortion[whole] + rest * qkv_codebook_distortion[whole + 1];
}

static void set_outliers(const made_coders *made, const qkv_embedded_coder *coder, uint32_t index) {
  qkv_head_coder *head = (qkv_head_coder *)&coder->heads[index];
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const double error = data_free_error(head->tiers[part]);
    head->error_scales[part] = (float)error_scale(head->transforms[part]);
    const bool data_free = head->transforms[part]->analysis == NULL;
    const double limit = (data_free ? OUTLIER_ERROR_DATA_FREE : OUTLIER_ERRORS[part]) * error;
    head->outlier_limits[part] = head->tiers[part] > 0 ? (float)limit : 0;
  }
  const qkv_transform *values = head->transforms[QKV_V];
  if (values->weights == NULL) return;
  assert(made->outlier_steps != NULL);
  const size_t dim = coder->base.value_dim;
  float *steps = made->outlier_steps + ((size_t)coder->base.layer * coder->base.kv_heads + index) * dim;
  for (size_t c = 0; c < dim; c++) steps[c] = 1 / sqrtf(values->weights[c]);
  head->outlier_steps = steps;
}

static void make_layer(made_coders *made, uint32_t layer) {
  const qkv_coder_spec *spec = made->spec;
  qkv_head_coder *heads = made->heads + (size_t)layer * spec->kv_heads;
  const qkv_embedded_coder *coder = &made->coders[layer];
  made->coders[layer] = coder_of(made, layer);
  for (uint32_t head = 0; head < spec->kv_heads; head++) {
    heads[head] = spec->calibration != NULL ? calibrated_head(made, coder, head) : uniform_head(coder);
    heads[head].query_limit = qkvi_query_limit(heads[head].transforms[QKV_K], heads[head].tiers[QKV_K]);
    heads[head].weight_bytes = (uint8_t)qkvi_weight_bytes(heads[head].transforms[QKV_V], heads[head].tiers[QKV_V]);
    set_outliers(made, coder, head);
  }
}

uint64_t qkvi_embedded_cost(const qkv_coder_spec *spec) {
  const uint64_t heads = (uint64_t)spec->layers * spec->kv_heads;
  uint64_t bytes = sizeof(made_coders) + spec->layers * sizeof(qkv_embedded_coder) + heads * sizeof(qkv_head_coder);
  if (spec->rope->theta != 0) bytes += qkv_phases_bytes(spec->rope);
  if (spec->calibration != NULL) bytes += heads * spec->value_dim * sizeof(float);
  if (frame_of(spec) != QKV_FRAME_ARCHIVE) return bytes;
  // Data-free, heads of layers of the same bits have one.
  bytes += heads * sizeof(qkv_rebuild *);
  return bytes + (spec->calibration != NULL ? heads : spec->layers) * qkv_rebuild_cost(spec->key_dim);
}

static uint64_t bytes_of(const made_coders *made, const qkv_coder_spec *spec) {
  const size_t phases = made->phases != NULL ? qkv_phases_bytes(spec->rope) : 0;
  uint64_t rebuilds = 0;
  for (size_t i = 0; i < made->rebuild_count; i++) rebuilds += made->rebuilds[i]->bytes;
  const size_t steps = made->outlier_steps != NULL ? spec->value_dim * sizeof(float) : 0;
  return sizeof *made + phases + rebuilds +
         spec->layers * (sizeof(qkv_embedded_coder) + spec->kv_heads * (sizeof(qkv_head_coder) + steps));
}

void *qkvi_embedded_create(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes) {
  const size_t heads = (size_t)spec->layers * spec->kv_heads;
  made_coders *made = calloc(1, sizeof *made + spec->layers * sizeof *made->coders);
  if (made == NULL) abort();
  made->spec = spec;
  for (int part = 0; part < QKV_CALIBRATION_PARTS && spec->calibration != NULL; part++) {
    made->mean_offsets[part] = mean_offset(spec, spec->calibration, (qkv_calibration_part)part);
  }
  if (spec->rope->theta != 0) made->phases = qkv_phases_create(spec->rope);
  made->heads = calloc(heads, sizeof *made->heads);
  if (spec->calibration != NULL) made->outlier_steps = calloc(heads * spec->value_dim, sizeof(float));
  if (made->heads == NULL || (spec->calibration != NULL && made->outlier_steps == NULL)) abort();
  for (uint32_t layer = 0; layer < spec->layers; layer++) {
    if (spec->policies[layer].codec != &qkvi_codec_embedded) continue;
    make_layer(made, layer);
    coders[layer] = &made->coders[layer].base;
  }
  make_rebuilds(made, heads);
  *bytes += bytes_of(made, spec);
  made->spec = NULL;
  return made;
}

void qkvi_embedded_destroy(void *of) {
  made_coders *made = of;
  qkv_phases_destroy(&made->phases);
  for (size_t i = 0; i < made->rebuild_count; i++) qkv_rebuild_destroy(&made->rebuilds[i]);
  free(made->rebuilds);
  free(made->outlier_steps);
  free(made->heads);
  free(made);
}

void qkv_embedded_data_free(const qkv_coder *coder, uint16_t index, qkv_head_coder *head, qkv_embedded_coder *made) {
  const uint8_t *tiers = qkv_embedded(coder)->heads[index].tiers;
  const qkv_transform *k = qkv_transform_uniform(coder->key_dim), *v = qkv_transform_uniform(coder->value_dim);
  *head = (qkv_head_coder){
      .transforms = {k, v}, .schedules = {k->schedule, v->schedule}, .tiers = {tiers[QKV_K], tiers[QKV_V]}};
  *made = *qkv_embedded(coder);
  made->base.kv_heads = 1;
  made->base.calibration = 0;
  made->heads = head;
  if (made->frame == QKV_FRAME_ATTEND) made->frame = QKV_FRAME_PLAIN;
}
