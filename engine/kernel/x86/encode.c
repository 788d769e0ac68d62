// Encoding rows in vectors. Compiled once for AVX2 and once for AVX-512.
#include "engine/kernel/x86/lanes.h"
#include "engine/kernel/x86/twins.h"

QKV_DECLARE_ENCODE(TWIN(qkvi_encode)) {
  qkvi_kernels_reference.encode(part, schedule, tier, rows, gains, codes);
}
