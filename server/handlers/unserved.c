// The methods of the contract that are not served yet: UNIMPLEMENTED, with a sentence that says which.
#include <stddef.h>

#include "server/handlers/handlers.h"

static void finish(qkv_rpc_call *call, qkv_bytes message, const char *text) {
  (void)message;
  qkv_rpc_finish(call, QKV_UNIMPLEMENTED, text);
}

// service, method
#define UNSERVED_MAP(X)                     \
  X(SharedMemory, CudaSharedMemoryStatus)   \
  X(SharedMemory, CudaSharedMemoryRegister) \
  X(SharedMemory, CudaSharedMemoryUnregister)

#define X(service, method)                                                                                    \
  static void on_##method(qkv_rpc_call *call, qkv_bytes message) {                                            \
    finish(call, message, #service "." #method " is in the contract, but this daemon does not serve it yet"); \
  }
UNSERVED_MAP(X)
#undef X

const qkv_rpc_method qkvi_unserved_methods[] = {
#define X(service, method) {.path = "/qkv.v1." #service "/" #method, .message = on_##method},
    UNSERVED_MAP(X)
#undef X
        {0}};
