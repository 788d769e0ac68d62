// Between the files of the tokenizer: what it holds (read by tokenizer_gguf.c), and what is made of it (tokenizer.c).
#ifndef QKV_CLIENT_WORKER_TOKENIZER_INTERNAL_H
#define QKV_CLIENT_WORKER_TOKENIZER_INTERNAL_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "client/worker/merges.h"
#include "client/worker/tokenizer.h"

typedef struct qkvi_token {
  const uint8_t *data;
  uint32_t bytes;
  bool control;
} qkvi_token;

struct qkvi_tokenizer {
  int32_t vocabulary;
  qkvi_token *tokens;                     // [vocabulary]
  uint8_t *data;                          // of all tokens
  int32_t of_byte[QKVI_TOKENIZER_BYTES];  // the token of each byte; the unknown one where there is none
  int32_t *controls;                      // those tokens, the longest name first
  int32_t control_count;
  qkvi_merges *merges;  // NULL: a token is a byte
  pcre2_code *pieces;   // matches one piece
  pcre2_match_data *match;
  char *system;  // the chat template's system message; NULL: it has none
  bool chat;     // the template is ChatML
};

#endif
