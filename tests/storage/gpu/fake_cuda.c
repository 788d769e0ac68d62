#include "tests/storage/gpu/fake_cuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "storage/gpu/driver.h"

enum {
  BLOCKS_MAX = 4096,
  OPERATIONS_MAX = 4096,
  FUNCTIONS_MAX = 64,
  ALLOCATIONS_MAX = 1024,
  GRANULARITY = 65536,
  INVALID_VALUE = 1,
  IPC_MAGIC = 0x66616b65,
  NO_SUCH = 500,
  INVALID_DEVICE = 101,
  INVALID_CONTEXT = 201,
  MEMORY_BYTES = 1 << 30,  // of a device
  DEVICES_MAX = 4,
  NO_DEVICE = -1,
};
// Of each device.
static struct qkv_cuda_context_s {
  int retained;
  int broken;  // and so it stays
  bool hanging;
  uint64_t memory_bytes;
} contexts[DEVICES_MAX];

struct qkv_cuda_module_s {
  int unused;
};
struct qkv_cuda_function_s {
  const fake_cuda_kernel *kernel;
};

typedef struct operation {
  enum { COPY, LAUNCH, EVENT } kind;
  void *to;
  const void *from;
  size_t bytes;
  const fake_cuda_kernel *kernel;
  uint32_t blocks, threads, shared_bytes;
  uint64_t ticket;
  struct qkv_cuda_event_s *event;
  uint8_t *arguments;
} operation;

struct qkv_cuda_stream_s {
  operation operations[OPERATIONS_MAX];
  size_t count;
};
struct qkv_cuda_event_s {
  qkv_cuda_stream stream;
  uint64_t recorded, reached;  // tickets
  bool asked;                  // since it was recorded
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Thread_local qkv_cuda_context current;
static struct {
  void *at;
  size_t bytes;
  int device;
  enum {
    OWN,
    OPENED,
    RESERVED,
    MAPPED,
    REACHABLE
  } kind;               // opened: of another process; reachable: mapped, with access
  unsigned opened;      // how many times
  dev_t object_device;  // of what was opened
  ino_t object_inode;
} memory[BLOCKS_MAX];
static int allocations[ALLOCATIONS_MAX];  // imported: descriptor, 0: none
static struct {
  const char *name;
  unsigned calls;
} functions[FUNCTIONS_MAX];
static fake_cuda_state state;
static struct {
  void *at;
  size_t *count;  // in `state`
  int device;
} things[BLOCKS_MAX];  // that are freed by `free`
static uint64_t tickets;
static struct {
  char function[64];
  unsigned left;
  int result;
  int device;  // NO_DEVICE: any
} fault;

static int device_count(void) {
  const char *text = getenv("FAKE_CUDA_DEVICES");
  const long count = text == NULL ? 2 : strtol(text, NULL, 10);
  return count < 0 || count > DEVICES_MAX ? DEVICES_MAX : (int)count;
}

static int device_of(qkv_cuda_context context) {
  return context == NULL ? NO_DEVICE : (int)(context - contexts);
}

// ---- Faults ----

static void set_fault(int device, const char *function, unsigned nth, int result) {
  fault.device = device;
  snprintf(fault.function, sizeof fault.function, "%s", function);
  fault.left = nth;
  fault.result = result;
}

static unsigned *calls_of(const char *name) {
  for (size_t i = 0; i < FUNCTIONS_MAX; i++) {
    if (functions[i].name == NULL) functions[i].name = strdup(name);
    if (strcmp(functions[i].name, name) == 0) return &functions[i].calls;
  }
  abort();
}

static void read_fault(void) {
  static bool read;
  if (!read) {
    const char *text = getenv("FAKE_CUDA_FAIL");
    char function[64];
    unsigned nth;
    int result, device = NO_DEVICE;
    if (text != NULL && sscanf(text, "%63[^:]:%u:%d:%d", function, &nth, &result, &device) >= 3)
      set_fault(device, function, nth, result);
    read = true;
  }
}

// `device`: that the call is for. What does not use its context works whatever has become of that.
static int enter(const char *name, int device, bool in_context) {
  struct qkv_cuda_context_s *context = device == NO_DEVICE ? NULL : &contexts[device];
  read_fault();
  ++*calls_of(name);
  if (in_context && context == NULL) return INVALID_CONTEXT;
  if (in_context && context->broken != 0) return context->broken;
  if (fault.result == 0 || strcmp(fault.function, name) != 0) return QKV_CUDA_SUCCESS;
  if ((fault.device != NO_DEVICE && fault.device != device) || --fault.left > 0) return QKV_CUDA_SUCCESS;
  const int result = fault.result;
  fault.result = 0;
  if (context != NULL && result == FAKE_CUDA_HANG) context->hanging = true;
  if (result == FAKE_CUDA_HANG) return QKV_CUDA_SUCCESS;
  if (context != NULL && result != QKV_CUDA_OUT_OF_MEMORY && result != INVALID_VALUE) context->broken = result;
  return result;
}

void fake_cuda_fail_on(int device, const char *function, unsigned nth, int result) {
  pthread_mutex_lock(&lock);
  set_fault(device, function, nth, result);
  pthread_mutex_unlock(&lock);
}

void fake_cuda_fail(const char *function, unsigned nth, int result) {
  fake_cuda_fail_on(NO_DEVICE, function, nth, result);
}

fake_cuda_state fake_cuda_read(void) {
  pthread_mutex_lock(&lock);
  const fake_cuda_state now = state;
  pthread_mutex_unlock(&lock);
  return now;
}

unsigned fake_cuda_count(const char *function) {
  pthread_mutex_lock(&lock);
  const unsigned calls = *calls_of(function);
  pthread_mutex_unlock(&lock);
  return calls;
}

// ---- What is alive ----

static void *keep(void *at, size_t *count) {
  if (at == NULL) abort();
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (things[i].at != NULL) continue;
    things[i].at = at;
    things[i].count = count;
    things[i].device = device_of(current);
    ++*count;
    return at;
  }
  abort();
}

static int drop(void *at) {
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (at == NULL || things[i].at != at) continue;
    free(at);
    things[i].at = NULL;
    --*things[i].count;
    return QKV_CUDA_SUCCESS;
  }
  abort();  // freed twice, or never made
}

static void forget_memory(size_t i) {
  state.memory_blocks--;
  state.memory_bytes -= memory[i].bytes;
  contexts[memory[i].device].memory_bytes -= memory[i].bytes;
  memory[i].at = NULL;
}

static void drop_memory(size_t i) {
  munmap(memory[i].at, memory[i].bytes);
  forget_memory(i);
}

// What is mapped within a reservation goes with it: its addresses must not be free in between.
static bool is_within(size_t i) {
  return memory[i].kind == MAPPED || memory[i].kind == REACHABLE;
}

// ---- Streams ----

// The current device's memory: a kernel that touches another one's ends the program.
static void protect(int how) {
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (memory[i].at == NULL || memory[i].device != device_of(current)) continue;
    if (memory[i].kind == RESERVED || memory[i].kind == MAPPED) continue;
    if (mprotect(memory[i].at, memory[i].bytes, how) != 0) abort();
  }
}

static void run(operation *of) {
  switch (of->kind) {
    case COPY:
      memcpy(of->to, of->from, of->bytes);
      break;
    case LAUNCH:
      of->kernel->run(of->arguments, of->blocks, of->threads, of->shared_bytes);
      free(of->arguments);
      state.launches++;
      break;
    case EVENT:
      if (of->event->recorded == of->ticket) of->event->reached = of->ticket;
      break;
  }
}

static void run_stream(qkv_cuda_stream stream) {
  protect(PROT_READ | PROT_WRITE);
  for (size_t i = 0; i < stream->count; i++) run(&stream->operations[i]);
  stream->count = 0;
  protect(PROT_NONE);
}

static void forget_work(qkv_cuda_stream stream) {
  for (size_t i = 0; i < stream->count; i++) {
    if (stream->operations[i].kind == LAUNCH) free(stream->operations[i].arguments);
  }
  stream->count = 0;
}

static operation *add(qkv_cuda_stream stream, int kind) {
  if (stream->count == OPERATIONS_MAX) abort();
  operation *added = &stream->operations[stream->count++];
  *added = (operation){.kind = kind};
  return added;
}

static int copy(uint64_t to, const void *from, size_t bytes, qkv_cuda_stream stream) {
  operation *added = add(stream, COPY);
  added->to = (void *)(uintptr_t)to;
  added->from = from;
  added->bytes = bytes;
  return QKV_CUDA_SUCCESS;
}

// ---- The functions ----

// static int do_NAME(...) is what cuNAME does under the lock.
#define UNUSED(x) ((void)(x))

static int do_Init(unsigned flags) {
  return flags == 0 ? QKV_CUDA_SUCCESS : INVALID_VALUE;
}
static int do_DriverGetVersion(int *version) {
  return *version = 13000, QKV_CUDA_SUCCESS;
}
static int do_GetErrorName(int result, const char **name) {
  *name = "FAKE_ERROR";
  return result >= 0 ? QKV_CUDA_SUCCESS : INVALID_VALUE;
}
static int do_DeviceGetCount(int *count) {
  return *count = device_count(), QKV_CUDA_SUCCESS;
}
static int do_DeviceGet(int *device, int ordinal) {
  if (ordinal < 0 || ordinal >= device_count()) return INVALID_DEVICE;
  return *device = ordinal, QKV_CUDA_SUCCESS;
}
static int do_DeviceGetName(char *name, int bytes, int device) {
  snprintf(name, (size_t)bytes, "fake %d", device);
  return QKV_CUDA_SUCCESS;
}
static int do_DeviceGetUuid(qkv_cuda_uuid *uuid, int device) {
  for (int i = 0; i < 16; i++) uuid->bytes[i] = (uint8_t)(0xa0 + 16 * device + i);
  return QKV_CUDA_SUCCESS;
}
static int do_DeviceGetAttribute(int *value, int attribute, int device) {
  UNUSED(device);
  *value = attribute == QKV_CUDA_ATTRIBUTE_MAJOR ? 9 : attribute == QKV_CUDA_ATTRIBUTE_MINOR ? 0 : 4;
  return QKV_CUDA_SUCCESS;
}
static int do_DeviceTotalMem(size_t *bytes, int device) {
  UNUSED(device);
  return *bytes = MEMORY_BYTES, QKV_CUDA_SUCCESS;
}
static int do_DevicePrimaryCtxRetain(qkv_cuda_context *context, int device) {
  *context = &contexts[device];
  contexts[device].retained++;
  state.contexts++;
  return QKV_CUDA_SUCCESS;
}
static int do_CtxSetCurrent(qkv_cuda_context context) {
  return current = context, QKV_CUDA_SUCCESS;
}
static int do_ModuleLoadData(qkv_cuda_module *module, const void *image) {
  if (image == NULL) return INVALID_VALUE;
  *module = keep(calloc(1, sizeof **module), &state.modules);
  return QKV_CUDA_SUCCESS;
}
static int do_ModuleGetFunction(qkv_cuda_function *function, qkv_cuda_module module, const char *name) {
  static struct qkv_cuda_function_s found[FUNCTIONS_MAX];
  UNUSED(module);
  for (size_t i = 0; fake_cuda_kernels[i].name != NULL; i++) {
    if (strcmp(fake_cuda_kernels[i].name, name) != 0) continue;
    found[i].kernel = &fake_cuda_kernels[i];
    return *function = &found[i], QKV_CUDA_SUCCESS;
  }
  return NO_SUCH;
}
static int do_FuncSetAttribute(qkv_cuda_function function, int attribute, int value) {
  return function != NULL && attribute == QKV_CUDA_FUNCTION_SHARED_MAX && value > 0 ? QKV_CUDA_SUCCESS
                                                                                    : INVALID_VALUE;
}
static size_t find_memory(qkv_cuda_memory at) {
  size_t i = 0;
  while (i < BLOCKS_MAX && (uintptr_t)memory[i].at != at) i++;
  return i;
}

// fd -1: memory of its own. `wanted` is an address within a reservation, or none.
static int add_memory(qkv_cuda_memory *at, int kind, size_t bytes, int fd, void *wanted) {
  const size_t i = find_memory(0);
  if (i == BLOCKS_MAX) return QKV_CUDA_OUT_OF_MEMORY;
  const int flags = (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE;
  void *made = mmap(wanted, bytes, PROT_NONE, flags | (wanted != NULL ? MAP_FIXED : 0), fd, 0);
  if (made == MAP_FAILED) abort();
  memory[i].at = made;
  memory[i].bytes = bytes;
  memory[i].device = device_of(current);
  current->memory_bytes += bytes;
  memory[i].kind = kind;
  state.memory_blocks++;
  state.memory_bytes += bytes;
  return *at = (uintptr_t)made, QKV_CUDA_SUCCESS;
}

static int do_MemAlloc(qkv_cuda_memory *at, size_t bytes) {
  if (current->memory_bytes + bytes > MEMORY_BYTES) return QKV_CUDA_OUT_OF_MEMORY;
  return add_memory(at, OWN, bytes, -1, NULL);
}

// ---- Memory of other processes ----

// A handle names an object of shared memory: four bytes that say so, and the name.
static int do_IpcOpenMemHandle(qkv_cuda_memory *at, qkv_cuda_ipc handle, unsigned flags) {
  const uint32_t magic = IPC_MAGIC;
  struct stat object;
  if (flags != QKV_CUDA_IPC_LAZY_PEER_ACCESS || memcmp(handle.bytes, &magic, sizeof magic) != 0 ||
      handle.bytes[sizeof handle.bytes - 1] != 0)
    return INVALID_VALUE;
  const int fd = shm_open((const char *)handle.bytes + sizeof magic, O_RDWR, 0);
  if (fd < 0) return INVALID_VALUE;
  int result = fstat(fd, &object) == 0 && object.st_size > 0 ? QKV_CUDA_SUCCESS : INVALID_VALUE;
  for (size_t i = 0; i < BLOCKS_MAX && result == QKV_CUDA_SUCCESS; i++) {
    if (memory[i].at == NULL || memory[i].kind != OPENED || memory[i].device != device_of(current) ||
        memory[i].object_device != object.st_dev || memory[i].object_inode != object.st_ino)
      continue;
    memory[i].opened++;  // as a driver of CUDA 12 does
    *at = (uintptr_t)memory[i].at;
    close(fd);
    return QKV_CUDA_SUCCESS;
  }
  if (result == QKV_CUDA_SUCCESS) result = add_memory(at, OPENED, (size_t)object.st_size, fd, NULL);
  close(fd);
  if (result != QKV_CUDA_SUCCESS) return result;
  const size_t i = find_memory(*at);
  memory[i].opened = 1;
  memory[i].object_device = object.st_dev;
  memory[i].object_inode = object.st_ino;
  return QKV_CUDA_SUCCESS;
}
static int do_IpcCloseMemHandle(qkv_cuda_memory at) {
  const size_t i = find_memory(at);
  if (at == 0 || i == BLOCKS_MAX || memory[i].kind != OPENED) abort();
  if (--memory[i].opened == 0) drop_memory(i);
  return QKV_CUDA_SUCCESS;
}
static int do_MemGetAddressRange(qkv_cuda_memory *base, size_t *bytes, qkv_cuda_memory at) {
  const size_t i = find_memory(at);
  if (at == 0 || i == BLOCKS_MAX) return INVALID_VALUE;
  *base = at;
  return *bytes = memory[i].bytes, QKV_CUDA_SUCCESS;
}
// The descriptor of an object of shared memory stands for an allocation.
static int do_MemImportFromShareableHandle(qkv_cuda_allocation *allocation, void *handle, int kind) {
  struct stat object;
  const int fd = (int)(intptr_t)handle;
  if (kind != QKV_CUDA_DESCRIPTOR || fstat(fd, &object) != 0 || !S_ISREG(object.st_mode)) return INVALID_VALUE;
  size_t i = 1;
  while (i < ALLOCATIONS_MAX && allocations[i] != 0) i++;
  if (i == ALLOCATIONS_MAX) return QKV_CUDA_OUT_OF_MEMORY;
  allocations[i] = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  return *allocation = i, allocations[i] > 0 ? QKV_CUDA_SUCCESS : INVALID_VALUE;
}
static int do_MemRelease(qkv_cuda_allocation allocation) {
  if (allocation == 0 || allocation >= ALLOCATIONS_MAX || allocations[allocation] == 0) abort();
  close(allocations[allocation]);
  return allocations[allocation] = 0, QKV_CUDA_SUCCESS;
}
static int do_MemAddressReserve(qkv_cuda_memory *at, size_t bytes, size_t alignment, qkv_cuda_memory wanted,
                                uint64_t flags) {
  if (bytes == 0 || bytes % GRANULARITY != 0 || alignment != 0 || wanted != 0 || flags != 0) return INVALID_VALUE;
  if (bytes > (size_t)1 << 40) return QKV_CUDA_OUT_OF_MEMORY;
  return add_memory(at, RESERVED, bytes, -1, NULL);
}
static int do_MemMap(qkv_cuda_memory at, size_t bytes, size_t offset, qkv_cuda_allocation allocation,
                     uint64_t flags) {
  struct stat object;
  if (allocation == 0 || allocation >= ALLOCATIONS_MAX || allocations[allocation] == 0) abort();
  if (bytes % GRANULARITY != 0 || offset != 0 || flags != 0 || fstat(allocations[allocation], &object) != 0 ||
      (uint64_t)object.st_size < bytes)
    return INVALID_VALUE;
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    const uintptr_t begin = (uintptr_t)memory[i].at;
    if (begin == 0 || memory[i].kind != RESERVED || at < begin || at + bytes > begin + memory[i].bytes) continue;
    qkv_cuda_memory mapped;
    return add_memory(&mapped, MAPPED, bytes, allocations[allocation], (void *)(uintptr_t)at);
  }
  return INVALID_VALUE;
}
static bool is_mapped_in(size_t i, qkv_cuda_memory at, size_t bytes) {
  const uintptr_t begin = (uintptr_t)memory[i].at;
  return begin != 0 && is_within(i) && begin >= at && begin < at + bytes;
}
static int do_MemSetAccess(qkv_cuda_memory at, size_t bytes, const qkv_cuda_access *access, size_t count) {
  if (count != 1 || access->place != QKV_CUDA_PLACE_DEVICE || access->rights != QKV_CUDA_READ_WRITE)
    return INVALID_VALUE;
  if (access->device != device_of(current)) return INVALID_DEVICE;
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (is_mapped_in(i, at, bytes)) memory[i].kind = REACHABLE;
  }
  return QKV_CUDA_SUCCESS;
}
static int do_MemUnmap(qkv_cuda_memory at, size_t bytes) {
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (!is_mapped_in(i, at, bytes)) continue;
    if (mmap(memory[i].at, memory[i].bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) == MAP_FAILED)
      abort();
    forget_memory(i);
  }
  return QKV_CUDA_SUCCESS;
}
static int do_MemAddressFree(qkv_cuda_memory at, size_t bytes) {
  size_t i = 0;
  while (i < BLOCKS_MAX && ((uintptr_t)memory[i].at != at || memory[i].kind != RESERVED)) i++;
  if (at == 0 || i == BLOCKS_MAX || memory[i].bytes != bytes) abort();
  for (size_t j = 0; j < BLOCKS_MAX; j++) {
    if (is_mapped_in(j, at, bytes)) abort();
  }
  drop_memory(i);
  return QKV_CUDA_SUCCESS;
}

static int do_MemHostAlloc(void **at, size_t bytes, unsigned flags) {
  UNUSED(flags);
  *at = memset(keep(malloc(bytes), &state.host_blocks), 0xa5, bytes);
  return QKV_CUDA_SUCCESS;
}
static int do_MemHostGetDevicePointer(qkv_cuda_memory *at, void *host, unsigned flags) {
  return *at = (uintptr_t)host, flags == 0 ? QKV_CUDA_SUCCESS : INVALID_VALUE;
}
static int do_MemcpyHtoDAsync(qkv_cuda_memory to, const void *from, size_t bytes, qkv_cuda_stream stream) {
  return copy(to, from, bytes, stream);
}
static int do_MemcpyDtoHAsync(void *to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream) {
  return copy((uintptr_t)to, (const void *)(uintptr_t)from, bytes, stream);
}
static int do_MemcpyDtoDAsync(qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream) {
  return copy(to, (const void *)(uintptr_t)from, bytes, stream);
}
static int do_LaunchKernel(qkv_cuda_function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z,
                           unsigned threads_x, unsigned threads_y, unsigned threads_z, unsigned shared_bytes,
                           qkv_cuda_stream stream, void **parameters, void **extra) {
  if (parameters != NULL || extra == NULL || extra[0] != QKV_CUDA_ARGUMENTS || extra[2] != QKV_CUDA_ARGUMENT_BYTES ||
      extra[4] != QKV_CUDA_ARGUMENTS_END || blocks_x == 0 || blocks_y * blocks_z * threads_y * threads_z != 1)
    return INVALID_VALUE;
  operation *added = add(stream, LAUNCH);
  added->kernel = function->kernel;
  added->blocks = blocks_x;
  added->threads = threads_x;
  added->shared_bytes = shared_bytes;
  added->bytes = *(const size_t *)extra[3];
  added->arguments = malloc(added->bytes + 1);
  if (added->arguments == NULL) abort();
  memcpy(added->arguments, extra[1], added->bytes);
  return QKV_CUDA_SUCCESS;
}
static int do_StreamCreate(qkv_cuda_stream *stream, unsigned flags) {
  UNUSED(flags);
  *stream = keep(calloc(1, sizeof **stream), &state.streams);
  return QKV_CUDA_SUCCESS;
}
static int do_EventCreate(qkv_cuda_event *event, unsigned flags) {
  UNUSED(flags);
  *event = keep(calloc(1, sizeof **event), &state.events);
  return QKV_CUDA_SUCCESS;
}
static int do_EventRecord(qkv_cuda_event event, qkv_cuda_stream stream) {
  operation *added = add(stream, EVENT);
  added->event = event;
  added->ticket = event->recorded = ++tickets;
  event->stream = stream;
  event->asked = false;
  return QKV_CUDA_SUCCESS;
}
// The first query comes too early; the second one waits.
static int do_EventQuery(qkv_cuda_event event) {
  if (current->hanging) return QKV_CUDA_NOT_READY;
  if (event->reached == event->recorded) return QKV_CUDA_SUCCESS;
  if (!event->asked) return event->asked = true, QKV_CUDA_NOT_READY;
  run_stream(event->stream);
  return event->reached == event->recorded ? QKV_CUDA_SUCCESS : QKV_CUDA_NOT_READY;
}
static int do_EventElapsedTime(float *ms, qkv_cuda_event from, qkv_cuda_event to) {
  UNUSED(from), UNUSED(to);
  return *ms = 1, QKV_CUDA_SUCCESS;
}

static int do_DevicePrimaryCtxRelease(int device) {
  contexts[device].retained--;
  state.contexts--;
  return QKV_CUDA_SUCCESS;
}
// Frees everything in the context.
static int do_DevicePrimaryCtxReset(int device) {
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (memory[i].at != NULL && memory[i].device == device) (is_within(i) ? forget_memory : drop_memory)(i);
  }
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (things[i].at == NULL || things[i].device != device) continue;
    if (things[i].count == &state.streams) forget_work(things[i].at);
    drop(things[i].at);
  }
  contexts[device].broken = 0;
  contexts[device].hanging = false;
  return QKV_CUDA_SUCCESS;
}
static int do_ModuleUnload(qkv_cuda_module module) {
  return drop(module);
}
static int do_MemFree(qkv_cuda_memory at) {
  for (size_t i = 0; i < BLOCKS_MAX; i++) {
    if (at == 0 || (uintptr_t)memory[i].at != at) continue;
    if (memory[i].kind != OWN) abort();
    drop_memory(i);
    return QKV_CUDA_SUCCESS;
  }
  abort();
}
static int do_MemFreeHost(void *at) {
  return drop(at);
}
static int do_StreamDestroy(qkv_cuda_stream stream) {
  forget_work(stream);
  return drop(stream);
}
static int do_EventDestroy(qkv_cuda_event event) {
  return drop(event);
}

// The driver's functions: each takes the lock, counts, may fail, and asks for the context where it needs one: `on` is
// the device, of those in a context the current one. What ends something is done whatever the result.
#define FAKE_AS(name, on, in_context, always, parameters, arguments)          \
  static int cu_##name parameters {                                           \
    pthread_mutex_lock(&lock);                                                \
    int result = enter("cu" #name, on, in_context);                           \
    if (result == QKV_CUDA_SUCCESS || (always)) result = do_##name arguments; \
    pthread_mutex_unlock(&lock);                                              \
    return result;                                                            \
  }
#define FAKE(name, parameters, arguments) FAKE_AS(name, device_of(current), true, false, parameters, arguments)
#define FAKE_END(name, parameters, arguments) FAKE_AS(name, device_of(current), true, true, parameters, arguments)
#define FAKE_ON(name, on, parameters, arguments) FAKE_AS(name, on, false, false, parameters, arguments)

FAKE_ON(Init, NO_DEVICE, (unsigned flags), (flags))
FAKE_ON(DriverGetVersion, NO_DEVICE, (int *version), (version))
FAKE_ON(DeviceGetCount, NO_DEVICE, (int *count), (count))
FAKE_ON(DeviceGet, ordinal < DEVICES_MAX ? ordinal : NO_DEVICE, (int *device, int ordinal), (device, ordinal))
FAKE_ON(DeviceGetName, device, (char *name, int bytes, int device), (name, bytes, device))
FAKE_ON(DeviceGetUuid, device, (qkv_cuda_uuid * uuid, int device), (uuid, device))
FAKE_ON(DeviceGetAttribute, device, (int *value, int attribute, int device), (value, attribute, device))
FAKE_ON(DeviceTotalMem, device, (size_t * bytes, int device), (bytes, device))
FAKE_AS(DevicePrimaryCtxRetain, device, true, false, (qkv_cuda_context * context, int device), (context, device))
FAKE_AS(DevicePrimaryCtxRelease, device, false, true, (int device), (device))
FAKE_AS(DevicePrimaryCtxReset, device, false, true, (int device), (device))
FAKE_AS(CtxSetCurrent, device_of(context), context != NULL, false, (qkv_cuda_context context), (context))
FAKE(ModuleLoadData, (qkv_cuda_module * module, const void *image), (module, image))
FAKE_END(ModuleUnload, (qkv_cuda_module module), (module))
FAKE(ModuleGetFunction, (qkv_cuda_function * function, qkv_cuda_module module, const char *name),
     (function, module, name))
FAKE(FuncSetAttribute, (qkv_cuda_function function, int attribute, int value), (function, attribute, value))
FAKE(MemAlloc, (qkv_cuda_memory * at, size_t bytes), (at, bytes))
FAKE_END(MemFree, (qkv_cuda_memory at), (at))
FAKE(MemHostAlloc, (void **at, size_t bytes, unsigned flags), (at, bytes, flags))
FAKE_END(MemFreeHost, (void *at), (at))
FAKE(MemHostGetDevicePointer, (qkv_cuda_memory * at, void *host, unsigned flags), (at, host, flags))
FAKE(MemcpyHtoDAsync, (qkv_cuda_memory to, const void *from, size_t bytes, qkv_cuda_stream stream),
     (to, from, bytes, stream))
FAKE(MemcpyDtoHAsync, (void *to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream),
     (to, from, bytes, stream))
FAKE(MemcpyDtoDAsync, (qkv_cuda_memory to, qkv_cuda_memory from, size_t bytes, qkv_cuda_stream stream),
     (to, from, bytes, stream))
FAKE(MemGetAddressRange, (qkv_cuda_memory * base, size_t *bytes, qkv_cuda_memory at), (base, bytes, at))
FAKE(IpcOpenMemHandle, (qkv_cuda_memory * at, qkv_cuda_ipc handle, unsigned flags), (at, handle, flags))
FAKE_END(IpcCloseMemHandle, (qkv_cuda_memory at), (at))
FAKE(MemImportFromShareableHandle, (qkv_cuda_allocation * allocation, void *handle, int kind),
     (allocation, handle, kind))
FAKE_END(MemRelease, (qkv_cuda_allocation allocation), (allocation))
FAKE(MemAddressReserve,
     (qkv_cuda_memory * at, size_t bytes, size_t alignment, qkv_cuda_memory wanted, uint64_t flags),
     (at, bytes, alignment, wanted, flags))
FAKE_END(MemAddressFree, (qkv_cuda_memory at, size_t bytes), (at, bytes))
FAKE(MemMap, (qkv_cuda_memory at, size_t bytes, size_t offset, qkv_cuda_allocation allocation, uint64_t flags),
     (at, bytes, offset, allocation, flags))
FAKE_END(MemUnmap, (qkv_cuda_memory at, size_t bytes), (at, bytes))
FAKE(MemSetAccess, (qkv_cuda_memory at, size_t bytes, const qkv_cuda_access *access, size_t count),
     (at, bytes, access, count))
FAKE(LaunchKernel,
     (qkv_cuda_function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
      unsigned threads_y, unsigned threads_z, unsigned shared_bytes, qkv_cuda_stream stream, void **parameters,
      void **extra),
     (function, blocks_x, blocks_y, blocks_z, threads_x, threads_y, threads_z, shared_bytes, stream, parameters,
      extra))
FAKE(StreamCreate, (qkv_cuda_stream * stream, unsigned flags), (stream, flags))
FAKE_END(StreamDestroy, (qkv_cuda_stream stream), (stream))
FAKE(EventCreate, (qkv_cuda_event * event, unsigned flags), (event, flags))
FAKE_END(EventDestroy, (qkv_cuda_event event), (event))
FAKE(EventRecord, (qkv_cuda_event event, qkv_cuda_stream stream), (event, stream))
FAKE(EventQuery, (qkv_cuda_event event), (event))
FAKE(EventElapsedTime, (float *ms, qkv_cuda_event from, qkv_cuda_event to), (ms, from, to))

static int cu_GetErrorName(int result, const char **name) {
  return do_GetErrorName(result, name);
}

// FAKE_CUDA_WITHOUT=cuMemAlloc: a driver that does not have the function.
int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *found);
int cuGetProcAddress_v2(const char *symbol, void **address, int version, uint64_t flags, int *found) {
  const char *without = getenv("FAKE_CUDA_WITHOUT");
  UNUSED(version), UNUSED(flags);
  *address = NULL;
  *found = 1;
  if (without != NULL && strcmp(without, symbol) == 0) return NO_SUCH;
#define X(name, since, parameters) \
  if (strcmp(symbol, "cu" #name) == 0) *address = (void *)cu_##name;
  QKV_CUDA_FUNCTIONS(X)
#undef X
  *found = 0;
  return *address != NULL ? QKV_CUDA_SUCCESS : NO_SUCH;
}
