// Memory that the daemon on the same machine reads and writes itself, registered as a region: POSIX shared memory
// that is made here, or memory that the caller lends.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "client/c/client.h"
#include "client/c/message.h"
#include "engine/base/clock.h"
#include "qkv/v1/shared_memory.pb-c.h"

enum {
  DESCRIPTORS_MAX = 64,
  HANDLE_BYTES = 64,
  TOKEN_DIGITS = 32,
  PASSING_S = 10,
  CLOSE_MS = 1000,  // that a client which is closed waits for a daemon that does not answer
};

struct qkvi_share {
  char name[64];  // of the object, with '/', and of the region, without
  uint8_t *data;  // lent memory on a GPU cannot be read here
  size_t bytes;
  bool lent;                         // what follows is of such memory
  qkv_client_lent memory;            // without pointers
  uint8_t handle[HANDLE_BYTES];      // where it has one
  int descriptors[DESCRIPTORS_MAX];  // ours, to pass them again
  char passing[sizeof((struct sockaddr_un *)NULL)->sun_path];
  bool registered;  // with the daemon that the connection is to
  bool announced;   // it was once
  qkvi_share *next;
};

// ---- the object ----

static void drop(qkvi_share *share) {
  for (size_t i = 0; i < share->memory.descriptor_count; i++) (void)close(share->descriptors[i]);
  if (!share->lent && share->data != NULL) (void)munmap(share->data, share->bytes);
  if (!share->lent) (void)shm_unlink(share->name);
  free(share);
}

// Pages are taken now: where /dev/shm is full this fails, and not a write to them.
static qkv_status map(qkvi_share *share, int fd, qkv_error *error) {
  int reason = ftruncate(fd, (off_t)share->bytes) == 0 ? 0 : errno;
  if (reason == 0) reason = posix_fallocate(fd, 0, (off_t)share->bytes);
  if (reason != 0)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "/dev/shm has no %zu bytes: %s", share->bytes, strerror(reason));
  void *data = mmap(NULL, share->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "cannot map %zu bytes: %s", share->bytes, strerror(errno));
  share->data = data;
  return QKV_OK;
}

static qkvi_share *name_one(size_t bytes) {
  qkvi_share *share = calloc(1, sizeof *share);
  uint64_t random = 0;
  assert(share != NULL);
  const ssize_t got = getrandom(&random, sizeof random, 0);
  assert(got == sizeof random);
  (void)got;
  share->bytes = bytes;
  (void)snprintf(share->name, sizeof share->name, "/qkv-%d-%016llx", (int)getpid(), (unsigned long long)random);
  return share;
}

static qkv_status make(size_t bytes, qkvi_share **out, qkv_error *error) {
  qkvi_share *share = name_one(bytes);
  const int fd = shm_open(share->name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) {
    (void)qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "cannot create shared memory %s: %s", share->name, strerror(errno));
    free(share);
    return QKV_RESOURCE_EXHAUSTED;
  }
  const qkv_status status = map(share, fd, error);
  (void)close(fd);
  if (status != QKV_OK)
    drop(share);
  else
    *out = share;
  return status;
}

// ---- the region ----

static qkv_code announce_system(qkv_client *client, qkvi_share *share, char *token, qkv_call_error *error) {
  Qkv__V1__SystemSharedMemoryRegion region = QKV__V1__SYSTEM_SHARED_MEMORY_REGION__INIT;
  Qkv__V1__SystemSharedMemoryRegisterRequest request = QKV__V1__SYSTEM_SHARED_MEMORY_REGISTER_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  region.name = share->name + 1;
  if (!share->lent) region.key = share->name;
  region.offset = share->memory.offset;
  region.byte_size = share->bytes;
  request.region = &region;
  request.descriptor = token;
  const qkv_code code =
      qkv_client_call_message(client, "/qkv.v1.SharedMemory/SystemSharedMemoryRegister", &request.base,
                              &qkv__v1__system_shared_memory_register_response__descriptor, &answer, error);
  if (code == QKV_OK) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static qkv_code announce_cuda(qkv_client *client, qkvi_share *share, char *token, qkv_call_error *error) {
  Qkv__V1__CudaSharedMemoryRegion region = QKV__V1__CUDA_SHARED_MEMORY_REGION__INIT;
  Qkv__V1__CudaSharedMemoryRegisterRequest request = QKV__V1__CUDA_SHARED_MEMORY_REGISTER_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  const bool passed = share->memory.descriptor_count > 0;
  region.name = share->name + 1;
  region.device_id = share->memory.device_id;
  region.byte_size = share->bytes;
  request.region = &region;
  request.offset = share->memory.offset;
  request.descriptor = token;
  request.descriptor_bytes = share->memory.descriptor_bytes;
  if (!passed) request.raw_handle = (ProtobufCBinaryData){.len = HANDLE_BYTES, .data = share->handle};
  const qkv_code code =
      qkv_client_call_message(client, "/qkv.v1.SharedMemory/CudaSharedMemoryRegister", &request.base,
                              &qkv__v1__cuda_shared_memory_register_response__descriptor, &answer, error);
  if (code == QKV_OK) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static void withdraw(qkv_client *client, const qkvi_share *share) {
  Qkv__V1__SystemSharedMemoryUnregisterRequest system = QKV__V1__SYSTEM_SHARED_MEMORY_UNREGISTER_REQUEST__INIT;
  Qkv__V1__CudaSharedMemoryUnregisterRequest cuda = QKV__V1__CUDA_SHARED_MEMORY_UNREGISTER_REQUEST__INIT;
  const bool on_gpu = share->memory.on_gpu;
  ProtobufCMessage *answer = NULL;
  qkv_call_error ignored;  // a daemon that is gone has no regions
  system.name = cuda.name = (char *)(uintptr_t)(share->name + 1);
  if (qkv_client_call_message(client,
                              on_gpu ? "/qkv.v1.SharedMemory/CudaSharedMemoryUnregister"
                                     : "/qkv.v1.SharedMemory/SystemSharedMemoryUnregister",
                              on_gpu ? &cuda.base : &system.base,
                              on_gpu ? &qkv__v1__cuda_shared_memory_unregister_response__descriptor
                                     : &qkv__v1__system_shared_memory_unregister_response__descriptor,
                              &answer, &ignored) == QKV_OK)
    protobuf_c_message_free_unpacked(answer, NULL);
}

// All that comes until the other end closes. A signal that the program handles breaks off a receive with a timeout.
static ssize_t receive_all(int socket, char *out, size_t bytes) {
  size_t got = 0;
  const int64_t until_ms = qkv_now_ms() + PASSING_S * 1000;
  while (got < bytes) {
    const ssize_t more = recv(socket, out + got, bytes - got, 0);
    if (more < 0 && errno == EINTR && qkv_now_ms() < until_ms) continue;
    if (more < 0) return -1;
    if (more == 0) break;
    got += (size_t)more;
  }
  return (ssize_t)got;
}

// Passes the descriptors of lent memory (docs/shared-memory.md).
static qkv_status pass(const qkvi_share *share, int socket, char token[TOKEN_DIGITS + 1], qkv_error *error) {
  const size_t bytes = share->memory.descriptor_count * sizeof(int);
  union {
    char bytes[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    struct cmsghdr aligned;
  } control = {{0}};
  char greeting[] = "qkvdfd\1", answer[1 + QKV_ERROR_TEXT_MAX];
  struct iovec place = {.iov_base = greeting, .iov_len = sizeof greeting};
  struct msghdr message = {
      .msg_iov = &place, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = CMSG_SPACE(bytes)};
  struct cmsghdr *part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(bytes);
  memcpy(CMSG_DATA(part), share->descriptors, bytes);
  const bool sent = sendmsg(socket, &message, MSG_NOSIGNAL) == (ssize_t)sizeof greeting;
  const ssize_t got = sent ? receive_all(socket, answer, sizeof answer) : -1;
  if (got < 1) return qkv_fail(error, QKV_UNAVAILABLE, "no answer at %s", share->passing);
  if (answer[0] != 0)
    return qkv_fail(error, (qkv_status)answer[0], "%s: %.*s", share->passing, (int)got - 1, answer + 1);
  if (got != 1 + TOKEN_DIGITS) return qkv_fail(error, QKV_INTERNAL, "no token from %s", share->passing);
  memcpy(token, answer + 1, TOKEN_DIGITS);
  token[TOKEN_DIGITS] = '\0';
  return QKV_OK;
}

static qkv_status pass_all(const qkvi_share *share, char token[TOKEN_DIGITS + 1], qkv_error *error) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  const struct timeval patience = {.tv_sec = PASSING_S};
  memcpy(address.sun_path, share->passing, sizeof address.sun_path);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "no socket: %s", strerror(errno));
  (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const bool connected = connect(fd, (const struct sockaddr *)&address, sizeof address) == 0;
  const qkv_status status =
      connected ? pass(share, fd, token, error)
                : qkv_fail(error, QKV_UNAVAILABLE, "cannot connect to %s: %s", share->passing, strerror(errno));
  (void)close(fd);
  return status;
}

static qkv_code announce(qkv_client *client, qkvi_share *share, qkv_call_error *error) {
  char token[TOKEN_DIGITS + 1] = "";
  qkv_error reason = {0};
  const bool passed = share->memory.descriptor_count > 0;
  if (passed && pass_all(share, token, &reason) != QKV_OK) return qkvi_fail_with(error, &reason);
  // Of descriptors of a GPU the daemon cannot tell that they are those of the region that it has.
  if (passed && share->memory.on_gpu && share->announced) withdraw(client, share);
  const qkv_code code = share->memory.on_gpu ? announce_cuda(client, share, token, error)
                                             : announce_system(client, share, token, error);
  share->registered = code == QKV_OK;
  share->announced |= share->registered;
  return code;
}

qkv_code qkv_client_share(qkv_client *client, size_t bytes, void **memory, qkv_call_error *error) {
  qkvi_share *share = NULL;
  qkv_error reason = {0};
  *memory = NULL;
  if (client->part_count > 0)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "a client of several targets has no shared memory");
  if (bytes == 0 || bytes > INT64_MAX)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "bytes is %zu, allowed are 1 to 2^63 - 1", bytes);
  if (make(bytes, &share, &reason) != QKV_OK) return qkvi_fail_with(error, &reason);
  const qkv_code code = announce(client, share, error);
  if (code != QKV_OK) {
    drop(share);
    return code;
  }
  share->next = client->shares;
  client->shares = share;
  *memory = share->data;
  return qkvi_ok(error);
}

void qkv_client_unshare(qkv_client *client, void **memory) {
  for (qkvi_share **place = &client->shares; *place != NULL; place = &(*place)->next) {
    qkvi_share *share = *place;
    if (share->data != *memory) continue;
    *place = share->next;
    if (share->announced) withdraw(client, share);  // also where the connection is a new one
    drop(share);
    break;
  }
  *memory = NULL;
}

// ---- lent memory ----

static qkv_status check_lent(const qkv_client_lent *memory, qkv_error *error) {
  const size_t path = memory->passing == NULL ? 0 : strlen(memory->passing);
  if (memory->data == NULL || memory->bytes == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "data is NULL, or bytes is 0");
  if (memory->cuda_handle != NULL && (memory->descriptor_count > 0 || !memory->on_gpu))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "cuda_handle is set: on_gpu is, too, and there are no descriptors");
  if (memory->cuda_handle != NULL) return QKV_OK;
  if (memory->descriptors == NULL || memory->descriptor_count == 0 || memory->descriptor_count > DESCRIPTORS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "descriptor_count is %zu, allowed are 1 to %d, or cuda_handle is set", memory->descriptor_count,
                    DESCRIPTORS_MAX);
  if (path > 0 && path < sizeof((qkvi_share *)NULL)->passing) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "passing has %zu bytes, allowed are 1 to %zu", path,
                  sizeof((qkvi_share *)NULL)->passing - 1);
}

static qkv_status take(const qkv_client_lent *memory, qkvi_share *share, qkv_error *error) {
  share->lent = true;
  share->data = memory->data;
  share->memory = *memory;
  share->memory.descriptor_count = 0;
  if (memory->cuda_handle != NULL) memcpy(share->handle, memory->cuda_handle, HANDLE_BYTES);
  if (memory->passing != NULL) (void)snprintf(share->passing, sizeof share->passing, "%s", memory->passing);
  for (size_t i = 0; i < memory->descriptor_count; i++) {
    const int copy = fcntl(memory->descriptors[i], F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "descriptors[%zu] is %d: %s", i, memory->descriptors[i],
                      strerror(errno));
    share->descriptors[share->memory.descriptor_count++] = copy;
  }
  return QKV_OK;
}

qkv_code qkv_client_lend(qkv_client *client, const qkv_client_lent *memory, qkv_call_error *error) {
  qkv_error reason = {0};
  if (client->part_count > 0)
    return qkvi_fail(error, QKV_INVALID_ARGUMENT, "a client of several targets has no shared memory");
  if (check_lent(memory, &reason) != QKV_OK) return qkvi_fail_with(error, &reason);
  qkvi_share *share = name_one(memory->bytes);
  qkv_code code =
      take(memory, share, &reason) == QKV_OK ? announce(client, share, error) : qkvi_fail_with(error, &reason);
  if (code != QKV_OK) {
    drop(share);
    return code;
  }
  share->next = client->shares;
  client->shares = share;
  return qkvi_ok(error);
}

void qkvi_shares_free(qkv_client *client) {
  const int64_t until_ms = qkv_now_ms() + CLOSE_MS;
  while (client->shares != NULL) {
    const int64_t left_ms = until_ms - qkv_now_ms();
    if (client->options.timeout_ms > left_ms) client->options.timeout_ms = left_ms < 1 ? 1 : left_ms;
    void *memory = client->shares->data;
    qkv_client_unshare(client, &memory);
  }
}

void qkvi_shares_forget(qkv_client *client) {
  for (qkvi_share *share = client->shares; share != NULL; share = share->next) share->registered = false;
}

qkv_code qkvi_shares_ready(qkv_client *client, qkv_call_error *error) {
  qkv_code code = client->shares == NULL ? QKV_OK : qkvi_ensure_connected(client, error);
  for (qkvi_share *share = client->shares; share != NULL && code == QKV_OK; share = share->next) {
    if (!share->registered) code = announce(client, share, error);
  }
  return code;
}

// ---- what lies in one ----

const qkvi_share *qkvi_share_of(const qkv_client *client, const void *data, size_t bytes) {
  const uintptr_t at = (uintptr_t)data;
  for (const qkvi_share *share = client->shares; share != NULL; share = share->next) {
    const uintptr_t begin = (uintptr_t)share->data;
    if (at >= begin && at - begin <= share->bytes && bytes <= share->bytes - (at - begin)) return share;
  }
  return NULL;
}

bool qkvi_is_on_gpu(const qkv_client *client, const void *data, size_t bytes) {
  const uintptr_t at = (uintptr_t)data;
  for (const qkvi_share *share = client->shares; share != NULL; share = share->next) {
    const uintptr_t begin = (uintptr_t)share->data;
    if (share->memory.on_gpu && at < begin + share->bytes && at + bytes > begin) return true;
  }
  return false;
}

void qkvi_share_put(qkv_wire_writer *writer, uint32_t first, const qkvi_share *share, const void *data,
                    size_t bytes) {
  qkv_wire_put_string(writer, first, share->name + 1);
  qkv_wire_put_varint(writer, first + 1, (uint64_t)((const uint8_t *)data - share->data));
  qkv_wire_put_varint(writer, first + 2, bytes);
}
