#include "engine/codec/sphere.h"

#include <assert.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "engine/codec/schedule.h"

enum { BITS = 8, POINTS = 8192, ROUNDS = 4000, WIDTHS = QKV_DIM_MAX / QKV_BAND + 1 };

static const double GAUSSIAN_WIDTH = 1 << 22, GAUSSIAN_END = 9;

// The density on [0, end], not normalized, at POINTS + 1 places, and its integrals up to them.
typedef struct half_density {
  double end, step, width;
  double at[POINTS + 1], mass[POINTS + 1], moment[POINTS + 1], square[POINTS + 1];
} half_density;

// (1 - u^2 / d)^(exponent / 2)
static double power_of(double base, unsigned long halves) {
  double result = (halves & 1) != 0 ? sqrt(base) : 1;
  for (unsigned long left = halves / 2; left > 0; left /= 2) {
    if ((left & 1) != 0) result *= base;
    base *= base;
  }
  return result;
}

static double density_at(const half_density *d, double u) {
  const double base = 1 - u * u / d->width;
  return base <= 0 ? 0 : power_of(base, (unsigned long)d->width - 3);
}

// Simpson's rule over each step, with the place in its middle.
static void fill(half_density *d) {
  d->mass[0] = d->moment[0] = d->square[0] = 0;
  for (size_t i = 0; i <= POINTS; i++) d->at[i] = density_at(d, (double)i * d->step);
  for (size_t i = 0; i < POINTS; i++) {
    const double low = (double)i * d->step, middle = low + d->step / 2, high = low + d->step;
    const double f = density_at(d, middle);
    d->mass[i + 1] = d->mass[i] + (d->at[i] + 4 * f + d->at[i + 1]) * d->step / 6;
    d->moment[i + 1] = d->moment[i] + (low * d->at[i] + 4 * middle * f + high * d->at[i + 1]) * d->step / 6;
    d->square[i + 1] =
        d->square[i] + (low * low * d->at[i] + 4 * middle * middle * f + high * high * d->at[i + 1]) * d->step / 6;
  }
}

// An integral up to u: that up to the place below, and Simpson's rule for the rest. `power` 0, 1 or 2 of u.
static double integral(const half_density *d, const double *sums, double u, int power) {
  size_t i = (size_t)(u / d->step);
  if (i >= POINTS) return sums[POINTS];
  const double low = (double)i * d->step, middle = (low + u) / 2;
  const double a = d->at[i], b = density_at(d, middle), c = density_at(d, u);
  if (power == 0) return sums[i] + (a + 4 * b + c) * (u - low) / 6;
  if (power == 1) return sums[i] + (low * a + 4 * middle * b + u * c) * (u - low) / 6;
  return sums[i] + (low * low * a + 4 * middle * middle * b + u * u * c) * (u - low) / 6;
}

// Cube root of x >= 0, by Newton.
static double cube_root(double x) {
  if (x <= 0) return 0;
  double root = x > 1 ? x : 1;
  for (int i = 0; i < 200; i++) root = (2 * root + x / (root * root)) / 3;
  return root;
}

// Cells of equal integral of the cube root of the density; bounds[0] = 0, bounds[cells] = end.
static void start(const half_density *d, size_t cells, double *bounds) {
  enum { COARSE = 512 };
  double sums[COARSE + 1] = {0};
  const double step = d->end / COARSE;
  for (size_t i = 0; i < COARSE; i++) sums[i + 1] = sums[i] + cube_root(density_at(d, ((double)i + 0.5) * step));
  bounds[0] = 0;
  for (size_t cell = 1, i = 0; cell < cells; cell++) {
    const double wanted = sums[COARSE] * (double)cell / (double)cells;
    while (sums[i + 1] < wanted) i++;
    bounds[cell] = ((double)i + (wanted - sums[i]) / (sums[i + 1] - sums[i])) * step;
  }
  bounds[cells] = d->end;
}

// Centroids of the cells, then the bounds between them, until nothing moves.
static void iterate(const half_density *d, size_t cells, double *bounds, double *values) {
  for (int round = 0; round < ROUNDS; round++) {
    double moved = 0, mass = 0, moment = 0;
    for (size_t i = 0; i < cells; i++) {
      const double next_mass = integral(d, d->mass, bounds[i + 1], 0);
      const double next_moment = integral(d, d->moment, bounds[i + 1], 1);
      if (next_mass > mass) values[i] = (next_moment - moment) / (next_mass - mass);
      mass = next_mass;
      moment = next_moment;
    }
    for (size_t i = 1; i < cells; i++) {
      const double bound = (values[i - 1] + values[i]) / 2, step = fabs(bound - bounds[i]);
      moved = step > moved ? step : moved;
      bounds[i] = bound;
    }
    if (moved < 1e-12) return;
  }
}

static double distortion_of(const half_density *d, size_t cells, const double *bounds, const double *values) {
  double error = 0;
  for (size_t i = 0; i < cells; i++) {
    const double low = bounds[i], high = bounds[i + 1], v = values[i];
    error += integral(d, d->square, high, 2) - integral(d, d->square, low, 2) -
             2 * v * (integral(d, d->moment, high, 1) - integral(d, d->moment, low, 1)) +
             v * v * (integral(d, d->mass, high, 0) - integral(d, d->mass, low, 0));
  }
  return error / d->square[POINTS];
}

static qkv_sphere *make(uint16_t dim, unsigned bits) {
  const size_t cells = (size_t)1 << (bits - 1);
  half_density *d = malloc(sizeof *d);
  qkv_sphere *made = calloc(1, sizeof *made);
  double bounds[(1 << (BITS - 1)) + 1], values[1 << (BITS - 1)] = {0};
  if (d == NULL || made == NULL) abort();
  d->width = dim == QKV_SPHERE_GAUSSIAN ? GAUSSIAN_WIDTH : dim;
  d->end = sqrt(d->width) < GAUSSIAN_END ? sqrt(d->width) : GAUSSIAN_END;
  d->step = d->end / POINTS;
  fill(d);
  start(d, cells, bounds);
  iterate(d, cells, bounds, values);
  for (size_t i = 0; i < cells; i++) {
    made->values[cells + i] = (float)values[i];
    made->values[cells - 1 - i] = -(float)values[i];
  }
  for (size_t i = 0; i + 1 < 2 * cells; i++) made->bounds[i] = (made->values[i] + made->values[i + 1]) / 2;
  made->distortion = distortion_of(d, cells, bounds, values);
  free(d);
  return made;
}

const qkv_sphere *qkv_sphere_get(uint16_t dim, unsigned bits) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static qkv_sphere *made[WIDTHS][BITS];
  assert(bits >= 1 && bits <= BITS && dim % QKV_BAND == 0 && dim <= QKV_DIM_MAX);
  (void)pthread_mutex_lock(&lock);
  qkv_sphere **found = &made[dim / QKV_BAND][bits - 1];
  if (*found == NULL) *found = make(dim, bits);
  const qkv_sphere *sphere = *found;
  (void)pthread_mutex_unlock(&lock);
  return sphere;
}
