#include "server/gpu/gpus.h"

#include <assert.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "server/gpu/internal.h"

enum { PARTS = 16 };  // of a GPU's memory: what differs by less counts as the same

struct qkvi_gpus {
  size_t count;
  qkvi_gpu *gpus[QKVI_GPUS_MAX];
  char names[QKVI_GPUS_MAX][QKV_GPU_NAME_MAX];
};

// ---- Names ----

static bool is_all(const qkv_option_list *names) {
  return names->count == 1 && strcmp(names->items[0], "all") == 0;
}

static bool is_number(const char *name) {
  const size_t digits = strspn(name, "0123456789");
  return digits > 0 && digits <= 9 && name[digits] == '\0' && (name[0] != '0' || digits == 1);
}

// 8-4-4-4-12 hexadecimal digits, as nvidia-smi -L shows it, with or without what stands before them there.
static bool is_uuid(const char *name) {
  static const char form[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";
  if (strncmp(name, "GPU-", 4) == 0 || strncmp(name, "MIG-", 4) == 0) name += 4;
  if (strlen(name) != strlen(form)) return false;
  for (size_t i = 0; form[i] != '\0'; i++) {
    if (form[i] == 'x' ? isxdigit((unsigned char)name[i]) == 0 : name[i] != form[i]) return false;
  }
  return true;
}

// Whether a name can be one, which needs no driver.
static qkv_status check_names(const qkv_option_list *names, qkv_error *error) {
  if (names->count == 0 || names->count > QKVI_GPUS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-devices has %zu names, allowed are 1 to %d", names->count,
                    QKVI_GPUS_MAX);
  for (size_t i = 0; i < names->count; i++) {
    const size_t length = strlen(names->items[i]);
    if (length == 0 || length >= QKV_GPU_NAME_MAX)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-devices: a name has %zu bytes, allowed are 1 to %d", length,
                      QKV_GPU_NAME_MAX - 1);
    const bool all = strcmp(names->items[i], "all") == 0;
    if (names->count > 1 && all)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-devices has `all` and other names");
    if (!all && !is_number(names->items[i]) && !is_uuid(names->items[i]))
      return qkv_fail(error, QKV_INVALID_ARGUMENT,
                      "--gpu-devices: \"%s\" is neither a number, nor `all`, nor a UUID as nvidia-smi -L shows it "
                      "(GPU-... or MIG-...)",
                      names->items[i]);
  }
  return QKV_OK;
}

// Names that are not found now may be later: a GPU that is away comes back.
static qkv_status check_twice(const qkv_cuda_driver *driver, const qkv_option_list *names, qkv_error *error) {
  int numbers[QKVI_GPUS_MAX];
  for (size_t i = 0; i < names->count; i++) {
    const bool found = qkv_gpu_resolve(driver, names->items[i], &numbers[i], NULL) == QKV_OK;
    if (!found) numbers[i] = -1;
    for (size_t j = 0; j < i; j++) {
      if (strcmp(names->items[i], names->items[j]) == 0 || (found && numbers[i] == numbers[j]))
        return qkv_fail(error, QKV_INVALID_ARGUMENT, "--gpu-devices: %s and %s are the same GPU", names->items[j],
                        names->items[i]);
    }
  }
  return QKV_OK;
}

// ---- Life ----

// A range that one has been asked for is forgotten by all: sessions on other GPUs may share it.
static void link_devices(qkvi_gpus *gpus) {
  for (size_t i = 0; i < gpus->count; i++) gpus->gpus[i]->device.next = &gpus->gpus[(i + 1) % gpus->count]->device;
}

static qkv_status open_next(const qkvi_gpu_config *config, const char *name, qkvi_gpus *gpus, qkv_error *error) {
  qkvi_gpu_config own = *config;
  own.device = gpus->names[gpus->count];
  (void)snprintf(gpus->names[gpus->count], sizeof *gpus->names, "%s", name);
  QKV_TRY(qkvi_gpu_create(&own, &gpus->gpus[gpus->count], error));
  gpus->count += gpus->gpus[gpus->count] != NULL;
  return QKV_OK;
}

static qkv_status open_others(const qkvi_gpu_config *config, const qkv_option_list *names, qkvi_gpus *gpus,
                              qkv_error *error) {
  const qkv_cuda_driver *driver = &gpus->gpus[0]->driver;
  int count = (int)names->count;
  if (is_all(names)) {
    if (driver->DeviceGetCount(&count) != QKV_CUDA_SUCCESS) count = 1;
    if (count > QKVI_GPUS_MAX) count = QKVI_GPUS_MAX;
  } else if (count > 1) {
    QKV_TRY(check_twice(driver, names, error));
  }
  for (int i = 1; i < count; i++) {
    char number[16];
    (void)snprintf(number, sizeof number, "%d", i);
    QKV_TRY(open_next(config, is_all(names) ? number : names->items[i], gpus, error));
  }
  return QKV_OK;
}

// Without a driver or kernels there is not even the first one.
static qkv_status open_all(const qkvi_gpu_config *config, const qkv_option_list *names, qkvi_gpus *gpus,
                           qkv_error *error) {
  QKV_TRY(check_names(names, error));
  QKV_TRY(open_next(config, is_all(names) ? "0" : names->items[0], gpus, error));
  if (gpus->count == 1) QKV_TRY(open_others(config, names, gpus, error));
  link_devices(gpus);
  return QKV_OK;
}

qkv_status qkvi_gpus_create(const qkvi_gpu_config *config, const qkv_option_list *names, qkvi_gpus **out,
                            qkv_error *error) {
  qkvi_gpus *gpus = calloc(1, sizeof *gpus);
  if (gpus == NULL) abort();
  const qkv_status status = open_all(config, names, gpus, error);
  if (status != QKV_OK || gpus->count == 0) qkvi_gpus_destroy(&gpus);
  *out = gpus;
  return status;
}

void qkvi_gpus_destroy(qkvi_gpus **gpus) {
  qkvi_gpus *old = *gpus;
  if (old == NULL) return;
  *gpus = NULL;
  for (size_t i = 0; i < old->count; i++) qkvi_gpu_destroy(&old->gpus[i]);
  free(old);
}

size_t qkvi_gpus_count(const qkvi_gpus *gpus) {
  return gpus == NULL ? 0 : gpus->count;
}

qkvi_gpu *qkvi_gpus_at(const qkvi_gpus *gpus, size_t i) {
  assert(i < qkvi_gpus_count(gpus));
  return gpus->gpus[i];
}

qkvi_gpu *qkvi_gpus_numbered(const qkvi_gpus *gpus, int64_t number) {
  for (size_t i = 0; i < gpus->count; i++) {
    if (qkvi_gpu_read(gpus->gpus[i]).number == number) return gpus->gpus[i];
  }
  return gpus->gpus[0];
}

// ---- Sessions ----

// The less, the better: those that are not in use come last.
static uint64_t rank_of(qkvi_gpu *gpu) {
  const qkvi_gpu_stats stats = qkvi_gpu_read(gpu);
  const uint64_t used = stats.bytes * PARTS / stats.bytes_limit;
  return (uint64_t)stats.down << 63 | used << 32 | stats.sessions;
}

qkv_device *qkvi_gpus_choose(void *gpus) {
  const qkvi_gpus *all = gpus;
  uint64_t least = UINT64_MAX;
  qkv_device *chosen = NULL;
  for (size_t i = 0; i < all->count; i++) {
    const uint64_t rank = rank_of(all->gpus[i]);
    if (chosen != NULL && rank >= least) continue;
    chosen = &all->gpus[i]->device;
    least = rank;
  }
  return chosen;
}
