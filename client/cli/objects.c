// qkvctl objects, put-object, get-object, rm-object: opaque objects and files.
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "client/cli/cli.h"
#include "client/common/durability.h"
#include "client/common/file.h"
#include "client/common/terminal.h"
#include "qkv/v1/objects.pb-c.h"

static char *text_or_empty(const char *text) {
  return (char *)(uintptr_t)(text == NULL ? "" : text);
}

// ---- objects ----

static void add_object(qkv_table *table, const Qkv__V1__ObjectInfo *info) {
  char bytes[QKV_HUMAN_MAX], memory[QKV_HUMAN_MAX], idle[QKV_HUMAN_MAX];
  qkv_table_cell(table, "%s", info->object);
  qkv_table_cell(table, "%s", qkv_human_bytes(info->bytes, bytes));
  qkv_table_cell(table, "%s", qkv_human_bytes(info->bytes_in_memory, memory));
  qkv_table_cell(table, "%s", info->retention == QKV__V1__RETENTION__RETENTION_EVICT ? "evict" : "keep");
  qkv_table_cell(table, "%s", qkvi_durability_name((int)info->durability));
  qkv_table_cell(table, "%016" PRIx64, info->checksum);
  qkv_table_cell(table, "%s", qkv_human_age(info->last_used_unix_ms, idle));
}

static json_t *object_json(const Qkv__V1__ObjectInfo *info) {
  char checksum[17];
  (void)snprintf(checksum, sizeof checksum, "%016" PRIx64, info->checksum);
  return json_pack(
      "{s:s, s:s, s:I, s:I, s:s, s:s, s:b, s:I, s:I, s:I}", "object", info->object, "tenant", info->tenant, "bytes",
      (json_int_t)info->bytes, "bytes_in_memory", (json_int_t)info->bytes_in_memory, "checksum", checksum,
      "durability", qkvi_durability_name((int)info->durability), "evictable",
      info->retention == QKV__V1__RETENTION__RETENTION_EVICT, "ttl_ms", (json_int_t)info->ttl_ms, "created_unix_ms",
      (json_int_t)info->created_unix_ms, "last_used_unix_ms", (json_int_t)info->last_used_unix_ms);
}

// All pages of the list; into `table`, or as JSON lines where it is NULL.
static int list_objects(qkv_client *client, const qkvctl_values *values, qkv_table *table) {
  char token[QKVCTL_PAGE_TOKEN_BYTES] = "";
  Qkv__V1__ListObjectsRequest request = QKV__V1__LIST_OBJECTS_REQUEST__INIT;
  request.prefix = text_or_empty(values->prefix);
  request.page_token = token;
  bool written = true;
  do {
    ProtobufCMessage *answer = NULL;
    qkv_call_error error = {0};
    if (qkv_client_call_message(client, "/qkv.v1.Objects/ListObjects", &request.base,
                                &qkv__v1__list_objects_response__descriptor, &answer, &error) != 0)
      return qkv_program_failed("%s", error.text);
    const Qkv__V1__ListObjectsResponse *list = (const Qkv__V1__ListObjectsResponse *)answer;
    for (size_t i = 0; i < list->n_objects && written; i++) {
      if (table != NULL) {
        add_object(table, list->objects[i]);
      } else {
        written = qkv_json_figures(object_json(list->objects[i]));
      }
    }
    const int next = qkvctl_next_page(list->next_page_token, token);
    protobuf_c_message_free_unpacked(answer, NULL);
    if (next != QKV_EXIT_OK) return next;
  } while (written && token[0] != '\0');
  return written ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

int qkvctl_objects(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  static const char *const headings[] = {"OBJECT",     "BYTES",    "IN MEMORY", "RETENTION",
                                         "DURABILITY", "CHECKSUM", "IDLE"};
  const qkvctl_values *values = values_in;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  qkv_table *table = values->program.json ? NULL : qkv_table_create(sizeof headings / sizeof *headings);
  for (size_t i = 0; i < sizeof headings / sizeof *headings && table != NULL; i++)
    qkv_table_cell(table, "%s", headings[i]);
  const int status = list_objects(client, values, table);
  if (table != NULL && status == QKV_EXIT_OK) qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  qkv_client_close(&client);
  return status;
}

// ---- put-object ----

static qkv_status read_file(const char *path, void **data, size_t *bytes, qkv_error *error) {
  FILE *file = fopen(path, "rbe");
  struct stat status;
  if (file == NULL) return qkv_fail(error, QKV_NOT_FOUND, "%s: %s", path, strerror(errno));
  qkv_status result = QKV_OK;
  if (fstat(fileno(file), &status) != 0 || !S_ISREG(status.st_mode))
    result = qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no ordinary file", path);
  *bytes = result == QKV_OK ? (size_t)status.st_size : 0;
  *data = malloc(*bytes + 1);
  if (*data == NULL) abort();
  if (result == QKV_OK && fread(*data, 1, *bytes, file) != *bytes)
    result = qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", path, strerror(errno));
  (void)fclose(file);
  if (result == QKV_OK) return QKV_OK;
  free(*data);
  *data = NULL;
  return result;
}

int qkvctl_put_object(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  qkv_error wrong = {0};
  qkv_call_error error = {0};
  qkv_client_object object = {.name = arguments->items[0], .evictable = values->evict, .replace = values->replace};
  if (qkvi_durability_parse(values->durability, &object.durability, &wrong) != QKV_OK)
    return qkv_program_misused("%s", wrong.text);
  if (read_file(arguments->items[1], &object.data, &object.bytes, &wrong) != QKV_OK)
    return qkv_program_failed("%s", wrong.text);
  qkv_client *client = qkvctl_connect(values);
  int status = client == NULL ? QKV_EXIT_FAILED : QKV_EXIT_OK;
  if (client != NULL && qkv_client_put_objects(client, &(qkv_client_objects){&object, 1}, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  if (status == QKV_EXIT_OK && values->program.json &&
      !qkv_json_line(json_pack("{s:s, s:I}", "object", object.name, "bytes", (json_int_t)object.bytes)))
    status = QKV_EXIT_FAILED;
  qkv_client_close(&client);
  free(object.data);
  return status;
}

// ---- get-object ----

static int get_object(const qkvctl_values *values, qkv_client *client, qkv_client_object *object) {
  const qkv_client_objects one = {object, 1};
  qkv_call_error error = {0};
  qkv_error wrong = {0};
  if (qkv_client_has_objects(client, &one, false, &error) != 0) return qkv_program_failed("%s", error.text);
  if (object->bytes > 0) {
    object->capacity = object->bytes;
    object->data = malloc(object->bytes);
    if (object->data == NULL) abort();
    if (qkv_client_get_objects(client, &one, &error) != 0) return qkv_program_failed("%s", error.text);
  }
  if (object->bytes == 0) return qkv_program_failed("no object %s", object->name);
  if (object->bytes > object->capacity) return qkv_program_failed("object %s was replaced meanwhile", object->name);
  if (qkv_file_write(values->output, object->data, object->bytes, &wrong) != QKV_OK)
    return qkv_program_failed("%s", wrong.text);
  if (!values->program.json) return QKV_EXIT_OK;
  json_t *line = json_pack("{s:s, s:I}", "object", object->name, "bytes", (json_int_t)object->bytes);
  return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

int qkvctl_get_object(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  qkv_client_object object = {.name = arguments->items[0]};
  if (values->output == NULL) return qkv_program_misused("--output is missing: the file that the bytes go to");
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  const int status = get_object(values, client, &object);
  qkv_client_close(&client);
  free(object.data);
  return status;
}

// ---- rm-object ----

int qkvctl_rm_object(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const size_t count = arguments->count;
  qkv_client_object *objects = calloc(count, sizeof *objects);
  if (objects == NULL) abort();
  for (size_t i = 0; i < count; i++) objects[i].name = arguments->items[i];
  qkv_call_error error = {0};
  size_t deleted = 0;
  qkv_client *client = qkvctl_connect(values);
  int status = client == NULL ? QKV_EXIT_FAILED : QKV_EXIT_OK;
  if (client != NULL &&
      qkv_client_delete_objects(client, &(qkv_client_objects){objects, count}, &deleted, &error) != 0) {
    status = qkv_program_failed("%s", error.text);
  } else if (client != NULL && values->program.json &&
             !qkv_json_line(json_pack("{s:I}", "deleted", (json_int_t)deleted))) {
    status = QKV_EXIT_FAILED;
  } else if (client != NULL && deleted < count) {
    status = qkv_program_failed("%zu of %zu objects were not there", count - deleted, count);
  }
  qkv_client_close(&client);
  free(objects);
  return status;
}
