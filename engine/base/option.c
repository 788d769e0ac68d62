#include "engine/base/option.h"

#include <assert.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/edit_distance.h"
#include "engine/base/option_internal.h"

#define LABEL_MAX 128  // bytes of "--name" or of an environment variable

static void *value_of(const qkv_options *options, const qkv_option *row) {
  return (char *)options->values + row->offset;
}

static size_t row_index(const qkv_options *options, const qkv_option *row) {
  return (size_t)(row - options->table);
}

const qkv_option *qkvi_option_find(const qkv_options *options, const char *name) {
  for (size_t i = 0; i < options->count; i++) {
    if (strcmp(options->table[i].name, name) == 0) return &options->table[i];
  }
  return NULL;
}

// ---- The closest name ----

const char *qkvi_option_closest(const qkv_options *options, const char *name) {
  const char *closest = options->table[0].name;
  size_t fewest = SIZE_MAX;
  for (size_t i = 0; i < options->count; i++) {
    size_t distance = qkv_edit_distance(name, options->table[i].name);
    if (distance < fewest) {
      fewest = distance;
      closest = options->table[i].name;
    }
  }
  return closest;
}

// ---- Values ----

static char *copy_text(const char *text, size_t length) {
  char *copy = strndup(text, length);
  assert(copy != NULL);
  return copy;
}

static void list_append(qkv_option_list *list, const char *text, size_t length) {
  const char **items = realloc(list->items, (list->count + 1) * sizeof *items);
  assert(items != NULL);
  items[list->count] = copy_text(text, length);
  list->items = items;
  list->count++;
}

static void list_clear(qkv_option_list *list) {
  for (size_t i = 0; i < list->count; i++) free((void *)list->items[i]);
  free((void *)list->items);
  *list = (qkv_option_list){0};
}

static void list_split(qkv_option_list *list, const char *text) {
  while (*text != '\0') {
    size_t length = strcspn(text, ",");
    if (length > 0) list_append(list, text, length);
    text += length;
    if (*text == ',') text++;
  }
}

static void store_list(qkv_options *options, const qkv_option *row, const char *text, qkv_option_source source) {
  qkv_option_list *list = value_of(options, row);
  bool one_item = source == QKV_FROM_FLAG || source == QKV_FROM_FILE;
  if (!one_item || options->sources[row_index(options, row)] != source) list_clear(list);
  if (one_item) {
    list_append(list, text, strlen(text));
  } else {
    list_split(list, text);
  }
}

static void store_string(qkv_options *options, const qkv_option *row, const char *text) {
  const char **string = value_of(options, row);
  free((void *)*string);
  *string = copy_text(text, strlen(text));
}

static void store_value(qkv_options *options, const qkv_option *row, const char *text, const qkvi_option_value *value,
                        qkv_option_source source) {
  void *place = value_of(options, row);
  switch (row->kind) {
    case QKV_OPTION_FLAG:
      *(bool *)place = value->flag;
      break;
    case QKV_OPTION_REAL:
      *(double *)place = value->real;
      break;
    case QKV_OPTION_INTEGER:
    case QKV_OPTION_BYTES:
    case QKV_OPTION_DURATION:
      *(int64_t *)place = value->integer;
      break;
    case QKV_OPTION_STRING:
      store_string(options, row, text);
      break;
    case QKV_OPTION_LIST:
      store_list(options, row, text, source);
      break;
  }
  options->sources[row_index(options, row)] = source;
}

qkv_status qkvi_option_store(qkv_options *options, const qkv_option *row, const char *label, const char *text,
                             qkv_option_source source, qkv_error *error) {
  qkvi_option_value value;
  QKV_TRY(qkvi_option_parse(row, label, text, &value, error));
  if (source >= options->sources[row_index(options, row)]) store_value(options, row, text, &value, source);
  return QKV_OK;
}

void qkvi_option_clear_list(qkv_options *options, const qkv_option *row, qkv_option_source source) {
  assert(row->kind == QKV_OPTION_LIST);
  if (source < options->sources[row_index(options, row)]) return;
  list_clear(value_of(options, row));
  options->sources[row_index(options, row)] = source;
}

// ---- The set ----

// Where there is no default text: false, 0, NULL, empty.
static void set_empty(void *place, qkv_option_kind kind) {
  switch (kind) {
    case QKV_OPTION_FLAG:
      *(bool *)place = false;
      break;
    case QKV_OPTION_REAL:
      *(double *)place = 0;
      break;
    case QKV_OPTION_INTEGER:
    case QKV_OPTION_BYTES:
    case QKV_OPTION_DURATION:
      *(int64_t *)place = 0;
      break;
    case QKV_OPTION_STRING:
      *(const char **)place = NULL;
      break;
    case QKV_OPTION_LIST:
      *(qkv_option_list *)place = (qkv_option_list){0};
      break;
  }
}

qkv_options *qkv_options_create(const qkv_option *table, size_t count, const char *environment_prefix, void *values) {
  assert(count > 0);
  qkv_options *options = calloc(1, sizeof *options);
  assert(options != NULL);
  *options =
      (qkv_options){.table = table, .count = count, .environment_prefix = environment_prefix, .values = values};
  options->sources = calloc(count, sizeof *options->sources);
  assert(options->sources != NULL);
  for (size_t i = 0; i < count; i++) {
    set_empty(value_of(options, &table[i]), table[i].kind);
    if (table[i].default_value == NULL) continue;
    qkv_status status =
        qkvi_option_store(options, &table[i], table[i].name, table[i].default_value, QKV_FROM_DEFAULT, NULL);
    assert(status == QKV_OK);
  }
  return options;
}

void qkv_options_destroy(qkv_options **options) {
  qkv_options *old = *options;
  if (old == NULL) return;
  for (size_t i = 0; i < old->count; i++) {
    void *place = value_of(old, &old->table[i]);
    if (old->table[i].kind == QKV_OPTION_STRING) free((void *)*(const char **)place);
    if (old->table[i].kind == QKV_OPTION_LIST) list_clear(place);
    set_empty(place, old->table[i].kind);
  }
  free((void *)old->positional.items);
  free(old->sources);
  free(old);
  *options = NULL;
}

qkv_option_source qkv_options_source(const qkv_options *options, const char *name) {
  const qkv_option *row = qkvi_option_find(options, name);
  assert(row != NULL);
  return options->sources[row_index(options, row)];
}

static void list_text(const qkv_option_list *list, char *text, size_t size) {
  size_t length = 0;
  text[0] = '\0';
  for (size_t i = 0; i < list->count && length < size; i++) {
    length += (size_t)snprintf(text + length, size - length, "%s%s", i > 0 ? "," : "", list->items[i]);
  }
}

void qkv_options_text(const qkv_options *options, size_t row, char *text, size_t size) {
  assert(row < options->count && size > 0);
  const qkv_option *option = &options->table[row];
  const void *place = value_of(options, option);
  switch (option->kind) {
    case QKV_OPTION_FLAG:
      (void)snprintf(text, size, "%s", *(const bool *)place ? "true" : "false");
      break;
    case QKV_OPTION_REAL:
      qkvi_option_number_text(option->kind, 0, *(const double *)place, text, size);
      break;
    case QKV_OPTION_INTEGER:
    case QKV_OPTION_BYTES:
    case QKV_OPTION_DURATION:
      qkvi_option_number_text(option->kind, *(const int64_t *)place, 0, text, size);
      break;
    case QKV_OPTION_STRING: {
      const char *string = *(const char *const *)place;
      (void)snprintf(text, size, "%s", string != NULL ? string : "");
      break;
    }
    case QKV_OPTION_LIST:
      list_text(place, text, size);
      break;
  }
}

// ---- Sources ----

qkv_status qkv_options_set(qkv_options *options, const char *name, const char *text, qkv_option_source source,
                           qkv_error *error) {
  const qkv_option *row = qkvi_option_find(options, name);
  if (row == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "unknown option --%s; did you mean --%s?", name,
                    qkvi_option_closest(options, name));
  }
  char label[LABEL_MAX];
  if (source == QKV_FROM_ENVIRONMENT && options->environment_prefix != NULL) {
    qkvi_option_variable(options, name, label, sizeof label);
  } else {
    (void)snprintf(label, sizeof label, "%s%s", source == QKV_FROM_FLAG ? "--" : "", name);
  }
  return qkvi_option_store(options, row, label, text, source, error);
}

void qkvi_option_variable(const qkv_options *options, const char *name, char *variable, size_t size) {
  (void)snprintf(variable, size, "%s%s", options->environment_prefix, name);
  for (char *c = variable + strlen(options->environment_prefix); *c != '\0' && c < variable + size; c++) {
    *c = *c == '-' ? '_' : (char)toupper((unsigned char)*c);
  }
}

qkv_status qkv_options_read_environment(qkv_options *options, qkv_error *error) {
  if (options->environment_prefix == NULL) return QKV_OK;
  for (size_t i = 0; i < options->count; i++) {
    char variable[LABEL_MAX];
    qkvi_option_variable(options, options->table[i].name, variable, sizeof variable);
    const char *text = getenv(variable);
    if (text == NULL) continue;
    QKV_TRY(qkv_options_set(options, options->table[i].name, text, QKV_FROM_ENVIRONMENT, error));
  }
  return QKV_OK;
}

// argv[*at] is "--name", "--name=value" or "-x". Moves *at to the last word that was used.
static qkv_status read_flag(qkv_options *options, int argc, char **argv, int *at, qkv_error *error) {
  const char *word = argv[*at];
  const char *name_begin = word + strspn(word, "-");
  size_t length = strcspn(name_begin, "=");
  char name[LABEL_MAX];
  (void)snprintf(name, sizeof name, "%.*s", (int)(length < sizeof name ? length : sizeof name), name_begin);
  const qkv_option *row = strncmp(word, "--", 2) == 0 ? qkvi_option_find(options, name) : NULL;
  if (row == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "unknown option %.*s; did you mean --%s?",
                    (int)(name_begin - word + (ptrdiff_t)strlen(name)), word, qkvi_option_closest(options, name));
  }
  const char *value = name_begin[length] == '=' ? name_begin + length + 1 : NULL;
  if (row->kind == QKV_OPTION_FLAG) {
    if (value != NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "--%s takes no value", name);
    value = "true";
  } else if (value == NULL) {
    if (*at + 1 >= argc) {
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "--%s needs a value: %s", name,
                      row->value_name != NULL ? row->value_name : "VALUE");
    }
    value = argv[++*at];
  }
  return qkv_options_set(options, name, value, QKV_FROM_FLAG, error);
}

qkv_status qkv_options_read_arguments(qkv_options *options, int argc, char **argv, qkv_option_list *positional,
                                      qkv_error *error) {
  free((void *)options->positional.items);
  options->positional.count = 0;
  options->positional.items = calloc((size_t)argc + 1, sizeof *options->positional.items);
  assert(options->positional.items != NULL);
  bool options_ended = false;
  for (int i = 1; i < argc; i++) {
    if (!options_ended && strcmp(argv[i], "--") == 0) {
      options_ended = true;
    } else if (!options_ended && argv[i][0] == '-' && argv[i][1] != '\0') {
      QKV_TRY(read_flag(options, argc, argv, &i, error));
    } else {
      options->positional.items[options->positional.count++] = argv[i];
    }
  }
  *positional = options->positional;
  return QKV_OK;
}
