// The two decompositions of LAPACK that the codec needs, as OpenBLAS has them: without liblapacke and liblapack,
// which would be another 10 MB of a container's image.
#ifndef QKV_ENGINE_CODEC_LAPACK_H
#define QKV_ENGINE_CODEC_LAPACK_H

#include <stddef.h>

// Eigenvectors of a symmetric matrix, [dim][dim], which they replace, one a row, by ascending eigenvalue, [dim]. Only
// elements [i][j] with j >= i are read. Not 0: a value is not finite (-1), or LAPACK's info.
int qkvi_lapack_eigen(double *matrix, size_t dim, double *values);

// The Cholesky factor L of a symmetric positive matrix, [dim][dim], which it replaces. Only elements [i][j] with j <=
// i are read and written. Not 0: the matrix is not positive.
int qkvi_lapack_cholesky(double *matrix, size_t dim);

#endif
