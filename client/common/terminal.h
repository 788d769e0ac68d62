// What client programs show: JSON lines, sizes people can read, aligned tables and progress bars.
//
// Results go to standard output, everything else to standard error, so that a pipe sees results only.
//
// Threads: used by the program's main thread.
#ifndef QKV_CLIENT_COMMON_TERMINAL_H
#define QKV_CLIENT_COMMON_TERMINAL_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

// Prints `object` as one line on standard output, at once, and takes the reference. False when standard output
// does not take it (a full disk, a closed pipe), and, with a word about it, where `object` is NULL: something in it
// has no form in JSON.
bool qkv_json_line(json_t *object);
// The same for measured figures: reals have 7 digits, as more of them would only be noise.
bool qkv_json_figures(json_t *object);

// "512 B", "4.2 KiB", "1.0 GiB", into `text`, which is returned.
enum { QKV_HUMAN_MAX = 32 };
char *qkv_human_bytes(uint64_t bytes, char text[QKV_HUMAN_MAX]);
// "250 ms", "4.2 s", "5 min 03 s", "2 h 05 min", "3 d 04 h".
char *qkv_human_duration(uint64_t ms, char text[QKV_HUMAN_MAX]);
// How long ago that was.
char *qkv_human_age(int64_t unix_ms, char text[QKV_HUMAN_MAX]);

// A table for people. Cells are added row by row, the first row is the heading; columns are as wide as their
// widest cell, and a column whose cells below the heading all begin with a digit or '-' is aligned right.
typedef struct qkv_table qkv_table;
qkv_table *qkv_table_create(size_t columns);
void qkv_table_destroy(qkv_table **table);
// The next cell; a row is full after `columns` cells.
void qkv_table_cell(qkv_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
// Prints all full rows.
void qkv_table_print(const qkv_table *table, FILE *out);

// A progress bar on standard error: only where that is a terminal, and only from the second second on, so that
// quick work shows nothing.
//
//   fetching chat-7 [============>             ]  52 %  1.3 GiB of 2.5 GiB  611.0 MiB/s
typedef struct qkv_progress {
  const char *what;  // borrowed
  uint64_t total;    // bytes; 0: not known
  uint64_t done;
  int64_t started_ms, shown_ms;
  bool terminal, visible;
} qkv_progress;

void qkv_progress_start(qkv_progress *progress, const char *what, uint64_t total_bytes);
void qkv_progress_add(qkv_progress *progress, uint64_t bytes);
// Wipes the bar, so that what is printed next stands on a clean line.
void qkv_progress_end(qkv_progress *progress);

#endif
