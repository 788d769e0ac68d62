#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/yield.h"
#include "engine/cache/layer.h"
#include "engine/cache/layer_internal.h"
#include "engine/cache/layer_spill.h"

// An append in four steps: everything is checked, then all of its memory is reserved, then its pages are coded,
// unseen by readers, then they and the rows that stay exact become the layer's at once. From the second step on it
// cannot fail any more. Only the last one excludes readers.

typedef struct append {
  qkv_layer *layer;
  const qkv_model *model;
  const qkv_tensor *k, *v;
  bool rotate;
  uint64_t position, end;  // of the request's rows
} append;

static const qkv_tensor *tensor_of(const append *a, qkv_part part) {
  return part == QKV_K ? a->k : a->v;
}

// One row as the request has it, rotated where it has to be.
static void read_row(const append *a, qkv_part part, uint64_t token, uint32_t kv_head, float *row) {
  qkv_tensor_row(tensor_of(a, part), (int64_t)token, kv_head, row);
  if (part == QKV_K && a->rotate) qkv_rope_forward(&a->model->rope, row, a->position + token);
}

// One row as it is held: in the model's dtype.
static void store_row(const append *a, qkv_part part, uint64_t token, uint32_t kv_head, void *out) {
  const qkv_tensor *tensor = tensor_of(a, part);
  if (tensor->dtype == a->model->dtype && !(part == QKV_K && a->rotate)) {
    qkv_tensor_row_raw(tensor, (int64_t)token, kv_head, out);
    return;
  }
  float row[QKV_DIM_MAX];
  read_row(a, part, token, kv_head, row);
  qkv_from_float(a->model->dtype, row, out, qkvi_part_dim(a->model, part));
}

// ---- Checks ----

static qkv_status check_shape(const append *a, qkv_part part, qkv_error *error) {
  const qkv_tensor *tensor = tensor_of(a, part);
  const char *name = part == QKV_K ? "k" : "v";
  int64_t dim = qkvi_part_dim(a->model, part);
  assert(tensor->rank == 3);
  if (tensor->dims[1] != a->model->kv_heads) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims[1] is %" PRId64 ", the model %s has %" PRIu32 " kv_heads",
                    name, tensor->dims[1], a->model->name, a->model->kv_heads);
  }
  if (tensor->dims[2] != dim) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims[2] is %" PRId64 ", the model %s has %s %" PRId64, name,
                    tensor->dims[2], a->model->name, part == QKV_K ? "key_dim" : "value_dim", dim);
  }
  return QKV_OK;
}

static qkv_status check_shapes(const append *a, qkv_error *error) {
  QKV_TRY(check_shape(a, QKV_K, error));
  QKV_TRY(check_shape(a, QKV_V, error));
  if (a->v->dims[0] != a->k->dims[0]) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "v.dims[0] is %" PRId64 ", k.dims[0] is %" PRId64, a->v->dims[0],
                    a->k->dims[0]);
  }
  if (a->position > QKV_POSITION_MAX || (uint64_t)a->k->dims[0] > QKV_POSITION_MAX - a->position) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "position is %" PRIu64 " for %" PRId64 " tokens, positions end at %" PRIu64, a->position,
                    a->k->dims[0], QKV_POSITION_MAX);
  }
  return QKV_OK;
}

static qkv_status check_position(const qkv_layer *layer, uint64_t position, qkv_error *error) {
  if (position > layer->length) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION, "position is %" PRIu64 ", the expected position is %" PRIu64,
                    position, layer->length);
  }
  if (position < layer->config.first_position) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "position is %" PRIu64 ", the session's first position is %" PRIu64, position,
                    layer->config.first_position);
  }
  return QKV_OK;
}

static bool row_in_range(const float *row, size_t dim) {
  int outside = 0;
  for (size_t i = 0; i < dim; i++) outside |= !(fabsf(row[i]) <= QKV_ROW_MAX);
  return outside == 0;
}

static qkv_status refuse_row(qkv_part part, uint64_t token, uint32_t kv_head, const float *row, const char *when,
                             qkv_error *error) {
  size_t i = 0;
  while (fabsf(row[i]) <= QKV_ROW_MAX) i++;
  const char *name = part == QKV_K ? "k" : "v";
  if (!isfinite(row[i])) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s[%" PRIu64 ", %" PRIu32 ", %zu] is %s%s", name, token, kv_head, i,
                    isnan(row[i]) ? "nan" : "inf", when);
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s[%" PRIu64 ", %" PRIu32 ", %zu] is %g%s, allowed are -%g to %g",
                  name, token, kv_head, i, (double)row[i], when, (double)QKV_ROW_MAX, (double)QKV_ROW_MAX);
}

static qkv_status check_row(const append *a, qkv_part part, uint64_t token, uint32_t kv_head, qkv_error *error) {
  float row[QKV_DIM_MAX];
  size_t dim = qkvi_part_dim(a->model, part);
  qkv_tensor_row(tensor_of(a, part), (int64_t)token, kv_head, row);
  if (!row_in_range(row, dim)) return refuse_row(part, token, kv_head, row, "", error);
  if (part == QKV_K && a->rotate) {
    qkv_rope_forward(&a->model->rope, row, a->position + token);
    if (!row_in_range(row, dim)) return refuse_row(part, token, kv_head, row, " after RoPE", error);
  }
  return QKV_OK;
}

// A token's rows at once where they stay as they are; row by row where they do not, or for what there is to say.
static qkv_status check_rows(const append *a, qkv_error *error) {
  for (uint64_t token = 0; token < a->end - a->position; token++) {
    const bool k = !a->rotate && qkv_tensor_within(a->k, (int64_t)token, QKV_ROW_MAX);
    const bool v = qkv_tensor_within(a->v, (int64_t)token, QKV_ROW_MAX);
    for (uint32_t head = 0; head < a->model->kv_heads && !(k && v); head++) {
      if (!k) QKV_TRY(check_row(a, QKV_K, token, head, error));
      if (!v) QKV_TRY(check_row(a, QKV_V, token, head, error));
    }
  }
  return QKV_OK;
}

// ---- Rows that are held already ----

// A head's rows of `count` tokens from `position` on, as they would be held, in floats.
static void read_held_form(const append *a, qkv_part part, uint32_t head, uint64_t position, uint64_t count,
                           float *rows) {
  uint32_t dim = qkvi_part_dim(a->model, part);
  uint8_t stored[QKV_DIM_MAX * sizeof(float)];
  for (uint64_t i = 0; i < count; i++) {
    store_row(a, part, position - a->position + i, head, stored);
    qkv_to_float(a->model->dtype, stored, rows + i * dim, dim);
  }
}

static uint64_t same_exact(const append *a, qkv_part part, uint32_t head, uint64_t position, uint64_t count,
                           const float *rows) {
  float held[QKV_DIM_MAX];
  uint32_t dim = qkvi_part_dim(a->model, part);
  for (uint64_t i = 0; i < count; i++) {
    qkv_to_float(a->model->dtype, qkv_layer_exact_row(a->layer, part, position + i, head), held, dim);
    for (uint32_t c = 0; c < dim; c++) {
      if (held[c] != rows[i * dim + c]) return i;
    }
  }
  return count;
}

// How many of `count` tokens from `position` on, in the tail (`entry` NULL) or in one page, are held as they are
// given, one after the other. Sealed rows are coded a page at a time: coding one costs as much as coding all 64.
static uint64_t same_tokens(const append *a, const qkv_page_entry *entry, uint64_t position, uint64_t count) {
  const void *page = entry == NULL ? NULL : entry->full != NULL ? entry->full : entry->page;
  float rows[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  uint64_t same = count;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    for (uint32_t head = 0; head < a->model->kv_heads && same > 0; head++) {
      read_held_form(a, part, head, position, same, rows);
      same = entry == NULL
                 ? same_exact(a, part, head, position, same, rows)
                 : entry->coder->codec->rows_match(entry->coder, page, (uint16_t)head, part,
                                                   (uint32_t)(position - entry->position), (uint32_t)same, rows);
    }
  }
  return same;
}

static qkv_status check_held(const append *a, qkv_error *error) {
  const qkv_layer *layer = a->layer;
  const uint64_t held = a->end < layer->length ? a->end : layer->length;
  for (uint64_t position = a->position; position < held;) {
    const qkv_page_entry *entry =
        position < layer->sealed ? qkv_layer_page(layer, qkv_layer_page_at(layer, position)) : NULL;
    uint64_t end = entry != NULL ? entry->position + entry->tokens : position + QKV_PAGE_TOKENS;
    if (end > held) end = held;
    if (entry != NULL && entry->taken) {
      position = end;
      continue;
    }
    if (entry != NULL && entry->page == NULL)
      return qkv_fail(error, QKV_UNAVAILABLE, "position %" PRIu64 " is on the SSD", position);
    uint64_t same = same_tokens(a, entry, position, end - position);
    if (same < end - position) {
      return qkv_fail(error, QKV_ALREADY_EXISTS, "position %" PRIu64 " holds other rows already", position + same);
    }
    position = end;
  }
  return QKV_OK;
}

static qkv_status compare_held(const append *a, qkv_error *error) {
  qkvi_layer_look(a->layer);
  const qkv_status status = check_held(a, error);
  qkvi_layer_looked(a->layer);
  return status;
}

// ---- Memory ----

typedef struct append_plan {
  uint64_t pages;     // that get sealed
  uint64_t blocks;    // of the tail, held at the same time at most
  uint64_t reserved;  // of these, to be allocated at most
  uint64_t bytes;     // to reserve
} append_plan;

// Blocks that other layers have, too, are not used again once they are sealed, and copied before rows are written.
static uint64_t shared_blocks(const qkv_layer *layer) {
  uint64_t count = 0;
  for (size_t i = 0; i < layer->tail_count; i++) count += qkvi_block_is_shared(&layer->tail[i]);
  return count;
}

// Pages are sealed as soon as the final length allows, so at any time the tail is no longer than it was before,
// than it will be, or than the one block that the next page is gathered in.
static uint64_t pages_sealed(const qkv_layer *layer, uint64_t end) {
  const uint64_t window = (uint64_t)layer->config.policy.recent_window;
  if (qkv_codec_is_exact(layer->coder->codec) || end < layer->sealed + window) return 0;
  return (end - layer->sealed - window) / QKV_PAGE_TOKENS;
}

bool qkvi_layer_would_seal(const qkv_layer *layer, uint64_t position, const qkv_tensor *k) {
  const uint64_t tokens = k->rank == 3 && k->dims[0] > 0 ? (uint64_t)k->dims[0] : 0;
  return position <= QKV_POSITION_MAX && tokens <= QKV_POSITION_MAX && pages_sealed(layer, position + tokens) > 0;
}

static append_plan plan_append(const append *a) {
  const qkv_layer *layer = a->layer;
  uint64_t exact = a->end - layer->sealed;
  bool coded = !qkv_codec_is_exact(layer->coder->codec);
  append_plan plan = {.pages = pages_sealed(layer, a->end)};
  plan.blocks = qkvi_blocks(exact - plan.pages * QKV_PAGE_TOKENS);
  if (plan.blocks < layer->tail_count) plan.blocks = layer->tail_count;
  if (plan.blocks == 0) plan.blocks = 1;
  plan.reserved = plan.blocks - layer->tail_count + shared_blocks(layer);

  uint64_t page_cost = coded ? qkvi_seal_cost(layer) : 0;
  uint64_t block_cost = qkv_arena_cost(qkvi_block_bytes(a->model));
  uint64_t pages_bytes, blocks_bytes;
  bool too_much = __builtin_mul_overflow(plan.pages, page_cost, &pages_bytes);
  too_much |= __builtin_mul_overflow(plan.reserved, block_cost, &blocks_bytes);
  too_much |= __builtin_add_overflow(pages_bytes, blocks_bytes, &plan.bytes);
  if (too_much) plan.bytes = UINT64_MAX;
  return plan;
}

static void grow_tail(qkv_layer *layer, size_t blocks) {
  if (blocks <= layer->tail_capacity) return;
  const size_t capacity = layer->tail_capacity * 2 > blocks ? layer->tail_capacity * 2 : blocks;
  layer->tail = realloc(layer->tail, capacity * sizeof *layer->tail);
  if (layer->tail == NULL) abort();
  layer->tail_capacity = capacity;
}

// ---- Application ----

// The tail while it is worked on.
typedef struct tail_work {
  size_t blocks;      // held: tail_count in use, the others spare
  uint64_t reserved;  // blocks that are not allocated yet
  qkvi_seal_scratch scratch;
} tail_work;

// Positions [begin, end) of the request into a block whose first row is that of `first`.
static void store_rows(const append *a, void *block, uint64_t first, uint64_t begin, uint64_t end) {
  for (uint64_t position = begin; position < end; position++) {
    const uint64_t token = position - a->position, slot = position - first;
    for (uint32_t head = 0; head < a->model->kv_heads; head++) {
      store_row(a, QKV_K, token, head, qkvi_block_row(a->model, block, QKV_K, slot, head));
      store_row(a, QKV_V, token, head, qkvi_block_row(a->model, block, QKV_V, slot, head));
    }
  }
}

// A page's rows that are not all in the tail: what is there, then the request's.
static void gather_rows(const append *a, uint64_t first, qkv_tail_block *block, qkvi_seal_scratch *scratch) {
  const qkv_layer *layer = a->layer;
  const size_t bytes = qkvi_block_bytes(a->model);
  assert(bytes > 0);
  if (scratch->rows == NULL) scratch->rows = malloc(bytes);
  if (scratch->rows == NULL) abort();
  block->rows = scratch->rows;
  const uint64_t begin = layer->length > first ? layer->length : first;
  if (begin > first) {
    const qkv_tail_block *held = &layer->tail[(first - layer->sealed) / QKV_PAGE_TOKENS];
    const size_t k =
        (size_t)(begin - first) * a->model->kv_heads * a->model->key_dim * qkv_dtype_size(a->model->dtype);
    memcpy(block->rows, held->rows, k);
    memcpy(qkvi_block_row(a->model, block->rows, QKV_V, 0, 0), qkvi_block_row(a->model, held->rows, QKV_V, 0, 0),
           (size_t)(begin - first) * qkvi_token_bytes(a->model) - k);
  }
  store_rows(a, block->rows, first, begin, first + QKV_PAGE_TOKENS);
}

// A device that has the request's rows makes pages of them alone, and of rows as they are: not of some that were in
// the tail, nor of others that are rotated or converted.
static void show_encoder(const append *a, uint64_t position, uint64_t following, qkvi_seal_scratch *scratch) {
  const bool as_it_is = !a->rotate && a->k->dtype == a->model->dtype && a->v->dtype == a->model->dtype;
  const qkv_layer_access *access = a->layer->access;
  scratch->encoder = position >= a->layer->length && as_it_is && access != NULL ? access->encoder : NULL;
  scratch->token = position - a->position;
  scratch->following = following;
}

// The next pages, which are the layer's only later. Other threads may read the layer meanwhile.
static void code_pages(const append *a, tail_work *work, qkv_page_entry *pages, uint64_t count) {
  const qkv_layer *layer = a->layer;
  for (uint64_t i = 0; i < count; i++) {
    const uint64_t position = layer->sealed + i * QKV_PAGE_TOKENS;
    qkv_tail_block gathered = {0};
    qkvi_layer_yield(layer);
    show_encoder(a, position, count - 1 - i, &work->scratch);
    if (position + QKV_PAGE_TOKENS <= layer->length) {
      qkvi_seal_page(layer, &work->scratch, position, &layer->tail[i], &pages[i]);
    } else {
      gather_rows(a, position, &gathered, &work->scratch);
      qkvi_seal_page(layer, &work->scratch, position, &gathered, &pages[i]);
    }
  }
}

// The tail's first block becomes a spare one behind the tail, unless other layers share it.
static void drop_first(qkv_layer *layer, tail_work *work) {
  qkv_tail_block block = layer->tail[0];
  memmove(layer->tail, layer->tail + 1, (work->blocks - 1) * sizeof *layer->tail);
  layer->tail_count--;
  if (qkvi_block_is_shared(&block)) {
    qkvi_block_leave(layer, &block);
    work->blocks--;
    return;
  }
  (void)qkvi_block_own(layer, &block);
  layer->tail[work->blocks - 1] = block;
}

// Pages take the place of their rows.
static void put_pages(qkv_layer *layer, tail_work *work, const qkv_page_entry *pages, uint64_t count) {
  for (uint64_t i = 0; i < count; i++) {
    qkvi_seal_put(layer, &work->scratch, &pages[i]);
    if (layer->tail_count > 0) drop_first(layer, work);
  }
  if (layer->length < layer->sealed) layer->length = layer->sealed;
}

static void add_block(const append *a, tail_work *work) {
  qkv_layer *layer = a->layer;
  if (layer->tail_count == work->blocks) {
    assert(work->reserved > 0);
    work->reserved--;
    grow_tail(layer, work->blocks + 1);
    layer->tail[work->blocks++] =
        (qkv_tail_block){.rows = qkv_arena_alloc(layer->config.arena, qkvi_block_bytes(a->model))};
  }
  layer->tail_count++;
}

// Writes rows up to `end` or the end of the last block, or begins another.
static void fill_block(const append *a, tail_work *work, uint64_t end) {
  qkv_layer *layer = a->layer;
  if (layer->length - layer->sealed == layer->tail_count * (uint64_t)QKV_PAGE_TOKENS) add_block(a, work);
  qkv_tail_block *last = &layer->tail[layer->tail_count - 1];
  assert(work->reserved > 0 || !qkvi_block_is_shared(last));
  if (qkvi_block_own(layer, last)) work->reserved--;
  const uint64_t first = layer->sealed + (layer->tail_count - 1) * (uint64_t)QKV_PAGE_TOKENS;
  if (end > first + QKV_PAGE_TOKENS) end = first + QKV_PAGE_TOKENS;
  store_rows(a, last->rows, first, layer->length, end);
  layer->length = end;
}

static void fill_tail(const append *a, tail_work *work, uint64_t end) {
  while (a->layer->length < end) fill_block(a, work, end);
}

static void free_spares(qkv_layer *layer, tail_work *work) {
  while (work->blocks > layer->tail_count) qkvi_block_leave(layer, &layer->tail[--work->blocks]);
  qkv_arena_unreserve(layer->config.arena, work->reserved * qkv_arena_cost(qkvi_block_bytes(layer->config.model)));
}

// With a quality contract a page's tiers are selected by what the layer holds, all pages before it and its own rows
// included.
static void show_rows(const append *a, tail_work *work) {
  const uint64_t page_end = a->layer->sealed + QKV_PAGE_TOKENS;
  if (a->layer->length >= page_end) return;
  qkvi_layer_enter(a->layer);
  fill_tail(a, work, page_end);
  qkvi_layer_leave(a->layer, false);
}

// Pages are coded while others read the layer, which gets them and the rows that are left at once.
static void apply(const append *a, const append_plan *plan) {
  qkv_layer *layer = a->layer;
  tail_work work = {.blocks = layer->tail_count, .reserved = plan->reserved};
  const bool judged = layer->config.quality != NULL;
  const uint64_t each = judged && plan->pages > 1 ? 1 : plan->pages;
  qkv_page_entry *pages = calloc((size_t)each + 1, sizeof *pages);
  if (pages == NULL) abort();
  if (plan->pages > 0) qkvi_seal_begin(layer, &work.scratch);
  for (uint64_t done = 0;;) {
    if (judged && done < plan->pages) show_rows(a, &work);
    code_pages(a, &work, pages, each);
    done += each;
    const bool last = done == plan->pages;
    qkvi_layer_enter(layer);
    put_pages(layer, &work, pages, each);
    if (last) fill_tail(a, &work, a->end);
    if (last) free_spares(layer, &work);
    if (last && plan->pages > 0) qkvi_layer_drop_unseen(layer);
    qkvi_layer_leave(layer, last);
    if (last) break;
  }
  assert(work.blocks <= plan->blocks);
  qkvi_seal_end(&work.scratch);
  free(pages);
}

qkv_status qkv_layer_append_check(const qkv_layer *layer, uint64_t position, const qkv_tensor *k, const qkv_tensor *v,
                                  qkv_error *error) {
  const append a = {.model = layer->config.model, .k = k, .v = v, .position = position};
  if (k != NULL) QKV_TRY(check_shapes(&a, error));
  return check_position(layer, position, error);
}

qkv_status qkv_layer_append(qkv_layer *layer, uint64_t position, const qkv_tensor *k, const qkv_tensor *v,
                            bool before_rope, uint64_t *appended, qkv_error *error) {
  const qkv_model *model = layer->config.model;
  append a = {.layer = layer,
              .model = model,
              .k = k,
              .v = v,
              .rotate = before_rope && model->rope.theta != 0,
              .position = position};
  *appended = 0;
  QKV_TRY(check_shapes(&a, error));
  a.end = position + (uint64_t)k->dims[0];
  QKV_TRY(check_rows(&a, error));
  QKV_TRY(check_position(layer, position, error));
  if (position < layer->length) QKV_TRY(compare_held(&a, error));
  if (a.end <= layer->length) return QKV_OK;

  append_plan plan = plan_append(&a);
  QKV_TRY(qkv_arena_reserve_in(layer->config.arena, layer->append_headroom, plan.bytes, error));
  *appended = a.end - layer->length;
  apply(&a, &plan);
  return QKV_OK;
}
