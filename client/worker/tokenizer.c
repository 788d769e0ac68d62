#include "client/worker/tokenizer.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "client/worker/tokenizer_internal.h"

// A longer piece is cut; one that long is no text.
enum { PIECE_BYTES_MAX = 1 << 24 };

static void *zeroed(size_t count, size_t bytes) {
  void *memory = calloc(count > 0 ? count : 1, bytes);
  if (memory == NULL) abort();
  return memory;
}

qkvi_tokenizer *qkvi_tokenizer_bytes(void) {
  qkvi_tokenizer *tokenizer = zeroed(1, sizeof *tokenizer);
  tokenizer->vocabulary = QKVI_TOKENIZER_BYTES;
  tokenizer->tokens = zeroed(QKVI_TOKENIZER_BYTES, sizeof *tokenizer->tokens);
  tokenizer->data = zeroed(QKVI_TOKENIZER_BYTES, 1);
  for (int32_t i = 0; i < QKVI_TOKENIZER_BYTES; i++) {
    tokenizer->data[i] = (uint8_t)i;
    tokenizer->tokens[i] = (qkvi_token){.data = &tokenizer->data[i], .bytes = 1};
    tokenizer->of_byte[i] = i;
  }
  return tokenizer;
}

void qkvi_tokenizer_destroy(qkvi_tokenizer **tokenizer) {
  qkvi_tokenizer *left = *tokenizer;
  if (left == NULL) return;
  *tokenizer = NULL;
  qkvi_merges_destroy(&left->merges);
  pcre2_code_free(left->pieces);
  pcre2_match_data_free(left->match);
  free(left->tokens);
  free(left->data);
  free(left->controls);
  free(left->system);
  free(left);
}

int32_t qkvi_tokenizer_vocabulary(const qkvi_tokenizer *tokenizer) {
  return tokenizer->vocabulary;
}

const char *qkvi_tokenizer_unit(const qkvi_tokenizer *tokenizer) {
  return tokenizer->merges == NULL ? "byte" : "token";
}

const uint8_t *qkvi_tokenizer_decode(const qkvi_tokenizer *tokenizer, int32_t token, size_t *bytes) {
  assert(token >= 0 && token < tokenizer->vocabulary);
  *bytes = tokenizer->tokens[token].bytes;
  return tokenizer->tokens[token].data;
}

bool qkvi_tokenizer_is_control(const qkvi_tokenizer *tokenizer, int32_t token) {
  assert(token >= 0 && token < tokenizer->vocabulary);
  return tokenizer->tokens[token].control;
}

// ---- Encoding ----

// A text on its way to tokens.
typedef struct encoding {
  qkvi_tokenizer *tokenizer;
  int32_t *tokens;
  int64_t count;
} encoding;

static void add_piece(encoding *out, const uint8_t *piece, size_t bytes) {
  int32_t *tokens = out->tokens + out->count;
  for (size_t i = 0; i < bytes; i++) tokens[i] = out->tokenizer->of_byte[piece[i]];
  out->count += (int64_t)qkvi_merges_apply(out->tokenizer->merges, tokens, bytes);
}

// Text in UTF-8.
static void add_characters(encoding *out, const uint8_t *text, size_t bytes) {
  const qkvi_tokenizer *tokenizer = out->tokenizer;
  size_t at = 0;
  while (at < bytes) {
    const int found =
        pcre2_match(tokenizer->pieces, text, bytes, at, PCRE2_ANCHORED | PCRE2_NO_UTF_CHECK, tokenizer->match, NULL);
    // Every character begins a piece. What the matcher has no memory for is one piece.
    size_t end = found > 0 ? pcre2_get_ovector_pointer(tokenizer->match)[1] : bytes;
    if (end - at > PIECE_BYTES_MAX) end = at + PIECE_BYTES_MAX;
    while (end < bytes && (text[end] & 0xc0) == 0x80) end++;  // not inside of a character
    add_piece(out, text + at, end - at);
    at = end;
  }
}

// Bytes of the character that begins at text[0], by the rules of UTF-8; 0 where none does.
static size_t character_bytes(const uint8_t *text, size_t left) {
  const uint8_t first = text[0];
  if (first < 0x80) return 1;
  const size_t bytes = first >= 0xc2 && first < 0xe0   ? 2
                       : first >= 0xe0 && first < 0xf0 ? 3
                       : first >= 0xf0 && first < 0xf5 ? 4
                                                       : 0;
  if (bytes == 0 || bytes > left) return 0;
  for (size_t i = 1; i < bytes; i++) {
    if ((text[i] & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xe0 && text[1] < 0xa0) || (first == 0xf0 && text[1] < 0x90);
  const bool beyond = (first == 0xed && text[1] >= 0xa0) || (first == 0xf4 && text[1] >= 0x90);
  return overlong || beyond ? 0 : bytes;
}

// Any bytes: what is no UTF-8 is pieces of one byte each.
static void add_text(encoding *out, const uint8_t *text, size_t bytes) {
  size_t begin = 0, at = 0;
  while (at < bytes) {
    const size_t character = character_bytes(text + at, bytes - at);
    if (character == 0) {
      add_characters(out, text + begin, at - begin);
      add_piece(out, text + at, 1);
      begin = at + 1;
    }
    at += character > 0 ? character : 1;
  }
  add_characters(out, text + begin, bytes - begin);
}

// The control token that begins at text[0]; -1: none.
static int32_t control_at(const qkvi_tokenizer *tokenizer, const uint8_t *text, size_t left) {
  for (int32_t i = 0; i < tokenizer->control_count; i++) {
    const qkvi_token *token = &tokenizer->tokens[tokenizer->controls[i]];
    if (token->bytes <= left && memcmp(token->data, text, token->bytes) == 0) return tokenizer->controls[i];
  }
  return -1;
}

static void add_text_with_controls(encoding *out, const uint8_t *text, size_t bytes) {
  size_t begin = 0, at = 0;
  while (at < bytes) {
    const int32_t control = control_at(out->tokenizer, text + at, bytes - at);
    if (control < 0) {
      at++;
      continue;
    }
    add_text(out, text + begin, at - begin);
    out->tokens[out->count++] = control;
    at += out->tokenizer->tokens[control].bytes;
    begin = at;
  }
  add_text(out, text + begin, bytes - begin);
}

void qkvi_tokenizer_encode(qkvi_tokenizer *tokenizer, const uint8_t *text, int64_t bytes, bool control,
                           int32_t **tokens, int64_t *count) {
  encoding out = {.tokenizer = tokenizer, .tokens = zeroed((size_t)bytes, sizeof *out.tokens)};
  if (tokenizer->merges == NULL) {
    for (out.count = 0; out.count < bytes; out.count++) out.tokens[out.count] = text[out.count];
  } else if (control) {
    add_text_with_controls(&out, text, (size_t)bytes);
  } else {
    add_text(&out, text, (size_t)bytes);
  }
  assert(out.count <= bytes);
  *tokens = out.tokens;
  *count = out.count;
}

// ---- Chat ----

// Appends `bytes` of `text` to what is at *end.
static void append(uint8_t **end, const void *text, size_t bytes) {
  memcpy(*end, text, bytes);
  *end += bytes;
}

static void append_text(uint8_t **end, const char *text) {
  append(end, text, strlen(text));
}

qkv_status qkvi_tokenizer_chat(const qkvi_tokenizer *tokenizer, const uint8_t *message, int64_t bytes, uint8_t **text,
                               int64_t *text_bytes, qkv_error *error) {
  *text = NULL;
  if (!tokenizer->chat) {
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "the model has no chat template, or one of another form than ChatML");
  }
  enum { AROUND = 128 };
  const size_t system_bytes = tokenizer->system != NULL ? strlen(tokenizer->system) : 0;
  uint8_t *end = *text = zeroed((size_t)bytes + system_bytes + AROUND, 1);
  if (tokenizer->system != NULL) {
    append_text(&end, "<|im_start|>system\n");
    append(&end, tokenizer->system, system_bytes);
    append_text(&end, "<|im_end|>\n");
  }
  append_text(&end, "<|im_start|>user\n");
  append(&end, message, (size_t)bytes);
  append_text(&end, "<|im_end|>\n<|im_start|>assistant\n");
  *text_bytes = end - *text;
  assert(*text_bytes <= bytes + (int64_t)system_bytes + AROUND);
  return QKV_OK;
}
