// What a request costs, and turns: how much of a batch is done before others may have its layers.
#include <assert.h>

#include "engine/cache/attend_internal.h"

// ---- Costs ----

// Of the pages from the one at `begin` on, as far as they begin below `end`; at most to page `stop`.
static uint64_t page_bytes(const qkv_layer *layer, uint64_t begin, uint64_t end, size_t stop) {
  uint64_t bytes = 0;
  for (size_t i = qkv_layer_page_at(layer, begin); i < stop && qkvi_layer_span(layer, i).begin < end; i++)
    bytes += qkvi_layer_image(layer, i) != NULL ? qkv_layer_page(layer, i)->bytes : qkvi_layer_peek(layer, i).bytes;
  return bytes;
}

// Codes and exact rows, read once.
static uint64_t all_bytes(const qkv_attend *request) {
  const qkv_layer *layer = request->layer;
  const qkv_model *model = layer->config.model;
  uint64_t begin, end;
  qkv_attend_span(request, &begin, &end);
  if (begin >= end) return 0;
  uint64_t bytes = page_bytes(layer, begin, end, layer->page_count);
  if (end > layer->sealed) {
    uint64_t exact = end - (begin > layer->sealed ? begin : layer->sealed);
    bytes += exact * model->kv_heads * (model->key_dim + model->value_dim) * qkv_dtype_size(model->dtype);
  }
  return bytes;
}

static uint64_t blocks_of(const qkv_attend *request) {
  return (qkvi_attend_rows(request) + QKV_QUERY_BLOCK - 1) / QKV_QUERY_BLOCK;
}

uint64_t qkv_attend_cost(const qkv_attend *request) {
  return all_bytes(request) * blocks_of(request);
}

// Pages of the leading ranges that both requests see and may attend together: an estimate.
static uint64_t shared_bytes(const qkv_attend *request, const qkv_attend *before) {
  const qkv_layer *layer = request->layer, *other = before->layer;
  size_t first, end, first_other, end_other, page, page_end;
  uint64_t begin, seen;
  if (!qkvi_share_may(request) || !qkvi_share_may(before)) return 0;
  qkvi_attend_ranges(request, &first, &end);
  qkvi_attend_ranges(before, &first_other, &end_other);
  size_t at = first;
  while (first == first_other && at < end && at < end_other && layer->ranges[at].range == other->ranges[at].range)
    at++;
  if (at == first) return 0;
  qkv_layer_range(layer, at - 1, &page, &page_end);
  qkv_attend_span(request, &begin, &seen);
  return page_bytes(layer, begin, seen, page_end);
}

// ---- Turns ----

qkv_attend qkv_attend_slice(const qkv_attend *request, uint64_t first, uint64_t count) {
  const qkv_model *model = request->layer->config.model;
  qkv_attend slice = *request;
  assert(count > 0 && first + count <= (uint64_t)request->q.dims[0]);
  const size_t skipped = (size_t)first * (size_t)request->q.strides[0];
  slice.q.data = qkv_bytes_slice(request->q.data, skipped, request->q.data.length - skipped);
  slice.q.dims[0] = (int64_t)count;
  slice.earlier += first;
  slice.continues |= first + count < (uint64_t)request->q.dims[0];
  slice.position += first;
  if (slice.out != NULL) slice.out += first * model->q_heads * model->value_dim;
  if (slice.lse != NULL) slice.lse += first * model->q_heads;
  return slice;
}

void qkv_attend_end_at(qkv_attend *request, uint64_t end) {
  uint64_t *own = &request->options.end;
  if (*own == 0 || *own > end) *own = end;
}

// Queries of so many blocks of rows.
static uint64_t queries_in(const qkv_attend *request, uint64_t blocks) {
  const uint64_t all = (uint64_t)request->q.dims[0], group = qkvi_attend_rows(request) / all;
  const uint64_t queries = blocks * QKV_QUERY_BLOCK / group;
  return queries == 0 ? 1 : queries < all ? queries : all;
}

uint64_t qkv_attend_next_cost(uint64_t cost, uint64_t ns) {
  const uint64_t turn_ns = 100000000, cost_max = (uint64_t)1 << 50;
  if (ns > turn_ns) return cost > 1 ? cost / 2 : 1;
  return ns < turn_ns / 2 && cost < cost_max ? cost * 2 : cost;
}

size_t qkv_attend_take(const qkv_attend *requests, size_t count, uint64_t cost, uint64_t *queries) {
  uint64_t taken = 0;
  size_t together = 0;  // rows of requests that meet pages together
  assert(count > 0);
  for (size_t i = 0; i < count; i++) {
    const size_t rows = qkvi_attend_rows(&requests[i]);
    const uint64_t blocks = blocks_of(&requests[i]);
    uint64_t bytes = all_bytes(&requests[i]), shared = 0;
    if (i > 0 && together + rows <= QKV_QUERY_BLOCK) shared = shared_bytes(&requests[i], &requests[i - 1]);
    together = shared > 0 ? together + rows : rows;
    bytes -= shared;
    if (i > 0 && taken + bytes > cost) return i;
    const uint64_t fit = taken < cost ? (cost - taken) / (bytes + 1) + 1 : 1;
    *queries = fit < blocks ? queries_in(&requests[i], fit) : (uint64_t)requests[i].q.dims[0];
    if (fit < blocks) return i + 1;
    taken += bytes * blocks;
  }
  return count;
}
