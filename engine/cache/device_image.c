#include "engine/cache/device_image.h"

#include <assert.h>
#include <string.h>

#include "engine/cache/page_range.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/outliers.h"
#include "engine/codec/pack.h"
#include "engine/kernel/simt/calibrated.h"
#include "engine/kernel/table.h"

enum {
  ALIGN = 64,
  LINE = 64,
  BLOCK = QKVI_BLOCK_WIDTH,
  BLOCKS_MAX = 128 / BLOCK,
  APART = QKV_SIMT_APART,  // of the groups of values
  PLACE_UNIT = 16,
};

static size_t aligned(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

// ---- What kernels take ----

static bool is_calibrated(const qkv_coder *coder) {
  return coder->calibration != 0;
}

// Of data-free code the kernels read whole bits up to four as they lie.
static bool lies_ready(unsigned tier) {
  return tier > 0 && tier % QKV_TIER_BIT == 0 && tier <= 4 * QKV_TIER_BIT;
}

static bool has_anchors(const qkv_coder *coder) {
  const qkv_anchor_options *anchors = qkv_embedded(coder)->anchors;
  return anchors[QKV_K].kind != QKV_ANCHOR_NONE || anchors[QKV_V].kind != QKV_ANCHOR_NONE;
}

static bool is_expanded(const qkv_coder *coder) {
  if (is_calibrated(coder) || has_anchors(coder)) return true;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const uint8_t *tiers = qkv_embedded(coder)->heads[h].tiers;
    if (!lies_ready(tiers[QKV_K]) || !lies_ready(tiers[QKV_V])) return true;
  }
  return false;
}

static bool has_frame(const qkv_coder *coder) {
  return qkv_embedded(coder)->frame == QKV_FRAME_ATTEND;
}

bool qkv_device_takes_coder(const qkv_coder *coder) {
  if (coder->codec->id != QKV_CODEC_EMBEDDED || coder->key_dim != coder->value_dim) return false;
  if (coder->key_dim != 64 && coder->key_dim != 128) return false;
  if (is_calibrated(coder) && has_anchors(coder)) return false;
  if (qkv_embedded(coder)->frame == QKV_FRAME_PLAIN) return true;
  if (!is_calibrated(coder) || !has_frame(coder)) return false;
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const qkv_transform *keys = qkv_embedded(coder)->heads[h].transforms[QKV_K];
    if (!qkv_transform_by_blocks(keys) || keys->turning == NULL) return false;
  }
  return true;
}

static bool takes_tiers(const uint8_t tiers[QKV_PAGE_GROUPS]) {
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    if (!lies_ready(tiers[g])) return false;
  }
  return true;
}

// ---- Blocks ----

// A block of 16 coordinates of a group, whose halves have bits of their own.
typedef struct block_plan {
  uint8_t depths[2];
  unsigned form;
  size_t lines;
} block_plan;

static block_plan plan_block(const qkv_schedule *schedule, unsigned tier, size_t block) {
  static const uint8_t lines[] = {
      [QKV_SIMT_FORM_NARROW] = 1, [QKV_SIMT_FORM_NIBBLES] = 2, [QKV_SIMT_FORM_BYTES] = 4, [QKV_SIMT_FORM_WIDE] = 8};
  const uint16_t *reach = schedule->reach[tier];
  block_plan plan = {0};
  for (size_t half = 0; half < 2; half++) {
    const size_t first = block * BLOCK + half * QKV_BAND;
    while (plan.depths[half] < QKV_DEPTH_MAX && reach[plan.depths[half] + 1] > first) plan.depths[half]++;
  }
  plan.form = plan.depths[0] == 0 ? 0 : (plan.depths[0] - 1u) / 2;  // depths fall
  plan.lines = plan.depths[0] == 0 ? 0 : lines[plan.form];
  return plan;
}

// Where a place's bits of a depth count, in a line that has two bits for each coordinate.
static uint32_t kind_of(unsigned depth) {
  static const uint8_t kinds[] = {QKVI_BLOCK_NONE, QKVI_BLOCK_1_HIGH, QKVI_BLOCK_2, QKVI_BLOCK_3_HIGH, QKVI_BLOCK_4};
  return kinds[depth];
}

static uint32_t place_of(const block_plan *plan, size_t offset) {
  uint32_t place = plan->lines == 0 ? 0 : (uint32_t)(offset / PLACE_UNIT);
  place |= plan->form << 16;
  for (size_t half = 0; half < 2; half++) {
    if (plan->form < QKV_SIMT_FORM_BYTES) place |= kind_of(plan->depths[half]) << (20 + 4 * half);
    if (plan->depths[half] > QKVI_SHALLOW_MAX) place |= 1u << (28 + half);
  }
  return place;
}

// A head's keys or values: what precedes the places, places and lines.
static size_t part_before(qkv_part part) {
  return part == QKV_K ? 2 * QKV_PAGE_TOKENS : 0;
}

static size_t part_bytes(qkv_part part, const qkv_schedule *schedule, const uint8_t tiers[QKV_PAGE_GROUPS]) {
  size_t bytes = part_before(part) + schedule->dim + (part == QKV_V ? (QKV_PAGE_GROUPS - 1) * APART : 0);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    for (size_t b = 0; b < schedule->dim / (size_t)BLOCK; b++)
      bytes += LINE * plan_block(schedule, tiers[g], b).lines;
  }
  return bytes;
}

// ---- Codes ----

// Keys: the field of a coordinate, and its place among the bytes of a row of 16; values: of a token.
static unsigned field_of(qkv_part part, unsigned number) {
  static const uint8_t keys[] = {0, 2, 1, 3};
  return part == QKV_K ? keys[number / 4] : number / 4;
}

static unsigned byte_of(qkv_part part, unsigned number) {
  if (part == QKV_K) return 4 * (number / 8 * 2 + number % 4 / 2) + number % 2 * 2 + number / 4 % 2;
  return 4 * (number % 8 / 2) + number % 2 * 2 + number / 8;
}

// A code of `depth` bits of row `row` of the lines (K: a token, V: a coordinate), number `number` within it.
static void put_bits(qkv_part part, unsigned depth, unsigned code, unsigned row, unsigned number, uint8_t *lines) {
  const unsigned full = code << (QKV_DEPTH_MAX - depth), field = field_of(part, number);
  lines[4 * row + number % 4] |= (uint8_t)(full >> 6 << 2 * field);
  if (depth > 2) lines[LINE + 4 * row + number % 4] |= (uint8_t)((full >> 4 & 3) << 2 * (field ^ 1));
}

static void put_bytes(qkv_part part, unsigned form, unsigned depth, unsigned code, unsigned row, unsigned number,
                      uint8_t *lines) {
  uint8_t *at = lines + 64 * (row % 4) + 16 * (row / 4) + byte_of(part, number);
  if (depth <= QKVI_SHALLOW_MAX) {
    *at = (uint8_t)qkvi_integers.shallow[depth][code];
    return;
  }
  assert(form == QKV_SIMT_FORM_WIDE);
  *at = (uint8_t)qkvi_integers.deep_high[depth][code];
  at[4 * LINE] = (uint8_t)qkvi_integers.deep_low[depth][code];
}

static void put_block(qkv_part part, const block_plan *plan, const qkvi_codes *codes, uint8_t *lines) {
  for (unsigned c = 0; c < BLOCK; c++) {
    const unsigned depth = plan->depths[c / QKV_BAND];
    if (depth == 0) break;
    for (unsigned t = 0; t < QKV_GROUP_TOKENS; t++) {
      const unsigned row = part == QKV_K ? t : c, number = part == QKV_K ? c : t;
      if (plan->form < QKV_SIMT_FORM_BYTES) {
        put_bits(part, depth, codes[c][t], row, number, lines);
      } else {
        put_bytes(part, plan->form, depth, codes[c][t], row, number, lines);
      }
    }
  }
}

// The step of the kernels that has a block, as a shift in the directory's word of paths.
static unsigned step_shift(qkv_part part, size_t dim, size_t group, size_t block) {
  if (part == QKV_V) return 16 + 4 * (unsigned)(block / 2);
  return 4 * (unsigned)(group / 2 * (dim / 64) + block / 4);
}

// Places and lines; `to` is zeros. Returns the paths.
static uint32_t put_codes(qkv_part part, const qkv_page_codes *codes, uint8_t *to) {
  const size_t dim = codes->schedule->dim;
  size_t at = dim;
  uint32_t paths = 0;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++, at += part == QKV_V ? APART : 0) {
    qkvi_codes unpacked[QKV_DIM_MAX];
    qkvi_unpack(part, codes->schedule, codes->tiers[g], codes->groups[g], unpacked);
    for (size_t b = 0; b < dim / BLOCK; b++) {
      const block_plan plan = plan_block(codes->schedule, codes->tiers[g], b);
      const uint32_t place = place_of(&plan, at);
      memcpy(to + (g * (dim / BLOCK) + b) * sizeof place, &place, sizeof place);
      if (plan.lines == 0) continue;
      put_block(part, &plan, (const qkvi_codes *)unpacked + b * BLOCK, to + at);
      const unsigned shift = step_shift(part, dim, g, b);
      paths |= QKV_SIMT_PATH(plan.form) << shift;
      if (plan.form == QKV_SIMT_FORM_WIDE) paths |= QKV_SIMT_PATH(QKV_SIMT_FORM_BYTES) << shift;
      at += LINE * plan.lines;
    }
  }
  return paths;
}

// ---- Images ----

typedef struct expanded_head {
  uint32_t offset, bytes[2], paths;  // as in the image's directory
} expanded_head;
_Static_assert(sizeof(expanded_head) == sizeof(qkv_page_directory), "directory");

static expanded_head head_of(const qkv_coder *coder, const qkv_page_directory *entry, uint16_t h) {
  const qkv_schedule *const *schedules = qkv_embedded(coder)->heads[h].schedules;
  return (expanded_head){.bytes = {(uint32_t)part_bytes(QKV_K, schedules[QKV_K], entry->tier_k),
                                   (uint32_t)part_bytes(QKV_V, schedules[QKV_V], entry->tier_v)}};
}

// Keys are predicted by their mean or those of groups, values by their mean.
static bool takes_anchors(const qkv_coder *coder, const qkv_page_header *header) {
  for (uint16_t h = 0; (header->features & QKV_FEATURE_ANCHOR) != 0 && h < coder->kv_heads; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(header, h);
    const qkv_anchor_kind values = qkv_anchor_kind_of(entry->anchor_v);
    if (qkv_anchor_kind_of(entry->anchor_k) == QKV_ANCHOR_CHAIN) return false;
    if (values != QKV_ANCHOR_NONE && values != QKV_ANCHOR_MEAN) return false;
  }
  return true;
}

static bool takes_expanded(const qkv_coder *coder, const qkv_page_header *header) {
  const size_t most = QKV_SIMT_FRAME_SLOT_BYTES((size_t)coder->key_dim);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const expanded_head head = head_of(coder, qkv_page_entry_of(header, h), h);
    if (head.bytes[QKV_K] + QKV_SIMT_TURNED_BYTES((size_t)coder->key_dim) > most || head.bytes[QKV_V] > most)
      return false;
  }
  return !has_frame(coder) ||
         qkv_walk_turns(qkv_embedded(coder)->phases, qkv_embedded(coder)->heads[0].transforms[QKV_K]->plan,
                        header->position, NULL);
}

bool qkv_device_takes_image(const qkv_coder *coder, const void *image) {
  const qkv_page_header *header = image;
  if ((header->features & ~(QKV_FEATURE_OUTLIERS | QKV_FEATURE_ANCHOR)) != 0) return false;
  if (is_expanded(coder))
    return qkv_device_takes_coder(coder) && takes_anchors(coder, header) && takes_expanded(coder, header);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const qkv_page_directory *entry = qkv_page_entry_of(image, h);
    if (!takes_tiers(entry->tier_k) || !takes_tiers(entry->tier_v)) return false;
  }
  return true;
}

static size_t outlier_bytes(const qkv_page_header *header) {
  return header->outliers == 0 ? 0 : header->bytes - header->outliers;
}

static size_t anchor_bytes(const qkv_coder *coder, const qkv_page_header *header) {
  return (header->features & QKV_FEATURE_ANCHOR) == 0 ? 0 : QKV_SIMT_ANCHORS_BYTES((size_t)coder->key_dim);
}

// Of a page that has any; `to` is zeros.
static void put_anchors(const qkv_coder *coder, const void *image, uint16_t h, uint8_t *to) {
  const size_t dim = coder->key_dim;
  float units[2] = {0};
  uint8_t *row = to + 16;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    const qkvi_additions added = qkvi_additions_find(coder, image, h, part);
    for (size_t g = 0; g < (part == QKV_K ? QKV_PAGE_GROUPS : 1); g++, row += dim) {
      if (!added.anchored) continue;
      units[part] = added.anchor.unit;
      memcpy(row, added.anchor.rows + g % added.anchor.count * dim, dim);
    }
  }
  memcpy(to, units, sizeof units);
}

static size_t image_bytes(const qkv_coder *coder, const void *image) {
  const qkv_page_header *header = image;
  if (!is_expanded(coder)) return aligned(header->bytes);
  size_t bytes = aligned(sizeof *header + coder->kv_heads * sizeof(expanded_head)) + outlier_bytes(header);
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    const expanded_head head = head_of(coder, qkv_page_entry_of(image, h), h);
    bytes += aligned((size_t)head.bytes[QKV_K] + head.bytes[QKV_V] + anchor_bytes(coder, header));
  }
  return bytes;
}

static size_t expand(const qkv_coder *coder, const void *image, uint8_t *to) {
  const qkv_page_header *header = image;
  const size_t bytes = image_bytes(coder, image);
  memset(to, 0, bytes);
  qkv_page_header own = *header;
  size_t at = aligned(sizeof *header + coder->kv_heads * sizeof(expanded_head));
  for (uint16_t h = 0; h < coder->kv_heads; h++) {
    qkv_page_codes codes[2];
    expanded_head head = head_of(coder, qkv_page_entry_of(image, h), h);
    head.offset = (uint32_t)at;
    for (qkv_part part = QKV_K; part <= QKV_V; part++) {
      qkvi_find(coder, image, h, part, &codes[part]);
      memcpy(to + at + part * QKV_PAGE_TOKENS, codes[part].gains, QKV_PAGE_TOKENS);
    }
    head.paths = put_codes(QKV_K, &codes[QKV_K], to + at + part_before(QKV_K));
    head.paths |= put_codes(QKV_V, &codes[QKV_V], to + at + head.bytes[QKV_K]);
    memcpy(to + sizeof own + h * sizeof head, &head, sizeof head);
    at += (size_t)head.bytes[QKV_K] + head.bytes[QKV_V];
    if ((header->features & QKV_FEATURE_ANCHOR) != 0) put_anchors(coder, image, h, to + at);
    at = aligned(at + anchor_bytes(coder, header));
  }
  own.outliers = header->outliers == 0 ? 0 : (uint32_t)at;
  own.bytes = (uint32_t)bytes;
  memcpy(to, &own, sizeof own);
  memcpy(to + at, (const uint8_t *)image + header->outliers, outlier_bytes(header));
  assert(at + outlier_bytes(header) == bytes);
  return bytes;
}

// ---- Tables ----

qkv_device_layout qkv_device_layout_of(const qkv_coder *coder) {
  qkv_device_layout layout = {
      .expanded = is_expanded(coder), .anchored = has_anchors(coder), .turns = has_frame(coder)};
  const size_t dim = coder->key_dim;
  size_t at = QKV_RANGE_PAGES * sizeof(uint64_t);
  if (layout.expanded) {
    layout.heads = at;
    layout.head_bytes = aligned(QKV_SIMT_HEAD_BYTES(dim, layout.turns));
    at += coder->kv_heads * layout.head_bytes;
  }
  if (layout.turns) {
    const qkv_page_waves *waves = qkv_phases_waves(qkv_embedded(coder)->phases);
    layout.frame = at;
    at += aligned(QKV_SIMT_FRAME_BYTES(waves->stride, waves->fast));
    layout.image = aligned(QKV_SIMT_TURN_BYTES(dim));
  }
  layout.pages = at;
  return layout;
}

// The matrix as operands: of each 16 outputs and 32 inputs higher bytes of all lanes, then lower ones.
static void put_matrix(const qkv_dense *matrix, size_t dim, uint8_t *to) {
  for (size_t output = 0; output < matrix->outputs; output++) {
    const int16_t *words = matrix->words + output / QKVI_DENSE_OUTPUTS * QKVI_DENSE_OUTPUTS * matrix->dim;
    for (size_t input = 0; input < dim; input++) {
      const int16_t word = words[(input / 2 * QKVI_DENSE_OUTPUTS + output % QKVI_DENSE_OUTPUTS) * 2 + input % 2];
      const size_t tile = output / 16 * (dim / 32) + input / 32, k = input % 32;
      const size_t lane = output % 8 * 4 + k % 16 / 4, register_of_lane = output % 16 / 8 + k / 16 * 2;
      uint8_t *at = to + tile * 1024 + lane * 16 + register_of_lane * 4 + k % 4;
      at[0] = (uint8_t)((uint16_t)word >> 8);
      at[512] = (uint8_t)word;
    }
  }
}

static void fill_head(const qkv_coder *coder, uint16_t h, uint8_t *to) {
  const qkv_head_coder *head = &qkv_embedded(coder)->heads[h];
  const size_t dim = coder->key_dim;
  float *steps = (float *)(void *)to, *scales = steps + dim;
  for (size_t c = 0; c < dim; c++) steps[c] = head->outlier_steps != NULL ? head->outlier_steps[c] : 1;
  if (!has_frame(coder)) return;
  const qkv_dense *matrix = head->transforms[QKV_K]->turning;
  const size_t coded = qkvi_coded_most(coder, h, QKV_K);  // others are 0 in code space
  for (size_t c = 0; c < dim; c++) scales[c] = c < coded ? matrix->scales[c] : 0;
  put_matrix(matrix, dim, to + 8 * dim);
}

static void fill_frame(const qkv_coder *coder, uint8_t *to) {
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  const qkv_page_waves *waves = qkv_phases_waves(phases);
  const qkv_rope *rope = qkv_phases_rope(phases);
  qkv_simt_frame frame = {.width = rope->width,
                          .step = qkv_rope_first(rope, 1) - qkv_rope_first(rope, 0),
                          .apart = qkv_rope_second(rope, 0) - qkv_rope_first(rope, 0),
                          .stride = (uint32_t)waves->stride,
                          .fast = (uint32_t)waves->fast,
                          .step_size = qkvi_integers.step};
  for (size_t k = 0; k < QKV_WAVE_TERMS; k++) frame.ends[k] = (uint32_t)waves->ends[k];
  memcpy(to, &frame, sizeof frame);
  float *next = (float *)(void *)(to + sizeof frame);
  const struct {
    const float *from;
    size_t count;
  } arrays[] = {{waves->cosines, waves->fast * QKV_WAVE_SLOTS},
                {waves->sines, waves->fast * QKV_WAVE_SLOTS},
                {waves->even, QKV_WAVE_TERMS * waves->stride},
                {waves->odd, QKV_WAVE_TERMS * waves->stride}};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; next += arrays[i].count, i++)
    memcpy(next, arrays[i].from, arrays[i].count * sizeof *next);
}

void qkv_device_fill_tables(const qkv_coder *coder, uint8_t *copy) {
  const qkv_device_layout layout = qkv_device_layout_of(coder);
  memset(copy, 0, layout.pages);
  if (layout.turns) fill_frame(coder, copy + layout.frame);
  for (uint16_t h = 0; layout.expanded && h < coder->kv_heads; h++)
    fill_head(coder, h, copy + layout.heads + h * layout.head_bytes);
}

static void fill_turns(const qkv_coder *coder, uint64_t position, size_t dim, float *to) {
  qkv_walk_page_turns turns;
  const qkv_phases *phases = qkv_embedded(coder)->phases;
  const size_t pairs = qkv_phases_rope(phases)->width / 2;
  const bool has = qkv_walk_turns(phases, qkv_embedded(coder)->heads[0].transforms[QKV_K]->plan, position, &turns);
  assert(has);
  (void)has;
  for (size_t i = 0; i < 2; i++) {
    memcpy(to + (2 * i) * (dim / 2), turns.cosines[i], pairs * sizeof *to);
    memcpy(to + (2 * i + 1) * (dim / 2), turns.sines[i], pairs * sizeof *to);
  }
}

size_t qkv_device_page_bytes(const qkv_coder *coder, const void *image) {
  return qkv_device_layout_of(coder).image + image_bytes(coder, image);
}

size_t qkv_device_fill_page(const qkv_coder *coder, const void *image, uint8_t *page) {
  const qkv_device_layout layout = qkv_device_layout_of(coder);
  const qkv_page_header *header = image;
  uint8_t *to = page + layout.image;
  if (layout.turns) fill_turns(coder, header->position, coder->key_dim, (float *)(void *)page);
  if (layout.expanded) return layout.image + expand(coder, image, to);
  memcpy(to, image, header->bytes);
  memset(to + header->bytes, 0, aligned(header->bytes) - header->bytes);
  return aligned(header->bytes);
}
