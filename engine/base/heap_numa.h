// Where a range of memory lies on a machine of several nodes, as the kernel is asked.
#ifndef QKV_ENGINE_BASE_HEAP_NUMA_H
#define QKV_ENGINE_BASE_HEAP_NUMA_H

#include "engine/base/heap.h"

// Before any of it is touched. UNIMPLEMENTED "numa is interleave, ..." where the kernel refuses.
qkv_status qkvi_heap_place(void *memory, size_t bytes, qkv_heap_numa numa, qkv_error *error);

#endif
