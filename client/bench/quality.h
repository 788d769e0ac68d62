// Between the files of `qkv-bench quality`: the ways to code that it compares, what it measures of each, and how that
// is shown.
#ifndef QKV_CLIENT_BENCH_QUALITY_H
#define QKV_CLIENT_BENCH_QUALITY_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "client/bench/bench.h"
#include "engine/cache/coding.h"

// A way to code.
typedef struct qkvi_setting {
  qkv_frame frame;
  bool calibrated;
  qkv_policy policy;  // resolved
  double tier_bits;   // average that the rows are then brought to by attention; 0: they stay as they are
} qkvi_setting;

enum { QKVI_SETTING_NAME_MAX = 192 };
// What it is called in tables and files; the same as in tests/regress/baselines.csv where that has it.
char *qkvi_setting_name(const qkvi_setting *setting, char name[QKVI_SETTING_NAME_MAX]);

typedef struct qkvi_setting_list {
  qkvi_setting *items;
  size_t count, capacity;
} qkvi_setting_list;

// "CODEC[,NAME=VALUE...][/CODEC_V[,NAME=VALUE...]]:K[/V]" of codecs without frames, or
// "FRAME:K[/V][:ANCHOR[:LOW_RANK[/RANK]]][@BITS]", as docs/quality.md has it. INVALID_ARGUMENT names what is wrong.
qkv_status qkvi_setting_parse(const char *text, bool calibrated, qkvi_setting *setting, qkv_error *error);
// The codec of keys that a text of this form begins with; NULL: none.
const qkv_codec *qkvi_setting_codec(const char *text);
// What the command's options ask for: its --setting, that of --bits-k and its companions, else the default list.
// `calibrated`: there is a calibration, or there will be.
qkv_status qkvi_settings_collect(const qkv_bench_settings *options, bool calibrated, qkvi_setting_list *list,
                                 qkv_error *error);
void qkvi_settings_clear(qkvi_setting_list *list);

// How pages of a session with this setting are coded. `calibration` may be NULL where the setting is data-free.
qkv_coding *qkvi_setting_coding(const qkvi_setting *setting, const qkv_model *model,
                                const qkv_calibration *calibration);
qkv_purpose qkvi_setting_purpose(const qkvi_setting *setting);

// The figures of one way to code. NAN: not measured.
typedef struct qkvi_quality_row {
  char name[QKVI_SETTING_NAME_MAX];
  double bits;  // per coordinate, all in
  double bits_per_token, delta;
  double kl_bits;
  double top1;        // share of positions where exact and coded find the same token likeliest
  double kl_error;    // standard error of it, from how windows differ; between two rows of one run most of it cancels
  double rel_mse[2];  // by qkv_part
  double cosine[2];   // of a row and what is read of it
  double attention_error;   // relative, root of squares
  double attention_cosine;  // of an output of a head
  double bits_k, bits_v;    // that were asked for; 0 for exact rows
} qkvi_quality_row;

// `unit` is what figures are per, "byte" or "token". The columns of tests/regress/baselines.csv, and top1.
void qkvi_quality_csv_heading(FILE *out, const char *unit);
void qkvi_quality_csv_row(FILE *out, const qkvi_quality_row *row);
json_t *qkvi_quality_json(const qkvi_quality_row *row, const char *unit);
// For people.
void qkvi_quality_print(const qkvi_quality_row *rows, size_t count, const char *unit);

#endif
