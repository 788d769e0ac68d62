// Where sessions lie. What a folded session (session_fold.h) keeps in memory is some 100 bytes: many of them lie in
// one block of their arena's heap, next to each other, where they leave no holes between layers that are freed, and
// tables name them by numbers of 26 bits.
//
//   number  20 bits: chunk │ 6: item          chunk of one size:  header │ item 0 │ item 1 │ ... │ item 63
//
// A number is used again once its session has been freed. In builds with sanitizers each chunk has one item, so that
// they see into it.
//
// Threads: any. One lock, held for a search; finding a session by its number takes none.
#ifndef QKV_ENGINE_CACHE_SESSION_SLOTS_H
#define QKV_ENGINE_CACHE_SESSION_SLOTS_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/arena.h"

typedef struct qkv_session qkv_session;

enum { QKVI_SLOT_ALIGN = 8, QKVI_SLOT_BYTES_MAX = 512, QKV_SESSION_NUMBER_BITS = 26 };

// Memory for a session of `bytes`, up to QKVI_SLOT_BYTES_MAX (asserted), rounded up to QKVI_SLOT_ALIGN; `*item` gets
// what the session keeps. The arena's budget does not count it.
void *qkvi_session_slot_take(qkv_arena *arena, size_t bytes, uint8_t *item);
void qkvi_session_slot_give(void *slot, size_t bytes, uint8_t item);
// Of a slot of so many bytes; never 0.
uint32_t qkvi_session_slot_number(const void *slot, size_t bytes, uint8_t item);

// The number of a session, and the session of a number, while it is alive.
uint32_t qkv_session_number(const qkv_session *session);
qkv_session *qkv_session_of(uint32_t number);

#endif
