#include "engine/codec/embedded.h"

#include <assert.h>
#include <pthread.h>
#include <string.h>

#include "engine/codec/hadamard.h"
#include "engine/codec/pack.h"
#include "engine/kernel/kernel.h"

enum { WIDTHS = QKV_DIM_MAX / QKV_BAND };

// The schedule of every valid width, filled once: pages are found by the thousand.
static qkv_schedule schedules[WIDTHS];

static void fill_schedules(void) {
  for (size_t i = 0; i < WIDTHS; i++) qkv_schedule_uniform(&schedules[i], (uint16_t)((i + 1) * QKV_BAND));
}

static const qkv_schedule *schedule_of(uint16_t dim) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill_schedules);
  assert(dim >= QKV_BAND && dim <= QKV_DIM_MAX && dim % QKV_BAND == 0);
  return &schedules[dim / QKV_BAND - 1];
}

static void find(const void *page, uint16_t kv_head, qkv_part part, qkv_page_codes *codes) {
  const qkv_page_header *header = page;
  qkv_page_find(page, kv_head, part, schedule_of(header->key_dim), schedule_of(header->value_dim), codes);
}

static bool embedded_bits_valid(double bits) {
  return bits == 1 || bits == 2 || bits == 3 || bits == 4 || bits == 8;
}

static size_t embedded_page_bytes(const qkv_page_shape *shape) {
  return qkv_page_bytes(shape, schedule_of(shape->key_dim), schedule_of(shape->value_dim));
}

// Codes `tokens` rows that are `stride` floats apart into the slots from `first` on; the page's other slots become
// zero rows.
static void encode_head(qkv_part part, const qkv_schedule *schedule, unsigned tier, uint32_t first, uint32_t tokens,
                        const float *rows, size_t stride, uint8_t *gains, uint8_t *codes) {
  const size_t dim = schedule->dim;
  float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  memset(turned, 0, QKV_PAGE_TOKENS * dim * sizeof *turned);
  for (size_t t = 0; t < tokens; t++) {
    float *row = turned + (first + t) * dim;
    memcpy(row, rows + t * stride, dim * sizeof *row);
    qkv_hadamard_forward(row, dim);
  }
  qkv_kernels_get()->encode(part, schedule, tier, turned, gains, codes);
}

static void embedded_encode(const qkv_page_shape *shape, uint32_t layer, uint64_t position, uint32_t tokens,
                            const float *k, const float *v, void *image) {
  assert(tokens >= 1 && tokens <= QKV_PAGE_TOKENS);
  const qkv_schedule *key_schedule = schedule_of(shape->key_dim), *value_schedule = schedule_of(shape->value_dim);
  qkv_page_format(image, shape, QKV_CODEC_EMBEDDED, layer, position, key_schedule, value_schedule);
  ((qkv_page_header *)image)->tokens = (uint16_t)tokens;
  for (uint16_t h = 0; h < shape->kv_heads; h++) {
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      const uint8_t tier = part == QKV_K ? shape->bits_k : shape->bits_v;
      const float *rows = part == QKV_K ? k : v;
      qkv_page_codes codes;
      qkv_page_find(image, h, part, key_schedule, value_schedule, &codes);
      const size_t dim = codes.schedule->dim;
      encode_head(part, codes.schedule, tier, 0, tokens, rows + h * dim, shape->kv_heads * dim,
                  (uint8_t *)codes.gains, (uint8_t *)codes.groups[0]);
    }
  }
  qkv_page_seal(image);
}

static void embedded_query(const qkv_page_shape *shape, uint32_t layer, uint16_t kv_head, float *queries, size_t n) {
  (void)layer, (void)kv_head;
  for (size_t i = 0; i < n; i++) qkv_hadamard_forward(queries + i * shape->key_dim, shape->key_dim);
}

static void embedded_scores(const void *page, uint16_t kv_head, const float *queries, size_t n, float *scores) {
  assert(n <= QKV_QUERY_BLOCK);
  qkv_page_codes codes;
  find(page, kv_head, QKV_K, &codes);
  qkv_kernels_get()->scores(&codes, queries, n, scores);
}

static void embedded_accumulate(const void *page, uint16_t kv_head, const float *weights, size_t n, float *sums) {
  assert(n <= QKV_QUERY_BLOCK);
  qkv_page_codes codes;
  find(page, kv_head, QKV_V, &codes);
  qkv_kernels_get()->accumulate(&codes, weights, n, sums);
}

static void embedded_output(const qkv_page_shape *shape, uint32_t layer, uint16_t kv_head, float *sums, size_t n) {
  (void)layer, (void)kv_head;
  for (size_t i = 0; i < n; i++) qkv_hadamard_inverse(sums + i * shape->value_dim, shape->value_dim);
}

static void embedded_decode(const void *page, uint16_t kv_head, qkv_part part, float *rows) {
  const qkv_page_header *header = page;
  qkv_page_codes codes;
  find(page, kv_head, part, &codes);
  const size_t dim = codes.schedule->dim;
  float turned[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  qkv_kernels_get()->decode(part, &codes, turned);
  for (size_t t = 0; t < header->tokens; t++) qkv_hadamard_inverse(turned + t * dim, dim);
  memcpy(rows, turned, header->tokens * dim * sizeof *rows);
}

// Slots [first, end) of one group that are the same in both, one after the other. `theirs` may be at a lower tier:
// its codes are prefixes of those at the top.
static uint32_t matching_slots(qkv_part part, const qkv_page_codes *mine, const qkv_page_codes *theirs, size_t group,
                               uint32_t first, uint32_t end) {
  const qkv_schedule *schedule = theirs->schedule;
  const unsigned drop = mine->tiers[group] - theirs->tiers[group];
  qkvi_codes a[QKV_DIM_MAX], b[QKV_DIM_MAX];
  qkvi_unpack(part, schedule, mine->tiers[group], mine->groups[group], a);
  qkvi_unpack(part, schedule, theirs->tiers[group], theirs->groups[group], b);
  for (uint32_t slot = first; slot < end; slot++) {
    if (mine->gains[slot] != theirs->gains[slot]) return slot - first;
    for (size_t c = 0; c < schedule->dim; c++) {
      if (a[c][slot % QKV_GROUP_TOKENS] >> drop != b[c][slot % QKV_GROUP_TOKENS]) return slot - first;
    }
  }
  return end - first;
}

static uint32_t embedded_rows_match(const void *page, uint16_t kv_head, qkv_part part, uint32_t first,
                                    uint32_t tokens, const float *rows) {
  const qkv_page_header *header = page;
  const uint8_t top = part == QKV_K ? header->bits_k : header->bits_v;
  assert(first + tokens <= header->tokens);
  qkv_page_codes theirs;
  find(page, kv_head, part, &theirs);
  const qkv_schedule *schedule = theirs.schedule;
  uint8_t gains[QKV_PAGE_TOKENS], bytes[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  encode_head(part, schedule, top, first, tokens, rows, schedule->dim, gains, bytes);
  qkv_page_codes mine = {.gains = gains, .schedule = schedule};
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    mine.groups[g] = bytes + g * qkv_schedule_group_bytes(schedule, top);
    mine.tiers[g] = top;
  }
  for (uint32_t slot = first; slot < first + tokens;) {
    const size_t group = slot / QKV_GROUP_TOKENS;
    uint32_t end = (uint32_t)(group + 1) * QKV_GROUP_TOKENS;
    if (end > first + tokens) end = first + tokens;
    const uint32_t same = matching_slots(part, &mine, &theirs, group, slot, end);
    if (same < end - slot) return slot + same - first;
    slot = end;
  }
  return tokens;
}

static qkv_status validate_kind(const qkv_page_header *header, qkv_error *error) {
  if (header->codec != QKV_CODEC_EMBEDDED) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.codec is %u, expected %d", header->codec, QKV_CODEC_EMBEDDED);
  }
  if (header->calibration != 0 || header->frame != 0) {
    return qkv_fail(error, QKV_DATA_LOSS, "page.calibration is %u and page.frame %u, only 0 is known",
                    header->calibration, header->frame);
  }
  return QKV_OK;
}

static qkv_status embedded_validate(const void *image, size_t bytes, qkv_error *error) {
  qkv_page_header header;
  if (bytes < sizeof header) {
    return qkv_fail(error, QKV_DATA_LOSS, "the page is %zu bytes, its header is %zu", bytes, sizeof header);
  }
  memcpy(&header, image, sizeof header);
  qkv_schedule key_schedule, value_schedule;  // of any width
  qkv_schedule_uniform(&key_schedule, header.key_dim);
  qkv_schedule_uniform(&value_schedule, header.value_dim);
  const char *wrong = qkv_schedule_validate(&key_schedule);
  if (wrong) return qkv_fail(error, QKV_DATA_LOSS, "page.key_dim is %u: %s", header.key_dim, wrong);
  wrong = qkv_schedule_validate(&value_schedule);
  if (wrong) return qkv_fail(error, QKV_DATA_LOSS, "page.value_dim is %u: %s", header.value_dim, wrong);
  QKV_TRY(qkv_page_validate(image, bytes, &key_schedule, &value_schedule, error));
  return validate_kind(&header, error);
}

// The error of the quantizer on N(0, 1) plus 1 to 3 %. Gaussian rows of any width stay below, and so do rows
// with outliers where the width is a power of two, and whatever tier a page is cut to. (In other widths an
// outlier is spread over its block alone, and the row's gain fits the other blocks badly.)
static double embedded_error_bound(double bits) {
  static const double bounds[] = {1, 0.372, 0.122, 0.0354, 0.0098, 1, 1, 1, 0.0000445};
  assert(embedded_bits_valid(bits));
  return bounds[(int)bits];
}

const qkv_codec qkvi_codec_embedded = {
    .id = QKV_CODEC_EMBEDDED,
    .name = "embedded",
    .bits_valid = embedded_bits_valid,
    .page_bytes = embedded_page_bytes,
    .encode = embedded_encode,
    .query = embedded_query,
    .scores = embedded_scores,
    .accumulate = embedded_accumulate,
    .output = embedded_output,
    .decode = embedded_decode,
    .rows_match = embedded_rows_match,
    .validate = embedded_validate,
    .error_bound = embedded_error_bound,
};
