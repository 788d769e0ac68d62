#include "engine/base/edit_distance.h"

#include <string.h>

#define LENGTH_MAX 64

static size_t least(size_t a, size_t b) {
  return a < b ? a : b;
}

size_t qkv_edit_distance(const char *a, const char *b) {
  size_t rows[3][LENGTH_MAX + 1];
  size_t a_length = strnlen(a, LENGTH_MAX);
  size_t b_length = strnlen(b, LENGTH_MAX);
  for (size_t j = 0; j <= b_length; j++) rows[0][j] = j;
  for (size_t i = 1; i <= a_length; i++) {
    size_t *now = rows[i % 3];
    const size_t *before = rows[(i + 2) % 3];
    const size_t *before_that = rows[(i + 1) % 3];
    now[0] = i;
    for (size_t j = 1; j <= b_length; j++) {
      size_t replaced = before[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      now[j] = least(replaced, least(before[j], now[j - 1]) + 1);
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = least(now[j], before_that[j - 2] + 1);
      }
    }
  }
  return rows[a_length % 3][b_length];
}
