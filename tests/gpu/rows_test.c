// Rows of pages made by the kernels against the codec, and codes against encode_rows, bit by bit: pages of any code,
// frame, anchors, factors and tiers, as the codec makes them from rows with outliers.
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "engine/cache/device_rows.h"
#include "engine/codec/codec.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/row.h"
#include "engine/kernel/kernel.h"
#include "engine/kernel/simt/operands.h"
#include "tests/engine/codec/coder.h"
#include "tests/gpu/launch.h"

#ifdef QKV_SANITIZED
enum { EVERY = 5 };  // cases of which one runs
#else
enum { EVERY = 1 };
#endif
enum { HEADS = 2, JOBS = 2 * HEADS, ALIGN = 64 };

typedef struct rows_case {
  uint16_t key_dim, value_dim;
  double bits_k, bits_v;
  qkv_frame frame;
  bool calibrated, turns, interleaved, mixed, before_rope;
  qkv_rope_scaling scaling;
  qkv_anchor_kind anchor;
  qkv_low_rank_mode factors;
  float outliers;  // limit; 0: none
  uint32_t tokens;
  uint64_t position, seed;
} rows_case;

static qkv_simt_row_tables tables;
static qkv_simt_encode_tables encode_tables;
static uint64_t first_seed;

static struct {
  size_t rows, kept, chains, segments, anchors, factors, depths[QKV_DEPTH_MAX + 1], encoded, zero,
      coded[QKV_DEPTH_MAX + 1], turned, framed;
} met;

static void *allocate(size_t bytes) {
  void *made = aligned_alloc(ALIGN, (bytes + ALIGN - 1) / ALIGN * ALIGN);
  assert_non_null(made);
  memset(made, 0xcd, (bytes + ALIGN - 1) / ALIGN * ALIGN);
  return made;
}

// Each row is near to the one before it, as chains want them; some are much larger than others.
static float *make_rows(naive_random *random, uint32_t tokens, size_t dim) {
  const size_t width = HEADS * dim;
  float *rows = allocate(tokens * width * sizeof *rows);
  for (size_t i = 0; i < tokens * width; i++)
    rows[i] = (i < width ? 1 : rows[i - width] * 0.97f) + 0.3f * (float)naive_gaussian(random);
  for (size_t t = 0; t < tokens; t++) {
    for (size_t c = 0; naive_below(random, 16) == 0 && c < width; c += 5) rows[t * width + c] *= 30;
  }
  return rows;
}

static qkv_coder *make_coder(const rows_case *c, naive_random *random) {
  qkv_rope rope = {.theta = c->turns ? 10000 : 0,
                   .width = c->key_dim >= 32 ? c->key_dim - 16u : c->key_dim,
                   .interleaved = c->interleaved,
                   .scaling = c->scaling,
                   .factor = 4,
                   .original_max_position = 512};
  qkv_error error = {0};
  if (qkv_rope_resolve(&rope, c->key_dim, &error) != QKV_OK) fail_msg("%s", error.text);
  qkv_coder *coder = c->calibrated
                         ? coder_create_dense(random, HEADS, c->key_dim, c->value_dim, c->bits_k, c->bits_v, c->frame,
                                              c->turns ? &rope : NULL)
                         : coder_create(HEADS, c->key_dim, c->value_dim, c->bits_k, c->bits_v, c->frame, &rope);
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    coder_own(coder)->anchors[part] = (qkv_anchor_options){c->anchor, c->seed % 8 == 6 ? 11 : 0, 0};
  coder_own(coder)->low_rank = (qkv_low_rank_options){.mode = c->factors, .rank = 3};
  if (c->outliers > 0) coder_keep_outliers(coder, c->outliers, 0);
  return coder;
}

// Each group gets tiers of its own, as far as pages allow it.
static void mix_tiers(const qkv_coder *coder, naive_random *random, uint8_t **image) {
  const qkv_codec_planes *planes = coder->codec->planes;
  qkv_head_tiers tiers[HEADS];
  planes->tiers(*image, tiers);
  for (size_t h = 0; h < HEADS; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        uint8_t *tier = &tiers[h].tiers[part][g];
        *tier = (uint8_t)(*tier - naive_below(random, *tier / 2 + 1u));
      }
    }
  }
  uint8_t *lower = allocate(coder->codec->page_bytes_max(coder));
  (void)planes->drop(coder, *image, tiers, lower);
  free(*image);
  *image = lower;
}

static void note(const qkv_coder *coder, const uint8_t *image) {
  for (uint16_t h = 0; h < HEADS; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(image, h);
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const uint8_t byte = part == QKV_K ? entry->anchor_k : entry->anchor_v;
      const uint8_t *tiers = part == QKV_K ? entry->tier_k : entry->tier_v;
      const qkv_schedule *schedule = qkv_embedded(coder)->heads[h].schedules[part];
      qkv_outliers found;
      (void)qkv_outliers_find(image, h, part, &found);
      met.kept += found.count;
      met.chains += qkv_anchor_kind_of(byte) == QKV_ANCHOR_CHAIN;
      met.segments += byte == QKV_ANCHOR_CHAIN;  // several
      met.anchors += byte != 0;
      met.factors += (part == QKV_K ? entry->low_rank_k : entry->low_rank_v) != 0;
      for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
        for (unsigned d = 0; d <= QKV_DEPTH_MAX; d++) {
          const uint16_t *reach = schedule->reach[tiers[g]];
          met.depths[d] += reach[d] > (d < QKV_DEPTH_MAX ? reach[d + 1] : 0);
        }
      }
    }
  }
}

// ---- Jobs ----

typedef struct job_memory {
  void *code;
  float *turns, *slots, *expected;  // expected: of the whole page
  uint8_t *out;
  size_t out_bytes;
} job_memory;

static qkv_simt_decode make_job(const rows_case *c, const qkv_coder *coder, const uint8_t *image, unsigned i,
                                naive_random *random, job_memory *m) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  const uint16_t h = (uint16_t)(i / 2);
  const qkv_part part = (qkv_part)(i % 2);
  const qkv_dtype dtype = dtypes[naive_below(random, 3)];
  const size_t dim = qkvi_coder_dim(coder, part);
  const uint32_t flags = qkv_device_row_flags(coder, part, c->before_rope);
  *m = (job_memory){.code = allocate(qkv_device_code_bytes(coder, h, part))};
  qkv_device_fill_code(coder, h, part, m->code);
  if (flags != 0) {
    m->turns = allocate(qkv_device_turn_floats(coder) * sizeof(float));
    m->slots = allocate(qkv_device_slot_floats(coder) * sizeof(float));
    qkv_device_fill_turns(coder, h, c->position, c->before_rope, m->turns);
    qkv_device_fill_slots(coder, c->position, m->slots);
  }
  const uint32_t first = naive_below(random, 4) == 0 ? naive_below(random, c->tokens) : 0;
  const uint64_t stride = dim * qkv_dtype_size(dtype) + (naive_below(random, 2) == 0 ? 0 : 48);
  m->out_bytes = (c->tokens - first) * stride;
  m->out = allocate(m->out_bytes);
  m->expected = allocate(QKV_PAGE_TOKENS * dim * sizeof(float));
  coder->codec->decode(coder, image, h, part, c->before_rope, m->expected);
  return (qkv_simt_decode){.page = image,
                           .code = m->code,
                           .turns = m->turns,
                           .slots = m->slots,
                           .out = m->out,
                           .stride = stride,
                           .kv_head = h,
                           .part = part,
                           .first = first,
                           .end = c->tokens,
                           .dtype = dtype,
                           .flags = flags};
}

static void compare_job(const rows_case *c, const qkv_simt_decode *job, const job_memory *m) {
  const size_t dim = job->code->dim, bytes = dim * qkv_dtype_size((qkv_dtype)job->dtype);
  uint8_t *expected = allocate(m->out_bytes);  // what lies between rows stays as it was
  for (size_t t = job->first; t < job->end; t++)
    qkv_from_float((qkv_dtype)job->dtype, m->expected + t * dim, expected + (t - job->first) * job->stride, dim);
  for (size_t i = 0; i < m->out_bytes; i++) {
    if (m->out[i] == expected[i]) continue;
    fail_msg("seed %llu, head %u, part %u, dtype %u: token %zu, byte %zu of %zu is 0x%02x, expected 0x%02x",
             (unsigned long long)c->seed, job->kv_head, job->part, job->dtype, job->first + i / job->stride,
             i % job->stride, bytes, m->out[i], expected[i]);
  }
  met.rows += job->end - job->first;
  free(expected);
}

static void free_job(const job_memory *m) {
  free(m->code);
  free(m->turns);
  free(m->slots);
  free(m->expected);
  free(m->out);
}

static void check_case(const rows_case *c) {
  naive_random random = {c->seed + first_seed};
  qkv_coder *coder = make_coder(c, &random);
  assert_true(qkv_device_takes_rows(coder));
  float *k = make_rows(&random, c->tokens, c->key_dim), *v = make_rows(&random, c->tokens, c->value_dim);
  uint8_t *image = allocate(coder->codec->page_bytes_max(coder));
  qkv_simt_decode jobs[JOBS];
  job_memory memory[JOBS];
  size_t code_bytes[JOBS];
  (void)coder->codec->encode(coder, c->position, c->tokens, QKV_FP32, k, v, NULL, image);
  if (c->mixed) mix_tiers(coder, &random, &image);
  note(coder, image);
  for (unsigned i = 0; i < JOBS; i++) {
    jobs[i] = make_job(c, coder, image, i, &random, &memory[i]);
    code_bytes[i] = qkv_device_code_bytes(coder, (uint16_t)(i / 2), (qkv_part)(i % 2));
  }
  launch_decode(&(launch_decode_work){.jobs = jobs,
                                      .code_bytes = code_bytes,
                                      .tables = &tables,
                                      .count = JOBS,
                                      .dim = c->key_dim > c->value_dim ? c->key_dim : c->value_dim,
                                      .order = c->seed % 8});
  for (unsigned i = 0; i < JOBS; i++) {
    compare_job(c, &jobs[i], &memory[i]);
    free_job(&memory[i]);
  }
  free(image);
  free(k);
  free(v);
  coder_destroy(coder);
}

// ---- Cases ----

static uint32_t tokens_of(naive_random *random) {
  return naive_below(random, 3) == 0 ? 1 + naive_below(random, QKV_PAGE_TOKENS) : QKV_PAGE_TOKENS;
}

// Data-free code of all depths and parts of bits.
static void test_data_free(void **unused) {
  (void)unused;
  static const uint16_t dims[] = {64, 128, 96, 8, 80, 72, 256, 24};
  for (unsigned i = 0; i < 32; i += EVERY) {
    naive_random random = {2000 + i};
    check_case(&(rows_case){.key_dim = dims[i % 8],
                            .value_dim = dims[(i + i / 8) % 8],
                            .bits_k = (1 + i) / 4.0,
                            .bits_v = (1 + naive_below(&random, 64)) / 8.0,
                            .mixed = i % 3 == 1,
                            .outliers = i % 2 == 0 ? 0.02f : 0,
                            .tokens = tokens_of(&random),
                            .seed = 2000 + i});
  }
}

static void test_predictions(void **unused) {
  (void)unused;
  static const qkv_anchor_kind kinds[] = {QKV_ANCHOR_MEAN, QKV_ANCHOR_GROUP, QKV_ANCHOR_CHAIN, QKV_ANCHOR_NONE};
  for (unsigned i = 0; i < 24; i += EVERY) {
    naive_random random = {2100 + i};
    check_case(&(rows_case){.key_dim = i % 2 == 0 ? 64 : 40,
                            .value_dim = i % 5 == 0 ? 96 : 64,
                            .bits_k = 2 + i % 3,
                            .bits_v = 3,
                            .calibrated = i % 4 == 3,
                            .anchor = kinds[i % 4],
                            .factors = i % 3 == 0 ? QKV_LOW_RANK_OFF : QKV_LOW_RANK_PREDICTOR,
                            .outliers = i % 8 == 1 ? 0.05f : 0,
                            .tokens = tokens_of(&random),
                            .seed = 2100 + i});
  }
}

// Random transforms and schedules, in all frames, as attended and before RoPE; steady pages, and those of dynamic
// NTK.
static void test_calibrated(void **unused) {
  (void)unused;
  static const qkv_rope_scaling scalings[] = {QKV_ROPE_NONE, QKV_ROPE_YARN, QKV_ROPE_DYNAMIC};
  for (unsigned i = 0; i < 36; i += EVERY) {
    naive_random random = {2200 + i};
    const qkv_frame frame = (qkv_frame)(i % 3);
    check_case(&(rows_case){.key_dim = i % 4 == 0 ? 128 : 64,
                            .value_dim = i % 5 == 0 ? 40 : 64,
                            .bits_k = 1 + i % 4,
                            .bits_v = 1 + i / 3 % 4,
                            .frame = frame,
                            .calibrated = i % 7 != 6,
                            .turns = frame != QKV_FRAME_PLAIN || i % 2 == 0,
                            .interleaved = i % 11 < 4,
                            .mixed = i % 4 == 1,
                            .before_rope = i / 3 % 2 == 1,
                            .scaling = scalings[i / 6 % 3],
                            .outliers = i % 3 == i / 3 % 3 ? 0.2f : 0,
                            .tokens = tokens_of(&random),
                            .position = naive_below(&random, 3) == 0 ? naive_below(&random, 1u << 20) : 64 * (i % 16),
                            .seed = 2200 + i});
  }
}

// ---- Codes ----

typedef struct encode_case {
  uint16_t dim;
  qkv_part part;
  unsigned tier;
  uint32_t tokens;
  qkv_dtype dtype;
  bool banded;
  uint64_t seed;
} encode_case;

// Rows of all sizes, some of zeros, some with one large number.
static void *make_source(const encode_case *c, naive_random *random, size_t stride) {
  uint8_t *rows = allocate(c->tokens * stride);
  float row[QKV_DIM_MAX];
  for (size_t t = 0; t < c->tokens; t++) {
    const float size = naive_below(random, 12) == 0 ? 0 : expf((float)naive_below(random, 20) - 14);
    for (size_t i = 0; i < c->dim; i++) row[i] = size * (float)naive_gaussian(random);
    if (naive_below(random, 5) == 0) row[naive_below(random, c->dim)] *= 40;
    qkv_from_float(c->dtype, row, rows + t * stride, c->dim);
  }
  return rows;
}

static void check_encode(const encode_case *c) {
  naive_random random = {c->seed + first_seed};
  qkv_coder *coder = coder_create(1, c->dim, c->dim, 4, 4, QKV_FRAME_PLAIN, NULL);
  const size_t row_bytes = c->dim * qkv_dtype_size(c->dtype), stride = row_bytes + 16 * naive_below(&random, 3);
  qkv_schedule schedule = *qkv_embedded(coder)->heads[0].schedules[c->part];
  if (c->banded) naive_schedule(&random, c->dim, &schedule);
  ((qkv_head_coder *)qkv_embedded(coder)->heads)->schedules[c->part] = &schedule;
  uint8_t *source = make_source(c, &random, stride);
  const size_t bytes = QKV_PAGE_GROUPS * qkv_schedule_group_bytes(&schedule, c->tier);
  const size_t code_bytes = qkv_device_code_bytes(coder, 0, c->part);
  void *code = allocate(code_bytes);
  qkv_simt_encoded *made = allocate(sizeof *made + bytes), *expected = allocate(sizeof *made + bytes);
  qkv_device_fill_code(coder, 0, c->part, code);
  const qkv_simt_encode job = {.rows = source,
                               .stride = stride,
                               .code = code,
                               .out = made,
                               .tokens = c->tokens,
                               .tier = c->tier,
                               .part = c->part,
                               .dtype = c->dtype};
  launch_encode(&(launch_encode_work){.jobs = &job,
                                      .code_bytes = &code_bytes,
                                      .tables = &encode_tables,
                                      .count = 1,
                                      .dim = c->dim,
                                      .order = c->seed % 8});
  const qkv_rows rows = {.dtype = c->dtype, .data = source, .stride = stride, .bytes = row_bytes};
  memset((void *)(expected + 1), 0, bytes);
  qkv_kernels_get()->encode_rows(c->part, &schedule, c->tier, &rows, c->tokens, expected->gains,
                                 (uint8_t *)(expected + 1), expected->errors, expected->squares);
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (made->gains[t] == expected->gains[t] && made->errors[t] == expected->errors[t] &&
        made->squares[t] == expected->squares[t])
      continue;
    fail_msg("seed %llu, token %zu: gain %u, %u expected; error %a, %a expected; square %a, %a expected",
             (unsigned long long)c->seed, t, made->gains[t], expected->gains[t], (double)made->errors[t],
             (double)expected->errors[t], (double)made->squares[t], (double)expected->squares[t]);
  }
  assert_memory_equal(made + 1, expected + 1, bytes);
  met.encoded += c->tokens;
  for (size_t t = 0; t < c->tokens; t++) met.zero += made->gains[t] == 0;
  for (unsigned d = 1; d <= QKV_DEPTH_MAX; d++) met.coded[d] += schedule.reach[c->tier][d] > 0;
  free(source);
  free(code);
  free(made);
  free(expected);
  coder_destroy(coder);
}

// Uniform depths of all bits and parts of bits, and schedules of any kind.
static void test_encode(void **unused) {
  (void)unused;
  static const uint16_t dims[] = {64, 128, 96, 8, 80, 72, 256, 24};
  static const qkv_dtype dtypes[] = {QKV_FP16, QKV_BF16, QKV_FP32};
  for (unsigned i = 0; i < 64; i += EVERY) {
    naive_random random = {2400 + i};
    check_encode(&(encode_case){.dim = dims[i % 8],
                                .part = (qkv_part)(i / 8 % 2),
                                .tier = i % 3 == 0 ? 8 * (1 + i / 3 % 8) : 1 + naive_below(&random, QKV_TIER_MAX),
                                .tokens = tokens_of(&random),
                                .dtype = dtypes[i / 2 % 3],
                                .banded = i % 3 == 2,
                                .seed = 2400 + i});
  }
}

// Rows by way of a frame, a calibrated transform and its weights, as the codec does it
// (engine/codec/embedded_encode.c).
static void expect_turned(const qkv_coder *coder, const rows_case *c, uint16_t h, qkv_part part, const qkv_rows *rows,
                          qkv_simt_encoded *out) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[h];
  const qkv_transform *transform = head->transforms[part];
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  const size_t dim = transform->schedule->dim, bits = transform->schedule->reach[head->tiers[part]][1];
  float *turned = allocate(QKV_PAGE_TOKENS * dim * sizeof *turned);
  memset(turned, 0, QKV_PAGE_TOKENS * dim * sizeof *turned);
  memset(out->squares, 0, sizeof out->squares);
  qkv_kernels_get()->load_rows(rows, c->tokens, dim, turned, out->squares);
  if (part == QKV_K && c->frame == QKV_FRAME_ARCHIVE) qkv_phases_inverse(phases, c->position, c->tokens, dim, turned);
  if (part == QKV_K && c->frame == QKV_FRAME_ATTEND)
    qkv_phases_to_page(phases, transform, c->position, c->tokens, turned);
  qkv_transform_forward(transform, turned, c->tokens, dim);
  qkv_kernels_get()->encode(part, transform->schedule, head->tiers[part], transform->weights, turned, out->gains,
                            (uint8_t *)(out + 1), out->errors);
  for (size_t t = 0; bits < dim && t < QKV_PAGE_TOKENS; t++)
    out->errors[t] += (float)qkvi_row_error(
        turned + t * dim + bits, NULL, transform->weights != NULL ? transform->weights + bits : NULL, dim - bits);
  free(turned);
}

static void compare_encoded(const rows_case *c, const qkv_simt_encode *job, const qkv_simt_encoded *made,
                            const qkv_simt_encoded *expected, size_t bytes) {
  for (size_t t = 0; t < QKV_PAGE_TOKENS; t++) {
    if (made->gains[t] == expected->gains[t] && made->errors[t] == expected->errors[t] &&
        made->squares[t] == expected->squares[t])
      continue;
    fail_msg("seed %llu, part %u, token %zu: gain %u, %u expected; error %a, %a expected; square %a, %a expected",
             (unsigned long long)c->seed, job->part, t, made->gains[t], expected->gains[t], (double)made->errors[t],
             (double)expected->errors[t], (double)made->squares[t], (double)expected->squares[t]);
  }
  if (memcmp(made + 1, expected + 1, bytes) != 0)
    fail_msg("seed %llu, part %u: other codes", (unsigned long long)c->seed, job->part);
}

static void check_encode_part(const rows_case *c, const qkv_coder *coder, uint16_t h, qkv_part part,
                              naive_random *random) {
  static const qkv_dtype dtypes[] = {QKV_FP32, QKV_FP16, QKV_BF16};
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[h];
  const uint16_t dim = qkvi_coder_dim(coder, part);
  const qkv_dtype dtype = dtypes[naive_below(random, 3)];
  const encode_case as = {.dim = dim, .tokens = c->tokens, .dtype = dtype};
  const size_t row_bytes = dim * qkv_dtype_size(dtype), stride = row_bytes + 16 * naive_below(random, 3);
  uint8_t *source = make_source(&as, random, stride);
  const size_t bytes = QKV_PAGE_GROUPS * qkv_schedule_group_bytes(head->schedules[part], head->tiers[part]);
  const size_t code_bytes = qkv_device_encoder_bytes(coder, h, part);
  void *code = allocate(code_bytes);
  qkv_simt_encoded *made = allocate(sizeof *made + bytes), *expected = allocate(sizeof *made + bytes);
  float *turns = allocate(qkv_device_turn_floats(coder) * sizeof *turns + 4);
  float *slots = allocate(qkv_device_slot_floats(coder) * sizeof *slots + 4);
  const uint32_t flags = qkv_device_encode_flags(coder, part);
  qkv_device_fill_encoder(coder, h, part, code);
  if (flags != 0) qkv_device_fill_turns(coder, h, c->position, true, turns);
  if (flags != 0) qkv_device_fill_slots(coder, c->position, slots);
  const qkv_simt_encode job = {.rows = source,
                               .stride = stride,
                               .code = code,
                               .turns = flags != 0 ? turns : NULL,
                               .slots = flags != 0 ? slots : NULL,
                               .out = made,
                               .tokens = c->tokens,
                               .tier = head->tiers[part],
                               .part = part,
                               .dtype = dtype,
                               .flags = flags};
  launch_encode(&(launch_encode_work){.jobs = &job,
                                      .code_bytes = &code_bytes,
                                      .tables = &encode_tables,
                                      .count = 1,
                                      .dim = dim,
                                      .order = c->seed % 8});
  memset((void *)(expected + 1), 0, bytes);
  expect_turned(coder, c, h, part, &(qkv_rows){.dtype = dtype, .data = source, .stride = stride, .bytes = row_bytes},
                expected);
  compare_encoded(c, &job, made, expected, bytes);
  met.turned += c->tokens;
  met.framed += flags != 0 ? c->tokens : 0;
  free(source);
  free(code);
  free(made);
  free(expected);
  free(turns);
  free(slots);
}

// Calibrated code in all frames, with schedules of any kind, and data-free code in frames.
static void test_encode_turned(void **unused) {
  (void)unused;
  static const qkv_rope_scaling scalings[] = {QKV_ROPE_NONE, QKV_ROPE_YARN, QKV_ROPE_DYNAMIC};
  for (unsigned i = 0; i < 48; i += EVERY) {
    naive_random random = {2600 + i};
    const qkv_frame frame = (qkv_frame)(i % 3);
    const rows_case c = {.key_dim = i % 4 == 0   ? 128
                                    : i % 8 == 1 ? 72
                                                 : 64,
                         .value_dim = i % 5 == 0 ? 40 : 64,
                         .bits_k = 1 + i % 5,
                         .bits_v = (1 + i / 3 % 10) / 2.0,
                         .frame = frame,
                         .calibrated = frame == QKV_FRAME_PLAIN || i % 7 != 6,
                         .turns = frame != QKV_FRAME_PLAIN || i % 2 == 0,
                         .interleaved = i % 11 < 4,
                         .scaling = scalings[i / 6 % 3],
                         .tokens = tokens_of(&random),
                         .position = naive_below(&random, 3) == 0 ? naive_below(&random, 1u << 20) : 64 * (i % 16),
                         .seed = 2600 + i};
    qkv_coder *coder = make_coder(&c, &random);
    for (uint16_t h = 0; h < HEADS; h++) {
      if (c.calibrated || frame != QKV_FRAME_PLAIN) check_encode_part(&c, coder, h, QKV_K, &random);
      if (c.calibrated) check_encode_part(&c, coder, h, QKV_V, &random);
    }
    coder_destroy(coder);
  }
}

static void test_met(void **unused) {
  (void)unused;
  print_message(
      "%zu rows; of head and part %zu anchors, %zu of them chains (%zu of segments), %zu factors; %zu outlier rows\n",
      met.rows, met.anchors, met.chains, met.segments, met.factors, met.kept);
  assert_true(met.rows > 0 && met.kept > 0 && met.segments > 0 && met.anchors > met.chains && met.factors > 0);
  for (unsigned d = 0; d <= QKV_DEPTH_MAX; d++) assert_true(met.depths[d] > 0);
  print_message("%zu rows coded, %zu of them as zeros\n", met.encoded, met.zero);
  assert_true(met.encoded > met.zero && met.zero > 0);
  print_message("%zu rows coded by calibrated transforms or in frames, %zu of them in frames\n", met.turned,
                met.framed);
  assert_true(met.turned > met.framed && met.framed > 0);
  for (unsigned d = 1; d <= QKV_DEPTH_MAX; d++) assert_true(met.coded[d] > 0);
}

int main(int argc, char **argv) {
  if (!launch_begin(argc, argv, &first_seed)) return 77;
  qkv_kernels_setup(UINT32_MAX);
  qkv_simt_row_tables_fill(&tables);
  qkv_simt_encode_tables_fill(&encode_tables);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_data_free), cmocka_unit_test(test_predictions),   cmocka_unit_test(test_calibrated),
      cmocka_unit_test(test_encode),    cmocka_unit_test(test_encode_turned), cmocka_unit_test(test_met),
  };
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  return failed != 0 ? failed : launch_end();
}
