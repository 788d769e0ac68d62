// NumPy's .npy files, written.
//
//   [ 0x93 "NUMPY" 1 0 ][ 2 bytes: N ][ N bytes: a Python dict, spaces, '\n' ][ data, row-major ]
//     {'descr': '<f2', 'fortran_order': False, 'shape': (3, 4), }
//
// The data begins at a multiple of 64. NumPy has no bf16.
//
// Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#ifndef QKV_CLIENT_FORMAT_NPY_H
#define QKV_CLIENT_FORMAT_NPY_H

#include <stdint.h>
#include <stdio.h>

#include "engine/base/status.h"
#include "engine/base/tensor.h"

// Makes the file, replacing one that is there, and writes the header. The caller writes the data, exactly what
// `dims` (1 to 4, each >= 0) hold, and closes *file. INVALID_ARGUMENT for bf16; UNAVAILABLE with the system's
// reason where the file cannot be written. On failure *file is NULL.
qkv_status qkv_npy_create(const char *path, qkv_dtype dtype, int rank, const int64_t *dims, FILE **file,
                          qkv_error *error);

#endif
