#include "engine/cache/probation.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/probe.h"
#include "engine/codec/bit_budget.h"
#include "engine/codec/heavy.h"

enum { CANDIDATE, DATA_FREE, SIDES };

#define OUTLIER_BITS 8.4  // a coordinate, with what says which row it is
// Offsets have to take this much off the error: they were found on the rows that they are measured on. SmolLM2's take
// off 20 to 30 %, tinylm's 7; those of traffic with outliers sometimes a 10000th, and cost other rows a bit.
#define OFFSETS_GAIN 0.03

// Squared errors of one head's codes of one kind: by qkv_part, and both together.
typedef struct measured {
  bool tried;
  qkv_calibration_part uses[2];  // what the codes are made with, if it was tried; QKV_CALIBRATION_PARTS: nothing
  double bits[2];                // that offsets are added to; 0: the codec has none
  double parts[2][SIDES], both[SIDES];
  double worst[2][SIDES];  // largest squared error of a row
  double square;           // of the outputs
  bool heavy_pays;         // keeping heavy hitters as outliers
} measured;

typedef struct trial {
  const qkv_probation *what;
  const qkv_model *model;
  measured *all;  // [kinds][layers][kv_heads]
  bool *drop;     // [layers][kv_heads][QKV_CALIBRATION_PARTS]
  bool *forget;   // [layers][kv_heads], heavy hitters
  bool archive_refused;
} trial;

// One layer and one kind at hand.
typedef struct bench {
  const qkv_coder *coders[SIDES];
  qkv_policy policy;  // the layer's
  qkv_purpose purpose;
  const qkv_held *held;
  void *images[SIDES][QKV_HOLDOUT_PAGES];
  float *rows[SIDES][2];  // one head's, by part: [pages][64][dim]
  uint64_t last;          // where the sample's pages end
} bench;

static void *block(size_t bytes) {
  void *made = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  if (made == NULL) abort();
  return made;
}

static measured *measured_at(const trial *all, size_t kind, uint32_t layer, uint32_t head) {
  return &all->all[(kind * all->model->layers + layer) * all->model->kv_heads + head];
}

static size_t dim_of(const qkv_model *model, qkv_part part) {
  return part == QKV_K ? model->key_dim : model->value_dim;
}

qkv_holdout_shape qkv_probation_sample(const qkv_model *model) {
  return (qkv_holdout_shape){.layers = model->layers,
                             .kv_heads = model->kv_heads,
                             .q_heads = model->q_heads,
                             .key_dim = model->key_dim,
                             .value_dim = model->value_dim,
                             .dtype = model->dtype,
                             .rope = model->rope};
}

// ---- Kinds ----

// Bits that the policy's codecs do not have are not set.
static void set_bits(qkv_policy *policy, double bits) {
  const qkv_codec *values = policy->codec_v != NULL ? policy->codec_v : policy->codec;
  if (policy->codec->bits_valid(bits) && values->bits_valid(bits)) policy->bits_k = policy->bits_v = bits;
}

qkv_kind qkv_probation_kind(const qkv_policy *policy, qkv_purpose purpose) {
  qkv_kind kind = {.policy = *policy, .purpose = purpose};
  // Policy fields that no coder uses do not tell kinds apart.
  kind.policy.recent_window = 0;
  kind.policy.learn_said = kind.policy.learn = false;
  const double least = fmin(policy->bits_k, policy->bits_v), most = fmax(policy->bits_k, policy->bits_v);
  if (least >= 1 && most <= 6)
    set_bits(&kind.policy, least + most >= QKV_RUNG_MANY + QKV_RUNG_FEW ? QKV_RUNG_MANY : QKV_RUNG_FEW);
  return kind;
}

void qkv_probation_rungs(const qkv_policy *policy, qkv_kind rungs[QKV_PROBATION_RUNGS]) {
  for (size_t i = 0; i < QKV_PROBATION_RUNGS; i++) {
    rungs[i] = qkv_probation_kind(policy, i % 2 == 0 ? QKV_PURPOSE_ATTEND : QKV_PURPOSE_FETCH);
    set_bits(&rungs[i].policy, i < 2 ? QKV_RUNG_MANY : QKV_RUNG_FEW);
  }
}

// What of a calibration codes of a layer's keys or values are made with.
static qkv_calibration_part used_by(const qkv_model *model, const qkv_policy *policy, qkv_purpose purpose,
                                    qkv_part part) {
  const bool before_rope = policy->codec->part != NULL || purpose == QKV_PURPOSE_FETCH;
  if (!qkv_policy_calibrates(policy, part)) return QKV_CALIBRATION_PARTS;
  if (part == QKV_V) return QKV_PART_V;
  return before_rope && model->rope.theta != 0 ? QKV_PART_K_ARCHIVE : QKV_PART_K_ATTEND;
}

// ---- Measuring ----

// With the coders, the policy and the purpose set.
static void bench_init(bench *made, const trial *all, const qkv_held *held) {
  const qkv_model *model = all->model;
  const size_t rows = (size_t)QKV_PAGE_TOKENS * model->kv_heads;
  made->held = held;
  for (size_t page = 0; page < held->pages; page++) {
    const uint64_t end = held->positions[page] + QKV_PAGE_TOKENS;
    if (end > made->last) made->last = end;
  }
  for (size_t side = 0; side < SIDES; side++) {
    const qkv_coder *coder = made->coders[side];
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      made->rows[side][part] = block(QKV_HOLDOUT_PAGES * QKV_PAGE_TOKENS * dim_of(model, part) * sizeof(float));
    }
    for (size_t page = 0; page < held->pages; page++) {
      made->images[side][page] = block(coder->codec->page_bytes_max(coder));
      (void)coder->codec->encode(coder, held->positions[page], QKV_PAGE_TOKENS, QKV_FP32,
                                 held->k + page * rows * model->key_dim, held->v + page * rows * model->value_dim,
                                 NULL, made->images[side][page]);
    }
  }
}

static void bench_clear(bench *made) {
  for (size_t side = 0; side < SIDES; side++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) free(made->rows[side][part]);
    for (size_t page = 0; page < QKV_HOLDOUT_PAGES; page++) free(made->images[side][page]);
  }
}

static void decode_head(const bench *at, size_t side, uint16_t head, qkv_part part, size_t dim) {
  const qkv_coder *coder = at->coders[side];
  for (size_t page = 0; page < at->held->pages; page++) {
    coder->codec->decode(coder, at->images[side][page], head, part, false,
                         at->rows[side][part] + page * QKV_PAGE_TOKENS * dim);
  }
}

static double worst_row(const float *rows, const float *exact, size_t tokens, size_t stride, size_t dim) {
  double worst = 0;
  for (size_t t = 0; t < tokens; t++) {
    double missed = 0;
    for (size_t i = 0; i < dim; i++) {
      const double difference = (double)rows[t * dim + i] - (double)exact[t * stride + i];
      missed += difference * difference;
    }
    worst = fmax(worst, missed);
  }
  return worst;
}

static qkv_probe *probe_head(const trial *all, const bench *at, uint32_t layer, uint16_t head) {
  const qkv_model *model = all->model;
  const qkv_held *held = at->held;
  const size_t group = model->q_heads / model->kv_heads, each = group * model->key_dim;
  float *queries = block((held->tokens + 1) * each * sizeof *queries);
  for (size_t i = 0; i < held->tokens; i++) {
    const float *from = held->queries + i * model->q_heads * model->key_dim + head * each;
    for (size_t j = 0; j < each; j++) queries[i * each + j] = from[j];
  }
  const qkv_probe_rows rows = {.tokens = held->pages * QKV_PAGE_TOKENS,
                               .key_dim = model->key_dim,
                               .value_dim = model->value_dim,
                               .whole = held->positions[0] == 0 ? QKV_PAGE_TOKENS : 0,
                               .k_stride = (size_t)model->kv_heads * model->key_dim,
                               .v_stride = (size_t)model->kv_heads * model->value_dim,
                               .k = held->k + (size_t)head * model->key_dim,
                               .v = held->v + (size_t)head * model->value_dim};
  const qkv_probe_queries asked = {.tokens = held->tokens,
                                   .group = group,
                                   .rows = queries,
                                   .stands = held->stands,
                                   .last = at->last,
                                   .rope = &model->rope,
                                   .scale = model->scale,
                                   .soft_cap = qkv_model_cap(model, layer)};
  qkv_probe *probe = qkv_probe_create(&rows, &asked);
  free(queries);
  return probe;
}

// Whether heavy hitters' errors would be more than the bytes that they take as outliers make of all errors. Codecs
// without heavy hitters have nothing against them.
static bool heavy_pays(const trial *all, const bench *at, const qkv_probe *probe, uint16_t head) {
  const qkv_model *model = all->model;
  const qkv_held *held = at->held;
  const qkv_coder *coder = at->coders[CANDIDATE];
  if (coder->codec->part != NULL) return true;
  const size_t tokens = held->pages * QKV_PAGE_TOKENS, stride = (size_t)model->kv_heads * model->key_dim;
  bool rows[QKV_HOLDOUT_PAGES * QKV_PAGE_TOKENS];
  size_t count = 0;
  for (size_t page = 0; page < held->pages; page++) {
    const float *keys = held->k + page * QKV_PAGE_TOKENS * stride + (size_t)head * model->key_dim;
    const uint64_t slots =
        qkv_heavy_slots(coder, head, held->positions[page], QKV_PAGE_TOKENS, QKV_FP32, keys, stride * sizeof *keys);
    for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) count += rows[page * QKV_PAGE_TOKENS + t] = (slots >> t & 1) != 0;
  }
  const double bits = OUTLIER_BITS * (double)count / (double)tokens;
  const double share = qkv_probe_share(probe, rows, held->positions[0] == 0 ? qkv_embedded(coder)->sinks : 0);
  return 1 - share < pow(QKV_BIT_FALL, -bits);
}

static void measure_head(const trial *all, const bench *at, uint32_t layer, uint16_t head, measured *out) {
  const qkv_model *model = all->model;
  const size_t tokens = at->held->pages * QKV_PAGE_TOKENS;
  qkv_probe *probe = probe_head(all, at, layer, head);
  *out = (measured){.tried = true};
  out->square = qkv_probe_square(probe);
  out->heavy_pays = heavy_pays(all, at, probe, head);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    out->uses[part] = used_by(model, &at->policy, at->purpose, part);
    if (at->policy.codec->part == NULL) out->bits[part] = part == QKV_K ? at->policy.bits_k : at->policy.bits_v;
  }
  for (size_t side = 0; side < SIDES; side++) {
    float *const *rows = at->rows[side];
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const size_t dim = dim_of(model, part), stride = model->kv_heads * dim;
      const float *exact = (part == QKV_K ? at->held->k : at->held->v) + head * dim;
      decode_head(at, side, head, part, dim);
      out->worst[part][side] = worst_row(rows[part], exact, tokens, stride, dim);
    }
    out->parts[QKV_K][side] = qkv_probe_error(probe, rows[QKV_K], NULL);
    out->parts[QKV_V][side] = qkv_probe_error(probe, NULL, rows[QKV_V]);
    out->both[side] = qkv_probe_error(probe, rows[QKV_K], rows[QKV_V]);
  }
  qkv_probe_destroy(&probe);
}

static qkv_status measure_layer(const trial *all, qkv_coding *const codings[SIDES], size_t kind, uint32_t layer,
                                qkv_error *error) {
  const qkv_probation *what = all->what;
  bench at = {.coders = {qkv_coding_layer(codings[CANDIDATE], layer), qkv_coding_layer(codings[DATA_FREE], layer)},
              .policy = qkv_model_policy(all->model, layer, &what->kinds[kind].policy),
              .purpose = what->kinds[kind].purpose};
  if (!qkv_policy_calibrates(&at.policy, QKV_K)) return QKV_OK;
  qkv_held held;
  what->hold(what->context, layer, true);
  qkv_holdout_copy(what->holdout, layer, &held);
  what->hold(what->context, layer, false);
  const bool gone = held.teaches && held.pages == 0;
  if (held.pages > 0) {
    bench_init(&at, all, &held);
    for (uint16_t head = 0; head < all->model->kv_heads; head++) {
      measure_head(all, &at, layer, head, measured_at(all, kind, layer, head));
    }
    bench_clear(&at);
  }
  qkv_held_clear(&held);
  if (!gone) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "what was held out of layer %" PRIu32 " is gone", layer);
}

static qkv_status measure_kind(const trial *all, const qkv_calibration *candidate, size_t kind, qkv_error *error) {
  const qkv_probation *what = all->what;
  const qkv_kind *as = &what->kinds[kind];
  qkv_policy otherwise = as->policy;
  if (as->otherwise != NULL) otherwise.codec = as->otherwise;
  qkv_coding *codings[SIDES] = {qkv_coding_get(all->model, &as->policy, as->purpose, candidate),
                                qkv_coding_get(all->model, &otherwise, as->purpose, NULL)};
  qkv_status status = QKV_OK;
  for (uint32_t layer = 0; layer < all->model->layers && status == QKV_OK; layer++) {
    if (atomic_load(what->cancelled)) status = qkv_fail(error, QKV_CANCELLED, "it was called off");
    if (status == QKV_OK) status = measure_layer(all, codings, kind, layer, error);
  }
  for (size_t side = 0; side < SIDES; side++) qkv_coding_unref(&codings[side]);
  return status;
}

static qkv_status measure_all(const trial *all, const qkv_calibration *candidate, qkv_error *error) {
  qkv_status status = QKV_OK;
  for (size_t kind = 0; kind < all->what->kind_count && status == QKV_OK; kind++) {
    status = measure_kind(all, candidate, kind, error);
  }
  return status;
}

// ---- Judging ----

static bool uses(const measured *of, qkv_part part) {
  return of->tried && of->uses[part] != QKV_CALIBRATION_PARTS;
}

static bool is_better(const trial *all, const measured *of, qkv_part part) {
  const double error = of->parts[part][CANDIDATE],
               limit = all->what->in_force ? QKV_PROBATION_STAYS : QKV_PROBATION_BETTER;
  return (error < limit * of->parts[part][DATA_FREE] || error < QKV_PROBATION_NOTHING) &&
         of->worst[part][CANDIDATE] <= QKV_PROBATION_WORST * of->worst[part][DATA_FREE];
}

typedef struct worst_part {
  double ratio;  // of squared errors
  char *text;
} worst_part;

static void note_worst(const trial *all, size_t kind, uint32_t layer, uint32_t head, qkv_part part,
                       worst_part *worst) {
  static const char *const names[QKV_CALIBRATION_PARTS] = {"keys (attend)", "keys (archive)", "values"};
  const measured *of = measured_at(all, kind, layer, head);
  const double least = 1e-12, candidate = of->parts[part][CANDIDATE], data_free = of->parts[part][DATA_FREE];
  const qkv_policy *policy = &all->what->kinds[kind].policy;
  const double ratio = (candidate + least) / (data_free + least);
  if (ratio <= worst->ratio) return;
  worst->ratio = ratio;
  (void)snprintf(worst->text, QKV_PROBATION_REASON_MAX,
                 "layer %" PRIu32 ", KV head %" PRIu32 ", %s at %g/%g bits: attention error %.3g, data-free %.3g",
                 layer, head, names[of->uses[part]], policy->bits_k, policy->bits_v, sqrt(candidate),
                 sqrt(data_free));
}

static bool *drop_at(const trial *all, uint32_t layer, uint32_t head) {
  return all->drop + ((size_t)layer * all->model->kv_heads + head) * QKV_CALIBRATION_PARTS;
}

// The archive codec moves bits between heads, so that one head's error with it says little: it is judged over all.
static bool is_archived(const trial *all, size_t kind) {
  return all->what->kinds[kind].otherwise != NULL;
}

// With any kind.
static bool archive_is_worse(const trial *all) {
  const double worse = all->what->in_force ? QKV_PROBATION_STAYS : 1;
  const size_t heads = (size_t)all->model->layers * all->model->kv_heads;
  for (size_t kind = 0; kind < all->what->kind_count; kind++) {
    double candidate = 0, data_free = 0;
    for (size_t i = kind * heads; is_archived(all, kind) && i < (kind + 1) * heads; i++) {
      candidate += all->all[i].tried ? all->all[i].both[CANDIDATE] : 0;
      data_free += all->all[i].tried ? all->all[i].both[DATA_FREE] : 0;
    }
    if (candidate > worse * data_free) return true;
  }
  return false;
}

static void judge_head(const trial *all, uint32_t layer, uint32_t head, worst_part *worst) {
  const double worse = all->what->in_force ? QKV_PROBATION_STAYS : 1;
  bool *drop = drop_at(all, layer, head), *forget = &all->forget[(size_t)layer * all->model->kv_heads + head];
  for (size_t kind = 0; kind < all->what->kind_count; kind++) {
    const measured *of = measured_at(all, kind, layer, head);
    if (is_archived(all, kind)) continue;
    *forget |= of->tried && !of->heavy_pays && !all->what->in_force;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      if (!uses(of, part)) continue;
      drop[of->uses[part]] |= !is_better(all, of, part);
      note_worst(all, kind, layer, head, part, worst);
    }
  }
  for (size_t kind = 0; kind < all->what->kind_count; kind++) {
    const measured *of = measured_at(all, kind, layer, head);
    if (is_archived(all, kind)) continue;
    if (!uses(of, QKV_K) || drop[of->uses[QKV_K]] || !(of->both[CANDIDATE] > worse * of->both[DATA_FREE])) continue;
    if (!uses(of, QKV_V))
      drop[of->uses[QKV_K]] = true;
    else if (!drop[QKV_PART_V])
      drop[of->uses[QKV_K]] = drop[QKV_PART_V] = true;
  }
}

// The root over heads and kinds, of those with the archive codec or of the others; 0: none was tried.
static double root_error(const trial *all, bool archived, size_t side) {
  const size_t heads = (size_t)all->model->layers * all->model->kv_heads;
  double tried = 0, sum = 0;
  for (size_t i = 0; i < all->what->kind_count * heads; i++) {
    if (!all->all[i].tried || is_archived(all, i / heads) != archived) continue;
    tried++;
    sum += all->all[i].both[side];
  }
  return tried > 0 ? sqrt(sum / tried) : 0;
}

// What is left of the candidate, as it was measured.
static void sum_up(trial *all, qkv_verdict *verdict) {
  verdict->error = root_error(all, false, CANDIDATE);
  verdict->data_free = root_error(all, false, DATA_FREE);
  verdict->archive_error = root_error(all, true, CANDIDATE);
  verdict->archive_data_free = root_error(all, true, DATA_FREE);
  all->archive_refused |= archive_is_worse(all);
}

static void count_parts(const trial *all, uint32_t layer, uint32_t head, qkv_verdict *verdict) {
  const bool *drop = drop_at(all, layer, head);
  bool counted[QKV_CALIBRATION_PARTS] = {false};
  for (size_t kind = 0; kind < all->what->kind_count; kind++) {
    const measured *of = measured_at(all, kind, layer, head);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      if (uses(of, part)) counted[of->uses[part]] = true;
    }
  }
  for (size_t part = 0; part < QKV_CALIBRATION_PARTS; part++) {
    verdict->parts += counted[part];
    verdict->dropped += counted[part] && drop[part];
  }
}

static bool any_forgotten(const trial *all) {
  for (size_t i = 0; i < (size_t)all->model->layers * all->model->kv_heads; i++) {
    if (all->forget[i]) return true;
  }
  return false;
}

// What is left of the candidate, whose reference it has, has been measured as it is; NULL: nothing.
static qkv_status trim(const trial *all, qkv_verdict *verdict, const qkv_calibration **candidate,
                       const qkv_calibration **left, qkv_error *error) {
  const qkv_model *model = all->model;
  worst_part worst = {.text = verdict->worst};
  for (uint32_t i = 0; i < model->layers * model->kv_heads; i++) {
    judge_head(all, i / model->kv_heads, i % model->kv_heads, &worst);
    count_parts(all, i / model->kv_heads, i % model->kv_heads, verdict);
  }
  *left = NULL;
  if (verdict->parts == 0) return qkv_fail(error, QKV_FAILED_PRECONDITION, "there are no rows to try it on");
  if (verdict->dropped == verdict->parts) return QKV_OK;
  if (verdict->dropped == 0 && !any_forgotten(all)) {
    *left = *candidate;
    *candidate = NULL;
    return QKV_OK;
  }
  qkv_calibration *trimmed = NULL;
  QKV_TRY(qkv_calibration_adjust(candidate, all->drop, NULL, all->forget, &trimmed, error));
  *left = trimmed;
  return measure_all(all, trimmed, error);
}

// ---- Bits ----

// Mean over layers and kinds of the squared error of a layer's outputs, as a share of their squares.
static double layers_error(const trial *all) {
  const size_t layers = all->what->kind_count * all->model->layers;
  double sum = 0;
  for (size_t i = 0; i < layers; i++) {
    double missed = 0, square = 0;
    if (all->archive_refused && is_archived(all, i / all->model->layers)) continue;
    for (uint32_t h = 0; h < all->model->kv_heads; h++) {
      const measured *of = &all->all[i * all->model->kv_heads + h];
      if (!of->tried) continue;
      missed += of->both[CANDIDATE] * of->square;
      square += of->square;
    }
    sum += square > 0 ? missed / square : 0;
  }
  return layers > 0 ? sum / (double)layers : 0;
}

// A head's part in its layer's error, with one kind.
static double error_in_layer(const trial *all, size_t kind, uint32_t layer, uint32_t head, qkv_part part) {
  double square = 0;
  for (uint32_t h = 0; h < all->model->kv_heads; h++) square += measured_at(all, kind, layer, h)->square;
  const measured *of = measured_at(all, kind, layer, head);
  return of->tried && square > 0 ? of->parts[part][CANDIDATE] * of->square / square : 0;
}

// The mean over kinds of the logarithm, as an error and the bits that it was measured at.
static qkv_bit_part bit_part(const trial *all, qkv_calibration_part part, uint32_t layer, uint32_t head) {
  double sum = 0, bits = 0;
  size_t count = 0;
  const qkv_part kv = part == QKV_PART_V ? QKV_V : QKV_K;
  for (size_t kind = 0; kind < all->what->kind_count; kind++) {
    const measured *of = measured_at(all, kind, layer, head);
    const double error = of->bits[kv] > 0 && of->uses[kv] == part ? error_in_layer(all, kind, layer, head, kv) : 0;
    if (!(error > 0)) continue;
    sum += log(error);
    bits += of->bits[kv];
    count++;
  }
  return count > 0 ? (qkv_bit_part){.error = exp(sum / (double)count), .bits = bits / (double)count}
                   : (qkv_bit_part){0};
}

// One frame's keys and the values share one budget; where keys have two frames, those of the archive get what the
// values have left.
static void budget(const trial *all, qkv_bit_part *keys[2], qkv_bit_part *values) {
  const size_t heads = (size_t)all->model->layers * all->model->kv_heads;
  qkv_bit_part *both = calloc(2 * heads, sizeof *both);
  if (both == NULL) abort();
  bool attends = false;
  double sum = 0;
  for (size_t i = 0; i < heads; i++) attends |= keys[0][i].error > 0;
  qkv_bit_part *first = attends ? keys[0] : keys[1], *second = attends ? keys[1] : keys[0];
  memcpy(both, first, heads * sizeof *both);
  memcpy(both + heads, values, heads * sizeof *both);
  qkv_bit_budget(both, 2 * heads, 0);
  memcpy(first, both, heads * sizeof *both);
  memcpy(values, both + heads, heads * sizeof *both);
  for (size_t i = 0; i < heads; i++) sum += values[i].offset;
  qkv_bit_budget(second, heads, -sum / (double)heads);
  free(both);
}

static void find_offsets(const trial *all, int8_t *offsets) {
  const qkv_model *model = all->model;
  const size_t heads = (size_t)model->layers * model->kv_heads;
  qkv_bit_part *parts = calloc(QKV_CALIBRATION_PARTS * heads, sizeof *parts);
  int8_t *eighths = calloc(heads, sizeof *eighths);
  if (parts == NULL || eighths == NULL) abort();
  for (size_t i = 0; i < heads * QKV_CALIBRATION_PARTS; i++) {
    const size_t part = i / heads, head = i % heads;
    parts[i] = bit_part(all, (qkv_calibration_part)part, (uint32_t)(head / model->kv_heads),
                        (uint32_t)(head % model->kv_heads));
    parts[i].bits += (double)offsets[head * QKV_CALIBRATION_PARTS + part] / QKV_TIER_BIT;
  }
  qkv_bit_part *keys[] = {parts + QKV_PART_K_ATTEND * heads, parts + QKV_PART_K_ARCHIVE * heads};
  budget(all, keys, parts + QKV_PART_V * heads);
  for (size_t part = 0; part < QKV_CALIBRATION_PARTS; part++) {
    qkv_bit_eighths(parts + part * heads, heads, eighths);
    for (size_t i = 0; i < heads; i++) offsets[i * QKV_CALIBRATION_PARTS + part] = eighths[i];
  }
  free(parts);
  free(eighths);
}

// *left, which has been measured as it is, gets bits by what its parts err, unless that gains too little.
static qkv_status spread_bits(trial *all, const qkv_calibration **left, qkv_verdict *verdict, qkv_error *error) {
  const qkv_model *model = all->model;
  const size_t count = (size_t)model->layers * model->kv_heads * QKV_CALIBRATION_PARTS;
  int8_t *before = calloc(count, 2 * sizeof *before), *after = before + count;
  if (before == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    const uint32_t head = (uint32_t)(i / QKV_CALIBRATION_PARTS);
    before[i] = (int8_t)qkv_calibration_tier_offset(*left, head / model->kv_heads, head % model->kv_heads,
                                                    i % QKV_CALIBRATION_PARTS);
  }
  memcpy(after, before, count * sizeof *after);
  find_offsets(all, after);
  const double error_before = layers_error(all);
  qkv_calibration *made = NULL;
  qkv_status status = qkv_calibration_adjust(left, NULL, after, NULL, &made, error);
  *left = made;
  if (status == QKV_OK) status = measure_all(all, made, error);
  if (status == QKV_OK && layers_error(all) < (1 - OFFSETS_GAIN) * error_before) {
    sum_up(all, verdict);
  } else if (status == QKV_OK) {
    status = qkv_calibration_adjust(left, NULL, before, NULL, &made, error);
    *left = made;
  }
  free(before);
  return status;
}

static qkv_status refuse_archive(const qkv_calibration **left, qkv_error *error) {
  qkv_calibration *made = NULL;
  const qkv_status status = qkv_calibration_refuse_archive(left, &made, error);
  *left = made;
  return status;
}

static qkv_status judge(trial *all, qkv_verdict *verdict, const qkv_calibration **accepted, qkv_error *error) {
  const qkv_calibration *candidate = all->what->candidate, *left = NULL;
  const qkv_status status = trim(all, verdict, &candidate, &left, error);
  qkv_calibration_unref(&candidate);
  sum_up(all, verdict);
  verdict->accepted = status == QKV_OK && left != NULL && verdict->error < verdict->data_free;
  if (!verdict->accepted) {
    qkv_calibration_unref(&left);
    return status;
  }
  qkv_status done = all->what->in_force ? QKV_OK : spread_bits(all, &left, verdict, error);
  verdict->archive_refused = done == QKV_OK && all->archive_refused && !qkv_calibration_archive_refused(left);
  if (verdict->archive_refused) done = refuse_archive(&left, error);
  if (done == QKV_OK) {
    *accepted = left;
  } else {
    qkv_calibration_unref(&left);
  }
  return done;
}

qkv_status qkv_probation_try(const qkv_probation *probation, qkv_verdict *verdict, const qkv_calibration **accepted,
                             qkv_error *error) {
  const qkv_model *model = probation->model;
  const size_t heads = (size_t)model->layers * model->kv_heads;
  trial all = {.what = probation, .model = model};
  all.archive_refused = qkv_calibration_archive_refused(probation->candidate);
  *accepted = NULL;
  *verdict = (qkv_verdict){0};
  all.all = calloc(probation->kind_count * heads + 1, sizeof *all.all);
  all.drop = calloc(heads * QKV_CALIBRATION_PARTS, sizeof *all.drop);
  all.forget = calloc(heads, sizeof *all.forget);
  if (all.all == NULL || all.drop == NULL || all.forget == NULL) abort();
  qkv_status status = measure_all(&all, probation->candidate, error);
  if (status == QKV_OK) {
    status = judge(&all, verdict, accepted, error);
  } else {
    const qkv_calibration *candidate = probation->candidate;
    qkv_calibration_unref(&candidate);
  }
  free(all.all);
  free(all.drop);
  free(all.forget);
  return status;
}
