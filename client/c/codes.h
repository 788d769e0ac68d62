// What the pages of a session are coded by, as far as this client has asked: codes, and the calibrations that they
// are made of, each of which crosses once.
//
// Threads: as the client's; a code that was found may be used by any number of threads until the next call.
#ifndef QKV_CLIENT_C_CODES_H
#define QKV_CLIENT_C_CODES_H

#include "client/c/client.h"
#include "engine/cache/page_code.h"
#include "qkv/v1/kv_cache.pb-c.h"

// A session as its pages are coded: what GetSession and GetModel say of it.
typedef struct qkvi_coded_session {
  Qkv__V1__SessionInfo *info;
  Qkv__V1__GetModelResponse *model;
} qkvi_coded_session;

// On success the caller ends it with qkvi_coded_session_free. NOT_FOUND: there is no session of this name.
qkv_code qkvi_coded_session_get(qkv_client *client, const char *session, qkvi_coded_session *out,
                                qkv_call_error *error);
void qkvi_coded_session_free(qkvi_coded_session *session);

// All zeros where there is none; to be resolved (engine/codec/rope.h).
qkv_rope qkvi_rope_of_message(const Qkv__V1__Rope *from);
// NULL: nothing is said.
void qkvi_policy_of_message(const Qkv__V1__CodecPolicy *from, qkv_policy *to);

// The session's code under the calibration of a version; 0: data-free. `hash` is the calibration's; 0: any that the
// daemon has of that version. `*code` is the client's, and stays until the client has been asked for CODES_MAX
// others, unless the caller takes a reference; `*found_hash`, where not NULL, gets the calibration's hash. NOT_FOUND:
// the daemon does not have the calibration any more; DATA_LOSS: it has another one.
qkv_code qkvi_code_find(qkv_client *client, const qkvi_coded_session *session, uint32_t version, uint64_t hash,
                        const qkv_page_code **code, uint64_t *found_hash, qkv_call_error *error);

// Forgets all of them; when the client is closed.
void qkvi_codes_free(qkv_client *client);

#endif
