// Calls that go on later, by a thread of its own, which is started with the first of them.
//
// Threads: add from any; create and destroy by the owner.
#ifndef QKV_SERVER_RPC_DELAY_H
#define QKV_SERVER_RPC_DELAY_H

#include <stdint.h>

typedef struct qkvi_rpc_delays qkvi_rpc_delays;

// The owner's until resume() is called, which must not block for long.
typedef struct qkvi_rpc_delayed {
  void (*resume)(struct qkvi_rpc_delayed *delayed);
  uint64_t due_ns;  // on the clock of qkv_stage_now
  struct qkvi_rpc_delayed *next;
} qkvi_rpc_delayed;

qkvi_rpc_delays *qkvi_rpc_delays_create(void);
void qkvi_rpc_delays_destroy(qkvi_rpc_delays **delays);  // none is left (asserted)
void qkvi_rpc_delays_add(qkvi_rpc_delays *delays, qkvi_rpc_delayed *delayed, uint64_t ms);

#endif
