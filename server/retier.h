// Tiers in the background. One object, stepped by one timer (server/main.c), a bounded piece of work each time:
//
//   towards `tier-bits`    sessions in turn, each layer of each in turn, are brought to the average bits that they
//                          were opened with, or by `tier-thresholds`, by attention
//   under pressure         from `memory-high` of the budget until below `memory-low`: the least recently used
//                          sessions are brought to 3 bits on average, then 2.5, then 2, one after the other; those
//                          whose codecs have no planes leave for the SSD in their turn, where there is one
//
// Skipped: sessions with a quality contract, and under pressure those that keep pages in full, as nothing would be
// freed, and those that may be closed instead: a miss is better than a silent loss, and what they hold does not
// count. A session that needs nothing is not visited again before it has been used: it leaves its list (recency.h),
// so the cost of a step depends only on the sessions that need something, but for one look at all of them under
// pressure.
//
// A step of either kind ends after `tier-pages` pages, or 25 and 50 ms. The first kind goes on a quarter of a second
// later, the second at once: appends wait for the memory that it frees.
//
// Threads: one at a time, while others use the store.
#ifndef QKV_SERVER_RETIER_H
#define QKV_SERVER_RETIER_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/cache/session_retier.h"
#include "engine/cache/store.h"
#include "server/options.h"
#include "server/residency/residency.h"

typedef struct qkvi_retierer qkvi_retierer;

// Both are borrowed.
qkvi_retierer *qkvi_retierer_create(qkv_store *store, qkvi_residency *residency, const qkv_server_options *options);
void qkvi_retierer_destroy(qkvi_retierer **retierer);

// Adds to the report. True where sessions are left to be demoted under pressure.
bool qkvi_retierer_step(qkvi_retierer *retierer, qkv_retier_report *report);

// Average bits a coordinate of the coded pages in memory of all sessions, all in; in thousandths.
int64_t qkvi_retierer_millibits(const qkvi_retierer *retierer);

#endif
