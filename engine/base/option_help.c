// The option table as help.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/option_internal.h"

#define HELP_COLUMNS 100  // the width of a line
#define FLAG_COLUMNS 32   // a longer flag has a line of its own

static int flag_text(const qkv_option *row, char *text, size_t size) {
  const char *value_name = row->kind == QKV_OPTION_FLAG ? NULL : row->value_name;
  return snprintf(text, size, "  --%s%s%s", row->name, value_name != NULL ? " " : "",
                  value_name != NULL ? value_name : "");
}

// The column at which help begins: two spaces after the longest flag.
static int help_column(const qkv_options *options) {
  int column = 0;
  char text[FLAG_COLUMNS + 1];
  for (size_t i = 0; i < options->count; i++) {
    int width = flag_text(&options->table[i], text, sizeof text);
    if (width > column && width <= FLAG_COLUMNS) column = width;
  }
  return column + 2;
}

// Prints `text` word by word, as lines that begin at `indent`; the first line is at `column` already.
static void print_wrapped(FILE *out, const char *text, int indent, int column) {
  (void)fprintf(out, "%*s", indent > column ? indent - column : 0, "");
  column = indent;
  bool begins = true;
  for (const char *word = text; *word != '\0'; word += strspn(word, " ")) {
    int length = (int)strcspn(word, " ");
    if (!begins && column + 1 + length > HELP_COLUMNS) {
      (void)fprintf(out, "\n%*s", indent, "");
      column = indent;
      begins = true;
    }
    (void)fprintf(out, "%s%.*s", begins ? "" : " ", length, word);
    column += length + (begins ? 0 : 1);
    begins = false;
    word += length;
  }
  (void)fputc('\n', out);
}

// "[env QKVD_THREADS, default 8, 1 to 256]", or nothing.
static void print_facts(const qkv_options *options, const qkv_option *row, FILE *out) {
  const char *separator = " [";
  if (options->environment_prefix != NULL) {
    char variable[128];
    qkvi_option_variable(options, row->name, variable, sizeof variable);
    (void)fprintf(out, "%senv %s", separator, variable);
    separator = ", ";
  }
  if (row->default_value != NULL && row->kind != QKV_OPTION_FLAG) {
    (void)fprintf(out, "%sdefault %s", separator, row->default_value);
    separator = ", ";
  }
  char limits[64];
  qkvi_option_limits_text(row, limits, sizeof limits);
  if (limits[0] != '\0') {
    (void)fprintf(out, "%s%s", separator, limits);
    separator = ", ";
  }
  if (separator[0] == ',') (void)fputc(']', out);
}

void qkv_options_help(const qkv_options *options, FILE *out) {
  int indent = help_column(options);
  for (size_t i = 0; i < options->count; i++) {
    const qkv_option *row = &options->table[i];
    char *text = NULL;
    size_t length = 0;
    FILE *memory = open_memstream(&text, &length);
    if (memory == NULL) return;
    (void)fputs(row->help != NULL ? row->help : "", memory);
    print_facts(options, row, memory);
    (void)fclose(memory);
    char flag[256];
    int width = flag_text(row, flag, sizeof flag);
    (void)fprintf(out, "%s%s", flag, width > FLAG_COLUMNS ? "\n" : "");
    print_wrapped(out, text, indent, width > FLAG_COLUMNS ? 0 : width);
    free(text);
  }
}
