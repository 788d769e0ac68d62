// The GPUs of a daemon: each a tier of its own (gpu.h), with its own memory, health and retries.
//
// A session's layers are all on one GPU, chosen when the session is opened: of those that are in use the one with the
// most free memory, counted in sixteenths of gpu-memory, and of these the one with the fewest sessions, so that
// sessions that are opened one after the other, before any has copies, are spread as well. Forks are where their
// parent is. A session stays on its GPU, also while that has failed: the CPU attends it then. No GPU reads another's
// memory.
//
// Threads: any, but for create and destroy.
#ifndef QKV_SERVER_GPU_GPUS_H
#define QKV_SERVER_GPU_GPUS_H

#include "engine/base/option.h"
#include "server/gpu/gpu.h"

#define QKVI_GPUS_MAX 64

typedef struct qkvi_gpus qkvi_gpus;

// Opens the GPUs of these names (gpu.h), or with "all" those that the driver has; `config` is that of each, but for
// the name. NULL: there is no driver, or there are no kernels, which one line of the log says. INVALID_ARGUMENT: two
// names of one GPU, more than QKVI_GPUS_MAX, "all" and others, and as for qkvi_gpu_create.
qkv_status qkvi_gpus_create(const qkvi_gpu_config *config, const qkv_option_list *names, qkvi_gpus **out,
                            qkv_error *error);
// As qkvi_gpu_destroy. Clears *gpus; NULL inside is none.
void qkvi_gpus_destroy(qkvi_gpus **gpus);

// In the order of their names; count 0 of NULL.
size_t qkvi_gpus_count(const qkvi_gpus *gpus);
qkvi_gpu *qkvi_gpus_at(const qkvi_gpus *gpus, size_t i);
// The one that has the driver's number, as far as that is known; else the first.
qkvi_gpu *qkvi_gpus_numbered(const qkvi_gpus *gpus, int64_t number);

// For a new session: the device of a GPU. `gpus` is a qkvi_gpus, as qkv_store_config has it.
qkv_device *qkvi_gpus_choose(void *gpus);

#endif
