// qkv-bench heap: what an allocator makes of pages: memory in use against memory resident, and its own time.
//
// Rounds of filling up to --bytes with blocks as pages of 8 heads of 64 to 256 coordinates have at 1 to 4 bits, exact
// rows and averages in between, then a tenth of them going to lower tiers, then a random part being freed, one by one
// or in runs. After that threads allocate and free, each some blocks of its own, and touch none.
//
// --allocator malloc takes whatever malloc is loaded: LD_PRELOAD=libjemalloc.so.2, GLIBC_TUNABLES and the like.
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/bench/bench.h"
#include "engine/base/heap.h"

#define MIB ((uint64_t)1 << 20)

enum {
  BLOCK_LEAST = 2048,
  HELD = 64,
  PAIRS = 200000,
  EXACT_ONE_OF = 16,
  AVERAGES_ONE_OF = 10,
  AVERAGES_BYTES = 1088
};

static const qkv_option options[] = {
    {"allocator", QKV_OPTION_STRING, offsetof(qkv_bench_settings, allocator), "heap", 0, 0, "NAME",
     "heap: the arena's; malloc: the system's, or what is loaded in its place"},
    {"bytes", QKV_OPTION_BYTES, offsetof(qkv_bench_settings, bytes), "512MiB", 16777216, 0x1p40, "BYTES",
     "what blocks take at most"},
    {"rounds", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, rounds), "60", 1, 10000, "N", "fillings"},
    {"threads", QKV_OPTION_INTEGER, offsetof(qkv_bench_settings, threads), "2", 1, 256, "N",
     "threads that allocate and free at once, afterwards"},
    {"json", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.json), NULL, 0, 0, NULL,
     "print one JSON object a line on standard output"},
    {"help", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.help), NULL, 0, 0, NULL, "show this help"},
    {"version", QKV_OPTION_FLAG, offsetof(qkv_bench_settings, program.version), NULL, 0, 0, NULL, "show the version"},
};

typedef struct block {
  uint8_t *memory;
  size_t bytes;
} block;

typedef struct pile {
  qkv_heap *heap;  // NULL: malloc
  block *blocks;
  size_t count, max;
  uint64_t used, seed;
} pile;

static uint64_t below(uint64_t *seed, uint64_t bound) {
  *seed = *seed * 6364136223846793005u + 1442695040888963407u;
  return (*seed >> 33) % bound;
}

static void *take(qkv_heap *heap, size_t bytes) {
  void *memory = heap != NULL
                     ? qkv_heap_alloc(heap, bytes)
                     : aligned_alloc(QKV_HEAP_ALIGN, (bytes + QKV_HEAP_ALIGN - 1) / QKV_HEAP_ALIGN * QKV_HEAP_ALIGN);
  if (memory == NULL) abort();
  return memory;
}

static void give(qkv_heap *heap, const block *left) {
  if (heap != NULL) {
    qkv_heap_free(heap, left->memory, left->bytes);
  } else {
    free(left->memory);
  }
}

static size_t page_like(uint64_t *seed, uint64_t model) {
  const uint64_t dim = (uint64_t)64 << model;
  if (below(seed, AVERAGES_ONE_OF) == 0) return AVERAGES_BYTES;
  if (below(seed, EXACT_ONE_OF) == 0) return 64 * 8 * dim * 4;
  const uint64_t tier = 1 + below(seed, 4), lowered = tier > 1 ? below(seed, 4) : 0;
  return 64 + 8 * (448 + 16 * dim * tier - 2 * dim * lowered);
}

static void put(pile *p, size_t at, size_t bytes) {
  p->blocks[at] = (block){.memory = take(p->heap, bytes), .bytes = bytes};
  for (size_t i = 0; i < bytes; i += 4096) p->blocks[at].memory[i] = 1;
  p->blocks[at].memory[bytes - 1] = 1;
  p->used += bytes;
}

static void drop(pile *p, size_t at) {
  give(p->heap, &p->blocks[at]);
  p->used -= p->blocks[at].bytes;
}

static void fill(pile *p, uint64_t bytes_max, uint64_t model) {
  for (;;) {
    const size_t bytes = page_like(&p->seed, model);
    if (p->used + bytes > bytes_max || p->count == p->max) return;
    put(p, p->count++, bytes);
  }
}

// The smaller page is allocated before the larger one is freed.
static void demote(pile *p) {
  for (size_t i = 0; i < p->count / 10; i++) {
    const size_t at = below(&p->seed, p->count);
    const block old = p->blocks[at];
    put(p, at, old.bytes * (1 + below(&p->seed, 3)) / 4 + 1);
    give(p->heap, &old);
    p->used -= old.bytes;
  }
}

static void thin(pile *p, uint64_t part, size_t run) {
  const uint64_t goal = p->used / 100 * part;
  while (p->used > goal) {
    const size_t from = below(&p->seed, p->count), end = from + run < p->count ? from + run : p->count;
    for (size_t i = from; i < end; i++) drop(p, i);
    memmove(p->blocks + from, p->blocks + end, (p->count - end) * sizeof *p->blocks);
    p->count -= end - from;
  }
}

// Of /proc/self/smaps_rollup, in bytes.
static double memory_of(const char *key) {
  char line[256];
  double bytes = 0;
  FILE *file = fopen("/proc/self/smaps_rollup", "re");
  if (file == NULL) return 0;
  while (fgets(line, sizeof line, file) != NULL) {
    if (strncmp(line, key, strlen(key)) == 0) bytes = 1024 * strtod(line + strlen(key), NULL);
  }
  (void)fclose(file);
  return bytes;
}

typedef struct findings {
  double full_worst, resident_most;  // resident bytes: of those in use, when full; the most
  double trimmed_worst;              // of those in use, after trimming
  qkv_samples huge;                  // part of resident bytes on pages of 2 MiB, when full
} findings;

static void run_rounds(const qkv_bench_settings *settings, pile *p, findings *found) {
  const double base = memory_of("Rss:");
  for (int64_t round = 0; round < settings->rounds; round++) {
    fill(p, (uint64_t)settings->bytes, (uint64_t)(round * 3 / settings->rounds));
    if (p->heap != NULL) {
      for (int i = 0; i < 16; i++) qkv_heap_tend(p->heap);  // what a daemon does in four seconds
    }
    const double resident = memory_of("Rss:") - base;
    if (resident / (double)p->used > found->full_worst) found->full_worst = resident / (double)p->used;
    if (resident > found->resident_most) found->resident_most = resident;
    qkv_samples_add(&found->huge, memory_of("AnonHugePages:") / (resident + base));
    demote(p);
    thin(p, 50 + below(&p->seed, 40), round % 3 == 0 ? 1 : 1 + below(&p->seed, 64));
    if (round % 5 != 4) continue;
    if (p->heap != NULL) {
      qkv_heap_trim(p->heap, 0);
    } else {
      (void)malloc_trim(0);
    }
    const double left = (memory_of("Rss:") - base) / (double)p->used;
    if (left > found->trimmed_worst) found->trimmed_worst = left;
  }
}

// ---- Threads ----

typedef struct worker {
  qkv_heap *heap;
  uint64_t seed;
  pthread_t thread;
  double ns;  // a pair of allocating and freeing
} worker;

static void *work(void *context) {
  worker *own = context;
  block held[HELD] = {{0}};
  const double begin = qkv_bench_now();
  for (size_t i = 0; i < PAIRS; i++) {
    block *at = &held[below(&own->seed, HELD)];
    if (at->memory != NULL) give(own->heap, at);
    at->bytes = page_like(&own->seed, 1);
    at->memory = take(own->heap, at->bytes);
  }
  own->ns = 1e9 * (qkv_bench_now() - begin) / PAIRS;
  for (size_t i = 0; i < HELD; i++) {
    if (held[i].memory != NULL) give(own->heap, &held[i]);
  }
  return NULL;
}

static double time_threads(qkv_heap *heap, size_t count) {
  worker *workers = calloc(count, sizeof *workers);
  qkv_samples ns = {0};
  if (workers == NULL) abort();
  for (size_t i = 0; i < count; i++) {
    workers[i] = (worker){.heap = heap, .seed = i + 1};
    if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) abort();
  }
  for (size_t i = 0; i < count; i++) {
    (void)pthread_join(workers[i].thread, NULL);
    qkv_samples_add(&ns, workers[i].ns);
  }
  const double median = qkv_samples_quantile(&ns, 0.5);
  qkv_samples_free(&ns);
  free(workers);
  return median;
}

static int run(void *values, const qkv_option_list *arguments) {
  (void)arguments;
  const qkv_bench_settings *settings = values;
  const bool own = strcmp(settings->allocator, "heap") == 0;
  if (!own && strcmp(settings->allocator, "malloc") != 0)
    return qkv_program_misused("--allocator is %s, known are heap and malloc", settings->allocator);
  findings found = {0};
  const qkv_heap_config config = {0};
  pile p = {.heap = own ? qkv_heap_create((uint64_t)settings->bytes, &config) : NULL,
            .max = (size_t)(settings->bytes / BLOCK_LEAST),
            .seed = 1};
  p.blocks = calloc(p.max, sizeof *p.blocks);
  if (p.blocks == NULL) abort();
  const double one = time_threads(p.heap, 1), all = time_threads(p.heap, (size_t)settings->threads);
  run_rounds(settings, &p, &found);
  const double budget = (double)settings->bytes;
  qkv_bench_report(settings,
                   json_pack("{s:s, s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:f}", "bench", "heap", "allocator",
                             settings->allocator, "bytes", (json_int_t)settings->bytes, "resident_of_used",
                             found.full_worst, "resident_of_bytes", found.resident_most / budget, "trimmed_of_used",
                             found.trimmed_worst, "huge_part", qkv_samples_quantile(&found.huge, 0.5), "pair_ns", one,
                             "threads", (json_int_t)settings->threads, "pair_ns_threads", all));
  while (p.count > 0) drop(&p, --p.count);
  qkv_samples_free(&found.huge);
  free(p.blocks);
  qkv_heap_destroy(&p.heap);
  return 0;
}

const qkv_command qkvi_bench_heap = {.name = "heap",
                                     .arguments = "",
                                     .summary = "an allocator under pages: memory in use against memory resident",
                                     .options = options,
                                     .option_count = sizeof options / sizeof *options,
                                     .run = run};
