// The bytes of a calibration: where things lie, and the reader that takes any bytes.
#define XXH_STATIC_LINKING_ONLY  // the hash state on the stack
#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "engine/codec/calibration_internal.h"
#include "engine/codec/codec.h"
#include "engine/codec/hadamard.h"
#include "engine/codec/page.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a calibration is read where it lies");

enum { ALIGN = 64, LAYERS_MAX = 1024, Q_HEADS_MAX = 65536 };

// How far a row may come back from itself through analysis and synthesis in fp32, relatively.
static const double DUALITY_MAX = 0.01;

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

bool qkvi_band_valid(uint32_t band, uint32_t dim) {
  return (band == QKV_BAND || band == 2 * QKV_BAND) && dim % band == 0;
}

// ---- Where things lie ----

typedef struct part_layout {
  size_t order, mean, weights, analysis, synthesis, pairs, anchor, heavy, bytes;  // offsets, and what it takes
} part_layout;

static part_layout layout_of(uint32_t dim, uint8_t band, bool anchored, bool heavy) {
  part_layout at = {.order = sizeof(qkvi_part_header)};
  at.mean = at.order + aligned((size_t)QKV_DEPTH_MAX * dim / band);
  at.weights = at.mean + aligned(dim * sizeof(float));
  at.analysis = at.weights + aligned(dim * sizeof(float));
  at.synthesis = at.analysis + aligned((size_t)dim * dim * sizeof(float));
  at.pairs = at.synthesis + aligned((size_t)dim * dim * sizeof(float));
  at.anchor = at.pairs + (anchored ? aligned(QKV_ANCHOR_PAIRS_MAX * sizeof(uint16_t)) : 0);
  at.heavy = at.anchor + (anchored ? aligned(QKV_ANCHOR_PAIRS_MAX * 2 * sizeof(float)) : 0);
  at.bytes = at.heavy + (heavy ? aligned(dim * sizeof(float)) : 0);
  return at;
}

static bool rotates(const qkv_calibration_shape *shape) {
  return shape->rope.theta != 0;
}

// The parts that the file has, of one head, one after the other.
typedef struct head_layout {
  part_layout parts[QKV_CALIBRATION_PARTS];
  size_t begins[QKV_CALIBRATION_PARTS];
  size_t bytes;
} head_layout;

static head_layout head_layout_of(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k,
                                  uint8_t band_v) {
  const bool anchored = rotates(shape) && format == QKV_TURN_PAGE;
  const part_layout attend = layout_of(shape->key_dim, band_k, anchored, format >= QKV_CALIBRATION_FORMAT_HEAVY);
  const part_layout archive = rotates(shape) ? layout_of(shape->key_dim, band_k, false, false) : attend;
  head_layout head = {.parts = {attend, archive, layout_of(shape->value_dim, band_v, false, false)}};
  head.begins[QKV_PART_K_ARCHIVE] = rotates(shape) ? attend.bytes : 0;
  head.begins[QKV_PART_V] = head.begins[QKV_PART_K_ARCHIVE] + archive.bytes;
  head.bytes = head.begins[QKV_PART_V] + head.parts[QKV_PART_V].bytes;
  return head;
}

size_t qkvi_calibration_size(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k, uint8_t band_v) {
  const head_layout head = head_layout_of(shape, format, band_k, band_v);
  const size_t heads = (size_t)shape->layers * shape->kv_heads;
  const size_t capacity = QKV_CALIBRATION_BYTES_MAX - sizeof(qkvi_calibration_header);
  return heads > capacity / head.bytes ? 0 : sizeof(qkvi_calibration_header) + heads * head.bytes;
}

static qkv_turn_rule rule_of(uint32_t format) {
  return format == QKV_TURN_PAGE ? QKV_TURN_PAGE : QKV_TURN_BLOCKS;
}

// Of any format; narrow bands take the most.
static size_t largest_size(const qkv_calibration_shape *shape) {
  size_t largest = 0;
  for (uint32_t format = QKV_CALIBRATION_FORMAT_FIRST; format <= QKV_CALIBRATION_FORMAT; format++) {
    const size_t bytes = qkvi_calibration_size(shape, format, QKV_BAND, QKV_BAND);
    if (bytes == 0) return 0;
    if (bytes > largest) largest = bytes;
  }
  return largest;
}

qkvi_part_view qkvi_calibration_part(const qkv_calibration_shape *shape, uint8_t *bytes, uint32_t layer,
                                     uint32_t kv_head, qkv_calibration_part part) {
  const qkvi_calibration_header *header = (const qkvi_calibration_header *)bytes;
  const head_layout head = head_layout_of(shape, header->format, header->band_k, header->band_v);
  const part_layout *at = &head.parts[part];
  uint8_t *begin = bytes + sizeof *header + ((size_t)layer * shape->kv_heads + kv_head) * head.bytes;
  begin += head.begins[part];
  const uint8_t band = part == QKV_PART_V ? header->band_v : header->band_k;
  const uint32_t dim = part == QKV_PART_V ? shape->value_dim : shape->key_dim;
  const bool anchored = at->heavy > at->pairs;
  return (qkvi_part_view){.dim = (uint16_t)dim,
                          .band = band,
                          .order_count = (size_t)QKV_DEPTH_MAX * dim / band,
                          .header = (qkvi_part_header *)begin,
                          .order = begin + at->order,
                          .mean = (float *)(begin + at->mean),
                          .weights = (float *)(begin + at->weights),
                          .analysis = (float *)(begin + at->analysis),
                          .synthesis = (float *)(begin + at->synthesis),
                          .pair_indices = anchored ? (uint16_t *)(begin + at->pairs) : NULL,
                          .anchor = anchored ? (float *)(begin + at->anchor) : NULL,
                          .heavy = at->bytes > at->heavy ? (float *)(begin + at->heavy) : NULL};
}

void qkvi_schedule_from_order(const uint8_t *order, size_t count, uint16_t dim, uint8_t band,
                              qkv_schedule *schedule) {
  uint8_t depths[QKV_DIM_MAX / QKV_BAND] = {0};
  uint16_t reach[QKV_DEPTH_MAX + 1] = {dim};
  size_t done = 0;
  schedule->dim = dim;
  for (unsigned tier = 0; tier <= QKV_TIER_MAX; tier++) {
    const size_t due = (size_t)tier * dim / ((size_t)QKV_TIER_BIT * band);
    assert(due <= count);
    for (; done < due; done++) reach[++depths[order[done]]] += band;
    memcpy(schedule->reach[tier], reach, sizeof reach);
  }
  qkv_schedule_finish(schedule);
}

// ---- Checks ----

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

static qkv_status check_count(const char *field, uint32_t value, uint32_t most, qkv_error *error) {
  if (value >= 1 && value <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.%s is %" PRIu32 ", allowed are 1 to %" PRIu32, field,
                  value, most);
}

static qkv_status check_width(const char *field, uint32_t dim, const char *band_field, uint8_t band,
                              qkv_error *error) {
  if (dim < QKV_BAND || dim > QKV_DIM_MAX || dim % QKV_BAND != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "calibration.%s is %" PRIu32 ", allowed are multiples of %d from %d to %d", field, dim, QKV_BAND,
                    QKV_BAND, QKV_DIM_MAX);
  }
  if (qkvi_band_valid(band, dim)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "calibration.%s is %u, allowed are 8 and 16 where they divide %s %" PRIu32, band_field, band, field,
                  dim);
}

static qkv_status check_shape(const qkv_calibration_shape *shape, uint8_t band_k, uint8_t band_v, qkv_error *error) {
  QKV_TRY(check_count("layers", shape->layers, LAYERS_MAX, error));
  QKV_TRY(check_count("kv_heads", shape->kv_heads, QKV_KV_HEADS_MAX, error));
  QKV_TRY(check_count("q_heads", shape->q_heads, Q_HEADS_MAX, error));
  if (shape->q_heads % shape->kv_heads != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "calibration.q_heads is %" PRIu32 ", must be a multiple of kv_heads %" PRIu32, shape->q_heads,
                    shape->kv_heads);
  }
  QKV_TRY(check_width("key_dim", shape->key_dim, "band_k", band_k, error));
  QKV_TRY(check_width("value_dim", shape->value_dim, "band_v", band_v, error));
  if (largest_size(shape) > 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "a calibration of this geometry takes more than %zu bytes",
                  QKV_CALIBRATION_BYTES_MAX);
}

qkv_status qkv_calibration_shape_check(const qkv_calibration_shape *shape, qkv_error *error) {
  return check_shape(shape, QKV_BAND, QKV_BAND, error);
}

static qkv_rope rope_of(const qkvi_calibration_header *header) {
  if (header->theta == 0) return (qkv_rope){0};
  return (qkv_rope){.theta = header->theta,
                    .width = header->width,
                    .interleaved = header->interleaved != 0,
                    .scaling = (qkv_rope_scaling)header->scaling,
                    .factor = header->factor,
                    .original_max_position = header->original_max_position,
                    .low_freq_factor = header->low_freq_factor,
                    .high_freq_factor = header->high_freq_factor,
                    .beta_fast = header->beta_fast,
                    .beta_slow = header->beta_slow,
                    .attention_factor = header->attention_factor};
}

static void put_rope(qkvi_calibration_header *header, const qkv_rope *rope) {
  header->theta = rope->theta;
  header->width = rope->width;
  header->interleaved = rope->interleaved;
  header->scaling = (uint8_t)rope->scaling;
  header->factor = rope->factor;
  header->original_max_position = rope->original_max_position;
  header->low_freq_factor = rope->low_freq_factor;
  header->high_freq_factor = rope->high_freq_factor;
  header->beta_fast = rope->beta_fast;
  header->beta_slow = rope->beta_slow;
  header->attention_factor = rope->attention_factor;
}

// The rope must be as qkv_rope_resolve leaves it: one model has one spelling.
static qkv_status read_rope(const qkvi_calibration_header *header, qkv_rope *rope, qkv_error *error) {
  if (isnan(header->theta)) REFUSE("calibration.rope.theta is nan");
  *rope = rope_of(header);
  if (qkv_rope_resolve(rope, header->key_dim, error) != QKV_OK) {
    return error == NULL ? QKV_INVALID_ARGUMENT : qkv_error_prefix(error, "calibration.");
  }
  qkvi_calibration_header resolved = *header;
  put_rope(&resolved, rope);
  // Bit by bit: 0 and -0 are two spellings.
  const uint8_t *const spelling = (const uint8_t *)&resolved, *const said = (const uint8_t *)header;
  if (memcmp(spelling, said, sizeof resolved) == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.rope has fields that its scaling does not use");
}

static uint64_t checksum(const uint8_t *bytes, size_t size) {
  static const uint8_t zero[sizeof(uint64_t)] = {0};
  const size_t at = offsetof(qkvi_calibration_header, checksum);
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, bytes, at);
  XXH3_64bits_update(&state, zero, sizeof zero);
  XXH3_64bits_update(&state, bytes + at + sizeof zero, size - at - sizeof zero);
  return XXH3_64bits_digest(&state);
}

void qkvi_calibration_seal(uint8_t *bytes, size_t size) {
  const uint64_t sum = checksum(bytes, size);
  memcpy(bytes + offsetof(qkvi_calibration_header, checksum), &sum, sizeof sum);
}

// Everything but the parts. `bytes` have any alignment.
static qkv_status check_header(const uint8_t *bytes, size_t size, qkv_calibration_shape *shape, qkv_error *error) {
  qkvi_calibration_header header;
  if (size < sizeof header) REFUSE("calibration has %zu bytes, its header alone takes %zu", size, sizeof header);
  memcpy(&header, bytes, sizeof header);
  if (header.magic != QKV_CALIBRATION_MAGIC) {
    REFUSE("calibration.magic is 0x%08" PRIx32 ", expected 0x%08" PRIx32 ": this is no calibration file",
           header.magic, QKV_CALIBRATION_MAGIC);
  }
  if (header.format < QKV_CALIBRATION_FORMAT_FIRST || header.format > QKV_CALIBRATION_FORMAT) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "calibration.format is %" PRIu32 ", this build reads %d to %d",
                    header.format, QKV_CALIBRATION_FORMAT_FIRST, QKV_CALIBRATION_FORMAT);
  }
  if (header.bytes != size) REFUSE("calibration.bytes is %" PRIu64 ", there are %zu", header.bytes, size);
  const uint64_t sum = checksum(bytes, size);
  if (header.checksum != sum) {
    REFUSE("calibration.checksum is %016" PRIx64 ", the bytes have %016" PRIx64, header.checksum, sum);
  }
  *shape = (qkv_calibration_shape){.layers = header.layers,
                                   .kv_heads = header.kv_heads,
                                   .q_heads = header.q_heads,
                                   .key_dim = header.key_dim,
                                   .value_dim = header.value_dim};
  QKV_TRY(check_shape(shape, header.band_k, header.band_v, error));
  QKV_TRY(read_rope(&header, &shape->rope, error));
  static const uint64_t none[sizeof header.reserved2 / sizeof(uint64_t)] = {0};
  if (header.archive_refused > 1 || header.reserved1 != 0 || memcmp(header.reserved2, none, sizeof none) != 0) {
    REFUSE("calibration has something in reserved fields");
  }
  const size_t due = qkvi_calibration_size(shape, header.format, header.band_k, header.band_v);
  const bool sections = header.format >= QKV_CALIBRATION_FORMAT_SECTIONS && size > due;
  if (due != size && !sections) REFUSE("calibration has %zu bytes, its geometry takes %zu", size, due);
  return sections ? qkvi_calibration_check_sections(shape, bytes, due, error) : QKV_OK;
}

// Which coordinate is not within [-most, most], or not above `least` where that is positive; count: none.
static size_t find_outside(const float *values, size_t count, float least, float most) {
  for (size_t i = 0; i < count; i++) {
    const float magnitude = least > 0 ? values[i] : fabsf(values[i]);
    if (!(magnitude >= least && magnitude <= most)) return i;
  }
  return count;
}

static qkv_status check_numbers(const qkvi_part_view *part, qkv_error *error) {
  const size_t dim = part->dim;
  const struct {
    const char *name;
    const float *values;
    size_t count;
    float least, most;
  } rows[] = {{"mean", part->mean, dim, 0, QKV_CALIBRATION_MEAN_MAX},
              {"weights", part->weights, dim, QKV_CALIBRATION_WEIGHT_MIN, QKV_CALIBRATION_WEIGHT_MAX},
              {"analysis", part->analysis, dim * dim, 0, QKV_CALIBRATION_ENTRY_MAX},
              {"synthesis", part->synthesis, dim * dim, 0, QKV_CALIBRATION_ENTRY_MAX},
              {"anchor", part->anchor, 2 * (size_t)part->header->anchor_pairs, 0, QKV_CALIBRATION_MEAN_MAX},
              {"heavy", part->heavy, part->heavy != NULL ? dim : 0, 0, QKV_CALIBRATION_MEAN_MAX},
              {"heavy_least", &part->header->heavy_least, 1, 0, QKV_CALIBRATION_HEAVY_MAX}};
  for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
    const size_t at = find_outside(rows[i].values, rows[i].count, rows[i].least, rows[i].most);
    if (at == rows[i].count) continue;
    REFUSE("%s[%zu] is %g, allowed are %g to %g", rows[i].name, at, (double)rows[i].values[at],
           rows[i].least > 0 ? (double)rows[i].least : -(double)rows[i].most, (double)rows[i].most);
  }
  return QKV_OK;
}

static qkv_status check_order(const qkvi_part_view *part, qkv_error *error) {
  uint8_t depths[QKV_DIM_MAX / QKV_BAND] = {0};
  const size_t bands = part->dim / part->band;
  for (size_t i = 0; i < part->order_count; i++) {
    const uint8_t band = part->order[i];
    if (band >= bands) REFUSE("order[%zu] is %u, there are %zu bands", i, band, bands);
    if (++depths[band] > QKV_DEPTH_MAX) REFUSE("order[%zu] gives band %u more than %d bits", i, band, QKV_DEPTH_MAX);
    if (band > 0 && depths[band] > depths[band - 1])
      REFUSE("order[%zu] gives band %u more bits than the one before", i, band);
  }
  return QKV_OK;
}

static qkv_status check_anchor(const qkvi_part_view *part, const qkv_rope *rope, qkv_error *error) {
  const uint16_t pairs = part->header->anchor_pairs;
  const uint32_t most = part->anchor == NULL                     ? 0
                        : rope->width / 2 < QKV_ANCHOR_PAIRS_MAX ? rope->width / 2
                                                                 : QKV_ANCHOR_PAIRS_MAX;
  if (pairs > most) REFUSE("anchor_pairs is %u, at most %" PRIu32, pairs, most);
  for (uint16_t i = 0; i < pairs; i++) {
    const uint16_t index = part->pair_indices[i];
    if (index >= rope->width / 2)
      REFUSE("pair_indices[%u] is %u, there are %" PRIu32 " pairs", i, index, rope->width / 2);
    if (i > 0 && index <= part->pair_indices[i - 1])
      REFUSE("pair_indices[%u] is %u, not above the one before", i, index);
  }
  return QKV_OK;
}

// How large an entry of a row gets in the part's frame: RoPE turns pairs, YaRN scales them, and the rotating anchor,
// which may be the mean, is taken off.
static double row_bound(const qkvi_part_view *part, const qkv_rope *rope, bool mean_turns) {
  const double magnitude = rope->theta != 0 ? qkv_rope_magnitude(rope) : 1;
  double anchor = 0;
  for (size_t i = 0; i < 2 * (size_t)part->header->anchor_pairs; i++)
    anchor = fmax(anchor, fabs((double)part->anchor[i]));
  for (size_t i = 0; mean_turns && i < part->dim; i++) anchor = fmax(anchor, fabs((double)part->mean[i]));
  return 2 * (QKV_ROW_MAX * fmax(1, 1 / magnitude) + anchor * fmax(1, magnitude));
}

// Each number is within its limits; here, what they make of rows together.
static qkv_status check_products(const qkvi_part_view *part, const qkv_rope *rope, bool mean_turns,
                                 qkv_error *error) {
  const double bound = row_bound(part, rope, mean_turns);
  for (size_t c = 0; c < part->dim; c++) {
    double most = 0;
    for (size_t i = 0; i < part->dim; i++) {
      most += fabs((double)part->analysis[c * part->dim + i]) * (bound + fabs((double)part->mean[i]));
    }
    if (!(most <= QKV_CALIBRATION_COORDINATE_MAX)) {
      REFUSE("coordinate %zu of a row can be %g, at most %g", c, most, QKV_CALIBRATION_COORDINATE_MAX);
    }
    const double square = most * most * (double)part->weights[c];
    if (square <= QKV_CALIBRATION_SQUARE_MAX) continue;
    REFUSE("coordinate %zu of a row can have a weighted square of %g, at most %g", c, square,
           QKV_CALIBRATION_SQUARE_MAX);
  }
  return QKV_OK;
}

// A row of alternating ones goes through analysis and synthesis and must come back.
static qkv_status check_duality(const qkvi_part_view *part, qkv_error *error) {
  const size_t dim = part->dim;
  double row[QKV_DIM_MAX], back[QKV_DIM_MAX] = {0}, miss = 0;
  for (size_t i = 0; i < dim; i++) row[i] = (i * 2654435761u >> 7 & 1) != 0 ? 1 : -1;
  for (size_t c = 0; c < dim; c++) {
    double z = 0;
    for (size_t i = 0; i < dim; i++) z += row[i] * (double)part->analysis[c * dim + i];
    for (size_t i = 0; i < dim; i++) back[i] += z * (double)part->synthesis[c * dim + i];
  }
  for (size_t i = 0; i < dim; i++) miss += (row[i] - back[i]) * (row[i] - back[i]);
  miss = sqrt(miss / (double)dim);
  if (miss <= DUALITY_MAX) return QKV_OK;
  REFUSE("synthesis does not undo analysis: a row comes back with an error of %g, at most %g", miss, DUALITY_MAX);
}

static qkv_status check_part(const qkvi_part_view *part, const qkv_rope *rope, bool mean_turns, qkv_error *error) {
  static const uint8_t none[sizeof part->header->reserved] = {0};
  const int8_t offset = part->header->tier_offset;
  if (offset < -QKV_TIER_OFFSET_MAX || offset > QKV_TIER_OFFSET_MAX) {
    REFUSE("tier_offset is %d, allowed are %d to %d", offset, -QKV_TIER_OFFSET_MAX, QKV_TIER_OFFSET_MAX);
  }
  const bool heavy = part->heavy != NULL || part->header->heavy_least == 0;
  if (part->header->reserved0 != 0 || !heavy || memcmp(part->header->reserved, none, sizeof none) != 0)
    REFUSE("something is in reserved fields");
  QKV_TRY(check_order(part, error));
  QKV_TRY(check_anchor(part, rope, error));
  QKV_TRY(check_numbers(part, error));
  QKV_TRY(check_products(part, rope, mean_turns, error));
  return check_duality(part, error);
}

// ---- The object ----

static uint8_t *allocate(size_t size) {
  uint8_t *bytes = aligned_alloc(ALIGN, aligned(size));
  if (bytes == NULL) abort();
  return bytes;
}

static size_t parts_of(const qkv_calibration_shape *shape) {
  return rotates(shape) ? QKV_CALIBRATION_PARTS : QKV_CALIBRATION_PARTS - 1;
}

// Whether a part has the data-free code's transform, as qkvi_calibration_write_data_free writes it.
static bool is_data_free(const qkvi_part_view *part) {
  const size_t dim = part->dim;
  for (size_t c = 0; c < dim; c++) {
    float row[QKV_DIM_MAX] = {0};
    row[c] = 1;
    qkv_hadamard_inverse(row, 1, dim);
    if (part->mean[c] != 0 || part->weights[c] != part->weights[0]) return false;
    if (memcmp(row, part->analysis + c * dim, dim * sizeof *row) != 0) return false;
    if (memcmp(row, part->synthesis + c * dim, dim * sizeof *row) != 0) return false;
  }
  return true;
}

// Values with the data-free transform need no matrix.
static qkv_transform transform_of(const qkvi_part_view *part, bool values, const qkv_schedule *schedule) {
  if (values && is_data_free(part)) return (qkv_transform){.schedule = schedule};
  return (qkv_transform){.schedule = schedule,
                         .analysis = part->analysis,
                         .synthesis = part->synthesis,
                         .mean = part->mean,
                         .weights = part->weights,
                         .anchor_pairs = part->header->anchor_pairs,
                         .pair_indices = part->pair_indices,
                         .anchor = part->anchor};
}

// Of one matrix, aligned.
static size_t whole_bytes(size_t dim) {
  return aligned(qkv_dense_bytes(dim, dim));
}

// Of one head: both matrices of every part, the synthesis for queries of keys in the attend frame; and what is left
// of their mean and its anchor.
static size_t head_whole_bytes(const qkv_calibration_shape *shape) {
  const size_t values = 2 * whole_bytes(shape->value_dim);
  if (!rotates(shape)) return 2 * whole_bytes(shape->key_dim) + values;
  return 5 * whole_bytes(shape->key_dim) + 2 * aligned(shape->key_dim * sizeof(float)) + values;
}

uint64_t qkv_calibration_cost(const qkv_calibration_shape *shape) {
  const size_t head = sizeof(qkvi_head_view) + parts_of(shape) * sizeof(qkv_schedule) + head_whole_bytes(shape);
  return sizeof(qkv_calibration) + largest_size(shape) + (size_t)shape->layers * shape->kv_heads * head;
}

// The synthesis for queries, its inputs in the order of qkv_turn_input.
static void make_turning(qkvi_head_view *head, const qkv_rope *rope, const qkv_turn_plan *plan, uint8_t *memory) {
  qkv_transform *transform = &head->transforms[QKV_PART_K_ATTEND];
  const size_t dim = transform->schedule->dim;
  const float *matrix = transform->synthesis;
  float *ordered = NULL;
  if (plan->rule == QKV_TURN_BLOCKS) {
    ordered = (float *)allocate(dim * dim * sizeof *ordered);
    for (size_t c = 0; c < dim; c++) {
      for (size_t i = 0; i < dim; i++) ordered[c * dim + i] = matrix[c * dim + qkv_turn_input(rope, i)];
    }
    matrix = ordered;
  }
  head->turning = qkv_dense_in(memory, matrix, dim, dim);
  transform->turning = &head->turning;
  free(ordered);
}

// The synthesis by its columns.
static void make_backward(qkv_transform *transform, qkv_dense *backward, uint8_t *memory) {
  const size_t dim = transform->schedule->dim;
  float *columns = (float *)allocate(dim * dim * sizeof *columns);
  for (size_t j = 0; j < dim; j++) {
    for (size_t c = 0; c < dim; c++) columns[j * dim + c] = transform->synthesis[c * dim + j];
  }
  *backward = qkv_dense_in(memory, columns, dim, dim);
  transform->backward = backward;
  free(columns);
}

// The mean of coordinates that turn becomes the rotating anchor; `memory` is for two rows. No anchor where it is 0.
static void make_anchor(qkv_transform *transform, const qkv_rope *rope, float *memory) {
  const size_t dim = transform->schedule->dim;
  float *mean = memory, *anchor = memory + aligned(dim * sizeof *mean) / sizeof *mean;
  bool any = false;
  memcpy(mean, transform->mean, dim * sizeof *mean);
  for (size_t i = 0; i < rope->width; i++) {
    const size_t at = qkv_turn_input(rope, i);
    anchor[i] = mean[at];
    any = any || anchor[i] != 0;
    mean[at] = 0;
  }
  transform->mean = mean;
  transform->anchor = anchor;
  transform->anchor_pairs = any ? (uint16_t)(rope->width / 2) : 0;
}

// What a head's part has in addition to the file's bytes; returns the memory behind it.
static uint8_t *make_whole(const qkv_calibration *calibration, qkvi_head_view *head, qkv_calibration_part part,
                           uint8_t *memory) {
  qkv_transform *transform = &head->transforms[part];
  const size_t dim = transform->schedule->dim;
  if (transform->analysis == NULL) return memory + 2 * whole_bytes(dim);
  head->forward[part] = qkv_dense_in(memory, transform->analysis, dim, dim);
  transform->forward = &head->forward[part];
  memory += whole_bytes(dim);
  make_backward(transform, &head->backward[part], memory);
  memory += whole_bytes(dim);
  if (part != QKV_PART_K_ATTEND || !rotates(&calibration->shape)) return memory;
  const qkv_rope *rope = &calibration->shape.rope;
  transform->plan = &calibration->plan;
  make_turning(head, rope, transform->plan, memory);
  memory += whole_bytes(dim);
  if (transform->plan->rule == QKV_TURN_BLOCKS) make_anchor(transform, rope, (float *)memory);
  return memory + 2 * aligned(dim * sizeof(float));
}

static bool any_of(const float *values, size_t count) {
  for (size_t i = 0; i < count; i++) {
    if (values[i] != 0) return true;
  }
  return false;
}

static qkv_status read_head(qkv_calibration *calibration, uint32_t layer, uint32_t kv_head, qkv_error *error) {
  static const char *const names[] = {"k_attend", "k_archive", "v"};
  const size_t index = (size_t)layer * calibration->shape.kv_heads + kv_head;
  qkvi_head_view *head = &calibration->heads[index];
  qkv_schedule *schedule = &calibration->schedules[index * parts_of(&calibration->shape)];
  uint8_t *whole = calibration->whole + index * head_whole_bytes(&calibration->shape);
  for (unsigned i = 0; i < QKV_CALIBRATION_PARTS; i++) {
    if (i == QKV_PART_K_ARCHIVE && !rotates(&calibration->shape)) {
      head->transforms[i] = head->transforms[QKV_PART_K_ATTEND];
      head->tier_offsets[i] = head->tier_offsets[QKV_PART_K_ATTEND];
      continue;
    }
    const qkvi_part_view part = qkvi_calibration_part(&calibration->shape, calibration->bytes, layer, kv_head, i);
    const bool mean_turns = i == QKV_PART_K_ATTEND && calibration->plan.rule == QKV_TURN_BLOCKS;
    if (check_part(&part, &calibration->shape.rope, mean_turns, error) != QKV_OK) {
      if (error == NULL) return QKV_DATA_LOSS;
      return qkv_error_prefix(error, "calibration, layer %" PRIu32 ", KV head %" PRIu32 ", %s: ", layer, kv_head,
                              names[i]);
    }
    qkvi_schedule_from_order(part.order, part.order_count, part.dim, part.band, schedule);
    assert(qkv_schedule_validate(schedule) == NULL);
    head->transforms[i] = transform_of(&part, i == QKV_PART_V, schedule++);
    whole = make_whole(calibration, head, i, whole);
    head->tier_offsets[i] = part.header->tier_offset;
    if (part.heavy != NULL && any_of(part.heavy, part.dim)) {
      head->heavy = part.heavy;
      head->heavy_least = part.header->heavy_least;
    }
  }
  return QKV_OK;
}

// Takes the bytes, on failure too.
static qkv_status adopt(uint8_t *bytes, size_t size, const qkv_calibration_shape *shape, qkv_calibration **out,
                        qkv_error *error) {
  const size_t heads = (size_t)shape->layers * shape->kv_heads;
  assert(heads > 0);
  qkv_calibration *calibration = calloc(1, sizeof *calibration);
  if (calibration == NULL) abort();
  calibration->references = 1;
  calibration->shape = *shape;
  if (rotates(shape)) {
    const uint32_t format = ((const qkvi_calibration_header *)bytes)->format;
    calibration->plan = qkv_turn_plan_of(&shape->rope, rule_of(format));
  }
  calibration->bytes = bytes;
  calibration->size = size;
  calibration->heads = calloc(heads, sizeof *calibration->heads);
  calibration->schedules = calloc(heads * parts_of(shape), sizeof *calibration->schedules);
  calibration->whole_bytes = heads * head_whole_bytes(shape);
  calibration->whole = allocate(calibration->whole_bytes);
  calibration->derived = calloc(heads * QKVI_DERIVED_KINDS, sizeof *calibration->derived);
  if (calibration->heads == NULL || calibration->schedules == NULL || calibration->derived == NULL) abort();
  qkvi_calibration_count(calibration, true);
  calibration->version = (uint32_t)((const qkvi_calibration_header *)bytes)->checksum;
  if (calibration->version == 0) calibration->version = 1;
  for (uint32_t layer = 0; layer < shape->layers; layer++) {
    for (uint32_t kv_head = 0; kv_head < shape->kv_heads; kv_head++) {
      const qkv_status status = read_head(calibration, layer, kv_head, error);
      if (status == QKV_OK) continue;
      const qkv_calibration *refused = calibration;
      qkv_calibration_unref(&refused);
      return status;
    }
  }
  *out = calibration;
  return QKV_OK;
}

qkv_status qkv_calibration_read(const void *bytes, size_t size, qkv_calibration **out, qkv_error *error) {
  qkv_calibration_shape shape = {0};
  *out = NULL;
  QKV_TRY(check_header(bytes, size, &shape, error));
  uint8_t *copy = allocate(size);
  memcpy(copy, bytes, size);
  return adopt(copy, size, &shape, out, error);
}

qkv_status qkvi_calibration_begin(const qkv_calibration_shape *shape, uint32_t format, uint8_t band_k, uint8_t band_v,
                                  uint8_t **bytes, qkv_error *error) {
  *bytes = NULL;
  QKV_TRY(check_shape(shape, band_k, band_v, error));
  const size_t size = qkvi_calibration_size(shape, format, band_k, band_v);
  *bytes = allocate(size);
  memset(*bytes, 0, size);
  qkvi_calibration_header *header = (qkvi_calibration_header *)*bytes;
  *header = (qkvi_calibration_header){.magic = QKV_CALIBRATION_MAGIC,
                                      .format = format,
                                      .bytes = size,
                                      .layers = shape->layers,
                                      .kv_heads = shape->kv_heads,
                                      .q_heads = shape->q_heads,
                                      .key_dim = shape->key_dim,
                                      .value_dim = shape->value_dim,
                                      .band_k = band_k,
                                      .band_v = band_v};
  put_rope(header, &shape->rope);
  return QKV_OK;
}

qkv_status qkvi_calibration_finish(uint8_t *bytes, qkv_calibration **out, qkv_error *error) {
  const size_t size = (size_t)((const qkvi_calibration_header *)bytes)->bytes;
  qkv_calibration_shape shape = {0};
  *out = NULL;
  qkvi_calibration_seal(bytes, size);
  const qkv_status status = check_header(bytes, size, &shape, error);
  if (status == QKV_OK) return adopt(bytes, size, &shape, out, error);
  free(bytes);
  return status;
}
