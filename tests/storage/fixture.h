// What the storage's tests share: a directory of its own, a storage over it, and calls that wait for their end.
#ifndef QKV_TESTS_STORAGE_FIXTURE_H
#define QKV_TESTS_STORAGE_FIXTURE_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "storage/storage.h"

// One storage, and what was restored when it was opened last.
typedef struct scene {
  const char *io;  // "uring", "pread"
  char directory[64];
  qkv_storage_config config;
  qkv_storage *storage;
  qkv_journal_entry entries[64];
  char texts[64][64];         // payloads of these
  uint64_t positions[64][4];  // of forks the first ones
  size_t entry_count;
  const char *unwanted;  // text of entries that are not kept; NULL: none
  uint64_t refused;      // session whose opening entry() drops; 0: none
  qkv_record_info records[4096];
  size_t record_count;
} scene;

// Groups of tests run once for each driver: cmocka_unit_test_prestate_setup_teardown(test, scene_setup, ...).
#define BOTH(test)                                                     \
  {#test " (uring)", test, scene_setup_uring, scene_teardown, NULL}, { \
#test " (pread)", test, scene_setup_pread, scene_teardown, NULL    \
  }

int scene_setup_uring(void **state);
int scene_setup_pread(void **state);
int scene_teardown(void **state);

void scene_open(scene *on);
qkv_status scene_try_open(scene *on, qkv_error *error);
void scene_close(scene *on);

// Pseudo-random bytes of `seed`; `code_like` ones compress by some percent.
void scene_fill(uint8_t *bytes, size_t size, uint64_t seed, bool code_like);

// Opens a session in the journal, durably.
uint64_t scene_session(scene *on);
// Puts and waits: until it is durable where `durable`, else until it is written. The payload is scene_fill's of
// (session, position, size).
qkv_status scene_put_status(scene *on, const qkv_record_meta *meta, size_t size, bool durable, uint64_t *record);
uint64_t scene_put(scene *on, uint64_t session, uint32_t layer, uint64_t position, size_t size);
qkv_status scene_read(scene *on, uint64_t record, void *buffer, size_t size);
// Checks that the record has what scene_put has put for `session`.
void scene_check(scene *on, uint64_t session, uint64_t record, uint64_t position, size_t size);
// Forks `parent` durably, with the payload "fork"; 0 and *status where it is refused. `status` may be NULL: it is
// not.
uint64_t scene_fork(scene *on, uint64_t parent, const uint64_t *positions, uint32_t layers, qkv_status *status);
qkv_status scene_close_session(scene *on, uint64_t session);
qkv_status scene_truncate(scene *on, uint64_t session, uint32_t layer, uint64_t position);
void scene_sync(scene *on);
qkv_status scene_compact(scene *on, double live_share);
qkv_storage_stats scene_stats(scene *on);

// The only file whose name begins so; asserts that there is one.
void scene_file(const scene *on, const char *beginning, char path[128]);
// Inverts one byte of a file.
void scene_damage(const char *path, uint64_t offset);

#endif
