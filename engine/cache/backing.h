// Where sealed pages are kept beyond memory, as the engine sees it: a table of functions. The daemon puts the SSD
// tier behind it (server/spill.h), tests a double. The engine itself has no I/O.
//
//   seal ──► put ──► WAITING ──► WRITTEN ──► DURABLE        evict: the image leaves memory, the record stays
//                       └──────────┴─► GONE                 restore: whoever attends or fetches brings it back
//
// A page is put once, as it was first coded. Planes are dropped in memory alone and not before the record is DURABLE,
// so that it is the way back to full precision; unless nothing is taken.
//
// Threads: any; all but `context` is constant. The functions are called with a layer read or written: they never
// wait.
#ifndef QKV_ENGINE_CACHE_BACKING_H
#define QKV_ENGINE_CACHE_BACKING_H

#include <stdbool.h>
#include <stdint.h>

typedef enum qkv_record_state {
  QKV_RECORD_GONE,     // could not be written or made durable, or was dropped
  QKV_RECORD_WAITING,  // on its way
  QKV_RECORD_WRITTEN,  // can be read back by this process
  QKV_RECORD_DURABLE,  // and by the next one
} qkv_record_state;

typedef struct qkv_backing {
  void *context;
  // Copies a page [bytes] of a session of the model, of which the first `tokens` count. Its record's number, larger
  // than all before; 0: no room for it now.
  uint64_t (*put)(void *context, uint64_t session, const char *model, const void *page, uint32_t bytes,
                  uint32_t tokens);
  qkv_record_state (*state)(void *context, uint64_t record);
  // The record is not needed any more.
  void (*drop)(void *context, uint64_t record);
  // False where the disk has failed or is full, or takes nothing of this session: what is not there may never be.
  bool (*takes)(void *context, uint64_t session);
  // What was put of this layer up to now is cut off at `position`, for the next process, too.
  void (*cut)(void *context, uint64_t session, uint32_t layer, uint64_t position);
} qkv_backing;

#endif
