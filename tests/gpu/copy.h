// A device's copy of some pages (engine/cache/device_image.h) in host memory, for the emulator.
#ifndef QKV_TESTS_GPU_COPY_H
#define QKV_TESTS_GPU_COPY_H

#include <assert.h>
#include <stdlib.h>

#include "engine/cache/device_image.h"
#include "engine/codec/codec.h"

// Of images [count] of a coder that kernels take. The caller frees it.
static inline uint8_t *copy_pages(const qkv_coder *coder, const void *const *images, size_t count) {
  const qkv_device_layout layout = qkv_device_layout_of(coder);
  size_t bytes = layout.pages;
  for (size_t i = 0; i < count; i++) bytes += qkv_device_page_bytes(coder, images[i]);
  uint8_t *made = aligned_alloc(64, (bytes + 63) / 64 * 64);
  assert(made != NULL);
  qkv_device_fill_tables(coder, made);
  uint8_t *next = made + layout.pages;
  for (size_t i = 0; i < count; i++) {
    ((const uint8_t **)(void *)made)[i] = next + layout.image;
    next += qkv_device_fill_page(coder, images[i], next);
  }
  assert(next == made + bytes);
  return made;
}

#endif
