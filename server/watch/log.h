// Recent changes of prefixes, for watchers: a ring of numbered changes, each of one page.
//
//   index of prefixes ──► changed ──► ring ──► a watcher's cursor, which is read when it likes
//                                      └─ what is overwritten is missed
//
// Writers never wait for readers: an entry is a copy of some 70 bytes, and of the page's 64 ids where a watcher wants
// ids, under a lock that is held for copies alone. Without a watcher nothing is written.
//
// Threads: any. The lock is taken with the index's lock held, and no other is taken under it.
#ifndef QKV_SERVER_WATCH_LOG_H
#define QKV_SERVER_WATCH_LOG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/model.h"
#include "engine/cache/prefix_index.h"

// The owner of prefixes; shared, with a reference count under the log's lock.
typedef struct qkvi_watch_label {
  char tenant[QKV_NAME_MAX + 1], model[QKV_NAME_MAX + 1];
  uint64_t references;
} qkvi_watch_label;

typedef enum qkvi_watch_kind { QKVI_WATCH_ADDED = 1, QKVI_WATCH_REMOVED = 2, QKVI_WATCH_MOVED = 3 } qkvi_watch_kind;

typedef struct qkvi_watch_event {
  qkv_prefix_hash hash, parent;
  qkvi_watch_label *label;  // a reference
  uint64_t page;            // its number, from 0 on
  qkvi_watch_kind kind;
  bool on_ssd;   // of MOVED
  bool has_ids;  // of ADDED
} qkvi_watch_event;

enum { QKVI_WATCH_RING = 65536 };  // changes that the ring holds

typedef struct qkvi_watch_log qkvi_watch_log;

// `woken` is called with the index locked, and the log not, at the first write since the last read. It must not wait.
qkvi_watch_log *qkvi_watch_log_create(void (*woken)(void *context), void *context);
void qkvi_watch_log_destroy(qkvi_watch_log **log);
// For qkv_prefix_index_observe.
qkv_prefix_observer qkvi_watch_log_observer(qkvi_watch_log *log);

// A watcher begins, with or without ids; counted. Changes are recorded from here on.
void qkvi_watch_log_begin(qkvi_watch_log *log, bool ids);
void qkvi_watch_log_end(qkvi_watch_log *log, bool ids);
uint64_t qkvi_watch_log_head(qkvi_watch_log *log);  // the number of the next change

// Up to `max` changes from *cursor on, which follows; `ids`, where not NULL, gets 64 for each that has_ids. The
// caller returns the labels. False where those at *cursor have been overwritten.
bool qkvi_watch_log_read(qkvi_watch_log *log, uint64_t *cursor, qkvi_watch_event *events, uint32_t *ids, size_t max,
                         size_t *count);
void qkvi_watch_log_return(qkvi_watch_log *log, const qkvi_watch_event *events, size_t count);

// A reference to the label of a root, with the index locked; NULL: it has none.
qkvi_watch_label *qkvi_watch_log_label(qkvi_watch_log *log, uint32_t root);
// A new one.
qkvi_watch_label *qkvi_watch_label_create(const char *tenant, const char *model);
// A page has moved; it takes a reference of its own to the label.
void qkvi_watch_log_moved(qkvi_watch_log *log, const qkvi_watch_event *event);

#endif
