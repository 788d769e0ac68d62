// The time on the monotonic clock, which deadlines and durations are counted on.
//
// Threads: any.
#ifndef QKV_ENGINE_BASE_CLOCK_H
#define QKV_ENGINE_BASE_CLOCK_H

#include <stdint.h>

int64_t qkv_now_ms(void);
double qkv_now_s(void);

#endif
