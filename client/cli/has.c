// qkvctl has: which sessions are open.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

static bool show(const qkvctl_values *values, const char *session, uint8_t presence, uint64_t tokens) {
  static const char *const places[] = {"not open", "in memory", "partly on the SSD"};
  if (presence > 2) presence = 2;
  if (!values->program.json) return printf("%s: %s, %" PRIu64 " tokens\n", session, places[presence], tokens) > 0;
  json_t *line = json_pack("{s:s, s:b, s:b, s:I}", "session", session, "open", presence != 0, "in_memory",
                           presence == 1, "tokens", (json_int_t)tokens);
  return qkv_json_line(line);
}

// The exit status says whether all are open.
int qkvctl_has(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const size_t count = arguments->count;
  uint8_t *presence = calloc(count, sizeof *presence);
  uint64_t *tokens = calloc(count, sizeof *tokens);
  if (presence == NULL || tokens == NULL) abort();
  qkv_call_error error = {0};
  qkv_client *client = qkvctl_connect(values);
  int status = client == NULL ? QKV_EXIT_FAILED : QKV_EXIT_OK;
  if (client != NULL &&
      qkv_client_has_sessions(client, arguments->items, count, values->touch, presence, tokens, &error) != 0)
    status = qkv_program_failed("%s", error.text);
  const bool answered = status == QKV_EXIT_OK;
  for (size_t i = 0; i < count && answered; i++) {
    if (!show(values, arguments->items[i], presence[i], tokens[i]) || presence[i] == 0) status = QKV_EXIT_FAILED;
  }
  qkv_client_close(&client);
  free(presence);
  free(tokens);
  return status;
}
