// The kernels on the emulator against the CPU: the partial result of each range, KV head and row, bit by bit
// (qkvi_attend_range), on layers made by the engine from rows with outliers.
#include "engine/cache/attend_internal.h"
#include "engine/cache/layer_retier.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/outliers.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/simt/operands.h"
#include "tests/engine/cache/fixture.h"
#include "tests/gpu/copy.h"
#include "tests/gpu/launch.h"

#ifdef QKV_SANITIZED
enum { EVERY = 3, PAGES_MAX = 12 };  // cases of which one runs
#else
enum { EVERY = 1, PAGES_MAX = 72 };
#endif
enum { HEADS = 2, ROWS_MAX = QKV_QUERY_BLOCK, DIM_MAX = 128 };

// What is attended.
typedef struct attend_case {
  uint32_t dim, group, pages, sinks;
  int64_t queries;
  double bits_k, bits_v;  // 0: each group's are its own, up to 4
  qkv_precision precision;
  float size;  // of queries
  double soft_cap;
  qkv_anchor_kind anchor;  // of keys
  uint64_t begin, end;     // options
  bool windowed;
  bool calibrated;
  uint32_t turning;  // coordinates that turn, calibrated; 0: no RoPE
  bool interleaved;
  uint64_t first;  // position
  uint64_t seed;
} attend_case;

typedef struct scene {
  qkv_model model;
  qkv_arena *arena;
  sequence rows;
  qkv_layer layer;
  qkv_coder *coder;
  float *q;
  test_tensor q_tensor;
  qkv_attend request;
} scene;

static qkv_simt_tables tables;
static uint64_t first_seed;

// What all cases together have covered.
static struct {
  size_t outliers, wide, masked, merges, compared;
  size_t forms[4];  // blocks of calibrated pages
  size_t anchors;
  size_t left_out;  // cases
  bool shapes[16];
} met;

// ---- A layer and a request ----

// Up to `most` times as large as others: keys that are much larger take all of the attention.
static void plant_outliers(sequence *rows, uint64_t most, uint64_t *seed) {
  const size_t width = (size_t)rows->model->kv_heads * rows->model->key_dim;
  for (uint64_t t = 0; t < rows->tokens; t += 1 + random_below(seed, 60)) {
    for (size_t c = random_below(seed, 7); c < width; c += 1 + random_below(seed, 40)) {
      rows->k[t * width + c] *= (float)random_below(seed, most);
      rows->v[t * width + c] *= (float)random_below(seed, 30);
    }
  }
}

// Each group of each page and head loses planes of its own.
static void mix_tiers(qkv_layer *layer, uint64_t *seed) {
  for (size_t i = 0; i < layer->page_count; i++) {
    qkv_head_tiers now[HEADS], most[HEADS];
    qkv_cut cut;
    qkv_error error = {0};
    const qkv_page_entry *entry = qkv_layer_page(layer, i);
    qkv_layer_tiers(layer, entry, now, most);
    for (size_t h = 0; h < HEADS; h++) {
      for (size_t g = 0; g < 2 * QKV_PAGE_GROUPS; g++)
        now[h].tiers[g / QKV_PAGE_GROUPS][g % QKV_PAGE_GROUPS] = (uint8_t)(8 * (1 + random_below(seed, 4)));
    }
    if (!qkv_layer_cut(layer, i, entry->serial, now, &cut)) continue;
    assert_int_equal(qkv_layer_exchange(layer, &cut, &error), QKV_OK);
    qkv_cut_deinit(&cut);
  }
}

static void set_precision(const scene *s) {
  for (uint32_t h = 0; h < HEADS; h++) {  // as qkv_precision says for these tiers
    qkv_head_coder *head = (qkv_head_coder *)&qkv_embedded(s->coder)->heads[h];
    head->query_limit = qkvi_query_limit(head->transforms[QKV_K], head->tiers[QKV_K]);
    head->weight_bytes = (uint8_t)qkvi_weight_bytes(head->transforms[QKV_V], head->tiers[QKV_V]);
  }
}

// Transforms and schedules of any kind, as if calibrated.
static qkv_coder *calibrated_coder(const scene *s, const attend_case *c) {
  naive_random random = {c->seed};
  const qkv_rope *rope = &s->model.rope;
  const qkv_frame frame = c->turning > 0 ? QKV_FRAME_ATTEND : QKV_FRAME_PLAIN;
  qkv_coder *coder = coder_create_dense(&random, HEADS, (uint16_t)c->dim, (uint16_t)c->dim, c->bits_k, c->bits_v,
                                        frame, rope->theta != 0 ? rope : NULL);
  for (uint32_t h = 0; c->turning > 0 && h < HEADS; h++) {
    owned_transform *keys = &((owned_coder *)coder)->transforms[2 * h];
    if (keys->transform.plan == NULL) transform_by_blocks(keys, rope);
  }
  coder->layer = TEST_LAYER;
  assert_true(qkv_device_takes_coder(coder));
  return coder;
}

static void setup_scene(scene *s, const attend_case *c) {
  uint64_t seed = c->seed + first_seed;
  const bool mixed = c->bits_k == 0;
  const uint64_t tokens = (uint64_t)c->pages * QKV_PAGE_TOKENS;
  *s = (scene){.model = test_model(HEADS, c->group, c->dim, c->dim, QKV_FP32),
               .arena = qkv_arena_create("memory-budget", (uint64_t)1 << 30)};
  if (c->turning > 0) {
    qkv_error error = {0};
    s->model.rope = (qkv_rope){.theta = 10000, .width = c->turning, .interleaved = c->interleaved};
    assert_int_equal(qkv_model_resolve(&s->model, &error), QKV_OK);
  }
  const qkv_policy policy = test_policy(mixed ? 4 : c->bits_k, mixed ? 4 : c->bits_v, 0);
  s->rows = make_sequence(&s->model, tokens, seed);
  plant_outliers(&s->rows, c->seed % 4 == 0 ? 100 : 4, &seed);
  s->coder = c->calibrated ? calibrated_coder(s, c) : test_coder(&s->model, policy);
  if (c->anchor != QKV_ANCHOR_NONE) {
    coder_own(s->coder)->anchors[QKV_K].kind = c->anchor;
    coder_own(s->coder)->anchors[QKV_V].kind = c->seed % 3 == 0 ? QKV_ANCHOR_NONE : QKV_ANCHOR_MEAN;
  }
  set_precision(s);
  coder_keep_outliers(s->coder, c->calibrated ? 0.2f : 0.02f, c->sinks);
  const qkv_layer_config config = test_layer_config(&s->model, policy, c->first, s->arena);
  qkv_layer_init(&s->layer, &config, s->coder);
  must_append(&s->layer, &s->rows, 0, tokens);
  assert_int_equal(s->layer.page_count, c->pages);
  if (mixed) mix_tiers(&s->layer, &seed);
  const size_t rows = (size_t)c->queries * s->model.q_heads;
  s->q = random_floats(seed, rows * c->dim);
  for (size_t i = 0; i < rows * c->dim; i++) s->q[i] *= c->size;
  make_tensor(&s->q_tensor, QKV_FP32, s->q, c->queries, s->model.q_heads, c->dim);
  s->request = (qkv_attend){.layer = &s->layer, .q = s->q_tensor.tensor};
  s->request.position = c->first + tokens - (c->windowed ? random_below(&seed, tokens) : 0);
  s->request.options = (qkv_attend_options){.begin = c->begin,
                                            .end = c->end,
                                            .sliding_window = c->windowed ? 1 + random_below(&seed, 3 * tokens) : 0,
                                            .soft_cap = c->soft_cap,
                                            .precision = c->precision};
}

static void teardown_scene(scene *s) {
  free(s->q);
  free_tensor(&s->q_tensor);
  qkv_layer_deinit(&s->layer);
  coder_destroy(s->coder);
  assert_int_equal(qkv_arena_read(s->arena).bytes_used, 0);
  qkv_arena_destroy(&s->arena);
  free_sequence(&s->rows);
}

// ---- What the kernels get ----

typedef struct job {
  qkv_simt_range range;
  qkv_simt_merge merge;
  qkv_simt_turn turn;
  size_t first_row, rows;  // of the block
} job;

typedef struct work {
  const qkv_simt_shape *shape;
  uint8_t *copy;  // of the range
  job jobs[ROWS_MAX];
  size_t count;
  uint16_t seen[ROWS_MAX][2];
} work;

static uint16_t relative(uint64_t position, uint64_t begin, uint64_t end) {
  if (position > end) position = end;
  return (uint16_t)(position > begin ? position - begin : 0);
}

static void *aligned(size_t bytes) {
  void *memory = NULL;
  assert_int_equal(posix_memalign(&memory, 16, bytes), 0);
  memset(memory, 0xff, bytes);
  return memory;
}

// Counts the forms of blocks in an expanded page.
static void note_forms(const scene *s, const uint8_t *image) {
  const size_t blocks = QKV_PAGE_GROUPS * (size_t)s->model.key_dim / 16;
  for (uint16_t h = 0; h < HEADS; h++) {
    uint32_t entry[4], place;
    memcpy(entry, image + sizeof(qkv_page_header) + h * sizeof entry, sizeof entry);
    const uint8_t *places[] = {image + entry[0] + 2 * QKV_PAGE_TOKENS, image + entry[0] + entry[1]};
    for (size_t i = 0; i < 2 * blocks; i++) {
      memcpy(&place, places[i % 2] + i / 2 * sizeof place, sizeof place);
      met.forms[place >> 16 & 15]++;
    }
    const qkv_page_header *header = (const qkv_page_header *)(const void *)image;
    float units[2] = {0};
    if ((header->features & QKV_FEATURE_ANCHOR) != 0)
      memcpy(units, image + entry[0] + entry[1] + entry[2], sizeof units);
    met.anchors += (units[0] > 0) + (units[1] > 0);
  }
}

static void copy_range(work *w, const scene *s, size_t begin, size_t end) {
  const void *images[QKV_RANGE_PAGES];
  for (size_t i = begin; i < end; i++) images[i - begin] = qkv_layer_page(&s->layer, i)->page;
  w->copy = copy_pages(s->coder, images, end - begin);
  for (size_t i = begin; qkv_device_layout_of(s->coder).expanded && i < end; i++)
    note_forms(s, ((const uint8_t *const *)(const void *)w->copy)[i - begin]);
}

static bool takes_pages(const scene *s) {
  for (size_t i = 0; i < s->layer.page_count; i++) {
    if (!qkv_device_takes_image(s->coder, qkv_layer_page(&s->layer, i)->page)) return false;
  }
  return true;
}

// What turns a job's queries, as attend_device.c has it.
static void plan_turn(const work *w, const scene *s, const qkvi_row_block *block, job *j, uint8_t *queries) {
  const qkv_device_layout layout = qkv_device_layout_of(s->coder);
  uint8_t *head = w->copy + layout.heads + j->range.kv_head * layout.head_bytes;
  uint8_t *turned = aligned((size_t)QKV_SIMT_RANGE_PAGES * QKV_SIMT_TURNED_BYTES(w->shape->dim));
  qkvi_device_queries(s->coder, &block->queries, j->first_row, j->rows, queries);
  j->turn = (qkv_simt_turn){.queries = queries,
                            .frame = layout.turns ? w->copy + layout.frame : NULL,
                            .head = head,
                            .pages = j->range.pages,
                            .turned = turned,
                            .first = j->range.first,
                            .end = j->range.end,
                            .kv_head = j->range.kv_head,
                            .anchored = layout.anchored};
  j->range.turned = turned;
  j->range.turned_step = layout.turns || layout.anchored ? QKV_SIMT_TURNED_BYTES(w->shape->dim) : 0;
  j->range.steps = (const float *)(const void *)head;
}

// The jobs of a range, which the block sees something of. False: it sees nothing.
static bool plan(work *w, const scene *s, const qkvi_row_block *block, size_t range, uint16_t kv_head) {
  const qkvi_embedded_queries *own = (const qkvi_embedded_queries *)block->queries.own;
  size_t begin, end, seen = qkv_layer_page_at(&s->layer, block->begin_min);
  qkv_layer_range(&s->layer, range, &begin, &end);
  const uint64_t first = qkv_layer_page(&s->layer, begin)->position;
  const uint64_t last = qkvi_layer_span(&s->layer, end - 1).end;
  while (end > begin && qkv_layer_page(&s->layer, end - 1)->position >= block->end_max) end--;
  if (seen < begin) seen = begin;
  if (seen >= end) return false;
  w->shape = qkv_device_layout_of(s->coder).expanded
                 ? qkv_simt_shape_calibrated(s->model.key_dim)
                 : qkv_simt_shape_for(s->model.key_dim, own->integers.parts, own->weight_bytes,
                                      (unsigned)block->queries.count);
  assert_non_null(w->shape);
  copy_range(w, s, begin, end);
  const bool whole = block->begin_max <= first && block->end_min >= last;
  w->count = 0;
  for (size_t row = 0; row < block->queries.count; row++) {
    w->seen[row][0] = relative(block->begin[row], first, last);
    w->seen[row][1] = relative(block->end[row], first, last);
  }
  for (size_t row = 0; row < block->queries.count; row += w->shape->rows, w->count++) {
    job *j = &w->jobs[w->count];
    const size_t left = block->queries.count - row, bytes = QKV_SIMT_PARTIAL_BYTES(w->shape->dim, w->shape->rows);
    uint8_t *queries = aligned(qkv_simt_query_bytes(w->shape));
    *j = (job){.first_row = row, .rows = left < w->shape->rows ? left : w->shape->rows};
    j->range = (qkv_simt_range){.pages = (const uint8_t *const *)(const void *)w->copy,
                                .queries = queries,
                                .seen = whole ? NULL : w->seen[row],
                                .partials = aligned(QKV_SIMT_RANGE_RUNS * bytes),
                                .first = (uint32_t)(seen - begin),
                                .end = (uint32_t)(end - begin),
                                .kv_head = kv_head,
                                .soft_cap = qkvi_attend_task(&s->request, kv_head).soft_cap};
    j->merge = (qkv_simt_merge){.partials = j->range.partials,
                                .out = aligned(bytes),
                                .first = j->range.first / QKV_SIMT_RUN_PAGES,
                                .end = (j->range.end - 1) / QKV_SIMT_RUN_PAGES + 1};
    if (w->shape->turn != NULL) {
      plan_turn(w, s, block, j, queries);
    } else {
      qkv_simt_queries_fill(w->shape, &own->integers, block->queries.rows, row, j->rows, queries);
    }
    met.merges += j->merge.end - j->merge.first - 1;
  }
  met.masked += !whole;
  for (size_t i = 0; qkv_simt_shape_at(i) != NULL; i++) met.shapes[i] |= qkv_simt_shape_at(i) == w->shape;
  return true;
}

static void free_work(work *w) {
  for (size_t i = 0; i < w->count; i++) {
    free((void *)w->jobs[i].range.queries);
    free(w->jobs[i].range.partials);
    free(w->jobs[i].merge.out);
    free(w->jobs[i].turn.turned);
  }
  free(w->copy);
}

static void launch(const work *w, uint64_t order) {
  qkv_simt_range ranges[ROWS_MAX];
  qkv_simt_merge merges[ROWS_MAX];
  qkv_simt_turn turns[ROWS_MAX];
  for (size_t i = 0; i < w->count; i++) {
    turns[i] = w->jobs[i].turn;
    ranges[i] = w->jobs[i].range;
    merges[i] = w->jobs[i].merge;
  }
  launch_attend(&(launch_work){.shape = w->shape,
                               .tables = &tables,
                               .ranges = ranges,
                               .merges = merges,
                               .turns = turns,
                               .count = (uint32_t)w->count,
                               .order = order});
}

// ---- Comparing ----

static void compare(const attend_case *c, const work *w, const qkvi_partial *expected) {
  for (size_t i = 0; i < w->count; i++) {
    for (unsigned row = 0; row < w->jobs[i].rows; row++) {
      const size_t at = w->jobs[i].first_row + row;
      float peak;
      double total;
      const float *sums = qkv_simt_partial_row(w->shape, w->jobs[i].merge.out, row, &peak, &total);
      // The sign of a peak of zero may differ.
      const bool same = memcmp(sums, expected->sums[at], w->shape->dim * sizeof *sums) == 0 &&
                        (peak == expected->peak[at] || (isinf(peak) && isinf(expected->peak[at]))) &&
                        total == expected->total[at];
      if (!same)
        fail_msg(
            "seed %llu, %s, head %u, row %zu: peak %a, %a expected; total %a, %a expected; first sum %a, %a expected",
            (unsigned long long)c->seed, w->shape->name, w->jobs[i].range.kv_head, at, (double)peak,
            (double)expected->peak[at], total, expected->total[at], (double)sums[0], (double)expected->sums[at][0]);
      met.compared++;
    }
  }
}

static void note_outliers(const scene *s) {
  for (size_t i = 0; i < s->layer.page_count; i++) {
    for (uint32_t h = 0; h < HEADS; h++) {
      for (qkv_part part = QKV_K; part <= QKV_V; part++) {
        qkv_outliers found;
        if (!qkv_outliers_find(qkv_layer_page(&s->layer, i)->page, (uint16_t)h, part, &found)) continue;
        met.outliers += found.count;
        for (size_t r = 0; r < found.count; r++) met.wide += (found.slots[r] & QKV_OUTLIER_WIDE) != 0;
      }
    }
  }
}

static void check_case(const attend_case *c) {
  static _Alignas(64) qkvi_row_block block;
  static float sums[ROWS_MAX * DIM_MAX];
  static work w;
  scene s;
  size_t range, range_end;
  qkv_error error = {0};
  setup_scene(&s, c);
  note_outliers(&s);
  if (qkv_attend_check(&s.request, &error) != QKV_OK) fail_msg("%s", error.text);
  if (!takes_pages(&s)) {        // too many bits
    assert_true(c->calibrated);  // those of a data-free code are chosen to fit
    met.left_out++;
    return teardown_scene(&s);
  }
  qkvi_attend_ranges(&s.request, &range, &range_end);
  for (; range < range_end; range++) {
    for (uint32_t h = 0; h < HEADS; h++) {
      const qkvi_head_task task = qkvi_attend_task(&s.request, (uint16_t)h);
      qkvi_partial expected;
      qkvi_attend_load(&task, &block, 0, qkvi_attend_rows(&s.request));
      s.coder->codec->query(s.coder, (uint16_t)h, &block.queries);
      if (!plan(&w, &s, &block, range, (uint16_t)h)) continue;
      launch(&w, random_next(&(uint64_t){c->seed + h}) % 8);
      qkvi_attend_range(&task, &block, range, sums, &expected);
      compare(c, &w, &expected);
      free_work(&w);
    }
  }
  teardown_scene(&s);
}

// ---- Cases ----

static void test_depths(void **unused) {
  (void)unused;
  static const qkv_precision precisions[] = {QKV_PRECISION_DEFAULT, QKV_PRECISION_INT8, QKV_PRECISION_INT16};
  for (uint64_t i = 0; i < 30; i += EVERY) {
    const attend_case c = {.dim = i % 2 == 0 ? 128 : 64,
                           .group = i % 3 == 0 ? 8 : 4,
                           .queries = 1,
                           .pages = 3,
                           .bits_k = (double)(i % 5),
                           .bits_v = (double)(i % 5 == 0 ? 0 : 1 + i / 2 % 4),
                           .precision = precisions[i / 5 % 3],
                           .size = 0.5f + (float)(i % 4) * 2,
                           .seed = 100 + i};
    check_case(&c);
  }
}

// Pages of which a row sees a part, or nothing; ranges of which pages are missing at either end.
static void test_masks(void **unused) {
  (void)unused;
  for (uint64_t i = 0; i < 12; i += EVERY) {
    uint64_t seed = 300 + i;
    const attend_case c = {.dim = i % 2 == 0 ? 64 : 128,
                           .group = 1 + (uint32_t)random_below(&seed, 3),
                           .queries = 1 + (int64_t)random_below(&seed, 5),
                           .pages = 2 + (uint32_t)random_below(&seed, 9),
                           .bits_k = (double)(i % 5),
                           .bits_v = 3,
                           .begin = random_below(&seed, 100),
                           .end = i % 3 == 0 ? 120 + random_below(&seed, 300) : 0,
                           .windowed = i % 2 == 1,
                           .size = 3,
                           .sinks = i % 4 == 0 ? 4 : 0,
                           .seed = seed};
    check_case(&c);
  }
}

static void test_outliers(void **unused) {
  (void)unused;
  for (uint64_t i = 0; i < 6; i += EVERY) {
    const attend_case c = {.dim = i % 2 == 0 ? 64 : 128,
                           .group = i % 3 == 0 ? 3 : 6,
                           .queries = 1,
                           .pages = 4,
                           .bits_k = (double)(i % 3 == 1 ? 0 : 2),
                           .bits_v = 1 + (double)(i % 4),
                           .precision = i < 4 ? QKV_PRECISION_DEFAULT : QKV_PRECISION_INT16,
                           .size = 2,
                           .sinks = (uint32_t)(4 + 40 * i),
                           .seed = 500 + i};
    check_case(&c);
  }
}

// Random transforms, schedules and tiers, with and without RoPE.
static void test_calibrated(void **unused) {
  (void)unused;
  static const qkv_precision precisions[] = {QKV_PRECISION_DEFAULT, QKV_PRECISION_INT8, QKV_PRECISION_INT16};
  for (uint64_t i = 0; i < 40; i += EVERY) {
    uint64_t seed = 900 + i;
    const uint32_t dim = i % 2 == 0 ? 64 : 128;
    const attend_case c = {.dim = dim,
                           .group = 1 + (uint32_t)random_below(&seed, 8),
                           .queries = 1 + (int64_t)random_below(&seed, 2),
                           .pages = 2 + (uint32_t)random_below(&seed, 4),
                           .bits_k = (double)(1 + i % 3),
                           .bits_v = (double)(1 + i / 3 % 3),
                           .precision = precisions[i / 5 % 3],
                           .size = 0.5f + (float)(i % 4) * 2,
                           .sinks = i % 4 == 0 ? 4 : 0,
                           .windowed = i % 3 == 0,
                           .calibrated = true,
                           .turning = i % 5 == 0   ? 0
                                      : i % 7 == 0 ? dim / 2
                                                   : dim,
                           .interleaved = i % 11 < 3,
                           .first = i % 3 == 1 ? random_below(&seed, 1u << 19) : random_below(&seed, 200) * 64,
                           .seed = 900 + i};
    check_case(&c);
  }
}

// Data-free code that is expanded: more than four bits, or parts of bits.
static void test_expanded(void **unused) {
  (void)unused;
  static const struct {
    uint32_t dim;
    double bits_k, bits_v;
  } codes[] = {{128, 3.5, 2.5}, {128, 4, 6},     {64, 5, 6},     {64, 0.5, 5},
               {128, 4.5, 5.5}, {64, 5.5, 6.25}, {64, 6, 0.125}, {128, 1.25, 4}};
  static const qkv_precision precisions[] = {QKV_PRECISION_DEFAULT, QKV_PRECISION_INT8, QKV_PRECISION_INT16};
  for (uint64_t i = 0; i < 24; i += EVERY) {
    const attend_case c = {.dim = codes[i % 8].dim,
                           .group = i % 3 == 0 ? 6 : 4,
                           .queries = 1 + (int64_t)(i % 2),
                           .pages = 3,
                           .bits_k = codes[i % 8].bits_k,
                           .bits_v = codes[i % 8].bits_v,
                           .precision = precisions[i / 8],
                           .size = 0.5f + (float)(i % 4) * 2,
                           .sinks = i % 4 == 0 ? 4 : 0,
                           .windowed = i % 5 == 0,
                           .seed = 1100 + i};
    check_case(&c);
  }
}

// Of data-free code.
static void test_anchors(void **unused) {
  (void)unused;
  const size_t before = met.anchors;
  for (uint64_t i = 0; i < 12; i += EVERY) {
    const attend_case c = {.dim = i % 2 == 0 ? 64 : 128,
                           .group = i % 3 == 0 ? 6 : 4,
                           .queries = 1 + (int64_t)(i % 2),
                           .pages = 3,
                           .bits_k = 2 + (double)(i % 3),
                           .bits_v = 3,
                           .precision = i % 4 == 0 ? QKV_PRECISION_INT8 : QKV_PRECISION_DEFAULT,
                           .size = 2,
                           .sinks = i % 3 == 0 ? 4 : 0,
                           .windowed = i % 4 == 1,
                           .anchor = i % 2 == i / 2 % 2 ? QKV_ANCHOR_MEAN : QKV_ANCHOR_GROUP,
                           .seed = 1500 + i};
    check_case(&c);
  }
  assert_true(met.anchors - before > 50 / EVERY);
}

// Scores far below the cap, near it and beyond.
static void test_soft_caps(void **unused) {
  (void)unused;
  for (uint64_t i = 0; i < 12; i += EVERY) {
    const uint32_t dim = i % 2 == 0 ? 64 : 128;
    const attend_case c = {.dim = dim,
                           .group = i % 3 == 0 ? 8 : 4,
                           .queries = 1,
                           .pages = 3,
                           .bits_k = (double)(1 + i % 3),
                           .bits_v = 2,
                           .size = 3,
                           .soft_cap = i % 4 == 0   ? 50
                                       : i % 4 == 1 ? 0.5
                                                    : 3,
                           .sinks = i % 3 == 0 ? 4 : 0,
                           .windowed = i % 3 == 1,
                           .calibrated = i >= 8,
                           .turning = i % 4 == 1 ? dim : 0,
                           .seed = 1300 + i};
    check_case(&c);
  }
}

// More than a range, and runs that are merged.
static void test_ranges(void **unused) {
  (void)unused;
  const attend_case c = {.dim = 64,
                         .group = 4,
                         .queries = 1,
                         .pages = PAGES_MAX,
                         .bits_k = 2,
                         .bits_v = 2,
                         .size = 3,
                         .begin = 70,
                         .sinks = 4,
                         .seed = 701};
  check_case(&c);
}

static void test_met(void **unused) {
  (void)unused;
  print_message("%zu rows compared; %zu outlier rows, %zu of them of two bytes; %zu merges, %zu ranges with masks\n",
                met.compared, met.outliers, met.wide, met.merges, met.masked);
  print_message("expanded blocks: %zu narrow, %zu of nibbles, %zu of bytes, %zu wide; %zu cases of too many bits\n",
                met.forms[0], met.forms[1], met.forms[2], met.forms[3], met.left_out);
  assert_true(met.outliers > met.wide && met.wide > 0);
  for (size_t i = 0; i < 4; i++) assert_true(met.forms[i] > 0);
  assert_true(met.merges > 0 && met.masked > 0);
  for (size_t i = 0; EVERY == 1 && qkv_simt_shape_at(i) != NULL; i++) assert_true(met.shapes[i]);
}

static void test_shapes(void **unused) {
  (void)unused;
  size_t n = 0;
  while (qkv_simt_shape_at(n) != NULL) n++;
  assert_int_equal(n, 10);
  assert_string_equal(qkv_simt_shape_for(128, 1, 1, 4)->name, "qkv_simt_attend_128x4_q1w1");
  assert_string_equal(qkv_simt_shape_for(128, 1, 1, 5)->name, "qkv_simt_attend_128x8_q1w1");
  assert_string_equal(qkv_simt_shape_for(64, 2, 2, 9)->name, "qkv_simt_attend_64x4_q2w2");
  assert_null(qkv_simt_shape_for(96, 1, 1, 4));
  assert_null(qkv_simt_shape_for(128, 1, 2, 4));
}

int main(int argc, char **argv) {
  if (!launch_begin(argc, argv, &first_seed)) return 77;
  qkv_kernels_setup(UINT32_MAX);
  qkv_simt_tables_fill(&tables);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_shapes),   cmocka_unit_test(test_depths),    cmocka_unit_test(test_masks),
      cmocka_unit_test(test_outliers), cmocka_unit_test(test_ranges),    cmocka_unit_test(test_calibrated),
      cmocka_unit_test(test_expanded), cmocka_unit_test(test_soft_caps), cmocka_unit_test(test_anchors),
      cmocka_unit_test(test_met),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  return failed != 0 ? failed : launch_end();
}
