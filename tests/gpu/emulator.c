#include "tests/gpu/emulator.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include "engine/kernel/simt/simt.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
void *__tsan_get_current_fiber(void);
void *__tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void *fiber, unsigned flags);
void __tsan_acquire(void *address);
void __tsan_release(void *address);
#define TSAN_ACQUIRE(address) __tsan_acquire(address)
#define TSAN_RELEASE(address) __tsan_release(address)
#define UNSEEN __attribute__((no_sanitize("thread")))  // the emulator's own accesses
#else
#define TSAN_ACQUIRE(address) (void)(address)
#define TSAN_RELEASE(address) (void)(address)
#define UNSEEN
#endif

enum {
  THREADS_MAX = 1024,
  WARPS_MAX = THREADS_MAX / SIMT_LANES,
  GATES_MAX = 256,
  PIECES_MAX = 8,
  STACK_BYTES = 128 << 10,
  GUARD_BYTES = 4096,
  FILL = 0xa5,
  PATIENCE = 100000,  // switches to other fibers before a wait for a copy that none has begun fails
};

typedef enum fiber_state { READY, WAITING, DONE } fiber_state;

typedef struct fiber {
  ucontext_t context;
  uint8_t *stack;  // NULL: the caller's
  fiber_state state;
  const char *place;  // of its last meeting
  void *tsan;
} fiber;

// What ThreadSanitizer orders by: two in turn, as who leaves late must not be ordered behind who is at the next one.
typedef char orders[2];

typedef struct meeting {
  orders orders;
  unsigned present;
  uint64_t number;  // of those that are over
  const char *what, *place;
} meeting;

typedef struct piece {
  void *to;
  const void *from;
  uint32_t bytes;
} piece;

// What a lane contributes to an operation of its warp (a meeting).
typedef union gift {
  uint32_t words[SIMT_A_WORDS + SIMT_B_WORDS];
  piece piece;
} gift;

// Gifts of two meetings in turn: no lane contributes to the next but one before all have left this one.
typedef struct warp {
  meeting meeting;
  gift gifts[2][SIMT_LANES];
  int32_t products[2][16][8];
} warp;

typedef struct copy {
  orders orders;
  simt_gate *gate;
  uint64_t begun, done;
  unsigned count;
  piece pieces[PIECES_MAX];
} copy;

simt_position simt_now;
static fiber fibers[THREADS_MAX], caller;
static char all_begin, all_end;  // an order of each, too
static fiber *running;
static unsigned alive;
static warp warps[WARPS_MAX];
static meeting whole_block;
static copy copies[GATES_MAX];
static unsigned copy_count;
static const emulator_launch *current;
static uint64_t random_state;

// ---- Fibers ----

UNSEEN static void die(const char *place, const char *why) {
  static const char *const states[] = {"runs", "waits", "has ended"};
  fprintf(stderr, "emulator: %s: block %u, thread %u: %s\n", place, simt_now.block, simt_now.thread, why);
  for (unsigned i = 0; i < current->threads; i++) {
    if (i > 0 && fibers[i].state == fibers[i - 1].state && fibers[i].place == fibers[i - 1].place) continue;
    fprintf(stderr, "  from thread %u on: %s, last at %s\n", i, states[fibers[i].state], fibers[i].place);
  }
  abort();
}

#if defined(__SANITIZE_ADDRESS__)
static const void *caller_bottom;
static size_t caller_bytes;
#endif

UNSEEN static void switch_to(fiber *next) {
  fiber *self = running;
  running = next;
  if (next != &caller) simt_now.thread = (unsigned)(next - fibers);
#if defined(__SANITIZE_ADDRESS__)
  void *fake = NULL;
  __sanitizer_start_switch_fiber(self->state == DONE ? NULL : &fake, next == &caller ? caller_bottom : next->stack,
                                 next == &caller ? caller_bytes : STACK_BYTES);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(next->tsan, 1);  // orders nothing
#endif
  (void)swapcontext(&self->context, &next->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, NULL, NULL);
#endif
}

UNSEEN static uint64_t next_random(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

// The fiber that goes on next. NULL: none can.
UNSEEN static fiber *choose_next(void) {
  const unsigned threads = current->threads, self = simt_now.thread;
  const unsigned start = current->order <= 1 ? self : (unsigned)(next_random() % threads);
  for (unsigned i = 1; i <= threads; i++) {
    const unsigned at = (current->order == 1 ? start + threads - i : start + i) % threads;
    if (fibers[at].state == READY) return &fibers[at];
  }
  return NULL;
}

UNSEEN static void let_others_run(const char *place) {
  fiber *next = choose_next();
  if (next == NULL) die(place, "all threads wait for each other");
  if (next != running) switch_to(next);
}

UNSEEN static void run_fiber(void) {
#if defined(__SANITIZE_ADDRESS__)
  if (caller_bytes == 0) {
    __sanitizer_finish_switch_fiber(NULL, &caller_bottom, &caller_bytes);
  } else {
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
  }
#endif
  TSAN_ACQUIRE(&all_begin);
  current->kernel(current->args);
  TSAN_RELEASE(&all_end);
  running->state = DONE;
  fiber *next = --alive == 0 ? &caller : choose_next();
  if (next == NULL) die(running->place, "a thread has ended that others wait for");
  switch_to(next);
  abort();
}

UNSEEN static void make_fiber(fiber *made) {
  if (made->stack == NULL) {
    uint8_t *memory =
        mmap(NULL, GUARD_BYTES + STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, GUARD_BYTES, PROT_NONE) != 0) abort();
    made->stack = memory + GUARD_BYTES;
  }
  if (getcontext(&made->context) != 0) abort();
  made->context.uc_stack.ss_sp = made->stack;
  made->context.uc_stack.ss_size = STACK_BYTES;
  made->context.uc_link = NULL;
  makecontext(&made->context, run_fiber, 0);
  made->state = READY;
  made->place = "its start";
#if defined(__SANITIZE_THREAD__)
  if (made->tsan == NULL) made->tsan = __tsan_create_fiber(0);  // kept: one takes a millisecond to make and remove
#endif
}

UNSEEN static void run_block(void) {
  for (unsigned i = 0; i < current->threads; i++) make_fiber(&fibers[i]);
  memset(warps, 0, sizeof *warps * (current->threads / SIMT_LANES));
  whole_block = (meeting){0};
  copy_count = 0;
  alive = current->threads;
  simt_now.thread = current->order == 1 ? 0 : current->threads - 1;
  running = &caller;
  caller.state = READY;
#if defined(__SANITIZE_THREAD__)
  caller.tsan = __tsan_get_current_fiber();
#endif
  TSAN_RELEASE(&all_begin);
  switch_to(choose_next());
  TSAN_ACQUIRE(&all_end);
}

static void forget_loads(void);

UNSEEN void emulator_run(const emulator_launch *launch) {
  if (launch->threads == 0 || launch->threads > THREADS_MAX || launch->threads % SIMT_LANES != 0) abort();
  current = launch;
  random_state = launch->order * 0x9e3779b97f4a7c15u | 1;
  for (unsigned block = 0; block < launch->blocks; block++) {
    void *shared = NULL;
    if (posix_memalign(&shared, 128, launch->shared_bytes > 0 ? launch->shared_bytes : 1) != 0) abort();
    memset(shared, FILL, launch->shared_bytes);
    simt_now = (simt_position){.threads = launch->threads, .block = block, .shared = shared};
    forget_loads();
    run_block();
    free(shared);
  }
  current = NULL;
}

// ---- Meetings ----

// Waits until threads [first, first + count) are here. True for the last one.
UNSEEN static bool meet(meeting *at, unsigned first, unsigned count, const char *what, const char *place) {
  fiber *self = running;
  const uint64_t number = at->number;
  self->place = place;
  if (at->present == 0) {
    at->what = what;
    at->place = place;
  }
  if (at->what != what || strcmp(at->place, place) != 0) die(place, "others of these threads wait elsewhere");
  if (++at->present < count) {
    self->state = WAITING;
    let_others_run(place);
    if (at->number == number) die(place, "woken before all were here");
    return false;
  }
  at->present = 0;
  at->number++;
  for (unsigned i = first; i < first + count; i++) {
    if (fibers[i].state == WAITING) fibers[i].state = READY;
  }
  return true;
}

// As meet(), and a barrier: what threads did before is seen by the others afterwards.
UNSEEN static bool meet_in_order(meeting *at, unsigned first, unsigned count, const char *what, const char *place) {
  char *order = &at->orders[at->number % 2];
  TSAN_RELEASE(order);
  const bool last = meet(at, first, count, what, place);
  TSAN_ACQUIRE(order);
  return last;
}

UNSEEN static warp *my_warp(void) {
  return &warps[simt_now.thread / SIMT_LANES];
}

UNSEEN static unsigned my_lane(void) {
  return simt_now.thread % SIMT_LANES;
}

// Contributes a gift to a meeting of the warp; returns which of the two meetings' gifts it is among.
UNSEEN static unsigned bring(const char *what, const char *place, const gift *mine, bool *last) {
  warp *w = my_warp();
  const unsigned turn = w->meeting.number % 2;
  w->gifts[turn][my_lane()] = *mine;
  *last = meet(&w->meeting, simt_now.thread / SIMT_LANES * SIMT_LANES, SIMT_LANES, what, place);
  return turn;
}

UNSEEN void simt_emulate_sync_block(const char *place) {
  (void)meet_in_order(&whole_block, 0, current->threads, "a block's barrier", place);
}

UNSEEN void simt_emulate_sync_warp(const char *place) {
  const unsigned first = simt_now.thread / SIMT_LANES * SIMT_LANES;
  (void)meet_in_order(&my_warp()->meeting, first, SIMT_LANES, "a warp's barrier", place);
}

UNSEEN uint32_t simt_emulate_exchange(const char *place, uint32_t value, unsigned mask) {
  bool last;
  const gift mine = {.words = {value}};
  if (mask >= SIMT_LANES) die(place, "an exchange beyond the warp");
  const unsigned turn = bring("an exchange", place, &mine, &last);
  return my_warp()->gifts[turn][my_lane() ^ mask].words[0];
}

UNSEEN bool simt_emulate_any(const char *place, bool value) {
  bool last, any = false;
  const gift mine = {.words = {value}};
  const unsigned turn = bring("a vote", place, &mine, &last);
  for (unsigned i = 0; i < SIMT_LANES; i++) any |= my_warp()->gifts[turn][i].words[0] != 0;
  return any;
}

// ---- Products ----

UNSEEN static int32_t byte_of(uint32_t word, unsigned i, bool is_signed) {
  const uint8_t byte = (uint8_t)(word >> (8 * i));
  return is_signed ? (int8_t)byte : byte;
}

UNSEEN static void multiply(const gift *gifts, bool a_signed, bool b_signed, int32_t (*products)[8]) {
  int32_t a[16][32], b[8][32];
  for (unsigned lane = 0; lane < SIMT_LANES; lane++) {
    const unsigned g = lane / 4, k = lane % 4 * 4;
    const uint32_t *words = gifts[lane].words;
    for (unsigned i = 0; i < 4; i++) {
      a[g][k + i] = byte_of(words[0], i, a_signed);
      a[g + 8][k + i] = byte_of(words[1], i, a_signed);
      a[g][16 + k + i] = byte_of(words[2], i, a_signed);
      a[g + 8][16 + k + i] = byte_of(words[3], i, a_signed);
      b[g][k + i] = byte_of(words[SIMT_A_WORDS], i, b_signed);
      b[g][16 + k + i] = byte_of(words[SIMT_A_WORDS + 1], i, b_signed);
    }
  }
  for (unsigned row = 0; row < 16; row++) {
    for (unsigned column = 0; column < 8; column++) {
      int32_t sum = 0;
      for (unsigned k = 0; k < 32; k++) sum += a[row][k] * b[column][k];
      products[row][column] = sum;
    }
  }
}

UNSEEN void simt_emulate_multiply(const char *place, bool a_signed, bool b_signed, int32_t *sums, const uint32_t *a,
                                  const uint32_t *b) {
  const gift mine = {.words = {a[0], a[1], a[2], a[3], b[0], b[1]}};
  const unsigned g = my_lane() / 4, t = my_lane() % 4;
  warp *w = my_warp();
  bool last;
  static const char *const names[2][2] = {{"a product of unsigned and unsigned bytes", "a product of unsigned bytes"},
                                          {"a product", "a product of signed bytes"}};
  const unsigned turn = bring(names[a_signed][b_signed], place, &mine, &last);
  if (last) multiply(w->gifts[turn], a_signed, b_signed, w->products[turn]);
  for (unsigned i = 0; i < SIMT_SUMS; i++)  // as unsigned numbers, which wrap
    sums[i] = (int32_t)((uint32_t)sums[i] + (uint32_t)w->products[turn][g + i / 2 * 8][2 * t + i % 2]);
}

// ---- Copies ----

UNSEEN static copy *find_copy(const char *place, const simt_gate *gate) {
  for (unsigned i = 0; i < copy_count; i++) {
    if (copies[i].gate == gate) return &copies[i];
  }
  die(place, "a gate that nobody made");
  return NULL;
}

UNSEEN void simt_emulate_gate_init(const char *place, simt_gate *gate) {
  if (copy_count == GATES_MAX || (uintptr_t)gate % sizeof *gate != 0) die(place, "a gate too many, or not aligned");
  copies[copy_count++] = (copy){.gate = gate};
}

UNSEEN static void begin_copy(const char *place, copy *c, const gift *gifts, unsigned pieces, uint32_t total) {
  if (c->begun != c->done) die(place, "a copy of this gate is under way");
  if (pieces == 0 || pieces > PIECES_MAX) die(place, "a copy of no pieces, or of too many");
  c->count = pieces;
  for (unsigned i = 0; i < pieces; i++) {
    const piece *p = &gifts[i].piece;
    if (((uintptr_t)p->to | (uintptr_t)p->from | p->bytes) % 16 != 0) die(place, "a piece that is not aligned to 16");
    if (p->bytes == 0 || p->bytes > total) die(place, "a piece of nothing, or pieces of more than their total");
    total -= p->bytes;
    c->pieces[i] = *p;
    memset(p->to, FILL, p->bytes);
  }
  if (total != 0) die(place, "pieces of less than their total");
  c->begun++;
}

UNSEEN void simt_emulate_copy(const char *place, simt_gate *gate, unsigned pieces, uint32_t total, void *to,
                              const void *from, uint32_t bytes) {
  const gift mine = {.piece = {to, from, bytes}};
  warp *w = my_warp();
  bool last;
  char *order = &w->meeting.orders[w->meeting.number % 2];
  TSAN_RELEASE(order);  // begins with a barrier of the warp
  const unsigned turn = bring("a copy", place, &mine, &last);
  TSAN_ACQUIRE(order);
  if (!last) return;
  copy *c = find_copy(place, gate);
  TSAN_RELEASE(&c->orders[c->begun % 2]);
  begin_copy(place, c, w->gifts[turn], pieces, total);
}

// As late as can be: when it is waited for.
UNSEEN static void finish_copy(copy *c) {
  char *order = &c->orders[c->done % 2];
  TSAN_ACQUIRE(order);
  for (unsigned i = 0; i < c->count; i++) memcpy(c->pieces[i].to, c->pieces[i].from, c->pieces[i].bytes);
  TSAN_RELEASE(order);
  c->done++;
}

UNSEEN void simt_emulate_copy_wait(const char *place, simt_gate *gate, uint32_t count) {
  copy *c = find_copy(place, gate);
  running->place = place;
  if (count > c->done || c->done - count > 1) die(place, "copies waited for out of order");
  for (unsigned tries = 0; c->done == count && c->begun == count; tries++) {
    if (tries == PATIENCE) die(place, "a wait for a copy that nobody begins");
    let_others_run(place);
  }
  if (c->done == count) finish_copy(c);
  TSAN_ACQUIRE(&c->orders[count % 2]);
}

// ---- Banks ----

enum { PLACES_MAX = 16, BEHIND_MAX = 16 };

static emulator_loads loads_of[PLACES_MAX];
static size_t load_places;

// The n-th load of a lane at a place belongs to the n-th loads of the others.
static struct {
  uint32_t next[SIMT_LANES];
  struct {
    uint32_t lanes, at[SIMT_LANES];
  } behind[BEHIND_MAX];
} under_way[WARPS_MAX][PLACES_MAX];

UNSEEN static void forget_loads(void) {
  memset(under_way, 0, sizeof under_way[0] * (current->threads / SIMT_LANES));
}

// Different places of 8 lanes that are in the same bank, at most.
UNSEEN static unsigned steps_of_eight(const uint32_t *at) {
  unsigned most = 1;
  for (unsigned i = 0; i < 8; i++) {
    unsigned same_bank = 0;
    for (unsigned j = 0; j < 8; j++) {
      bool counts = at[j] / 16 % 8 == at[i] / 16 % 8;
      for (unsigned k = 0; k < j && counts; k++) counts = at[k] != at[j];
      same_bank += counts;
    }
    if (same_bank > most) most = same_bank;
  }
  return most;
}

UNSEEN static size_t place_number(const char *place) {
  size_t i = 0;
  while (i < load_places && strcmp(loads_of[i].place, place) != 0) i++;
  if (i == load_places && i < PLACES_MAX) loads_of[load_places++] = (emulator_loads){.place = place};
  return i;
}

UNSEEN static void count_load(const char *place, uint32_t at) {
  const size_t number = place_number(place);
  const unsigned lane = my_lane();
  if (number >= PLACES_MAX) return;
  uint32_t *next = &under_way[simt_now.thread / SIMT_LANES][number].next[lane];
  const unsigned slot = (*next)++ % BEHIND_MAX;
  uint32_t *lanes = &under_way[simt_now.thread / SIMT_LANES][number].behind[slot].lanes;
  uint32_t *places = under_way[simt_now.thread / SIMT_LANES][number].behind[slot].at;
  places[lane] = at;
  *lanes |= 1u << lane;
  if (*lanes != ~0u) return;
  *lanes = 0;
  loads_of[number].loads++;
  for (unsigned i = 0; i < SIMT_LANES; i += 8) loads_of[number].steps += steps_of_eight(places + i);
}

simt_quad simt_emulate_load_quad(const char *place, const void *from) {
  const uintptr_t at = (uintptr_t)from - (uintptr_t)simt_now.shared;
  if (at < current->shared_bytes) count_load(place, (uint32_t)at);
  return *(const simt_quad *)from;
}

int emulator_loads_at(size_t n, emulator_loads *loads) {
  if (n >= load_places) return 0;
  *loads = loads_of[n];
  return 1;
}
