// Memory for KV, under a budget.
//
// Every byte of KV that the daemon holds comes from an arena. Bytes are first *reserved*, which changes nothing where
// it fails. Only then are they allocated against the reservation, so that an append has all of its memory or none of
// it:
//
//   QKV_TRY(qkv_arena_reserve(arena, total, error));
//   page = qkv_arena_alloc(arena, bytes);        cannot fail within the reservation
//   qkv_arena_unreserve(arena, what_was_not_used);
//
// Memory is full as a rule. A caller that has waited for free memory reserves it before it knows how much it will
// use. It passes the reservation on as a *headroom*: reserved, unspent bytes, which the functions that it calls spend
// before they reserve more. So no other thread gets them in between.
//
// The process also uses memory outside of all arenas. To keep the total within the budget, the caller that measures
// the total sets a *limit* below the budget. The limit may be less than what is taken: then no reservation succeeds
// until enough has been freed.
//
// An *account* is an arena on top of another one, with a ceiling of its own: what is reserved or allocated in it
// counts in both, to the byte, and either may refuse. Rooms always belong to the other arena: the account counts what
// is taken from them.
//
// Blocks are aligned to 64 bytes and lie in a heap of the arena's own (heap.h); from malloc in builds with
// sanitizers, which would not see into it. Threads: any; the counters are atomic.
#ifndef QKV_ENGINE_BASE_ARENA_H
#define QKV_ENGINE_BASE_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/heap.h"
#include "engine/base/status.h"

#define QKV_ARENA_ALIGN QKV_HEAP_ALIGN

typedef struct qkv_arena qkv_arena;

typedef struct qkv_arena_stats {
  uint64_t bytes_max;       // the budget
  uint64_t bytes_limit;     // how much of it may be taken now
  uint64_t bytes_used;      // allocated
  uint64_t bytes_reserved;  // promised, not allocated yet
} qkv_arena_stats;

// `budget_name` is the option a refusal names ("memory-budget"); borrowed for the arena's life. Never fails.
qkv_arena *qkv_arena_create(const char *budget_name, uint64_t bytes_max);
// The same with a heap that is not the default one.
qkv_arena *qkv_arena_create_on(const qkv_heap_config *config, const char *budget_name, uint64_t bytes_max);
// An account of `arena`, which outlives it, without a ceiling yet. `budget_name` is copied: "quota host_bytes of
// tenant x". Not for accounts: set_limit, reserve_next and let_go.
qkv_arena *qkv_arena_create_account(qkv_arena *arena, const char *budget_name, void *owner);
// The arena that an account is on top of; of another arena itself.
qkv_arena *qkv_arena_whole(qkv_arena *arena);
// Whose account it is; NULL: it is none.
void *qkv_arena_owner(const qkv_arena *arena);
// UINT64_MAX: none. It may be less than what is taken: then no reservation succeeds until enough has been freed.
void qkv_arena_set_ceiling(qkv_arena *account, uint64_t bytes);
// Every block must have been freed and every reservation returned (asserted). Clears *arena.
void qkv_arena_destroy(qkv_arena **arena);

// What a block of `bytes` costs: rounded up to the alignment. Reserve sums of these.
size_t qkv_arena_cost(size_t bytes);

// How much of the budget may be taken from now on; all of it where `bytes` is more. Holes of the heap are returned to
// the system at once.
void qkv_arena_set_limit(qkv_arena *arena, uint64_t bytes);

// RESOURCE_EXHAUSTED: "memory-budget is 1048576 bytes, 1040000 in use, 16384 more are needed", and behind the first
// number ", 48576 of them for memory outside pages" where the limit is less.
qkv_status qkv_arena_reserve(qkv_arena *arena, uint64_t bytes, qkv_error *error);
void qkv_arena_unreserve(qkv_arena *arena, uint64_t bytes);
// The same for memory that the budget counts but that lies outside of the arena's blocks.
qkv_status qkv_arena_reserve_elsewhere(qkv_arena *arena, uint64_t bytes, qkv_error *error);
void qkv_arena_unreserve_elsewhere(qkv_arena *arena, uint64_t bytes);
// Bytes that are reserved already become reserved for memory elsewhere.
void qkv_arena_move_elsewhere(qkv_arena *arena, uint64_t bytes);
// Takes bytes from a headroom first (NULL: there is none), which shrinks by them; reserves the rest as
// qkv_arena_reserve.
qkv_status qkv_arena_reserve_in(qkv_arena *arena, uint64_t *headroom, uint64_t bytes, qkv_error *error);
// For a caller that waits for memory. Where this fails, memory that is freed is kept for that caller, until this
// succeeds or qkv_arena_let_go ends the wait. One caller at a time.
qkv_status qkv_arena_reserve_next(qkv_arena *arena, uint64_t bytes);
void qkv_arena_let_go(qkv_arena *arena);

// Reserves for what soon makes more memory free than it takes: beyond the limit, too, by a 256th of the budget, or 1
// MiB where that is more; not beyond an account's ceiling.
qkv_status qkv_arena_overdraw(qkv_arena *arena, uint64_t bytes, qkv_error *error);

// Turns qkv_arena_cost(bytes) of a reservation (asserted to be there) into a block. Contents are undefined.
// Aborts where the machine itself is out of memory: the budget is there so that it is not.
void *qkv_arena_alloc(qkv_arena *arena, size_t bytes);
void qkv_arena_free(qkv_arena *arena, void *block, size_t bytes);

// What alloc and free count, for bytes that lie in a block of alloc_overhead together with others.
void qkv_arena_spend(qkv_arena *arena, size_t bytes);
void qkv_arena_unspend(qkv_arena *arena, size_t bytes);

// For a block that replaces another one while that is still in use. It is allocated outside of the budget, and freed
// so unless it takes the other's place. When it does, qkv_arena_recount counts `made` instead of `left` bytes (0:
// there was no other block). The old block is then freed outside of the budget, the new one by qkv_arena_free. So a
// smaller block never needs headroom for both. Recounting fails only where more bytes are needed than the `headroom`
// (as above) has and than can be reserved: RESOURCE_EXHAUSTED, with nothing changed.
void *qkv_arena_alloc_overhead(qkv_arena *arena, size_t bytes);
void qkv_arena_free_overhead(qkv_arena *arena, void *block, size_t bytes);
qkv_status qkv_arena_recount(qkv_arena *arena, uint64_t *headroom, size_t left, size_t made, qkv_error *error);

// Borrowed.
qkv_heap *qkv_arena_heap(const qkv_arena *arena);

qkv_arena_stats qkv_arena_read(const qkv_arena *arena);

#endif
