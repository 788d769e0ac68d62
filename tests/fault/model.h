// The model of a storage over a faulty disk: the operations on it, and what it must report when it is opened again.
// model_test.c operates, model.c checks.
#ifndef QKV_TESTS_FAULT_MODEL_H
#define QKV_TESTS_FAULT_MODEL_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "storage/internal.h"
#include "tests/fault/disk.h"
#include "tests/fault/lineage.h"

enum {
  RECORDS_MAX = LINEAGE_RECORDS,
  SESSIONS_MAX = LINEAGE_SESSIONS,
  CUTS_MAX = 1000,
  TOLD_MAX = 100000,
  EVENTS_MAX = RECORDS_MAX + SESSIONS_MAX + CUTS_MAX,
  RUNS = 4,
  OPERATIONS = 250,
  LAYERS = LINEAGE_LAYERS,
  PLACES = 12,
  PAYLOAD_MAX = 50000,
  FORKED = 1000000
};

typedef struct model_record {
  uint64_t number, session, position;
  uint32_t layer, tokens;
  uint64_t size, content;
  bool ended;    // written() has been called
  bool written;  // with QKV_OK
  bool durable;  // acknowledged
  bool gone;     // closed, cut or dropped, acknowledged or not
  bool dropped;  // only dropped: it may come back
} model_record;

// The events for lineage.h, in this order.
typedef struct model_event {
  enum { OPENED, FORKED_FROM, CUT, PUT } what;
  size_t session, parent, which;  // a cut or a record
  uint64_t positions[LAYERS];
} model_event;

typedef struct model_session {
  uint64_t number;
  bool open_durable, close_asked, close_durable;
  bool failed;   // a close or cut could not be written: puts are refused
  size_t reads;  // under way, of records that its view has
} model_session;

typedef struct model_cut {
  uint64_t session, position, watermark;
  uint32_t layer;
  bool durable;
  bool failed;  // it could not be written; it may be on the disk nevertheless
  bool void_;   // it was not journaled, or nothing depends on it any more
  bool told;    // reported by the last opening
} model_cut;

typedef struct model {
  uint64_t seed;
  fault_disk *disk;
  qkv_storage *storage;
  bool faults;       // errors may occur
  bool sync_failed;  // a sync may have failed
  model_record records[RECORDS_MAX];
  size_t record_count;
  model_session sessions[SESSIONS_MAX];
  size_t session_count;
  model_cut cuts[CUTS_MAX];
  size_t cut_count;
  model_event events[EVENTS_MAX];
  size_t event_count;
  lineage now;   // of all operations
  size_t waits;  // pending callbacks
  // Reported by a restart.
  qkv_record_info told[TOLD_MAX];
  size_t told_count;
  uint64_t told_sessions[SESSIONS_MAX];
  size_t told_session_count;
  uint32_t packing;    // random, but for the drawn numbers: what is known of a session is packed now and then
  uint64_t rewritten;  // times that the journal was rewritten while it ran
  uint64_t inherited;  // records that were reported for heirs
} model;

#define CHECK(on, condition, ...)                                                        \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      print_error("seed %llu: %s: ", (unsigned long long)(on)->seed, #condition);        \
      print_error(__VA_ARGS__);                                                          \
      fail_msg("QKV_FAULT_SEED=%llu QKV_FAULT_SEEDS=1", (unsigned long long)(on)->seed); \
    }                                                                                    \
  } while (0)

model_record *model_record_of(model *on, uint64_t number);
// The session's index in on->sessions; fails where it was never opened.
size_t model_place_of(const model *on, uint64_t session);
void model_apply(const model *on, lineage *to, const model_event *event);
bool model_cut_hits(const model_cut *cut, uint64_t session, uint32_t layer, uint64_t number, uint64_t position);

// Checks what the last opening has reported.
void model_check_sessions(model *on);
void model_check_told(model *on);
void model_check_durable(model *on);
// Whether it is undecided if a cut counts that heirs of a closed session depend on.
bool model_is_unsure(const model *on);
// From here on the model has what was reported and nothing else. A record may come back where a newer one is damaged.
void model_believe(model *on);

#endif
