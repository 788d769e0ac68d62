// A calibration: how the rows of one model are transformed and which coordinates get the bits, for every layer and KV
// head, learnt from that model's own rows (calibrate.h) or loaded from a file.
//
// For keys of RoPE models there are two transforms, one for each frame: attend (rows after RoPE, minus the rotating
// anchor) and archive (rows before RoPE); for values there is one. Models without RoPE have one of keys, which both
// names give.
//
// It is its file: one run of bytes, which the transforms point into, so that nothing is computed when one is loaded
// and a file gives the same codes everywhere. Pages name the version of the calibration that they were coded with.
//
// Little-endian. Offsets in bytes. Arrays begin at multiples of 64; what lies between is 0.
//
//   file                                              header (192 bytes)
//   +--------------------------------+  0              0  u32 magic "QKVC"    4  u32 format (1, 2, 3)
//   | header                         |                 8  u64 bytes (of the whole file)
//   +--------------------------------+  192           16  u64 XXH3-64 of the file with this field 0
//   | layer 0, KV head 0: K attend   |                24  u32 layers         28  u32 kv_heads
//   |   [ K archive: with RoPE only ]|                32  u32 q_heads        36  u32 key_dim
//   |   V                            |                40  u32 value_dim      44  u8  band_k   45 u8 band_v
//   +--------------------------------+                46  u16 archive_refused (0, 1)
//   | layer 0, KV head 1: the same   |                48  u64 tokens that it was learnt from
//   +--------------------------------+                56  f64 rope.theta (0: none, and so is the rest)
//   | ...                            |                64  u32 rope.width     68  u8  interleaved   69 u8 scaling
//   +--------------------------------+                70  u16 0              72  f64 factor
//   | sections, of format 3          |                80  u64 original_max_position
//   +--------------------------------+  bytes         88  f64 low_freq_factor       96  f64 high_freq_factor
//   part (K attend, K archive or V; dim = d)         104  f64 beta_fast            112  f64 beta_slow
//    0  u16 anchor_pairs (format 1, K attend only)   120  f64 attention_factor     128 ... 191  0
//    2  i8  tier_offset, eighths     3  u8  0     4  f32 heavy_least (format 2, K attend only)     8 ... 63  0
//   64  u8  order[8 * d / band]      the bands as they get their bits, one at a time: at tier t, band b has as many
//                                    bits as it occurs among the first t * d / (8 * band) entries
//    .  f32 mean[d]
//    .  f32 weights[d]
//    .  f32 analysis[d][d]
//    .  f32 synthesis[d][d]
//    .  u16 pair_indices[64]         format 1, K attend of models with RoPE only, like the next; the first
//                                    anchor_pairs count
//    .  f32 anchor[64][2]
//    .  f32 heavy[d]                 format 2, K attend only: the predictor of heavy hitters (heavy.h), before RoPE,
//                                    in both frames; all 0: no key is one
//
// A section is what a codec has made of the calibration, for so many bits a coordinate: codebooks. Sections are in
// the order of codecs' ids and of bits, none there twice. A codec's section begins with
//
//    0  u8 codec id       1  u8 version of the section       2  u8 bits       3 ... 7  0
//    8  u64 bytes of the section, all in, a multiple of 64  16 ... 63  0
//
// and goes on as the codec says (qkv_codec_section in codec.h). What has no section is made at its first use.
//
// What differs between the first two formats is the attend frame of models with RoPE. In format 1 it is that of
// QKV_TURN_PAGE (turn_plan.h), the rotating anchor has some pairs, and `mean` is what it leaves. In format 2 it is
// that of QKV_TURN_BLOCKS, and `mean` that before RoPE: of coordinates that turn the rotating anchor, which has all
// of them. Format 3 is format 2 and sections. What is learnt is written in format 3.
//
// Threads: immutable, shared by reference.
#ifndef QKV_ENGINE_CODEC_CALIBRATION_H
#define QKV_ENGINE_CODEC_CALIBRATION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/rope.h"
#include "engine/codec/transform.h"

#define QKV_CALIBRATION_MAGIC 0x43564b51u  // "QKVC"
#define QKV_CALIBRATION_FORMAT 3           // that is written
#define QKV_CALIBRATION_FORMAT_FIRST 1     // that is read
#define QKV_CALIBRATION_FORMAT_HEAVY 2     // the first one with heavy-hitter predictors
#define QKV_CALIBRATION_FORMAT_SECTIONS 3  // the first one with codecs' sections
#define QKV_CALIBRATION_BYTES_MAX ((size_t)4 << 30)
#define QKV_TIER_OFFSET_MAX 32  // eighths, either way

// Limits of the numbers, so that arithmetic on any rows stays finite: means, matrix entries, weights.
#define QKV_CALIBRATION_MEAN_MAX 1e6f
#define QKV_CALIBRATION_ENTRY_MAX 1e9f
#define QKV_CALIBRATION_HEAVY_MAX 1e15f  // score of heavy hitters
#define QKV_CALIBRATION_WEIGHT_MIN 1e-18f
#define QKV_CALIBRATION_WEIGHT_MAX 1e9f
// Of a coordinate of any accepted row, and of its square times its weight, so that sums of squares over a page stay
// finite in fp32.
#define QKV_CALIBRATION_COORDINATE_MAX 1e15
#define QKV_CALIBRATION_SQUARE_MAX 1e30

// The model that a calibration has to fit.
typedef struct qkv_calibration_shape {
  uint32_t layers;
  uint32_t kv_heads, q_heads;
  uint32_t key_dim, value_dim;
  qkv_rope rope;  // resolved; theta 0: none
} qkv_calibration_shape;

// Whether a calibration of this shape is within limits: counts, widths, bytes. The rope is not checked.
// INVALID_ARGUMENT "calibration.key_dim is 20, allowed are multiples of 8 from 8 to 1024".
qkv_status qkv_calibration_shape_check(const qkv_calibration_shape *shape, qkv_error *error);

typedef enum qkv_calibration_part { QKV_PART_K_ATTEND, QKV_PART_K_ARCHIVE, QKV_PART_V } qkv_calibration_part;
#define QKV_CALIBRATION_PARTS 3

typedef struct qkv_calibration qkv_calibration;

// Copies a file's bytes, which may be anything, at any alignment. DATA_LOSS, with what is wrong, for what is no
// calibration or a damaged one; INVALID_ARGUMENT for one of a format or of a size that this build does not take. On
// success one reference in *out, else NULL.
qkv_status qkv_calibration_read(const void *bytes, size_t size, qkv_calibration **out, qkv_error *error);

// Memory that it takes now.
uint64_t qkv_calibration_memory(const qkv_calibration *calibration);
// Somebody whom its memory is counted for: released(owner, bytes) is called once it has been freed, by the thread
// that returns the last reference, whatever locks that one holds. Once at most, before any other thread has the
// calibration.
void qkv_calibration_count_for(qkv_calibration *calibration, void (*released)(void *owner, uint64_t bytes),
                               void *owner, uint64_t bytes);

// NULL for NULL.
const qkv_calibration *qkv_calibration_ref(const qkv_calibration *calibration);
// Clears *calibration; the last reference frees it.
void qkv_calibration_unref(const qkv_calibration **calibration);

// The file's bytes, valid as long as the reference.
const void *qkv_calibration_bytes(const qkv_calibration *calibration, size_t *size);
// Of the content; never 0, which in pages stands for the data-free code.
uint32_t qkv_calibration_version(const qkv_calibration *calibration);
// XXH3-64 of the content, the checksum of the header: tells apart contents whose versions are the same.
uint64_t qkv_calibration_hash(const qkv_calibration *calibration);
// Tokens that it was learnt from.
uint64_t qkv_calibration_tokens(const qkv_calibration *calibration);
// Whether the archive codec (engine/cache/model.h) has turned out worse with it than embedded without a calibration.
// ecsq then codes as without one.
bool qkv_calibration_archive_refused(const qkv_calibration *calibration);
const qkv_calibration_shape *qkv_calibration_shape_of(const qkv_calibration *calibration);

// INVALID_ARGUMENT "calibration.key_dim is 64, the model has 128" unless it was made for a model of this shape.
qkv_status qkv_calibration_check(const qkv_calibration *calibration, const qkv_calibration_shape *model,
                                 qkv_error *error);

// The same calibration with the data-free transform in some of its parts, drop [layers][kv_heads]
// [QKV_CALIBRATION_PARTS], with these tier offsets, as many, in eighths of a bit, and with no row of some heads a
// heavy hitter, forget [layers][kv_heads]. NULL: drop none, keep the offsets, forget none. Without RoPE the keys'
// only part is the attend part; the archive part is ignored. It has a version of its own. Takes over the reference,
// on failure too, and the memory where that is the last one. One reference in *out, else NULL.
qkv_status qkv_calibration_adjust(const qkv_calibration **calibration, const bool *drop, const int8_t *offsets,
                                  const bool *forget, qkv_calibration **out, qkv_error *error);

// The same calibration with the archive codec refused. Version and references as of qkv_calibration_adjust.
qkv_status qkv_calibration_refuse_archive(const qkv_calibration **calibration, qkv_calibration **out,
                                          qkv_error *error);

// Which sections a calibration is to have: of each row of the codec table, 1 << bits.
#define QKV_CODECS_MAX 32
typedef struct qkv_section_wants {
  uint16_t bits[QKV_CODECS_MAX];
} qkv_section_wants;

// The same calibration, of the format that is written and without sections, with those that are wanted, as far as its
// size allows; it has a version of its own. Takes over the reference, on failure too. CANCELLED where `cancelled` is
// set meanwhile; NULL: no cancelling. One reference in *out, else NULL.
qkv_status qkv_calibration_add_sections(const qkv_calibration **calibration, const qkv_section_wants *wants,
                                        const _Atomic bool *cancelled, qkv_calibration **out, qkv_error *error);

// Bytes of these sections.
uint64_t qkv_calibration_sections_cost(const qkv_calibration_shape *shape, const qkv_section_wants *wants);

// Memory of all calibrations that there are.
uint64_t qkv_calibration_bytes_held(void);
// Bytes that a calibration of this shape takes at most; the shape is within limits.
uint64_t qkv_calibration_cost(const qkv_calibration_shape *shape);

// Layer and head are within the shape (asserted). As long as the reference.
const qkv_transform *qkv_calibration_transform(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                               qkv_calibration_part part);
// What is to be added to a budgeted tier for this head and part, in eighths of a bit. Over all heads and layers, keys
// of a frame and values together, it adds up to about 0.
int qkv_calibration_tier_offset(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                qkv_calibration_part part);
// [key_dim], the head's predictor of heavy hitters, and the score that these are above; NULL: there are none. Valid
// as long as the reference.
const float *qkv_calibration_heavy(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                   float *least);

#endif
