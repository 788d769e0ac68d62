// Memory that the daemon on the same machine reads and writes itself: POSIX shared memory, registered as a region.
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include "client/c/client.h"
#include "client/c/message.h"
#include "qkv/v1/shared_memory.pb-c.h"

struct qkvi_share {
  char name[64];  // of the object, with '/', and of the region, without
  uint8_t *data;
  size_t bytes;
  bool registered;  // with the daemon that the connection is to
  qkvi_share *next;
};

// ---- the object ----

static void drop(qkvi_share *share) {
  if (share->data != NULL) (void)munmap(share->data, share->bytes);
  (void)shm_unlink(share->name);
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

static qkv_status make(size_t bytes, qkvi_share **out, qkv_error *error) {
  qkvi_share *share = calloc(1, sizeof *share);
  uint64_t random = 0;
  assert(share != NULL);
  const ssize_t got = getrandom(&random, sizeof random, 0);
  assert(got == sizeof random);
  (void)got;
  share->bytes = bytes;
  (void)snprintf(share->name, sizeof share->name, "/qkv-%d-%016llx", (int)getpid(), (unsigned long long)random);
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

static qkv_code announce(qkv_client *client, qkvi_share *share, qkv_call_error *error) {
  Qkv__V1__SystemSharedMemoryRegion region = QKV__V1__SYSTEM_SHARED_MEMORY_REGION__INIT;
  Qkv__V1__SystemSharedMemoryRegisterRequest request = QKV__V1__SYSTEM_SHARED_MEMORY_REGISTER_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  region.name = share->name + 1;
  region.key = share->name;
  region.byte_size = share->bytes;
  request.region = &region;
  const qkv_code code =
      qkv_client_call_message(client, "/qkv.v1.SharedMemory/SystemSharedMemoryRegister", &request.base,
                              &qkv__v1__system_shared_memory_register_response__descriptor, &answer, error);
  share->registered = code == QKV_OK;
  if (code == QKV_OK) protobuf_c_message_free_unpacked(answer, NULL);
  return code;
}

static void withdraw(qkv_client *client, const qkvi_share *share) {
  Qkv__V1__SystemSharedMemoryUnregisterRequest request = QKV__V1__SYSTEM_SHARED_MEMORY_UNREGISTER_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error ignored;  // a daemon that is gone has no regions
  request.name = (char *)(uintptr_t)(share->name + 1);
  if (!share->registered) return;
  if (qkv_client_call_message(client, "/qkv.v1.SharedMemory/SystemSharedMemoryUnregister", &request.base,
                              &qkv__v1__system_shared_memory_unregister_response__descriptor, &answer,
                              &ignored) == QKV_OK)
    protobuf_c_message_free_unpacked(answer, NULL);
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
    withdraw(client, share);
    drop(share);
    break;
  }
  *memory = NULL;
}

void qkvi_shares_free(qkv_client *client) {
  while (client->shares != NULL) {
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

void qkvi_share_put(qkv_wire_writer *writer, uint32_t first, const qkvi_share *share, const void *data,
                    size_t bytes) {
  qkv_wire_put_string(writer, first, share->name + 1);
  qkv_wire_put_varint(writer, first + 1, (uint64_t)((const uint8_t *)data - share->data));
  qkv_wire_put_varint(writer, first + 2, bytes);
}
