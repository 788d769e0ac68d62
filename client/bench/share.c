// qkv-bench share: what prefixes cost that sessions share: finding them, forking (forks.h), and attending over them
// (share_attend.h).
//
// An index of --pages pages, of sessions of --tokens token ids each, which grew concurrently in runs of random
// lengths, so that neither nodes nor buckets lie in order. Prompts are matched in full, by half and not at all; their
// ids are in the processor's cache, as those of a request that was just parsed, the index is not.
#include <stdio.h>
#include <stdlib.h>

#include "client/bench/bench.h"
#include "client/bench/forks.h"
#include "client/bench/pages.h"
#include "client/bench/share_attend.h"
#include "engine/cache/prefix_index.h"

enum { RUN_MAX = 64, FOUND_MAX = 16 };

static const qkv_option options[] = {
    {"pages", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, pages), "1000000", 1, 1 << 24, "N",
     "pages of 64 token ids that are indexed"},
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "100000", 64, 1 << 24, "N",
     "token ids of a session, and of a prompt"},
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "301", 1, 100000, "N",
     "matches of each kind"},
    {"sessions", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, sessions), "8", 2, 1024, "N",
     "sessions that one call attends"},
    {"shared-tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, shared_tokens), "32768", 4096, 1048576, "N",
     "tokens that they share, a multiple of 4096; each has 64 of its own"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 8, 1024, "N",
     "width of their rows, a multiple of 8"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 128, "N", "KV heads"},
    {"bits", QKV_OPTION_REAL, offsetof(qkv_bench_settings, code_k), "4", 0, 8, "BITS",
     "code bits per coordinate, a multiple of 0.125"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "1", 1, 256, "N", "threads that attend"},
    {"cpu-mask", QKV_OPTION_LIST, offsetof(qkv_bench_settings, cpu_mask), NULL, 0, 0, "LIST",
     "what to use of the processor, as of qkvd"},
    {"repeats", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, repeats), "9", 1, 1000, "N",
     "attends of each kind; medians are reported"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

typedef struct grown {
  qkv_prefix_holder holder;
  qkv_prefix_hash hash;  // of its last page
  uint64_t pages;
} grown;

typedef struct scene {
  qkv_prefix_index *index;
  qkv_prefix_hash root;
  grown *sessions;
  uint64_t session_count, session_pages;
  uint32_t *ids;  // of one session, and a page more
} scene;

static uint64_t next_random(uint64_t *seed) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return *seed >> 33;
}

// Ids of a vocabulary of 128 Ki; those of a page follow from session and page.
static void make_page(uint64_t session, uint64_t page, uint32_t *ids) {
  uint64_t seed = (session << 32) + page;
  for (size_t i = 0; i < QKV_PREFIX_PAGE; i++) ids[i] = (uint32_t)next_random(&seed) % 131072;
}

static void make_prompt(const scene *s, uint64_t session, uint64_t pages) {
  for (uint64_t page = 0; page < pages; page++) make_page(session, page, s->ids + page * QKV_PREFIX_PAGE);
}

static void grow(scene *s, uint64_t session, uint64_t pages) {
  uint32_t ids[QKV_PREFIX_PAGE];
  grown *own = &s->sessions[session];
  for (uint64_t i = 0; i < pages && own->pages < s->session_pages; i++) {
    make_page(session, own->pages, ids);
    own->hash = qkv_prefix_next(&own->hash, ids);
    if (!qkv_prefix_index_extend(s->index, own->holder, own->pages, &own->hash, NULL)) abort();
    own->pages++;
  }
}

static void setup(scene *s, const qkv_bench_settings *settings) {
  uint64_t seed = 1;
  s->session_pages = (uint64_t)settings->tokens / QKV_PREFIX_PAGE;
  s->session_count = ((uint64_t)settings->pages + s->session_pages - 1) / s->session_pages;
  const uint64_t pages = s->session_count * s->session_pages + 1;
  s->index = qkv_prefix_index_create(pages, pages);
  s->root = qkv_prefix_root("default", "share", NULL, 0);
  s->sessions = calloc(s->session_count, sizeof *s->sessions);
  s->ids = malloc((size_t)settings->tokens * sizeof *s->ids);
  if (s->sessions == NULL || s->ids == NULL) abort();
  for (uint64_t i = 0; i < s->session_count; i++) {
    s->sessions[i].holder = qkv_prefix_index_attach(s->index, &s->root, (uint32_t)i, NULL);
    s->sessions[i].hash = s->root;
  }
  for (uint64_t i = 0; i < s->session_count * s->session_pages / 16; i++)
    grow(s, next_random(&seed) % s->session_count, 1 + next_random(&seed) % RUN_MAX);
  for (uint64_t i = 0; i < s->session_count; i++) grow(s, i, s->session_pages);
}

static void teardown(scene *s) {
  qkv_prefix_index_destroy(&s->index);
  free(s->sessions);
  free(s->ids);
}

// Matches of prompts that share their first `pages` with some session, in us.
static void time_matches(const scene *s, uint64_t pages, int64_t rounds, qkv_samples *us) {
  uint64_t seed = pages + 1;
  for (int64_t round = 0; round < rounds; round++) {
    qkv_prefix_found found[FOUND_MAX];
    make_prompt(s, s->session_count + (uint64_t)round, s->session_pages);
    make_prompt(s, next_random(&seed) % s->session_count, pages);
    const double begin = qkv_bench_now();
    const size_t count = qkv_prefix_index_match(s->index, &s->root, s->ids, s->session_pages * QKV_PREFIX_PAGE, NULL,
                                                found, FOUND_MAX);
    qkv_samples_add(us, 1e6 * (qkv_bench_now() - begin));
    if ((count > 0 ? found[0].pages : 0) != pages) abort();
  }
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  scene s = {0};
  qkv_samples full = {0}, half = {0}, none = {0};
  qkv_bench_shared_attend attend;
  int status = qkv_bench_take_mask(settings);
  if (!status) status = qkv_bench_share_attend(settings, &attend);
  if (status) return status;
  setup(&s, settings);
  time_matches(&s, s.session_pages, settings->rounds, &full);
  time_matches(&s, s.session_pages / 2, settings->rounds, &half);
  time_matches(&s, 0, settings->rounds, &none);
  const qkv_prefix_stats stats = qkv_prefix_index_read(s.index);
  json_t *result = json_pack(
      "{s:s, s:I, s:I, s:f, s:f, s:f, s:f, s:f}", "bench", "share", "pages", (json_int_t)stats.pages, "tokens",
      (json_int_t)settings->tokens, "match_us_p50", qkv_samples_quantile(&full, 0.5), "match_us_p99",
      qkv_samples_quantile(&full, 0.99), "match_half_us_p50", qkv_samples_quantile(&half, 0.5), "match_none_us_p50",
      qkv_samples_quantile(&none, 0.5), "index_bytes_per_page", (double)stats.bytes / (double)stats.pages);
  qkvi_bench_forks(result);
  qkvi_bench_sunk(result);
  qkv_bench_share_attend_report(&attend, result);
  qkv_bench_report(settings, result);
  qkv_samples_free(&full);
  qkv_samples_free(&half);
  qkv_samples_free(&none);
  teardown(&s);
  return 0;
}

const qkv_command qkvi_bench_share = {
    .name = "share",
    .arguments = "",
    .summary = "prefixes that sessions share: finding them, the index's memory, and attention over them",
    .options = options,
    .option_count = sizeof options / sizeof *options,
    .run = run};
