#include "engine/base/heap_numa.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

// The kernel's interface is two calls, for which glibc has no names.
#define NODES_MAX 4096  // more than any kernel is built for
#define WORD_BITS (8 * sizeof(unsigned long))

typedef struct node_mask {
  unsigned long words[NODES_MAX / WORD_BITS];
} node_mask;

static const char *const names[] = {"off", "interleave", "local"};

const char *qkv_heap_numa_name(qkv_heap_numa numa) {
  return names[numa];
}

bool qkv_heap_numa_parse(const char *name, qkv_heap_numa *numa) {
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (strcmp(name, names[i]) != 0) continue;
    *numa = (qkv_heap_numa)i;
    return true;
  }
  return false;
}

// The nodes that this process may have memory of; false where the kernel knows none.
static bool allowed_nodes(node_mask *mask) {
  *mask = (node_mask){0};
  return syscall(SYS_get_mempolicy, NULL, mask->words, (unsigned long)NODES_MAX, NULL, MPOL_F_MEMS_ALLOWED) == 0;
}

size_t qkv_heap_numa_nodes(void) {
  node_mask mask;
  size_t count = 0;
  if (!allowed_nodes(&mask)) return 0;
  for (size_t i = 0; i < NODES_MAX / WORD_BITS; i++) count += (size_t)__builtin_popcountl(mask.words[i]);
  return count;
}

qkv_status qkvi_heap_place(void *memory, size_t bytes, qkv_heap_numa numa, qkv_error *error) {
  node_mask mask;
  if (numa == QKV_HEAP_NUMA_OFF) return QKV_OK;
  if (!allowed_nodes(&mask))
    return qkv_fail(error, QKV_UNIMPLEMENTED, "numa is %s, the kernel names no nodes: %s", names[numa],
                    strerror(errno));
  const long code = numa == QKV_HEAP_NUMA_INTERLEAVE ? syscall(SYS_mbind, memory, bytes, MPOL_INTERLEAVE, mask.words,
                                                               (unsigned long)NODES_MAX + 1, 0)
                                                     : syscall(SYS_mbind, memory, bytes, MPOL_LOCAL, NULL, 0UL, 0);
  if (code == 0) return QKV_OK;
  return qkv_fail(error, QKV_UNIMPLEMENTED, "numa is %s, the kernel refuses: %s", names[numa], strerror(errno));
}
