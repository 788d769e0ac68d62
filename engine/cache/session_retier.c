#include "engine/cache/session_retier.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "engine/base/clock.h"
#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_retier.h"
#include "engine/cache/session_internal.h"
#include "engine/cache/session_state.h"

enum { PIECE = 8 };  // pages that are cut while a layer is locked for reading once

static qkv_status check_layer(const qkv_session *session, uint32_t layer, qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  if (layer < model->layers) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers", layer,
                  model->name, model->layers);
}

// ---- Plans ----

static uint64_t row_bytes(const qkv_layer *layer) {
  const qkv_layer_usage usage = qkv_layer_read_usage(layer);
  return usage.bytes_coded + usage.bytes_overhead;
}

static qkv_status exchange(qkv_session *session, uint32_t layer, qkv_cut *cuts, size_t count,
                           qkv_retier_report *report, qkv_error *error) {
  qkv_layer *written = qkvi_session_change(session, layer);
  const uint64_t before = row_bytes(written);
  qkv_status status = QKV_OK;
  for (size_t i = 0; i < count && status == QKV_OK; i++) {
    status = qkv_layer_exchange(written, &cuts[i], error);
    report->pages += cuts[i].exchanged;
  }
  const uint64_t after = row_bytes(written);
  if (after < before) report->bytes_freed += before - after;
  if (after > before) report->bytes_taken += after - before;
  qkvi_session_changed(session, layer);
  return status;
}

static qkv_status apply_piece(qkv_session *session, uint32_t layer, const qkv_retier_snapshot *snapshot,
                              const qkv_retier_plan *plan, size_t first, qkv_retier_report *report,
                              qkv_error *error) {
  qkv_cut cuts[PIECE];
  size_t count = 0;
  const qkv_layer *read = qkvi_session_look(session, layer);
  for (size_t i = first; i < plan->page_count && i < first + PIECE; i++) {
    const qkv_retier_page *page = &snapshot->pages[plan->pages[i]];
    const qkv_head_tiers *tiers = plan->tiers + i * snapshot->kv_heads;
    if (qkv_layer_cut_early(read, page->index, page->serial)) {
      report->pages_left++;
    } else if (qkv_layer_cut(read, page->index, page->serial, tiers, &cuts[count])) {
      count++;
      qkvi_layer_yield(read);
    }
  }
  qkv_session_read_done(session, layer);
  const qkv_status status = count > 0 ? exchange(session, layer, cuts, count, report, error) : QKV_OK;
  for (size_t i = 0; i < count; i++) qkv_cut_deinit(&cuts[i]);
  return status;
}

static qkv_status apply(qkv_session *session, uint32_t layer, const qkv_retier_snapshot *snapshot,
                        const qkv_retier_plan *plan, qkv_retier_report *report, qkv_error *error) {
  qkv_status status = QKV_OK;
  for (size_t i = 0; i < plan->page_count && status == QKV_OK; i += PIECE) {
    status = apply_piece(session, layer, snapshot, plan, i, report, error);
  }
  report->pages_left += plan->page_count_all - plan->page_count;
  return status;
}

// It has schedules of the session's coders, until qkvi_session_codings_used.
static void take_snapshot(qkv_session *session, uint32_t layer, uint64_t begin, uint64_t end, bool leave_shared,
                          qkv_retier_snapshot *snapshot) {
  qkv_layer_snapshot(qkvi_session_look(session, layer), begin, end, leave_shared, snapshot);
  qkvi_session_use_codings(session);
  qkv_session_read_done(session, layer);
}

static qkv_status retier_layer(qkv_session *session, uint32_t layer, const qkv_retier_policy *policy,
                               bool leave_shared, qkv_retier_report *report, qkv_error *error) {
  qkv_retier_snapshot snapshot;
  qkv_retier_plan plan = {0};
  take_snapshot(session, layer, policy->begin, policy->end, leave_shared, &snapshot);
  qkv_status status = qkv_retier_decide(&snapshot, policy, &plan, error);
  qkvi_session_codings_used(session);
  if (status == QKV_OK) status = apply(session, layer, &snapshot, &plan, report, error);
  qkv_retier_plan_deinit(&plan);
  qkv_retier_snapshot_deinit(&snapshot);
  return status;
}

qkv_status qkv_session_retier(qkv_session *session, const qkv_retier_policy *policy, uint32_t *layer,
                              qkv_retier_report *report, qkv_error *error) {
  QKV_TRY(qkv_retier_policy_check(policy, error));
  const uint32_t next = qkvi_session_next_layer(session);
  if (layer != NULL) *layer = next;
  if (!qkvi_session_has_layers(session)) return QKV_OK;
  return retier_layer(session, next, policy, true, report, error);
}

// ---- On request ----

static qkv_status check_scope(const qkv_session *session, const qkv_retier_scope *scope, double bits,
                              qkv_error *error) {
  for (size_t i = 0; i < scope->layer_count; i++) QKV_TRY(check_layer(session, scope->layers[i], error));
  if (scope->end != 0 && scope->begin > scope->end) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "range.begin is %" PRIu64 ", at most range.end %" PRIu64,
                    scope->begin, scope->end);
  }
  if (bits >= 0 && bits <= QKV_DEPTH_MAX && bits * QKV_TIER_BIT == floor(bits * QKV_TIER_BIT)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "bits is %g, allowed are multiples of %g up to %d", bits,
                  1.0 / QKV_TIER_BIT, QKV_DEPTH_MAX);
}

static size_t layers_of(const qkv_session *session, const qkv_retier_scope *scope) {
  return scope->layer_count > 0 ? scope->layer_count : qkv_session_model(session)->layers;
}

static uint32_t layer_of(const qkv_retier_scope *scope, size_t i) {
  return scope->layer_count > 0 ? scope->layers[i] : (uint32_t)i;
}

static qkv_status demote_evenly(qkv_session *session, uint32_t layer, const qkv_retier_scope *scope, uint8_t tier,
                                qkv_retier_report *report, qkv_error *error) {
  qkv_retier_snapshot snapshot;
  qkv_retier_plan plan;
  take_snapshot(session, layer, scope->begin, scope->end, false, &snapshot);
  qkv_retier_at_most(&snapshot, scope->begin, scope->end, tier, &plan);
  qkvi_session_codings_used(session);
  const qkv_status status = apply(session, layer, &snapshot, &plan, report, error);
  qkv_retier_plan_deinit(&plan);
  qkv_retier_snapshot_deinit(&snapshot);
  return status;
}

// Whether the layer's pages can drop planes; an exact layer has no pages.
static qkv_status check_planes(qkv_session *session, uint32_t layer, qkv_error *error) {
  const qkv_codec *codec = qkvi_session_look(session, layer)->coder->codec;
  qkv_session_read_done(session, layer);
  if (codec->planes != NULL || qkv_codec_is_exact(codec)) return QKV_OK;
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "layer %" PRIu32 ": the codec %s drops no planes", layer,
                  codec->name);
}

qkv_status qkv_session_demote(qkv_session *session, const qkv_retier_scope *scope, double bits, bool even,
                              qkv_retier_report *report, qkv_error *error) {
  QKV_TRY(check_scope(session, scope, bits, error));
  if (bits == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "bits is 0, at least %g", 1.0 / QKV_TIER_BIT);
  if (qkvi_session_is_new(session)) return QKV_OK;
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  for (size_t i = 0; i < layers_of(session, scope); i++) QKV_TRY(check_planes(session, layer_of(scope, i), error));
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  policy.bits = bits;
  policy.begin = scope->begin;
  policy.end = scope->end;
  policy.hysteresis = 0;
  policy.tier_least = QKV_RETIER_LEAST_AUTO;
  for (size_t i = 0; i < layers_of(session, scope); i++) {
    const uint32_t layer = layer_of(scope, i);
    QKV_TRY(even ? demote_evenly(session, layer, scope, (uint8_t)(bits * QKV_TIER_BIT), report, error)
                 : retier_layer(session, layer, &policy, false, report, error));
  }
  return QKV_OK;
}

static qkv_status promote_layer(qkv_session *session, uint32_t layer, const qkv_retier_scope *scope, uint8_t tier,
                                bool only_check, qkv_retier_report *report, qkv_error *error) {
  qkv_retier_snapshot snapshot;
  qkv_retier_plan plan = {0};
  qkv_error inner = {0};
  const bool lowered = qkv_layer_lowered(qkvi_session_look(session, layer), scope->begin, scope->end);
  qkv_session_read_done(session, layer);
  if (!lowered) return QKV_OK;
  take_snapshot(session, layer, scope->begin, scope->end, false, &snapshot);
  qkv_status status = qkv_retier_at_least(&snapshot, scope->begin, scope->end, tier, &plan, &inner);
  qkvi_session_codings_used(session);
  if (status != QKV_OK) qkv_fail(error, status, "layer %" PRIu32 ": %s", layer, inner.text);
  if (status == QKV_OK && !only_check) status = apply(session, layer, &snapshot, &plan, report, error);
  qkv_retier_plan_deinit(&plan);
  qkv_retier_snapshot_deinit(&snapshot);
  return status;
}

qkv_status qkv_session_promote(qkv_session *session, const qkv_retier_scope *scope, double bits,
                               qkv_retier_report *report, qkv_error *error) {
  QKV_TRY(check_scope(session, scope, bits, error));
  if (qkvi_session_is_new(session)) return QKV_OK;
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  const uint8_t tier = bits == 0 ? QKV_TIER_MAX : (uint8_t)(bits * QKV_TIER_BIT);
  for (int pass = 0; pass < 2; pass++) {
    for (size_t i = 0; i < layers_of(session, scope); i++) {
      QKV_TRY(promote_layer(session, layer_of(scope, i), scope, tier, pass == 0, report, error));
    }
  }
  return QKV_OK;
}

// ---- What is known ----

void qkv_attention_stats_deinit(qkv_attention_stats *stats) {
  free(stats->ema);
  free(stats->bits);
  free(stats->places);
  *stats = (qkv_attention_stats){0};
}

static void add_token(qkv_attention_stats *stats, uint32_t head, uint64_t position, float ema, float bits) {
  const size_t at = head * stats->buckets + (size_t)((position - stats->position) / stats->tokens_per_bucket);
  stats->ema[at] += ema;
  stats->bits[at] += bits;
}

static void add_place(qkv_attention_stats *stats, uint64_t position, qkv_place place) {
  const size_t at = (size_t)((position - stats->position) / stats->tokens_per_bucket);
  stats->places[(size_t)place * stats->buckets + at] += 1;
}

static bool is_on_device(const qkv_layer *layer, size_t range, size_t index, const qkv_page_entry *entry) {
  qkv_device *device = layer->config.device;
  size_t begin, end;
  if (device == NULL) return false;
  qkv_layer_range(layer, range, &begin, &end);
  return device->has(device, layer->ranges[range].range, (uint32_t)(index - begin), entry->serial);
}

static qkv_place place_of(const qkv_layer *layer, size_t index, const qkv_page_entry *entry) {
  if (entry->page == NULL) return QKV_PLACE_SSD;
  const size_t range = qkv_layer_range_of(layer, index);
  const qkv_range_slot *slot = &layer->ranges[range];
  if (is_on_device(layer, range, index, entry)) return QKV_PLACE_GPU;
  // One that is on its way to the SSD is held for that, too.
  const bool alone = qkvi_image_is_sole(entry->page_holders) ||
                     (qkvi_layer_record_state(layer, entry) == QKV_RECORD_WAITING && *entry->page_holders == 2);
  const bool shared = qkvi_range_is_shared(slot->range) || !alone;
  return shared ? QKV_PLACE_SHARED : QKV_PLACE_MEMORY;
}

// Code bits a coordinate of the keys and values of a group; 0 where they are not in memory.
static float group_bits(const qkv_model *model, const qkv_page_entry *entry, const qkv_head_tiers *tiers,
                        uint16_t head, size_t group) {
  if (entry->page == NULL) return 0;
  const qkv_codec *codec = entry->coder->codec;
  const float coordinates = (float)(model->key_dim + model->value_dim);
  // Without planes all rows have the same.
  if (codec->planes == NULL)
    return (float)entry->bytes * 8 / ((float)(QKV_PAGE_TOKENS * model->kv_heads) * coordinates);
  const uint16_t *bytes_k = codec->planes->group_bytes(entry->coder, head, QKV_K);
  const uint16_t *bytes_v = codec->planes->group_bytes(entry->coder, head, QKV_V);
  const size_t bytes = bytes_k[tiers[head].tiers[QKV_K][group]] + bytes_v[tiers[head].tiers[QKV_V][group]];
  return (float)(bytes * 8) / (QKV_GROUP_TOKENS * coordinates);
}

static void add_page(const qkv_layer *layer, size_t index, qkv_attention_stats *stats) {
  const qkv_model *model = layer->config.model;
  const qkv_page_entry peeked = qkvi_layer_peek(layer, index), *entry = &peeked;
  const qkv_ema *ema = qkv_layer_ema(layer, index);
  const qkv_codec_planes *planes = entry->coder->codec->planes;
  qkv_head_tiers *tiers = calloc(model->kv_heads, sizeof *tiers);
  if (tiers == NULL) abort();
  const qkv_place place = place_of(layer, index, entry);
  for (uint32_t t = 0; t < entry->tokens; t++) add_place(stats, entry->position + t, place);
  if (entry->page != NULL && planes != NULL) planes->tiers(entry->page, tiers);
  for (uint16_t head = 0; head < model->kv_heads; head++) {
    float attention[QKV_PAGE_TOKENS] = {0};
    if (ema != NULL) qkv_ema_read(ema, layer->clock, head, stats->queries, attention);
    for (uint32_t t = 0; t < entry->tokens; t++) {
      const float bits = group_bits(model, entry, tiers, head, t / QKV_GROUP_TOKENS);
      add_token(stats, head, entry->position + t, attention[t], bits);
    }
  }
  free(tiers);
}

static float bucket_tokens(const qkv_attention_stats *stats, size_t bucket) {
  const uint64_t rest = stats->tokens - bucket * stats->tokens_per_bucket;
  return (float)(rest < stats->tokens_per_bucket ? rest : stats->tokens_per_bucket);
}

static void fill_stats(const qkv_layer *layer, qkv_attention_stats *stats) {
  const qkv_model *model = layer->config.model;
  for (size_t i = 0; i < layer->page_count; i++) add_page(layer, i, stats);
  for (uint64_t position = layer->sealed; position < layer->length; position++) {
    add_place(stats, position, QKV_PLACE_EXACT);
    for (uint32_t head = 0; head < model->kv_heads; head++) {
      add_token(stats, head, position, 0, (float)(8 * qkv_dtype_size(model->dtype)));
    }
  }
  for (size_t i = 0; i < stats->kv_heads * stats->buckets; i++) {
    stats->ema[i] /= bucket_tokens(stats, i % stats->buckets);
    stats->bits[i] /= bucket_tokens(stats, i % stats->buckets);
  }
  for (size_t i = 0; i < QKV_PLACES * stats->buckets; i++)
    stats->places[i] /= bucket_tokens(stats, i % stats->buckets);
}

static void shape_stats(const qkv_layer *layer, size_t buckets_max, qkv_attention_stats *stats) {
  const uint64_t tokens = layer->length - layer->config.first_position;
  const uint64_t most = buckets_max == 0 || buckets_max > tokens ? tokens : buckets_max;
  *stats = (qkv_attention_stats){.counted = layer->clock != NULL,
                                 .queries = layer->clock == NULL ? 0 : qkv_ema_clock_now(layer->clock),
                                 .position = layer->config.first_position,
                                 .tokens = tokens,
                                 .tokens_per_bucket = tokens == 0 ? 1 : (tokens + most - 1) / most,
                                 .kv_heads = layer->config.model->kv_heads};
  stats->buckets = (size_t)((tokens + stats->tokens_per_bucket - 1) / stats->tokens_per_bucket);
  stats->ema = calloc(stats->kv_heads * stats->buckets + 1, sizeof *stats->ema);
  stats->bits = calloc(stats->kv_heads * stats->buckets + 1, sizeof *stats->bits);
  stats->places = calloc(QKV_PLACES * stats->buckets + 1, sizeof *stats->places);
  if (stats->ema == NULL || stats->bits == NULL || stats->places == NULL) abort();
}

qkv_status qkv_session_read_attention(qkv_session *session, uint32_t layer, size_t buckets_max,
                                      qkv_attention_stats *stats, qkv_error *error) {
  QKV_TRY(check_layer(session, layer, error));
  QKV_TRY(qkvi_session_make_layers(session, NULL, error));
  const qkv_layer *read = qkvi_session_look(session, layer);
  shape_stats(read, buckets_max, stats);
  fill_stats(read, stats);
  qkv_session_read_done(session, layer);
  return QKV_OK;
}

// ---- In the background ----

void qkv_session_tiers_looked(qkv_session *session) {
  session_working *working = qkvi_working(session);
  if (working != NULL) atomic_store(&working->tiers.looked_ms, qkv_now_ms());
}

// A use meanwhile stands (qkv_session_touch).
static void mark(qkv_session *session, _Atomic bool *what, qkv_recency_list list, int64_t used_ms) {
  atomic_store(what, true);
  if (atomic_load(&session->last_used_ms) != used_ms) atomic_store(what, false);
  qkv_recency_note(session->kind->config.recency, list, session);
}

void qkv_session_tiers_settled(qkv_session *session, int64_t used_ms) {
  session_working *working = qkvi_working(session);
  if (working != NULL) mark(session, &working->tiers.settled, QKV_RECENCY_AIMED, used_ms);
}

void qkv_session_tiers_lowest(qkv_session *session, int64_t used_ms) {
  session_working *working = qkvi_working(session);
  if (working != NULL) mark(session, &working->tiers.lowest, QKV_RECENCY_DEMOTABLE, used_ms);
}
