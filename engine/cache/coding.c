#include "engine/cache/coding.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "engine/cache/bit_budget.h"
#include "engine/codec/calibrate.h"

struct qkv_coding {
  _Atomic uint64_t references;  // from 0 to 1 and back only under the lock
  const qkv_model *model;
  qkv_policy policy;
  qkv_purpose purpose;
  const qkv_calibration *calibration;
  int mean_offsets[QKV_CALIBRATION_PARTS];  // of the calibration's tiers, in eighths
  qkv_phases *phases;
  qkv_head_coder *heads;   // [layers][kv_heads]
  float *outlier_steps;    // [layers][kv_heads][value_dim]; NULL: data-free
  qkv_rebuild **rebuilds;  // of heads, the archive frame's; one for all that are data-free
  size_t rebuild_count;
  qkv_coding *next;
  qkv_coder layers[];  // [model->layers]
};

// Those in use, and the memory of all of them.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static qkv_coding *codings;
static uint64_t held;

static uint32_t version_of(const qkv_calibration *calibration) {
  return calibration != NULL ? qkv_calibration_version(calibration) : 0;
}

static bool same(const qkv_coding *coding, const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                 const qkv_calibration *calibration) {
  return coding->model == model && version_of(coding->calibration) == version_of(calibration) &&
         coding->purpose == purpose && qkv_policy_equal(&coding->policy, policy);
}

static qkv_frame frame_of(const qkv_coding *coding) {
  if (coding->model->rope.theta == 0) return QKV_FRAME_PLAIN;
  if (coding->purpose == QKV_PURPOSE_FETCH) return QKV_FRAME_ARCHIVE;
  return coding->calibration != NULL ? QKV_FRAME_ATTEND : QKV_FRAME_PLAIN;
}

static uint8_t tier_of(double bits) {
  return (uint8_t)(bits * QKV_TIER_BIT);
}

// A budget in bits as a tier. With so many query heads on one KV head its error is seen as often: one bit more halves
// it twice (algorithms: GQA compensation).
static uint8_t budget_of(const qkv_model *model, const qkv_policy *policy, double bits) {
  uint32_t group = model->q_heads / model->kv_heads;
  if (policy->gqa_compensation) {
    for (uint64_t seen = 1; seen < group; seen *= 4) bits += 1;
  }
  return tier_of(bits < QKV_DEPTH_MAX ? bits : QKV_DEPTH_MAX);
}

// Half a bit: what no head's budget is lowered below.
enum { TIER_LEAST = QKV_TIER_BIT / 2 };

// Mean over all heads of what the calibration adds to a part's tier, in eighths.
static int mean_offset(const qkv_model *model, const qkv_calibration *calibration, qkv_calibration_part part) {
  const uint32_t heads = model->layers * model->kv_heads;
  double sum = 0;
  for (uint32_t i = 0; i < heads; i++) {
    sum += qkv_calibration_tier_offset(calibration, i / model->kv_heads, i % model->kv_heads, part);
  }
  return (int)lround(sum / heads);
}

// A budgeted tier with a head's share of what the calibration gives to some and takes from others; between keys and
// values, too, unless the policy tells them apart.
static uint8_t head_tier(const qkv_coding *coding, uint32_t layer, uint32_t head, qkv_calibration_part part,
                         uint8_t budget) {
  const int least = budget < TIER_LEAST ? budget : TIER_LEAST;
  const int shared = coding->policy.bits_k == coding->policy.bits_v ? 0 : coding->mean_offsets[part];
  const int offset = qkv_calibration_tier_offset(coding->calibration, layer, head, part) - shared;
  int tier = budget + (int)qkv_bit_faded(offset, (double)budget / QKV_TIER_BIT);
  if (tier < least) tier = least;
  return (uint8_t)(tier > QKV_TIER_MAX ? QKV_TIER_MAX : tier);
}

static qkv_head_coder calibrated_head(const qkv_coding *coding, const qkv_coder *coder, uint32_t head) {
  const qkv_calibration *calibration = coding->calibration;
  const uint32_t layer = coder->layer;
  const qkv_calibration_part key_part = coder->frame == QKV_FRAME_ARCHIVE ? QKV_PART_K_ARCHIVE : QKV_PART_K_ATTEND;
  const qkv_transform *k = qkv_calibration_transform(calibration, layer, head, key_part);
  const qkv_transform *v = qkv_calibration_transform(calibration, layer, head, QKV_PART_V);
  float least = 0;
  const float *heavy = qkv_calibration_heavy(calibration, layer, head, &least);
  return (qkv_head_coder){.transforms = {k, v},
                          .schedules = {k->schedule, v->schedule},
                          .tiers = {head_tier(coding, layer, head, key_part, coder->tier_k),
                                    head_tier(coding, layer, head, QKV_PART_V, coder->tier_v)},
                          .heavy = heavy,
                          .heavy_least = least};
}

static qkv_head_coder uniform_head(const qkv_coder *coder) {
  const qkv_transform *k = qkv_transform_uniform(coder->key_dim);
  const qkv_transform *v = qkv_transform_uniform(coder->value_dim);
  return (qkv_head_coder){
      .transforms = {k, v}, .schedules = {k->schedule, v->schedule}, .tiers = {coder->tier_k, coder->tier_v}};
}

static qkv_coder coder_of(const qkv_coding *coding, uint32_t layer) {
  const qkv_model *model = coding->model;
  const qkv_policy policy = qkv_model_policy(model, layer, &coding->policy);
  return (qkv_coder){.codec = policy.codec,
                     .layer = layer,
                     .kv_heads = (uint16_t)model->kv_heads,
                     .key_dim = (uint16_t)model->key_dim,
                     .value_dim = (uint16_t)model->value_dim,
                     .tier_k = budget_of(model, &policy, policy.bits_k),
                     .tier_v = budget_of(model, &policy, policy.bits_v),
                     .frame = frame_of(coding),
                     .calibration = version_of(coding->calibration),
                     .sinks = policy.sink_tokens > 0 ? (uint32_t)policy.sink_tokens : 0,
                     .phases = coding->phases,
                     .low_rank = policy.low_rank,
                     .anchors = {policy.anchor, policy.anchor},
                     .heads = coding->heads + (size_t)layer * model->kv_heads};
}

// What attending keys of the archive frame takes. Heads that are data-free differ in tiers only.
static void make_rebuilds(qkv_coding *coding, size_t heads) {
  if (frame_of(coding) != QKV_FRAME_ARCHIVE) return;
  coding->rebuilds = calloc(heads, sizeof *coding->rebuilds);
  if (coding->rebuilds == NULL) abort();
  for (size_t i = 0; i < heads; i++) {
    qkv_head_coder *head = &coding->heads[i];
    const qkv_head_coder *before = i > 0 ? head - 1 : NULL;
    const bool alike = before != NULL && before->transforms[QKV_K] == head->transforms[QKV_K] &&
                       before->tiers[QKV_K] == head->tiers[QKV_K];
    head->rebuild = alike ? before->rebuild : qkv_rebuild_create(head->transforms[QKV_K], head->tiers[QKV_K]);
    if (!alike) coding->rebuilds[coding->rebuild_count++] = (qkv_rebuild *)head->rebuild;
  }
}

// Squared error of a row that is let pass, in units of what the data-free code has on average at the same bits.
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

static void set_outliers(qkv_coding *coding, const qkv_coder *coder, uint32_t index) {
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
  assert(coding->outlier_steps != NULL);
  const size_t dim = coder->value_dim;
  float *steps = coding->outlier_steps + ((size_t)coder->layer * coder->kv_heads + index) * dim;
  for (size_t c = 0; c < dim; c++) steps[c] = 1 / sqrtf(values->weights[c]);
  head->outlier_steps = steps;
}

static qkv_coding *create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                          const qkv_calibration *calibration) {
  qkv_coding *coding = calloc(1, sizeof *coding + model->layers * sizeof(qkv_coder));
  if (coding == NULL) abort();
  *coding = (qkv_coding){
      .model = model, .policy = *policy, .purpose = purpose, .calibration = qkv_calibration_ref(calibration)};
  for (int part = 0; part < QKV_CALIBRATION_PARTS && calibration != NULL; part++) {
    coding->mean_offsets[part] = mean_offset(model, calibration, (qkv_calibration_part)part);
  }
  if (model->rope.theta != 0) coding->phases = qkv_phases_create(&model->rope);
  coding->heads = calloc((size_t)model->layers * model->kv_heads, sizeof *coding->heads);
  if (calibration != NULL) {
    coding->outlier_steps = calloc((size_t)model->layers * model->kv_heads * model->value_dim, sizeof(float));
  }
  if (coding->heads == NULL || (calibration != NULL && coding->outlier_steps == NULL)) abort();
  for (uint32_t layer = 0; layer < model->layers; layer++) {
    qkv_head_coder *heads = coding->heads + (size_t)layer * model->kv_heads;
    const qkv_coder *coder = &coding->layers[layer];
    coding->layers[layer] = coder_of(coding, layer);
    for (uint32_t head = 0; head < model->kv_heads; head++) {
      heads[head] = calibration != NULL ? calibrated_head(coding, coder, head) : uniform_head(coder);
      heads[head].query_limit = qkvi_query_limit(heads[head].transforms[QKV_K], heads[head].tiers[QKV_K]);
      heads[head].weight_bytes = (uint8_t)qkvi_weight_bytes(heads[head].transforms[QKV_V], heads[head].tiers[QKV_V]);
      set_outliers(coding, coder, head);
    }
  }
  make_rebuilds(coding, (size_t)model->layers * model->kv_heads);
  return coding;
}

static uint64_t bytes_of(const qkv_coding *coding) {
  // Frequency, turns of pages, cosines and sines of slots (twice) and of waves, turns of half pages, middles and
  // spans.
  const size_t floats = 2 * (2 * QKV_PAGE_TOKENS + QKV_WAVE_SLOTS + 3 * QKV_PHASES_PAGES + QKV_PHASES_SPANS);
  const size_t pair = sizeof(double) * (1 + 2 * QKV_PHASES_PAGES) + floats * sizeof(float);
  const size_t layers = coding->model->layers;
  const size_t phases = coding->phases != NULL ? coding->model->rope.width / 2 * pair : 0;
  uint64_t rebuilds = 0;
  for (size_t i = 0; i < coding->rebuild_count; i++) rebuilds += coding->rebuilds[i]->bytes;
  const size_t steps = coding->outlier_steps != NULL ? coding->model->value_dim * sizeof(float) : 0;
  return sizeof *coding + layers * (sizeof(qkv_coder) + coding->model->kv_heads * (sizeof(qkv_head_coder) + steps)) +
         phases + rebuilds;
}

uint64_t qkv_coding_bytes_held(void) {
  (void)pthread_mutex_lock(&lock);
  const uint64_t bytes = held;
  (void)pthread_mutex_unlock(&lock);
  return bytes;
}

bool qkv_coding_has(const qkv_coding *coding, const qkv_coder *coder) {
  return coder >= coding->layers && coder < coding->layers + coding->model->layers;
}

qkv_coding *qkv_coding_get(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                           const qkv_calibration *calibration) {
  // What coders have nothing of does not tell codings apart.
  qkv_policy key = *policy;
  key.recent_window = 0;
  key.learn_said = key.learn = false;
  (void)pthread_mutex_lock(&lock);
  qkv_coding *coding = codings;
  while (coding != NULL && !same(coding, model, &key, purpose, calibration)) coding = coding->next;
  if (coding == NULL) {
    coding = create(model, &key, purpose, calibration);
    coding->next = codings;
    codings = coding;
    held += bytes_of(coding);
  }
  (void)atomic_fetch_add_explicit(&coding->references, 1, memory_order_relaxed);
  (void)pthread_mutex_unlock(&lock);
  return coding;
}

qkv_coding *qkv_coding_ref(qkv_coding *coding) {
  const uint64_t before = atomic_fetch_add_explicit(&coding->references, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
  return coding;
}

static void take_out(const qkv_coding *coding) {
  held -= bytes_of(coding);
  qkv_coding **at = &codings;
  while (*at != coding) at = &(*at)->next;
  *at = coding->next;
}

void qkv_coding_unref(qkv_coding **coding) {
  qkv_coding *left = *coding;
  if (left == NULL) return;
  *coding = NULL;
  (void)pthread_mutex_lock(&lock);
  const bool last = atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) == 1;
  if (last) take_out(left);
  (void)pthread_mutex_unlock(&lock);
  if (!last) return;
  qkv_phases_destroy(&left->phases);
  qkv_calibration_unref(&left->calibration);
  for (size_t i = 0; i < left->rebuild_count; i++) qkv_rebuild_destroy(&left->rebuilds[i]);
  free(left->rebuilds);
  free(left->outlier_steps);
  free(left->heads);
  free(left);
}

const qkv_coder *qkv_coding_layer(const qkv_coding *coding, uint32_t layer) {
  assert(layer < coding->model->layers);
  return &coding->layers[layer];
}

const qkv_calibration *qkv_coding_calibration(const qkv_coding *coding) {
  return coding->calibration;
}
