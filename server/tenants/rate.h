// A rate: so many units a second on average, one second's worth of them at once.
//
// A token bucket: units that are taken are a debt that time pays off. Taking never fails; a caller that first waits
// qkvi_rate_wait_ms keeps to the rate.
//
// Pure. Threads: the owner's.
#ifndef QKV_SERVER_TENANTS_RATE_H
#define QKV_SERVER_TENANTS_RATE_H

#include <stdint.h>

typedef struct qkvi_rate {
  uint64_t per_second;  // 0: no limit
  double debt;          // units
  uint64_t at_ns;       // when it was so
} qkvi_rate;

// How long, in ms rounded up, until the debt is no more than a second's worth; 0: it is not now.
static inline uint64_t qkvi_rate_wait_ms(qkvi_rate *rate, uint64_t now_ns) {
  if (rate->per_second == 0) return 0;
  const double paid = (double)(now_ns - rate->at_ns) * 1e-9 * (double)rate->per_second;
  rate->debt = rate->debt > paid ? rate->debt - paid : 0;
  rate->at_ns = now_ns;
  const double beyond = rate->debt - (double)rate->per_second;
  return beyond <= 0 ? 0 : (uint64_t)(1e3 * beyond / (double)rate->per_second) + 1;
}

static inline void qkvi_rate_take(qkvi_rate *rate, uint64_t units, uint64_t now_ns) {
  if (rate->per_second == 0) return;
  (void)qkvi_rate_wait_ms(rate, now_ns);
  rate->debt += (double)units;
}

static inline void qkvi_rate_set(qkvi_rate *rate, uint64_t per_second, uint64_t now_ns) {
  if (rate->per_second == per_second) return;
  *rate = (qkvi_rate){.per_second = per_second, .at_ns = now_ns};
}

#endif
