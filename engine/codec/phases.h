// Rotary phases by the page, for the two frames that keys of RoPE models are coded in.
//
//   attend frame    the row as attended, turned back by the page's centre c: R_(-c) x_t = R_(t-c) k_t, minus the
//                   rotating anchor R_(t-c) mu (transform.h). What is left is turned by half a page at most, so it is
//                   nearly as low in rank as it was before RoPE. A query is turned back by c, too, once for each
//                   page.
//   archive frame   the row rotated back to before RoPE; decoding ends with RoPE
//
// The centre is slot 32's position. Slots stand at fixed distances from it, so that their cosines and sines, those of
// the anchor among them, come from one table for all pages; those of the centre from another one, on top of those of
// the first page of its QKV_PHASES_SPAN, so that a walk over pages needs trigonometry once for so many tokens (once a
// page beyond position 2^32, where sums of angles are no longer exact enough).
// Dynamic NTK beyond its trained length has other frequencies at every position: the page is turned by those of its
// centre, and what a row's own make of it is computed row by row, slowly.
//
// Threads: immutable once created.
#ifndef QKV_ENGINE_CODEC_PHASES_H
#define QKV_ENGINE_CODEC_PHASES_H

#include <stddef.h>
#include <stdint.h>

#include "engine/codec/page.h"
#include "engine/codec/rope.h"
#include "engine/codec/transform.h"

#define QKV_PHASES_PAGES 64
#define QKV_PHASES_SPAN ((uint64_t)QKV_PHASES_PAGES * QKV_PAGE_TOKENS)

typedef struct qkv_phases qkv_phases;

// The rope is resolved, has a theta, and is copied.
qkv_phases *qkv_phases_create(const qkv_rope *rope);
void qkv_phases_destroy(qkv_phases **phases);

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

// What a walk over pages keeps: the span that it is in. To be started before the first page.
typedef struct qkv_phases_walk {
  uint64_t base;
  double cosines[QKV_DIM_MAX / 2], sines[QKV_DIM_MAX / 2];  // of each pair at `base`
} qkv_phases_walk;
void qkv_phases_start(qkv_phases_walk *walk);

// turned [n][dim] = queries [n][dim], as attended, turned back by the page's centre.
void qkv_phases_turn_queries(const qkv_phases *phases, qkv_phases_walk *walk, uint64_t position, size_t n, size_t dim,
                             const float *queries, float *turned);
// scores[n][64] += q . (the rotating anchor of each slot), q queries [n][dim] that have been turned back.
void qkv_phases_add_scores(const qkv_phases *phases, const qkv_transform *transform, uint64_t position, size_t n,
                           const float *turned, float *scores);

// ---- Archive frame: scores ----

// scores[n][64] = q . x_t of rows before RoPE, given as columns [dim][64] without the means [4][dim] of their groups;
// q queries [n][dim] that have been turned back, in which what turns is stretched as RoPE does.
void qkv_phases_score_columns(const qkv_phases *phases, uint64_t position, size_t dim, const float *columns,
                              const float *means, size_t n, float *turned, float *scores);

#endif
