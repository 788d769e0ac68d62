#include "client/common/terminal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "client/common/program.h"
#include "engine/base/clock.h"

static bool print_line(json_t *object, size_t flags) {
  if (object == NULL) {
    (void)qkv_program_failed(
        "what is to be printed has no form in JSON: a text that is no UTF-8, or no finite number");
    return false;
  }
  int status = json_dumpf(object, stdout, JSON_COMPACT | JSON_ENSURE_ASCII | flags);
  json_decref(object);
  return status == 0 && fputc('\n', stdout) != EOF && fflush(stdout) == 0;
}

bool qkv_json_line(json_t *object) {
  return print_line(object, 0);
}

bool qkv_json_figures(json_t *object) {
  return print_line(object, JSON_REAL_PRECISION(7));
}

char *qkv_human_bytes(uint64_t bytes, char text[QKV_HUMAN_MAX]) {
  static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 " B", bytes);
    return text;
  }
  double value = (double)bytes / 1024;
  size_t unit = 0;
  // 1023.95 would print as 1024.0.
  while (value >= 1023.95 && unit + 1 < sizeof units / sizeof *units) {
    value /= 1024;
    unit++;
  }
  snprintf(text, QKV_HUMAN_MAX, "%.1f %s", value, units[unit]);
  return text;
}

char *qkv_human_duration(uint64_t ms, char text[QKV_HUMAN_MAX]) {
  uint64_t s = ms / 1000;
  if (ms < 1000) {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 " ms", ms);
  } else if (s < 60) {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 ".%" PRIu64 " s", s, ms % 1000 / 100);
  } else if (s < 3600) {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 " min %02" PRIu64 " s", s / 60, s % 60);
  } else if (s < 86400) {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 " h %02" PRIu64 " min", s / 3600, s / 60 % 60);
  } else {
    snprintf(text, QKV_HUMAN_MAX, "%" PRIu64 " d %02" PRIu64 " h", s / 86400, s / 3600 % 24);
  }
  return text;
}

char *qkv_human_age(int64_t unix_ms, char text[QKV_HUMAN_MAX]) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const int64_t now_ms = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
  return qkv_human_duration(now_ms > unix_ms ? (uint64_t)(now_ms - unix_ms) : 0, text);
}

// ---- tables ----

struct qkv_table {
  size_t columns;
  char **cells;
  size_t count, capacity;
};

qkv_table *qkv_table_create(size_t columns) {
  assert(columns > 0);
  qkv_table *table = calloc(1, sizeof *table);
  assert(table != NULL);
  table->columns = columns;
  return table;
}

void qkv_table_destroy(qkv_table **table) {
  if (*table == NULL) return;
  for (size_t i = 0; i < (*table)->count; i++) free((*table)->cells[i]);
  free((*table)->cells);
  free(*table);
  *table = NULL;
}

void qkv_table_cell(qkv_table *table, const char *format, ...) {
  if (table->count == table->capacity) {
    table->capacity = table->capacity == 0 ? 64 : 2 * table->capacity;
    table->cells = realloc(table->cells, table->capacity * sizeof *table->cells);
    assert(table->cells != NULL);
  }
  va_list arguments;
  va_start(arguments, format);
  int length = vasprintf(&table->cells[table->count], format, arguments);
  va_end(arguments);
  assert(length >= 0);
  table->count++;
}

static bool is_number_column(const qkv_table *table, size_t column) {
  if (table->count <= table->columns) return false;
  for (size_t i = table->columns + column; i < table->count; i += table->columns) {
    char first = table->cells[i][0];
    if (first != '-' && (first < '0' || first > '9')) return false;
  }
  return true;
}

static size_t column_width(const qkv_table *table, size_t column) {
  size_t width = 0;
  for (size_t i = column; i < table->count; i += table->columns) {
    size_t length = strlen(table->cells[i]);
    if (length > width) width = length;
  }
  return width;
}

void qkv_table_print(const qkv_table *table, FILE *out) {
  size_t columns = table->columns;
  size_t rows = table->count / columns;
  for (size_t row = 0; row < rows; row++) {
    for (size_t column = 0; column < columns; column++) {
      const char *cell = table->cells[row * columns + column];
      bool right = is_number_column(table, column);
      bool last = column + 1 == columns;
      int width = last && !right ? 0 : (int)column_width(table, column);
      fprintf(out, "%*s%s", right ? width : -width, cell, last ? "\n" : "  ");
    }
  }
}

// ---- progress ----

enum { SHOW_AFTER_MS = 1000, SHOW_EVERY_MS = 100, BAR_WIDTH = 30 };

void qkv_progress_start(qkv_progress *progress, const char *what, uint64_t total_bytes) {
  *progress = (qkv_progress){.what = what, .total = total_bytes, .started_ms = qkv_now_ms()};
  progress->terminal = isatty(STDERR_FILENO) == 1;
}

static void show(qkv_progress *progress, int64_t elapsed_ms) {
  char done[QKV_HUMAN_MAX], total[QKV_HUMAN_MAX], rate[QKV_HUMAN_MAX], bar[BAR_WIDTH + 1];
  qkv_human_bytes(progress->done, done);
  qkv_human_bytes((uint64_t)((double)progress->done * 1000 / (double)elapsed_ms), rate);
  if (progress->total == 0) {
    fprintf(stderr, "\r\033[K%s  %s  %s/s", progress->what, done, rate);
    return;
  }
  double share = (double)progress->done / (double)progress->total;
  if (share > 1) share = 1;
  size_t filled = (size_t)(share * BAR_WIDTH);
  memset(bar, ' ', BAR_WIDTH);
  memset(bar, '=', filled);
  if (filled < BAR_WIDTH) bar[filled] = '>';
  bar[BAR_WIDTH] = '\0';
  fprintf(stderr, "\r\033[K%s [%s] %3.0f %%  %s of %s  %s/s", progress->what, bar, share * 100, done,
          qkv_human_bytes(progress->total, total), rate);
}

void qkv_progress_add(qkv_progress *progress, uint64_t bytes) {
  progress->done += bytes;
  if (!progress->terminal) return;
  int64_t now = qkv_now_ms();
  if (now - progress->started_ms < SHOW_AFTER_MS || now - progress->shown_ms < SHOW_EVERY_MS) return;
  progress->shown_ms = now;
  progress->visible = true;
  show(progress, now - progress->started_ms);
}

void qkv_progress_end(qkv_progress *progress) {
  if (progress->visible) fprintf(stderr, "\r\033[K");
  progress->visible = false;
}
