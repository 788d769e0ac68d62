// Which of several daemons has a session, and the metadata by which a proxy finds it.
//
// A client of several targets ("a:7580,b:7580") has a client for each of them, its parts, and holds no connection
// itself. A session belongs to the part of the highest weight, of those that answer (rendezvous hashing): where one
// goes, its sessions alone move. The weight of a target and a key is a pure function of their texts, the same here
// and in Python (client/python/src/qkvd/place.py); tests/client/c/place_test.c has the values.
//
//   hash(text)    = XXH3-64 of its bytes
//   weight(t, k)  = the avalanche of XXH64 over hash(t) ^ hash(k)
//
// A key is the name of a session or object, or the client's placement label where it has one. Every call carries it
// as the metadata x-qkv-session, which is what proxies hash (deploy/proxies).
//
// A part that has answered UNAVAILABLE, or not in time, is suspect: before it is used again it must answer a health
// check with SERVING. The next call asks it once; where it does not answer it is watched, in the background
// (health.h), and asked again by a call once that has ended. Its sessions are another's meanwhile.
//
// Threads: as the client's.
#ifndef QKV_CLIENT_C_PLACE_H
#define QKV_CLIENT_C_PLACE_H

#include "client/c/client.h"

uint64_t qkvi_place_hash(const char *text);
uint64_t qkvi_place_weight(uint64_t target, uint64_t key);

// The client whose calls reach the owner of `key`, with the key in its metadata: itself, or a part. NULL: the call is
// for no session in particular, the key stays as it is. FAILED_PRECONDITION: then there is no owner. UNAVAILABLE: no
// part answers.
qkv_code qkvi_route(qkv_client **client, const char *key, qkv_call_error *error);

// A client of several targets. `options` are as in qkv_client_connect, checked.
qkv_code qkvi_connect_several(const char *targets, const qkv_client_options *options, qkv_client **client_out,
                              qkv_call_error *error);
void qkvi_close_parts(qkv_client *client);

// Entries 0 to `count` of something, grouped by the part that owns them: parts[i] has those of order[begins[i]] to
// order[begins[i + 1]], in their order. One group, of the client itself, where it has no parts.
typedef struct qkvi_split {
  size_t groups;
  size_t *order, *begins;
  qkv_client **parts;
} qkvi_split;
// `key_of` gives an entry's key. On success the caller ends it with qkvi_split_free.
qkv_code qkvi_split_keys(qkv_client *client, const char *(*key_of)(const void *entries, size_t i),
                         const void *entries, size_t count, qkvi_split *split, qkv_call_error *error);
void qkvi_split_free(qkvi_split *split);
// The key of an item, and items in a split's order, to be freed (items.c).
const char *qkvi_key_of_item(const void *items, size_t i);
qkv_client_item *qkvi_items_in_order(const qkvi_split *split, const qkv_client_item *items, size_t count);

// Calls fn for each part that answers, or for the client itself, until it returns false. UNAVAILABLE: none answers.
qkv_code qkvi_each_part(qkv_client *client, bool (*fn)(qkv_client *part, void *context), void *context,
                        qkv_call_error *error);

// A RegisterModelRequest that parts get as soon as they answer again; the same name's takes the place of it.
void qkvi_keep_model(qkv_client *client, const char *name, const void *request, size_t bytes);

#endif
