// What a device has of a range: a list of its pages' images, what kernels need of their coder, and the images, which
// are expanded where the code is calibrated, or is data-free and has more than 4 bits or parts of bits
// (engine/kernel/simt/calibrated.h).
//
//   list [QKV_RANGE_PAGES] of addresses | expanded: tables of heads | attend frame: its tables | pages
//   page: attend frame: its turns | image
//
// Threads: pure functions.
#ifndef QKV_ENGINE_CACHE_DEVICE_IMAGE_H
#define QKV_ENGINE_CACHE_DEVICE_IMAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct qkv_coder;

// Whether the kernels take the pages of a coder, and this image of one.
bool qkv_device_takes_coder(const struct qkv_coder *coder);
bool qkv_device_takes_image(const struct qkv_coder *coder, const void *image);

// Offsets, multiples of 64, in a copy whose pages a coder has that kernels take.
typedef struct qkv_device_layout {
  bool expanded, anchored, turns;
  size_t heads, head_bytes;  // [kv_heads]
  size_t frame;
  size_t pages;
  size_t image;  // in a page
} qkv_device_layout;
qkv_device_layout qkv_device_layout_of(const struct qkv_coder *coder);

// Fills what lies before the pages but the list, which it clears.
void qkv_device_fill_tables(const struct qkv_coder *coder, uint8_t *copy);
// A page: its bytes, a multiple of 64; fills it, and returns them.
size_t qkv_device_page_bytes(const struct qkv_coder *coder, const void *image);
size_t qkv_device_fill_page(const struct qkv_coder *coder, const void *image, uint8_t *page);

#endif
