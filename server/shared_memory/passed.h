// Descriptors that clients pass by a unix socket of its own (`shm-listen`), for memory that has no name: a memfd, or
// allocations of a GPU that were exported. gRPC passes none.
//
//   client                                            daemon
//   connects ───────────────────────────────────────► notes its user, as the kernel says
//   one message: "qkvdfd" 01 00, 1 to 64 descriptors ► keeps them for ten seconds, under a token
//   ◄─── code (1 byte), text, and the end              0 and the token: 32 hexadecimal digits; or a gRPC status code
//   and
//                                                      why they were not taken
//   ...SharedMemoryRegister{descriptor: token} ──────► they are opened, for a call of the same user, once
//
// The token is random, so that only who has passed them can name them; the tenant is the call's. What they are of is
// not looked at before. A connection has two seconds for its message. All is bounded, as a whole and by user:
// connections 64 and 16, descriptors that wait 512 and 128.
//
// Threads: any, but for create and destroy; one of its own (qkvd-shm) accepts, reads, and closes what is over.
// Closing a descriptor may wait for a file system that its client serves; then passing stands still, and nothing
// else.
#ifndef QKV_SERVER_SHARED_MEMORY_PASSED_H
#define QKV_SERVER_SHARED_MEMORY_PASSED_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include "engine/base/metric.h"
#include "engine/base/status.h"

#define QKVI_PASSED_SET_MAX 64  // descriptors of a message

typedef struct qkvi_passed qkvi_passed;

// What came with one message.
typedef struct qkvi_passed_set {
  const int *descriptors;
  size_t count;
} qkvi_passed_set;

typedef struct qkvi_passed_config {
  const char *address;         // "unix:PATH"
  unsigned mode;               // of the socket's file
  qkv_metric_value *waiting;   // gauge: descriptors
  qkv_metric_value *accepted;  // counter: messages
  qkv_metric_value *refused;   // counter: messages
} qkvi_passed_config;

// INVALID_ARGUMENT, UNAVAILABLE: the address.
qkv_status qkvi_passed_create(const qkvi_passed_config *config, qkvi_passed **out, qkv_error *error);
void qkvi_passed_destroy(qkvi_passed **passed);  // when no set is taken

// The set of a token, the caller's until it is returned. INVALID_ARGUMENT: no token. NOT_FOUND: none waits that a
// process of `user` has passed.
qkv_status qkvi_passed_take(qkvi_passed *passed, const char *token, uid_t user, const qkvi_passed_set **set,
                            qkv_error *error);
// `used`: closes them; else they wait for the rest of their time. Clears *set; NULL inside is none.
void qkvi_passed_return(qkvi_passed *passed, const qkvi_passed_set **set, bool used);

#endif
