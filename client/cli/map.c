// qkvctl session --map: a session's tokens by their bits.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

enum { WIDTH_DEFAULT = 80, WIDTH_MAX = 1024, LABEL_WIDTH = 11, LEVELS = 9, JSON_BUCKETS = 64 };

// Bits 0 to 8, and more: exact rows.
static const char marks[LEVELS + 1] = ".12345678#";
// From dark blue over green and yellow to red; grey for exact rows. Of the 256 colours.
static const uint8_t colours[LEVELS + 1] = {17, 19, 26, 37, 34, 76, 184, 208, 196, 250};

// One layer's row: the means over its heads.
typedef struct layer_row {
  uint32_t layer;
  size_t heads, buckets;
  uint64_t position, tokens, tokens_per_bucket;
  double bits[WIDTH_MAX];
} layer_row;

typedef struct drawing {
  bool json, coloured, failed;
  layer_row row;
} drawing;

static size_t terminal_width(void) {
  struct winsize size;
  if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0)
    return WIDTH_DEFAULT;
  return size.ws_col < WIDTH_MAX ? size.ws_col : WIDTH_MAX;
}

static void put_mark(const drawing *on, size_t level) {
  if (on->coloured) {
    printf("\x1b[48;5;%um%c\x1b[0m", (unsigned)colours[level], level == LEVELS ? '#' : ' ');
  } else {
    putchar(marks[level]);
  }
}

static size_t level_of(double bits) {
  if (!(bits > 0)) return 0;
  return bits > LEVELS - 0.5 ? LEVELS : (size_t)lround(bits);
}

static void end_row(drawing *on) {
  const layer_row *row = &on->row;
  if (row->heads == 0) return;
  printf("layer %-5" PRIu32, row->layer);
  for (size_t i = 0; i < row->buckets; i++) put_mark(on, level_of(row->bits[i] / (double)row->heads));
  putchar('\n');
  on->row.heads = 0;
}

static bool add_head(drawing *on, const qkv_client_attention *head) {
  layer_row *row = &on->row;
  if (row->heads > 0 && row->layer != head->layer) end_row(on);
  if (row->heads == 0) {
    memset(row->bits, 0, sizeof row->bits);
    row->layer = head->layer;
    row->buckets = head->buckets < WIDTH_MAX ? head->buckets : WIDTH_MAX;
    row->position = head->position;
    row->tokens = head->tokens;
    row->tokens_per_bucket = head->tokens_per_bucket;
  }
  for (size_t i = 0; i < row->buckets && i < head->buckets; i++) row->bits[i] += (double)head->bits[i];
  row->heads++;
  return true;
}

static bool print_json(drawing *on, const qkv_client_attention *head) {
  json_t *ema = json_array(), *bits = json_array();
  for (size_t i = 0; i < head->buckets; i++) {
    json_array_append_new(ema, json_real((double)head->ema[i]));
    json_array_append_new(bits, json_real((double)head->bits[i]));
  }
  json_t *line =
      json_pack("{s:I, s:I, s:b, s:I, s:I, s:I, s:I, s:o, s:o}", "layer", (json_int_t)head->layer, "kv_head",
                (json_int_t)head->kv_head, "counted", (int)head->counted, "queries", (json_int_t)head->queries,
                "position", (json_int_t)head->position, "tokens", (json_int_t)head->tokens, "tokens_per_bucket",
                (json_int_t)head->tokens_per_bucket, "ema", ema, "bits", bits);
  on->failed = !qkv_json_figures(line);
  return !on->failed;
}

static bool take_head(void *context, const qkv_client_attention *head) {
  drawing *on = context;
  return on->json ? print_json(on, head) : add_head(on, head);
}

static void print_legend(const drawing *on) {
  printf("%-*s", LABEL_WIDTH, "bits");
  for (size_t level = 0; level <= LEVELS; level++) {
    put_mark(on, level);
    if (level < LEVELS) {
      printf(" %zu  ", level);
    } else {
      printf(" exact\n");
    }
  }
  printf("%-*sfrom position %" PRIu64 " on, a mark is %" PRIu64 " tokens\n", LABEL_WIDTH, "", on->row.position,
         on->row.tokens_per_bucket);
}

int qkvctl_draw_map(const qkvctl_values *values, qkv_client *client, const char *session) {
  const size_t width = terminal_width();
  drawing on = {.json = values->program.json, .coloured = isatty(STDOUT_FILENO) != 0};
  qkv_call_error error = {0};
  const uint32_t buckets = on.json ? JSON_BUCKETS : (uint32_t)(width > LABEL_WIDTH + 8 ? width - LABEL_WIDTH : 8);
  const qkv_client_scope scope = {.session = session};
  const qkv_code code = qkv_client_attention_stats(client, &scope, buckets, take_head, &on, &error);
  if (code != 0) return on.failed ? QKV_EXIT_FAILED : qkv_program_failed("%s", error.text);
  if (on.json) return QKV_EXIT_OK;
  end_row(&on);
  print_legend(&on);
  return fflush(stdout) == 0 ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}
