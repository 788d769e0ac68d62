// Who goes first where there is more work than processors: attention, which somebody waits for, before whatever
// comes and goes in bulk.
//
// Nice values are not enough for that: a running thread keeps its processor until the system's timer ticks, every 4
// ms at 250 Hz, and attention wants its threads all at once, for less than that. So threads that *stand back* stop by
// themselves, at points that their work has every 50 to 100 us, while there is no processor for them beside attention
// that is being computed anywhere in the process. They go on when there is one, and after QKV_WAY_GIVEN_US anyway:
// then for QKV_WAY_TAKEN_US, a tenth of the time, whatever else goes on.
//
// A thread may give way with locks held that attention takes before it begins, not with such as it takes
// in between.
//
// Threads: every function may be called from any thread.
#ifndef QKV_ENGINE_BASE_PRECEDENCE_H
#define QKV_ENGINE_BASE_PRECEDENCE_H

#include <stdbool.h>

enum { QKV_WAY_GIVEN_US = 2000, QKV_WAY_TAKEN_US = 200 };

// Between the two, what goes first is computed by `threads` >= 1. Several at a time; waits for nobody.
void qkv_precedence_begin(int threads);
void qkv_precedence_end(int threads);

// `nice` (0 to 19) is added to the calling thread's value; where the system refuses, it stays.
void qkv_precedence_be_nice(int nice);
// The calling thread stands back from now on, and is nice; again does nothing.
void qkv_precedence_stand_back(int nice);
bool qkv_precedence_stands_back(void);
// In a thread that stands back: waits as described above, and has a processor afterwards. Nothing in others.
void qkv_precedence_give_way(void);
// It has done its work, or waits for something else: others that stand back may have its processor.
void qkv_precedence_rest(void);

#endif
