// A position for each layer of a session. Where all are equal, as they mostly are, they take 16 bytes.
//
// Threads: the owner's.
#ifndef QKV_STORAGE_POSITIONS_H
#define QKV_STORAGE_POSITIONS_H

#include <stddef.h>
#include <stdint.h>

typedef struct qkvi_positions {
  uint64_t *each;  // NULL: they are equal
  uint64_t all;    // then
} qkvi_positions;

// Copies `of` [layers], or others.
void qkvi_positions_init(qkvi_positions *positions, const uint64_t *of, uint32_t layers);
void qkvi_positions_copy(qkvi_positions *positions, const qkvi_positions *from, uint32_t layers);
void qkvi_positions_deinit(qkvi_positions *positions);

static inline uint64_t qkvi_positions_at(const qkvi_positions *positions, uint32_t layer) {
  return positions->each == NULL ? positions->all : positions->each[layer];
}

// Sets the position of a layer; after some of these: gives memory back where all are equal.
void qkvi_positions_set(qkvi_positions *positions, uint32_t layers, uint32_t layer, uint64_t position);
void qkvi_positions_pack(qkvi_positions *positions, uint32_t layers);

#endif
