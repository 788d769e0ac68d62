// qkv-bench share-append: a prompt that is appended with its token ids, in this process, by a session that codes it
// and by a second one that takes the first one's pages. Each repeat is of other ids; the two alternate.
#include <stdlib.h>

#include "client/bench/bench.h"
#include "engine/cache/store.h"

#define MODEL "share-append"

static const qkv_option options[] = {
    {"tokens", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, tokens), "4096", 64, 1 << 20, "N",
     "tokens of the prompt"},
    {"dim", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, dim), "128", 16, 512, "N", "key and value dimension"},
    {"kv-heads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, kv_heads), "8", 1, 64, "N", "KV heads"},
    {"repeats", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, repeats), "15", 1, 1000, "N",
     "repeats; medians are reported"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

typedef struct scene {
  const qkv_bench_settings *settings;
  qkv_store *store;
  void *k, *v;  // fp16 rows
  uint32_t *ids;
  uint64_t taken;  // pages
} scene;

static void must(qkv_status status) {
  if (status != QKV_OK) abort();
}

static void setup(scene *s) {
  const qkv_bench_settings *settings = s->settings;
  const size_t row_bytes = (size_t)(settings->tokens * settings->kv_heads * settings->dim) * 2;
  const qkv_store_config config = {.memory_budget = 16ull << 30,
                                   .models_max = 1,
                                   .sessions_max = 2,
                                   .prefixes_max = 1 << 20,
                                   .policy = {.codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED),
                                              .bits_k = 4,
                                              .bits_v = 4,
                                              .recent_window = 64,
                                              .anchor_said = true}};
  const qkv_model model = {.name = MODEL,
                           .layers = 1,
                           .kv_heads = (uint32_t)settings->kv_heads,
                           .q_heads = (uint32_t)settings->kv_heads,
                           .key_dim = (uint32_t)settings->dim,
                           .value_dim = (uint32_t)settings->dim,
                           .dtype = QKV_FP16,
                           .policy = QKV_POLICY_UNSET};
  s->store = qkv_store_create(&config);
  must(qkv_store_register_model(s->store, &model, NULL, NULL));
  s->k = qkv_bench_rows(row_bytes, 1);
  s->v = qkv_bench_rows(row_bytes, 2);
  s->ids = malloc((size_t)settings->tokens * sizeof *s->ids);
  if (s->ids == NULL) abort();
}

static void teardown(scene *s) {
  qkv_store_destroy(&s->store);
  free(s->k);
  free(s->v);
  free(s->ids);
}

// As the daemon appends, in ms.
static double append(scene *s, qkv_session *session) {
  const qkv_bench_settings *settings = s->settings;
  const size_t tokens = (size_t)settings->tokens;
  const int64_t dims[3] = {settings->tokens, settings->kv_heads, settings->dim};
  const size_t bytes = (size_t)(dims[0] * dims[1] * dims[2]) * 2;
  const qkv_segment k_segment = {.data = s->k, .length = bytes}, v_segment = {.data = s->v, .length = bytes};
  const qkv_tensor k = qkv_tensor_dense(QKV_FP16, 3, dims, &k_segment),
                   v = qkv_tensor_dense(QKV_FP16, 3, dims, &v_segment);
  qkv_session_tokens *held = qkv_session_tokens_of(session);
  qkv_append_use use = {.ids = s->ids};
  uint64_t appended, length;
  const double begin = qkv_bench_now();
  uint64_t reserved = qkv_session_tokens_cost(held, 0, tokens);
  must(qkv_session_tokens_check(held, 0, s->ids, tokens, NULL));
  must(qkv_arena_reserve(held->config.arena, reserved, NULL));
  must(qkv_session_append_in(session, 0, &use, 0, &k, &v, false, &appended, &length, NULL));
  qkv_session_tokens_keep(held, qkv_session_tokens_cuts(held), 0, s->ids, tokens, &reserved);
  const double ms = 1e3 * (qkv_bench_now() - begin);
  qkv_arena_unreserve(held->config.arena, reserved);
  s->taken += use.pages_shared;
  return ms;
}

static void repeat(scene *s, uint32_t number, qkv_samples *first, qkv_samples *second) {
  const char *const names[2] = {"first", "second"};
  uint64_t freed;
  for (int64_t i = 0; i < s->settings->tokens; i++) s->ids[i] = number * 1000003u + (uint32_t)i;
  for (int i = 0; i < 2; i++) {
    qkv_session_config config = {.tenant = "default", .purpose = QKV_PURPOSE_ATTEND, .policy = QKV_POLICY_UNSET};
    qkv_session *session = NULL;
    config.name = names[i];
    must(qkv_store_open(s->store, &config, MODEL, &session, NULL));
    qkv_samples_add(i == 0 ? first : second, append(s, session));
    qkv_session_unref(&session);
  }
  for (int i = 0; i < 2; i++) must(qkv_store_close(s->store, "default", names[i], &freed, NULL));
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  scene s = {.settings = values};
  qkv_samples first = {0}, second = {0};
  setup(&s);
  repeat(&s, 0, &first, &second);  // memory is mapped
  s.taken = 0;
  qkv_samples_clear(&first);
  qkv_samples_clear(&second);
  for (int64_t i = 1; i <= s.settings->repeats; i++) repeat(&s, (uint32_t)i, &first, &second);
  const double first_ms = qkv_samples_quantile(&first, 0.5), second_ms = qkv_samples_quantile(&second, 0.5);
  qkv_bench_report(s.settings, json_pack("{s:s, s:I, s:I, s:f, s:f, s:f}", "bench", MODEL, "tokens",
                                         (json_int_t)s.settings->tokens, "pages_taken",
                                         (json_int_t)s.taken / (json_int_t)s.settings->repeats, "first_ms", first_ms,
                                         "second_ms", second_ms, "append_ratio", second_ms / first_ms));
  qkv_samples_free(&first);
  qkv_samples_free(&second);
  teardown(&s);
  return 0;
}

const qkv_command qkvi_bench_share_append = {.name = MODEL,
                                             .arguments = "",
                                             .summary = "a prompt that is appended a second time, its pages shared",
                                             .options = options,
                                             .option_count = sizeof options / sizeof *options,
                                             .run = run};
