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

// A symbol as rans_put_symbol takes it. x / frequency is x * inverse / 2^44: off by less than 1 / frequency, as x is
// below frequency * 2^20, and without overflow, as frequency (frequency - 1) < 2^24.
typedef struct rans_symbol {
  uint64_t inverse;
  uint32_t limit;
  uint16_t start, rest;  // rest: RANS_TOTAL - frequency
} rans_symbol;

static inline rans_symbol rans_symbol_of(uint32_t start, uint32_t frequency) {
  return (rans_symbol){.inverse = (((uint64_t)1 << 44) + frequency - 1) / frequency,
                       .limit = frequency << 20,
                       .start = (uint16_t)start,
                       .rest = (uint16_t)(RANS_TOTAL - frequency)};
}

// rans_put() of a frequency below RANS_TOTAL, where there is space for a word.
static inline void rans_put_symbol(rans_writer *to, size_t lane, const rans_symbol *symbol) {
  uint32_t x = to->states[lane];
  const uint32_t refills = 0 - (uint32_t)(x >= symbol->limit);  // without a branch, which nobody could predict
  const uint16_t word = (uint16_t)x;
  memcpy(to->at - RANS_WORD, &word, RANS_WORD);
  to->at -= refills & RANS_WORD;
  x ^= (x ^ x >> 16) & refills;
  to->states[lane] = x + symbol->start + (uint32_t)(x * symbol->inverse >> 44) * symbol->rest;
}

static inline void rans_put_bits(rans_writer *to, size_t lane, uint32_t bits, unsigned count) {
  if (count > 0) rans_put(to, lane, bits << (RANS_BITS - count), RANS_TOTAL >> count);
}

// rans_put_bits() of 1 to 12 bits, where there is space for a word.
static inline void rans_put_few(rans_writer *to, size_t lane, uint32_t bits, unsigned count) {
  const unsigned rest = RANS_BITS - count;
  uint32_t x = to->states[lane];
  const uint32_t refills = 0 - (uint32_t)((uint64_t)x >= (uint64_t)1 << (rest + 20));
  const uint16_t word = (uint16_t)x;
  memcpy(to->at - RANS_WORD, &word, RANS_WORD);
  to->at -= refills & RANS_WORD;
  x ^= (x ^ x >> 16) & refills;
  to->states[lane] = (x >> rest << RANS_BITS) + (x & ((1u << rest) - 1)) + (bits << rest);
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

// rans_take() where there is a word.
static inline void rans_take_symbol(rans_reader *from, size_t lane, uint32_t start, uint32_t frequency) {
  uint32_t x = from->states[lane];
  uint16_t word;
  x = frequency * (x >> RANS_BITS) + (x & (RANS_TOTAL - 1)) - start;
  const uint32_t refills = 0 - (uint32_t)(x < RANS_LEAST);  // without a branch, as above
  memcpy(&word, from->at, RANS_WORD);
  from->at += refills & RANS_WORD;
  from->states[lane] = x ^ ((x ^ (x << 16 | word)) & refills);
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
