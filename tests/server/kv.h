// What the tests of the KvCache handlers share: one model's geometry, rows that follow from a seed and their
// position, requests over them, and a copy of a session in this process as the reference (kv_reference).
#ifndef TESTS_SERVER_KV_H
#define TESTS_SERVER_KV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/store.h"
#include "qkv/v1/kv_cache.pb-c.h"
#include "tests/server/fixture.h"

#define KV_LAYERS 3
#define KV_HEADS 2
#define KV_Q_HEADS 4
#define KV_KEY_DIM 16
#define KV_VALUE_DIM 24
#define KV_WINDOW 64  // recent window of the model

#define KV_METHOD(name) "/qkv.v1.KvCache/" name

// ---- A daemon and a client ----

// Starts a daemon with further `arguments` (NULL: none), connects, and registers the model "m".
void kv_start(const char *const *arguments, fixture_daemon **daemon, fixture_client **client);
// Disconnects and stops the daemon, which must end with 0.
void kv_stop(fixture_daemon **daemon, fixture_client **client);
// Waits until only the call that asks is running.
void kv_wait_idle(fixture_client *client);

// ---- The model ----

// Registers the model "m" in the daemon.
void kv_register(fixture_client *client);
// The same model, for this process.
qkv_model kv_model(void);
// Opens a session of the model "m", to be attended or for another purpose.
void kv_open(fixture_client *client, const char *session);
void kv_open_for(fixture_client *client, const char *session, qkv_purpose purpose);
void kv_close(fixture_client *client, const char *session);
// The daemon's view of a session; freed with qkv__v1__session_info__free_unpacked.
Qkv__V1__SessionInfo *kv_info(fixture_client *client, const char *session);
// The length of one layer.
uint64_t kv_length(fixture_client *client, const char *session, uint32_t layer);
// The daemon's value of a metric, e.g. "qkvd_kv_bytes".
double kv_metric(fixture_client *client, const char *name);

// ---- Rows and items ----

typedef enum kv_part { KV_K, KV_V, KV_Q } kv_part;

// Rows [tokens][heads][dim] from `position` on, multiples of 1/128 within [-2, 2): exact in fp16.
void kv_rows(uint32_t seed, uint32_t layer, kv_part part, uint64_t position, size_t tokens, float *out);

typedef struct kv_item {
  const char *session;
  Qkv__V1__AttendOptions *options;
  uint64_t position;
  size_t tokens;   // of k and v; 0: absent
  size_t queries;  // 0: absent
  uint32_t layer;
  uint32_t seed;
  bool before_rope;  // k and q, as they are sent
} kv_item;

// An AttendRequest, which is an AppendRequest, too, as long as no item has queries. Rows go as fp32; so does
// the output. The caller frees it.
size_t kv_pack(const kv_item *items, size_t count, uint64_t id, uint8_t **bytes);

// Append in one message; the status. `text`, where not NULL, has FIXTURE_TEXT_MAX bytes.
int kv_append(fixture_client *client, const kv_item *items, size_t count, char *text);
fixture_result kv_call(fixture_client *client, const char *method, const ProtobufCMessage *request);
// Attend; the status, and the response to be freed with qkv__v1__attend_response__free_unpacked.
int kv_attend(fixture_client *client, const kv_item *items, size_t count, Qkv__V1__AttendResponse **response,
              char *text);

// ---- The reference session ----

typedef struct kv_reference {
  qkv_store *store;
  qkv_session *session;
} kv_reference;

kv_reference kv_reference_open(const char *session);
kv_reference kv_reference_open_for(const char *session, qkv_purpose purpose);
void kv_reference_close(kv_reference *reference);
void kv_reference_append(kv_reference *reference, const kv_item *item);
// out [queries][KV_Q_HEADS][KV_VALUE_DIM], lse [queries][KV_Q_HEADS].
void kv_reference_attend(kv_reference *reference, const kv_item *item, float *out, float *lse);
// Fails unless `result` is bit for bit the reference session's answer to `item`.
void kv_same_attend(kv_reference *reference, const kv_item *item, const Qkv__V1__AttendResult *result);

#endif
