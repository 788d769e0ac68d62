#include <pthread.h>

#include "engine/codec/ecsq_internal.h"
#include "engine/codec/ecsq_ladder.h"

_Static_assert(ECSQ_CONTEXTS == QKVI_ECSQ_CONTEXTS && ECSQ_LEAST == QKVI_ECSQ_LEAST && ECSQ_HALF == QKVI_ECSQ_HALF,
               "the ladder's numbers");

const float qkvi_ecsq_powers[16] = {1.0f,       1.0442737f, 1.0905077f, 1.1387886f, 1.1892071f, 1.2418578f,
                                    1.2968396f, 1.3542556f, 1.4142135f, 1.4768262f, 1.5422108f, 1.6104903f,
                                    1.6817929f, 1.7562522f, 1.8340081f, 1.9152066f};

const uint16_t qkvi_ecsq_gains[ECSQ_GAIN_HALF + 1] = {1500, 770, 270, 110, 50, 25, 12, 6};
const uint16_t qkvi_ecsq_fine[ECSQ_FINE_MAX + 2] = {0,    3440, 3680, 3830, 3930, 3990, 4030, 4050, 4062,
                                                    4070, 4076, 4080, 4084, 4087, 4090, 4093, 4096};

ecsq_tables qkvi_ecsq;

uint32_t qkvi_ecsq_cost(uint32_t frequency) {
  uint64_t x = frequency;
  uint32_t whole = 0, parts = 0;
  while (x >> (whole + 1) != 0) whole++;
  x <<= 31 - whole;  // in [2^31, 2^32)
  for (int i = 0; i < 8; i++) {
    x = x * x >> 31;
    parts = parts << 1 | (uint32_t)(x >> 32);
    if (x >> 32 != 0) x >>= 1;
  }
  return (RANS_BITS << 8) - (whole << 8 | parts);
}

#define LAMBDA 0.1155f  // squared steps that a bit is worth

// A magnitude's frequency: 0 of those that escape.
static uint32_t frequency_of(unsigned context, unsigned magnitude) {
  return magnitude > ECSQ_HALF ? 0 : ladder[context][magnitude];
}

static void fill_symbols(unsigned context) {
  uint32_t start = 0, left = RANS_TOTAL;
  for (int code = -ECSQ_HALF; code <= ECSQ_HALF; code++) left -= ladder[context][code < 0 ? -code : code];
  for (unsigned i = 0; i < ECSQ_SYMBOLS; i++) {
    const int code = (int)i - ECSQ_HALF, magnitude = code < 0 ? -code : code;
    const uint32_t frequency = i == ECSQ_ESCAPE ? left : ladder[context][magnitude];
    ecsq_symbol *symbol = &qkvi_ecsq.symbols[context][i];
    *symbol = (ecsq_symbol){.start = (uint16_t)start, .frequency = (uint16_t)frequency};
    memset(qkvi_ecsq.at[context] + start, (int)i, frequency);
    start += frequency;
    if (frequency > 0) qkvi_ecsq.puts[context * ECSQ_SYMBOLS + i] = rans_symbol_of(symbol->start, frequency);
    if (i == ECSQ_ESCAPE) break;
    if (frequency > 0) qkvi_ecsq.tops[context] = magnitude;
    const float shift = (float)shifts[context][magnitude] / 256;
    symbol->value = (float)code - (code < 0 ? -shift : shift);
  }
  qkvi_ecsq.escape[context] = (uint16_t)(qkvi_ecsq_cost(left) + ((ECSQ_EXPONENT_BITS + 1) << 8));
}

static uint32_t bits_above(uint32_t x) {
  return 31 - (uint32_t)__builtin_clz(x);
}

// Where codes of magnitude i + 1 begin: the squared error and LAMBDA bits are least.
static float border_of(unsigned context, unsigned i) {
  const ecsq_symbol *at = qkvi_ecsq.symbols[context] + ECSQ_HALF + i;
  float costs[2];
  for (unsigned k = 0; k < 2; k++) {
    const uint32_t frequency = frequency_of(context, i + k);
    costs[k] = (float)(frequency == 0 ? qkvi_ecsq.escape[context] : qkvi_ecsq_cost(frequency));
  }
  const float dearer = LAMBDA * (costs[1] - costs[0]) / 256;
  const float border =
      (at[1].value * at[1].value - at[0].value * at[0].value + dearer) / (2 * (at[1].value - at[0].value));
  return fminf(fmaxf(border, (float)i), (float)(i + 1));
}

// Borders above the second one are taken to be whole steps from it, as they nearly are.
static void fill_codes(unsigned context) {
  qkvi_ecsq.borders[context] = (ecsq_borders){.zero = border_of(context, 0), .offset = 2 - border_of(context, 1)};
  for (unsigned magnitude = 0; magnitude < ECSQ_SYMBOLS; magnitude++) {
    const uint32_t frequency = frequency_of(context, magnitude);
    qkvi_ecsq.costs[context * ECSQ_SYMBOLS + magnitude] =
        (uint16_t)(frequency > 0 ? qkvi_ecsq_cost(frequency)
                                 : qkvi_ecsq.escape[context] + (bits_above(magnitude + 1) << 8));
  }
}

static void fill(void) {
  for (unsigned context = 0; context < ECSQ_CONTEXTS; context++) {
    fill_symbols(context);
    fill_codes(context);
    uint64_t sum = 0;
    for (int code = -ECSQ_HALF; code <= ECSQ_HALF; code++) {
      const unsigned magnitude = (unsigned)(code < 0 ? -code : code);
      sum += (uint64_t)frequency_of(context, magnitude) * qkvi_ecsq.costs[context * ECSQ_SYMBOLS + magnitude];
    }
    qkvi_ecsq.expected[context] = (uint32_t)(sum / RANS_TOTAL);
  }
}

void qkvi_ecsq_fill(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  (void)pthread_once(&once, fill);
}
