#include "engine/codec/lapack.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>

// Fortran's interface: everything by address, and the lengths of texts at the end.
void dsyevd_(const char *job, const char *part, const int *n, double *a, const int *stride, double *values,
             double *work, const int *work_count, int *integers, const int *integer_count, int *info,
             size_t job_length, size_t part_length);
void dpotrf_(const char *part, const int *n, double *a, const int *stride, int *info, size_t part_length);

// Columns of LAPACK's order are rows of ours, and its lower part is our upper one.
int qkvi_lapack_eigen(double *matrix, size_t dim, double *values) {
  const int n = (int)dim, ask = -1;
  double work_count = 0;
  int info = 0, integer_count = 0;
  for (size_t i = 0; i < dim; i++) {
    for (size_t j = i; j < dim; j++) {
      if (!isfinite(matrix[i * dim + j])) return -1;  // LAPACK might not end
    }
  }
  dsyevd_("V", "L", &n, matrix, &n, values, &work_count, &ask, &integer_count, &ask, &info, 1, 1);
  if (info != 0) return info;
  const int count = (int)work_count;
  double *work = malloc((size_t)count * sizeof *work);
  int *integers = malloc((size_t)integer_count * sizeof *integers);
  assert(work != NULL && integers != NULL);
  dsyevd_("V", "L", &n, matrix, &n, values, work, &count, integers, &integer_count, &info, 1, 1);
  free(work);
  free(integers);
  return info;
}

int qkvi_lapack_cholesky(double *matrix, size_t dim) {
  const int n = (int)dim;
  int info = 0;
  dpotrf_("U", &n, matrix, &n, &info, 1);
  return info;
}
