// qkvctl load: a session from a safetensors file, as qkvctl fetch writes it.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/cli/session_file.h"
#include "client/common/durability.h"
#include "client/common/interrupt.h"
#include "client/common/terminal.h"
#include "client/format/safetensors.h"

// Rows of one append: large enough to be quick, small enough for any daemon's message limit.
enum { CHUNK_BYTES = 8 << 20 };
// Who has interrupted the program waits no longer than this for the session to be closed.
enum { CLOSE_MS = 5000 };

typedef struct layer_rows {
  uint32_t layer;
  const qkv_safetensors_tensor *k, *v;
} layer_rows;

typedef struct load_job {
  qkv_client *client;
  const char *session, *model;
  qkv_safetensors *file;
  layer_rows *layers;
  size_t count;
  uint64_t first_position;
  bool heads_first, before_rope;
  uint64_t rows, bytes;  // over all layers
  int durability;        // as in qkv_session_options
  int64_t timeout_ms;
} load_job;

// ---- the file ----

// Checks a layer's two tensors; they have *tokens rows.
static qkv_status check_pair(const load_job *job, const layer_rows *rows, uint64_t *tokens, qkv_error *error) {
  const int token_axis = job->heads_first ? 1 : 0;
  for (int part = 0; part < 2; part++) {
    const qkv_safetensors_tensor *tensor = part == 0 ? rows->k : rows->v;
    if (tensor == NULL) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "layers.%" PRIu32 ".%c is missing", rows->layer, "kv"[part]);
    }
    if (tensor->rank == 3 && tensor->dims[0] >= 1 && tensor->dims[1] >= 1 && tensor->dims[2] >= 1) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s must have 3 dims, none of them 0", tensor->name);
  }
  assert(rows->k != NULL && rows->v != NULL);
  if (rows->k->dims[token_axis] != rows->v->dims[token_axis]) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has %" PRId64 " tokens, %s has %" PRId64, rows->k->name,
                    rows->k->dims[token_axis], rows->v->name, rows->v->dims[token_axis]);
  }
  *tokens = (uint64_t)rows->k->dims[token_axis];
  return QKV_OK;
}

// "layers.12.k" gives 12 and 'k'.
static bool parse_name(const char *name, uint32_t *layer, char *part) {
  static const char prefix[] = "layers.";
  const char *number = name + sizeof prefix - 1;
  if (strncmp(name, prefix, sizeof prefix - 1) != 0 || number[0] < '0' || number[0] > '9') return false;
  char *end = NULL;
  unsigned long value = strtoul(number, &end, 10);
  if (value > UINT32_MAX || end[0] != '.' || (end[1] != 'k' && end[1] != 'v') || end[2] != '\0') return false;
  *layer = (uint32_t)value;
  *part = end[1];
  return true;
}

static layer_rows *find_layer(load_job *job, uint32_t layer) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->layers[i].layer == layer) return &job->layers[i];
  }
  job->layers[job->count] = (layer_rows){.layer = layer};
  return &job->layers[job->count++];
}

// Whether the metadata `key` is `second`: it is one of the two words, or absent, which means `first`.
static qkv_status read_choice(const load_job *job, const char *key, const char *first, const char *second,
                              bool *is_second, qkv_error *error) {
  const char *word = qkv_safetensors_metadata(job->file, key);
  *is_second = word != NULL && strcmp(word, second) == 0;
  if (word == NULL || *is_second || strcmp(word, first) == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "its %s is \"%.32s\", allowed are %s and %s", key, word, first,
                  second);
}

static qkv_status read_metadata(load_job *job, qkv_error *error) {
  const char *position = qkv_safetensors_metadata(job->file, "first_position");
  if (position != NULL) QKV_TRY(qkvctl_parse_position(position, "first_position", &job->first_position, error));
  QKV_TRY(read_choice(job, "layout", "tokens_first", "heads_first", &job->heads_first, error));
  return read_choice(job, "rope", "after", "before", &job->before_rope, error);
}

static qkv_status read_layers(load_job *job, qkv_error *error) {
  size_t count = qkv_safetensors_count(job->file);
  job->layers = calloc(count + 1, sizeof *job->layers);
  assert(job->layers != NULL);
  for (size_t i = 0; i < count; i++) {
    const qkv_safetensors_tensor *tensor = qkv_safetensors_at(job->file, i);
    uint32_t layer = 0;
    char part = '\0';
    if (!parse_name(tensor->name, &layer, &part)) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds \"%.64s\"; a session has layers.N.k and layers.N.v",
                      tensor->name);
    }
    layer_rows *rows = find_layer(job, layer);
    const qkv_safetensors_tensor **place = part == 'k' ? &rows->k : &rows->v;
    if (*place != NULL)  // "layers.01.k"
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds %.64s and %.64s", (*place)->name, tensor->name);
    *place = tensor;
    job->bytes += tensor->bytes;
  }
  if (count == 0) return qkv_fail(error, QKV_INVALID_ARGUMENT, "it holds no tensors");
  for (size_t i = 0; i < job->count; i++) {
    uint64_t tokens = 0;
    QKV_TRY(check_pair(job, &job->layers[i], &tokens, error));
    job->rows += tokens;
  }
  return QKV_OK;
}

// ---- the session ----

// Tokens [first, first + count) of a tensor, as it lies in the file.
static qkv_client_tensor slice(const load_job *job, const qkv_safetensors_tensor *tensor, int64_t first,
                               int64_t count) {
  int64_t element = (int64_t)qkv_dtype_size(tensor->dtype);
  int64_t dim = tensor->dims[2];
  int64_t heads = tensor->dims[job->heads_first ? 0 : 1];
  int64_t row = dim * element;
  int64_t token_stride = job->heads_first ? row : heads * row;
  int64_t head_stride = job->heads_first ? tensor->dims[1] * row : row;
  return (qkv_client_tensor){
      .dtype = (int)tensor->dtype,
      .rank = 3,
      .dims = {count, heads, dim},
      .strides = {token_stride, head_stride, element},
      .data = (const uint8_t *)tensor->data + first * token_stride,
      .bytes = tensor->bytes - (size_t)(first * token_stride),
  };
}

static qkv_code append_layer(const load_job *job, const layer_rows *rows, qkv_progress *progress,
                             qkv_call_error *error) {
  assert(rows->k != NULL && rows->v != NULL);  // check_pair has seen them
  int64_t tokens = rows->k->dims[job->heads_first ? 1 : 0];
  size_t token_bytes = (rows->k->bytes + rows->v->bytes) / (size_t)tokens;
  int64_t chunk = CHUNK_BYTES / (int64_t)token_bytes;
  if (chunk < 1) chunk = 1;
  for (int64_t first = 0; first < tokens; first += chunk) {
    int64_t count = tokens - first < chunk ? tokens - first : chunk;
    qkv_client_item item = {
        .session = job->session,
        .layer = rows->layer,
        .position = job->first_position + (uint64_t)first,
        .k_before_rope = job->before_rope,
        .k = slice(job, rows->k, first, count),
        .v = slice(job, rows->v, first, count),
    };
    qkv_code code = qkvctl_interrupted(error);
    if (code == 0) code = qkv_client_append(job->client, &item, 1, NULL, error);
    if (code != 0) return code;
    qkv_progress_add(progress, (uint64_t)count * token_bytes);
  }
  return 0;
}

static qkv_code open_session(const load_job *job, const qkvctl_values *values, qkv_call_error *error) {
  qkv_client_policy policy = {.bits_k = values->bits_k, .bits_v = values->bits_v, .recent_window = -1};
  qkv_session_options options = {
      .evict = values->evict,
      .session = job->session,
      .model = job->model,
      .purpose = strcmp(values->purpose, "fetch") == 0 ? 2 : 1,
      .policy = &policy,
      .first_position = job->first_position,
      .keep_full = values->keep_full ? 1 : 0,
      .durability = job->durability,
  };
  options.salt = values->salt;
  options.salt_bytes = values->salt == NULL ? 0 : strlen(values->salt);
  // What libqkv takes for "none" and for "the daemon's" are the other way round.
  if (values->tier_bits >= 0) options.tier_bits = values->tier_bits == 0 ? -1 : values->tier_bits;
  return qkv_client_open_session(job->client, &options, error);
}

// A session that could not be filled is closed again: half a cache would give wrong answers later.
static int fill_session(const load_job *job) {
  char what[160];
  qkv_progress progress;
  qkv_call_error error = {0};
  snprintf(what, sizeof what, "loading %s", job->session);
  qkv_progress_start(&progress, what, job->bytes);
  qkv_code code = 0;
  for (size_t i = 0; i < job->count && code == 0; i++) code = append_layer(job, &job->layers[i], &progress, &error);
  qkv_progress_end(&progress);
  if (code == 0) return QKV_EXIT_OK;
  qkv_call_error left = {0};
  if (qkv_interrupted() && job->timeout_ms > CLOSE_MS) qkv_client_set_timeout(job->client, CLOSE_MS);
  if (qkv_client_close_session(job->client, job->session, NULL, &left) == 0 || left.code == QKV_NOT_FOUND)
    return qkv_program_failed("%s (the session was closed again)", error.text);
  return qkv_program_failed("%s (session %s is incomplete and still to be closed: %.200s)", error.text, job->session,
                            left.text);
}

// A file of fetch leaves out layers that have no rows in its range, and those that --layers does not name.
static bool is_missing(const load_job *job, uint32_t layer) {
  for (size_t i = 0; i < job->count; i++) {
    if (job->layers[i].layer == layer) return false;
  }
  return true;
}

static json_t *missing_json(const load_job *job, uint32_t layers) {
  json_t *list = json_array();
  for (uint32_t i = 0; i < layers; i++) {
    if (is_missing(job, i)) json_array_append_new(list, json_integer(i));
  }
  return list;
}

// As --layers takes them: "0,2-5".
static void print_missing(const load_job *job, uint32_t layers) {
  const char *before = "; the file has no rows for layers ";
  for (uint32_t i = 0, end; i < layers; i = end) {
    for (end = i; end < layers && is_missing(job, end);) end++;
    if (end == i) {
      end++;
      continue;
    }
    printf("%s%" PRIu32, before, i);
    if (end - i > 1) printf("-%" PRIu32, end - 1);
    before = ",";
  }
  if (layers > job->count) printf(" of 0-%" PRIu32 ": they are empty", layers - 1);
}

static int report(const load_job *job, bool json) {
  char bytes[QKV_HUMAN_MAX];
  qkv_client_session_info info;
  qkv_call_error error = {0};
  if (qkv_client_get_session(job->client, job->session, &info, &error) != 0)
    return qkv_program_failed("%s", error.text);
  qkv_free(info.lengths);
  if (json) {
    json_t *line = json_pack("{s:s, s:s, s:I, s:o, s:I, s:I}", "session", job->session, "model", job->model, "layers",
                             (json_int_t)job->count, "missing_layers", missing_json(job, info.layers), "rows",
                             (json_int_t)job->rows, "bytes", (json_int_t)job->bytes);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  printf("%s: %" PRIu64 " rows of %zu layers, %s", job->session, job->rows, job->count,
         qkv_human_bytes(job->bytes, bytes));
  print_missing(job, info.layers);
  putchar('\n');
  return QKV_EXIT_OK;
}

static int load(load_job *job, const qkvctl_values *values) {
  qkv_call_error error = {0};
  qkv_error misused = {0};
  if (qkvi_durability_parse(values->durability, &job->durability, &misused) != QKV_OK)
    return qkv_program_misused("%s", misused.text);
  job->client = qkvctl_connect(values);
  if (job->client == NULL) return QKV_EXIT_FAILED;
  job->timeout_ms = values->program.timeout_ms;
  qkv_interrupt_catch();
  if (open_session(job, values, &error) != 0) return qkv_program_failed("%s", error.text);
  int status = fill_session(job);
  return status == QKV_EXIT_OK ? report(job, values->program.json) : status;
}

static int check_values(load_job *job, const qkvctl_values *values) {
  job->session = values->session != NULL ? values->session : qkv_safetensors_metadata(job->file, "session");
  job->model = values->model != NULL ? values->model : qkv_safetensors_metadata(job->file, "model");
  if (job->session == NULL) return qkv_program_misused("the file names no session; give --session NAME");
  if (job->model == NULL) return qkv_program_misused("the file names no model; give --model NAME");
  if (strcmp(values->purpose, "attend") != 0 && strcmp(values->purpose, "fetch") != 0) {
    return qkv_program_misused("--purpose is \"%s\", allowed are attend and fetch", values->purpose);
  }
  return QKV_EXIT_OK;
}

// An option that was given although a session that comes as pages has what it is about; NULL: none.
static const char *not_of_coded(const qkvctl_values *values) {
  const struct {
    const char *name;
    bool given;
  } options[] = {{"model", values->model != NULL},
                 {"purpose", strcmp(values->purpose, "attend") != 0},
                 {"bits-k", values->bits_k != 0},
                 {"bits-v", values->bits_v != 0},
                 {"tier-bits", values->tier_bits >= 0},
                 {"keep-full", values->keep_full},
                 {"evict", values->evict}};
  for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
    if (options[i].given) return options[i].name;
  }
  return NULL;
}

int qkvctl_load(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *path = arguments->items[0];
  load_job job = {0};
  qkv_error error = {0};
  if (qkvctl_session_file_is(path)) {
    const char *option = not_of_coded(values);
    if (option == NULL) return qkvctl_load_coded(values, path);
    return qkv_program_misused("--%s is of a file of rows; %s is one of fetch --coded, whose session has its own",
                               option, path);
  }
  if (qkv_safetensors_open(path, &job.file, &error) != QKV_OK) return qkv_program_failed("%s", error.text);
  int status = QKV_EXIT_OK;
  if (read_metadata(&job, &error) != QKV_OK || read_layers(&job, &error) != QKV_OK) {
    status = qkv_program_failed("%s is no session's file: %s", path, error.text);
  }
  if (status == QKV_EXIT_OK) status = check_values(&job, values);
  if (status == QKV_EXIT_OK) status = load(&job, values);
  qkv_client_close(&job.client);
  free(job.layers);
  qkv_safetensors_close(&job.file);
  return status;
}
