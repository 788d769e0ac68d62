// Blocks of any size in memory on pages of 2 MiB, with a bound on what is resident.
//
// An arena's blocks are tens of kilobytes each, of sizes that are all slightly different, and live for as long as
// sessions do. An allocator of size classes wastes a tenth of them; here a block takes its bytes, rounded up to 64,
// and has no header:
//
//   span      address space set aside at the start, tiles of 2 MiB, usable from its begin to a frontier
//   holes     what is free below the frontier, in a tree by address that knows the largest hole of each subtree
//
// A block comes from the first hole that it fits (at the lowest address), so the end of the span empties first and
// whole tiles are returned to the system. Where the kernel has transparent huge pages, a tile is one page of 2 MiB
// until parts of it have to be returned; it becomes one again when it is full.
//
// Blocks that do not fit in the span come from malloc; all do where no address space can be had.
//
// Threads: any; one lock, held for a search in the tree, and while memory is returned. No block is read or written.
#ifndef QKV_ENGINE_BASE_HEAP_H
#define QKV_ENGINE_BASE_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/status.h"

#define QKV_HEAP_ALIGN 64

typedef enum qkv_heap_pages { QKV_HEAP_PAGES_AUTO, QKV_HEAP_PAGES_SMALL } qkv_heap_pages;
// Where blocks lie on a machine of several nodes: where the kernel puts them (OFF), on all nodes in turn, which gives
// every thread the same share of all memory's speed, or on the node of the thread that writes them first.
typedef enum qkv_heap_numa { QKV_HEAP_NUMA_OFF, QKV_HEAP_NUMA_INTERLEAVE, QKV_HEAP_NUMA_LOCAL } qkv_heap_numa;

typedef struct qkv_heap_config {
  qkv_heap_pages pages;
  qkv_heap_numa numa;
} qkv_heap_config;

typedef struct qkv_heap_stats {
  uint64_t bytes_used;      // in blocks
  uint64_t bytes_resident;  // of the span and of malloc's blocks; an upper bound: not every page of 2 MiB can be had
  uint64_t bytes_most;      // bytes resident above which holes are returned
  uint64_t bytes_outside;   // of both, in malloc's blocks
  uint64_t tiles_split;     // tiles that are resident in part
} qkv_heap_stats;

typedef struct qkv_heap qkv_heap;

// `bytes_max` is what blocks take at most: once a sixteenth and two tiles more are resident, holes are returned to
// the system before a block touches more. Never fails; options that qkv_heap_check refuses are ignored.
qkv_heap *qkv_heap_create(uint64_t bytes_max, const qkv_heap_config *config);
// UNIMPLEMENTED "numa is interleave, ..." where the kernel refuses that.
qkv_status qkv_heap_check(const qkv_heap_config *config, qkv_error *error);
// Frees the remaining blocks, except those of malloc. Clears *heap.
void qkv_heap_destroy(qkv_heap **heap);

// `bytes` of bytes_max are used outside of the heap: so much less may be resident here. Holes are returned at once
// where more is.
void qkv_heap_set_overhead(qkv_heap *heap, uint64_t bytes);

// Aligned to 64 bytes, contents undefined. Aborts where the machine is out of memory.
void *qkv_heap_alloc(qkv_heap *heap, size_t bytes);
// `bytes` as they were asked for (asserted as far as a hole would lie in a hole). NULL is none.
void qkv_heap_free(qkv_heap *heap, void *block, size_t bytes);

// Returns holes to the system until no more is resident than `used` bytes, or the bytes in use where these are more,
// with a 32nd and a tile; as far as tiles are not nearly full. Takes a millisecond for some hundred MiB.
void qkv_heap_trim(qkv_heap *heap, uint64_t used);
// Some of the tiles that have been split and are nearly full again become pages of 2 MiB. To be called now and then.
void qkv_heap_tend(qkv_heap *heap);

qkv_heap_stats qkv_heap_read(qkv_heap *heap);
// NULL, or the invariant that does not hold. Takes time in the number of tiles and holes.
const char *qkv_heap_validate(qkv_heap *heap);

// "off", "interleave" and "local"; false for anything else.
bool qkv_heap_numa_parse(const char *name, qkv_heap_numa *numa);
const char *qkv_heap_numa_name(qkv_heap_numa numa);
// Nodes that this process may use; 0 where the kernel knows none.
size_t qkv_heap_numa_nodes(void);

// Whether pages of 2 MiB are asked for and, as far as the kernel says, can be had; a sentence for the log.
bool qkv_heap_is_huge(const qkv_heap *heap);
const char *qkv_heap_pages_text(const qkv_heap *heap);

#endif
