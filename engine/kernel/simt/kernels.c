// All kernels for GPUs: nvcc makes an image (image.h) of one file.
#include "engine/kernel/simt/attend.c"
#include "engine/kernel/simt/decode.c"
#include "engine/kernel/simt/encode.c"
