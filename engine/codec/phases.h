// Rotary phases by the page, for the two frames that keys of RoPE models are coded in.
//
//   attend frame    the row as attended, minus the rotating anchor (transform.h), turned back as the transform's plan
//                   says (turn_plan.h): pair by pair to some position c near to the page, R_(-c) (x_t - R_t mu) =
//                   R_(t-c) (k_t - mu), or not at all. What is mixed is turned by little, so it is nearly as low in
//                   rank as it was before RoPE. Queries are turned back likewise: by the page (here) or by blocks
//                   of pages (walk.h).
//   archive frame   the row rotated back to before RoPE; decoding ends with RoPE
//
// The centre is slot 32's position. Slots stand at fixed distances from it, so that their cosines and sines, those of
// the anchor among them, come from one table for all pages; those of the centre from another one, on top of those of
// the first page of its QKV_PHASES_SPAN, so that a walk over pages needs trigonometry once for so many tokens (once a
// page beyond position 2^32, where sums of angles are no longer exact enough).
// Dynamic NTK beyond its trained length has other frequencies at every position: the page is turned by those of its
// centre, whatever the plan's blocks, and what depends on a row's own frequencies is computed row by row,
// slowly.
//
// Threads: immutable once created.
#ifndef QKV_ENGINE_CODEC_PHASES_H
#define QKV_ENGINE_CODEC_PHASES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/codec/rope.h"
#include "engine/codec/transform.h"
#include "engine/kernel/kernel.h"

#define QKV_PHASES_PAGES 64
#define QKV_PHASES_SPANS 64  // 262144 tokens
#define QKV_PHASES_SPAN ((uint64_t)QKV_PHASES_PAGES * QKV_PAGE_TOKENS)

typedef struct qkv_phases qkv_phases;

// The rope is resolved, has a theta, and is copied.
qkv_phases *qkv_phases_create(const qkv_rope *rope);
void qkv_phases_destroy(qkv_phases **phases);
size_t qkv_phases_bytes(const qkv_rope *rope);  // memory of one, about

// ---- Archive frame; `position` is that of slot 0 ----

// Rotates rows [tokens][dim], tokens <= QKV_PAGE_TOKENS, from before RoPE to their positions, or back.
void qkv_phases_forward(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows);
void qkv_phases_inverse(const qkv_phases *phases, uint64_t position, size_t tokens, size_t dim, float *rows);

// ---- Attend frame; `position` is that of slot 0 ----

// rows [tokens][dim], as attended, become what the transform takes; and back.
void qkv_phases_to_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                        float *rows);
void qkv_phases_from_page(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t tokens,
                          float *rows);

// ---- What the rows of a page turn by, for devices that decode as above (engine/kernel/simt/rows.h) ----

enum { QKV_PHASES_ROW_TURNS = 6 };
// turns [QKV_PHASES_ROW_TURNS][pairs]: cosines and sines of the attend frame, and x and y of the rotating anchor in
// it
// (`transform` NULL: zeros); cosines and sines of the centre, as qkv_phases_forward has them, or _inverse where
// `back`.
void qkv_phases_row_turns(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, bool back,
                          float *turns);
// cosines and sines [pairs][64] of what turns a slot from the centre: the same for all steady pages.
void qkv_phases_slot_turns(const qkv_phases *phases, uint64_t position, float *cosines, float *sines);

// ---- Walks ----

// What a walk over pages keeps: the span that it is in. To be started before the first page.
typedef struct qkv_phases_walk {
  uint64_t base;
  double cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];  // of each pair at `base`
} qkv_phases_walk;
void qkv_phases_start(qkv_phases_walk *walk);

// Frames other than that of QKV_TURN_BLOCKS: turned [n][dim] = queries [n][dim], as attended, turned back by the
// page's centre.
void qkv_phases_turn_queries(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t position, size_t n, size_t dim,
                             const float *queries, float *turned);
// scores[n][64] += q . (the rotating anchor of each slot), q queries [n][dim] that have been turned back.
void qkv_phases_add_scores(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t n,
                           const float *turned, float *scores);

// ---- For walks over pages (walk.h) ----

// Of steady pages.
const qkv_page_waves *qkv_phases_waves(const qkv_phases *phases);
// Whether the rows of a page all turn with the same frequencies.
bool qkv_phases_steady(const qkv_phases *phases, uint64_t position);
// Turns to a position, with those frequencies: from a table at the first QKV_PHASES_SPANS multiples of
// QKV_PHASES_SPAN, else computed into `space` [2][pairs].
qkv_pair_turns qkv_phases_turns_at(const qkv_phases *phases, uint64_t position, float *space);
// By `i` half pages, and to the middle of the page of a span, between its slots 31 and 32; i < 2 * QKV_PHASES_PAGES,
// page < QKV_PHASES_PAGES.
qkv_pair_turns qkv_phases_half_pages(const qkv_phases *phases, size_t i);
qkv_pair_turns qkv_phases_middle(const qkv_phases *phases, size_t page);
// The rope's own.
const qkv_rope *qkv_phases_rope(const qkv_phases *phases);
// What the plan turns a page's pairs back by, cosines and sines [pairs]; as keys are turned.
void qkv_phases_frame(const qkv_phases *phases, const qkv_turn_plan *plan, uint64_t position, float *cosines,
                      float *sines);

// ---- Archive frame: scores ----

// scores[n][64] = q . x_t of rows before RoPE, given as columns [dim][64] without the means [4][dim] of their groups;
// q queries [n][dim] that have been turned back, in which what turns is stretched as RoPE does.
void qkv_phases_score_columns(const qkv_phases *phases, uint64_t position, size_t dim, const float *columns,
                              const float *means, size_t n, float *turned, float *scores);

#endif
