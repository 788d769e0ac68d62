// Random operations on a storage over a faulty disk, beside a model that says what must be there, through crashes and
// restarts. Every read is right, a miss that is due, or DATA_LOSS where the disk did damage; what was acknowledged is
// there. One seed decides everything:
//
//   QKV_FAULT_SEED=17 QKV_FAULT_SEEDS=1 bin/test_fault_model      that one again
//   QKV_FAULT_SEEDS=100000 bin/test_fault_model                   by hand
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "engine/base/log.h"
#include "storage/internal.h"
#include "tests/fault/disk.h"

enum {
  RECORDS_MAX = 4000,
  SESSIONS_MAX = 200,
  CUTS_MAX = 400,
  RUNS = 4,
  OPERATIONS = 250,
  LAYERS = 3,
  PLACES = 12,
  PAYLOAD_MAX = 50000
};

// Sanitizers take four times as long over a seed, and see the same code in each.
#ifdef QKV_SANITIZED
enum { SEEDS = 80 };
#else
enum { SEEDS = 200 };
#endif

typedef struct model_record {
  uint64_t number, session, position;
  uint32_t layer, tokens;
  uint64_t size, content;
  bool ended;    // written() has been called
  bool written;  // with QKV_OK
  bool durable;  // acknowledged
  bool gone;     // closed, cut or dropped, acknowledged or not
  bool dropped;  // only that: it may come back
} model_record;

typedef struct model_session {
  uint64_t number;
  bool open_durable, close_asked, close_durable;
  bool failed;  // a close or cut could not be written: puts are refused
} model_session;

typedef struct model_cut {
  uint64_t session, position, watermark;
  uint32_t layer;
  bool durable;
} model_cut;

typedef struct model {
  uint64_t seed;
  fault_disk *disk;
  qkv_storage *storage;
  bool faults;       // errors may come
  bool sync_failed;  // or may have come
  model_record records[RECORDS_MAX];
  size_t record_count;
  model_session sessions[SESSIONS_MAX];
  size_t session_count;
  model_cut cuts[CUTS_MAX];
  size_t cut_count;
  size_t waits;  // callbacks that are to come
  // What a restart told.
  qkv_record_info told[RECORDS_MAX];
  size_t told_count;
  uint64_t told_sessions[SESSIONS_MAX];
  size_t told_session_count;
  uint64_t rewritten;  // times that the journal was written anew while it ran
} model;

#define CHECK(on, condition, ...)                                                        \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      print_error("seed %llu: %s: ", (unsigned long long)(on)->seed, #condition);        \
      print_error(__VA_ARGS__);                                                          \
      fail_msg("QKV_FAULT_SEED=%llu QKV_FAULT_SEEDS=1", (unsigned long long)(on)->seed); \
    }                                                                                    \
  } while (0)

// What a callback is about.
typedef struct about {
  model *on;
  size_t which;  // record, session or cut
  uint8_t *bytes;
  uint64_t size;
  bool was_gone;
} about;

static about *about_of(model *on, size_t which) {
  about *made = calloc(1, sizeof *made);
  if (made == NULL) abort();
  *made = (about){.on = on, .which = which};
  on->waits++;
  return made;
}

static void end_about(about *what) {
  what->on->waits--;
  free(what->bytes);
  free(what);
}

static void fill(uint8_t *bytes, uint64_t size, uint64_t content) {
  uint64_t x = content * UINT64_C(0x9e3779b97f4a7c15) + 1;
  for (uint64_t i = 0; i < size; i++) {
    if (i % 4 == 0) x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    bytes[i] = (uint8_t)(x >> (32 + 8 * (i % 4)));
    if (content % 3 == 0) bytes[i] &= 15;  // zstd is worth it
  }
}

static bool right(const uint8_t *bytes, const model_record *record) {
  uint8_t *wanted = malloc(record->size);
  if (wanted == NULL) abort();
  fill(wanted, record->size, record->content);
  const bool same = memcmp(bytes, wanted, record->size) == 0;
  free(wanted);
  return same;
}

static uint64_t drawn(model *on, uint64_t bound) {
  return fault_disk_random(on->disk, bound);
}

static model_session *session_of(model *on, uint64_t number) {
  for (size_t i = 0; i < on->session_count; i++) {
    if (on->sessions[i].number == number) return &on->sessions[i];
  }
  return NULL;
}

static model_record *record_of(model *on, uint64_t number) {
  for (size_t i = 0; i < on->record_count; i++) {
    if (on->records[i].number == number) return &on->records[i];
  }
  return NULL;
}

static bool troubled(const model *on) {
  return on->faults || fault_disk_crashed(on->disk);
}

// Damage that is found while the journal is written anew is left to the next start; until then it takes no entries.
static bool journal_troubled(const model *on) {
  return troubled(on) || fault_disk_damaged_journal(on->disk) > 0;
}

// ---- Operations ----

static void open_ended(void *context, qkv_status status) {
  about *what = context;
  CHECK(what->on, status == QKV_OK || journal_troubled(what->on), "open: %d\n", status);
  if (status == QKV_OK) what->on->sessions[what->which].open_durable = true;
  end_about(what);
}

// Some runs have entries of several pieces, and a journal that is soon written anew.
static bool writes_anew(const model *on) {
  return on->seed % 7 == 3 || on->seed % 7 == 5;
}

// Some have so few write buffers that records wait for one, also after they were given their place.
static bool has_few_buffers(const model *on) {
  return on->seed % 9 / 3 == 1;
}

static uint64_t payload_of(const model *on, uint64_t number, uint8_t payload[PAYLOAD_MAX]) {
  const uint64_t more = writes_anew(on) ? number * 7919 % (PAYLOAD_MAX - sizeof number) : 0;
  memcpy(payload, &number, sizeof number);
  fill(payload + sizeof number, more, number);
  return sizeof number + more;
}

static void open_session(model *on) {
  if (on->session_count == SESSIONS_MAX) return;
  const size_t at = on->session_count++;
  on->sessions[at] = (model_session){.number = qkv_storage_session_number(on->storage)};
  const uint64_t number = on->sessions[at].number;
  uint8_t payload[PAYLOAD_MAX];
  const uint64_t bytes = payload_of(on, number, payload);
  (void)qkv_storage_journal(on->storage, QKV_JOURNAL_SESSION_OPEN, number, payload, bytes, open_ended,
                            about_of(on, at), NULL);
}

static void put_written(void *context, uint64_t number, qkv_status status) {
  about *what = context;
  model_record *record = &what->on->records[what->which];
  const model_session *session = session_of(what->on, record->session);
  CHECK(what->on, !record->ended && record->number == number, "written twice\n");
  record->ended = true;
  record->written = status == QKV_OK;
  bool expected = status == QKV_OK || troubled(what->on) || session->failed;
  if (status == QKV_CANCELLED) expected = expected || record->gone;
  // Records do not fill segments to the last byte: what was let in may find the budget used up.
  if (status == QKV_RESOURCE_EXHAUSTED) expected = expected || what->on->storage->config.bytes_max > 0;
  CHECK(what->on, expected, "put: %d\n", status);
  if (status != QKV_OK) end_about(what);
}

static void put_durable(void *context, uint64_t number, qkv_status status) {
  about *what = context;
  model_record *record = &what->on->records[what->which];
  CHECK(what->on, record->written && record->number == number, "durable before written\n");
  CHECK(what->on, status == QKV_OK || troubled(what->on), "durable: %d\n", status);
  record->durable = status == QKV_OK;
  end_about(what);
}

static void put(model *on, model_session *session) {
  if (on->record_count == RECORDS_MAX || session->close_asked) return;
  static const uint64_t bounds[] = {100, 5000, 60000, 400000};
  model_record *record = &on->records[on->record_count];
  *record = (model_record){.session = session->number,
                           .layer = (uint32_t)drawn(on, LAYERS),
                           .position = 64 * drawn(on, PLACES),
                           .tokens = 64,
                           .size = 1 + drawn(on, bounds[drawn(on, 4)]),
                           .content = on->record_count + on->seed};
  about *what = about_of(on, on->record_count);
  what->bytes = malloc(record->size);
  if (what->bytes == NULL) abort();
  fill(what->bytes, record->size, record->content);
  const qkv_storage_put_request request = {.meta = {.session = record->session,
                                                    .position = record->position,
                                                    .layer = record->layer,
                                                    .tokens = record->tokens,
                                                    .kind = 1},
                                           .payload = what->bytes,
                                           .bytes = record->size,
                                           .hurry = drawn(on, 2) == 0,
                                           .written = put_written,
                                           .durable = put_durable,
                                           .context = what};
  qkv_error error = {0};
  const qkv_status status = qkv_storage_put(on->storage, &request, &record->number, &error);
  if (status == QKV_OK) {
    on->record_count++;
    return;
  }
  end_about(what);
  CHECK(on, status == QKV_UNAVAILABLE || (status == QKV_RESOURCE_EXHAUSTED && on->storage->config.bytes_max > 0),
        "%s\n", error.text);
  if (status != QKV_RESOURCE_EXHAUSTED) return;
  session->close_asked = true;  // evicted below
}

static void gone_ended(void *context, qkv_status status) {
  about *what = context;
  model_session *session = &what->on->sessions[what->which];
  CHECK(what->on, status == QKV_OK || journal_troubled(what->on), "close: %d\n", status);
  if (status == QKV_OK) session->close_durable = true;
  if (status != QKV_OK) session->failed = true;
  end_about(what);
}

static void close_session(model *on, size_t at) {
  model_session *session = &on->sessions[at];
  session->close_asked = true;
  for (size_t i = 0; i < on->record_count; i++) {
    if (on->records[i].session == session->number) on->records[i].gone = true;
  }
  qkv_storage_session_close(on->storage, session->number, gone_ended, about_of(on, at));
}

static void cut_ended(void *context, qkv_status status) {
  about *what = context;
  model_cut *cut = &what->on->cuts[what->which];
  CHECK(what->on, status == QKV_OK || journal_troubled(what->on), "truncate: %d\n", status);
  if (status == QKV_OK) cut->durable = true;
  if (status != QKV_OK) session_of(what->on, cut->session)->failed = true;
  end_about(what);
}

static bool cut_hits(const model_cut *cut, uint64_t session, uint32_t layer, uint64_t number, uint64_t position) {
  return cut->session == session && (cut->layer == QKV_LAYER_ALL || cut->layer == layer) && number < cut->watermark &&
         position >= cut->position;
}

static void truncate_session(model *on, const model_session *session) {
  if (on->cut_count == CUTS_MAX || session->close_asked) return;
  model_cut *cut = &on->cuts[on->cut_count];
  *cut = (model_cut){.session = session->number,
                     .position = drawn(on, 64 * PLACES),
                     .layer = drawn(on, 3) == 0 ? QKV_LAYER_ALL : (uint32_t)drawn(on, LAYERS),
                     .watermark = on->storage->record_next};
  for (size_t i = 0; i < on->record_count; i++) {
    model_record *record = &on->records[i];
    if (cut_hits(cut, record->session, record->layer, record->number, record->position)) record->gone = true;
  }
  qkv_storage_session_truncate(on->storage, cut->session, cut->layer, cut->position, cut_ended,
                               about_of(on, on->cut_count++));
}

static void read_ended(void *context, qkv_status status) {
  about *what = context;
  model *on = what->on;
  const model_record *record = &on->records[what->which];
  if (status == QKV_OK) {
    CHECK(on, record->written, "a read of what was never written\n");
    CHECK(on, !what->was_gone, "a read of what was gone\n");
    CHECK(on, right(what->bytes, record), "wrong bytes of record %llu\n", (unsigned long long)record->number);
  } else if (status == QKV_DATA_LOSS) {
    CHECK(on, fault_disk_damaged_segments(on->disk) > 0 || troubled(on) || on->sync_failed,
          "data loss without a fault\n");
  } else {
    CHECK(on, status == QKV_NOT_FOUND, "read: %d\n", status);
    const bool due = record->gone || !record->written || fault_disk_damaged_segments(on->disk) > 0 || troubled(on);
    CHECK(on, due, "record %llu is missing\n", (unsigned long long)record->number);
  }
  end_about(what);
}

static void read_record(model *on, size_t at) {
  const model_record *record = &on->records[at];
  if (!record->ended) return;
  about *what = about_of(on, at);
  what->bytes = malloc(record->size);
  if (what->bytes == NULL) abort();
  what->was_gone = record->gone;
  qkv_storage_read(on->storage, record->session, record->number, what->bytes, record->size, read_ended, what);
}

static void nothing_ended(void *context, qkv_status status) {
  (void)status;
  end_about(context);
}

// Drops a record that a durable one has replaced.
static void drop_replaced(model *on) {
  for (size_t i = 0; i < on->record_count; i++) {
    model_record *old = &on->records[i];
    if (!old->written || old->gone) continue;
    for (size_t j = i + 1; j < on->record_count; j++) {
      const model_record *next = &on->records[j];
      const bool same = next->session == old->session && next->layer == old->layer && next->position == old->position;
      if (!same || !next->durable || next->gone || drawn(on, 3) != 0) continue;
      qkv_storage_drop(on->storage, old->number);
      old->gone = true;
      break;
    }
  }
}

static void operate(model *on) {
  const uint64_t what = drawn(on, 100);
  const size_t session = on->session_count == 0 ? 0 : (size_t)drawn(on, on->session_count);
  const size_t record = on->record_count == 0 ? 0 : (size_t)drawn(on, on->record_count);
  if (what < 5 || on->session_count == 0) {
    open_session(on);
  } else if (what < 45) {
    model_session *into = &on->sessions[session];
    const bool closed = into->close_asked;
    put(on, into);
    if (into->close_asked && !closed) close_session(on, session);
  } else if (what < 65) {
    if (on->record_count > 0) read_record(on, record);
  } else if (what < 67) {
    if (!on->sessions[session].close_asked) close_session(on, session);
  } else if (what < 71) {
    truncate_session(on, &on->sessions[session]);
  } else if (what < 73) {
    drop_replaced(on);
  } else if (what < 77) {
    qkv_storage_sync(on->storage, nothing_ended, about_of(on, 0));
  } else if (what < 79) {
    qkv_storage_compact(on->storage, (double)drawn(on, 101) / 100, nothing_ended, about_of(on, 0));
  } else {
    for (uint64_t turns = drawn(on, 8); turns > 0; turns--) qkvi_storage_turn(on->storage, false);
  }
}

// ---- Restarts ----

static bool tell_entry(void *context, const qkv_journal_entry *entry) {
  model *on = context;
  if (entry->kind == QKV_JOURNAL_SESSION_OPEN) {
    uint8_t payload[PAYLOAD_MAX];
    const uint64_t bytes = payload_of(on, entry->session, payload);
    CHECK(on, session_of(on, entry->session) != NULL, "a session that never was\n");
    CHECK(on, entry->bytes == bytes && memcmp(entry->payload, payload, bytes) == 0, "an entry's bytes\n");
    on->told_sessions[on->told_session_count++] = entry->session;
  }
  return true;
}

static void tell_record(void *context, const qkv_record_info *info) {
  model *on = context;
  CHECK(on, on->told_count < RECORDS_MAX, "too many\n");
  on->told[on->told_count++] = *info;
}

static qkv_status open_storage(model *on, uint64_t budget, qkv_error *error) {
  qkv_storage_config config;
  qkv_storage_config_init(&config);
  config.directory = "";
  config.segment_bytes = 1 << 20;
  config.bytes_max = budget;
  config.dirty_bytes_max = has_few_buffers(on) ? 4000000 : 600000;
  config.compact_bytes_per_s = 0;
  config.sync_ms = INT64_C(1) << 40;  // no clock decides anything
  config.encoders = 0;
  config.open_files_max = 4;
  on->told_count = on->told_session_count = 0;
  on->storage = qkvi_storage_create(&config);
  if (writes_anew(on)) {
    on->storage->journal.rewrite_min = 128 << 10;
    on->storage->journal.piece_bytes = 16 << 10;
    on->storage->journal.batch_max = 24 << 10;
  }
  for (int left = QKVI_WRITE_BUFFERS; has_few_buffers(on) && left > 2; left--)
    on->storage->free_buffers = on->storage->free_buffers->next;
  on->storage->store = 1 + drawn(on, UINT64_C(1) << 60);
  on->storage->io = fault_disk_attach(on->disk, &on->storage->loop, 8);
  const qkv_storage_restore restore = {.context = on, .entry = tell_entry, .record = tell_record};
  const qkv_status status = qkvi_storage_open_over(on->storage, &restore, error);
  if (status != QKV_OK) qkvi_storage_destroy(&on->storage);
  return status;
}

static const qkv_record_info *told_record(const model *on, uint64_t number) {
  for (size_t i = 0; i < on->told_count; i++) {
    if (on->told[i].record == number) return &on->told[i];
  }
  return NULL;
}

static bool told_session(const model *on, uint64_t number) {
  for (size_t i = 0; i < on->told_session_count; i++) {
    if (on->told_sessions[i] == number) return true;
  }
  return false;
}

// Whether a newer record of the same place was told.
static bool told_newer(const model *on, const model_record *record) {
  for (size_t i = 0; i < on->told_count; i++) {
    const qkv_record_info *info = &on->told[i];
    if (info->meta.session == record->session && info->meta.layer == record->layer &&
        info->meta.position == record->position && info->record > record->number) {
      return true;
    }
  }
  return false;
}

static void check_sessions(model *on) {
  if (fault_disk_damaged_journal(on->disk) > 0) return;
  for (size_t i = 0; i < on->session_count; i++) {
    const model_session *session = &on->sessions[i];
    const bool told = told_session(on, session->number);
    if (session->close_durable) CHECK(on, !told, "a closed session is back\n");
    if (session->open_durable && !session->close_asked) CHECK(on, told, "a session is lost\n");
  }
}

static void check_told(model *on) {
  for (size_t i = 0; i < on->told_count; i++) {
    const qkv_record_info *info = &on->told[i];
    const model_record *record = record_of(on, info->record);
    CHECK(on, record != NULL, "a record that never was\n");
    CHECK(on,
          record->session == info->meta.session && record->position == info->meta.position &&
              record->layer == info->meta.layer && record->size == info->bytes,
          "a record's description\n");
    CHECK(on, told_session(on, info->meta.session), "a record of a dead session\n");
    for (size_t j = 0; j < on->cut_count; j++) {
      const model_cut *cut = &on->cuts[j];
      if (!cut_hits(cut, info->meta.session, info->meta.layer, info->record, info->meta.position)) continue;
      if (fault_disk_damaged_journal(on->disk) == 0) CHECK(on, !cut->durable, "a cut record is back\n");
      // Rows of before the cut never stand beside rows of after it.
      for (size_t k = 0; k < on->told_count; k++) {
        CHECK(on, on->told[k].meta.session != cut->session || on->told[k].record < cut->watermark,
              "records %llu and %llu do not go together\n", (unsigned long long)info->record,
              (unsigned long long)on->told[k].record);
      }
    }
  }
}

static void check_durable(model *on) {
  if (fault_disk_damaged_journal(on->disk) > 0 || fault_disk_damaged_segments(on->disk) > 0) return;
  for (size_t i = 0; i < on->record_count; i++) {
    const model_record *record = &on->records[i];
    const model_session *session = session_of(on, record->session);
    if (!record->durable || record->gone || !session->open_durable || session->close_asked) continue;
    CHECK(on, told_record(on, record->number) != NULL || told_newer(on, record), "record %llu was durable\n",
          (unsigned long long)record->number);
  }
}

// From here on what was told is there and the rest is gone. A record may come back where a newer one is damaged.
static void believe(model *on) {
  for (size_t i = 0; i < on->record_count; i++) {
    model_record *record = &on->records[i];
    const bool told = told_record(on, record->number) != NULL;
    record->ended = true;
    record->written = record->written || told;
    // After an fdatasync that failed the cache may show what the medium does not have; no later one tells.
    record->durable = told && (record->durable || !on->sync_failed);
    record->gone = !told;
  }
  for (size_t i = 0; i < on->session_count; i++) {
    const bool told = told_session(on, on->sessions[i].number);
    on->sessions[i] = (model_session){.number = on->sessions[i].number, .open_durable = told, .close_asked = !told};
  }
  on->cut_count = 0;
}

static void settle(model *on) {
  qkv_storage_sync(on->storage, nothing_ended, about_of(on, 0));
  while (on->waits > 0) qkvi_storage_turn(on->storage, true);
}

static fault_plan plan_of(model *on) {
  fault_plan plan = {.shorter = 0.05, .interrupted = 0.05};
  if (on->seed % 4 == 1 || on->seed % 4 == 3) {
    plan.write_error = plan.sync_error = plan.full = 0.01;
    plan.name_error = 0.005;
    plan.read_error = plan.stale_read = 0.01;
  }
  if (on->seed % 4 >= 2) plan.flip = plan.lost = plan.misdirected = 0.004;
  if (drawn(on, 4) != 0) plan.crash_after = 1 + drawn(on, 1500);
  return plan;
}

// A start that the device gives only a part of what it has, or not even the journal: nothing is lost by it.
static void start_in_part(model *on) {
  qkv_error error = {0};
  fault_disk_plan(on->disk, &(fault_plan){.read_error = 0.05, .segment_error = 0.5});
  if (open_storage(on, 0, &error) == QKV_OK) {
    check_sessions(on);
    check_told(on);
    qkv_storage_close(&on->storage);
  }
  fault_disk_restart(on->disk, false);
}

// Between an opening and an end of any kind. false: nothing is left to go on with.
static bool run(model *on, bool first) {
  const uint64_t budget = on->seed % 5 == 0 ? UINT64_C(6) << 20 : 0;
  qkv_error error = {0};
  if (!first && drawn(on, 2) == 0) start_in_part(on);
  fault_plan quiet = {.shorter = 0.05, .interrupted = 0.05};
  if (drawn(on, 4) == 0) quiet.crash_after = 1 + drawn(on, 60);
  fault_disk_plan(on->disk, &quiet);
  qkv_status status = open_storage(on, budget, &error);
  if (status != QKV_OK && fault_disk_crashed(on->disk)) {
    fault_disk_restart(on->disk, drawn(on, 2) == 0);
    memset(&error, 0, sizeof error);
    status = open_storage(on, budget, &error);
  }
  if (status != QKV_OK && fault_disk_damaged_journal(on->disk) > 0) return false;
  CHECK(on, status == QKV_OK, "%s\n", error.text);
  if (!first) {
    check_sessions(on);
    check_told(on);
    check_durable(on);
    believe(on);
  }
  quiet.crash_after = 0;
  fault_disk_plan(on->disk, &quiet);
  on->faults = false;
  const uint64_t epoch = on->storage->journal.epoch;
  for (size_t i = 0; i < on->record_count && !fault_disk_crashed(on->disk); i++) read_record(on, i);
  settle(on);
  const fault_plan plan = plan_of(on);
  on->faults = plan.write_error > 0;
  on->sync_failed = on->sync_failed || plan.sync_error > 0;
  fault_disk_plan(on->disk, &plan);
  for (int i = 0; i < OPERATIONS && !fault_disk_crashed(on->disk); i++) operate(on);
  const uint64_t end = drawn(on, 3);
  if (end == 0) settle(on);
  if (end == 1) fault_disk_crash(on->disk);
  on->rewritten += on->storage->journal.epoch - epoch;
  qkv_storage_close(&on->storage);  // without a crash: everything becomes durable
  CHECK(on, on->waits == 0, "callbacks are missing\n");
  fault_disk_restart(on->disk, drawn(on, 2) == 0);
  return true;
}

static uint64_t run_seed(uint64_t seed) {
  static model on;
  memset(&on, 0, sizeof on);
  on.seed = seed;
  on.disk = fault_disk_create(seed);
  for (int i = 0; i < RUNS && run(&on, i == 0); i++) {
  }
  fault_disk_destroy(&on.disk);
  return writes_anew(&on) ? on.rewritten : 0;
}

static uint64_t from_environment(const char *name, uint64_t otherwise) {
  const char *text = getenv(name);
  return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

// Seeds that have found something once: in the storage (1: compaction dropped what a device would not read just then)
// or in what this test took for granted.
static void kept_seeds(void **state) {
  (void)state;
  static const uint64_t seeds[] = {1, 4, 5, 25, 105, 330, 394, 560, 1669};
  if (getenv("QKV_FAULT_SEED") != NULL) skip();
  for (size_t i = 0; i < sizeof seeds / sizeof *seeds; i++) (void)run_seed(seeds[i]);
}

static void random_operations(void **state) {
  (void)state;
  const uint64_t first = from_environment("QKV_FAULT_SEED", 1), seeds = from_environment("QKV_FAULT_SEEDS", SEEDS);
  uint64_t rewritten = 0;
  for (uint64_t seed = first; seed < first + seeds; seed++) rewritten += run_seed(seed);
  if (seeds >= 200) assert_true(rewritten >= seeds / 10);
}

int main(void) {
  // What the disk does is told by the model.
  FILE *nowhere = fopen("/dev/null", "we");
  if (nowhere != NULL && getenv("QKV_FAULT_SEED") == NULL) qkv_log_setup(nowhere, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {cmocka_unit_test(kept_seeds), cmocka_unit_test(random_operations)};
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  if (nowhere != NULL) (void)fclose(nowhere);
  return failed;
}
