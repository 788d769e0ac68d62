// qkvctl storage: the SSD tier of a daemon.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/admin.pb-c.h"

static int call(qkv_client *client, const char *method, const ProtobufCMessage *request,
                const ProtobufCMessageDescriptor *kind, ProtobufCMessage **answer) {
  qkv_call_error error = {0};
  if (qkv_client_call_message(client, method, request, kind, answer, &error) == 0) return QKV_EXIT_OK;
  return qkv_program_failed("%s", error.text);
}

// ---- storage ----

static int show_json(const Qkv__V1__GetStorageResponse *storage) {
  json_t *segments = json_array();
  for (size_t i = 0; i < storage->n_segments; i++) {
    const Qkv__V1__StorageSegment *segment = storage->segments[i];
    json_array_append_new(
        segments,
        json_pack("{s:I, s:I, s:I, s:I, s:b, s:b}", "segment", (json_int_t)segment->segment, "file_bytes",
                  (json_int_t)segment->file_bytes, "live_bytes", (json_int_t)segment->live_bytes, "records",
                  (json_int_t)segment->records, "sealed", (int)segment->sealed, "unread", (int)segment->unread));
  }
  json_t *line = json_pack(
      "{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:o}", "directory",
      storage->directory, "io", storage->io, "records", (json_int_t)storage->records, "disk_bytes",
      (json_int_t)storage->disk_bytes, "live_bytes", (json_int_t)storage->live_bytes, "dead_bytes",
      (json_int_t)storage->dead_bytes, "dirty_bytes", (json_int_t)storage->dirty_bytes, "journal_bytes",
      (json_int_t)storage->journal_bytes, "put_bytes", (json_int_t)storage->put_bytes, "put_stored_bytes",
      (json_int_t)storage->put_stored_bytes, "read_bytes", (json_int_t)storage->read_bytes, "bad_records",
      (json_int_t)storage->bad_records, "failed", (json_int_t)storage->failed, "unread_segments",
      (json_int_t)storage->unread_segments, "recovery_seconds", storage->recovery_seconds, "segments", segments);
  return qkv_json_figures(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static void print_segments(const Qkv__V1__GetStorageResponse *storage) {
  char file[QKV_HUMAN_MAX], live[QKV_HUMAN_MAX];
  qkv_table *table = qkv_table_create(5);
  qkv_table_cell(table, "SEGMENT");
  qkv_table_cell(table, "BYTES");
  qkv_table_cell(table, "NEEDED");
  qkv_table_cell(table, "PAGES");
  qkv_table_cell(table, "STATE");
  for (size_t i = 0; i < storage->n_segments; i++) {
    const Qkv__V1__StorageSegment *segment = storage->segments[i];
    qkv_table_cell(table, "%016" PRIx64, segment->segment);
    qkv_table_cell(table, "%s", qkv_human_bytes(segment->file_bytes, file));
    qkv_table_cell(table, "%s", qkv_human_bytes(segment->live_bytes, live));
    qkv_table_cell(table, "%" PRIu64, segment->records);
    qkv_table_cell(table, "%s", segment->unread ? "unread" : segment->sealed ? "sealed" : "written");
  }
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
}

static void print_storage(const Qkv__V1__GetStorageResponse *storage) {
  char disk[QKV_HUMAN_MAX], live[QKV_HUMAN_MAX], dead[QKV_HUMAN_MAX], dirty[QKV_HUMAN_MAX], journal[QKV_HUMAN_MAX];
  char put[QKV_HUMAN_MAX], stored[QKV_HUMAN_MAX], read[QKV_HUMAN_MAX];
  printf("directory       %s, by %s\n", storage->directory, storage->io);
  printf("pages           %" PRIu64 "\n", storage->records);
  printf("disk            %s: %s needed, %s free for compaction\n", qkv_human_bytes(storage->disk_bytes, disk),
         qkv_human_bytes(storage->live_bytes, live), qkv_human_bytes(storage->dead_bytes, dead));
  printf("journal         %s\n", qkv_human_bytes(storage->journal_bytes, journal));
  printf("on their way    %s\n", qkv_human_bytes(storage->dirty_bytes, dirty));
  printf("since the start %s written as %s, %s read\n", qkv_human_bytes(storage->put_bytes, put),
         qkv_human_bytes(storage->put_stored_bytes, stored), qkv_human_bytes(storage->read_bytes, read));
  printf("trouble         %" PRIu64 " damaged pages, %" PRIu64 " writes refused by the disk, %" PRIu64
         " segments that the start could not read\n",
         storage->bad_records, storage->failed, storage->unread_segments);
  printf("recovery        %.3f s\n", storage->recovery_seconds);
  if (storage->n_segments > 0) print_segments(storage);
}

static int show(const qkvctl_values *values, qkv_client *client) {
  Qkv__V1__GetStorageRequest request = QKV__V1__GET_STORAGE_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  int status =
      call(client, "/qkv.v1.Admin/GetStorage", &request.base, &qkv__v1__get_storage_response__descriptor, &answer);
  if (status != QKV_EXIT_OK) return status;
  const Qkv__V1__GetStorageResponse *storage = (const Qkv__V1__GetStorageResponse *)answer;
  if (values->program.json) {
    status = show_json(storage);
  } else {
    print_storage(storage);
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return status;
}

// ---- storage verify ----

// Asks until it is over; the answer is the last one's.
static int watch(qkv_client *client, Qkv__V1__VerifyStorageResponse **last) {
  const struct timespec pause = {.tv_nsec = 100 * 1000 * 1000};
  Qkv__V1__VerifyStorageRequest request = QKV__V1__VERIFY_STORAGE_REQUEST__INIT;
  qkv_progress progress;
  uint64_t shown = 0;
  bool started = false;
  int status;
  request.start = 1;
  for (;;) {
    ProtobufCMessage *answer = NULL;
    status = call(client, "/qkv.v1.Admin/VerifyStorage", &request.base, &qkv__v1__verify_storage_response__descriptor,
                  &answer);
    if (status != QKV_EXIT_OK) break;
    *last = (Qkv__V1__VerifyStorageResponse *)answer;
    if (!started && (*last)->records > 0) qkv_progress_start(&progress, "pages", (*last)->records);
    started |= (*last)->records > 0;
    if (started) qkv_progress_add(&progress, (*last)->records_done - shown);
    shown = (*last)->records_done;
    if (!(*last)->running) break;
    protobuf_c_message_free_unpacked(answer, NULL);
    *last = NULL;
    request.start = 0;
    (void)nanosleep(&pause, NULL);
  }
  if (started) qkv_progress_end(&progress);
  return status;
}

static int verify(const qkvctl_values *values, qkv_client *client) {
  Qkv__V1__VerifyStorageResponse *done = NULL;
  char bytes[QKV_HUMAN_MAX];
  int status = watch(client, &done);
  if (status != QKV_EXIT_OK) return status;
  if (values->program.json) {
    json_t *line = json_pack("{s:I, s:I, s:I}", "records", (json_int_t)done->records_done, "bytes",
                             (json_int_t)done->bytes, "bad", (json_int_t)done->bad);
    if (!qkv_json_line(line)) status = QKV_EXIT_FAILED;
  } else {
    printf("%" PRIu64 " pages, %s: %" PRIu64 " damaged\n", done->records_done, qkv_human_bytes(done->bytes, bytes),
           done->bad);
  }
  if (done->bad > 0) status = QKV_EXIT_FAILED;
  protobuf_c_message_free_unpacked(&done->base, NULL);
  return status;
}

// ---- storage compact ----

static int compact(const qkvctl_values *values, qkv_client *client) {
  Qkv__V1__CompactRequest request = QKV__V1__COMPACT_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  char bytes[QKV_HUMAN_MAX];
  int status = call(client, "/qkv.v1.Admin/Compact", &request.base, &qkv__v1__compact_response__descriptor, &answer);
  if (status != QKV_EXIT_OK) return status;
  const uint64_t freed = ((const Qkv__V1__CompactResponse *)answer)->bytes_freed;
  if (values->program.json) {
    if (!qkv_json_line(json_pack("{s:I}", "bytes_freed", (json_int_t)freed))) status = QKV_EXIT_FAILED;
  } else {
    printf("%s of the disk are free again\n", qkv_human_bytes(freed, bytes));
  }
  protobuf_c_message_free_unpacked(answer, NULL);
  return status;
}

int qkvctl_storage(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *what = arguments->count > 0 ? arguments->items[0] : "show";
  int (*const run)(const qkvctl_values *values, qkv_client *client) = strcmp(what, "show") == 0      ? show
                                                                      : strcmp(what, "verify") == 0  ? verify
                                                                      : strcmp(what, "compact") == 0 ? compact
                                                                                                     : NULL;
  if (run == NULL) return qkv_program_misused("storage is followed by show, verify or compact, not by %s", what);
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  const int status = run(values, client);
  qkv_client_close(&client);
  return status;
}
