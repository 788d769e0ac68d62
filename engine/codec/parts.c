#include "engine/codec/parts.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/codec/parts_internal.h"
#include "engine/codec/phases.h"
#include "engine/kernel/kernel.h"

enum {
  ALIGN = QKVI_PARTS_ALIGN,
  PART_BYTES = 16,
  HEAD_BYTES = 128,
  PARTS_BYTES = HEAD_BYTES - sizeof(qkv_page_header)
};
enum { PART_PARAMETERS = 2, MORE_PARAMETERS = QKV_PARAMETERS_MAX - PART_PARAMETERS };

// Keys to attend that are coded before RoPE, in a block of queries.
typedef struct turned_queries {
  qkv_phases_walk walk;
  _Alignas(64) float rows[QKV_QUERY_BLOCK * QKV_DIM_MAX];
} turned_queries;
_Static_assert(sizeof(turned_queries) <= QKV_QUERY_OWN_MAX, "they lie in what a codec has of a block");

static const qkvi_parts_coder *own(const qkv_coder *coder) {
  return (const qkvi_parts_coder *)coder;
}

// The coder of a head's part.
static qkv_part_coder part_of(const qkv_coder *coder, uint16_t kv_head, qkv_part part) {
  qkv_part_coder of = own(coder)->parts[part];
  if (own(coder)->heads[part] != NULL) of.tables = own(coder)->heads[part] + kv_head * own(coder)->head_bytes[part];
  return of;
}

// Before RoPE, where keys are coded so and turn at all.
static bool codes_before_rope(const qkv_coder *coder, qkv_part part) {
  return part == QKV_K && own(coder)->parts[part].codec->columns != NULL && own(coder)->phases != NULL;
}

// ---- Pages ----

static size_t head_bytes(const qkvi_parts_coder *coder) {
  return (size_t)coder->parts[QKV_K].block_bytes + coder->parts[QKV_V].block_bytes;
}

static size_t aligned(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// Whether blocks have ends of their own.
static bool streams(const qkv_coder *coder) {
  return own(coder)->parts[QKV_K].codec->stream != NULL || own(coder)->parts[QKV_V].codec->stream != NULL;
}

static size_t block_align(const qkv_coder *coder) {
  const bool all = own(coder)->parts[QKV_K].codec->stream != NULL && own(coder)->parts[QKV_V].codec->stream != NULL;
  return all ? sizeof(uint16_t) : ALIGN;
}

// Where blocks begin.
static size_t blocks_at(const qkv_coder *coder) {
  return HEAD_BYTES + (streams(coder) ? aligned((size_t)2 * coder->kv_heads * sizeof(uint32_t), ALIGN) : 0);
}

size_t qkvi_parts_page_bytes_max(const qkv_coder *coder) {
  return blocks_at(coder) + coder->kv_heads * head_bytes(own(coder));
}

// Where the i-th block ends.
static uint32_t block_end(const void *page, size_t i) {
  uint32_t end;
  memcpy(&end, (const uint8_t *)page + HEAD_BYTES + i * sizeof end, sizeof end);
  return end;
}

// Where a block begins, with or without ends.
static const uint8_t *block_of(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part) {
  const size_t i = 2 * (size_t)kv_head + part;
  if (streams(coder))
    return (const uint8_t *)page + blocks_at(coder) +
           (i == 0 ? 0 : aligned(block_end(page, i - 1), block_align(coder)));
  return (const uint8_t *)page + HEAD_BYTES + kv_head * head_bytes(own(coder)) +
         (part == QKV_V ? own(coder)->parts[QKV_K].block_bytes : 0);
}

// A part of a page, and its block.
static qkv_part_coder part_at(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                              const uint8_t **block) {
  qkv_part_coder of = part_of(coder, kv_head, part);
  *block = block_of(coder, page, kv_head, part);
  of.bytes = of.block_bytes;
  if (streams(coder)) {
    const uint8_t *first = (const uint8_t *)page + blocks_at(coder);
    of.bytes = (size_t)(first + block_end(page, 2 * (size_t)kv_head + part) - *block);
  }
  return of;
}

// What is between the header and the blocks.
static void write_parts(const qkv_part_coder *parts, uint8_t out[PARTS_BYTES]) {
  memset(out, 0, PARTS_BYTES);
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder *coder = &parts[part];
    uint8_t *to = out + part * PART_BYTES, *more = out + 2 * PART_BYTES + part * MORE_PARAMETERS * sizeof(uint32_t);
    to[0] = coder->codec->id;
    to[1] = coder->codec->version;
    to[2] = coder->bits;
    to[3] = coder->tier % QKV_TIER_BIT;
    memcpy(to + 4, &coder->block_bytes, sizeof coder->block_bytes);
    memcpy(to + 8, coder->parameters, PART_PARAMETERS * sizeof(uint32_t));
    memcpy(more, coder->parameters + PART_PARAMETERS, MORE_PARAMETERS * sizeof(uint32_t));
  }
}

typedef struct encode_job {
  const qkv_coder *coder;
  uint64_t position;
  uint32_t tokens;
  qkv_dtype dtype;
  const void *rows[2];
  void *image;
} encode_job;

// A head's rows [64][dim], as its codec takes them.
static void bring_rows(const encode_job *job, size_t index, const qkv_part_coder *of, float *rows) {
  const qkv_coder *coder = job->coder;
  const size_t dim = of->dim, bytes = dim * qkv_dtype_size(job->dtype);
  const uint8_t *from = (const uint8_t *)job->rows[of->part] + index * bytes;
  for (size_t t = 0; t < job->tokens; t++)
    qkv_to_float(job->dtype, from + t * coder->kv_heads * bytes, rows + t * dim, dim);
  memset(rows + job->tokens * dim, 0, (QKV_PAGE_TOKENS - job->tokens) * dim * sizeof *rows);
  if (codes_before_rope(coder, of->part))
    qkv_phases_inverse(own(coder)->phases, job->position, job->tokens, dim, rows);
}

static void encode_head(void *context, size_t index, size_t worker) {
  const encode_job *job = context;
  const qkv_coder *coder = job->coder;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  (void)worker;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder of = part_of(coder, (uint16_t)index, part);
    bring_rows(job, index, &of, rows);
    of.codec->encode(&of, rows, job->tokens, (uint8_t *)block_of(coder, job->image, (uint16_t)index, part));
  }
}

// ---- Blocks without a fixed size ----

typedef struct stream_job {
  encode_job encode;
  size_t bytes[2], stride;  // of a head's parts, prepared, and of a head
  uint8_t *prepared;
  size_t space;      // of all blocks, and of each while it is written
  uint8_t *written;  // [kv_heads][2][space up to 64s]
  unsigned step;
  size_t *sizes;  // [kv_heads][2], as measured, and as written; 0: it did not fit
} stream_job;

static size_t prepared_bytes(const qkv_part_coder *of) {
  return aligned(of->codec->stream != NULL ? of->codec->stream->prepared_bytes(of) : of->block_bytes, ALIGN);
}

static uint8_t *prepared_of(const stream_job *job, size_t head, qkv_part part) {
  return job->prepared + head * job->stride + (part == QKV_V ? job->bytes[QKV_K] : 0);
}

static uint8_t *written_of(const stream_job *job, size_t head, qkv_part part) {
  return job->written + (2 * head + part) * aligned(job->space, ALIGN);
}

static void prepare_head(void *context, size_t index, size_t worker) {
  const stream_job *job = context;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  (void)worker;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder of = part_of(job->encode.coder, (uint16_t)index, part);
    uint8_t *to = prepared_of(job, index, part);
    bring_rows(&job->encode, index, &of, rows);
    if (of.codec->stream != NULL) {
      of.codec->stream->prepare(&of, job->encode.position, rows, job->encode.tokens, to);
    } else {
      memset(to, 0, of.block_bytes);
      of.codec->encode(&of, rows, job->encode.tokens, to);
    }
  }
}

static void measure_head(void *context, size_t index, size_t worker) {
  const stream_job *job = context;
  (void)worker;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder of = part_of(job->encode.coder, (uint16_t)index, part);
    const qkv_part_stream *stream = of.codec->stream;
    const size_t bytes =
        stream != NULL ? stream->measure(&of, prepared_of(job, index, part), job->step) : of.block_bytes;
    job->sizes[2 * index + part] = aligned(bytes, block_align(job->encode.coder));
  }
}

static void write_head(void *context, size_t index, size_t worker) {
  const stream_job *job = context;
  (void)worker;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkv_part_coder of = part_of(job->encode.coder, (uint16_t)index, part);
    const qkv_part_stream *stream = of.codec->stream;
    uint8_t *to = written_of(job, index, part);
    uint8_t *from = prepared_of(job, index, part);
    if (stream == NULL) memcpy(to, from, of.block_bytes);
    job->sizes[2 * index + part] =
        stream != NULL ? stream->write(&of, from, job->step, to, job->space) : of.block_bytes;
  }
}

static void each_head(const stream_job *job, qkv_pool *pool, void (*call)(void *, size_t, size_t)) {
  if (pool != NULL) return qkv_pool_loop(pool, job->encode.coder->kv_heads, call, (void *)job);
  for (size_t h = 0; h < job->encode.coder->kv_heads; h++) call((void *)job, h, 0);
}

static size_t measure_page(stream_job *job, qkv_pool *pool, unsigned step) {
  size_t bytes = 0;
  job->step = step;
  each_head(job, pool, measure_head);
  for (size_t i = 0; i < 2 * (size_t)job->encode.coder->kv_heads; i++) bytes += job->sizes[i];
  return bytes;
}

static size_t expect_page(const stream_job *job, unsigned step) {
  const qkv_coder *coder = job->encode.coder;
  size_t bytes = 0;
  for (size_t i = 0; i < 2 * (size_t)coder->kv_heads; i++) {
    const qkv_part part = i % 2 == 0 ? QKV_K : QKV_V;
    const qkv_part_coder of = part_of(coder, (uint16_t)(i / 2), part);
    const qkv_part_stream *stream = of.codec->stream;
    bytes += stream != NULL ? stream->expect(&of, prepared_of(job, i / 2, part), step) : of.block_bytes;
  }
  return bytes;
}

// The least step from `low` on of which no more than so many bytes are expected; `high` if there is none below it.
static unsigned least_expected(const stream_job *job, unsigned low, unsigned high, double bytes) {
  while (low < high) {
    const unsigned middle = (low + high) / 2;
    if ((double)expect_page(job, middle) <= bytes) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// The least step that is within the bytes, about: what is measured at a step says how far off what is expected is,
// and from there to a step nearby it is taken to be as far off.
static unsigned find_step(stream_job *job, qkv_pool *pool, size_t bytes) {
  enum { NEARBY = 2 };
  unsigned low = 0, high = QKV_PART_STEP_LAST, step = least_expected(job, low, high, (double)bytes);
  while (low < high) {
    const size_t taken = measure_page(job, pool, step);
    if (taken > bytes) {
      low = step + 1;
    } else {
      high = step;
    }
    const double expected = (double)expect_page(job, step) * (double)bytes / (double)taken;
    const unsigned next = least_expected(job, low, high, expected);
    if (next + NEARBY >= step && next <= step + NEARBY) return next;
    step = next;
  }
  return high;
}

// Whether the blocks fit; else the page is left with anything in it. `end` gets where they end.
static bool write_blocks(stream_job *job, qkv_pool *pool, unsigned step, size_t *end) {
  const qkv_coder *coder = job->encode.coder;
  const size_t first = blocks_at(coder), align = block_align(coder), last = job->space;
  uint8_t *image = job->encode.image;
  size_t at = 0;
  job->step = step;
  each_head(job, pool, write_head);
  for (size_t i = 0; i < 2 * (size_t)coder->kv_heads; i++) {
    const size_t bytes = job->sizes[i];
    if (bytes == 0 || at + aligned(bytes, align) > last) return false;
    memcpy(image + first + at, written_of(job, i / 2, (qkv_part)(i % 2)), bytes);
    memset(image + first + at + bytes, 0, aligned(bytes, align) - bytes);
    const uint32_t word = (uint32_t)(at + bytes);
    at += aligned(bytes, align);
    memcpy(image + HEAD_BYTES + i * sizeof word, &word, sizeof word);
  }
  *end = aligned(first + at, ALIGN);
  memset(image + first + at, 0, *end - first - at);
  return true;
}

static size_t encode_streams(const encode_job *encode, qkv_pool *pool) {
  const qkv_coder *coder = encode->coder;
  const size_t heads = coder->kv_heads;
  stream_job job = {.encode = *encode, .space = qkvi_parts_page_bytes_max(coder) - blocks_at(coder)};
  size_t end = 0;
  for (qkv_part part = QKV_K; part <= QKV_V; part++)
    job.stride += job.bytes[part] = prepared_bytes(&own(coder)->parts[part]);
  job.prepared = aligned_alloc(ALIGN, heads * (job.stride + 2 * aligned(job.space, ALIGN)));
  job.sizes = calloc(2 * heads, sizeof *job.sizes);
  if (job.prepared == NULL || job.sizes == NULL) abort();
  job.written = job.prepared + heads * job.stride;
  each_head(&job, pool, prepare_head);
  unsigned step = find_step(&job, pool, job.space);
  for (; !write_blocks(&job, pool, step, &end); step++) assert(step < QKV_PART_STEP_LAST);
  free(job.prepared);
  free(job.sizes);
  return end;
}

size_t qkvi_parts_encode(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype, const void *k,
                         const void *v, qkv_pool *pool, void *image) {
  size_t bytes = qkvi_parts_page_bytes_max(coder);
  encode_job job = {
      .coder = coder, .position = position, .tokens = tokens, .dtype = dtype, .rows = {k, v}, .image = image};
  qkv_page_header *header = image;
  assert(tokens >= 1 && tokens <= QKV_PAGE_TOKENS);
  memset(image, 0, bytes);
  *header = (qkv_page_header){.magic = QKV_PAGE_MAGIC,
                              .version = QKV_PARTS_VERSION,
                              .codec = coder->codec->id,
                              .tier_k = own(coder)->parts[QKV_K].tier,
                              .tier_v = own(coder)->parts[QKV_V].tier,
                              .bytes = (uint32_t)bytes,
                              .layer = coder->layer,
                              .position = position,
                              .tokens = (uint16_t)tokens,
                              .kv_heads = coder->kv_heads,
                              .key_dim = coder->key_dim,
                              .value_dim = coder->value_dim,
                              .calibration = coder->calibration};
  write_parts(own(coder)->parts, (uint8_t *)(header + 1));
  if (streams(coder)) {
    header->bytes = (uint32_t)(bytes = encode_streams(&job, pool));
  } else if (pool != NULL) {
    qkv_pool_loop(pool, coder->kv_heads, encode_head, &job);
  } else {
    for (size_t h = 0; h < coder->kv_heads; h++) encode_head(&job, h, 0);
  }
  qkv_page_seal(image);
  return bytes;
}

// ---- Attention ----

// What the place-th page of a call brings into the cache.
static void fetch_ahead(const qkv_coder *coder, const qkv_query_block *queries, size_t place, uint16_t kv_head) {
  const void *page = queries->ahead[place].page;
  const qkv_part part = queries->ahead[place].part;
  if (page == NULL || streams(coder)) return;
  if (((const qkv_page_header *)page)->bytes != qkvi_parts_page_bytes_max(coder)) return;
  const uint8_t *block = block_of(coder, page, kv_head, part);
  for (size_t i = 0; i < own(coder)->parts[part].block_bytes; i += ALIGN) __builtin_prefetch(block + i);
}

void qkvi_parts_query(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries) {
  const qkv_part_coder keys = part_of(coder, kv_head, QKV_K);
  float *ready = (float *)queries->own;
  for (size_t i = 0; i < QKV_PAGES_TOGETHER; i++) queries->ahead[i].page = NULL;
  if (codes_before_rope(coder, QKV_K)) return qkv_phases_start(&((turned_queries *)queries->own)->walk);
  if (keys.codec->query != NULL) return keys.codec->query(&keys, queries->rows, queries->count, ready);
  memcpy(ready, queries->rows, queries->count * keys.dim * sizeof *ready);
}

// Rows that do not turn: scores = q . (column + mean).
static void score_still(const float *columns, const float *mean, size_t dim, const qkv_query_block *queries,
                        float *scores) {
  memset(scores, 0, queries->count * QKV_PAGE_TOKENS * sizeof *scores);
  for (size_t i = 0; i < queries->count; i++) {
    for (size_t c = 0; c < dim; c++) {
      const float factor = queries->rows[i * dim + c];
      for (size_t t = 0; t < QKV_PAGE_TOKENS; t++)
        scores[i * QKV_PAGE_TOKENS + t] += factor * (columns[c * QKV_PAGE_TOKENS + t] + mean[c]);
    }
  }
}

static void score_columns(const qkv_coder *coder, const void *page, const qkv_part_coder *keys, const uint8_t *block,
                          qkv_query_block *queries, float *scores) {
  const qkv_phases *phases = own(coder)->phases;
  const uint64_t position = ((const qkv_page_header *)page)->position;
  turned_queries *turned = (turned_queries *)queries->own;
  _Alignas(64) float columns[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  float means[QKV_PAGE_GROUPS * QKV_DIM_MAX];
  keys->codec->columns(keys, block, columns, means);
  if (phases == NULL) return score_still(columns, means, keys->dim, queries, scores);
  for (size_t g = 1; g < QKV_PAGE_GROUPS; g++) memcpy(means + g * keys->dim, means, keys->dim * sizeof *means);
  qkv_phases_turn_queries(phases, &turned->walk, position, queries->count, keys->dim, queries->rows, turned->rows);
  qkv_phases_score_columns(phases, position, keys->dim, columns, means, queries->count, turned->rows, scores);
}

void qkvi_parts_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                       float *scores) {
  const uint8_t *block;
  const qkv_part_coder keys = part_at(coder, page, kv_head, QKV_K, &block);
  fetch_ahead(coder, queries, 0, kv_head);
  if (keys.codec->columns != NULL) return score_columns(coder, page, &keys, block, queries, scores);
  keys.codec->scores(&keys, block, (const float *)queries->own, queries->count, queries->precision, scores);
}

void qkvi_parts_accumulate(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights, size_t n,
                           float *sums) {
  const uint8_t *block;
  const qkv_part_coder values = part_at(coder, page, kv_head, QKV_V, &block);
  values.codec->accumulate(&values, block, weights, n, QKV_PRECISION_FP32, sums);
}

size_t qkvi_parts_weigh(const qkv_coder *coder, const void *const *pages, size_t page_count, uint16_t kv_head,
                        qkv_query_block *queries, const float *scores, const float *peaks, float *totals,
                        float *sums) {
  const qkv_part_coder values = part_of(coder, kv_head, QKV_V);
  const size_t n = queries->count;
  float weights[QKV_QUERY_BLOCK * QKV_PAGE_TOKENS];
  if (!qkvi_part_in_integers(values.bits, queries->precision)) return 0;
  for (size_t p = 0; p < page_count; p++, scores += n * QKV_PAGE_TOKENS, peaks += n, totals += n) {
    fetch_ahead(coder, queries, p, kv_head);
    memcpy(weights, scores, n * QKV_PAGE_TOKENS * sizeof *weights);
    for (size_t i = 0; i < n; i++)
      totals[i] = (float)qkv_kernels_get()->weigh(weights + i * QKV_PAGE_TOKENS, peaks[i]);
    const uint8_t *block;
    const qkv_part_coder own_block = part_at(coder, pages[p], kv_head, QKV_V, &block);
    values.codec->accumulate(&own_block, block, weights, n, queries->precision, sums);
  }
  return page_count;
}

void qkvi_parts_output(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n) {
  const qkv_part_coder values = part_of(coder, kv_head, QKV_V);
  if (values.codec->output_mean != NULL) return values.codec->output_mean(&values, sums, totals, n);
  if (values.codec->output != NULL) values.codec->output(&values, sums, n);
}

// ---- Rows ----

void qkvi_parts_decode(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, bool before_rope,
                       float *rows) {
  const qkv_page_header *header = page;
  const qkv_phases *phases = own(coder)->phases;
  const uint8_t *block;
  const qkv_part_coder of = part_at(coder, page, kv_head, part, &block);
  float all[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  of.codec->decode(&of, block, all);
  memcpy(rows, all, (size_t)header->tokens * of.dim * sizeof *rows);
  const bool is_before = codes_before_rope(coder, part);
  if (part == QKV_K && is_before && !before_rope)
    qkv_phases_forward(phases, header->position, header->tokens, of.dim, rows);
  if (part == QKV_K && !is_before && before_rope && phases != NULL)
    qkv_phases_inverse(phases, header->position, header->tokens, of.dim, rows);
}

uint32_t qkvi_parts_rows_match(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                               uint32_t first, uint32_t tokens, const float *rows) {
  const qkv_page_header *header = page;
  const uint8_t *block;
  const qkv_part_coder of = part_at(coder, page, kv_head, part, &block);
  float before[QKV_PAGE_TOKENS * QKV_DIM_MAX] = {0};
  if (codes_before_rope(coder, part)) {
    // In the slots that they were coded in, so that they are turned by the same numbers.
    memcpy(before + first * of.dim, rows, (size_t)tokens * of.dim * sizeof *rows);
    qkv_phases_inverse(own(coder)->phases, header->position, first + tokens, of.dim, before);
    rows = before + first * of.dim;
  }
  if (of.codec->stream != NULL) return of.codec->stream->matching(&of, block, first, tokens, rows);
  for (uint32_t t = 0; t < tokens; t++) {
    if (!of.codec->matches(&of, block, first + t, rows + (size_t)t * of.dim)) return t;
  }
  return tokens;
}

// ---- Validation ----

static qkv_status validate_numbers(const qkv_coder *coder, const qkv_page_header *header, qkv_error *error) {
  const struct {
    const char *field;
    uint64_t is, expected;
  } rows[] = {
      {"magic", header->magic, QKV_PAGE_MAGIC},
      {"version", header->version, QKV_PARTS_VERSION},
      {"codec", header->codec, coder->codec->id},
      {"tier_k", header->tier_k, own(coder)->parts[QKV_K].tier},
      {"tier_v", header->tier_v, own(coder)->parts[QKV_V].tier},
      {"bytes", header->bytes, streams(coder) ? header->bytes : qkvi_parts_page_bytes_max(coder)},
      {"kv_heads", header->kv_heads, coder->kv_heads},
      {"key_dim", header->key_dim, coder->key_dim},
      {"value_dim", header->value_dim, coder->value_dim},
      {"calibration", header->calibration, coder->calibration},
      {"features", header->features, 0},
      {"frame", header->frame, 0},
      {"outliers", header->outliers, 0},
      {"reserved0", header->reserved0, 0},
      {"reserved1", header->reserved1, 0},
      {"reserved2", header->reserved2, 0},
  };
  for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
    if (rows[i].is == rows[i].expected) continue;
    return qkv_fail(error, QKV_DATA_LOSS, "page.%s is %llu, expected %llu", rows[i].field,
                    (unsigned long long)rows[i].is, (unsigned long long)rows[i].expected);
  }
  if (header->tokens < 1 || header->tokens > QKV_PAGE_TOKENS)
    return qkv_fail(error, QKV_DATA_LOSS, "page.tokens is %u, allowed are 1 to %d", header->tokens, QKV_PAGE_TOKENS);
  if (header->position > QKV_PAGE_POSITION_MAX - header->tokens)
    return qkv_fail(error, QKV_DATA_LOSS, "page.position is %llu, positions end at %llu",
                    (unsigned long long)header->position, (unsigned long long)QKV_PAGE_POSITION_MAX);
  return QKV_OK;
}

static qkv_status validate_parts(const qkv_coder *coder, const uint8_t *image, qkv_error *error) {
  uint8_t expected[PARTS_BYTES];
  write_parts(own(coder)->parts, expected);
  for (size_t i = 0; i < PARTS_BYTES; i++) {
    const size_t at = sizeof(qkv_page_header) + i;
    if (image[at] != expected[i])
      return qkv_fail(error, QKV_DATA_LOSS, "page has %u at %zu, the coder's has %u", image[at], at, expected[i]);
  }
  return QKV_OK;
}

static bool all_zero(const uint8_t *image, size_t begin, size_t end) {
  for (size_t i = begin; i < end; i++) {
    if (image[i] != 0) return false;
  }
  return true;
}

// Blocks follow each other without gaps, and what pads is 0.
static qkv_status validate_ends(const qkv_coder *coder, const uint8_t *image, size_t bytes, qkv_error *error) {
  const size_t first = blocks_at(coder), blocks = 2 * (size_t)coder->kv_heads;
  const size_t align = block_align(coder);
  size_t before = 0;
  if (bytes < first || bytes > qkvi_parts_page_bytes_max(coder) || bytes % ALIGN != 0)
    return qkv_fail(error, QKV_DATA_LOSS, "page.bytes is %zu, allowed are multiples of 64 from %zu to %zu", bytes,
                    first, qkvi_parts_page_bytes_max(coder));
  for (size_t i = 0; i < blocks; i++) {
    const qkv_part_coder *of = &own(coder)->parts[i % 2];
    const size_t end = block_end(image, i);
    const bool sized = of->codec->stream != NULL || end == before + of->block_bytes;
    if (end < before || aligned(end, align) > bytes - first || !sized ||
        !all_zero(image, first + end, first + aligned(end, align)))
      return qkv_fail(error, QKV_DATA_LOSS, "page: block %zu ends at %zu, that before it at %zu of %zu", i, end,
                      before, bytes - first);
    before = aligned(end, align);
  }
  if (aligned(first + before, ALIGN) == bytes && all_zero(image, first + before, bytes) &&
      all_zero(image, HEAD_BYTES + blocks * sizeof(uint32_t), first))
    return QKV_OK;
  return qkv_fail(error, QKV_DATA_LOSS, "page: what is around the blocks is not as it should be");
}

static qkv_status validate_checksum(const uint8_t *image, const qkv_page_header *header, qkv_error *error) {
  static const uint64_t none = 0;
  XXH3_state_t *state = XXH3_createState();
  if (state == NULL) abort();
  const size_t before = offsetof(qkv_page_header, checksum);
  (void)XXH3_64bits_reset(state);
  (void)XXH3_64bits_update(state, image, before);
  (void)XXH3_64bits_update(state, &none, sizeof none);
  (void)XXH3_64bits_update(state, image + sizeof *header, header->bytes - sizeof *header);
  const uint64_t sum = XXH3_64bits_digest(state);
  (void)XXH3_freeState(state);
  if (sum == header->checksum) return QKV_OK;
  return qkv_fail(error, QKV_DATA_LOSS, "page.checksum does not fit its bytes");
}

qkv_status qkvi_parts_validate(const qkv_coder *coder, const void *image, size_t bytes, qkv_error *error) {
  qkv_page_header header;
  if (bytes < HEAD_BYTES) return qkv_fail(error, QKV_DATA_LOSS, "page has %zu bytes, at least %d", bytes, HEAD_BYTES);
  memcpy(&header, image, sizeof header);
  QKV_TRY(validate_numbers(coder, &header, error));
  if (header.bytes != bytes)
    return qkv_fail(error, QKV_DATA_LOSS, "page.bytes is %u, there are %zu", header.bytes, bytes);
  QKV_TRY(validate_parts(coder, image, error));
  if (streams(coder)) QKV_TRY(validate_ends(coder, image, bytes, error));
  QKV_TRY(validate_checksum(image, &header, error));
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const uint8_t *block;
      const qkv_part_coder of = part_at(coder, image, h, part, &block);
      const char *wrong = of.codec->validate(&of, block);
      if (wrong == NULL) continue;
      return qkv_fail(error, QKV_DATA_LOSS, "page: KV head %u: %s: %s", h, part == QKV_K ? "keys" : "values", wrong);
    }
  }
  return QKV_OK;
}

// ---- Parameters ----

void qkvi_part_defaults(const qkv_codec *codec, uint32_t parameters[QKV_PARAMETERS_MAX]) {
  for (size_t i = 0; i < codec->parameter_count; i++) {
    if (parameters[i] == 0) parameters[i] = codec->parameters[i].fallback;
  }
}
