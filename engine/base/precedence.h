// Who goes first where there is more work than processors: attention, which somebody waits for, before whatever
// comes and goes in bulk.
//
// Nice values are not enough for that: a running thread keeps its processor until the system's timer ticks, every 4
// ms at 250 Hz, and attention wants all of them at once, for less than that. So threads that *stand back* stop by
// themselves, at points that their work has every 50 to 100 us, while attention is computed anywhere in the process.
// They go on when it has ended, and after QKV_WAY_GIVEN_US anyway: then for QKV_WAY_TAKEN_US, a tenth of the time,
// whatever else goes on.
//
// A thread may give way with locks held that attention takes before it begins, not with such as it takes
// in between.
//
// Threads: every function may be called from any thread.
#ifndef QKV_ENGINE_BASE_PRECEDENCE_H
#define QKV_ENGINE_BASE_PRECEDENCE_H

enum { QKV_WAY_GIVEN_US = 2000, QKV_WAY_TAKEN_US = 200 };

// Between the two, what goes first is computed. Several at a time; waits for nobody.
void qkv_precedence_begin(void);
void qkv_precedence_end(void);

// The calling thread stands back from now on; again does nothing. `nice` (0 to 19) is added to the process's for it,
// so that the system knows as well; where that refuses, it is as that of others.
void qkv_precedence_stand_back(int nice);
// In a thread that stands back: waits as described above. Nothing in others.
void qkv_precedence_give_way(void);

#endif
