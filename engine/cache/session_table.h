// The store's sessions by tenant and name, or while they are staged by their serial, which no name is.
//
//   hashes    [ .  h  .  h  h ... ]   open addressing, at most 4/5 full; 8 bytes a place
//   sessions  [ .  s  .  s  s ... ]   by their numbers (session_slots.h)
//
// Threads: guarded by the store's lock; functions that take a const table may run together.
#ifndef QKV_ENGINE_CACHE_SESSION_TABLE_H
#define QKV_ENGINE_CACHE_SESSION_TABLE_H

#include "engine/base/name.h"
#include "engine/cache/session.h"

// TENANT NUL NAME, or NUL SERIAL.
typedef struct qkvi_table_key {
  char text[2 * QKV_NAME_MAX + 1];
  unsigned bytes;
} qkvi_table_key;
qkvi_table_key qkvi_key_of_name(const char *tenant, const char *name);
// As it is now: publishing a session changes it.
qkvi_table_key qkvi_key_of_session(const qkv_session *session);

// Zeros: an empty one.
typedef struct qkvi_session_table {
  uint32_t *sessions;  // borrowed; 0: a free place
  uint32_t *hashes;
  size_t places, count;
} qkvi_session_table;

void qkvi_session_table_deinit(qkvi_session_table *table);
// NULL: there is none.
qkv_session *qkvi_session_table_find(const qkvi_session_table *table, const qkvi_table_key *key);
// Of the tenant, `count` sessions at once, with their memory asked for before they are compared: out[i] as above.
void qkvi_session_table_find_names(const qkvi_session_table *table, const char *tenant, const char *const *names,
                                   size_t count, qkv_session **out);
// By its key; there is none of the key yet (asserted). And removes it, which is there (asserted).
void qkvi_session_table_add(qkvi_session_table *table, qkv_session *session);
void qkvi_session_table_remove(qkvi_session_table *table, const qkv_session *session);
// The next one at or behind `*place`, which begins at 0 and is moved on; NULL: there are no more.
qkv_session *qkvi_session_table_next(const qkvi_session_table *table, size_t *place);
// Calls fn for the sessions of the next part of the table, some hundred, in no order. `*next` begins at 0; false:
// that was the last part. Whatever changes between two parts, a session that stays in the table, under its name,
// comes once.
bool qkvi_session_table_next_part(const qkvi_session_table *table, uint64_t *next,
                                  void (*fn)(void *context, qkv_session *session), void *context);

#endif
