// The page: 64 consecutive tokens of one layer, all KV heads, K and V, as one immutable run of bytes.
//
// It is what lies in memory, what a record on the SSD holds and what Fetch can send: one layout. A page is never
// changed in place. A change (a lower tier, a new anchor) builds another image and swaps the pointer, so that readers
// need no lock on its bytes and freeing is all or nothing.
//
// Little-endian. Offsets in bytes.
//
//   page                                              header (64 bytes)
//   +--------------------------------+  0              0  u32 magic "QKVP"
//   | header                         |                 4  u8  version (3)     5  u8  codec id
//   +--------------------------------+  64             6  u8  tier_k          7  u8  tier_v   (the budget)
//   | directory, 16 bytes a KV head  |                 8  u32 bytes (of the whole image)
//   | padded to 64                   |                12  u32 layer
//   +--------------------------------+                16  u64 position of token 0
//   | KV head 0                      |                24  u16 tokens (1..64)  26  u16 kv_heads
//   +--------------------------------+                28  u16 key_dim         30  u16 value_dim
//   | KV head 1                      |                32  u32 calibration version (0: data-free)
//   +--------------------------------+                36  u16 features (below) 38 u8 frame  39 u8 0
//   | ...                            |                40  u32 outliers (offset of the section; 0: none)
//   +--------------------------------+  outliers      44  u32 0               48  u64 0
//   | [ outlier rows of all heads ]  |                56  u64 XXH3-64 of the image with this field 0
//   +--------------------------------+  bytes
//
//   directory entry of a head         KV head (at directory[h].offset, 64-byte aligned)
//    0  u32 offset of its block        gains of K   64 x u8       one a slot
//    4  u8  tier of K group 0..3       gains of V   64 x u8
//    8  u8  tier of V group 0..3       K group 0, 1, 2, 3         codes of 16 slots each
//   12  u8  anchor of K  13  of V      V group 0, 1, 2, 3
//   14  u8  low-rank of K 15 of V      [ sections of the features, in the order of their bits ]
//                                      padded to 64
//
// A *slot* is a token's place in the page. Slots are tokens in order unless the SLOTS feature stores a map, so
// that tokens of one tier can be gathered into one group. A *group* is 16 slots; every group has a tier of its
// own, separately for K and V, so that planes can be dropped for 16 tokens at a time. Tiers are in eighths of a bit a
// coordinate (schedule.h). The header's are those that the page was budgeted with; a head may have more or less
// (calibration.h), and every group less once planes have been dropped.
//
// Features (u16 bits); a reader refuses bits it does not know:
//   0 SLOTS     64 x u8 per head: the token in each slot (not written yet)
//   1 ANCHOR    per head and K/V as the directory's anchor byte says (0 none; anchor.h)
//   2 LOW_RANK  per head and K/V as the directory's low-rank byte says (0 none: else the rank; low_rank.h)
//   3 OUTLIERS  rows that are kept as whole numbers, for all heads in one section behind the last head (outliers.h).
//               Not in version 2
// `frame`: 0 rows as attended, 1 attend frame (rotating anchor), 2 archive frame (before RoPE).
//
// The codes of a group, at tier t, with n_j = reach[t][j] of the head's schedule: bits come in pairs. Pair p holds
// bits 2p (more significant) and 2p+1 of a coordinate's code, counted from the most significant; it has two
// sections, one after the other:
//
//   wide    coordinates [0, n_(2p+2))           two bits each
//   narrow  coordinates [n_(2p+2), n_(2p+1))    the more significant bit alone
//
// So a group is: pair 0 wide, pair 0 narrow, pair 1 wide, pair 1 narrow, ... A section takes 16 tokens x
// coordinates x (2 or 1) bits. It is cut into *lines* of 64 bytes, and what is left over into one of 32 and/or
// one of 16 bytes (widths are multiples of 8, so nothing smaller remains). A byte has four *fields* of two
// bits; field f is bits 2f (low) and 2f+1 (high). In pairs 1 and 3 the fields are swapped pairwise (the codes
// of field f lie in field f ^ 1): then a mask and an OR, without a shift, put a field of pair 0 next to the
// same coordinate's field of pair 1, and one table look-up takes four bits.
//
//   K line of 16*s bytes, s = 4, 2 or 1: byte b belongs to token b / s, i = b % s
//     wide    field f: coordinate c0 + s*f + i, both bits (high: the more significant)       (s = 4 or 2)
//     narrow  field f: high bit: coordinate c0 + 4*s + s*f + i, low bit: c0 + s*f + i
//   V line of 4*L bytes, L = 16, 8 or 4: byte b belongs to lane b / 4, i = b % 4
//     wide    field f: token 4*f + i of coordinate c0 + lane                                (L = 16 or 8)
//     narrow  field f: token 4*f + i; high bit: coordinate c0 + L + lane, low bit: c0 + lane
//
// where c0 is the first coordinate of the line. In a K line a 32-bit lane is one token with 4 coordinates a
// field, in a V line a lane is one coordinate with 4 tokens a field: the shapes that four-way integer dot
// products want for q.k and for the weighted sum.
//
// gain byte g: 0 is an all-zero row, or an outlier, to which codes add nothing; else the row's factor is 2^((g - 128)
// / 8), so between 2^-15.875 and 2^15.875. A row whose RMS is below the least factor, about 1.6e-5, is coded coarsely
// with that factor, or as a zero row.
#ifndef QKV_ENGINE_CODEC_PAGE_H
#define QKV_ENGINE_CODEC_PAGE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"
#include "engine/codec/schedule.h"

#define QKV_PAGE_TOKENS 64
#define QKV_PAGE_GROUPS (QKV_PAGE_TOKENS / QKV_GROUP_TOKENS)
#define QKV_PAGE_MAGIC 0x50564b51u  // "QKVP"
// 1 had other centroids at depths 5 and 6 and is refused; 2 has no outliers, is read as 3 and no longer written.
#define QKV_PAGE_VERSION 3
#define QKV_PAGE_VERSION_LEAST 2
#define QKV_KV_HEADS_MAX 1024
#define QKV_PAGE_POSITION_MAX ((uint64_t)1 << 53)  // where a page's tokens end: phases are computed in double
#define QKV_FEATURE_SLOTS 1u
#define QKV_FEATURE_ANCHOR 2u
#define QKV_FEATURE_LOW_RANK 4u
#define QKV_FEATURE_OUTLIERS 8u

typedef struct qkv_page_header {
  uint32_t magic;
  uint8_t version;
  uint8_t codec;
  uint8_t tier_k;
  uint8_t tier_v;
  uint32_t bytes;
  uint32_t layer;
  uint64_t position;
  uint16_t tokens;
  uint16_t kv_heads;
  uint16_t key_dim;
  uint16_t value_dim;
  uint32_t calibration;
  uint16_t features;
  uint8_t frame;
  uint8_t reserved0;
  uint32_t outliers;
  uint32_t reserved1;
  uint64_t reserved2;
  uint64_t checksum;
} qkv_page_header;
_Static_assert(sizeof(qkv_page_header) == 64, "page header");

typedef struct qkv_page_directory {
  uint32_t offset;
  uint8_t tier_k[QKV_PAGE_GROUPS];
  uint8_t tier_v[QKV_PAGE_GROUPS];
  uint8_t anchor_k, anchor_v;
  uint8_t low_rank_k, low_rank_v;
} qkv_page_directory;
_Static_assert(sizeof(qkv_page_directory) == 16, "page directory entry");

typedef enum qkv_part { QKV_K, QKV_V } qkv_part;

// The values of `frame`.
typedef enum qkv_frame { QKV_FRAME_PLAIN, QKV_FRAME_ATTEND, QKV_FRAME_ARCHIVE } qkv_frame;

// What one head of a page is laid out by.
typedef struct qkv_head_layout {
  const qkv_schedule *schedules[2];   // by qkv_part
  uint8_t tiers[2][QKV_PAGE_GROUPS];  // of each group
  uint8_t anchors[2], ranks[2];       // as in the directory
  size_t section_bytes;               // of the features' sections, behind the codes
} qkv_head_layout;

// The codes of one head's K or V, found: what kernels read.
typedef struct qkv_page_codes {
  const uint8_t *gains;                    // [QKV_PAGE_TOKENS]
  const uint8_t *groups[QKV_PAGE_GROUPS];  // 16-byte aligned
  uint8_t tiers[QKV_PAGE_GROUPS];
  const qkv_schedule *schedule;  // borrowed from the caller
} qkv_page_codes;

// Bytes of a page: heads [kv_heads].
size_t qkv_page_bytes(const qkv_head_layout *heads, uint16_t kv_heads);

// Writes header, directory and zeros for the rest; the caller fills gains, sections and codes through qkv_page_find
// (cast away const) and then seals the image. `image` has qkv_page_bytes, 64-byte aligned. Of `header` everything is
// taken but magic, version, bytes, outliers and checksum.
void qkv_page_format(void *image, const qkv_page_header *header, const qkv_head_layout *heads);
void qkv_page_seal(void *image);  // sets the checksum

// Makes space for a section of outliers behind the last head of a formatted image that has none, `bytes` a multiple
// of 64; the caller fills all of it (outliers.h).
uint8_t *qkv_page_add_outliers(void *image, size_t bytes);

// Where the last head's block ends.
static inline uint32_t qkv_page_heads_end(const qkv_page_header *header) {
  return header->outliers != 0 ? header->outliers : header->bytes;
}

// Where a head's codes are; `schedules` of that head, by qkv_part. The page must be valid (or have been formatted).
void qkv_page_find(const void *page, uint16_t kv_head, qkv_part part, const qkv_schedule *const schedules[2],
                   qkv_page_codes *codes);

// The directory entry of a head.
static inline const qkv_page_directory *qkv_page_entry_of(const void *page, uint16_t kv_head) {
  const qkv_page_header *header = page;
  assert(kv_head < header->kv_heads);
  return (const qkv_page_directory *)(header + 1) + kv_head;
}

// Where a head's sections begin, 16-byte aligned; `*bytes` gets what there is up to the end of its block, padding
// included.
const uint8_t *qkv_page_sections(const void *page, uint16_t kv_head, const qkv_schedule *const schedules[2],
                                 size_t *bytes);

// What an image is checked against.
typedef struct qkv_page_expected {
  uint16_t kv_heads, key_dim, value_dim;
  uint16_t features;  // those that are known
  // The schedules of a head, by qkv_part.
  const qkv_schedule *const *(*schedules_of)(const void *context, uint16_t kv_head);
  const void *context;
} qkv_page_expected;

// Everything that an image from outside must satisfy before anything else here may read it: magic, version, known
// features, limits, heads one after the other without gaps up to `bytes`, tiers, space for sections only where a
// feature says so, checksum. For any bytes at any alignment. What is in the sections is the codec's to check.
// DATA_LOSS with the reason.
qkv_status qkv_page_validate(const void *image, size_t bytes, const qkv_page_expected *expected, qkv_error *error);

#endif
