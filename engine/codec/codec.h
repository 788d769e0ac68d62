// The codec table: one const row for each way to code a page; and the coder: what the pages of one layer are coded
// by.
//
// A codec turns up to 64 rows of K and V per head into a page and answers attention on it without decoding:
//
//   score_t  = q . x_t            query(), once per attend and coder; scores(), per page
//   out      = sum_t a_t x_t      accumulate(), per page; output(), once per attend and coder
//
// Everything is plain float and deterministic: the scalar reference kernels define the numbers. Codec ids are written
// into pages and never reused; 0 is that of exact rows, which are in no page.
//
// Threads: all functions are pure.
#ifndef QKV_ENGINE_CODEC_CODEC_H
#define QKV_ENGINE_CODEC_CODEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/pool.h"
#include "engine/base/tensor.h"
#include "engine/codec/calibration.h"
#include "engine/codec/page.h"
#include "engine/codec/policy.h"
#include "engine/codec/precision.h"
#include "engine/codec/rope.h"

// How the pages of one layer are coded under one policy and one calibration: what every codec's coder begins with.
// Immutable; the holder of pages keeps their coder alive (engine/cache/coding.h).
typedef struct qkv_coder {
  const qkv_codec *codec;
  uint32_t layer;
  uint16_t kv_heads;
  uint16_t key_dim, value_dim;
  uint32_t calibration;  // version; 0: data-free
  uint32_t kind;         // errors compare between coders of one kind
} qkv_coder;

// What coders are made of.
typedef struct qkv_coder_spec {
  uint32_t layers, kv_heads, q_heads, key_dim, value_dim;
  const qkv_rope *rope;        // theta 0: none
  const qkv_policy *policies;  // [layers], resolved
  qkv_purpose purpose;
  const qkv_calibration *calibration;  // NULL: data-free
} qkv_coder_spec;

// The most pages for one call of weigh; bytes that a codec may keep for a block of queries.
#define QKV_PAGES_TOGETHER 8
#define QKV_QUERY_OWN_MAX 1048576

// Up to QKV_QUERY_BLOCK queries of one KV head, ready for the pages of one coder.
typedef struct qkv_query_block {
  size_t count;
  qkv_precision precision;
  // Brought into the cache while the i-th page of a call is worked on: codes of a page to be attended soon. query()
  // sets NULL: none.
  struct {
    const void *page;
    qkv_part part;
  } ahead[QKV_PAGES_TOGETHER];
  _Alignas(64) float rows[QKV_QUERY_BLOCK * QKV_DIM_MAX];  // [count][key_dim], as attended, times the scale
  _Alignas(64) unsigned char own[QKV_QUERY_OWN_MAX];       // the codec's
} qkv_query_block;

// A tier, in eighths of a bit a coordinate, for every group of QKV_GROUP_TOKENS tokens of every part of one head.
typedef struct qkv_head_tiers {
  uint8_t tiers[2][QKV_PAGE_GROUPS];  // [part][group]
} qkv_head_tiers;

// One head's keys or values under one coder: what each tier costs and misses.
typedef struct qkv_lane {
  uint16_t dim;
  const uint16_t *group_bytes;     // [QKV_TIER_MAX + 1], of the codes of one group
  float errors[QKV_TIER_MAX + 1];  // squared error of a row of size 1, weighed by coordinates
  float offset;                    // bits that its calibration gives it more than the average (bit_budget.h)
  float size;                      // mean square of a row of size 1
  bool weighed;                    // errors are weighed by what queries make of them
} qkv_lane;

// What a codec adds whose pages can be brought to fewer bits without their rows: dropping planes.
typedef struct qkv_codec_planes {
  // Of a valid page: heads [kv_heads]; and whether a part's groups may go to lower tiers.
  void (*tiers)(const void *page, qkv_head_tiers *heads);
  bool (*part_drops)(const void *page, uint16_t kv_head, qkv_part part);
  // Whether a valid page has every plane that the coder writes.
  bool (*whole)(const qkv_coder *coder, const void *page);
  const uint16_t *(*group_bytes)(const qkv_coder *coder, uint16_t kv_head, qkv_part part);
  void (*lane)(const qkv_coder *coder, uint16_t kv_head, qkv_part part, qkv_lane *lane);
  // The squared sizes of a head's rows, by slot; 0 for rows that dropping does not change.
  void (*sizes)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part,
                float sizes[QKV_PAGE_TOKENS]);
  // Fills `image` (64-byte aligned, as large as the page) with the page at the lower of its tiers and the wanted
  // ones, heads [kv_heads], as far as it can be cut, and seals it. Returns the bytes of the image.
  size_t (*drop)(const qkv_coder *coder, const void *page, const qkv_head_tiers *heads, void *image);
} qkv_codec_planes;

// What a codec keeps in the files of calibrations that are made for it: its sections (calibration.h), one for each
// number of bits, with as many bytes for each head.
typedef struct qkv_codec_section {
  uint8_t version;
  bool keys_only;                                                      // values need nothing of it
  size_t (*bytes)(const qkv_calibration_shape *shape, unsigned bits);  // of a head; a multiple of 64
  // Fills zeros, from a head's transforms.
  void (*make)(const qkv_calibration *calibration, unsigned bits, uint32_t layer, uint32_t kv_head, uint8_t *out);
  // A head's keys or values become those of rows without structure: a trial has left them data-free.
  void (*clear)(const qkv_calibration_shape *shape, unsigned bits, bool keys, uint8_t *head);
  // Any bytes in place of a head's: NULL, or what is wrong.
  const char *(*validate)(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *head);
} qkv_codec_section;

// A number that a policy may give to a codec, and its allowed values.
typedef struct qkv_parameter {
  const char *name;   // as in the message of the contract
  uint32_t fallback;  // where it is not said
  bool (*valid)(uint32_t value);
  const char *text;  // "32 and 64"
} qkv_parameter;

struct qkv_codec {
  uint8_t id;
  const char *name;
  const qkv_parameter *parameters;  // [parameter_count], its own
  size_t parameter_count;
  const char *message;     // the policy's field in the contract that has these; NULL: that of the codec's name
  const qkv_codec *inner;  // of a stage: the codec in it, whose parameters are its, too. NULL: none
  const struct qkv_part_codec
      *part;        // of codecs whose pages are made of parts (parts.h), which go together; else NULL
  bool calibrated;  // its coders use a calibration where there is one
  const qkv_codec_section *section;  // NULL: none
  bool needs_rope;                   // codes keys before RoPE: the model has to have it declared
  // Allowed code bits per coordinate, and what they are.
  bool (*bits_valid)(double bits);
  const char *bits_text;  // "multiples of 0.125 up to 8"
  // Fills coders[layer] for each of the spec's layers whose policy's codec has this function. Returns what they
  // share, for destroy(), and adds the memory of all to `bytes`. Afterwards `spec` and what it points to are not used
  // any more, except the calibration.
  void *(*create)(const qkv_coder_spec *spec, const qkv_coder **coders, uint64_t *bytes);
  // The most memory that create() takes for the spec, which is known before anything is made.
  uint64_t (*cost)(const qkv_coder_spec *spec);
  void (*destroy)(void *made);
  // Most bytes that a page takes.
  size_t (*page_bytes_max)(const qkv_coder *coder);
  // Codes `tokens` (1..64) rows from `position` on: k is [tokens][kv_heads][key_dim], as attended (after RoPE), v is
  // [tokens][kv_heads][value_dim], of type `dtype`, dense and finite, |x| <= QKV_ROW_MAX. Fills the whole image
  // (64-byte aligned, of page_bytes_max) and seals it. The missing slots of a short page are coded as zero rows. Idle
  // threads of `pool` (NULL: none) take heads off the caller. Returns the bytes of the image.
  size_t (*encode)(const qkv_coder *coder, uint64_t position, uint32_t tokens, qkv_dtype dtype, const void *k,
                   const void *v, qkv_pool *pool, void *image);
  // Makes `own` of a block whose `count`, `rows` and `precision` are set.
  void (*query)(const qkv_coder *coder, uint16_t kv_head, qkv_query_block *queries);
  // scores[count][64] = q . k_t. `queries` caches state from page to page; pages in order of position are fastest.
  void (*scores)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_query_block *queries, float *scores);
  // sums[n][value_dim] += weights[n][64] . v_t, in code space.
  void (*accumulate)(const qkv_coder *coder, const void *page, uint16_t kv_head, const float *weights, size_t n,
                     float *sums);
  // Softmax and accumulation over up to QKV_PAGES_TOGETHER pages, one after the other, from scores [pages][count][64]
  // and their peaks [pages][count], in integers where `queries` say so: weights are exp(score - peak), totals
  // [pages][count] get their sums. Returns how many pages are done: those before the first whose values need
  // floating point. NULL: all need it.
  size_t (*weigh)(const qkv_coder *coder, const void *const *pages, size_t page_count, uint16_t kv_head,
                  qkv_query_block *queries, const float *scores, const float *peaks, float *totals, float *sums);
  // sums [n][value_dim] in place, from code space to model space; totals[n], the sums of all weights.
  void (*output)(const qkv_coder *coder, uint16_t kv_head, float *sums, const double *totals, size_t n);
  // One head's rows [tokens][key_dim or value_dim] in token order, tokens = the header's; keys as attended, or as
  // they are before RoPE.
  void (*decode)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, bool before_rope,
                 float *rows);
  // How many of one head's rows [tokens][key_dim or value_dim] are, one after the other, what encode would write at
  // tokens first, first + 1, ... of the page: it distinguishes a repeated append from a different one.
  uint32_t (*rows_match)(const qkv_coder *coder, const void *page, uint16_t kv_head, qkv_part part, uint32_t first,
                         uint32_t tokens, const float *rows);
  const qkv_codec_planes *planes;  // NULL: pages keep the bits that they were coded with
  // DATA_LOSS with the reason unless the image may be read as one of the coder's.
  qkv_status (*validate)(const qkv_coder *coder, const void *image, size_t bytes, qkv_error *error);
  // Largest relative squared error of a row (of a key, where values are coded otherwise) in the data-free code,
  // averaged over random rows: the bound the tests hold it to. For rows whose RMS the gain byte can represent
  // (page.h): below about 1.6e-5 the error grows, up to 1 for a zero row.
  double (*error_bound)(double bits);
};

// Whether rows stay as they are: the codec "exact", id 0, whose coders code no pages.
static inline bool qkv_codec_is_exact(const qkv_codec *codec) {
  return codec->id == 0;
}

// Whether codes of keys or of values are made with a calibration, where there is one. The policy has a codec.
static inline bool qkv_policy_calibrates(const qkv_policy *policy, qkv_part part) {
  if (qkv_codec_is_exact(policy->codec) || !policy->codec->calibrated) return false;
  return part == QKV_K || policy->codec_v == NULL || policy->codec_v->calibrated;
}

// The i-th parameter of a codec, counted on in the codec that is in it, and the policy's field in the contract that
// has it. NULL if there are not so many.
static inline const qkv_parameter *qkv_codec_parameter(const qkv_codec *codec, size_t i, const char **message) {
  for (; codec != NULL; i -= codec->parameter_count, codec = codec->inner) {
    if (i >= codec->parameter_count) continue;
    *message = codec->message != NULL ? codec->message : codec->name;
    return &codec->parameters[i];
  }
  return NULL;
}

// The codec of keys or of values of a policy; NULL where it says none.
static inline const qkv_codec *qkv_policy_codec(const qkv_policy *policy, qkv_part part) {
  return part == QKV_V && policy->codec_v != NULL ? policy->codec_v : policy->codec;
}

#define QKV_ROW_MAX 32768.0f
#define QKV_CODEC_EMBEDDED 1  // what codes where nothing is said

// NULL if there is none.
const qkv_codec *qkv_codec_by_id(uint8_t id);
const qkv_codec *qkv_codec_by_name(const char *name);
// Rows of the table, for lists: NULL beyond the end.
const qkv_codec *qkv_codec_at(size_t row);
// The names in the table, as "a, b and c", for error messages.
enum { QKV_CODEC_NAMES_MAX = 512 };
char *qkv_codec_names(char names[QKV_CODEC_NAMES_MAX]);
// Notes the sections that coders of a policy use.
void qkv_section_want(qkv_section_wants *wants, const qkv_policy *policy);
// The bits where none are given: 4, or of a codec without 4 bits 8 or 2.
double qkv_codec_bits_default(const qkv_codec *codec);

#endif
