// The leading singular vectors of a run of rows: randomized SVD (Halko, Martinsson, Tropp 2011), 10 oversamples and
// two power iterations with orthonormalization between; all singular vectors where there are fewer than 64 rows.
//
// In plain double arithmetic and with fixed random signs, not by LAPACK: pages that are coded anew have to come out
// the same to the bit, on whatever machine, and it runs on threads that may not allocate. 64 rows of 64, rank 4: see
// tests/engine/codec/low_rank_test.c, which prints the time.
#ifndef QKV_ENGINE_CODEC_SVD_H
#define QKV_ENGINE_CODEC_SVD_H

#include <stddef.h>

#define QKVI_SVD_RANK_MAX 16

// Of rows [count][dim]: left [rank][count], each vector times its singular value, and right [rank][dim], orthonormal,
// strongest first: rows ~ sum_i left_i right_i^T. What is beyond the rank of the rows is zeros. rank is at most
// QKVI_SVD_RANK_MAX; `scratch` has qkvi_svd_scratch_bytes, 8-byte aligned.
void qkvi_svd(const double *rows, size_t count, size_t dim, size_t rank, void *scratch, double *left, double *right);
size_t qkvi_svd_scratch_bytes(size_t count, size_t dim, size_t rank);

#endif
