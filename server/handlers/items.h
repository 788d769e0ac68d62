// The requests that carry tensors (AppendRequest, AttendRequest), parsed in place: an item's tensors are views
// into the message, no row is copied.
//
// There are two kinds of errors. A message that is no valid protobuf, or breaks a limit of the whole request, is
// refused whole. An error inside one item (a wrong dim, an unknown dtype) is kept in that item's `error`, with the
// place in front ("items[3].k.dims[1] is 0, at least 1"), because in a batch the other items are served.
//
// Tensors that lie in a client's shared memory are read by qkvi_request_load, into memory of the request: nothing
// that has been checked can change afterwards. Until then their data must not be accessed.
//
// Threads: pure on its inputs, but for qkvi_request_load. A request's views live as long as the message.
#ifndef QKV_SERVER_HANDLERS_ITEMS_H
#define QKV_SERVER_HANDLERS_ITEMS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/bytes.h"
#include "engine/base/tensor.h"
#include "engine/cache/attend.h"
#include "engine/cache/model.h"
#include "server/handlers/token_ids.h"
#include "server/options.h"
#include "server/shared_memory/regions.h"

typedef enum qkvi_request_kind { QKVI_APPEND_REQUEST, QKVI_ATTEND_REQUEST } qkvi_request_kind;

typedef struct qkvi_limits {
  size_t items_max;           // limit-items
  int64_t message_bytes_max;  // limit-message; also of a tensor once its strides of 0 are written out
  bool shared_memory;         // allow-client-shm: tensors may lie there
} qkvi_limits;
qkvi_limits qkvi_limits_of(const qkv_server_options *options);

typedef struct qkvi_item {
  char session[QKV_NAME_MAX + 1];  // a valid name while error is OK
  uint32_t layer;
  uint64_t position;
  bool k_before_rope, q_before_rope;
  bool own_options;  // the item has some; else they are the request's
  qkv_attend_options options;
  qkv_tensor k, v, q;        // rank 3 and checked, or 0: absent; k and v come together
  qkvi_token_ids token_ids;  // of k's rows, one each, or of the pages' tokens (append_coded.h); or none
  qkv_bytes message;         // the item itself, for its pages (append_coded.h), which are not read here
  size_t pages;              // how many it has
  uint64_t page_bytes;       // of these together
  qkvi_region_part k_part, v_part, q_part;  // where they lie in shared memory; none: in the message
  qkvi_gpu_source source;                   // of k and v that a GPU may code; its encoder is none for others
  qkv_error error;                          // what is wrong with this item, if anything
} qkvi_item;

// Reusable: the memory of one message's items serves the next.
typedef struct qkvi_request {
  qkvi_item *items;
  size_t count, capacity;
  qkv_attend_options options;  // of items without their own
  qkv_dtype out_dtype;         // never NONE
  uint64_t id;
  // Of an AttendRequest alone: where the results go; none: into the response.
  qkvi_region_part into;
  // Bytes that the items' tensors span in shared memory, by their dims and strides; and once they are loaded, their
  // copies, in `shared_count` tensors.
  uint64_t shared_bytes;
  size_t shared_count;
  bool loaded;
  qkvi_regions *regions;  // that have lent `shared`
  qkvi_buffer shared;
  qkvi_gpu_area *area;  // where copies of rows on a GPU lie as well; NULL: nowhere
  qkv_segment *shared_segments;
  size_t shared_segment_capacity;
  // Of an AppendRequest alone: how many `open` there are, which server/handlers/stage.h reads, and the two marks.
  size_t opens;
  bool complete, seal;
} qkvi_request;

// Fills *request, which is zeroed before its first use. INVALID_ARGUMENT: truncated or malformed protobuf, "items
// is empty", "items has 1025 entries, limit-items is 1024", an unknown out_dtype, more rows than a message could
// hold (strides of 0 repeat rows).
qkv_status qkvi_request_parse(qkv_bytes message, qkvi_request_kind kind, const qkvi_limits *limits,
                              qkvi_request *request, qkv_error *error);
void qkvi_request_deinit(qkvi_request *request);

// Copies the tensors that lie in shared memory of the tenant, once, so that the request is as if it had carried them.
// An error of a tensor is kept in its item. Copies up to limit-message: not for a completion-queue thread where
// qkvi_request_row_bytes is large. `regions` is not NULL where the limits allowed shared memory. Returns the bytes
// that this call copied.
uint64_t qkvi_request_load(qkvi_request *request, qkvi_regions *regions, const char *tenant);
// Whether loading it, or writing its results, may wait for a GPU: not on a completion-queue thread then.
bool qkvi_request_may_wait(const qkvi_request *request, qkvi_regions *regions);
// Releases the memory of those copies, as do qkvi_request_parse and qkvi_request_deinit. Their tensors end.
void qkvi_request_unload(qkvi_request *request);

// Puts `items[index]` in front of an error's text: before a '.' where the text begins with a field of the
// item (INVALID_ARGUMENT, FAILED_PRECONDITION, UNIMPLEMENTED), before ": " where it is a sentence. Returns the
// error's status.
qkv_status qkvi_item_place(qkv_error *error, size_t index);

// Bytes of an item's k and v, as if dense, or of its pages; 0 without them.
uint64_t qkvi_item_row_bytes(const qkvi_item *item);
// Bytes of k, v and q, as if dense, of all items that have no error: what has to be read.
uint64_t qkvi_request_row_bytes(const qkvi_request *request);

#endif
