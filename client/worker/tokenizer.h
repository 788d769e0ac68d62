// Tokenizers: text to tokens and back.
//
//   bytes   a token is a byte, as of tests/data/tinylm
//   BPE     byte-level byte-pair encoding in the manner of GPT-2, from the metadata of a GGUF file. The text is split
//           into pieces (words with the blank before them, single digits, runs of other characters, blanks), by the
//           rules that tokenizer.ggml.pre names; the bytes of a piece are tokens, of which two neighbours at a time
//           become one, the pair that comes first in the list of merges before all others.
//
// What is decoded from a text's tokens is the text again, whatever its bytes. The exception are bytes that a
// vocabulary has no token for (SmolLM2 lacks 21, most of them never in UTF-8): each of them becomes the unknown
// token.
//
// Threads: one at a time for each tokenizer.
#ifndef QKV_CLIENT_WORKER_TOKENIZER_H
#define QKV_CLIENT_WORKER_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/format/gguf.h"
#include "engine/base/status.h"

enum { QKVI_TOKENIZER_BYTES = 256 };  // tokens of the first kind

typedef struct qkvi_tokenizer qkvi_tokenizer;

// That of bytes. Never fails.
qkvi_tokenizer *qkvi_tokenizer_bytes(void);
// That of a GGUF file, copied out of it. NOT_FOUND or INVALID_ARGUMENT, naming the entry.
qkv_status qkvi_tokenizer_gguf(const qkv_gguf *file, qkvi_tokenizer **tokenizer, qkv_error *error);
// Clears *tokenizer, which may be NULL.
void qkvi_tokenizer_destroy(qkvi_tokenizer **tokenizer);

int32_t qkvi_tokenizer_vocabulary(const qkvi_tokenizer *tokenizer);
// What a token is called: "byte" or "token".
const char *qkvi_tokenizer_unit(const qkvi_tokenizer *tokenizer);

// The text's tokens, at most one a byte, free()d by the caller. With `control`, the names of control tokens, as
// <|im_start|>, stand for these; without it they are text as any other.
void qkvi_tokenizer_encode(qkvi_tokenizer *tokenizer, const uint8_t *text, int64_t bytes, bool control,
                           int32_t **tokens, int64_t *count);
// A token's bytes, borrowed; the name of a control token. The token must be one of the vocabulary.
const uint8_t *qkvi_tokenizer_decode(const qkvi_tokenizer *tokenizer, int32_t token, size_t *bytes);
bool qkvi_tokenizer_is_control(const qkvi_tokenizer *tokenizer, int32_t token);

// A user's message as the model's chat template wants it, ready to be encoded with `control`; free()d by the caller.
// FAILED_PRECONDITION where the model has no template, or one of another form than ChatML.
qkv_status qkvi_tokenizer_chat(const qkvi_tokenizer *tokenizer, const uint8_t *message, int64_t bytes, uint8_t **text,
                               int64_t *text_bytes, qkv_error *error);

#endif
