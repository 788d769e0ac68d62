// rANS: an entropy coder of interleaved states of 32 bits, refilled by words of 16. A symbol has `frequency` of the
// numbers below RANS_TOTAL, from `start` on. What is written last is read first. Sources: Duda, "Asymmetric numeral
// systems" (2014); Giesen, "Interleaved entropy coders" (2014).
//
// Threads: pure functions, for one writer or reader.
#ifndef QKV_ENGINE_CODEC_RANS_H
#define QKV_ENGINE_CODEC_RANS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { RANS_LANES = 4, RANS_WORD = 2, RANS_BITS = 12, RANS_TOTAL = 1 << RANS_BITS };
#define RANS_LEAST 65536u  // of a state, and what it begins with

typedef struct rans_writer {
  uint32_t states[RANS_LANES];
  uint8_t *begin, *at;  // words are written from the end on
  bool full;
} rans_writer;

static inline void rans_put(rans_writer *to, size_t lane, uint32_t start, uint32_t frequency) {
  uint32_t x = to->states[lane];
  if ((uint64_t)x >= (uint64_t)frequency << 20) {
    if (to->at - to->begin < RANS_WORD) {
      to->full = true;
      return;
    }
    const uint16_t word = (uint16_t)x;
    to->at -= RANS_WORD;
    memcpy(to->at, &word, RANS_WORD);
    x >>= 16;
  }
  to->states[lane] = (x / frequency << RANS_BITS) + x % frequency + start;
}

static inline void rans_put_bits(rans_writer *to, size_t lane, uint32_t bits, unsigned count) {
  if (count > 0) rans_put(to, lane, bits << (RANS_BITS - count), RANS_TOTAL >> count);
}

// More than 12 bits: the lower ones come first when they are read.
static inline void rans_put_number(rans_writer *to, size_t lane, uint32_t number, unsigned count) {
  const unsigned low = count > RANS_BITS ? RANS_BITS : count;
  if (count > low) rans_put_bits(to, lane, number >> low, count - low);
  rans_put_bits(to, lane, number & ((1u << low) - 1), low);
}

typedef struct rans_reader {
  uint32_t states[RANS_LANES];
  const uint8_t *at, *end;
  bool wrong;
} rans_reader;

static inline uint32_t rans_peek(const rans_reader *from, size_t lane) {
  return from->states[lane] & (RANS_TOTAL - 1);
}

static inline void rans_take(rans_reader *from, size_t lane, uint32_t start, uint32_t frequency) {
  uint32_t x = from->states[lane];
  x = frequency * (x >> RANS_BITS) + (x & (RANS_TOTAL - 1)) - start;
  if (x < RANS_LEAST) {
    uint16_t word = 0;
    if (from->end - from->at < RANS_WORD) {
      from->wrong = true;
    } else {
      memcpy(&word, from->at, RANS_WORD);
      from->at += RANS_WORD;
    }
    x = x << 16 | word;
  }
  from->states[lane] = x;
}

static inline uint32_t rans_take_bits(rans_reader *from, size_t lane, unsigned count) {
  if (count == 0) return 0;
  const uint32_t bits = rans_peek(from, lane) >> (RANS_BITS - count);
  rans_take(from, lane, bits << (RANS_BITS - count), RANS_TOTAL >> count);
  return bits;
}

static inline uint32_t rans_take_number(rans_reader *from, size_t lane, unsigned count) {
  const unsigned low = count > RANS_BITS ? RANS_BITS : count;
  const uint32_t bits = rans_take_bits(from, lane, low);
  return count > low ? bits | rans_take_bits(from, lane, count - low) << low : bits;
}

#endif
