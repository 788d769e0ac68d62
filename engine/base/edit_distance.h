// How far one word is from another, for "did you mean ...?".
#ifndef QKV_ENGINE_BASE_EDIT_DISTANCE_H
#define QKV_ENGINE_BASE_EDIT_DISTANCE_H

#include <stddef.h>

// Edits from `a` to `b`: insertions, deletions, replacements and swaps of neighbours (Damerau 1964, each place
// edited once). Words are short: what stands behind their first 64 bytes does not count.
size_t qkv_edit_distance(const char *a, const char *b);

#endif
