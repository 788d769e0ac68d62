// qkvctl sessions, session, rm, truncate and fork.
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/durability.h"
#include "client/common/terminal.h"
#include "qkv/v1/kv_cache.pb-c.h"

static char *text_or_empty(const char *text) {
  return (char *)(uintptr_t)(text == NULL ? "" : text);
}

static const char *purpose_name(int purpose) {
  return purpose == QKV__V1__PURPOSE__PURPOSE_FETCH ? "fetch" : "attend";
}

// ---- sessions ----

static json_t *listed_json(const Qkv__V1__SessionInfo *info) {
  return json_pack("{s:s, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:I, s:I, s:I, s:f, s:f}", "session",
                   info->session, "model", info->model, "tenant", info->tenant, "purpose",
                   purpose_name((int)info->purpose), "first_position", (json_int_t)info->first_position,
                   "tokens_coded", (json_int_t)info->tokens_coded, "tokens_exact", (json_int_t)info->tokens_exact,
                   "bytes_coded", (json_int_t)info->bytes_coded, "bytes_exact", (json_int_t)info->bytes_exact,
                   "bytes_fp16", (json_int_t)info->bytes_fp16, "bits_per_coordinate", info->bits_per_coordinate,
                   "created_unix_ms", (json_int_t)info->created_unix_ms, "last_used_unix_ms",
                   (json_int_t)info->last_used_unix_ms, "calibration", (json_int_t)info->calibration, "watched_error",
                   info->watched_error, "watched_error_data_free", info->watched_error_data_free);
}

static void add_session(qkv_table *table, const Qkv__V1__SessionInfo *info) {
  char held[QKV_HUMAN_MAX], plain[QKV_HUMAN_MAX], idle[QKV_HUMAN_MAX];
  qkv_table_cell(table, "%s", info->session);
  qkv_table_cell(table, "%s", info->model);
  qkv_table_cell(table, "%s", info->tenant);
  qkv_table_cell(table, "%s", purpose_name((int)info->purpose));
  qkv_table_cell(table, "%" PRIu64, info->tokens_coded + info->tokens_exact);
  qkv_table_cell(table, "%s", qkv_human_bytes(info->bytes_coded + info->bytes_exact, held));
  qkv_table_cell(table, "%s", qkv_human_bytes(info->bytes_fp16, plain));
  if (info->calibration == 0) {
    qkv_table_cell(table, "none");
  } else {
    qkv_table_cell(table, "%08" PRIx32, info->calibration);
  }
  if (info->watched_error > 0) {
    qkv_table_cell(table, "%.2g", info->watched_error);
  } else {
    qkv_table_cell(table, "-");
  }
  qkv_table_cell(table, "%s", qkv_human_age(info->last_used_unix_ms, idle));
}

static qkv_table *session_table(void) {
  // Tokens are counted over all layers.
  static const char *const headings[] = {"SESSION", "MODEL",   "TENANT",      "PURPOSE", "ROWS",
                                         "HELD",    "AS FP16", "CALIBRATION", "ERROR",   "IDLE"};
  qkv_table *table = qkv_table_create(sizeof headings / sizeof *headings);
  for (size_t i = 0; i < sizeof headings / sizeof *headings; i++) qkv_table_cell(table, "%s", headings[i]);
  return table;
}

static bool show_page(const Qkv__V1__ListSessionsResponse *list, qkv_table *table) {
  for (size_t i = 0; i < list->n_sessions; i++) {
    if (table != NULL) {
      add_session(table, list->sessions[i]);
    } else if (!qkv_json_figures(listed_json(list->sessions[i]))) {
      return false;
    }
  }
  return true;
}

// All pages of the list; into `table`, or as JSON lines where it is NULL.
static int list_sessions(qkv_client *client, const qkvctl_values *values, qkv_table *table) {
  char token[QKVCTL_PAGE_TOKEN_BYTES] = "";
  Qkv__V1__ListSessionsRequest request = QKV__V1__LIST_SESSIONS_REQUEST__INIT;
  request.prefix = text_or_empty(values->prefix);
  request.model = text_or_empty(values->model);
  request.page_token = token;
  bool written = true;
  do {
    ProtobufCMessage *answer = NULL;
    qkv_call_error error = {0};
    if (qkv_client_call_message(client, "/qkv.v1.KvCache/ListSessions", &request.base,
                                &qkv__v1__list_sessions_response__descriptor, &answer, &error) != 0) {
      return qkv_program_failed("%s", error.text);
    }
    const Qkv__V1__ListSessionsResponse *list = (const Qkv__V1__ListSessionsResponse *)answer;
    written = show_page(list, table);
    const int next = qkvctl_next_page(list->next_page_token, token);
    protobuf_c_message_free_unpacked(answer, NULL);
    if (next != QKV_EXIT_OK) return next;
  } while (written && token[0] != '\0');
  return written ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

int qkvctl_sessions(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvctl_values *values = values_in;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  qkv_table *table = values->program.json ? NULL : session_table();
  int status = list_sessions(client, values, table);
  if (table != NULL && status == QKV_EXIT_OK) qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  qkv_client_close(&client);
  return status;
}

// ---- session ----

static void add_storage_json(const qkv_client_session_info *info, json_t *object) {
  json_object_set_new(object, "durability", json_string(qkvi_durability_name(info->durability)));
  json_object_set_new(object, "tokens_cold", json_integer((json_int_t)info->tokens_cold));
  json_object_set_new(object, "evictable", json_boolean(info->evictable));
  json_object_set_new(object, "bytes_stored", json_integer((json_int_t)info->bytes_stored));
  json_object_set_new(object, "bytes_shared", json_integer((json_int_t)info->bytes_shared));
  if (info->durable == NULL) return;
  json_t *durable = json_array();
  for (uint32_t i = 0; i < info->layers; i++)
    json_array_append_new(durable, json_integer((json_int_t)info->durable[i]));
  json_object_set_new(object, "durable", durable);
}

static json_t *session_json(const qkv_client_session_info *info) {
  json_t *lengths = json_array();
  for (uint32_t i = 0; i < info->layers; i++) {
    json_array_append_new(lengths, json_integer((json_int_t)info->lengths[i]));
  }
  json_t *tiers = json_pack("{s:I, s:f, s:b}", "bytes_overhead", (json_int_t)info->bytes_overhead, "tier_bits",
                            info->tier_bits, "keep_full", (int)info->keep_full);
  json_t *object = json_pack(
      "{s:s, s:s, s:s, s:s, s:f, s:f, s:I, s:I, s:o, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f, s:I, s:I, s:I, s:I}",
      "session", info->session, "model", info->model, "tenant", info->tenant, "purpose", purpose_name(info->purpose),
      "bits_k", info->bits_k, "bits_v", info->bits_v, "recent_window", (json_int_t)info->recent_window,
      "first_position", (json_int_t)info->first_position, "lengths", lengths, "tokens_coded",
      (json_int_t)info->tokens_coded, "tokens_exact", (json_int_t)info->tokens_exact, "bytes_coded",
      (json_int_t)info->bytes_coded, "bytes_exact", (json_int_t)info->bytes_exact, "bytes_fp16",
      (json_int_t)info->bytes_fp16, "bits_per_coordinate", info->bits_per_coordinate, "max_attention_error",
      info->max_attention_error, "attention_error", info->attention_error, "contract_pages",
      (json_int_t)info->contract_pages, "contract_missed", (json_int_t)info->contract_missed, "created_unix_ms",
      (json_int_t)info->created_unix_ms, "last_used_unix_ms", (json_int_t)info->last_used_unix_ms);
  json_t *coding =
      json_pack("{s:I, s:I, s:f, s:f}", "calibration", (json_int_t)info->calibration, "calibration_since_unix_ms",
                (json_int_t)info->calibration_since_unix_ms, "watched_error", info->watched_error,
                "watched_error_data_free", info->watched_error_data_free);
  json_object_update(object, tiers);
  json_object_update(object, coding);
  json_decref(coding);
  json_decref(tiers);
  add_storage_json(info, object);
  return object;
}

// Neighbouring layers of the same length share a line.
static void print_lengths(const qkv_client_session_info *info) {
  for (uint32_t first = 0; first < info->layers;) {
    uint32_t last = first;
    while (last + 1 < info->layers && info->lengths[last + 1] == info->lengths[first]) last++;
    char layers[32];
    if (first == last) {
      snprintf(layers, sizeof layers, "layer %" PRIu32, first);
    } else {
      snprintf(layers, sizeof layers, "layers %" PRIu32 "-%" PRIu32, first, last);
    }
    printf("%-15s positions %" PRIu64 " to %" PRIu64 "\n", layers, info->first_position, info->lengths[first]);
    first = last + 1;
  }
}

static void print_storage(const qkv_client_session_info *info) {
  char stored[QKV_HUMAN_MAX];
  uint64_t least = info->durable[0];
  for (uint32_t i = 1; i < info->layers; i++) least = info->durable[i] < least ? info->durable[i] : least;
  printf("on the SSD      %s, %" PRIu64 " rows there alone, %s, durable up to position %" PRIu64 "\n",
         qkv_human_bytes(info->bytes_stored, stored), info->tokens_cold, qkvi_durability_name(info->durability),
         least);
}

static void print_coding(const qkv_client_session_info *info) {
  char since[QKV_HUMAN_MAX];
  if (info->calibration == 0) {
    printf("calibration     none, pages to come are data-free\n");
  } else {
    printf("calibration     %08" PRIx32 ", in force for %s\n", info->calibration,
           qkv_human_age(info->calibration_since_unix_ms, since));
  }
  if (info->watched_error > 0) {
    printf("attention       error of %.3g lately, data-free %.3g, on pages by themselves\n", info->watched_error,
           info->watched_error_data_free);
  }
}

static void print_session(const qkv_client_session_info *info) {
  char overhead[QKV_HUMAN_MAX], coded[QKV_HUMAN_MAX], exact[QKV_HUMAN_MAX], plain[QKV_HUMAN_MAX], made[QKV_HUMAN_MAX],
      idle[QKV_HUMAN_MAX];
  printf("session         %s\n", info->session);
  printf("model           %s\n", info->model);
  printf("tenant          %s\n", info->tenant);
  printf("purpose         %s\n", purpose_name(info->purpose));
  printf("bits            %.3g for keys, %.3g for values\n", info->bits_k, info->bits_v);
  printf("recent window   %" PRIu64 " tokens\n", info->recent_window);
  printf("coded           %" PRIu64 " rows, %s, %.3f bits per coordinate all in\n", info->tokens_coded,
         qkv_human_bytes(info->bytes_coded, coded), info->bits_per_coordinate);
  printf("overhead        %s%s\n", qkv_human_bytes(info->bytes_overhead, overhead),
         info->keep_full ? ", pages that lose bits are kept in full" : "");
  if (info->evictable) printf("retention       closed where memory, sessions or the SSD are full\n");
  if (info->durable != NULL) print_storage(info);
  if (info->tier_bits > 0) printf("tiers           towards %g bits on average, by attention\n", info->tier_bits);
  if (info->max_attention_error > 0) {
    printf("contract        attention error %.3g asked, %.3g on %" PRIu64 " pages, %" PRIu64 " of them missed it\n",
           info->max_attention_error, info->attention_error, info->contract_pages, info->contract_missed);
  }
  print_coding(info);
  printf("exact           %" PRIu64 " rows, %s\n", info->tokens_exact, qkv_human_bytes(info->bytes_exact, exact));
  printf("as fp16         %s\n", qkv_human_bytes(info->bytes_fp16, plain));
  printf("opened          %s ago, last used %s ago\n", qkv_human_age(info->created_unix_ms, made),
         qkv_human_age(info->last_used_unix_ms, idle));
  print_lengths(info);
}

int qkvctl_session(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  if (values->map) {
    const int drawn = qkvctl_draw_map(values, client, arguments->items[0]);
    qkv_client_close(&client);
    return drawn;
  }
  qkv_client_session_info info;
  qkv_call_error error = {0};
  int status = QKV_EXIT_OK;
  if (qkv_client_get_session(client, arguments->items[0], &info, &error) != 0) {
    status = qkv_program_failed("%s", error.text);
  } else if (values->program.json) {
    if (!qkv_json_figures(session_json(&info))) status = QKV_EXIT_FAILED;
  } else {
    print_session(&info);
  }
  qkv_free(info.lengths);
  qkv_client_close(&client);
  return status;
}

// ---- rm, truncate ----

static int sink_one(qkv_client *client, const char *session, bool json) {
  uint64_t freed = 0;
  qkv_call_error error = {0};
  char text[QKV_HUMAN_MAX];
  if (qkv_client_sink_session(client, session, &freed, &error) != 0) return qkv_program_failed("%s", error.text);
  if (!json) {
    printf("%s is on the SSD, %s freed\n", session, qkv_human_bytes(freed, text));
    return QKV_EXIT_OK;
  }
  json_t *line = json_pack("{s:s, s:I}", "session", session, "bytes_freed", (json_int_t)freed);
  return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int remove_one(qkv_client *client, const char *session, bool json) {
  uint64_t freed = 0;
  qkv_call_error error = {0};
  char text[QKV_HUMAN_MAX];
  if (qkv_client_close_session(client, session, &freed, &error) != 0) return qkv_program_failed("%s", error.text);
  if (!json) {
    printf("closed %s, %s freed\n", session, qkv_human_bytes(freed, text));
    return QKV_EXIT_OK;
  }
  json_t *line = json_pack("{s:s, s:I}", "session", session, "bytes_freed", (json_int_t)freed);
  return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

// One that fails does not keep the others.
static int each(const qkvctl_values *values, const qkv_option_list *arguments,
                int (*one)(qkv_client *client, const char *session, bool json)) {
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  int status = QKV_EXIT_OK;
  for (size_t i = 0; i < arguments->count; i++) {
    const int done = one(client, arguments->items[i], values->program.json);
    if (done != QKV_EXIT_OK) status = done;
  }
  qkv_client_close(&client);
  return status;
}

int qkvctl_rm(void *values, const qkv_option_list *arguments) {
  return each(values, arguments, remove_one);
}

int qkvctl_sink(void *values, const qkv_option_list *arguments) {
  return each(values, arguments, sink_one);
}

int qkvctl_fork(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *session = arguments->items[0], *fork = arguments->items[1];
  const uint64_t position = (uint64_t)values->position;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  qkv_call_error error = {0};
  int status = QKV_EXIT_OK;
  if (qkv_client_fork(client, session, fork, position, &error) != 0) {
    status = qkv_program_failed("%s", error.text);
  } else if (values->program.json) {
    json_t *line = json_pack("{s:s, s:s, s:I}", "session", session, "fork", fork, "position", (json_int_t)position);
    if (!qkv_json_line(line)) status = QKV_EXIT_FAILED;
  } else if (position == 0) {
    printf("%s has all that %s has\n", fork, session);
  } else {
    printf("%s has what %s has below position %" PRIu64 "\n", fork, session, position);
  }
  qkv_client_close(&client);
  return status;
}

int qkvctl_truncate(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *session = arguments->items[0];
  uint64_t position = 0;
  qkv_error misused = {0};
  if (qkvctl_parse_position(arguments->items[1], "POSITION", &position, &misused) != QKV_OK) {
    return qkv_program_misused("%s", misused.text);
  }
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  qkv_call_error error = {0};
  int status = QKV_EXIT_OK;
  if (qkv_client_truncate(client, session, position, &error) != 0) {
    status = qkv_program_failed("%s", error.text);
  } else if (values->program.json) {
    json_t *line = json_pack("{s:s, s:I}", "session", session, "position", (json_int_t)position);
    if (!qkv_json_line(line)) status = QKV_EXIT_FAILED;
  } else {
    printf("%s holds nothing from position %" PRIu64 " on\n", session, position);
  }
  qkv_client_close(&client);
  return status;
}
