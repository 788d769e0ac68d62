// Codebooks of the codec "commvq" for one head's keys before RoPE.
//
// Coordinates go in pairs (x, y), those that RoPE turns together; of rows as 2 x 2 matrices [[x, y], [-y, x]], which
// commute with its rotations. Four pairs make a group, which are far from each other in how much they vary, so that
// groups vary alike: all have as many bits. A group of a row is a sum over rounds of centres
//
//   c_ab = (1, 0) C[a] + (0, 1) C[b]      a, b < 16: of each pair (x_a - y_b, y_a + x_b)
//
// so that a round's two indices take 8 bits, one bit a coordinate. The second round codes what the first one leaves.
//
// Training is EM on rows that are drawn from what a calibration knows of the head: its mean and second moments before
// RoPE. Samples belong to all centres by softmax(-distance / T), with a T that falls from round to round of EM, and
// at last to the nearest one; then entries are the least-squares ones, phi = (T' S T)^-1 T' S m. Distances count a
// pair by what queries make of it. Without a calibration rows are drawn with coordinates alike.
//
// A calibration that is made for sessions with commvq has its entries in a section (calibration.h), for each number
// of bits that they have, of
//
//   entries  [layers][kv_heads][dim / 8][bits][16][4][2] fp32: of a group and a round the (x, y) of each entry's
//   pairs,
//            in coordinates times the roots of their weights; all of a head's 0: it has the data-free codebook
//
// From others the same entries are trained when a head's first page is coded or read. What pairs a group has, their
// weights and the mean follow from the calibration's matrices, and so does C of values.
//
// All in sums, products, quotients and square roots without contraction, so that the same calibration has the same
// codebooks on every machine: they are written into no page.
//
// Source: Li et al., "CommVQ: Commutative Vector Quantization for KV Cache Compression" (2025).
//
// Threads: any.
#ifndef QKV_ENGINE_CODEC_COMMVQ_BOOK_H
#define QKV_ENGINE_CODEC_COMMVQ_BOOK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/calibration.h"
#include "engine/kernel/entries.h"

#define QKV_COMMVQ_ENTRIES QKV_ENTRIES
#define QKV_COMMVQ_WIDTH QKV_ENTRY_WIDTH  // coordinates of a group
#define QKV_COMMVQ_ROUNDS 2               // at most: one for each bit

// A group's entries in one round. Rows of a group are (x, y) of its first pair, of its second pair, ...
typedef struct qkv_commvq_round {
  qkv_entries entries;  // (x, y) for a; (-y, x) for b
  // For the search, in coordinates times the roots of their weights.
  _Alignas(64) float columns[2][QKV_COMMVQ_WIDTH][QKV_COMMVQ_ENTRIES];
  _Alignas(64) float squares[QKV_COMMVQ_ENTRIES][QKV_COMMVQ_ENTRIES];  // [a][b]: half of |c_ab|^2
} qkv_commvq_round;

typedef struct qkv_commvq_book {
  size_t dim, groups, bits;
  float mean[QKV_DIM_MAX];          // in the order of groups
  float roots[QKV_DIM_MAX];         // of weights, in the same order
  uint16_t pairs[QKV_DIM_MAX / 2];  // in the order of groups: which pair of the row's it is
  qkv_commvq_round rounds[];        // [groups][bits], of rows without their mean whose RMS is 1
} qkv_commvq_book;

// The coordinates of a row's pairs [dim / 2][2]. What does not turn is paired with its neighbour.
void qkv_commvq_pairs(const qkv_rope *rope, size_t dim, uint16_t *coordinates);

// Of a head of a calibration, for 1 or 2 bits: from its section, or trained at the first call. Kept as long as the
// calibration.
const qkv_commvq_book *qkv_commvq_book_get(const qkv_calibration *calibration, uint32_t layer, uint32_t kv_head,
                                           unsigned bits);
// Without a calibration; kept for ever. `dim` is a multiple of 8 up to QKV_DIM_MAX.
const qkv_commvq_book *qkv_commvq_book_data_free(size_t dim, unsigned bits);

// Sections of calibrations: qkv_codec_section (codec.h).
#define QKV_COMMVQ_CODEC 9  // in the codec table
#define QKV_COMMVQ_SECTION_VERSION 1
// Of numbers in a section. What is trained is below: sums of 1024 samples, whose coordinates are below
// sqrt(QKV_DIM_MAX), over eigenvalues of 1e-3 at least. So distances and decoded rows are finite.
#define QKV_COMMVQ_ENTRY_MAX 1e8f
size_t qkv_commvq_section_bytes(const qkv_calibration_shape *shape, unsigned bits);
void qkv_commvq_section_make(const qkv_calibration *calibration, unsigned bits, uint32_t layer, uint32_t kv_head,
                             uint8_t *out);
void qkv_commvq_section_clear(const qkv_calibration_shape *shape, unsigned bits, bool keys, uint8_t *head);
const char *qkv_commvq_section_validate(const qkv_calibration_shape *shape, unsigned bits, const uint8_t *head);

// Indices of rest [8], in coordinates times roots: a in the low four bits, b in the high ones.
uint8_t qkv_commvq_nearest(const qkv_commvq_round *round, const float *rest);

#endif
