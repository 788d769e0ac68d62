// qkvctl compare: which codec for a session's rows.
#include <inttypes.h>
#include <stdio.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "qkv/v1/admin.pb-c.h"

static int show_json(const char *session, const Qkv__V1__CompareResponse *found) {
  json_t *rows = json_array();
  for (size_t i = 0; i < found->n_codecs; i++) {
    const Qkv__V1__ComparedCodec *row = found->codecs[i];
    json_array_append_new(
        rows, json_pack("{s:s, s:f, s:b, s:f, s:f, s:f}", "codec", row->codec, "bits", row->bits, "calibrated",
                        (int)row->calibrated, "bytes_per_token", row->bytes_per_token, "bits_per_coordinate",
                        row->bits_per_coordinate, "attention_error", row->attention_error));
  }
  json_t *line =
      json_pack("{s:s, s:I, s:I, s:I, s:o}", "session", session, "layers", (json_int_t)found->layers, "tokens",
                (json_int_t)found->tokens, "tokens_exact", (json_int_t)found->tokens_exact, "codecs", rows);
  return qkv_json_figures(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int show(const char *session, const Qkv__V1__CompareResponse *found) {
  qkv_table *table = qkv_table_create(5);
  qkv_table_cell(table, "CODEC");
  qkv_table_cell(table, "BITS");
  qkv_table_cell(table, "BYTES A TOKEN");
  qkv_table_cell(table, "BITS A COORDINATE");
  qkv_table_cell(table, "ATTENTION ERROR");
  for (size_t i = 0; i < found->n_codecs; i++) {
    const Qkv__V1__ComparedCodec *row = found->codecs[i];
    qkv_table_cell(table, "%s%s", row->codec, row->calibrated ? ", calibrated" : "");
    qkv_table_cell(table, "%g", row->bits);
    qkv_table_cell(table, "%.0f", row->bytes_per_token);
    qkv_table_cell(table, "%.2f", row->bits_per_coordinate);
    qkv_table_cell(table, "%.4f", row->attention_error);
  }
  qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  printf("%s: %" PRIu64 " rows of %" PRIu32 " layers, %" PRIu64 " of them exact\n", session, found->tokens,
         found->layers, found->tokens_exact);
  return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

int qkvctl_compare(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  Qkv__V1__CompareRequest request = QKV__V1__COMPARE_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  request.session = (char *)(uintptr_t)arguments->items[0];
  int status = QKV_EXIT_OK;
  if (qkv_client_call_message(client, "/qkv.v1.Admin/Compare", &request.base, &qkv__v1__compare_response__descriptor,
                              &answer, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  const Qkv__V1__CompareResponse *found = (const Qkv__V1__CompareResponse *)answer;
  if (found != NULL) status = values->program.json ? show_json(request.session, found) : show(request.session, found);
  if (answer != NULL) protobuf_c_message_free_unpacked(answer, NULL);
  qkv_client_close(&client);
  return status;
}
