#include "storage/positions.h"

#include <assert.h>
#include <stdlib.h>

#include "storage/internal.h"

static void give_each(qkvi_positions *positions, uint32_t layers) {
  positions->each = qkvi_checked(malloc(layers * sizeof *positions->each));
  for (uint32_t i = 0; i < layers; i++) positions->each[i] = positions->all;
}

void qkvi_positions_init(qkvi_positions *positions, const uint64_t *of, uint32_t layers) {
  *positions = (qkvi_positions){.all = layers == 0 ? 0 : of[0]};
  for (uint32_t i = 0; i < layers; i++) qkvi_positions_set(positions, layers, i, of[i]);
}

void qkvi_positions_copy(qkvi_positions *positions, const qkvi_positions *from, uint32_t layers) {
  *positions = (qkvi_positions){.all = from->all};
  for (uint32_t i = 0; i < layers; i++) qkvi_positions_set(positions, layers, i, qkvi_positions_at(from, i));
}

void qkvi_positions_deinit(qkvi_positions *positions) {
  free(positions->each);
  *positions = (qkvi_positions){.each = NULL};
}

void qkvi_positions_set(qkvi_positions *positions, uint32_t layers, uint32_t layer, uint64_t position) {
  assert(layer < layers);
  if (qkvi_positions_at(positions, layer) == position) return;
  if (positions->each == NULL) give_each(positions, layers);
  positions->each[layer] = position;
}

void qkvi_positions_pack(qkvi_positions *positions, uint32_t layers) {
  if (positions->each == NULL) return;
  for (uint32_t i = 1; i < layers; i++) {
    if (positions->each[i] != positions->each[0]) return;
  }
  positions->all = positions->each[0];
  free(positions->each);
  positions->each = NULL;
}
