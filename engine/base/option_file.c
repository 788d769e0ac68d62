// Options from a YAML file: one flat mapping of names to scalars and, for lists, sequences of scalars.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "engine/base/option_internal.h"

#define FILE_BYTES_MAX (1 << 20)

static qkv_status read_open_file(FILE *file, const char *path, char *text, size_t *length, qkv_error *error) {
  *length = fread(text, 1, FILE_BYTES_MAX + 1, file);
  if (ferror(file)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: cannot be read: %s", path, strerror(errno));
  if (*length > FILE_BYTES_MAX) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is more than %d bytes, the limit for an option file", path,
                    FILE_BYTES_MAX);
  }
  return QKV_OK;
}

static qkv_status read_whole(const char *path, char *text, size_t *length, qkv_error *error) {
  FILE *file = fopen(path, "rb");
  if (file == NULL) {
    return qkv_fail(error, errno == ENOENT ? QKV_NOT_FOUND : QKV_INVALID_ARGUMENT, "%s: cannot be opened: %s", path,
                    strerror(errno));
  }
  qkv_status status = read_open_file(file, path, text, length, error);
  (void)fclose(file);
  return status;
}

// The scalar's text, or NULL where the node is no scalar or holds a NUL.
static const char *scalar_text(const yaml_node_t *node) {
  if (node->type != YAML_SCALAR_NODE) return NULL;
  const char *text = (const char *)node->data.scalar.value;
  return strlen(text) == node->data.scalar.length ? text : NULL;
}

// What stands behind a bare "key:".
static bool nothing(const yaml_node_t *node) {
  return node->type == YAML_SCALAR_NODE && node->data.scalar.length == 0 &&
         node->data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

static qkv_status store_scalar(qkv_options *options, const qkv_option *row, const yaml_node_t *node,
                               qkv_error *error) {
  const char *text = scalar_text(node);
  if (text == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s needs %s", row->name,
                    row->kind == QKV_OPTION_LIST ? "scalars" : "one scalar");
  }
  return qkvi_option_store(options, row, row->name, text, QKV_FROM_FILE, error);
}

static qkv_status store_sequence(qkv_options *options, const qkv_option *row, yaml_document_t *document,
                                 const yaml_node_t *node, qkv_error *error) {
  for (yaml_node_item_t *item = node->data.sequence.items.start; item < node->data.sequence.items.top; item++) {
    QKV_TRY(store_scalar(options, row, yaml_document_get_node(document, *item), error));
  }
  return QKV_OK;
}

static qkv_status store_pair(qkv_options *options, yaml_document_t *document, const yaml_node_pair_t *pair,
                             bool *seen, qkv_error *error) {
  const char *name = scalar_text(yaml_document_get_node(document, pair->key));
  if (name == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "a key has to be the name of an option");
  const qkv_option *row = qkvi_option_find(options, name);
  if (row == NULL) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "unknown key \"%s\"; did you mean \"%s\"?", name,
                    qkvi_option_closest(options, name));
  }
  if (seen[row - options->table]) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is set twice", name);
  seen[row - options->table] = true;
  const yaml_node_t *value = yaml_document_get_node(document, pair->value);
  if (row->kind == QKV_OPTION_LIST) {
    qkvi_option_clear_list(options, row, QKV_FROM_FILE);
    if (value->type == YAML_SEQUENCE_NODE) return store_sequence(options, row, document, value, error);
    if (nothing(value)) return QKV_OK;
  }
  return store_scalar(options, row, value, error);
}

static qkv_status store_mapping(qkv_options *options, const char *path, yaml_document_t *document, qkv_error *error) {
  const yaml_node_t *root = yaml_document_get_root_node(document);
  if (root == NULL) return QKV_OK;  // an empty file
  if (root->type != YAML_MAPPING_NODE) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: line %zu: a mapping is needed, such as \"%s: ...\"", path,
                    root->start_mark.line + 1, options->table[0].name);
  }
  bool *seen = calloc(options->count, sizeof *seen);
  if (seen == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s: out of memory", path);
  qkv_status status = QKV_OK;
  for (const yaml_node_pair_t *pair = root->data.mapping.pairs.start;
       status == QKV_OK && pair < root->data.mapping.pairs.top; pair++) {
    qkv_error found = {0};
    status = store_pair(options, document, pair, seen, &found);
    size_t line = yaml_document_get_node(document, pair->key)->start_mark.line + 1;
    if (status != QKV_OK) (void)qkv_fail(error, status, "%s: line %zu: %s", path, line, found.text);
  }
  free(seen);
  return status;
}

static qkv_status syntax_error(const yaml_parser_t *parser, const char *path, qkv_error *error) {
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: line %zu: %s", path, parser->problem_mark.line + 1,
                  parser->problem != NULL ? parser->problem : "no YAML");
}

static qkv_status parse_document(qkv_options *options, const char *path, yaml_parser_t *parser, qkv_error *error) {
  yaml_document_t document;
  if (!yaml_parser_load(parser, &document)) return syntax_error(parser, path, error);
  qkv_status status = store_mapping(options, path, &document, error);
  yaml_document_delete(&document);
  if (status != QKV_OK) return status;
  if (!yaml_parser_load(parser, &document)) return syntax_error(parser, path, error);
  const yaml_node_t *second = yaml_document_get_root_node(&document);
  if (second != NULL) {
    status = qkv_fail(error, QKV_INVALID_ARGUMENT, "%s: line %zu: one document is allowed, this is a second", path,
                      second->start_mark.line + 1);
  }
  yaml_document_delete(&document);
  return status;
}

qkv_status qkv_options_read_file(qkv_options *options, const char *path, qkv_error *error) {
  char *text = malloc(FILE_BYTES_MAX + 1);
  if (text == NULL) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s: out of memory", path);
  size_t length = 0;
  qkv_status status = read_whole(path, text, &length, error);
  yaml_parser_t parser;
  if (status == QKV_OK && !yaml_parser_initialize(&parser)) {
    status = qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "%s: out of memory", path);
  } else if (status == QKV_OK) {
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    status = parse_document(options, path, &parser, error);
    yaml_parser_delete(&parser);
  }
  free(text);
  return status;
}
