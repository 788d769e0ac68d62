// qkvctl watch: what prefixes come and go, until it is interrupted.
#include <inttypes.h>
#include <stdio.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

static const char *kind_name(int kind) {
  static const char *const names[] = {"?", "added", "removed", "moved"};
  return names[kind >= 1 && kind <= 3 ? kind : 0];
}

// 32 digits, the first byte first.
static const char *hex(const uint8_t hash[16], char text[33]) {
  for (size_t i = 0; i < 16; i++) (void)snprintf(text + 2 * i, 3, "%02x", hash[i]);
  return text;
}

static json_t *event_json(const qkv_client_prefix_event *event) {
  char text[33];
  json_t *hashes = json_array(), *ids = event->token_ids == NULL ? json_null() : json_array();
  for (size_t i = 0; i < event->pages; i++)
    (void)json_array_append_new(hashes, json_string(hex(event->hashes + 16 * i, text)));
  for (size_t i = 0; event->token_ids != NULL && i < 64 * event->pages; i++)
    (void)json_array_append_new(ids, json_integer((json_int_t)event->token_ids[i]));
  return json_pack("{s:s, s:s, s:s, s:I, s:s, s:o, s:o, s:s}", "event", kind_name(event->kind), "tenant",
                   event->tenant, "model", event->model, "position", (json_int_t)event->position, "parent",
                   hex(event->parent, text), "hashes", hashes, "token_ids", ids, "place",
                   event->on_ssd ? "ssd" : "memory");
}

static bool show_json(const qkv_client_changes *changes) {
  json_t *events = json_array();
  for (size_t i = 0; i < changes->event_count; i++)
    (void)json_array_append_new(events, event_json(&changes->events[i]));
  char instance[21];  // text: of 64 bits, of which JSON's readers take 53 and jansson 63
  (void)snprintf(instance, sizeof instance, "%" PRIu64, changes->instance);
  json_t *line =
      json_pack("{s:b, s:b, s:b, s:s, s:I, s:o}", "reset", changes->reset, "missed", changes->missed, "complete",
                changes->complete, "instance", instance, "sequence", (json_int_t)changes->sequence, "events", events);
  return qkv_json_line(line) && fflush(stdout) == 0;
}

static void show_event(const qkv_client_prefix_event *event) {
  char text[33];
  const char *where = event->on_ssd ? " to the SSD" : " to memory";
  printf("%-8s%s %s %s positions %" PRIu64 " to %" PRIu64 ", the last page %s\n", kind_name(event->kind),
         event->kind == QKV_CLIENT_MOVED ? where : "", event->tenant, event->model, event->position,
         event->position + 64 * event->pages,
         event->pages > 0 ? hex(event->hashes + 16 * (event->pages - 1), text) : "");
}

static bool show(void *context, const qkv_client_changes *changes) {
  const qkvctl_values *values = context;
  if (values->program.json) return show_json(changes);
  if (changes->reset) printf("%s\n", changes->missed ? "too slow, everything again:" : "what there is:");
  for (size_t i = 0; i < changes->event_count; i++) show_event(&changes->events[i]);
  if (changes->complete) printf("what changes:\n");
  return fflush(stdout) == 0;
}

int qkvctl_watch(void *values_in, const qkv_option_list *arguments) {
  (void)arguments;
  qkvctl_values *values = values_in;
  const qkv_client_watch options = {.model = values->model, .token_ids = values->ids};
  qkv_call_error error = {0};
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  (void)qkv_client_watch_prefixes(client, &options, show, values, &error);
  qkv_client_close(&client);
  return qkv_program_failed("%s", error.text);
}
