// qkvctl demote and promote.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

static int show(const qkvctl_values *values, const char *session, const qkv_client_tiers *tiers) {
  char freed[QKV_HUMAN_MAX], taken[QKV_HUMAN_MAX];
  if (!values->program.json) {
    printf("%s: %" PRIu64 " pages changed, %s freed, %s taken\n", session, tiers->pages,
           qkv_human_bytes(tiers->bytes_freed, freed), qkv_human_bytes(tiers->bytes_taken, taken));
    return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  json_t *line =
      json_pack("{s:s, s:I, s:I, s:I}", "session", session, "pages", (json_int_t)tiers->pages, "bytes_freed",
                (json_int_t)tiers->bytes_freed, "bytes_taken", (json_int_t)tiers->bytes_taken);
  return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

// The layers that --layers names; the caller frees them. NULL for all, without asking the daemon how many there are.
static int choose_layers(const qkvctl_values *values, qkv_client *client, qkv_client_scope *scope,
                         uint32_t **chosen) {
  *chosen = NULL;
  if (values->layers == NULL) return QKV_EXIT_OK;
  qkv_client_session_info info;
  qkv_call_error error = {0};
  qkv_error misused = {0};
  if (qkv_client_get_session(client, scope->session, &info, &error) != 0) return qkv_program_failed("%s", error.text);
  *chosen = calloc((size_t)info.layers + 1, sizeof **chosen);
  if (*chosen == NULL) abort();
  scope->layers = *chosen;
  qkv_free(info.lengths);
  if (qkvctl_parse_layers(values->layers, info.layers, *chosen, &scope->layer_count, &misused) == QKV_OK)
    return QKV_EXIT_OK;
  return qkv_program_misused("%s", misused.text);
}

static int change(const qkvctl_values *values, const char *session, bool up) {
  qkv_client_scope scope = {.session = session, .begin = (uint64_t)values->begin, .end = (uint64_t)values->end};
  qkv_client_tiers tiers = {0};
  qkv_call_error error = {0};
  uint32_t *layers = NULL;
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  int status = choose_layers(values, client, &scope, &layers);
  if (status == QKV_EXIT_OK) {
    const qkv_code code = up ? qkv_client_promote(client, &scope, values->bits, &tiers, &error)
                             : qkv_client_demote(client, &scope, values->bits, values->even, &tiers, &error);
    status = code != 0 ? qkv_program_failed("%s", error.text) : show(values, session, &tiers);
  }
  free(layers);
  qkv_client_close(&client);
  return status;
}

int qkvctl_demote(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  if (values->bits == 0) return qkv_program_misused("demote needs --bits BITS");
  return change(values, arguments->items[0], false);
}

int qkvctl_promote(void *values_in, const qkv_option_list *arguments) {
  return change(values_in, arguments->items[0], true);
}
