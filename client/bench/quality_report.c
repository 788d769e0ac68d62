// How the figures of `qkv-bench quality` are shown.
#include <math.h>

#include "client/bench/quality.h"
#include "client/common/terminal.h"

void qkvi_quality_csv_heading(FILE *out, const char *unit) {
  fprintf(out, "scheme,bits_per_coordinate_all_in,bits_per_%s,delta_bits_per_%s,kl_bits,rel_mse_k,rel_mse_v,top1\n",
          unit, unit);
}

// What was not measured stays empty.
static void csv_number(FILE *out, int digits, double value) {
  if (isnan(value)) {
    fputc(',', out);
  } else {
    fprintf(out, ",%.*f", digits, value);
  }
}

void qkvi_quality_csv_row(FILE *out, const qkvi_quality_row *row) {
  fprintf(out, "\"%s\"", row->name);
  csv_number(out, 4, row->bits);
  csv_number(out, 5, row->bits_per_token);
  csv_number(out, 5, row->delta);
  csv_number(out, 6, row->kl_bits);
  csv_number(out, 6, row->rel_mse[QKV_K]);
  csv_number(out, 6, row->rel_mse[QKV_V]);
  csv_number(out, 4, row->top1);
  fputc('\n', out);
}

static void set_number(json_t *object, const char *key, double value) {
  if (!isnan(value)) json_object_set_new(object, key, json_real(value));
}

json_t *qkvi_quality_json(const qkvi_quality_row *row, const char *unit) {
  char bits[32], delta[32];
  snprintf(bits, sizeof bits, "bits_per_%s", unit);
  snprintf(delta, sizeof delta, "delta_bits_per_%s", unit);
  json_t *object = json_pack("{s:s, s:s}", "bench", "quality", "scheme", row->name);
  set_number(object, "bits_per_coordinate", row->bits);
  set_number(object, bits, row->bits_per_token);
  set_number(object, delta, row->delta);
  set_number(object, "kl_bits", row->kl_bits);
  set_number(object, "kl_bits_error", row->kl_error);
  set_number(object, "top1", row->top1);
  set_number(object, "rel_mse_k", row->rel_mse[QKV_K]);
  set_number(object, "rel_mse_v", row->rel_mse[QKV_V]);
  set_number(object, "cosine_k", row->cosine[QKV_K]);
  set_number(object, "cosine_v", row->cosine[QKV_V]);
  set_number(object, "attention_error", row->attention_error);
  set_number(object, "attention_cosine", row->attention_cosine);
  set_number(object, "bits_k", row->bits_k);
  set_number(object, "bits_v", row->bits_v);
  return object;
}

static void cell(qkv_table *table, int digits, double value) {
  if (isnan(value)) {
    qkv_table_cell(table, "-");
  } else {
    qkv_table_cell(table, "%.*f", digits, value);
  }
}

void qkvi_quality_print(const qkvi_quality_row *rows, size_t count, const char *unit) {
  char bits[32];
  snprintf(bits, sizeof bits, "bits/%s", unit);
  const char *const headings[] = {"scheme",          "bits",  "KL bits", "+-",       "top-1",    bits,
                                  "delta",           "MSE K", "MSE V",   "cosine K", "cosine V", "attention error",
                                  "attention cosine"};
  enum { COLUMNS = sizeof headings / sizeof *headings };
  qkv_table *table = qkv_table_create(COLUMNS);
  for (size_t i = 0; i < COLUMNS; i++) qkv_table_cell(table, "%s", headings[i]);
  for (size_t i = 0; i < count; i++) {
    const qkvi_quality_row *row = &rows[i];
    qkv_table_cell(table, "%s", row->name);
    cell(table, 4, row->bits);
    cell(table, 6, row->kl_bits);
    cell(table, 6, row->kl_error);
    cell(table, 4, row->top1);
    cell(table, 5, row->bits_per_token);
    cell(table, 5, row->delta);
    for (int part = QKV_K; part <= QKV_V; part++) cell(table, 5, row->rel_mse[part]);
    for (int part = QKV_K; part <= QKV_V; part++) cell(table, 5, row->cosine[part]);
    cell(table, 5, row->attention_error);
    cell(table, 5, row->attention_cosine);
  }
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
}
