// A byte-level BPE out of a GGUF file's metadata: tokenizer.ggml.*.
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#define uthash_fatal(message) abort()
#include <uthash.h>

#include "client/worker/tokenizer_internal.h"

enum { VOCABULARY_MAX = 1 << 24, MERGE_BYTES_MAX = 8192, SHOWN = 64 };

// How the text is cut into pieces: what these match, one after the other. GPT-2's regular expression; for SmolLM2 a
// digit is a piece of its own, and the blanks before one are, too, whereas of those before a word the last one is
// left for the word.
#define WORDS "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}++"
static const struct {
  const char *name, *pieces;
} splits[] = {
    {"smollm", "\\p{N}|" WORDS "| ?[^\\s\\p{L}\\p{N}]++|\\s+(?![^\\s\\p{N}])|\\s+"},
    {"gpt-2", WORDS "| ?\\p{N}++| ?[^\\s\\p{L}\\p{N}]++|\\s+(?!\\S)|\\s+"},
};

// The file's token types.
enum { TYPE_NORMAL = 1, TYPE_CONTROL = 3 };  // others are as they are spelt

typedef struct name_entry {
  qkv_gguf_text name;
  int32_t token;
  UT_hash_handle hh;
} name_entry;

// What is needed while the file is read.
typedef struct loader {
  const qkv_gguf *file;
  qkvi_tokenizer *tokenizer;
  name_entry *names, *table;  // of tokens, as the file spells them
  int16_t byte_of[512];       // of a character that stands for a byte; -1: of none
  qkv_error *error;
} loader;

static void *zeroed(size_t count, size_t bytes) {
  void *memory = calloc(count > 0 ? count : 1, bytes);
  if (memory == NULL) abort();
  return memory;
}

static int32_t find(const loader *from, const void *name, size_t bytes) {
  name_entry *found = NULL;
  HASH_FIND(hh, from->table, name, bytes, found);
  return found != NULL ? found->token : -1;
}

// ---- Characters that stand for bytes ----

static bool is_itself(int byte) {
  return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
}

// In tokens' names a byte is the character of the same number where that can be seen, else one from 256 on.
static void fill_bytes(loader *from) {
  memset(from->byte_of, -1, sizeof from->byte_of);
  for (int byte = 0, next = 256; byte < QKVI_TOKENIZER_BYTES; byte++) {
    from->byte_of[is_itself(byte) ? byte : next++] = (int16_t)byte;
  }
}

// The bytes that a name stands for, at most as many as it has; -1 where a character stands for none.
static int64_t name_bytes(const loader *from, qkv_gguf_text name, uint8_t *out) {
  int64_t count = 0;
  for (size_t i = 0; i < name.bytes; i++) {
    unsigned character = (uint8_t)name.data[i];
    if ((character & 0xe0) == 0xc0 && i + 1 < name.bytes) {
      character = (character & 31) << 6 | ((uint8_t)name.data[++i] & 63);
    } else if (character >= 0x80) {
      return -1;
    }
    if (character >= 512 || from->byte_of[character] < 0) return -1;
    out[count++] = (uint8_t)from->byte_of[character];
  }
  return count;
}

// ---- Tokens ----

static qkv_status read_token(loader *from, int32_t index, qkv_gguf_text name, int32_t type, uint8_t **next) {
  qkvi_token *token = &from->tokenizer->tokens[index];
  *token = (qkvi_token){.data = *next, .control = type == TYPE_CONTROL};
  int64_t bytes = (int64_t)name.bytes;
  if (type == TYPE_NORMAL) {
    bytes = name_bytes(from, name, *next);
  } else {
    memcpy(*next, name.data, name.bytes);
  }
  if (bytes < 0) {
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT,
                    "tokenizer.ggml.tokens[%" PRId32 "] is \"%.*s\", which has characters that stand for no byte",
                    index, (int)(name.bytes < SHOWN ? name.bytes : SHOWN), name.data);
  }
  token->bytes = (uint32_t)bytes;
  *next += bytes;
  name_entry *entry = &from->names[index];
  *entry = (name_entry){.name = name, .token = index};
  if (find(from, name.data, name.bytes) < 0) HASH_ADD_KEYPTR(hh, from->table, entry->name.data, name.bytes, entry);
  return QKV_OK;
}

static qkv_status read_tokens(loader *from) {
  qkvi_tokenizer *tokenizer = from->tokenizer;
  qkv_gguf_array names, types;
  QKV_TRY(qkv_gguf_array_of(from->file, "tokenizer.ggml.tokens", QKV_GGUF_STRING, &names, from->error));
  QKV_TRY(qkv_gguf_array_of(from->file, "tokenizer.ggml.token_type", QKV_GGUF_INT32, &types, from->error));
  if (names.left < 1 || names.left > VOCABULARY_MAX || types.left != names.left) {
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT,
                    "there are %" PRIu64 " tokenizer.ggml.tokens and %" PRIu64
                    " tokenizer.ggml.token_type, allowed are 1 to %d of both",
                    names.left, types.left, VOCABULARY_MAX);
  }
  tokenizer->vocabulary = (int32_t)names.left;
  tokenizer->tokens = zeroed(names.left, sizeof *tokenizer->tokens);
  from->names = zeroed(names.left, sizeof *from->names);
  size_t bytes = 0;
  for (qkv_gguf_array at = names; at.left > 0;) bytes += qkv_gguf_next_string(&at).bytes;
  uint8_t *next = tokenizer->data = zeroed(bytes, 1);
  for (int32_t i = 0; i < tokenizer->vocabulary; i++) {
    QKV_TRY(read_token(from, i, qkv_gguf_next_string(&names), qkv_gguf_next_int32(&types), &next));
  }
  return QKV_OK;
}

// The token that an entry names; -1 where there is none.
static qkv_status read_id(const loader *from, const char *key, int32_t *id) {
  *id = -1;
  if (!qkv_gguf_has(from->file, key)) return QKV_OK;
  int64_t value = 0;
  QKV_TRY(qkv_gguf_integer(from->file, key, 0, from->tokenizer->vocabulary - 1, &value, from->error));
  *id = (int32_t)value;
  return QKV_OK;
}

static qkv_status find_bytes(loader *from) {
  qkvi_tokenizer *tokenizer = from->tokenizer;
  int32_t unknown = -1;
  QKV_TRY(read_id(from, "tokenizer.ggml.unknown_token_id", &unknown));
  for (int i = 0; i < QKVI_TOKENIZER_BYTES; i++) tokenizer->of_byte[i] = unknown;
  for (int32_t i = tokenizer->vocabulary - 1; i >= 0; i--) {
    const qkvi_token *token = &tokenizer->tokens[i];
    if (token->bytes == 1 && !token->control) tokenizer->of_byte[token->data[0]] = i;
  }
  for (int i = 0; i < QKVI_TOKENIZER_BYTES; i++) {
    if (tokenizer->of_byte[i] >= 0) continue;
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT,
                    "tokenizer.ggml.tokens has none for byte 0x%02x, and there is no tokenizer.ggml.unknown_token_id",
                    (unsigned)i);
  }
  return QKV_OK;
}

static int longer_first(const void *left, const void *right, void *context) {
  const qkvi_token *tokens = context;
  const uint32_t a = tokens[*(const int32_t *)left].bytes, b = tokens[*(const int32_t *)right].bytes;
  return (a < b) - (a > b);
}

static void list_controls(qkvi_tokenizer *tokenizer) {
  tokenizer->controls = zeroed((size_t)tokenizer->vocabulary, sizeof *tokenizer->controls);
  for (int32_t i = 0; i < tokenizer->vocabulary; i++) {
    if (!tokenizer->tokens[i].control || tokenizer->tokens[i].bytes == 0) continue;
    tokenizer->controls[tokenizer->control_count++] = i;
  }
  qsort_r(tokenizer->controls, (size_t)tokenizer->control_count, sizeof *tokenizer->controls, longer_first,
          tokenizer->tokens);
}

// ---- Merges ----

// "left right", as the file spells them.
static qkv_status read_merge(loader *from, uint64_t index, qkv_gguf_text text) {
  const char *blank = text.bytes > 0 ? memchr(text.data, ' ', text.bytes) : NULL;
  int32_t left = -1, right = -1, merged = -1;
  if (blank != NULL && text.bytes <= MERGE_BYTES_MAX) {
    const size_t left_bytes = (size_t)(blank - text.data), right_bytes = text.bytes - left_bytes - 1;
    char both[MERGE_BYTES_MAX];
    memcpy(both, text.data, left_bytes);
    memcpy(both + left_bytes, blank + 1, right_bytes);
    left = find(from, text.data, left_bytes);
    right = find(from, blank + 1, right_bytes);
    merged = find(from, both, left_bytes + right_bytes);
  }
  if (left < 0 || right < 0 || merged < 0) {
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT,
                    "tokenizer.ggml.merges[%" PRIu64 "] is \"%.*s\", no two tokens that make a third", index,
                    (int)(text.bytes < SHOWN ? text.bytes : SHOWN), text.data);
  }
  qkvi_merges_add(from->tokenizer->merges, left, right, merged);
  return QKV_OK;
}

static qkv_status read_merges(loader *from) {
  qkv_gguf_array merges;
  QKV_TRY(qkv_gguf_array_of(from->file, "tokenizer.ggml.merges", QKV_GGUF_STRING, &merges, from->error));
  if (merges.left > VOCABULARY_MAX) {
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT, "there are %" PRIu64 " tokenizer.ggml.merges, at most %d",
                    merges.left, VOCABULARY_MAX);
  }
  from->tokenizer->merges = qkvi_merges_create(merges.left);
  for (uint64_t i = 0; merges.left > 0; i++) QKV_TRY(read_merge(from, i, qkv_gguf_next_string(&merges)));
  return QKV_OK;
}

// ---- Pieces, chat ----

static qkv_status compile_pieces(loader *from) {
  qkv_gguf_text name;
  QKV_TRY(qkv_gguf_string(from->file, "tokenizer.ggml.pre", &name, from->error));
  for (size_t i = 0; i < sizeof splits / sizeof *splits; i++) {
    if (!qkv_gguf_text_is(name, splits[i].name)) continue;
    int code = 0;
    PCRE2_SIZE at = 0;
    qkvi_tokenizer *tokenizer = from->tokenizer;
    tokenizer->pieces =
        pcre2_compile((PCRE2_SPTR)splits[i].pieces, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    assert(tokenizer->pieces != NULL);
    pcre2_jit_compile(tokenizer->pieces, PCRE2_JIT_COMPLETE);  // where the library has it; slower without
    tokenizer->match = pcre2_match_data_create_from_pattern(tokenizer->pieces, NULL);
    if (tokenizer->match == NULL) abort();
    return QKV_OK;
  }
  return qkv_fail(from->error, QKV_INVALID_ARGUMENT, "tokenizer.ggml.pre is \"%.*s\", known are smollm and gpt-2",
                  (int)(name.bytes < SHOWN ? name.bytes : SHOWN), name.data);
}

// Templates are programs. Of one that writes ChatML this much is read: the system message, where it has one.
static qkv_status read_chat(loader *from) {
  static const char key[] = "tokenizer.chat_template", start[] = "<|im_start|>", system[] = "<|im_start|>system\n";
  if (!qkv_gguf_has(from->file, key)) return QKV_OK;
  qkv_gguf_text text;
  QKV_TRY(qkv_gguf_string(from->file, key, &text, from->error));
  from->tokenizer->chat = memmem(text.data, text.bytes, start, strlen(start)) != NULL;
  const char *found = memmem(text.data, text.bytes, system, strlen(system));
  if (found == NULL) return QKV_OK;
  found += strlen(system);
  const char *end = memmem(found, text.bytes - (size_t)(found - text.data), "<|im_end|>", strlen("<|im_end|>"));
  if (end == NULL) return QKV_OK;
  from->tokenizer->system = strndup(found, (size_t)(end - found));
  if (from->tokenizer->system == NULL) abort();
  return QKV_OK;
}

static qkv_status expect_gpt2(const loader *from) {
  qkv_gguf_text model;
  QKV_TRY(qkv_gguf_string(from->file, "tokenizer.ggml.model", &model, from->error));
  if (!qkv_gguf_text_is(model, "gpt2")) {
    return qkv_fail(from->error, QKV_INVALID_ARGUMENT, "tokenizer.ggml.model is \"%.*s\", this program runs \"gpt2\"",
                    (int)(model.bytes < SHOWN ? model.bytes : SHOWN), model.data);
  }
  int64_t begin = 0;
  if (qkv_gguf_has(from->file, "tokenizer.ggml.add_bos_token")) {
    QKV_TRY(qkv_gguf_integer(from->file, "tokenizer.ggml.add_bos_token", 0, 1, &begin, from->error));
  }
  if (begin == 0) return QKV_OK;
  return qkv_fail(from->error, QKV_INVALID_ARGUMENT,
                  "tokenizer.ggml.add_bos_token is set, this program runs models without it");
}

static qkv_status read_all(loader *from) {
  fill_bytes(from);
  QKV_TRY(expect_gpt2(from));
  QKV_TRY(read_tokens(from));
  QKV_TRY(find_bytes(from));
  list_controls(from->tokenizer);
  QKV_TRY(read_merges(from));
  QKV_TRY(compile_pieces(from));
  return read_chat(from);
}

qkv_status qkvi_tokenizer_gguf(const qkv_gguf *file, qkvi_tokenizer **tokenizer, qkv_error *error) {
  loader from = {.file = file, .tokenizer = zeroed(1, sizeof *from.tokenizer), .error = error};
  const qkv_status status = read_all(&from);
  HASH_CLEAR(hh, from.table);
  free(from.names);
  if (status != QKV_OK) qkvi_tokenizer_destroy(&from.tokenizer);
  *tokenizer = from.tokenizer;
  return status;
}
