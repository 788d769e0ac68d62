#include "server/tenants/meter.h"

#include <inttypes.h>

void qkvi_meter_set(qkvi_meter *meter, const qkvi_call_quota *quota, uint64_t now_ns) {
  meter->quota = *quota;
  qkvi_rate_set(&meter->bytes, quota->bytes_per_second, now_ns);
  qkvi_rate_set(&meter->rows, quota->rows_per_second, now_ns);
}

void qkvi_meter_take(qkvi_meter *meter, uint64_t bytes, uint64_t rows, uint64_t now_ns) {
  meter->usage.bytes += bytes;
  meter->usage.rows += rows;
  if (bytes > 0) qkvi_rate_take(&meter->bytes, bytes, now_ns);
  if (rows > 0) qkvi_rate_take(&meter->rows, rows, now_ns);
}

uint64_t qkvi_meter_wait_ms(qkvi_meter *meter, const char *tenant, uint64_t now_ns, qkv_error *error) {
  const uint64_t for_bytes = qkvi_rate_wait_ms(&meter->bytes, now_ns);
  const uint64_t for_rows = qkvi_rate_wait_ms(&meter->rows, now_ns);
  const uint64_t wait = for_bytes > for_rows ? for_bytes : for_rows;
  const qkvi_rate *rate = for_bytes > for_rows ? &meter->bytes : &meter->rows;
  if (wait > 0)
    (void)qkv_fail(error, QKV_RESOURCE_EXHAUSTED,
                   "quota %s_per_second of tenant %s is %" PRIu64 ", it has used %.0f more: %.1f s to wait",
                   rate == &meter->bytes ? "bytes" : "rows", tenant, rate->per_second,
                   rate->debt - (double)rate->per_second, 1e-3 * (double)wait);
  return wait;
}

bool qkvi_meter_is_idle(qkvi_meter *meter, uint64_t now_ns) {
  (void)qkvi_rate_wait_ms(&meter->bytes, now_ns);
  (void)qkvi_rate_wait_ms(&meter->rows, now_ns);
  return meter->bytes.debt == 0 && meter->rows.debt == 0;
}
