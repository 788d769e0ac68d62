// A device that attends ranges of pages: what attention asks of it (attend_device.c), and what it gives.
//
//   hold()    each range of a request: does the device have these images?      no: the range is computed by the CPU
//   begin()   memory for what the kernels read and write; the caller fills it: engine/kernel/simt/attend.h
//   submit()  the kernels start; the caller computes other ranges meanwhile
//   wait()    partial results of the ranges                                    failed: computed by the CPU as well
//
// A device has copies of images: the host's stay. A copy belongs to images by their serials (page_range.h), which no
// other image ever has, so an image that takes another one's place is never mistaken for it. Which ranges have copies
// is the device's decision, by the calls of hold().
//
// Threads: any, at once. hold() and what follows it are called with the range pinned, so by a thread that has its
// layer locked; forget() with the range's lock held, too. None but wait() waits.
#ifndef QKV_ENGINE_CACHE_DEVICE_H
#define QKV_ENGINE_CACHE_DEVICE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/kernel/simt/operands.h"

struct qkv_coder;
struct qkv_page_range;
typedef struct qkv_device qkv_device;
typedef struct qkv_device_copy qkv_device_copy;  // the device's

// Pages [first, end) of a range, all of them in memory.
typedef struct qkv_device_pages {
  struct qkv_page_range *range;
  uint32_t first, end;
  bool grows;  // pages are still added to the range: a copy would soon have fewer
  // Of the request's queries to these pages: weights summed over tokens, averaged over heads, summed over queries. By
  // the layer's samples (ema.h), or, before the first one, by the pages' part of the tokens that are seen.
  float attention;
} qkv_device_pages;

// Memory of one call. Addresses are the device's.
typedef struct qkv_device_call {
  void *own;       // the device's
  uint8_t *input;  // [input_bytes], 16-byte aligned: filled by the caller
  size_t input_bytes;
  uint64_t input_address;
  const uint8_t *output;  // [output_bytes], 16-byte aligned: valid once wait() has said true
  size_t output_bytes;
  uint64_t output_address;
  uint64_t scratch_address;  // of kernels alone
  size_t scratch_bytes;
  uint64_t tables_address;  // qkv_simt_tables
} qkv_device_call;

// Arguments of the kernels.
typedef struct qkv_device_kernels {
  qkv_simt_turn_args turn;  // of calibrated shapes
  qkv_simt_attend_args attend;
  qkv_simt_merge_args merge;
} qkv_device_kernels;

struct qkv_device {
  // Counts an attend of these pages. Where the device has copies of all of them: the address of what device_image.h
  // says, which begins with the list of images by their index in the range, and stays until release(copy). Else 0,
  // and *copy is not set.
  uint64_t (*hold)(qkv_device *device, const qkv_device_pages *pages, qkv_device_copy **copy);
  void (*release)(qkv_device *device, qkv_device_copy *copy);
  // Whether the device has a copy of the image that has this serial, of a page by its index in the range. Counts
  // nothing.
  bool (*has)(qkv_device *device, const struct qkv_page_range *range, uint32_t page, uint64_t serial);
  // The range has other images, or will be gone: its address may be another range's afterwards.
  void (*forget)(qkv_device *device, const struct qkv_page_range *range);

  // False: all calls are in use, or the device fails. Between begin and end the caller has at least one copy.
  bool (*begin)(qkv_device *device, qkv_device_call *call);
  // Runs, of a calibrated shape, the turn kernel, then the attend kernel and the merge kernel. False: it does not.
  bool (*submit)(qkv_device *device, qkv_device_call *call, const qkv_simt_shape *shape,
                 const qkv_device_kernels *kernels);
  bool (*wait)(qkv_device *device, qkv_device_call *call);
  void (*end)(qkv_device *device, qkv_device_call *call);

  qkv_device *next;           // another one that may have copies of the same ranges, in a circle; NULL: there is none
  _Atomic uint32_t sessions;  // that are on it
};

// What codes pages of an append whose rows a device has, too: by kernels, in the place of the CPU.
typedef struct qkv_row_encoder qkv_row_encoder;

// A page of rows [token, token + 64) of the append.
typedef struct qkv_row_page {
  const struct qkv_coder *coder;
  uint64_t position;  // of the first row
  uint64_t token;
  uint64_t following;  // pages behind it that are asked for next, at most
  const void *k, *v;   // the rows [64][kv_heads][dim], in the append's dtype
} qkv_row_page;

struct qkv_row_encoder {
  // `image` gets the page that the coder's encode makes of k and v, `*bytes` what it has. False: the caller encodes.
  // May wait for the device. One thread at a time.
  bool (*encode)(const qkv_row_encoder *encoder, const qkv_row_page *page, void *image, size_t *bytes);
};

// The range is forgotten by the device and the others of its circle.
void qkv_device_forget(qkv_device *device, const struct qkv_page_range *range);

#endif
