// A worker whose rows lie on the GPU: the fake driver (fake_cuda.h) takes an object of shared memory for its memory,
// so that a test can write there at any time. And an encoder that looks whether the GPU's pages are the codec's.
#ifndef QKV_TESTS_SERVER_GPU_WORKER_H
#define QKV_TESTS_SERVER_GPU_WORKER_H

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/gpu/append.h"
#include "tests/engine/cache/fixture.h"

typedef struct worker {
  char key[48];
  uint8_t *data;
  size_t bytes;
} worker;

static inline worker worker_start(size_t bytes) {
  worker made = {.bytes = bytes};
  snprintf(made.key, sizeof made.key, "/qkv-worker-%d", (int)getpid());
  const int fd = shm_open(made.key, O_RDWR | O_CREAT | O_EXCL, 0600);
  assert_true(fd >= 0);
  assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
  made.data = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  assert_true(made.data != MAP_FAILED);
  close(fd);
  return made;
}

static inline void worker_end(worker *old) {
  munmap(old->data, old->bytes);
  assert_int_equal(shm_unlink(old->key), 0);
}

static inline qkv_status worker_lend(const worker *from, qkvi_gpu *gpu, int64_t device_id, qkvi_gpu_lent **lent,
                                     qkv_error *error) {
  uint8_t handle[QKV_CUDA_IPC_BYTES] = "ekaf";
  snprintf((char *)handle + 4, sizeof handle - 4, "%s", from->key);
  const qkvi_gpu_loan loan = {.device_id = device_id, .handle = handle, .bytes = from->bytes};
  return qkvi_gpu_lend(gpu, &loan, lent, error);
}

// Rows k and v in the worker's memory, v behind k, from `offset` on.
static inline void worker_put(const worker *to, uint64_t offset, const qkv_segment *k, const qkv_segment *v) {
  assert_true(offset + k->length + v->length <= to->bytes);
  memcpy(to->data + offset, k->data, k->length);
  memcpy(to->data + offset + k->length, v->data, v->length);
}

// What an append does with rows that lie there: copies to `k` and `v`, whose tensors have their shape already, and
// the source. The worker writes over its rows as soon as they are copied.
static inline qkv_status worker_take(const worker *from, qkvi_gpu_lent *lent, uint64_t offset, test_tensor *k,
                                     test_tensor *v, qkvi_gpu_area *area, qkvi_gpu_source *source, qkv_error *error) {
  qkv_cuda_memory at[2];
  void *out[] = {(void *)k->segment.data, (void *)v->segment.data};
  memset(out[0], 0, k->segment.length);
  memset(out[1], 0, v->segment.length);
  QKV_TRY(qkvi_gpu_lent_take(lent, offset, out[0], k->segment.length, area, &at[0], error));
  QKV_TRY(qkvi_gpu_lent_take(lent, offset + k->segment.length, out[1], v->segment.length, area, &at[1], error));
  memset(from->data, 0x7f, from->bytes);
  qkvi_gpu_source_init(source, qkvi_gpu_lent_on(lent), area, &k->tensor, &v->tensor, at);
  return QKV_OK;
}

typedef struct checked_encoder {
  qkv_row_encoder encoder;  // first
  const qkv_row_encoder *inner;
  qkv_dtype dtype;
  size_t *made, *left;  // pages that the GPU has made, and those that it has not
} checked_encoder;

static inline bool encode_checked(const qkv_row_encoder *encoder, const qkv_row_page *page, void *image,
                                  size_t *bytes) {
  const checked_encoder *own = (const checked_encoder *)encoder;
  const qkv_coder *coder = page->coder;
  const bool made = own->inner->encode(own->inner, page, image, bytes);
  ++*(made ? own->made : own->left);
  if (!made) return false;
  void *here = aligned_alloc(64, (coder->codec->page_bytes_max(coder) + 63) / 64 * 64);
  assert_non_null(here);
  assert_int_equal(
      *bytes, coder->codec->encode(coder, page->position, QKV_PAGE_TOKENS, own->dtype, page->k, page->v, NULL, here));
  assert_memory_equal(image, here, *bytes);
  free(here);
  return true;
}

static inline checked_encoder check_encoder(const qkvi_gpu_source *source, size_t *made, size_t *left) {
  return (checked_encoder){{.encode = encode_checked}, &source->encoder, source->dtype, made, left};
}

#endif
