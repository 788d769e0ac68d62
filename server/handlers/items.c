#include "server/handlers/items.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"

qkvi_limits qkvi_limits_of(const qkv_server_options *options) {
  return (qkvi_limits){.items_max = (size_t)options->limit_items,
                       .message_bytes_max = options->limit_message,
                       .shared_memory = options->allow_client_shm};
}

// ---- fields ----

static qkv_status expect(const qkv_wire_field *field, qkv_wire_type type, const char *name, qkv_error *error) {
  if (field->type == type) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has wire type %d, expected %d", name, (int)field->type, (int)type);
}

static qkv_status get_uint64(const qkv_wire_field *field, const char *name, uint64_t *value, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_VARINT, name, error));
  *value = field->value;
  return QKV_OK;
}

static qkv_status get_double(const qkv_wire_field *field, const char *name, double *value, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_FIXED64, name, error));
  memcpy(value, &field->value, sizeof *value);
  return QKV_OK;
}

static qkv_status get_bool(const qkv_wire_field *field, const char *name, bool *value, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_VARINT, name, error));
  *value = field->value != 0;
  return QKV_OK;
}

// Walks a message; `apply` gets every field.
typedef qkv_status apply_fn(void *context, const qkv_wire_field *field, qkv_error *error);

static qkv_status walk(qkv_bytes message, apply_fn *apply, void *context, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    qkv_wire_field field;
    bool more = false;
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    QKV_TRY(apply(context, &field, error));
  }
}

// ---- options ----

static qkv_status range_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  qkv_attend_options *options = context;
  switch (field->number) {
    case 1:
      return get_uint64(field, "range.begin", &options->begin, error);
    case 2:
      return get_uint64(field, "range.end", &options->end, error);
    default:
      return QKV_OK;
  }
}

static qkv_status options_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  qkv_attend_options *options = context;
  uint64_t value = 0;
  switch (field->number) {
    case 1:
      return get_double(field, "scale", &options->scale, error);
    case 2:
      return get_uint64(field, "sliding_window", &options->sliding_window, error);
    case 3:
      return get_double(field, "soft_cap", &options->soft_cap, error);
    case 4:
      QKV_TRY(expect(field, QKV_WIRE_BYTES, "range", error));
      return walk(field->bytes, range_field, options, error);
    case 5:
      QKV_TRY(get_uint64(field, "causal_offset", &value, error));
      options->causal_offset = (int64_t)value;
      return QKV_OK;
    case 6:
      return get_bool(field, "not_causal", &options->not_causal, error);
    case 7:
      QKV_TRY(get_uint64(field, "precision", &value, error));
      options->precision =
          value <= QKV_PRECISION_INT8 ? (qkv_precision)value : (qkv_precision)(QKV_PRECISION_INT8 + 1);
      return QKV_OK;
    default:
      return QKV_OK;
  }
}

static qkv_status parse_options(qkv_bytes message, qkv_attend_options *options, qkv_error *error) {
  *options = (qkv_attend_options){0};
  return walk(message, options_field, options, error);
}

static qkv_status check_range(const qkv_attend_options *options, qkv_error *error) {
  if (options->end == 0 || options->begin <= options->end) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "options.range.begin is %" PRIu64 ", at most range.end %" PRIu64,
                  options->begin, options->end);
}

// ---- tensors ----

typedef struct tensor_fields {
  uint64_t dtype;
  int64_t dims[QKV_TENSOR_RANK_MAX], strides[QKV_TENSOR_RANK_MAX];
  size_t dim_count, stride_count;  // one beyond the maximum stands for more
  qkvi_region_part part;
  qkv_bytes data;
} tensor_fields;

static void push(int64_t *values, size_t *count, uint64_t value) {
  if (*count < QKV_TENSOR_RANK_MAX) values[*count] = (int64_t)value;
  if (*count <= QKV_TENSOR_RANK_MAX) ++*count;
}

// `repeated int64`, packed or not.
static qkv_status get_int64s(const qkv_wire_field *field, const char *name, int64_t *values, size_t *count,
                             qkv_error *error) {
  if (field->type == QKV_WIRE_VARINT) {
    push(values, count, field->value);
    return QKV_OK;
  }
  QKV_TRY(expect(field, QKV_WIRE_BYTES, name, error));
  qkv_wire_reader reader;
  qkv_wire_reader_init(&reader, field->bytes);
  while (reader.rest.length > 0 && *count <= QKV_TENSOR_RANK_MAX) {
    uint64_t value = 0;
    QKV_TRY(qkv_wire_varint(&reader, &value, error));
    push(values, count, value);
  }
  return QKV_OK;
}

// The fields of that part in a Tensor and in a RegionPart, whose numbers begin at `first`.
static qkv_status part_field(qkvi_region_part *part, const qkv_wire_field *field, uint32_t first, qkv_error *error) {
  switch (field->number - first) {
    case 0:
      QKV_TRY(expect(field, QKV_WIRE_BYTES, "shared_memory_region", error));
      part->region = field->bytes;
      return QKV_OK;
    case 1:
      return get_uint64(field, "shared_memory_offset", &part->offset, error);
    default:
      return get_uint64(field, "shared_memory_byte_size", &part->bytes, error);
  }
}

static qkv_status tensor_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  enum { REGION = 4 };
  tensor_fields *tensor = context;
  switch (field->number) {
    case 1:
      return get_uint64(field, "dtype", &tensor->dtype, error);
    case 2:
      return get_int64s(field, "dims", tensor->dims, &tensor->dim_count, error);
    case 3:
      return get_int64s(field, "strides", tensor->strides, &tensor->stride_count, error);
    case REGION:
    case REGION + 1:
    case REGION + 2:
      return part_field(&tensor->part, field, REGION, error);
    case 15:
      QKV_TRY(expect(field, QKV_WIRE_BYTES, "data", error));
      tensor->data = field->bytes;
      return QKV_OK;
    default:
      return QKV_OK;
  }
}

// Checks that qkv_tensor_check can no longer make.
static qkv_status check_fields(const tensor_fields *fields, const char *name, const qkvi_limits *limits,
                               qkv_error *error) {
  const bool shared = fields->part.region.length > 0;
  if (shared && !limits->shared_memory)
    return qkv_fail(error, QKV_UNIMPLEMENTED,
                    "%s.shared_memory_region is set, this daemon runs without --allow-client-shm", name);
  if (shared && fields->data.length > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%s.data is set, and so is shared_memory_region: a tensor has one of them", name);
  if (fields->dtype < QKV_FP32 || fields->dtype > QKV_BF16)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dtype is %" PRIu64 ", known are 1 (fp32), 2 (fp16) and 3 (bf16)",
                    name, fields->dtype);
  if (fields->dim_count != 3)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.dims has %s%zu entries, expected are 3", name,
                    fields->dim_count > QKV_TENSOR_RANK_MAX ? "at least " : "", fields->dim_count);
  if (fields->stride_count != 0 && fields->stride_count != fields->dim_count)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s.strides has %s%zu entries, dims has %zu", name,
                    fields->stride_count > QKV_TENSOR_RANK_MAX ? "at least " : "", fields->stride_count,
                    fields->dim_count);
  return QKV_OK;
}

// A stride of 0 lets a few bytes repeat as any number of rows, so the limit is on the rows.
static qkv_status check_size(const qkv_tensor *tensor, const char *name, int64_t bytes_max, qkv_error *error) {
  int64_t bytes = 0;
  qkv_status status = qkv_tensor_bytes(tensor->dtype, tensor->rank, tensor->dims, &bytes);
  assert(status == QKV_OK);  // checked by qkv_tensor_check
  if (bytes <= bytes_max) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "%s.dims are [%" PRId64 ", %" PRId64 ", %" PRId64 "], %" PRId64 " bytes, limit-message is %" PRId64,
                  name, tensor->dims[0], tensor->dims[1], tensor->dims[2], bytes, bytes_max);
}

// The span of dims and strides in a part is copied, gaps included.
static qkv_status check_part(const qkv_tensor *tensor, const qkvi_region_part *part, const char *name,
                             int64_t bytes_max, qkv_error *error) {
  int64_t end = 0;
  if (qkv_tensor_reach(tensor, &end) != QKV_OK || (uint64_t)end > part->bytes)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%s.shared_memory_byte_size is %" PRIu64 ", its dims and strides reach %" PRId64, name,
                    part->bytes, end);
  if (end > bytes_max)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "%s.strides reach %" PRId64 " bytes of shared memory, limit-message is %" PRId64, name, end,
                    bytes_max);
  return QKV_OK;
}

static qkv_status make_tensor(const tensor_fields *fields, const char *name, const qkvi_limits *limits,
                              qkv_tensor *tensor, qkv_error *error) {
  const bool shared = fields->part.region.length > 0;
  QKV_TRY(check_fields(fields, name, limits, error));
  tensor->dtype = (qkv_dtype)fields->dtype;
  tensor->rank = (int)fields->dim_count;
  memcpy(tensor->dims, fields->dims, sizeof tensor->dims);
  tensor->data = fields->data;
  if (fields->stride_count == 0)
    qkv_tensor_strides(tensor->dtype, tensor->rank, tensor->dims, tensor->strides);
  else
    memcpy(tensor->strides, fields->strides, sizeof tensor->strides);
  if (shared) tensor->data = (qkv_bytes){.length = SIZE_MAX};  // until it is loaded
  QKV_TRY(qkv_tensor_check(tensor, name, 3, error));
  if (shared) QKV_TRY(check_part(tensor, &fields->part, name, limits->message_bytes_max, error));
  return check_size(tensor, name, limits->message_bytes_max, error);
}

// ---- items ----

enum { ITEM_TOKEN_IDS = 7 };

// An item that is being parsed.
typedef struct item_parse {
  qkvi_item *item;
  const qkvi_limits *limits;
} item_parse;

static qkv_status item_tensor(const item_parse *parse, const qkv_wire_field *field, const char *name,
                              qkv_tensor *tensor, qkvi_region_part *part, qkv_error *error) {
  tensor_fields fields = {0};
  QKV_TRY(expect(field, QKV_WIRE_BYTES, name, error));
  if (walk(field->bytes, tensor_field, &fields, error) != QKV_OK) return qkv_error_prefix(error, "%s: ", name);
  *tensor = (qkv_tensor){0};
  *part = fields.part;
  (void)make_tensor(&fields, name, parse->limits, tensor, &parse->item->error);
  return QKV_OK;
}

static qkv_status item_rope(qkvi_item *item, const qkv_wire_field *field, const char *name, bool *before,
                            qkv_error *error) {
  uint64_t form = 0;
  QKV_TRY(get_uint64(field, name, &form, error));
  if (form > 2)
    (void)qkv_fail(&item->error, QKV_INVALID_ARGUMENT, "%s is %" PRIu64 ", known are 1 (after) and 2 (before)", name,
                   form);
  *before = form == 2;
  return QKV_OK;
}

static qkv_status item_layer(qkvi_item *item, const qkv_wire_field *field, qkv_error *error) {
  uint64_t layer = 0;
  QKV_TRY(get_uint64(field, "layer", &layer, error));
  if (layer >= QKV_LAYERS_MAX)
    (void)qkv_fail(&item->error, QKV_INVALID_ARGUMENT, "layer is %" PRIu64 ", models have at most %d layers", layer,
                   QKV_LAYERS_MAX);
  item->layer = (uint32_t)layer;
  return QKV_OK;
}

static qkv_status item_session(qkvi_item *item, const qkv_wire_field *field, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_BYTES, "session", error));
  (void)qkv_wire_string(field, "session", item->session, sizeof item->session, &item->error);
  return QKV_OK;
}

static qkv_status item_options(qkvi_item *item, const qkv_wire_field *field, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_BYTES, "options", error));
  if (parse_options(field->bytes, &item->options, error) != QKV_OK) return qkv_error_prefix(error, "options: ");
  item->own_options = true;
  (void)check_range(&item->options, &item->error);
  return QKV_OK;
}

static qkv_status item_token_ids(qkvi_item *item, const qkv_wire_field *field, qkv_error *error) {
  const qkv_status status = qkvi_token_ids_count(&item->token_ids, field, &item->error, error);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "token_ids: ");
}

static qkv_status item_page(qkvi_item *item, const qkv_wire_field *field, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_BYTES, "pages", error));
  item->pages++;
  item->page_bytes += field->bytes.length;
  return QKV_OK;
}

static qkv_status item_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  const item_parse *parse = context;
  qkvi_item *item = parse->item;
  switch (field->number) {
    case 1:
      return item_session(item, field, error);
    case 2:
      return item_layer(item, field, error);
    case 3:
      return get_uint64(field, "position", &item->position, error);
    case 4:
      return item_rope(item, field, "k_rope", &item->k_before_rope, error);
    case 5:
      return item_rope(item, field, "q_rope", &item->q_before_rope, error);
    case 6:
      return item_options(item, field, error);
    case ITEM_TOKEN_IDS:
      return item_token_ids(item, field, error);
    case 8:
      return item_tensor(parse, field, "k", &item->k, &item->k_part, error);
    case 9:
      return item_tensor(parse, field, "v", &item->v, &item->v_part, error);
    case 10:
      return item_tensor(parse, field, "q", &item->q, &item->q_part, error);
    case 12:
      return item_page(item, field, error);
    default:
      return QKV_OK;
  }
}

static qkv_status check_token_ids(const qkvi_item *item, qkv_error *error) {
  if (item->pages > 0) return QKV_OK;  // append_coded.c knows how many tokens these have
  const int64_t tokens = item->k.rank == 0 ? 0 : item->k.dims[0];
  if (item->token_ids.count == 0 || item->token_ids.count == (uint64_t)tokens) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "token_ids has %" PRIu64 " entries, k has %" PRId64 " tokens",
                  item->token_ids.count, tokens);
}

// Fields that the item must have.
static qkv_status check_item(const qkvi_item *item, qkvi_request_kind kind, qkv_error *error) {
  if (error->status != QKV_OK) return error->status;
  QKV_TRY(qkv_name_check(item->session, "session", error));
  if (item->k.rank != 0 && item->v.rank == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "v is missing, k and v come together");
  if (item->v.rank != 0 && item->k.rank == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "k is missing, k and v come together");
  if (item->k.rank != 0 && item->k.dims[0] != item->v.dims[0])
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "v.dims[0] is %" PRId64 ", k has %" PRId64 " tokens",
                    item->v.dims[0], item->k.dims[0]);
  if (kind == QKVI_APPEND_REQUEST && item->q.rank != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q is set, Append takes k and v only");
  if (item->pages > 0 && kind != QKVI_APPEND_REQUEST)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages is set, Append alone takes pages");
  if (item->pages > 0 && item->k.rank != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages is set, and so are k and v: an item has one of them");
  if (kind == QKVI_APPEND_REQUEST && item->k.rank == 0 && item->pages == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "k is missing, Append takes k and v");
  if (item->k.rank == 0 && item->q.rank == 0 && item->pages == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "q is missing, and so are k and v: nothing to do");
  return check_token_ids(item, error);
}

qkv_status qkvi_item_place(qkv_error *error, size_t index) {
  bool field = error->status == QKV_INVALID_ARGUMENT || error->status == QKV_FAILED_PRECONDITION ||
               error->status == QKV_UNIMPLEMENTED;
  return field ? qkv_error_prefix(error, "items[%zu].", index) : qkv_error_prefix(error, "items[%zu]: ", index);
}

static uint64_t dense_bytes(const qkv_tensor *tensor) {
  int64_t bytes = 0;
  if (tensor->rank == 0) return 0;
  qkv_status status = qkv_tensor_bytes(tensor->dtype, tensor->rank, tensor->dims, &bytes);
  assert(status == QKV_OK);  // checked by make_tensor
  return (uint64_t)bytes;
}

uint64_t qkvi_item_row_bytes(const qkvi_item *item) {
  return dense_bytes(&item->k) + dense_bytes(&item->v) + item->page_bytes;
}

uint64_t qkvi_request_row_bytes(const qkvi_request *request) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < request->count; i++) {
    const qkvi_item *item = &request->items[i];
    if (item->error.status == QKV_OK) bytes += qkvi_item_row_bytes(item) + dense_bytes(&item->q);
  }
  return bytes;
}

// ---- requests ----

typedef struct request_parse {
  qkvi_request *request;
  qkvi_request_kind kind;
  const qkvi_limits *limits;
} request_parse;

static qkv_status count_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  size_t *count = context;
  if (field->number != 1) return QKV_OK;
  ++*count;
  return expect(field, QKV_WIRE_BYTES, "items", error);
}

static void ensure_capacity(qkvi_request *request, size_t count) {
  if (count <= request->capacity) return;
  free(request->items);
  request->items = malloc(count * sizeof *request->items);
  if (request->items == NULL) abort();
  request->capacity = count;
}

static qkv_status request_item(const request_parse *parse, const qkv_wire_field *field, qkv_error *error) {
  qkvi_request *request = parse->request;
  size_t index = request->count++;
  assert(index < request->capacity);
  qkvi_item *item = &request->items[index];
  memset(item, 0, sizeof *item);
  item->token_ids = (qkvi_token_ids){.message = field->bytes, .field = ITEM_TOKEN_IDS};
  item->message = field->bytes;
  item_parse context = {item, parse->limits};
  if (walk(field->bytes, item_field, &context, error) != QKV_OK)
    return qkv_error_prefix(error, "items[%zu]: ", index);
  if (check_item(item, parse->kind, &item->error) != QKV_OK) (void)qkvi_item_place(&item->error, index);
  return QKV_OK;
}

static qkv_status request_options(const request_parse *parse, const qkv_wire_field *field, qkv_error *error) {
  QKV_TRY(expect(field, QKV_WIRE_BYTES, "options", error));
  if (parse_options(field->bytes, &parse->request->options, error) != QKV_OK)
    return qkv_error_prefix(error, "options: ");
  return check_range(&parse->request->options, error);
}

static qkv_status request_out_dtype(const request_parse *parse, const qkv_wire_field *field, qkv_error *error) {
  uint64_t dtype = 0;
  QKV_TRY(get_uint64(field, "out_dtype", &dtype, error));
  if (dtype > QKV_BF16)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "out_dtype is %" PRIu64 ", known are 1 (fp32), 2 (fp16) and 3 (bf16)", dtype);
  parse->request->out_dtype = dtype == QKV_DTYPE_NONE ? QKV_FP32 : (qkv_dtype)dtype;
  return QKV_OK;
}

static qkv_status append_field(const request_parse *parse, const qkv_wire_field *field, qkv_error *error) {
  enum { OPEN = 2, COMPLETE, SEAL };
  uint64_t mark = 0;
  switch (field->number) {
    case OPEN:
      parse->request->opens++;
      return expect(field, QKV_WIRE_BYTES, "open", error);
    case COMPLETE:
      QKV_TRY(get_uint64(field, "complete", &mark, error));
      parse->request->complete = mark != 0;
      return QKV_OK;
    case SEAL:
      QKV_TRY(get_uint64(field, "seal", &mark, error));
      parse->request->seal = mark != 0;
      return QKV_OK;
    default:
      return QKV_OK;
  }
}

static qkv_status into_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  return field->number > 3 ? QKV_OK : part_field(context, field, 1, error);
}

static qkv_status request_into(const request_parse *parse, const qkv_wire_field *field, qkv_error *error) {
  qkvi_region_part *into = &parse->request->into;
  QKV_TRY(expect(field, QKV_WIRE_BYTES, "results_into", error));
  if (walk(field->bytes, into_field, into, error) != QKV_OK) return qkv_error_prefix(error, "results_into: ");
  if (into->region.length == 0 || parse->limits->shared_memory) return QKV_OK;
  return qkv_fail(error, QKV_UNIMPLEMENTED,
                  "results_into.shared_memory_region is set, this daemon runs without --allow-client-shm");
}

static qkv_status request_field(void *context, const qkv_wire_field *field, qkv_error *error) {
  const request_parse *parse = context;
  if (field->number == 1) return request_item(parse, field, error);
  if (parse->kind == QKVI_APPEND_REQUEST) return append_field(parse, field, error);
  switch (field->number) {
    case 2:
      return request_options(parse, field, error);
    case 3:
      return request_out_dtype(parse, field, error);
    case 4:
      return get_uint64(field, "id", &parse->request->id, error);
    case 5:
      return request_into(parse, field, error);
    default:
      return QKV_OK;
  }
}

static void count_part(qkvi_request *request, const qkv_tensor *tensor, const qkvi_region_part *part) {
  int64_t end = 0;
  if (part->region.length == 0) return;
  const qkv_status status = qkv_tensor_reach(tensor, &end);
  assert(status == QKV_OK);  // checked by make_tensor
  (void)status;
  request->shared_bytes += (uint64_t)end;
  request->shared_count++;
}

static void count_shared(qkvi_request *request) {
  request->shared_bytes = 0;
  request->shared_count = 0;
  for (size_t i = 0; i < request->count; i++) {
    const qkvi_item *item = &request->items[i];
    if (item->error.status != QKV_OK) continue;
    count_part(request, &item->k, &item->k_part);
    count_part(request, &item->v, &item->v_part);
    count_part(request, &item->q, &item->q_part);
  }
}

// Each tensor is within the limit; together they must be, too.
static qkv_status check_rows(const qkvi_request *request, const qkvi_limits *limits, qkv_error *error) {
  uint64_t bytes = qkvi_request_row_bytes(request);
  if (request->shared_bytes > bytes) bytes = request->shared_bytes;
  if (bytes <= (uint64_t)limits->message_bytes_max) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "items has %zu entries with %" PRIu64 " bytes of rows, limit-message is %" PRId64, request->count,
                  bytes, limits->message_bytes_max);
}

qkv_status qkvi_request_parse(qkv_bytes message, qkvi_request_kind kind, const qkvi_limits *limits,
                              qkvi_request *request, qkv_error *error) {
  size_t count = 0;
  QKV_TRY(walk(message, count_field, &count, error));
  if (count > limits->items_max)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "items has %zu entries, limit-items is %zu", count,
                    limits->items_max);
  ensure_capacity(request, count);
  request->count = 0;
  request->options = (qkv_attend_options){0};
  request->out_dtype = QKV_FP32;
  request->id = 0;
  request->opens = 0;
  request->complete = request->seal = false;
  request->into = (qkvi_region_part){0};
  qkvi_request_unload(request);
  request_parse context = {request, kind, limits};
  QKV_TRY(walk(message, request_field, &context, error));
  if (count == 0 && request->opens == 0 && !request->complete)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "items is empty, at least 1");
  for (size_t i = 0; i < request->count; i++) {
    if (!request->items[i].own_options) request->items[i].options = request->options;
  }
  count_shared(request);
  return check_rows(request, limits, error);
}

// ---- Shared memory ----

// The source of a request's copies, and the progress.
typedef struct request_load {
  qkvi_request *request;
  qkvi_regions *regions;
  const char *tenant;
  uint64_t bytes;
  size_t count;
} request_load;

// The GPU that a tensor's memory was on, and where its copy is there.
typedef struct copied_rows {
  qkvi_gpu *gpu;
  qkv_cuda_memory at;
} copied_rows;

// `rows` NULL: it has none for a GPU to code.
static qkv_status load_tensor(request_load *load, qkv_tensor *tensor, const qkvi_region_part *part, const char *name,
                              copied_rows *rows, qkv_error *error) {
  qkvi_region *region = NULL;
  int64_t end = 0;
  if (part->region.length == 0) return QKV_OK;
  QKV_TRY(qkvi_regions_find(load->regions, load->tenant, part, name, &region, error));
  (void)qkv_tensor_reach(tensor, &end);
  uint8_t *to = load->request->shared.data + load->bytes;
  if (rows != NULL) rows->gpu = qkvi_region_gpu(region);
  const qkv_status status =
      rows != NULL ? qkvi_region_take(region, part->offset, to, (size_t)end, &load->request->area, &rows->at, error)
                   : qkvi_region_read(region, part->offset, to, (size_t)end, error);
  qkvi_region_release(region);
  if (status != QKV_OK) return qkv_error_prefix(error, "%s: ", name);
  qkv_segment *segment = &load->request->shared_segments[load->count++];
  *segment = (qkv_segment){.data = to, .length = (size_t)end};
  tensor->data = qkv_bytes_of(segment);
  load->bytes += (uint64_t)end;
  return QKV_OK;
}

static qkv_status load_item(request_load *load, qkvi_item *item) {
  copied_rows k = {0}, v = {0};
  const bool pages = item->k.rank == 3 && item->k.dims[0] >= QKV_PAGE_TOKENS;
  QKV_TRY(load_tensor(load, &item->k, &item->k_part, "k", pages ? &k : NULL, &item->error));
  QKV_TRY(load_tensor(load, &item->v, &item->v_part, "v", pages ? &v : NULL, &item->error));
  QKV_TRY(load_tensor(load, &item->q, &item->q_part, "q", NULL, &item->error));
  if (k.gpu != NULL && k.gpu == v.gpu)
    qkvi_gpu_source_init(&item->source, k.gpu, load->request->area, &item->k, &item->v,
                         (qkv_cuda_memory[]){k.at, v.at});
  return QKV_OK;
}

static void ensure_shared_capacity(qkvi_request *request) {
  if (request->shared_count > request->shared_segment_capacity) {
    free(request->shared_segments);
    request->shared_segments = malloc(request->shared_count * sizeof *request->shared_segments);
    request->shared_segment_capacity = request->shared_count;
  }
  if (request->shared_segments == NULL) abort();
  request->shared = qkvi_buffers_borrow(qkvi_regions_buffers(request->regions), request->shared_bytes);
}

uint64_t qkvi_request_load(qkvi_request *request, qkvi_regions *regions, const char *tenant) {
  if (request->loaded || request->shared_count == 0) return 0;
  request_load load = {.request = request, .regions = regions, .tenant = tenant};
  request->loaded = true;
  request->regions = regions;
  ensure_shared_capacity(request);
  for (size_t i = 0; i < request->count; i++) {
    qkvi_item *item = &request->items[i];
    if (item->error.status != QKV_OK) continue;
    if (load_item(&load, item) != QKV_OK) (void)qkvi_item_place(&item->error, i);
  }
  return load.bytes;
}

bool qkvi_request_may_wait(const qkvi_request *request, qkvi_regions *regions) {
  return (request->shared_count > 0 || request->into.region.length > 0) && qkvi_regions_may_wait(regions);
}

void qkvi_request_unload(qkvi_request *request) {
  if (request->regions != NULL) qkvi_buffers_return(qkvi_regions_buffers(request->regions), &request->shared);
  qkvi_gpu_area_return(&request->area);
  request->regions = NULL;
  request->loaded = false;
}

void qkvi_request_deinit(qkvi_request *request) {
  free(request->items);
  qkvi_request_unload(request);
  free(request->shared_segments);
  *request = (qkvi_request){0};
}
