// qkvctl session --map: a session's tokens by their bits.
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"

enum { WIDTH_DEFAULT = 80, WIDTH_MAX = 1024, LABEL_WIDTH = 11, JSON_BUCKETS = 64 };

// Bits 0 to 8, then more: exact rows; and what is only on the SSD.
enum { EXACT = 9, COLD, LEVELS };
static const char marks[LEVELS] = ".12345678#~";
// From dark blue over green and yellow to red; light grey for exact rows, dark grey for the SSD. Of the 256 colours.
static const uint8_t colours[LEVELS] = {17, 19, 26, 37, 34, 76, 184, 208, 196, 250, 238};

// One layer's row: the means over its heads.
typedef struct layer_row {
  uint32_t layer;
  size_t heads, buckets;
  uint64_t position, tokens, tokens_per_bucket;
  double bits[WIDTH_MAX];
  double cold[WIDTH_MAX];  // the part of a bucket that is only on the SSD
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
    printf("\x1b[48;5;%um%c\x1b[0m", (unsigned)colours[level], level >= EXACT ? marks[level] : ' ');
  } else {
    putchar(marks[level]);
  }
}

// The bits are those of what is in memory. Half a bucket or more on the SSD makes all of its mark.
static size_t level_of(double bits, double cold) {
  if (cold >= 0.5) return COLD;
  if (cold > 0) bits /= 1 - cold;
  if (!(bits > 0)) return 0;
  return bits > EXACT - 0.5 ? EXACT : (size_t)lround(bits);
}

static void end_row(drawing *on) {
  const layer_row *row = &on->row;
  if (row->heads == 0) return;
  printf("layer %-5" PRIu32, row->layer);
  for (size_t i = 0; i < row->buckets; i++) put_mark(on, level_of(row->bits[i] / (double)row->heads, row->cold[i]));
  putchar('\n');
  on->row.heads = 0;
}

static bool add_head(drawing *on, const qkv_client_attention *head) {
  layer_row *row = &on->row;
  if (row->heads > 0 && row->layer != head->layer) end_row(on);
  if (row->heads == 0) {
    memset(row->bits, 0, sizeof row->bits);
    memset(row->cold, 0, sizeof row->cold);
    row->layer = head->layer;
    row->buckets = head->buckets < WIDTH_MAX ? head->buckets : WIDTH_MAX;
    row->position = head->position;
    row->tokens = head->tokens;
    row->tokens_per_bucket = head->tokens_per_bucket;
  }
  for (size_t i = 0; i < row->buckets && i < head->buckets; i++) {
    row->bits[i] += (double)head->bits[i];
    if (head->cold != NULL) row->cold[i] = (double)head->cold[i];
  }
  row->heads++;
  return true;
}

static bool print_json(drawing *on, const qkv_client_attention *head) {
  json_t *ema = json_array(), *bits = json_array(), *cold = json_array();
  for (size_t i = 0; i < head->buckets; i++) {
    json_array_append_new(cold, json_real(head->cold == NULL ? 0 : (double)head->cold[i]));
    json_array_append_new(ema, json_real((double)head->ema[i]));
    json_array_append_new(bits, json_real((double)head->bits[i]));
  }
  json_t *line =
      json_pack("{s:I, s:I, s:b, s:I, s:I, s:I, s:I, s:o, s:o, s:o}", "layer", (json_int_t)head->layer, "kv_head",
                (json_int_t)head->kv_head, "counted", (int)head->counted, "queries", (json_int_t)head->queries,
                "position", (json_int_t)head->position, "tokens", (json_int_t)head->tokens, "tokens_per_bucket",
                (json_int_t)head->tokens_per_bucket, "ema", ema, "bits", bits, "cold", cold);
  on->failed = !qkv_json_figures(line);
  return !on->failed;
}

static bool take_head(void *context, const qkv_client_attention *head) {
  drawing *on = context;
  return on->json ? print_json(on, head) : add_head(on, head);
}

static void print_legend(const drawing *on) {
  printf("%-*s", LABEL_WIDTH, "bits");
  for (size_t level = 0; level < LEVELS; level++) {
    put_mark(on, level);
    if (level < EXACT) {
      printf(" %zu  ", level);
    } else {
      (void)fputs(level == EXACT ? " exact  " : " on the SSD\n", stdout);
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
