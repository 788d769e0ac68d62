// qkvctl match: which session holds the longest prefix of a prompt.
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

enum { IDS_MAX = 1 << 24, DIGITS_MAX = 10 };

typedef struct id_list {
  uint32_t *ids;
  size_t count, capacity;
} id_list;

static void add_id(id_list *list, uint32_t id) {
  if (list->count == list->capacity) {
    list->capacity = 2 * list->capacity + 1024;
    list->ids = realloc(list->ids, list->capacity * sizeof *list->ids);
    if (list->ids == NULL) abort();
  }
  list->ids[list->count++] = id;
}

// The list of a JSON text is one, too.
static bool separates(int byte) {
  return isspace(byte) || byte == ',' || byte == '[' || byte == ']';
}

// The number that begins with `byte`; *next gets the byte behind it.
static qkv_status read_id(FILE *file, int byte, size_t place, uint32_t *id, int *next, qkv_error *error) {
  uint64_t value = 0;
  size_t digits = 0;
  for (; byte >= '0' && byte <= '9' && digits <= DIGITS_MAX; byte = getc(file), digits++) {
    value = 10 * value + (uint64_t)(byte - '0');
  }
  *next = byte;
  *id = (uint32_t)value;
  if (digits > 0 && value <= UINT32_MAX && (byte == EOF || separates(byte))) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "token id %zu is no number from 0 to %" PRIu32
                  ", in decimal digits and separated by white space, "
                  "commas or square brackets",
                  place, UINT32_MAX);
}

static qkv_status read_ids(FILE *file, id_list *list, qkv_error *error) {
  for (int byte = getc(file); byte != EOF;) {
    uint32_t id;
    if (separates(byte)) {
      byte = getc(file);
      continue;
    }
    if (list->count == IDS_MAX)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "there are more than %d token ids", IDS_MAX);
    QKV_TRY(read_id(file, byte, list->count, &id, &byte, error));
    add_id(list, id);
  }
  return ferror(file) == 0 ? QKV_OK : qkv_fail(error, QKV_UNAVAILABLE, "%s", strerror(errno));
}

// Of the file that --tokens names. Prints what is wrong, and returns the exit status.
static int read_tokens(const char *path, id_list *list) {
  const bool standard = strcmp(path, "-") == 0;
  qkv_error error = {0};
  FILE *file = standard ? stdin : fopen(path, "re");
  if (file == NULL) return qkv_program_failed("%s: %s", path, strerror(errno));
  const qkv_status status = read_ids(file, list, &error);
  if (!standard) (void)fclose(file);
  return status == QKV_OK ? QKV_EXIT_OK : qkv_program_failed("%s: %s", path, error.text);
}

static int show(const qkvctl_values *values, const qkv_client_match *match) {
  if (values->program.json) {
    json_t *line = json_pack("{s:s, s:I, s:I, s:I, s:f}", "session", match->session, "tokens",
                             (json_int_t)match->tokens, "tokens_in_memory", (json_int_t)match->tokens_in_memory,
                             "tokens_on_ssd", (json_int_t)match->tokens_on_ssd, "restore_ms", match->restore_ms);
    return qkv_json_line(line) ? QKV_EXIT_OK : QKV_EXIT_FAILED;
  }
  if (match->tokens == 0) {
    printf("no session shares 64 tokens\n");
  } else {
    printf("%s: %" PRIu64 " tokens, %" PRIu64 " in memory, %" PRIu64 " on the SSD", match->session, match->tokens,
           match->tokens_in_memory, match->tokens_on_ssd);
    if (match->tokens_on_ssd > 0) printf(", about %.1f ms to bring back", match->restore_ms);
    printf("\n");
  }
  return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

static int match_ids(const qkvctl_values *values, const id_list *list) {
  const qkv_client_prompt prompt = {.model = values->model,
                                    .token_ids = list->ids,
                                    .token_count = list->count,
                                    .salt = values->salt,
                                    .salt_bytes = values->salt == NULL ? 0 : strlen(values->salt)};
  qkv_client_match match;
  qkv_call_error error = {0};
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  const qkv_code code = qkv_client_match_prefix(client, &prompt, &match, &error);
  qkv_client_close(&client);
  return code == 0 ? show(values, &match) : qkv_program_failed("%s", error.text);
}

int qkvctl_match(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  const qkvctl_values *values = values_in;
  if (values->model == NULL) return qkv_program_misused("match needs --model NAME");
  if (values->tokens == NULL) return qkv_program_misused("match needs --tokens FILE");
  id_list list = {0};
  int status = read_tokens(values->tokens, &list);
  if (status == QKV_EXIT_OK) status = match_ids(values, &list);
  free(list.ids);
  return status;
}
