// qkvctl fetch --coded and load of what it writes: a session's pages as they are, into a file and out of it.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/cli/cli.h"
#include "client/cli/session_file.h"
#include "client/cli/target.h"
#include "client/common/durability.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "engine/codec/page.h"
#include "qkv/v1/kv_cache.pb-c.h"

// ---- Into a file ----

enum { VERSIONS_MAX = 64, IDS_MAX = 1 << 18 };  // of a record

typedef struct save_job {
  qkv_client *client;
  qkvi_coded_session source;
  qkvctl_session_writer *writer;
  qkv_progress progress;
  uint32_t versions[VERSIONS_MAX];  // of calibrations that pages have
  size_t version_count;
  uint64_t rows, pages;
  qkv_error error;
} save_job;

static qkv_status put_message(save_job *job, qkvctl_record_kind kind, const ProtobufCMessage *message) {
  const size_t bytes = protobuf_c_message_get_packed_size(message);
  uint8_t *packed = malloc(bytes + 1);
  assert(packed != NULL);
  (void)protobuf_c_message_pack(message, packed);
  const qkvctl_record record = {.kind = kind, .payload = {packed, ""}, .bytes = {bytes}};
  const qkv_status status = qkvctl_session_writer_put(job->writer, &record, &job->error);
  free(packed);
  return status;
}

static qkv_status note_version(save_job *job, const qkv_client_page *page) {
  qkv_page_header header;
  memcpy(&header, page->image, sizeof header);
  for (size_t i = 0; i < job->version_count; i++) {
    if (job->versions[i] == header.calibration) return QKV_OK;
  }
  if (header.calibration == 0) return QKV_OK;
  if (job->version_count == VERSIONS_MAX)
    return qkv_fail(&job->error, QKV_RESOURCE_EXHAUSTED, "the session's pages have more than %d calibrations",
                    VERSIONS_MAX);
  job->versions[job->version_count++] = header.calibration;
  return QKV_OK;
}

static bool was_interrupted(save_job *job) {
  if (qkv_interrupted()) (void)qkv_fail(&job->error, QKV_CANCELLED, "interrupted");
  return qkv_interrupted();
}

static bool save_page(void *context, const qkv_client_page *page) {
  save_job *job = context;
  const qkvctl_record record = {.kind = QKVCTL_RECORD_PAGE,
                                .layer = page->layer,
                                .position = page->position,
                                .tokens = page->tokens,
                                .hash = page->calibration_hash,
                                .payload = {page->image, ""},
                                .bytes = {page->bytes}};
  if (was_interrupted(job)) return false;
  qkv_progress_add(&job->progress, page->bytes);
  job->pages++;
  job->rows += page->tokens;
  return note_version(job, page) == QKV_OK && qkvctl_session_writer_put(job->writer, &record, &job->error) == QKV_OK;
}

static bool save_rows(void *context, const qkv_client_rows *rows) {
  save_job *job = context;
  const qkvctl_record record = {.kind = QKVCTL_RECORD_ROWS,
                                .layer = rows->layer,
                                .position = rows->position,
                                .tokens = (uint32_t)rows->k.dims[0],
                                .payload = {rows->k.data, rows->v.data},
                                .bytes = {rows->k.bytes, rows->v.bytes}};
  if (was_interrupted(job)) return false;
  qkv_progress_add(&job->progress, rows->k.bytes + rows->v.bytes);
  job->rows += (uint64_t)rows->k.dims[0];
  return qkvctl_session_writer_put(job->writer, &record, &job->error) == QKV_OK;
}

static qkv_code save_calibrations(save_job *job, qkv_call_error *error) {
  for (size_t i = 0; i < job->version_count; i++) {
    uint8_t *bytes = NULL;
    size_t count = 0;
    const qkv_code code =
        qkvctl_source_calibration(job->client, job->source.info->model, job->versions[i], &bytes, &count, error);
    const qkvctl_record record = {
        .kind = QKVCTL_RECORD_CALIBRATION, .tokens = job->versions[i], .payload = {bytes, ""}, .bytes = {count}};
    const qkv_status status =
        code == 0 ? qkvctl_session_writer_put(job->writer, &record, &job->error) : (qkv_status)code;
    free(bytes);
    if (status != QKV_OK) return (qkv_code)status;
  }
  return 0;
}

static qkv_status save_ids(save_job *job, qkv_call_error *error) {
  uint32_t *ids = NULL;
  size_t count = 0;
  qkv_status status = (qkv_status)qkvctl_source_ids(job->client, job->source.info->session, &ids, &count, error);
  for (size_t begin = 0, end; begin < count && status == QKV_OK; begin = end) {
    end = count - begin > IDS_MAX ? begin + IDS_MAX : count;
    const qkvctl_record record = {.kind = QKVCTL_RECORD_IDS,
                                  .position = begin,
                                  .tokens = (uint32_t)(end - begin),
                                  .payload = {ids + begin, ""},
                                  .bytes = {(end - begin) * sizeof *ids}};
    status = qkvctl_session_writer_put(job->writer, &record, &job->error);
  }
  free(ids);
  return status;
}

static int save_all(save_job *job) {
  char what[160];
  qkv_call_error error = {0};
  const Qkv__V1__SessionInfo *info = job->source.info;
  const qkv_client_coded_receiver to = {save_page, save_rows, job};
  const qkv_client_fetch request = {.session = info->session, .dtype = (int)job->source.model->model->dtype};
  snprintf(what, sizeof what, "fetching %s", info->session);
  qkv_progress_start(&job->progress, what, info->bytes_coded + info->bytes_exact);
  qkv_status status = put_message(job, QKVCTL_RECORD_MODEL, &job->source.model->model->base);
  if (status == QKV_OK) status = put_message(job, QKVCTL_RECORD_SESSION, &info->base);
  if (status == QKV_OK) status = save_ids(job, &error);
  if (status == QKV_OK) status = (qkv_status)qkv_client_fetch_pages(job->client, &request, &to, &error);
  if (status == QKV_OK) status = (qkv_status)save_calibrations(job, &error);
  qkv_progress_end(&job->progress);
  if (status == QKV_OK) return QKV_EXIT_OK;
  return qkv_program_failed("%s", job->error.status != QKV_OK ? job->error.text : error.text);
}

static int report_saved(const save_job *job, const qkvctl_values *values, uint64_t bytes) {
  char human[QKV_HUMAN_MAX];
  if (values->program.json) {
    json_t *line =
        json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I}", "session", job->source.info->session, "model",
                  job->source.info->model, "output", values->output, "rows", (json_int_t)job->rows, "pages",
                  (json_int_t)job->pages, "calibrations", (json_int_t)job->version_count, "bytes", (json_int_t)bytes);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: %" PRIu64 " rows, %" PRIu64 " pages as they are, %zu calibrations, %s\n", values->output, job->rows,
         job->pages, job->version_count, qkv_human_bytes(bytes, human));
  return QKV_EXIT_OK;
}

int qkvctl_fetch_coded(const qkvctl_values *values, const char *session) {
  qkv_call_error error = {0};
  save_job job = {.client = qkvctl_connect(values)};
  if (job.client == NULL) return QKV_EXIT_FAILED;
  int status = QKV_EXIT_OK;
  qkv_interrupt_catch();
  if (qkvi_coded_session_get(job.client, session, &job.source, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  else if (qkvctl_session_writer_create(values->output, &job.writer, &job.error) != QKV_OK)
    status = qkv_program_failed("%s", job.error.text);
  if (status == QKV_EXIT_OK) status = save_all(&job);
  if (status == QKV_EXIT_OK) {
    const uint64_t bytes = qkvctl_session_writer_bytes(job.writer);
    if (qkvctl_session_writer_finish(&job.writer, &job.error) != QKV_OK)
      status = qkv_program_failed("%s", job.error.text);
    else
      status = report_saved(&job, values, bytes);
  }
  qkvctl_session_writer_destroy(&job.writer);
  qkvi_coded_session_free(&job.source);
  qkv_client_close(&job.client);
  return status;
}

// ---- Out of a file ----

typedef struct load_pages {
  qkvctl_session_file *file;
  Qkv__V1__Model *model;
  Qkv__V1__SessionInfo *info;
  uint32_t *ids;  // of positions 0 to id_count
  size_t id_count;
  qkvctl_target *target;
} load_pages;

static const qkvctl_record *find_record(const qkvctl_session_file *file, qkvctl_record_kind kind, uint32_t version,
                                        qkvctl_record *found) {
  for (size_t i = 0; i < qkvctl_session_file_count(file); i++) {
    *found = qkvctl_session_file_at(file, i);
    if (found->kind == kind && (kind != QKVCTL_RECORD_CALIBRATION || found->tokens == version)) return found;
  }
  return NULL;
}

static qkv_code file_calibration(void *context, uint32_t version, uint8_t **bytes, size_t *count,
                                 qkv_call_error *error) {
  const load_pages *job = context;
  qkvctl_record found;
  if (find_record(job->file, QKVCTL_RECORD_CALIBRATION, version, &found) == NULL) {
    error->code = QKV_DATA_LOSS;
    (void)snprintf(error->text, sizeof error->text, "the file has no calibration %08" PRIx32, version);
    return QKV_DATA_LOSS;
  }
  *count = found.bytes[0];
  *bytes = malloc(*count + 1);
  assert(*bytes != NULL);
  memcpy(*bytes, found.payload[0], *count);
  return 0;
}

static bool read_messages(load_pages *job) {
  qkvctl_record model, session;
  if (find_record(job->file, QKVCTL_RECORD_MODEL, 0, &model) == NULL ||
      find_record(job->file, QKVCTL_RECORD_SESSION, 0, &session) == NULL)
    return false;
  job->model = qkv__v1__model__unpack(NULL, model.bytes[0], model.payload[0]);
  job->info = qkv__v1__session_info__unpack(NULL, session.bytes[0], session.payload[0]);
  return job->model != NULL && job->info != NULL && job->info->policy != NULL && job->model->layers <= 1024 &&
         qkv_dtype_size((qkv_dtype)job->model->dtype) > 0;
}

// Those from position 0 on; false where they do not follow each other.
static bool read_ids(load_pages *job) {
  for (size_t i = 0; i < qkvctl_session_file_count(job->file); i++) {
    const qkvctl_record record = qkvctl_session_file_at(job->file, i);
    if (record.kind != QKVCTL_RECORD_IDS) continue;
    if (record.position != job->id_count || record.bytes[0] != record.tokens * sizeof *job->ids) return false;
    job->ids = realloc(job->ids, (job->id_count + record.tokens + 1) * sizeof *job->ids);
    assert(job->ids != NULL);
    memcpy(job->ids + job->id_count, record.payload[0], record.bytes[0]);
    job->id_count += record.tokens;
  }
  return true;
}

static bool make_rows(const load_pages *job, const qkvctl_record *record, qkv_client_rows *rows) {
  const Qkv__V1__Model *model = job->model;
  const size_t head = (size_t)record->tokens * model->kv_heads * qkv_dtype_size((qkv_dtype)model->dtype);
  const size_t k_bytes = head * model->key_dim, v_bytes = head * model->value_dim;
  const int64_t tokens = record->tokens, heads = model->kv_heads;
  if (record->tokens == 0 || k_bytes + v_bytes != record->bytes[0]) return false;
  *rows = (qkv_client_rows){
      .layer = record->layer,
      .position = record->position,
      .k = {(int)model->dtype, 3, {tokens, heads, model->key_dim}, {0}, record->payload[0], k_bytes},
      .v = {(int)model->dtype,
            3,
            {tokens, heads, model->value_dim},
            {0},
            (const uint8_t *)record->payload[0] + k_bytes,
            v_bytes}};
  return true;
}

static qkv_client_page page_of(const qkvctl_record *record) {
  return (qkv_client_page){.layer = record->layer,
                           .position = record->position,
                           .tokens = record->tokens,
                           .calibration_hash = record->hash,
                           .image = record->payload[0],
                           .bytes = record->bytes[0]};
}

// Rows [begin, end) of a record of rows, as far as it has them.
static void cut(qkv_client_tensor *rows, uint64_t position, uint64_t begin, uint64_t end) {
  const size_t row = rows->bytes / (size_t)rows->dims[0];
  const uint64_t past = position + (uint64_t)rows->dims[0];
  const uint64_t from = begin > position ? begin : position, to = end < past ? end : past;
  rows->data = (const uint8_t *)rows->data + (from - position) * row;
  rows->dims[0] = (int64_t)(to - from);
  rows->bytes = (size_t)(to - from) * row;
}

static qkv_code file_rows(void *context, uint32_t layer, uint64_t begin, uint64_t end,
                          const qkv_client_coded_receiver *to, qkv_call_error *error) {
  const load_pages *job = context;
  (void)error;
  for (size_t i = 0; i < qkvctl_session_file_count(job->file); i++) {
    const qkvctl_record record = qkvctl_session_file_at(job->file, i);
    qkv_client_rows rows;
    if (record.layer != layer || record.position >= end || record.position + record.tokens <= begin) continue;
    if (record.kind == QKVCTL_RECORD_PAGE) {
      const qkv_client_page page = page_of(&record);
      (void)to->page(to->context, &page);
    } else if (record.kind == QKVCTL_RECORD_ROWS && make_rows(job, &record, &rows)) {
      cut(&rows.k, rows.position, begin, end);
      cut(&rows.v, rows.position, begin, end);
      if (begin > rows.position) rows.position = begin;
      (void)to->rows(to->context, &rows);
    }
  }
  return 0;
}

static qkv_code load_record(load_pages *job, const qkvctl_record *record, qkv_call_error *error) {
  if (record->kind == QKVCTL_RECORD_PAGE && record->bytes[0] >= sizeof(qkv_page_header)) {
    const qkv_client_page page = page_of(record);
    return qkvctl_target_page(job->target, &page, error);
  }
  qkv_client_rows rows;
  if (record->kind != QKVCTL_RECORD_PAGE && record->kind != QKVCTL_RECORD_ROWS) return 0;
  if (record->kind == QKVCTL_RECORD_ROWS && make_rows(job, record, &rows))
    return qkvctl_target_rows(job->target, &rows, error);
  error->code = QKV_DATA_LOSS;
  (void)snprintf(error->text, sizeof error->text,
                 "the record of layer %" PRIu32 " at position %" PRIu64 " is malformed", record->layer,
                 record->position);
  return QKV_DATA_LOSS;
}

// What the target has already, of a load that was cut short, is left out.
static int load_records(load_pages *job, const char *session) {
  qkv_call_error error = {0};
  qkv_code code = 0;
  for (size_t i = 0; i < qkvctl_session_file_count(job->file) && code == 0; i++) {
    const qkvctl_record record = qkvctl_session_file_at(job->file, i);
    const bool held = record.layer < job->model->layers &&
                      record.position + record.tokens <= qkvctl_target_length(job->target, record.layer);
    const bool of_layer = record.kind == QKVCTL_RECORD_PAGE || record.kind == QKVCTL_RECORD_ROWS;
    if (of_layer && !held) code = qkvctl_interrupted(&error);
    if (of_layer && !held && code == 0) code = load_record(job, &record, &error);
  }
  if (code == 0) code = qkvctl_target_flush(job->target, &error);
  if (code == 0) return QKV_EXIT_OK;
  return qkvctl_incomplete(&error, session);
}

static int report_loaded(const load_pages *job, const char *session, bool json) {
  char bytes[QKV_HUMAN_MAX];
  const qkvctl_target_totals totals = qkvctl_target_totals_of(job->target);
  if (json) {
    json_t *line =
        json_pack("{s:s, s:s, s:I, s:I, s:I}", "session", session, "model", job->model->name, "rows",
                  (json_int_t)totals.tokens, "pages", (json_int_t)totals.pages, "bytes", (json_int_t)totals.bytes);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: %" PRIu64 " rows, %" PRIu64 " pages as they are, %s\n", session, totals.tokens, totals.pages,
         qkv_human_bytes(totals.bytes, bytes));
  return QKV_EXIT_OK;
}

static int load(load_pages *job, const qkvctl_values *values, qkv_client *client) {
  qkv_call_error error = {0};
  qkv_error misused = {0};
  int durability = 0;
  if (qkvi_durability_parse(values->durability, &durability, &misused) != QKV_OK)
    return qkv_program_misused("%s", misused.text);
  const qkvctl_target_config config = {.client = client,
                                       .session = values->session != NULL ? values->session : job->info->session,
                                       .model = job->model,
                                       .info = job->info,
                                       .durability = durability,
                                       .salt = values->salt,
                                       .token_ids = job->ids,
                                       .token_count = job->id_count,
                                       .calibration = file_calibration,
                                       .rows = file_rows,
                                       .context = job};
  qkv_interrupt_catch();
  if (qkvctl_target_open(&config, &job->target, &error) != 0) return qkv_program_failed("%s", error.text);
  const int status = load_records(job, config.session);
  return status == QKV_EXIT_OK ? report_loaded(job, config.session, values->program.json) : status;
}

int qkvctl_load_coded(const qkvctl_values *values, const char *path) {
  load_pages job = {0};
  qkv_error error = {0};
  qkv_client *client = NULL;
  int status = QKV_EXIT_OK;
  if (qkvctl_session_file_open(path, &job.file, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  if (!read_messages(&job) || !read_ids(&job)) {
    status = qkv_program_failed("%s describes no session", path);
  } else {
    qkvctl_values target = *values;
    if (target.program.tenant == NULL) target.program.tenant = job.info->tenant;
    client = qkvctl_connect(&target);
    status = client == NULL ? QKV_EXIT_FAILED : load(&job, values, client);
  }
  qkvctl_target_close(&job.target);
  free(job.ids);
  if (job.model != NULL) qkv__v1__model__free_unpacked(job.model, NULL);
  if (job.info != NULL) qkv__v1__session_info__free_unpacked(job.info, NULL);
  qkvctl_session_file_close(&job.file);
  qkv_client_close(&client);
  return status;
}
