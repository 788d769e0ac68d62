#include "engine/kernel/simt/image.h"

#include <stdint.h>

#ifdef QKV_SIMT_FATBIN

__asm__(
    ".pushsection .rodata\n"
    ".balign 64\n"
    "qkvi_simt_image: .incbin \"" QKV_SIMT_FATBIN
    "\"\n"
    "qkvi_simt_image_end:\n"
    ".popsection\n");
extern const uint8_t qkvi_simt_image[], qkvi_simt_image_end[];

const void *qkv_simt_image(size_t *bytes) {
  *bytes = (size_t)(qkvi_simt_image_end - qkvi_simt_image);
  return qkvi_simt_image;
}

#else

const void *qkv_simt_image(size_t *bytes) {
  *bytes = 0;
  return NULL;
}

#endif
