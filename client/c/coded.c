// Fetch with pages as they are, and decoded here.
#include <assert.h>
#include <grpc/byte_buffer.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/c/fetch.h"
#include "client/c/place.h"
#include "engine/base/pool.h"

// Field numbers of qkv/v1/kv_cache.proto.
enum { RESPONSE_LAYER = 1, RESPONSE_POSITION, RESPONSE_PAGES = 5 };
enum { PAGE_TOKENS = 1, PAGE_HASH = 2, PAGE_IMAGE = 15 };
enum { IMAGE_ALIGN = 64 };

// ---- Pages that have arrived ----

// Images of one response, each 64-byte aligned. The last user frees.
typedef struct arrival {
  atomic_size_t users;
  _Alignas(IMAGE_ALIGN) uint8_t data[];
} arrival;

static void leave(arrival *images) {
  if (atomic_fetch_sub(&images->users, 1) == 1) free(images);
}

static size_t aligned(size_t bytes) {
  return (bytes + IMAGE_ALIGN - 1) / IMAGE_ALIGN * IMAGE_ALIGN;
}

static qkv_status read_page(qkv_bytes message, qkv_client_page *page, qkv_bytes *image, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *image = (qkv_bytes){0};
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) break;
    if (field.number == PAGE_TOKENS) page->tokens = (uint32_t)field.value;
    if (field.number == PAGE_HASH) page->calibration_hash = field.value;
    if (field.number == PAGE_IMAGE && field.type == QKV_WIRE_BYTES) *image = field.bytes;
  }
  page->bytes = image->length;
  if (page->tokens >= 1 && page->tokens <= QKV_PAGE_TOKENS && page->bytes >= sizeof(qkv_page_header)) return QKV_OK;
  return qkv_fail(error, QKV_INTERNAL, "a page has %" PRIu32 " tokens and %zu bytes", page->tokens, page->bytes);
}

// Where a response's pages are, and how much place their images take.
typedef struct summary {
  uint32_t layer;
  uint64_t position;
  size_t pages, bytes;
} summary;

static qkv_status summarize(qkv_bytes message, summary *sum, qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  *sum = (summary){0};
  qkv_wire_reader_init(&reader, message);
  for (;;) {
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    if (!more) return QKV_OK;
    if (field.number == RESPONSE_LAYER) sum->layer = (uint32_t)field.value;
    if (field.number == RESPONSE_POSITION) sum->position = field.value;
    if (field.number != RESPONSE_PAGES || field.type != QKV_WIRE_BYTES) continue;
    sum->pages++;
    sum->bytes += aligned(field.bytes.length);
  }
}

static qkv_status copy_pages(qkv_bytes message, const summary *sum, arrival *images, qkv_client_page *pages,
                             qkv_error *error) {
  qkv_wire_reader reader;
  qkv_wire_field field;
  bool more = true;
  uint8_t *at = images->data;
  uint64_t position = sum->position;
  qkv_wire_reader_init(&reader, message);
  for (size_t i = 0; i < sum->pages;) {
    qkv_bytes image;
    QKV_TRY(qkv_wire_next(&reader, &field, &more, error));
    assert(more);
    if (field.number != RESPONSE_PAGES || field.type != QKV_WIRE_BYTES) continue;
    pages[i] = (qkv_client_page){.layer = sum->layer, .position = position, .image = at};
    QKV_TRY(read_page(field.bytes, &pages[i], &image, error));
    qkv_bytes_copy(image, 0, image.length, at);
    at += aligned(image.length);
    position += pages[i++].tokens;
  }
  return QKV_OK;
}

// ---- The stream ----

typedef struct coded_stream {
  // The images stay as long as a reference to `images` is held, during the call or after it.
  bool (*page)(void *context, const qkv_client_page *page, arrival *images);
  qkvi_row_receiver rows;
  void *context;
} coded_stream;

static bool deliver_pages(const coded_stream *to, const qkv_client_page *pages, size_t count, arrival *images) {
  size_t i = 0;
  while (i < count && to->page(to->context, &pages[i], images)) i++;
  return i == count;
}

static bool deliver(qkv_client *client, const grpc_byte_buffer *response, void *context, qkv_error *reason) {
  coded_stream *to = context;
  const qkv_bytes message = qkvi_view(client, response);
  summary sum;
  if (summarize(message, &sum, reason) != QKV_OK) return false;
  if (sum.pages == 0) return qkvi_fetch_deliver(client, response, &to->rows, reason);
  arrival *images = aligned_alloc(IMAGE_ALIGN, sizeof *images + sum.bytes);
  qkv_client_page *pages = calloc(sum.pages, sizeof *pages);
  assert(images != NULL && pages != NULL);
  atomic_init(&images->users, 1);
  const bool go_on =
      copy_pages(message, &sum, images, pages, reason) == QKV_OK && deliver_pages(to, pages, sum.pages, images);
  free(pages);
  leave(images);
  return go_on;
}

static qkv_code run_stream(qkv_client *client, const qkv_client_fetch *request, coded_stream *to,
                           qkv_call_error *error) {
  return qkvi_read_stream(client, qkvi_fetch_method, qkvi_fetch_request(client, request, true), deliver, to, error);
}

static bool give_page(void *context, const qkv_client_page *page, arrival *images) {
  const qkv_client_coded_receiver *to = context;
  (void)images;
  return to->page(to->context, page);
}

qkv_code qkv_client_fetch_pages(qkv_client *client, const qkv_client_fetch *request,
                                const qkv_client_coded_receiver *to, qkv_call_error *error) {
  if (request->session == NULL) return qkvi_fail(error, QKV_INVALID_ARGUMENT, "session is NULL");
  const qkv_code routed = qkvi_route(&client, request->session, error);
  if (routed != QKV_OK) return routed;
  coded_stream stream = {.page = give_page,
                         .rows = {.heads_first = request->heads_first, .fn = to->rows, .context = to->context},
                         .context = (void *)(uintptr_t)to};
  return run_stream(client, request, &stream, error);
}

// ---- Decoded here ----

typedef struct decoding {
  qkv_client *client;
  const qkv_client_fetch *request;
  qkvi_coded_session session;
  qkv_dtype dtype;
  qkv_client_layer_rows *layers;
  size_t row_bytes[2];  // of a token, by qkv_part
  const qkv_page_code *code;
  bool has_code;
  uint32_t version;  // the code's
  uint64_t hash;
  size_t at;       // the layer that arrives
  qkv_pool *pool;  // NULL: everything is decoded by the caller
  size_t limit;    // pages under way
  pthread_mutex_t lock;
  pthread_cond_t moved;
  size_t running;      // pages that are being decoded
  qkv_error error;     // of the first page that failed
  qkv_call_error own;  // of what failed on the calling thread
} decoding;

// A page on its way to its rows.
typedef struct page_job {
  decoding *all;
  arrival *images;
  const qkv_page_code *code;
  uint32_t layer;
  const void *image;
  size_t bytes;
  qkv_page_rows rows;
} page_job;

static void decode_page(void *context) {
  page_job *job = context;
  decoding *all = job->all;
  qkv_error error = {0};
  const qkv_status status = qkv_page_code_decode(job->code, job->layer, job->image, job->bytes, &job->rows, &error);
  leave(job->images);
  free(job);
  (void)pthread_mutex_lock(&all->lock);
  if (status != QKV_OK && all->error.status == QKV_OK) all->error = error;
  all->running--;
  (void)pthread_cond_signal(&all->moved);
  (void)pthread_mutex_unlock(&all->lock);
}

static void wait_for(decoding *all, size_t most) {
  (void)pthread_mutex_lock(&all->lock);
  while (all->running > most) (void)pthread_cond_wait(&all->moved, &all->lock);
  (void)pthread_mutex_unlock(&all->lock);
}

// On the pool, whose pages under way are bounded. The calling thread does not decode where there is one: while it
// does not read, the daemon stops sending.
static void submit(decoding *all, page_job *job) {
  if (all->pool != NULL) wait_for(all, all->limit - 1);
  (void)pthread_mutex_lock(&all->lock);
  all->running++;
  (void)pthread_mutex_unlock(&all->lock);
  if (all->pool == NULL || qkv_pool_submit(all->pool, decode_page, job) != QKV_OK) decode_page(job);
}

// The session's code for pages of this calibration.
static bool find_code(decoding *all, uint32_t version, uint64_t hash) {
  if (all->has_code && all->version == version && all->hash == hash) return true;
  wait_for(all, 0);  // the client may forget the code that is in use
  all->has_code = qkvi_code_find(all->client, &all->session, version, hash, &all->code, NULL, &all->own) == QKV_OK;
  all->version = version;
  all->hash = hash;
  return all->has_code;
}

// The rows [position, position + tokens) of a layer as far as they are in the range: how many to leave out in front,
// and how many remain.
static bool place(decoding *all, uint32_t layer, uint64_t position, uint64_t *first, uint64_t *tokens,
                  qkv_client_layer_rows **rows) {
  const qkv_client_fetch *request = all->request;
  while (all->at < request->layer_count && request->layers[all->at] != layer) all->at++;
  if (all->at == request->layer_count)
    return qkvi_fail(&all->own, QKV_INTERNAL, "the daemon sent layer %" PRIu32 ", which was not asked", layer), false;
  *rows = &all->layers[all->at];
  const uint64_t begin = (*rows)->position;
  const uint64_t end = request->end != 0 && request->end < position + *tokens ? request->end : position + *tokens;
  *first = position < begin ? begin - position : 0;
  if (*first >= *tokens || position + *first != begin + (*rows)->tokens || end <= position + *first)
    return qkvi_fail(&all->own, QKV_INTERNAL,
                     "the daemon sent position %" PRIu64 " of layer %" PRIu32 ", expected %" PRIu64, position, layer,
                     begin + (*rows)->tokens),
           false;
  *tokens = end - position - *first;
  if (*tokens <= (*rows)->capacity - (*rows)->tokens) return true;
  return qkvi_fail(&all->own, QKV_INVALID_ARGUMENT,
                   "layers[%zu].capacity is %" PRIu64 ", at least %" PRIu64 " are needed", all->at, (*rows)->capacity,
                   (*rows)->tokens + *tokens),
         false;
}

static void *row_at(const decoding *all, void *base, uint64_t token, qkv_part part) {
  return base == NULL ? NULL : (uint8_t *)base + token * all->row_bytes[part];
}

static bool take_page(void *context, const qkv_client_page *page, arrival *images) {
  decoding *all = context;
  qkv_page_header header;
  uint64_t first = 0, tokens = page->tokens;
  qkv_client_layer_rows *rows = NULL;
  memcpy(&header, page->image, sizeof header);
  if (!place(all, page->layer, page->position, &first, &tokens, &rows)) return false;
  if (!find_code(all, header.calibration, page->calibration_hash)) return false;
  page_job *job = malloc(sizeof *job);
  assert(job != NULL);
  *job = (page_job){.all = all,
                    .images = images,
                    .code = all->code,
                    .layer = page->layer,
                    .image = page->image,
                    .bytes = page->bytes,
                    .rows = {.first = (uint32_t)first,
                             .tokens = (uint32_t)tokens,
                             .dtype = all->dtype,
                             .before_rope = all->request->before_rope,
                             .k = row_at(all, rows->k, rows->tokens, QKV_K),
                             .v = row_at(all, rows->v, rows->tokens, QKV_V)}};
  atomic_fetch_add(&images->users, 1);
  rows->tokens += tokens;
  submit(all, job);
  return true;
}

// Exact rows, in the dtype that was asked.
static bool take_rows(void *context, const qkv_client_rows *rows) {
  decoding *all = context;
  const qkv_client_tensor *tensors[2] = {&rows->k, &rows->v};
  uint64_t first = 0, tokens = (uint64_t)rows->k.dims[0];
  qkv_client_layer_rows *to = NULL;
  if (!place(all, rows->layer, rows->position, &first, &tokens, &to)) return false;
  for (qkv_part part = QKV_K; part <= QKV_V; part++) {
    void *out = row_at(all, part == QKV_K ? to->k : to->v, to->tokens, part);
    if (tensors[part]->bytes < (first + tokens) * all->row_bytes[part])
      return qkvi_fail(&all->own, QKV_INTERNAL, "the daemon sent rows of another shape"), false;
    if (out != NULL)
      memcpy(out, (const uint8_t *)tensors[part]->data + first * all->row_bytes[part], tokens * all->row_bytes[part]);
  }
  to->tokens += tokens;
  return true;
}

// Pages under way for each thread that decodes them.
enum { PAGES_AHEAD = 32 };

// Whether a layer's memory holds as many rows as it is said to.
static qkv_code check_bytes(const decoding *all, size_t i, const char *what, size_t bytes, qkv_part part,
                            qkv_call_error *error) {
  const uint64_t capacity = all->layers[i].capacity;
  if (bytes == 0 || all->row_bytes[part] == 0 || capacity <= bytes / all->row_bytes[part]) return QKV_OK;
  return qkvi_fail(error, QKV_INVALID_ARGUMENT,
                   "layers[%zu].%s is %zu, capacity is %" PRIu64 " rows, of %zu bytes each in this session", i, what,
                   bytes, capacity, all->row_bytes[part]);
}

static qkv_code start(decoding *all, unsigned threads, qkv_call_error *error) {
  qkv_error reason = {0};
  const qkv_code code = qkvi_coded_session_get(all->client, all->request->session, &all->session, error);
  if (code != QKV_OK) return code;
  const Qkv__V1__Model *model = all->session.model->model;
  const uint64_t first = all->session.info->first_position;
  all->dtype = all->request->dtype != 0 ? (qkv_dtype)all->request->dtype : (qkv_dtype)model->dtype;
  const size_t row = (size_t)model->kv_heads * qkv_dtype_size(all->dtype);
  all->row_bytes[QKV_K] = row * model->key_dim;
  all->row_bytes[QKV_V] = row * model->value_dim;
  for (size_t i = 0; i < all->request->layer_count; i++) {
    all->layers[i].position = all->request->begin > first ? all->request->begin : first;
    all->layers[i].tokens = 0;
    const qkv_client_layer_rows *rows = &all->layers[i];
    qkv_code fits = check_bytes(all, i, "k_bytes", rows->k_bytes, QKV_K, error);
    if (fits == QKV_OK) fits = check_bytes(all, i, "v_bytes", rows->v_bytes, QKV_V, error);
    if (fits != QKV_OK) return fits;
  }
  all->limit = (size_t)threads * PAGES_AHEAD;
  if (threads > 0 && qkv_pool_create(threads, all->limit, &all->pool, &reason) != QKV_OK)
    return qkvi_fail_with(error, &reason);
  return QKV_OK;
}

qkv_code qkv_client_fetch_decoded(qkv_client *client, const qkv_client_fetch *request, unsigned threads,
                                  qkv_client_layer_rows *layers, qkv_call_error *error) {
  qkv_code code = qkvi_fetch_check(request, error);
  if (code == QKV_OK) code = qkvi_route(&client, request->session, error);
  if (code != QKV_OK) return code;
  decoding all = {.client = client, .request = request, .layers = layers};
  if (pthread_mutex_init(&all.lock, NULL) != 0 || pthread_cond_init(&all.moved, NULL) != 0) abort();
  coded_stream stream = {.page = take_page, .rows = {.fn = take_rows, .context = &all}, .context = &all};
  code = start(&all, threads, error);
  if (code == QKV_OK) {
    qkv_client_fetch asked = *request;
    asked.dtype = (int)all.dtype;
    code = run_stream(client, &asked, &stream, error);
  }
  wait_for(&all, 0);
  qkv_pool_destroy(&all.pool);
  qkvi_coded_session_free(&all.session);
  (void)pthread_cond_destroy(&all.moved);
  (void)pthread_mutex_destroy(&all.lock);
  // What failed here has ended the stream, which says CANCELLED.
  if (all.own.code != QKV_OK) code = qkvi_fail(error, all.own.code, "%s", all.own.text);
  if (all.error.status != QKV_OK) code = qkvi_fail_with(error, &all.error);
  for (size_t i = 0; i < request->layer_count && code != QKV_OK; i++) layers[i].tokens = 0;
  return code;
}
