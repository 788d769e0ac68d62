#include "server/handlers/discard.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>

static qkv_status check_rows(const qkv_tensor *rows, const char *name, uint32_t heads, uint32_t dim,
                             qkv_error *error) {
  if (rows->dims[1] == heads && rows->dims[2] == dim) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "%s.dims are [%" PRId64 ", %" PRId64 ", %" PRId64 "], the model has [tokens, %" PRIu32 ", %" PRIu32
                  "]",
                  name, rows->dims[0], rows->dims[1], rows->dims[2], heads, dim);
}

qkv_status qkvi_discard_append(qkv_session *session, const qkvi_item *item, uint64_t *appended, uint64_t *length,
                               qkv_error *error) {
  const qkv_model *model = qkv_session_model(session);
  if (item->layer >= model->layers)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "layer is %" PRIu32 ", the model %s has %" PRIu32 " layers",
                    item->layer, model->name, model->layers);
  QKV_TRY(check_rows(&item->k, "k", model->kv_heads, model->key_dim, error));
  QKV_TRY(check_rows(&item->v, "v", model->kv_heads, model->value_dim, error));
  *appended = (uint64_t)item->k.dims[0];
  *length = item->position + *appended;
  return QKV_OK;
}

static uint64_t *noise;

// xorshift64; the top exponent bit of every half is cleared, so all are finite and below 2.
static void make_noise(void) {
  uint64_t state = 0x9e3779b97f4a7c15u;
  noise = malloc(QKVI_DISCARD_BYTES);
  if (noise == NULL) abort();
  for (size_t i = 0; i < QKVI_DISCARD_BYTES / sizeof *noise; i++) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    noise[i] = state & 0xbfffbfffbfffbfffu;
  }
}

const void *qkvi_discard_rows(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, make_noise);
  return noise;
}
