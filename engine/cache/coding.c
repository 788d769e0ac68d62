#include "engine/cache/coding.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include <xxhash.h>

// What one codec made for the layers that it codes.
typedef struct coders_of {
  const qkv_codec *codec;
  void *made;
} coders_of;

struct qkv_coding {
  _Atomic uint64_t references;  // from 0 to 1 and back only under the lock
  const qkv_model *model;
  qkv_policy policy;
  qkv_purpose purpose;
  const qkv_calibration *calibration;
  uint64_t bytes;
  coders_of *made;
  size_t made_count;
  qkv_coding *next;           // of the same chain
  qkv_coding *another;        // with a calibration: of the same chain of calibrations
  const qkv_coder *layers[];  // [model->layers]
};

// Those in use, and the memory of all of them.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
enum { CHAINS = 4096 };
static qkv_coding *codings[CHAINS];          // by what `same` compares
static qkv_coding *of_calibrations[CHAINS];  // by model and version
static uint64_t held;

static uint32_t version_of(const qkv_calibration *calibration) {
  return calibration != NULL ? qkv_calibration_version(calibration) : 0;
}

static bool same(const qkv_coding *coding, const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                 const qkv_calibration *calibration) {
  return coding->model == model && version_of(coding->calibration) == version_of(calibration) &&
         coding->purpose == purpose && qkv_policy_equal(&coding->policy, policy);
}

static qkv_coding **chain_of(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                             const qkv_calibration *calibration) {
  const struct {
    const void *model;
    uint64_t policy;
    uint32_t purpose, version;
  } key = {model, qkv_policy_hash(policy), (uint32_t)purpose, version_of(calibration)};
  return &codings[XXH3_64bits(&key, sizeof key) % CHAINS];
}

static qkv_coding **chain_of_calibration(const qkv_model *model, uint32_t version) {
  const struct {
    const void *model;
    uint64_t version;
  } key = {model, version};
  return &of_calibrations[XXH3_64bits(&key, sizeof key) % CHAINS];
}

static bool has_codec(const qkv_coding *coding, const qkv_codec *codec) {
  for (size_t i = 0; i < coding->made_count; i++) {
    if (coding->made[i].codec->create == codec->create) return true;
  }
  return false;
}

// Each codec that a layer has, or codecs that have one way to make coders, make those of all their layers at once,
// which may share what is large.
static void make_coders(qkv_coding *coding, const qkv_coder_spec *spec) {
  coding->made = calloc(spec->layers, sizeof *coding->made);
  if (coding->made == NULL) abort();
  for (uint32_t layer = 0; layer < spec->layers; layer++) {
    const qkv_codec *codec = spec->policies[layer].codec;
    if (has_codec(coding, codec)) continue;
    coding->made[coding->made_count++] = (coders_of){codec, codec->create(spec, coding->layers, &coding->bytes)};
  }
}

static qkv_coding *create(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                          const qkv_calibration *calibration) {
  qkv_coding *coding = calloc(1, sizeof *coding + model->layers * sizeof(qkv_coder *));
  qkv_policy *policies = calloc(model->layers, sizeof *policies);
  if (coding == NULL || policies == NULL) abort();
  *coding = (qkv_coding){.model = model,
                         .policy = *policy,
                         .purpose = purpose,
                         .calibration = qkv_calibration_ref(calibration),
                         .bytes = sizeof *coding + model->layers * sizeof(qkv_coder *)};
  for (uint32_t layer = 0; layer < model->layers; layer++) policies[layer] = qkv_model_policy(model, layer, policy);
  const qkv_coder_spec spec = qkv_model_coder_spec(model, policies, purpose, calibration);
  make_coders(coding, &spec);
  free(policies);
  return coding;
}

uint64_t qkv_coding_cost(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                         const qkv_calibration *calibration) {
  const uint64_t pointers = model->layers * sizeof(qkv_coder *);
  uint64_t bytes = sizeof(qkv_coding) + pointers + model->layers * sizeof(coders_of);
  qkv_policy *policies = calloc(model->layers, sizeof *policies);
  if (policies == NULL) abort();
  for (uint32_t layer = 0; layer < model->layers; layer++) policies[layer] = qkv_model_policy(model, layer, policy);
  const qkv_coder_spec spec = qkv_model_coder_spec(model, policies, purpose, calibration);
  for (uint32_t layer = 0; layer < spec.layers; layer++) {
    uint32_t before = 0;
    while (policies[before].codec->create != policies[layer].codec->create) before++;
    if (before == layer) bytes += policies[layer].codec->cost(&spec);
  }
  free(policies);
  return bytes;
}

uint64_t qkv_coding_bytes_held(void) {
  (void)pthread_mutex_lock(&lock);
  const uint64_t bytes = held;
  (void)pthread_mutex_unlock(&lock);
  return bytes;
}

const qkv_calibration *qkv_coding_find_calibration(const qkv_model *model, uint32_t version) {
  (void)pthread_mutex_lock(&lock);
  const qkv_coding *coding = *chain_of_calibration(model, version);
  while (coding != NULL && (coding->model != model || version_of(coding->calibration) != version)) {
    coding = coding->another;
  }
  const qkv_calibration *found = coding == NULL ? NULL : qkv_calibration_ref(coding->calibration);
  (void)pthread_mutex_unlock(&lock);
  return found;
}

bool qkv_coding_has(const qkv_coding *coding, const qkv_coder *coder) {
  return coder->layer < coding->model->layers && coding->layers[coder->layer] == coder;
}

// Whether any layer's codec does something with a calibration.
static bool is_calibrated(const qkv_model *model, const qkv_policy *policy) {
  bool any = policy->codec->calibrated;
  for (uint32_t i = 0; i < model->override_count; i++) {
    const qkv_codec *codec = model->overrides[i].policy.codec;
    any |= codec != NULL && codec->calibrated;
  }
  return any;
}

// A coding without references.
static void destroy(qkv_coding *coding) {
  for (size_t i = 0; i < coding->made_count; i++) coding->made[i].codec->destroy(coding->made[i].made);
  free(coding->made);
  qkv_calibration_unref(&coding->calibration);
  free(coding);
}

// With a reference for the caller; NULL: there is none, so `made` is taken where it is not NULL. Under the lock.
static qkv_coding *find_or_add(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                               const qkv_calibration *calibration, qkv_coding *made) {
  qkv_coding **chain = chain_of(model, policy, purpose, calibration), *coding = *chain;
  while (coding != NULL && !same(coding, model, policy, purpose, calibration)) coding = coding->next;
  if (coding == NULL && made != NULL) {
    coding = made;
    coding->next = *chain;
    *chain = coding;
    held += coding->bytes;
    if (calibration != NULL) {
      chain = chain_of_calibration(model, version_of(calibration));
      coding->another = *chain;
      *chain = coding;
    }
  }
  if (coding != NULL) (void)atomic_fetch_add_explicit(&coding->references, 1, memory_order_relaxed);
  return coding;
}

// Policy fields that no coder uses do not tell codings apart.
static qkv_policy key_of(const qkv_policy *policy) {
  qkv_policy key = *policy;
  key.recent_window = 0;
  key.learn_said = key.learn = false;
  return key;
}

bool qkv_coding_alike(const qkv_policy *a, const qkv_policy *b) {
  const qkv_policy first = key_of(a), second = key_of(b);
  return qkv_policy_equal(&first, &second);
}

uint64_t qkv_coding_hash(const qkv_policy *policy) {
  const qkv_policy key = key_of(policy);
  return qkv_policy_hash(&key);
}

qkv_coding *qkv_coding_get(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                           const qkv_calibration *calibration) {
  if (!is_calibrated(model, policy)) calibration = NULL;
  const qkv_policy key = key_of(policy);
  (void)pthread_mutex_lock(&lock);
  qkv_coding *coding = find_or_add(model, &key, purpose, calibration, NULL);
  (void)pthread_mutex_unlock(&lock);
  if (coding != NULL) return coding;
  // Without the lock: a codebook may be trained. Of two that are made at once the first one stays.
  qkv_coding *made = create(model, &key, purpose, calibration);
  (void)pthread_mutex_lock(&lock);
  coding = find_or_add(model, &key, purpose, calibration, made);
  (void)pthread_mutex_unlock(&lock);
  if (coding != made) destroy(made);
  return coding;
}

qkv_coding *qkv_coding_ref(qkv_coding *coding) {
  const uint64_t before = atomic_fetch_add_explicit(&coding->references, 1, memory_order_relaxed);
  assert(before > 0);
  (void)before;
  return coding;
}

static void take_out(const qkv_coding *coding) {
  held -= coding->bytes;
  qkv_coding **at = chain_of(coding->model, &coding->policy, coding->purpose, coding->calibration);
  while (*at != coding) at = &(*at)->next;
  *at = coding->next;
  if (coding->calibration == NULL) return;
  at = chain_of_calibration(coding->model, version_of(coding->calibration));
  while (*at != coding) at = &(*at)->another;
  *at = coding->another;
}

void qkv_coding_unref(qkv_coding **coding) {
  qkv_coding *left = *coding;
  if (left == NULL) return;
  *coding = NULL;
  (void)pthread_mutex_lock(&lock);
  const bool last = atomic_fetch_sub_explicit(&left->references, 1, memory_order_acq_rel) == 1;
  if (last) take_out(left);
  (void)pthread_mutex_unlock(&lock);
  if (last) destroy(left);
}

const qkv_coder *qkv_coding_layer(const qkv_coding *coding, uint32_t layer) {
  assert(layer < coding->model->layers);
  return coding->layers[layer];
}

const qkv_calibration *qkv_coding_calibration(const qkv_coding *coding) {
  return coding->calibration;
}
