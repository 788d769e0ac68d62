#include "engine/cache/session_table.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "engine/cache/session_slots.h"

enum { PLACES_FIRST = 16, KEYS_AT_ONCE = 16, PART_PLACES = 512 };

qkvi_table_key qkvi_key_of_name(const char *tenant, const char *name) {
  qkvi_table_key key;
  const size_t tenant_bytes = strnlen(tenant, QKV_NAME_MAX), name_bytes = strnlen(name, QKV_NAME_MAX);
  memcpy(key.text, tenant, tenant_bytes);
  key.text[tenant_bytes] = '\0';
  memcpy(key.text + tenant_bytes + 1, name, name_bytes);
  key.bytes = (unsigned)(tenant_bytes + 1 + name_bytes);
  return key;
}

static qkvi_table_key key_of_serial(const qkv_session *session) {
  qkvi_table_key key = {.text = ""};
  const uint64_t serial = qkv_session_serial(session);
  memcpy(key.text + 1, &serial, sizeof serial);
  key.bytes = 1 + sizeof serial;
  return key;
}

qkvi_table_key qkvi_key_of_session(const qkv_session *session) {
  if (qkv_session_is_staged(session)) return key_of_serial(session);
  return qkvi_key_of_name(qkv_session_config_of(session)->tenant, qkv_session_name(session));
}

void qkvi_session_table_deinit(qkvi_session_table *table) {
  free(table->sessions);
  free(table->hashes);
  *table = (qkvi_session_table){.places = 0};
}

static uint32_t hash_of(const qkvi_table_key *key) {
  return (uint32_t)XXH3_64bits(key->text, key->bytes);
}

static size_t home_of(const qkvi_session_table *table, uint32_t hash) {
  return (size_t)((uint64_t)hash * table->places >> 32);
}

static size_t behind(const qkvi_session_table *table, size_t place) {
  return place + 1 == table->places ? 0 : place + 1;
}

static bool is_text(const char *text, const char *expected, size_t bytes) {
  return strlen(expected) == bytes && memcmp(text, expected, bytes) == 0;
}

static bool has_key(const qkv_session *session, const qkvi_table_key *key) {
  if (qkv_session_is_staged(session)) {
    const qkvi_table_key own = key_of_serial(session);
    return own.bytes == key->bytes && memcmp(own.text, key->text, key->bytes) == 0;
  }
  const size_t tenant_bytes = strnlen(key->text, key->bytes - 1);
  return is_text(key->text, qkv_session_config_of(session)->tenant, tenant_bytes) &&
         is_text(key->text + tenant_bytes + 1, qkv_session_name(session), key->bytes - tenant_bytes - 1);
}

// From a place of the hash's chain on: where the next session of the hash is, or the free place at which the chain
// ends.
static size_t place_of_hash(const qkvi_session_table *table, uint32_t hash, size_t place) {
  while (table->sessions[place] != 0 && table->hashes[place] != hash) place = behind(table, place);
  return place;
}

static size_t place_behind(const qkvi_session_table *table, const qkvi_table_key *key, uint32_t hash, size_t place) {
  while (table->sessions[place] != 0 && !has_key(qkv_session_of(table->sessions[place]), key))
    place = place_of_hash(table, hash, behind(table, place));
  return place;
}

// Where a session of the key is, or the free place at which its chain ends.
static size_t place_of(const qkvi_session_table *table, const qkvi_table_key *key) {
  const uint32_t hash = hash_of(key);
  return place_behind(table, key, hash, place_of_hash(table, hash, home_of(table, hash)));
}

static qkv_session *session_at(const qkvi_session_table *table, size_t place) {
  return table->sessions[place] == 0 ? NULL : qkv_session_of(table->sessions[place]);
}

qkv_session *qkvi_session_table_find(const qkvi_session_table *table, const qkvi_table_key *key) {
  return table->places == 0 ? NULL : session_at(table, place_of(table, key));
}

static void find_some(const qkvi_session_table *table, const char *tenant, const char *const *names, size_t count,
                      qkv_session **out) {
  qkvi_table_key keys[KEYS_AT_ONCE];
  uint32_t hashes[KEYS_AT_ONCE];
  size_t places[KEYS_AT_ONCE];
  for (size_t i = 0; i < count; i++) {
    keys[i] = qkvi_key_of_name(tenant, names[i]);
    hashes[i] = hash_of(&keys[i]);
    places[i] = home_of(table, hashes[i]);
    __builtin_prefetch(&table->sessions[places[i]]);
    __builtin_prefetch(&table->hashes[places[i]]);
  }
  for (size_t i = 0; i < count; i++) {
    places[i] = place_of_hash(table, hashes[i], places[i]);
    qkv_session_prefetch(session_at(table, places[i]));
  }
  for (size_t i = 0; i < count; i++) out[i] = session_at(table, place_behind(table, &keys[i], hashes[i], places[i]));
}

void qkvi_session_table_find_names(const qkvi_session_table *table, const char *tenant, const char *const *names,
                                   size_t count, qkv_session **out) {
  for (size_t first = 0; first < count; first += KEYS_AT_ONCE) {
    const size_t left = count - first, some = left < KEYS_AT_ONCE ? left : KEYS_AT_ONCE;
    if (table->places > 0)
      find_some(table, tenant, names + first, some, out + first);
    else
      memset((void *)(out + first), 0, some * sizeof(qkv_session *));
  }
}

static void resize(qkvi_session_table *table, size_t places) {
  qkvi_session_table made = {.sessions = calloc(places, sizeof *made.sessions),
                             .hashes = calloc(places, sizeof *made.hashes),
                             .places = places,
                             .count = table->count};
  if (made.sessions == NULL || made.hashes == NULL) abort();
  for (size_t i = 0; i < table->places; i++) {
    if (table->sessions[i] == 0) continue;
    size_t place = home_of(&made, table->hashes[i]);
    while (made.sessions[place] != 0) place = behind(&made, place);
    made.sessions[place] = table->sessions[i];
    made.hashes[place] = table->hashes[i];
  }
  qkvi_session_table_deinit(table);
  *table = made;
}

void qkvi_session_table_add(qkvi_session_table *table, qkv_session *session) {
  if ((table->count + 1) * 5 > table->places * 4)
    resize(table, table->places < PLACES_FIRST ? PLACES_FIRST : table->places + table->places / 4);
  const qkvi_table_key key = qkvi_key_of_session(session);
  const size_t place = place_of(table, &key);
  assert(table->sessions[place] == 0);
  table->sessions[place] = qkv_session_number(session);
  table->hashes[place] = hash_of(&key);
  table->count++;
}

// What its chain has behind the free place moves back.
void qkvi_session_table_remove(qkvi_session_table *table, const qkv_session *session) {
  const qkvi_table_key key = qkvi_key_of_session(session);
  size_t hole = table->places == 0 ? 0 : place_of(table, &key);
  assert(table->places > 0 && table->sessions[hole] == qkv_session_number(session));
  for (size_t at = behind(table, hole); table->sessions[at] != 0; at = behind(table, at)) {
    const size_t home = home_of(table, table->hashes[at]);
    const size_t from_home = at >= home ? at - home : at + (table->places - home);
    const size_t from_hole = at >= hole ? at - hole : at + (table->places - hole);
    if (from_home < from_hole) continue;  // its home lies behind the hole
    table->sessions[hole] = table->sessions[at];
    table->hashes[hole] = table->hashes[at];
    hole = at;
  }
  table->sessions[hole] = 0;
  table->count--;
  const size_t half = table->places / 2;
  if (half >= PLACES_FIRST && table->count < half / 2) resize(table, half);
}

qkv_session *qkvi_session_table_next(const qkvi_session_table *table, size_t *place) {
  while (*place < table->places && table->sessions[*place] == 0) ++*place;
  return *place < table->places ? qkv_session_of(table->sessions[(*place)++]) : NULL;
}

// A part is a range of hashes, which no change of the table moves. Sessions lie at the home of their hash or behind
// it, before the next free place.
bool qkvi_session_table_next_part(const qkvi_session_table *table, uint64_t *next,
                                  void (*fn)(void *context, qkv_session *session), void *context) {
  const uint64_t all = UINT64_C(1) << 32, begin = *next, parts = table->places / PART_PLACES + 1;
  const uint64_t end = begin + all / parts + 1 < all ? begin + all / parts + 1 : all;
  *next = end;
  if (table->places == 0) return false;
  const size_t first = home_of(table, (uint32_t)begin), last = home_of(table, (uint32_t)(end - 1));
  for (size_t place = first, seen = 0; seen < table->places; seen++, place = behind(table, place)) {
    if (table->sessions[place] == 0 && first + seen >= last) break;
    const bool within = table->hashes[place] >= begin && table->hashes[place] < end;
    if (table->sessions[place] != 0 && within) fn(context, qkv_session_of(table->sessions[place]));
  }
  return end < all;
}
