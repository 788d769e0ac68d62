// Limits of concurrent calls: in all, of one connection, of one tenant.
//
// Calls are of two kinds, each with places of its own: control calls (qkvi_rpc_is_control) and all others. A call is
// silent until its first message has arrived as a whole. Where all places are taken, a new call gets that of the
// oldest silent call of the connection that has the most of them, unless the new call's own connection has as many
// calls. So silent streams block no other client, and the connection that opens the most of them loses them first.
// Control calls, which need no credentials, lose their places alike where their clients do not read the answers.
//
// Calls that have spoken keep their places. A tenant without a limit of its own has three quarters of all at most,
// the next one three quarters of the rest: so one that opens streams and lets them be shuts no other tenant out.
//
// A call that has spoken waits for its client, too: where that does not read what is sent, or does not send the next
// message of a stream. Either has a time limit of its own.
//
// Threads: any; one lock, held briefly. Calls to gRPC are made outside of it.
#ifndef QKV_SERVER_RPC_LIMITS_H
#define QKV_SERVER_RPC_LIMITS_H

#include <grpc/grpc.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/fair.h"
#include "engine/base/status.h"
#include "server/handlers/block.h"
#include "server/tenants/meter.h"

typedef struct qkvi_rpc_limits qkvi_rpc_limits;

typedef struct qkvi_rpc_limits_config {
  size_t calls_max, control_max;  // at once
  size_t connection_max;          // calls of one connection; of control calls a quarter of theirs
  size_t tenant_max;  // calls of one tenant that are no control calls; 0: of those that have spoken three times as
                      // many as it leaves
  qkvi_call_quota_fn *quota;  // of a tenant, asked when its first call comes, under the lock; NULL: none has one
  void *quota_context;
  uint64_t arrived_max;  // bytes of messages that have arrived and are not served yet
  // How long a call may be silent, a message to its client may lie unread, and a stream may wait for its client's
  // next message; 0: for ever.
  int64_t first_message_ms, unread_ms, idle_ms;
} qkvi_rpc_limits_config;

// Where several calls are counted together: a connection or a tenant. Opaque.
typedef struct qkvi_rpc_group qkvi_rpc_group;

typedef enum qkvi_rpc_kind { QKVI_RPC_CALL, QKVI_RPC_CONTROL, QKVI_RPC_KINDS } qkvi_rpc_kind;

// The state of one call. Guarded by the lock.
typedef struct qkvi_rpc_place {
  qkvi_rpc_group *connection, *tenant;
  qkvi_rpc_kind kind;
  bool counted;  // it has one of the places; a call that lost its place runs a little longer
  bool spoken;   // it is one of the tenant's that keep their places
  bool silent;   // in the list of silent calls, else in that of the others
  bool metered;  // its messages count and wait
  int64_t begun_ms;
  struct qkvi_rpc_place *next, *previous;  // of the silent ones, or of the others
} qkvi_rpc_place;

qkvi_rpc_limits *qkvi_rpc_limits_create(const qkvi_rpc_limits_config *config);
void qkvi_rpc_limits_destroy(qkvi_rpc_limits **limits);  // no call is left

// Calls by which a daemon is observed and managed: health checks and those of Admin.
bool qkvi_rpc_is_control(const char *path);

// Takes a place for the call that `place` is part of. `peer` is its connection's name. RESOURCE_EXHAUSTED names the
// limit; then nothing is held.
qkv_status qkvi_rpc_limits_enter(qkvi_rpc_limits *limits, qkvi_rpc_place *place, qkvi_rpc_kind kind, const char *peer,
                                 const char *tenant, qkv_error *error);
// The first message has arrived, or none will come. Once for each call, before its handler is called.
// RESOURCE_EXHAUSTED: the call has to end, as its tenant has too many that go on; it still has its place.
qkv_status qkvi_rpc_limits_spoken(qkvi_rpc_limits *limits, qkvi_rpc_place *place, qkv_error *error);
void qkvi_rpc_limits_leave(qkvi_rpc_limits *limits, qkvi_rpc_place *place);  // after it has spoken

// The holders that the call's responses are counted for.
qkvi_holders qkvi_rpc_limits_holders(const qkvi_rpc_place *place);

// Counts a message of the call, which has arrived, until it is given back. RESOURCE_EXHAUSTED says whether all, the
// tenant or the connection have too many bytes; then it is not counted.
qkv_status qkvi_rpc_limits_arrived(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, uint64_t bytes,
                                   qkv_error *error);
void qkvi_rpc_limits_served(const qkvi_rpc_place *place, uint64_t bytes);

// Ends calls that have waited for their clients for too long. To be called several times a second.
void qkvi_rpc_limits_tend(qkvi_rpc_limits *limits);

// ---- Quotas ----

// Asks again for the quotas of all tenants.
void qkvi_rpc_limits_refresh(qkvi_rpc_limits *limits);
// How long the call's next message has to wait (server/tenants/meter.h); counted as a refusal where `refuses` ms or
// more. Control calls never wait.
uint64_t qkvi_rpc_limits_wait_ms(qkvi_rpc_limits *limits, qkvi_rpc_place *place, uint64_t refuses, qkv_error *error);
void qkvi_rpc_limits_take(qkvi_rpc_limits *limits, const qkvi_rpc_place *place, uint64_t bytes, uint64_t rows);
// Flow and weight of the call's tenant. Of tenants that have calls up to QKV_FAIR_FLOWS - 1 have a flow each.
qkv_share qkvi_rpc_limits_share(qkvi_rpc_limits *limits, const qkvi_rpc_place *place);
// The call was refused for a quota that is not one of calls.
void qkvi_rpc_limits_refused(qkvi_rpc_limits *limits, const qkvi_rpc_place *place);
// Of a tenant; zeros where it is not known (any more).
qkvi_call_usage qkvi_rpc_limits_usage(qkvi_rpc_limits *limits, const char *tenant);
// Tenants that calls have come from, in no order, without the lock: some at a time, others may take it in between.
void qkvi_rpc_limits_each(qkvi_rpc_limits *limits, void (*fn)(void *context, const char *tenant), void *context);

// How many calls have ended because they were silent: for too long, or because others needed their places.
uint64_t qkvi_rpc_limits_silent_ended(qkvi_rpc_limits *limits);
// How many have ended because their clients did not read, or sent no further message.
uint64_t qkvi_rpc_limits_stalled_ended(qkvi_rpc_limits *limits);

#endif
