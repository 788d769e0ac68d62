// qkvctl copy: a session from one daemon to another, as pages, never decoded.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/c/codes.h"
#include "client/cli/cli.h"
#include "client/cli/target.h"
#include "client/common/durability.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "qkv/v1/kv_cache.pb-c.h"

typedef struct copy_job {
  qkv_client *from, *to;
  qkv_client *aside;  // to the source again: a calibration is asked for in the middle of a fetch
  qkvi_coded_session source;
  qkvctl_target *target;
  const char *name;  // of the session there
  uint32_t *ids;     // of the source's tokens from position 0 on
  size_t id_count;
  qkv_progress progress;
  qkv_call_error error;  // of what failed in the target
} copy_job;

// ---- The source ----

typedef struct gathered {
  uint8_t *bytes;
  size_t count;
} gathered;

static bool gather(void *context, const void *data, size_t bytes) {
  gathered *all = context;
  all->bytes = realloc(all->bytes, all->count + bytes + 1);
  assert(all->bytes != NULL);
  memcpy(all->bytes + all->count, data, bytes);
  all->count += bytes;
  return true;
}

qkv_code qkvctl_source_calibration(qkv_client *client, const char *model, uint32_t version, uint8_t **bytes,
                                   size_t *count, qkv_call_error *error) {
  gathered all = {0};
  const qkv_code code = qkv_client_get_calibration_version(client, model, version, gather, &all, error);
  *bytes = all.bytes;
  *count = all.count;
  return code;
}

// Of the layer that has most.
static uint64_t longest(const Qkv__V1__SessionInfo *info) {
  uint64_t most = 0;
  for (size_t i = 0; i < info->n_lengths; i++) most = info->lengths[i] > most ? info->lengths[i] : most;
  return most;
}

qkv_code qkvctl_source_ids(qkv_client *client, const char *session, uint32_t **ids, size_t *count,
                           qkv_call_error *error) {
  Qkv__V1__GetSessionRequest request = QKV__V1__GET_SESSION_REQUEST__INIT;
  Qkv__V1__TokenRange range = QKV__V1__TOKEN_RANGE__INIT;
  ProtobufCMessage *answer = NULL;
  request.session = (char *)(uintptr_t)session;
  request.token_ids = &range;
  for (size_t got = 1; got > 0; range.begin = *count) {
    const qkv_code code = qkv_client_call_message(client, "/qkv.v1.KvCache/GetSession", &request.base,
                                                  &qkv__v1__session_info__descriptor, &answer, error);
    if (code != 0) return code;
    const Qkv__V1__SessionInfo *info = (const Qkv__V1__SessionInfo *)answer;
    got = info->n_token_ids;
    if (got > 0 && *count + got > longest(info)) {  // else a daemon that never ends would be asked for ever
      protobuf_c_message_free_unpacked(answer, NULL);
      *error = (qkv_call_error){.code = QKV_INTERNAL};
      (void)snprintf(error->text, sizeof error->text,
                     "the daemon gives more token ids than session %.128s has tokens", session);
      return QKV_INTERNAL;
    }
    *ids = realloc(*ids, (*count + got + 1) * sizeof **ids);
    assert(*ids != NULL);
    if (got > 0) memcpy(*ids + *count, info->token_ids, got * sizeof **ids);
    *count += got;
    protobuf_c_message_free_unpacked(answer, NULL);
  }
  return 0;
}

static qkv_code ask_calibration(void *context, uint32_t version, uint8_t **bytes, size_t *count,
                                qkv_call_error *error) {
  const copy_job *job = context;
  return qkvctl_source_calibration(job->aside, job->source.info->model, version, bytes, count, error);
}

// ---- On the way ----

static bool pass_page(void *context, const qkv_client_page *page) {
  copy_job *job = context;
  if (qkvctl_interrupted(&job->error) != 0) return false;
  qkv_progress_add(&job->progress, page->bytes);
  return qkvctl_target_page(job->target, page, &job->error) == 0;
}

static bool pass_rows(void *context, const qkv_client_rows *rows) {
  copy_job *job = context;
  if (qkvctl_interrupted(&job->error) != 0) return false;
  qkv_progress_add(&job->progress, rows->k.bytes + rows->v.bytes);
  return qkvctl_target_rows(job->target, rows, &job->error) == 0;
}

static qkv_code ask_rows(void *context, uint32_t layer, uint64_t begin, uint64_t end,
                         const qkv_client_coded_receiver *to, qkv_call_error *error) {
  const copy_job *job = context;
  const qkv_client_fetch request = {
      .session = job->source.info->session, .layers = &layer, .layer_count = 1, .begin = begin, .end = end};
  return qkv_client_fetch_pages(job->from, &request, to, error);
}

static qkv_code copy_layer(copy_job *job, uint32_t layer, qkv_call_error *error) {
  const Qkv__V1__SessionInfo *info = job->source.info;
  const qkv_client_coded_receiver to = {pass_page, pass_rows, job};
  const qkv_client_fetch request = {.session = info->session,
                                    .layers = &layer,
                                    .layer_count = 1,
                                    .begin = qkvctl_target_length(job->target, layer),
                                    .end = info->lengths[layer]};
  if (request.begin >= request.end) return 0;
  qkv_code code = qkv_client_fetch_pages(job->from, &request, &to, error);
  if (code == 0) code = qkvctl_target_flush(job->target, &job->error);
  if (job->error.code != 0) *error = job->error;
  return job->error.code != 0 ? job->error.code : code;
}

static int copy_layers(copy_job *job) {
  char what[160];
  qkv_call_error error = {0};
  const Qkv__V1__SessionInfo *info = job->source.info;
  snprintf(what, sizeof what, "copying %s", info->session);
  qkv_progress_start(&job->progress, what, info->bytes_coded + info->bytes_exact);
  qkv_code code = 0;
  for (uint32_t layer = 0; layer < info->n_lengths && code == 0; layer++) code = copy_layer(job, layer, &error);
  qkv_progress_end(&job->progress);
  if (code == 0) return QKV_EXIT_OK;
  return qkvctl_incomplete(&error, job->name);
}

static int report(const copy_job *job, const qkvctl_values *values) {
  char bytes[QKV_HUMAN_MAX];
  const qkvctl_target_totals totals = qkvctl_target_totals_of(job->target);
  if (values->program.json) {
    json_t *line = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I}", "session", job->name, "to", values->to, "model",
                             job->source.info->model, "rows", (json_int_t)totals.tokens, "pages",
                             (json_int_t)totals.pages, "bytes", (json_int_t)totals.bytes);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: %" PRIu64 " rows copied to %s, %" PRIu64 " pages, %s\n", job->name, totals.tokens, values->to,
         totals.pages, qkv_human_bytes(totals.bytes, bytes));
  return QKV_EXIT_OK;
}

static int copy(copy_job *job, const qkvctl_values *values, const char *session) {
  qkv_call_error error = {0};
  qkv_error misused = {0};
  int durability = 0;
  if (qkvi_durability_parse(values->durability, &durability, &misused) != QKV_OK)
    return qkv_program_misused("%s", misused.text);
  if (qkvi_coded_session_get(job->from, session, &job->source, &error) != 0 ||
      qkvctl_source_ids(job->from, session, &job->ids, &job->id_count, &error) != 0)
    return qkv_program_failed("%s", error.text);
  if (job->source.info->n_lengths != job->source.model->model->layers)
    return qkv_program_failed("session %s has %zu layers, its model has %" PRIu32, session,
                              job->source.info->n_lengths, job->source.model->model->layers);
  job->name = values->session != NULL ? values->session : session;
  const qkvctl_target_config config = {.client = job->to,
                                       .session = job->name,
                                       .model = job->source.model->model,
                                       .info = job->source.info,
                                       .durability = durability,
                                       .salt = values->salt,
                                       .token_ids = job->ids,
                                       .token_count = job->id_count,
                                       .calibration = ask_calibration,
                                       .rows = ask_rows,
                                       .context = job};
  qkv_interrupt_catch();
  if (qkvctl_target_open(&config, &job->target, &error) != 0) return qkv_program_failed("%s", error.text);
  const int status = copy_layers(job);
  return status == QKV_EXIT_OK ? report(job, values) : status;
}

int qkvctl_copy(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  if (values->to == NULL) return qkv_program_misused("copy needs --to ADDRESS");
  qkvctl_values target = *values;
  target.program.target = (char *)(uintptr_t)values->to;
  copy_job job = {.from = qkvctl_connect(values)};
  if (job.from == NULL) return QKV_EXIT_FAILED;
  job.aside = qkvctl_connect(values);
  if (job.aside != NULL) job.to = qkvctl_connect(&target);
  const int status = job.to == NULL ? QKV_EXIT_FAILED : copy(&job, values, arguments->items[0]);
  qkvctl_target_close(&job.target);
  qkvi_coded_session_free(&job.source);
  free(job.ids);
  qkv_client_close(&job.to);
  qkv_client_close(&job.aside);
  qkv_client_close(&job.from);
  return status;
}
