// Items on their way out, tensors on their way in: the messages that carry rows, written and read in place.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/place.h"

// Field numbers of qkv/v1/kv_cache.proto and tensor.proto.
enum { REQUEST_ITEMS = 1 };
enum {
  ITEM_SESSION = 1,
  ITEM_LAYER,
  ITEM_POSITION,
  ITEM_K_ROPE,
  ITEM_Q_ROPE,
  ITEM_OPTIONS,
  ITEM_TOKEN_IDS,
  ITEM_K,
  ITEM_V,
  ITEM_Q,
  ITEM_PAGES = 12
};
enum { PAGE_TOKENS = 1, PAGE_HASH = 2, PAGE_IMAGE = 15 };
enum {
  OPTIONS_SCALE = 1,
  OPTIONS_WINDOW,
  OPTIONS_SOFT_CAP,
  OPTIONS_RANGE,
  OPTIONS_CAUSAL_OFFSET,
  OPTIONS_NOT_CAUSAL,
  OPTIONS_PRECISION
};
enum { RANGE_BEGIN = 1, RANGE_END };
enum { TENSOR_DTYPE = 1, TENSOR_DIMS, TENSOR_STRIDES, TENSOR_REGION, TENSOR_BYTE_SIZE = 6, TENSOR_DATA = 15 };
enum { ROPE_FORM_BEFORE = 2 };

// ---- out ----

qkv_status qkvi_check_tensor(const qkv_client_tensor *from, const char *name, qkv_segment *segment,
                             qkv_tensor *tensor, qkv_error *error) {
  if (from->rank < 1 || from->rank > QKV_TENSOR_RANK_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.rank is %d, allowed are 1 to %d", name, from->rank,
                    QKV_TENSOR_RANK_MAX);
  }
  if (from->data == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.data is NULL", name);
  *segment = (qkv_segment){.data = from->data, .length = from->bytes};
  *tensor = (qkv_tensor){.dtype = (qkv_dtype)from->dtype, .rank = from->rank, .data = qkv_bytes_of(segment)};
  bool dense = true;
  for (int i = 0; i < from->rank; i++) {
    tensor->dims[i] = from->dims[i];
    tensor->strides[i] = from->strides[i];
    dense = dense && from->strides[i] == 0;
  }
  if (dense) qkv_tensor_strides(tensor->dtype, tensor->rank, tensor->dims, tensor->strides);
  return qkv_tensor_check(tensor, name, tensor->rank, error);
}

// Bytes from the first element to the last that the strides reach.
static int64_t reach(const qkv_tensor *tensor) {
  assert(tensor->rank <= QKV_TENSOR_RANK_MAX);
  int64_t bytes = (int64_t)qkv_dtype_size(tensor->dtype);
  for (int i = 0; i < tensor->rank; i++) bytes += (tensor->dims[i] - 1) * tensor->strides[i];
  return bytes;
}

static void copy_rows(const qkv_tensor *tensor, const uint8_t *from, int axis, uint8_t **out) {
  assert(axis < tensor->rank && tensor->rank <= QKV_TENSOR_RANK_MAX);
  if (axis == tensor->rank - 1) {
    size_t bytes = (size_t)tensor->dims[axis] * qkv_dtype_size(tensor->dtype);
    memcpy(*out, from, bytes);
    *out += bytes;
    return;
  }
  for (int64_t i = 0; i < tensor->dims[axis]; i++) copy_rows(tensor, from + i * tensor->strides[axis], axis + 1, out);
}

// A dense copy, which the client keeps until the call is over. NULL when there is no memory.
static const void *pack(qkv_client *client, const qkv_tensor *tensor, int64_t bytes) {
  uint8_t *packed = malloc((size_t)bytes);
  void **list = realloc(client->packed, (client->packed_count + 1) * sizeof *list);
  if (list != NULL) client->packed = list;
  if (packed == NULL || list == NULL) {
    free(packed);
    return NULL;
  }
  client->packed[client->packed_count++] = packed;
  uint8_t *out = packed;
  copy_rows(tensor, tensor->data.segments[0].data, 0, &out);
  assert(out == packed + bytes);
  return packed;
}

static qkv_status put_tensor(qkv_client *client, uint32_t field, const char *name, const qkv_client_tensor *from,
                             qkv_error *error) {
  qkv_segment segment;
  qkv_tensor tensor = {0};
  int64_t dense_bytes = 0;
  int64_t dense[QKV_TENSOR_RANK_MAX] = {0};
  if (from->rank == 0) return QKV_OK;
  QKV_TRY(qkvi_check_tensor(from, name, &segment, &tensor, error));
  qkv_status countable = qkv_tensor_bytes(tensor.dtype, tensor.rank, tensor.dims, &dense_bytes);
  assert(countable == QKV_OK);  // it has passed the check
  qkv_tensor_strides(tensor.dtype, tensor.rank, tensor.dims, dense);
  bool as_it_lies = memcmp(dense, tensor.strides, (size_t)tensor.rank * sizeof *dense) == 0;
  const void *data = from->data;
  int64_t bytes = reach(&tensor);
  const qkvi_share *share = NULL;
  const bool on_gpu = qkvi_is_on_gpu(client, from->data, (size_t)bytes);
  bool strided = !as_it_lies && (on_gpu || bytes <= 2 * dense_bytes);
  if (!as_it_lies && !strided) {
    bytes = dense_bytes;
    data = pack(client, &tensor, bytes);
    if (data == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s: no memory for its rows", name);
  }
  if (data == from->data) share = qkvi_share_of(client, data, (size_t)bytes);
  if (on_gpu && share == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s reaches beyond the memory on the GPU that is lent", name);
  qkv_wire_writer *writer = client->writer;
  qkv_wire_begin(writer, field);
  qkv_wire_put_varint(writer, TENSOR_DTYPE, (uint64_t)tensor.dtype);
  qkv_wire_put_packed(writer, TENSOR_DIMS, tensor.dims, (size_t)tensor.rank);
  if (strided) qkv_wire_put_packed(writer, TENSOR_STRIDES, tensor.strides, (size_t)tensor.rank);
  if (share != NULL)
    qkvi_share_put(writer, TENSOR_REGION, share, data, (size_t)bytes);
  else
    qkv_wire_put_reference(writer, TENSOR_DATA, data, (size_t)bytes, NULL);
  qkv_wire_end(writer);
  return QKV_OK;
}

static void put_options(qkv_wire_writer *writer, const qkv_client_attend_options *options) {
  qkv_wire_begin(writer, ITEM_OPTIONS);
  qkv_wire_put_double(writer, OPTIONS_SCALE, options->scale);
  qkv_wire_put_varint(writer, OPTIONS_WINDOW, options->sliding_window);
  qkv_wire_put_double(writer, OPTIONS_SOFT_CAP, options->soft_cap);
  if (options->begin != 0 || options->end != 0) {
    qkv_wire_begin(writer, OPTIONS_RANGE);
    qkv_wire_put_varint(writer, RANGE_BEGIN, options->begin);
    qkv_wire_put_varint(writer, RANGE_END, options->end);
    qkv_wire_end(writer);
  }
  qkv_wire_put_varint(writer, OPTIONS_CAUSAL_OFFSET, (uint64_t)options->causal_offset);
  qkv_wire_put_varint(writer, OPTIONS_NOT_CAUSAL, options->not_causal);
  qkv_wire_put_varint(writer, OPTIONS_PRECISION, (uint64_t)options->precision);
  qkv_wire_end(writer);
}

static qkv_status put_page(qkv_client *client, const qkv_client_page *page, size_t i, qkv_error *error) {
  qkv_wire_writer *writer = client->writer;
  if (page->image == NULL || page->bytes == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages[%zu].image is empty", i);
  qkv_wire_begin(writer, ITEM_PAGES);
  qkv_wire_put_varint(writer, PAGE_TOKENS, page->tokens);
  qkv_wire_put_fixed64(writer, PAGE_HASH, page->calibration_hash);
  qkv_wire_put_reference(writer, PAGE_IMAGE, page->image, page->bytes, NULL);
  qkv_wire_end(writer);
  return QKV_OK;
}

static size_t page_tokens(const qkv_client_item *item) {
  size_t tokens = 0;
  for (size_t i = 0; i < item->page_count; i++) tokens += item->pages[i].tokens;
  return tokens;
}

static qkv_status put_item(qkv_client *client, const qkv_client_item *item, qkv_error *error) {
  qkv_wire_writer *writer = client->writer;
  if (item->session == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  qkv_wire_begin(writer, REQUEST_ITEMS);
  qkv_wire_put_string(writer, ITEM_SESSION, item->session);
  qkv_wire_put_varint(writer, ITEM_LAYER, item->layer);
  qkv_wire_put_varint(writer, ITEM_POSITION, item->position);
  if (item->k_before_rope) qkv_wire_put_varint(writer, ITEM_K_ROPE, ROPE_FORM_BEFORE);
  if (item->q_before_rope) qkv_wire_put_varint(writer, ITEM_Q_ROPE, ROPE_FORM_BEFORE);
  if (item->options != NULL) put_options(writer, item->options);
  QKV_TRY(put_tensor(client, ITEM_K, "k", &item->k, error));
  // Behind k, whose dims have been checked.
  const size_t tokens = item->k.rank > 0 ? (size_t)item->k.dims[0] : page_tokens(item);
  if (item->token_ids != NULL && tokens > 0) qkv_wire_put_packed_ids(writer, ITEM_TOKEN_IDS, item->token_ids, tokens);
  QKV_TRY(put_tensor(client, ITEM_V, "v", &item->v, error));
  QKV_TRY(put_tensor(client, ITEM_Q, "q", &item->q, error));
  for (size_t i = 0; i < item->page_count; i++) QKV_TRY(put_page(client, &item->pages[i], i, error));
  qkv_wire_end(writer);
  return QKV_OK;
}

qkv_code qkvi_put_items(qkv_client *client, const qkv_client_item *items, size_t count, const size_t *numbers,
                        qkv_call_error *error) {
  const qkv_code ready = qkvi_shares_ready(client, error);
  if (ready != QKV_OK) return ready;
  (void)qkvi_begin_request(client);
  for (size_t i = 0; i < count; i++) {
    qkv_error reason = {0};
    if (put_item(client, &items[i], &reason) == QKV_OK) continue;
    qkv_error_prefix(&reason, "items[%zu].", numbers != NULL ? numbers[i] : i);
    qkvi_release_items(client);
    return qkvi_fail_with(error, &reason);
  }
  return QKV_OK;
}

void qkvi_release_items(qkv_client *client) {
  assert(atomic_load(&client->lent) == 0);
  for (size_t i = 0; i < client->packed_count; i++) free(client->packed[i]);
  client->packed_count = 0;
}

static const char append_method[] = "/qkv.v1.KvCache/Append";

// Ends what was started with what the client's writer had.
static qkv_code finish_append(qkv_client *client, qkvi_exchange *exchange, uint64_t *appended,
                              qkv_call_error *error) {
  enum { RESPONSE_TOKENS = 2 };
  if (appended != NULL) *appended = 0;
  grpc_byte_buffer *response = NULL;
  const qkv_code code = qkvi_unary_finish(exchange, &response, error);
  qkvi_release_items(client);
  if (code != QKV_OK) return code;

  qkv_wire_reader reader;
  qkv_wire_field field;
  qkv_error reason = {0};
  bool more = true;
  qkv_wire_reader_init(&reader, qkvi_view(client, response));
  while (qkv_wire_next(&reader, &field, &more, &reason) == QKV_OK && more) {
    if (field.number == RESPONSE_TOKENS && appended != NULL) *appended = field.value;
  }
  grpc_byte_buffer_destroy(response);
  return reason.status == QKV_OK ? QKV_OK : qkvi_malformed(error, append_method, &reason);
}

const char *qkvi_key_of_item(const void *items, size_t i) {
  return ((const qkv_client_item *)items)[i].session;
}

qkv_client_item *qkvi_items_in_order(const qkvi_split *split, const qkv_client_item *items, size_t count) {
  qkv_client_item *ordered = calloc(count + 1, sizeof *ordered);
  assert(ordered != NULL);
  for (size_t i = 0; i < count; i++) ordered[i] = items[split->order[i]];
  return ordered;
}

// Each group to its daemon, all at once; the first error counts, and what the others have appended stays.
static qkv_code append_split(const qkvi_split *split, const qkv_client_item *ordered, uint64_t *appended,
                             qkv_call_error *error) {
  qkvi_exchange *exchanges = calloc(split->groups + 1, sizeof *exchanges);
  bool *started = calloc(split->groups + 1, sizeof *started);
  assert(exchanges != NULL && started != NULL);
  qkv_call_error first = {0}, reason = {0};
  for (size_t g = 0; g < split->groups; g++) {
    const size_t begin = split->begins[g], count = split->begins[g + 1] - begin;
    qkv_client *part = split->parts[g];
    started[g] = qkvi_put_items(part, ordered + begin, count, split->order + begin, &reason) == QKV_OK;
    if (started[g]) qkvi_unary_start(part, append_method, qkvi_request(part), &exchanges[g]);
    if (!started[g] && first.code == QKV_OK) first = reason;
  }
  for (size_t g = 0; g < split->groups; g++) {
    uint64_t tokens = 0;
    if (!started[g]) continue;
    if (finish_append(split->parts[g], &exchanges[g], &tokens, &reason) != QKV_OK && first.code == QKV_OK)
      first = reason;
    if (appended != NULL) *appended += tokens;
  }
  free(exchanges);
  free(started);
  if (error != NULL) *error = first;
  return first.code;
}

qkv_code qkv_client_append(qkv_client *client, const qkv_client_item *items, size_t count, uint64_t *appended,
                           qkv_call_error *error) {
  if (appended != NULL) *appended = 0;
  if (client->part_count == 0 || count == 0) {  // nothing to be put in order
    qkvi_exchange exchange;
    qkv_code code = qkvi_route(&client, count > 0 && items[0].session != NULL ? items[0].session : "", error);
    if (code == QKV_OK) code = qkvi_put_items(client, items, count, NULL, error);
    if (code != QKV_OK) return code;
    qkvi_unary_start(client, append_method, qkvi_request(client), &exchange);
    return finish_append(client, &exchange, appended, error);
  }
  qkvi_split split;
  qkv_code code = qkvi_split_keys(client, qkvi_key_of_item, items, count, &split, error);
  if (code != QKV_OK) return code;
  qkv_client_item *ordered = qkvi_items_in_order(&split, items, count);
  code = append_split(&split, ordered, appended, error);
  free(ordered);
  qkvi_split_free(&split);
  return code;
}

qkv_code qkv_client_put(qkv_client *client, const qkv_session_options *options, const qkv_client_item *items,
                        size_t count, bool seal, qkv_call_error *error) {
  enum { OPEN = 2, COMPLETE, SEAL };
  qkvi_exchange exchange;
  qkv_code code = qkvi_route(&client, options->session != NULL ? options->session : "", error);
  if (code == QKV_OK) code = qkvi_put_items(client, items, count, NULL, error);
  if (code != QKV_OK) return code;
  size_t bytes;
  void *open = qkvi_pack_open(options, &bytes);
  qkv_wire_put_reference(client->writer, OPEN, open, bytes, NULL);
  qkv_wire_put_varint(client->writer, COMPLETE, true);
  qkv_wire_put_varint(client->writer, SEAL, seal);
  qkvi_unary_start(client, append_method, qkvi_request(client), &exchange);
  const qkv_code sent = finish_append(client, &exchange, NULL, error);
  free(open);
  return sent;
}

// ---- in ----

// A repeated int64 comes packed or one by one.
static qkv_status read_integers(const qkv_wire_field *field, const char *name, int64_t *values, int *count,
                                qkv_error *error) {
  qkv_wire_reader reader;
  uint64_t value = field->value;
  if (field->type == QKV_WIRE_BYTES) qkv_wire_reader_init(&reader, field->bytes);
  bool packed = field->type == QKV_WIRE_BYTES;
  while (!packed || reader.rest.length > 0) {
    if (packed) QKV_TRY(qkv_wire_varint(&reader, &value, error));
    if (*count == QKV_TENSOR_RANK_MAX) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has more than %d dims", name, QKV_TENSOR_RANK_MAX);
    }
    values[(*count)++] = (int64_t)value;
    if (!packed) break;
  }
  return QKV_OK;
}

static qkv_status read_tensor(qkv_bytes message, bool shared, const char *name, int rank, qkv_tensor *tensor,
                              qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  int strides = 0;
  int64_t dense[QKV_TENSOR_RANK_MAX];
  *tensor = (qkv_tensor){0};
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number == TENSOR_DTYPE) tensor->dtype = (qkv_dtype)field.value;
    if (field.number == TENSOR_DIMS) QKV_TRY(read_integers(&field, name, tensor->dims, &tensor->rank, error));
    if (field.number == TENSOR_STRIDES) QKV_TRY(read_integers(&field, name, tensor->strides, &strides, error));
    if (field.number == TENSOR_BYTE_SIZE && shared) tensor->data = (qkv_bytes){.length = field.value};
    if (field.number == TENSOR_DATA && field.type == QKV_WIRE_BYTES && !shared) tensor->data = field.bytes;
  }
  if (tensor->rank != rank) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has %d dims, expected are %d", name, tensor->rank, rank);
  }
  qkv_tensor_strides(tensor->dtype, rank, tensor->dims, dense);
  if (strides == 0) memcpy(tensor->strides, dense, sizeof dense);
  QKV_TRY(qkv_tensor_check(tensor, name, rank, error));
  if (memcmp(tensor->strides, dense, (size_t)rank * sizeof *dense) != 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is not dense", name);
  }
  return QKV_OK;
}

qkv_status qkvi_read_tensor(qkv_bytes message, const char *name, int rank, qkv_tensor *tensor, qkv_error *error) {
  return read_tensor(message, false, name, rank, tensor, error);
}

qkv_status qkvi_read_shared_tensor(qkv_bytes message, const char *name, int rank, qkv_tensor *tensor,
                                   qkv_error *error) {
  return read_tensor(message, true, name, rank, tensor, error);
}
