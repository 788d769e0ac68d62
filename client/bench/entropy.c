// qkv-bench entropy: what entropy coding would save of codes, on a model's own rows.
//
// Rows of a dump go into page images. Of these zstd is measured as the SSD tier uses it, on records of up to 256 KiB.
// Of the codes alone, one symbol each (a byte of codecs whose codes are indices), the ideal size of four coders:
//
//   one table        order 0, a static table for each number of bits, for all of the model
//   tables           order 0, a static table for each coordinate of each head
//   adaptive         order 0, a model for each page, head and part, which begins with equal counts
//   adaptive, prior  the same, which begins with 64 symbols' worth of the one table
//
// Static tables are learnt from the rows that they are measured on. (symbols - 1) / 2 nats are added for each table,
// which is what that saves.
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <zstd.h>

#include "client/bench/dump.h"
#include "client/bench/quality.h"
#include "client/common/terminal.h"
#include "client/worker/text.h"
#include "engine/codec/embedded_internal.h"
#include "engine/codec/pack.h"
#include "engine/codec/parts.h"

enum { SYMBOLS = 256, DEPTHS = QKV_DEPTH_MAX + 1, RECORD = 256 << 10, PRIOR = 64 };
enum { ZSTD_FAST = 1, ZSTD_BEST = 19 };

static const qkv_option options[] = {
    {"dump", QKV_OPTION_STRING, offsetof(qkv_bench_settings, dump), NULL, 0, 0, "FILE",
     "keys and values of a model, as qkv-worker dump and qkvctl fetch write them"},
    {"calibration", QKV_OPTION_STRING, offsetof(qkv_bench_settings, calibration), NULL, 0, 0, "FILE",
     "calibration of the model; without it only data-free codes are measured"},
    {"setting", QKV_OPTION_LIST, offsetof(qkv_bench_settings, ways), NULL, 0, 0, "WAY",
     "a way to code, as of quality; may be given several times. Without any, a list of them"},
    {"rope-theta", QKV_OPTION_REAL, offsetof(qkv_bench_settings, rope_theta), "0", 0, QKV_ROPE_THETA_MAX, "THETA",
     "of the dump's model; 0: it has no RoPE, or the calibration says"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

static const struct {
  bool calibrated;
  const char *setting;
} defaults[] = {
    {false, "plain:4"},      {false, "plain:3"},      {false, "plain:2"},      {true, "attend:4"},
    {true, "attend:3"},      {true, "attend:2"},      {true, "archive:3"},     {true, "archive:2"},
    {true, "archive:1.5"},   {false, "turboquant:4"}, {false, "turboquant:2"}, {false, "polarquant:3"},
    {false, "kivi:4"},       {false, "kivi:2"},       {false, "pq:2"},         {false, "int8:8"},
    {false, "running-u8:8"},
};

// ---- Symbols ----

// One head's codes of a page.
typedef struct block_symbols {
  size_t rows, width;  // [rows][width]; all of a column are of one kind
  uint8_t symbols[QKV_PAGE_TOKENS * QKV_DIM_MAX];
  uint8_t depths[QKV_DIM_MAX];  // bits of a column's symbols; 0: it has none
} block_symbols;

static void read_embedded(const qkv_coder *coder, const void *page, uint16_t head, qkv_part part,
                          block_symbols *block) {
  qkv_page_codes found;
  qkvi_codes codes[QKV_DIM_MAX];
  qkvi_find(coder, page, head, part, &found);
  block->rows = QKV_PAGE_TOKENS;
  block->width = found.schedule->dim;
  for (size_t group = 0; group < QKV_PAGE_GROUPS; group++) {
    const unsigned tier = found.tiers[group];
    qkvi_unpack(part, found.schedule, tier, found.groups[group], codes);
    for (size_t i = 0; i < (size_t)QKV_GROUP_TOKENS * block->width; i++) {
      const size_t token = i / block->width, c = i % block->width;
      block->symbols[group * QKV_GROUP_TOKENS * block->width + i] = codes[c][token];
    }
    for (size_t c = 0; c < block->width; c++) {
      block->depths[c] = 0;
      for (unsigned depth = 1; depth <= QKV_DEPTH_MAX; depth++)
        block->depths[c] += c < found.schedule->reach[tier][depth];
    }
  }
}

static void transpose(const uint8_t *columns, size_t width, uint8_t *rows) {
  for (size_t i = 0; i < width * QKV_PAGE_TOKENS; i++)
    rows[i % QKV_PAGE_TOKENS * width + i / QKV_PAGE_TOKENS] = columns[i];
}

// A page of parts (parts.h): codes are at the end of each block.
static void read_parts(const qkv_coder *coder, const uint8_t *page, uint16_t head, qkv_part part,
                       block_symbols *block) {
  enum { PARTS_AT = 64, PART_BYTES = 16, BLOCKS_AT = 128, INDEX_BITS = 8 };
  uint32_t bytes[2];
  for (size_t i = 0; i < 2; i++) memcpy(&bytes[i], page + PARTS_AT + i * PART_BYTES + 4, sizeof bytes[i]);
  const uint8_t *own = page + PARTS_AT + part * PART_BYTES;
  const qkv_codec *codec = qkv_codec_by_id(own[0]);
  const qkv_part_coder as = {.part = part, .dim = qkvi_coder_dim(coder, part), .bits = own[2]};
  const uint8_t *end =
      page + BLOCKS_AT + head * (size_t)(bytes[0] + bytes[1]) + (part == QKV_V ? bytes[0] : 0) + bytes[part];
  const bool indices = strcmp(codec->name, "pq") == 0 || strcmp(codec->name, "commvq") == 0;
  block->rows = QKV_PAGE_TOKENS;
  block->width = indices ? qkvi_part_code_bytes(&as) / QKV_PAGE_TOKENS : as.dim;
  memset(block->depths, indices ? INDEX_BITS : as.bits, block->width);
  if (indices) {
    transpose(end - qkvi_part_code_bytes(&as), block->width, block->symbols);
  } else {
    qkvi_part_unpack(&as, end - qkvi_part_code_bytes(&as), block->symbols);
  }
}

// ---- Sizes ----

// Bits, and what they are of.
typedef struct entropy_sums {
  double coordinates, images, codes, zstd[2], one_table, tables, adaptive, prior;
} entropy_sums;

typedef uint32_t histogram[SYMBOLS];

// Ideal bits of what was counted, under a static table of its own frequencies.
static double table_bits(const histogram counts) {
  double n = 0, bits = 0, used = 0;
  for (size_t i = 0; i < SYMBOLS; i++) n += counts[i];
  for (size_t i = 0; i < SYMBOLS; i++) {
    if (counts[i] == 0) continue;
    bits -= counts[i] * log2(counts[i] / n);
    used++;
  }
  return n > 0 ? bits + (used - 1) / 2 * M_LOG2E : 0;
}

// One column kind of a block, coded in order; weights [SYMBOLS], which counts are added to.
static double adaptive_bits(const block_symbols *block, unsigned depth, double *weights) {
  double total = 0, bits = 0;
  for (size_t i = 0; i < SYMBOLS; i++) total += weights[i];
  for (size_t i = 0; i < block->rows * block->width; i++) {
    if (block->depths[i % block->width] != depth) continue;
    double *weight = &weights[block->symbols[i]];
    bits -= log2(*weight / total);
    *weight += 1;
    total += 1;
  }
  return bits;
}

typedef struct entropy_job {
  const qkv_bench_settings *settings;
  qkv_dump *dump;
  const qkv_calibration *calibration;
  qkv_model model;
  qkvi_setting_list ways;
  ZSTD_CCtx *zstd;
} entropy_job;

// All pages of one layer under one coder.
typedef struct coded_layer {
  const qkv_coder *coder;
  size_t pages, capacity;
  uint8_t *images;  // [pages][capacity]
  size_t *bytes;    // [pages]
} coded_layer;

static void *memory(size_t bytes) {
  void *block = aligned_alloc(64, (bytes + 64) / 64 * 64);
  if (block == NULL) abort();
  return block;
}

static coded_layer code_layer(const entropy_job *job, const qkv_coder *coder, size_t index) {
  const qkv_dump *dump = job->dump;
  const uint64_t tokens = qkv_dump_tokens(dump, index, QKV_DUMP_K) / QKV_PAGE_TOKENS * QKV_PAGE_TOKENS;
  const size_t k_width = (size_t)coder->kv_heads * coder->key_dim,
               v_width = (size_t)coder->kv_heads * coder->value_dim;
  float *k = memory(tokens * k_width * sizeof *k), *v = memory(tokens * v_width * sizeof *v);
  coded_layer layer = {.coder = coder,
                       .pages = tokens / QKV_PAGE_TOKENS,
                       .capacity = (coder->codec->page_bytes_max(coder) + 63) / 64 * 64};
  layer.images = memory(layer.pages * layer.capacity);
  layer.bytes = memory(layer.pages * sizeof *layer.bytes);
  qkv_dump_read(dump, index, QKV_DUMP_K, 0, tokens, k);
  qkv_dump_read(dump, index, QKV_DUMP_V, 0, tokens, v);
  for (size_t page = 0; page < layer.pages; page++) {
    const size_t at = page * QKV_PAGE_TOKENS;
    layer.bytes[page] =
        coder->codec->encode(coder, qkv_dump_first_position(dump) + at, QKV_PAGE_TOKENS, QKV_FP32, k + at * k_width,
                             v + at * v_width, NULL, layer.images + page * layer.capacity);
  }
  free(k);
  free(v);
  return layer;
}

static void compress(const entropy_job *job, const coded_layer *layer, entropy_sums *sums) {
  const size_t capacity = ZSTD_compressBound(RECORD + layer->capacity);
  uint8_t *raw = memory(RECORD + layer->capacity), *out = memory(capacity);
  size_t have = 0;
  for (size_t page = 0; page < layer->pages; page++) {
    memcpy(raw + have, layer->images + page * layer->capacity, layer->bytes[page]);
    have += layer->bytes[page];
    sums->images += 8.0 * (double)layer->bytes[page];
    if (have < RECORD && page + 1 < layer->pages) continue;
    for (size_t i = 0; i < 2; i++) {
      const size_t made = ZSTD_compressCCtx(job->zstd, out, capacity, raw, have, i == 0 ? ZSTD_FAST : ZSTD_BEST);
      sums->zstd[i] += 8.0 * (double)(ZSTD_isError(made) || made > have ? have : made);
    }
    have = 0;
  }
  free(raw);
  free(out);
}

static void read_block(const coded_layer *layer, size_t page, uint16_t head, qkv_part part, block_symbols *block) {
  const uint8_t *image = layer->images + page * layer->capacity;
  if (layer->coder->codec->part != NULL) return read_parts(layer->coder, image, head, part, block);
  read_embedded(layer->coder, image, head, part, block);
}

// Tables for each coordinate of each head of a layer; adds to those for all of the model.
static void count_layer(const coded_layer *layer, block_symbols *block, histogram *all, entropy_sums *sums) {
  histogram *own = memory(QKV_DIM_MAX * sizeof *own);
  for (size_t i = 0; i < 2 * (size_t)layer->coder->kv_heads; i++) {
    const qkv_part part = i % 2 == 0 ? QKV_K : QKV_V;
    memset(own, 0, QKV_DIM_MAX * sizeof *own);
    for (size_t page = 0; page < layer->pages; page++) {
      read_block(layer, page, (uint16_t)(i / 2), part, block);
      for (size_t at = 0; at < block->rows * block->width; at++) {
        const size_t c = at % block->width;
        own[c][block->symbols[at]] += block->depths[c] > 0;
        all[part * DEPTHS + block->depths[c]][block->symbols[at]]++;
      }
      for (size_t c = 0; c < block->width; c++) sums->codes += (double)block->depths[c] * (double)block->rows;
    }
    for (size_t c = 0; c < block->width; c++) sums->tables += table_bits(own[c]);
    sums->coordinates += (double)layer->pages * QKV_PAGE_TOKENS * qkvi_coder_dim(layer->coder, part);
  }
  free(own);
}

static void adapt_layer(const coded_layer *layer, block_symbols *block, histogram *all, entropy_sums *sums) {
  for (size_t i = 0; i < 2 * (size_t)layer->coder->kv_heads * layer->pages; i++) {
    const qkv_part part = i % 2 == 0 ? QKV_K : QKV_V;
    read_block(layer, i / 2 % layer->pages, (uint16_t)(i / 2 / layer->pages), part, block);
    for (unsigned depth = 1; depth < DEPTHS; depth++) {
      const uint32_t *counts = all[part * DEPTHS + depth];
      double equal[SYMBOLS] = {0}, prior[SYMBOLS] = {0}, n = 0;
      for (size_t s = 0; s < (size_t)1 << depth; s++) n += counts[s];
      for (size_t s = 0; s < (size_t)1 << depth; s++) {
        equal[s] = 0.5;
        prior[s] = PRIOR * (counts[s] + 0.5) / (n + 0.5 * (double)((size_t)1 << depth));
      }
      sums->adaptive += adaptive_bits(block, depth, equal);
      sums->prior += adaptive_bits(block, depth, prior);
    }
  }
}

static void measure(const entropy_job *job, const qkvi_setting *way, entropy_sums *sums) {
  qkv_coding *coding = qkvi_setting_coding(way, &job->model, job->calibration);
  const size_t layers = qkv_dump_layers(job->dump);
  coded_layer *coded = calloc(layers, sizeof *coded);
  histogram *all = calloc((size_t)2 * DEPTHS, sizeof *all);
  block_symbols *block = calloc(1, sizeof *block);
  if (coded == NULL || all == NULL || block == NULL) abort();
  *sums = (entropy_sums){0};
  for (size_t i = 0; i < layers; i++) {
    coded[i] = code_layer(job, qkv_coding_layer(coding, qkv_dump_number(job->dump, i)), i);
    compress(job, &coded[i], sums);
    count_layer(&coded[i], block, all, sums);
  }
  for (size_t i = 0; i < (size_t)2 * DEPTHS; i++) sums->one_table += i % DEPTHS > 0 ? table_bits(all[i]) : 0;
  for (size_t i = 0; i < layers; i++) {
    adapt_layer(&coded[i], block, all, sums);
    free(coded[i].images);
    free(coded[i].bytes);
  }
  free(block);
  free(all);
  free(coded);
  qkv_coding_unref(&coding);
}

// ---- The command ----

// What is saved, in bits a coordinate; of page images, or of the codes in them.
static bool print_json(const char *name, const entropy_sums *sums) {
  const double each = 1 / sums->coordinates;
  return qkv_json_figures(
      json_pack("{s:s, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f}", "bench", "entropy", "scheme", name,
                "bits_per_coordinate", sums->images * each, "code_bits", sums->codes * each, "zstd_1",
                (sums->images - sums->zstd[0]) * each, "zstd_19", (sums->images - sums->zstd[1]) * each, "one_table",
                (sums->codes - sums->one_table) * each, "tables", (sums->codes - sums->tables) * each, "adaptive",
                (sums->codes - sums->adaptive) * each, "adaptive_prior", (sums->codes - sums->prior) * each));
}

static void print_row(qkv_table *table, const char *name, const entropy_sums *sums) {
  const double each = 1 / sums->coordinates;
  qkv_table_cell(table, "%s", name);
  qkv_table_cell(table, "%.3f", sums->images * each);
  qkv_table_cell(table, "%.3f", sums->codes * each);
  for (size_t i = 0; i < 2; i++) qkv_table_cell(table, "%.3f", (sums->images - sums->zstd[i]) * each);
  const double sizes[] = {sums->one_table, sums->tables, sums->adaptive, sums->prior};
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
    qkv_table_cell(table, "%.3f", (sums->codes - sizes[i]) * each);
}

static int show(const entropy_job *job) {
  static const char *const headings[] = {"scheme",          "bits",   "codes",    "zstd 1 saves",   "zstd 19",
                                         "one table saves", "tables", "adaptive", "adaptive, prior"};
  enum { COLUMNS = sizeof headings / sizeof *headings };
  qkv_table *table = qkv_table_create(COLUMNS);
  for (size_t i = 0; i < COLUMNS; i++) qkv_table_cell(table, "%s", headings[i]);
  bool shown = true;
  for (size_t i = 0; shown && i < job->ways.count; i++) {
    char name[QKVI_SETTING_NAME_MAX];
    entropy_sums sums;
    measure(job, &job->ways.items[i], &sums);
    qkvi_setting_name(&job->ways.items[i], name);
    if (job->settings->program.json) {
      shown = print_json(name, &sums);
    } else {
      print_row(table, name, &sums);
    }
  }
  if (!job->settings->program.json) {
    qkv_table_print(table, stdout);
    shown = fflush(stdout) == 0;
  }
  qkv_table_destroy(&table);
  return shown ? QKV_EXIT_OK : qkv_program_failed("standard output cannot be written");
}

static qkv_status load_calibration(entropy_job *job, qkv_error *error) {
  const char *path = job->settings->calibration;
  if (path == NULL) return QKV_OK;
  uint8_t *data = NULL;
  int64_t bytes = 0;
  qkv_calibration *read = NULL;
  QKV_TRY(qkvi_text_read(path, &data, &bytes, error));
  const qkv_status status = qkv_calibration_read(data, (size_t)bytes, &read, error);
  free(data);
  job->calibration = read;
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "%s: ", path);
}

// Signs of turboquant-ip are even by themselves; exact rows are no codes; factors and anchors are not counted.
static qkv_status check_way(const entropy_job *job, const qkvi_setting *way, qkv_error *error) {
  const char *name = way->policy.codec->name;
  if (strcmp(name, "turboquant-ip") == 0 || qkv_codec_is_exact(way->policy.codec) || way->tier_bits > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--setting: codes of %s%s are not measured here", name,
                    way->tier_bits > 0 ? " by attention" : "");
  if (way->frame != QKV_FRAME_ARCHIVE || job->model.rope.theta != 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the archive frame needs a model with RoPE; see --rope-theta");
}

static qkv_status prepare(entropy_job *job, qkv_error *error) {
  const bool calibrated = job->settings->calibration != NULL;
  qkv_bench_settings each = {0};
  const char *way;
  each.ways = (qkv_option_list){.items = &way, .count = 1};
  QKV_TRY(load_calibration(job, error));
  QKV_TRY(qkv_dump_open(job->settings->dump, &job->dump, error));
  job->model = qkvi_dump_model(job->dump, job->calibration, job->settings->rope_theta);
  QKV_TRY(qkv_model_resolve(&job->model, error));
  if (job->calibration != NULL) {
    const qkv_calibration_shape shape = qkv_model_calibration_shape(&job->model);
    QKV_TRY(qkv_calibration_check(job->calibration, &shape, error));
  }
  if (job->settings->ways.count > 0) QKV_TRY(qkvi_settings_collect(job->settings, calibrated, &job->ways, error));
  for (size_t i = 0; job->settings->ways.count == 0 && i < sizeof defaults / sizeof *defaults; i++) {
    way = defaults[i].setting;
    if (calibrated || !defaults[i].calibrated) QKV_TRY(qkvi_settings_collect(&each, calibrated, &job->ways, error));
  }
  for (size_t i = 0; i < job->ways.count; i++) QKV_TRY(check_way(job, &job->ways.items[i], error));
  return QKV_OK;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  entropy_job job = {.settings = values};
  qkv_error error = {0};
  if (job.settings->dump == NULL) return qkv_program_misused("--dump is missing: a file of keys and values");
  job.zstd = ZSTD_createCCtx();
  if (job.zstd == NULL) abort();
  const int status = prepare(&job, &error) == QKV_OK ? show(&job) : qkv_program_failed("%s", error.text);
  ZSTD_freeCCtx(job.zstd);
  qkv_dump_close(&job.dump);
  qkv_calibration_unref(&job.calibration);
  qkvi_settings_clear(&job.ways);
  return status;
}

const qkv_command qkvi_bench_entropy = {.name = "entropy",
                                        .arguments = "",
                                        .summary = "what entropy coding would save of codes, in process",
                                        .options = options,
                                        .option_count = sizeof options / sizeof *options,
                                        .run = run};
