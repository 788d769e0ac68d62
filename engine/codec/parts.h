// Pages of parts: what the codecs have in common that code each KV head's keys and values by themselves. A codec of
// parts says how 64 rows of one head become a block of bytes of a fixed size, and what attention on it is; keys and
// values may have different ones.
//
//   page of parts                            a part
//   +-----------------------------+  0        0  u8 codec id           1  u8 version of the codec's block
//   | header (page.h), version 1  |           2  u8 bits a coordinate  3  u8 eighths of a bit
//   +-----------------------------+  64       4  u32 bytes of a block
//   | part: keys                  |           8  u32 first parameter  12  u32 second parameter (as a policy has them)
//   +-----------------------------+  80
//   | part: values                |
//   +-----------------------------+  96       u32 third and fourth parameter of keys, and of values
//   | parameters, zeros           |
//   +-----------------------------+  128
//   | [ u32 end of each block,    |  where blocks of keys or values have no fixed size: in the order of the blocks,
//   |   zeros to a multiple of 64]|  bytes from the first one's begin
//   +-----------------------------+
//   | head 0: block of keys       |  blocks are multiples of 64 bytes; where neither have a fixed size, of 2
//   |         block of values     |
//   | head 1 ...                  |
//   | [ zeros to a multiple of 64]|
//   +-----------------------------+  bytes
//
// Byte 3 of a part is what its tier has above whole bits, in eighths.
//
// Of the header, `codec` is that of the keys, tiers are eighths of the bits, frame, features and outliers are 0, and
// so is the calibration but of codecs that use one. Keys are coded as attended, or before RoPE where the codec has
// columns(). No planes can be dropped.
//
// Adding a codec: docs/adding-a-codec.md.
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CODEC_PARTS_H
#define QKV_ENGINE_CODEC_PARTS_H

#include "engine/codec/codec.h"
#include "engine/kernel/mix.h"

#define QKV_PARTS_VERSION 1

typedef struct qkv_part_codec qkv_part_codec;

// How the keys or the values of a layer's heads are coded.
typedef struct qkv_part_coder {
  const qkv_part_codec *codec;
  qkv_part part;
  uint16_t dim;
  uint8_t bits;  // whole ones of the tier
  uint8_t tier;  // eighths of a bit
  bool in_loop;  // rows are differences to decoded ones (delta.h)
  uint32_t parameters[QKV_PARAMETERS_MAX];
  uint32_t block_bytes;  // of a head; where blocks have no fixed size about the most
  size_t bytes;          // of the block at hand, in functions that read one of a page
  const void *tables;    // the codec's, for these numbers, of the process; or of the head
} qkv_part_coder;

// Of codecs whose blocks have no fixed size. All blocks of a page are written with one number, their step: about the
// least, which is the largest in bytes, that lets the page have no more bytes than its blocks' block_bytes together.
typedef struct qkv_part_stream {
  size_t (*prepared_bytes)(const qkv_part_coder *coder);
  // As encode(), to what measure() and write() take, aligned to 64; `position` is that of slot 0.
  void (*prepare)(const qkv_part_coder *coder, uint64_t position, const float *rows, uint32_t tokens, void *prepared);
  // The bytes that a step takes of rows as they are expected: never more of a larger step. Cheap.
  size_t (*expect)(const qkv_part_coder *coder, const void *prepared, unsigned step);
  // About the bytes that a step takes. May keep in `prepared` what write() of the same step needs.
  size_t (*measure)(const qkv_part_coder *coder, void *prepared, unsigned step);
  // The bytes, a multiple of 2; 0: `space` does not hold them. Of QKV_PART_STEP_LAST at most 4, whatever the rows.
  size_t (*write)(const qkv_part_coder *coder, void *prepared, unsigned step, uint8_t *block, size_t space);
  // How many of a block's slots from `first` on are, one after the other, those of rows [tokens][dim].
  uint32_t (*matching)(const qkv_part_coder *coder, const uint8_t *block, uint32_t first, uint32_t tokens,
                       const float *rows);
} qkv_part_stream;
#define QKV_PART_STEP_LAST 511u

struct qkv_part_codec {
  uint8_t id;       // of the codec table
  uint8_t version;  // of its blocks
  // Sets block_bytes (which is rounded up to 64 afterwards) and tables; all else is set. May hand a part to another
  // codec, whose init it calls.
  void (*init)(qkv_part_coder *coder);
  // Of codecs with tables for each head: bytes of one, and fills one with what encode() and the others find in
  // `tables`; the calibration (NULL: none) is alive as long as it. Sizes of blocks do not depend on them. NULL: none.
  size_t (*head_bytes)(const qkv_part_coder *coder);
  void (*head)(const qkv_part_coder *coder, const qkv_coder_spec *spec, const qkv_calibration *calibration,
               uint32_t layer, uint32_t kv_head, void *tables);
  bool copies;                    // without a calibration the tables of a layer's heads are the same bytes
  const qkv_part_stream *stream;  // in place of encode() and matches(); NULL: blocks have a fixed size
  // rows [64][dim], zeros from `tokens` on, to a block of zeros; keys before RoPE, where there is columns().
  void (*encode)(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
  // Of keys: queries [n][dim] to what scores() takes, `ready` of QKV_QUERY_OWN_MAX bytes, aligned to 64. NULL: they
  // stay as they are.
  void (*query)(const qkv_part_coder *coder, const float *queries, size_t n, float *ready);
  // Of keys: scores[n][64] = q . k_t; n <= QKV_QUERY_BLOCK. Of `precision`: qkvi_part_mix.
  void (*scores)(const qkv_part_coder *coder, const uint8_t *block, const float *queries, size_t n,
                 qkv_precision precision, float *scores);
  // Of keys that are coded before RoPE, instead of query() and scores(): columns [dim][64] of their rows without the
  // mean [dim], aligned to 64.
  void (*columns)(const qkv_part_coder *coder, const uint8_t *block, float *columns, float *mean);
  // Of values: sums[n][dim] += weights[n][64] . v_t, in code space; n <= QKV_QUERY_BLOCK.
  void (*accumulate)(const qkv_part_coder *coder, const uint8_t *block, const float *weights, size_t n,
                     qkv_precision precision, float *sums);
  // rows [n][dim] to code space, from which output() brings back. NULL: query() does that.
  void (*turn)(const qkv_part_coder *coder, const float *rows, size_t n, float *turned);
  // sums [n][dim] in place from code space. NULL: they are the rows' own.
  void (*output)(const qkv_part_coder *coder, float *sums, size_t n);
  // output() of codecs whose rows have a mean; totals[n], the sums of weights.
  void (*output_mean)(const qkv_part_coder *coder, float *sums, const double *totals, size_t n);
  void (*decode)(const qkv_part_coder *coder, const uint8_t *block, float *rows);  // [64][dim]
  // Of codecs that can be in a loop (delta.h): what decode() gives for a row [dim] in a slot, under the numbers that
  // rows share in the block. NULL: codes of a row depend on others in other ways, too.
  void (*round_trip)(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row,
                     float *decoded);
  // Where rows share numbers: writes those for these rows to a block of zeros; and encode() under the numbers that
  // the block has, of rows that are off by what codes miss. NULL: they share none.
  void (*share)(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
  void (*encode_shared)(const qkv_part_coder *coder, const float *rows, uint32_t tokens, uint8_t *block);
  // Whether a slot's codes are those of this row [dim].
  bool (*matches)(const qkv_part_coder *coder, const uint8_t *block, uint32_t slot, const float *row);
  // NULL, or what is wrong with the block's numbers: "scale 3 is nan". Functions that read a block take what this
  // lets pass.
  const char *(*validate)(const qkv_part_coder *coder, const uint8_t *block);
};

// The functions of a codec of parts, for its row in the codec table: `.part = &..., QKV_CODEC_OF_PARTS`.
#define QKV_CODEC_OF_PARTS                                                                             \
  .create = qkvi_parts_create, .cost = qkvi_parts_cost, .destroy = qkvi_parts_destroy,                 \
  .page_bytes_max = qkvi_parts_page_bytes_max, .encode = qkvi_parts_encode, .query = qkvi_parts_query, \
  .scores = qkvi_parts_scores, .accumulate = qkvi_parts_accumulate, .weigh = qkvi_parts_weigh,         \
  .output = qkvi_parts_output, .decode = qkvi_parts_decode, .rows_match = qkvi_parts_rows_match,       \
  .validate = qkvi_parts_validate

void *qkvi_parts_create(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes);
uint64_t qkvi_parts_cost(const qkv_coder_spec *spec);
void qkvi_parts_destroy(void *of);
size_t qkvi_parts_page_bytes_max(const qkv_coder *coder);
size_t qkvi_parts_encode(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype, const void *k,
                         const void *v, qkv_pool *pool, void *image);
void qkvi_parts_query(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries);
void qkvi_parts_scores(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries,
                       float *scores);
void qkvi_parts_accumulate(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights, size_t n,
                           float *sums);
size_t qkvi_parts_weigh(const qkv_coder *coder, const void *const *pages, size_t page_count, uint16_t kv_head,
                        qkv_query_block *queries, const float *scores, const float *peaks, float *totals,
                        float *sums);
void qkvi_parts_output(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n);
void qkvi_parts_decode(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, bool before_rope,
                       float *rows);
uint32_t qkvi_parts_rows_match(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                               uint32_t first, uint32_t tokens, const float *rows);
qkv_status qkvi_parts_validate(const qkv_coder *coder, const void *image, size_t bytes, qkv_error *error);

// A codec's own parameters that are 0 become their defaults. Those of the codec in it stay: it does the same.
void qkvi_part_defaults(const qkv_codec *codec, uint32_t parameters[QKV_PARAMETERS_MAX]);

// ---- What blocks of scalar codes have in common ----

// A block's codes as a matrix (kernel/mix.h): of keys lanes are tokens and steps coordinates, so that what belongs to
// a channel is in the factors and what belongs to a token is taken at the end; of values it is the other way around.
static inline size_t qkvi_part_lanes(const qkv_part_coder *coder) {
  return coder->part == QKV_K ? QKV_PAGE_TOKENS : coder->dim;
}

static inline size_t qkvi_part_steps(const qkv_part_coder *coder) {
  return coder->part == QKV_K ? coder->dim : QKV_PAGE_TOKENS;
}

static inline size_t qkvi_part_code_bytes(const qkv_part_coder *coder) {
  return (size_t)QKV_PAGE_TOKENS * coder->dim * coder->bits / 8;
}

// Whether products with codes are in whole numbers: by default, of codes of few bits.
static inline bool qkvi_part_in_integers(unsigned bits, qkv_precision precision) {
  return precision == QKV_PRECISION_DEFAULT && bits <= QKV_MIX_INTEGER_BITS;
}

// qkv_mix or qkv_mix_integer, whose codes without a table count from their middle.
void qkvi_part_mix(const qkv_code_matrix *matrix, const float *factors, size_t n, qkv_precision precision, float *out,
                   size_t stride);

// Codes [64][dim] to a matrix, and back.
void qkvi_part_pack(const qkv_part_coder *coder, const uint8_t *codes, uint8_t *matrix);
void qkvi_part_unpack(const qkv_part_coder *coder, const uint8_t *matrix, uint8_t *codes);
// The code of one coordinate of a slot.
uint8_t qkvi_part_code(const qkv_part_coder *coder, const uint8_t *matrix, uint32_t slot, size_t coordinate);

// Bits that are whole numbers from 1 to 8.
bool qkvi_whole_bits_valid(double bits);

#endif
