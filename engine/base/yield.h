// Scheduling yield: threads that do bulk work leave the processors to attention, which a client waits for.
//
// Nice values are not enough for that: a running thread keeps its processor until the system's timer ticks, every 4
// ms at 250 Hz, and attention wants its threads all at once, for less than that. So *yielding* threads stop by
// themselves, at points that their work has every 50 to 100 us, while attention that is computed anywhere in the
// process leaves them no processor. They go on when one is free, and after QKV_YIELD_US in any case: then for
// QKV_YIELD_SLICE_US, a tenth of the time.
//
// A thread may yield with locks held that attention takes before it begins, not with locks that attention takes
// in between.
//
// Threads: every function may be called from any thread.
#ifndef QKV_ENGINE_BASE_YIELD_H
#define QKV_ENGINE_BASE_YIELD_H

#include <stdbool.h>

enum { QKV_YIELD_US = 2000, QKV_YIELD_SLICE_US = 200 };

// Between begin and end, attention is computed by `threads` >= 1. Several callers at a time; never waits.
void qkv_yield_urgent_begin(int threads);
void qkv_yield_urgent_end(int threads);

// `nice` (0 to 19) is added to the calling thread's value; where the system refuses, it stays.
void qkv_yield_set_nice(int nice);
// The calling thread yields from now on, with this nice value added; a second call does nothing.
void qkv_yield_enable(int nice);
bool qkv_yield_enabled(void);
// In a yielding thread: waits as described above, and has a processor afterwards. In other threads it does nothing.
void qkv_yield_now(void);
// The calling thread has done its work, or waits for something else: other yielding threads may have its processor.
void qkv_yield_rest(void);

#endif
