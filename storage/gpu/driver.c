#include "storage/gpu/driver.h"

#include <dlfcn.h>
#include <stddef.h>

typedef int get_address(const char *symbol, void **address, int version, uint64_t flags, int *found);

// dlsym and the driver return function pointers as object pointers; POSIX guarantees the same size.
static qkv_status find_function(get_address *get, const char *name, int version, void **to, qkv_error *error) {
  int found = 0;
  *to = NULL;
  if (get(name, to, version, 0, &found) == QKV_CUDA_SUCCESS && *to != NULL) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "the CUDA driver has no %s; qkvd needs one of CUDA 12 or later", name);
}

const char *qkv_cuda_result_name(const qkv_cuda_driver *driver, int result) {
  const char *name = NULL;
  if (driver->GetErrorName(result, &name) != QKV_CUDA_SUCCESS || name == NULL) return "an unknown error";
  return name;
}

qkv_status qkv_cuda_load(qkv_cuda_driver *driver, qkv_error *error) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) return qkv_fail(error, QKV_UNAVAILABLE, "no CUDA driver: %s", dlerror());
  get_address *get = NULL;
  *(void **)&get = dlsym(library, "cuGetProcAddress_v2");
  if (get == NULL) return qkv_fail(error, QKV_UNAVAILABLE, "the CUDA driver is older than CUDA 12");
#define X(name, version, parameters) QKV_TRY(find_function(get, "cu" #name, version, (void **)&driver->name, error));
  QKV_CUDA_FUNCTIONS(X)
#undef X
  const int result = driver->Init(0);
  if (result == QKV_CUDA_SUCCESS) return QKV_OK;
  return qkv_fail(error, QKV_UNAVAILABLE, "the CUDA driver does not start: %s (%d)",
                  qkv_cuda_result_name(driver, result), result);
}
