#include "client/bench/share_attend.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench/pages.h"
#include "engine/kernel/kernel.h"

enum { OWN_TOKENS = 64 };

// The same sessions twice: forks of one session, and sessions that share nothing.
typedef struct pairs {
  qkv_bench_pages apart;
  qkv_layer *forks;      // [sessions] of the first one
  qkv_attend *requests;  // [sessions], of forks
  float *out, *lse;
  size_t out_count, lse_count;
} pairs;

static void *array(size_t count, size_t bytes) {
  void *made = calloc(count, bytes);
  if (made == NULL) abort();
  return made;
}

static int make_forks(pairs *t, uint64_t shared) {
  const size_t sessions = t->apart.sessions, rows = t->apart.model.q_heads, dim = t->apart.model.value_dim;
  qkv_error error = {0};
  t->forks = array(sessions, sizeof *t->forks);
  t->requests = array(sessions, sizeof *t->requests);
  t->out_count = sessions * rows * dim;
  t->lse_count = sessions * rows;
  t->out = array(t->out_count, sizeof *t->out);
  t->lse = array(t->lse_count, sizeof *t->lse);
  for (size_t i = 0; i < sessions; i++) {
    qkv_layer_init(&t->forks[i], &t->apart.layers[0].config, t->apart.layers[0].coder);
    qkv_layer_fork(&t->forks[i], &t->apart.layers[0], shared);
    if (qkv_bench_pages_append(&t->apart, &t->forks[i], shared + OWN_TOKENS, &error) != QKV_OK)
      return qkv_program_failed("%s", error.text);
    t->requests[i] = t->apart.requests[i];
    t->requests[i].layer = &t->forks[i];
    t->requests[i].out = t->out + i * rows * dim;
    t->requests[i].lse = t->lse + i * rows;
  }
  return 0;
}

static int make(const qkv_bench_settings *settings, int64_t group, pairs *t) {
  qkv_bench_settings each = {.tokens = settings->shared_tokens + OWN_TOKENS,
                             .sessions = settings->sessions,
                             .dim = settings->dim,
                             .kv_heads = settings->kv_heads,
                             .q_heads = settings->kv_heads * group,
                             .q_len = 1,
                             .code_k = settings->code_k,
                             .frame = "plain",
                             .anchor = "none",
                             .order = "random"};
  *t = (pairs){0};
  const int status = qkv_bench_pages_init(&each, &t->apart);
  return status ? status : make_forks(t, (uint64_t)settings->shared_tokens);
}

static void clear(pairs *t) {
  for (size_t i = 0; i < t->apart.sessions && t->forks != NULL; i++) {
    if (t->forks[i].config.model != NULL) qkv_layer_deinit(&t->forks[i]);
  }
  free(t->forks);
  free(t->requests);
  free(t->out);
  free(t->lse);
  qkv_bench_pages_deinit(&t->apart);
}

static void attend(qkv_pool *pool, const qkv_attend *requests, size_t count, qkv_samples *us) {
  const double begin = qkv_bench_now();
  qkv_attend_run(pool, requests, count);
  qkv_samples_add(us, 1e6 * (qkv_bench_now() - begin));
}

static void measure(qkv_pool *pool, int64_t repeats, const pairs *t, double *us_shared, double *us_apart) {
  qkv_samples shared = {0}, apart = {0};
  for (int64_t i = -1; i < repeats; i++) {
    if (i == 0) qkv_samples_clear(&shared), qkv_samples_clear(&apart);  // the first one warms up
    attend(pool, t->apart.requests, t->apart.sessions, &apart);
    attend(pool, t->requests, t->apart.sessions, &shared);
  }
  assert(memcmp(t->out, t->apart.out, t->out_count * sizeof *t->out) == 0);
  assert(memcmp(t->lse, t->apart.lse, t->lse_count * sizeof *t->lse) == 0);
  *us_shared = qkv_samples_quantile(&shared, 0.5);
  *us_apart = qkv_samples_quantile(&apart, 0.5);
  qkv_samples_free(&shared);
  qkv_samples_free(&apart);
}

int qkv_bench_share_attend(const qkv_bench_settings *settings, qkv_bench_shared_attend *result) {
  static const int64_t groups[] = {1, 4};
  qkv_error error = {0};
  qkv_pool *pool = NULL;
  int status = 0;
  if (settings->shared_tokens % QKV_BENCH_ROWS != 0)
    return qkv_program_misused("--shared-tokens is %lld, allowed are multiples of %d",
                               (long long)settings->shared_tokens, QKV_BENCH_ROWS);
  if (qkv_pool_create((size_t)settings->threads - 1, 1, &pool, &error) != QKV_OK)
    return qkv_program_failed("%s", error.text);
  for (size_t g = 0; g < 2 && !status; g++) {
    pairs t;
    status = make(settings, groups[g], &t);
    if (!status) measure(pool, settings->repeats, &t, &result->groups[g].us_shared, &result->groups[g].us_apart);
    clear(&t);
  }
  result->kernels = qkv_kernels_get()->name;
  qkv_pool_destroy(&pool);
  return status;
}

void qkv_bench_share_attend_report(const qkv_bench_shared_attend *result, json_t *object) {
  json_t *fields =
      json_pack("{s:s, s:f, s:f, s:f, s:f, s:f, s:f}", "kernels", result->kernels, "attend_ratio_g1",
                result->groups[0].us_shared / result->groups[0].us_apart, "attend_ratio_g4",
                result->groups[1].us_shared / result->groups[1].us_apart, "attend_us_g1", result->groups[0].us_shared,
                "attend_apart_us_g1", result->groups[0].us_apart, "attend_us_g4", result->groups[1].us_shared,
                "attend_apart_us_g4", result->groups[1].us_apart);
  json_object_update(object, fields);
  json_decref(fields);
}
