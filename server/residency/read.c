// The reading half of the SSD's table (engine/cache/backing.h): batches of the storage.
#include "server/residency/internal.h"

void *qkvi_tier_read_begin(void *context, const uint64_t *records, size_t count, uint64_t ahead_bytes) {
  const qkvi_residency *residency = ((const qkvi_backing *)context)->residency;
  return qkv_storage_batch_create(residency->storage, records, count, ahead_bytes);
}

qkv_status qkvi_tier_read_wait(void *reading, size_t i, void *image, uint64_t bytes, qkv_error *error) {
  return qkv_storage_batch_wait(reading, i, image, bytes, error);
}

void qkvi_tier_read_end(void *reading) {
  qkv_storage_batch *batch = reading;
  qkv_storage_batch_destroy(&batch);
}
