#include "engine/cache/session_tokens.h"

#include <assert.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/accounts.h"

enum { PAGE = QKV_PREFIX_PAGE };

// One full page. Nothing changes in it while there are references.
struct qkvi_token_chunk {
  _Atomic uint64_t references;
  qkvi_token_chunk *before;  // one reference; NULL: this is the first page
  qkv_prefix_hash hash;
  bool has_ids;
  uint32_t ids[];  // PAGE of them, or none
};

// ---- Chunks ----

static size_t chunk_bytes(bool has_ids) {
  return sizeof(qkvi_token_chunk) + (has_ids ? PAGE * sizeof(uint32_t) : 0);
}

qkvi_token_chunk *qkvi_token_chunk_ref(qkvi_token_chunk *chunk) {
  if (chunk != NULL) (void)atomic_fetch_add_explicit(&chunk->references, 1, memory_order_relaxed);
  return chunk;
}

// Frees chunks that nothing else refers to, from the last one on.
void qkvi_token_chunk_unref(qkv_arena *arena, qkvi_token_chunk *chunk) {
  while (chunk != NULL) {
    // What others did with it happens before it is freed.
    const uint64_t references = atomic_fetch_sub_explicit(&chunk->references, 1, memory_order_acq_rel);
    assert(references > 0);
    if (references > 1) return;
    qkvi_token_chunk *before = chunk->before;
    qkv_arena_free(arena, chunk, chunk_bytes(chunk->has_ids));
    chunk = before;
  }
}

// ---- Life ----

static void lock(qkv_session_tokens *tokens) {
  int failed = pthread_mutex_lock(&tokens->lock);
  assert(failed == 0);
}

static void unlock(qkv_session_tokens *tokens) {
  int failed = pthread_mutex_unlock(&tokens->lock);
  assert(failed == 0);
}

void qkv_session_tokens_init(qkv_session_tokens *tokens, const qkv_session_tokens_config *config) {
  *tokens = (qkv_session_tokens){.config = *config};
  int failed = pthread_mutex_init(&tokens->lock, NULL);
  assert(failed == 0);
}

void qkv_session_tokens_give_open(qkv_session_tokens *tokens, uint32_t *open) {
  lock(tokens);
  tokens->open = open;
  unlock(tokens);
}

void qkv_session_tokens_deinit(qkv_session_tokens *tokens) {
  qkv_session_tokens_close(tokens);
  qkvi_token_chunk_unref(tokens->config.arena, tokens->last);
  (void)pthread_mutex_destroy(&tokens->lock);
}

void qkv_session_tokens_close(qkv_session_tokens *tokens) {
  lock(tokens);
  tokens->closed = true;
  qkv_prefix_index_drop(tokens->config.index, tokens->holder);
  tokens->holder = 0;
  unlock(tokens);
}

// ---- Appends ----

static uint64_t full_pages(const qkv_session_tokens *tokens) {
  return tokens->length / PAGE;
}

static qkv_status differ(uint64_t position, uint32_t held, uint64_t from, uint32_t id, qkv_error *error) {
  return qkv_fail(error, QKV_ALREADY_EXISTS,
                  "position %" PRIu64 " has token id %" PRIu32 ", token_ids[%" PRIu64 "] is %" PRIu32, position, held,
                  position - from, id);
}

// Compares `ids`, which begin at `from`, with those of a page that begins at `begin`. The first difference is kept.
static qkv_status compare(const uint32_t *held, uint64_t begin, size_t held_count, uint64_t from, const uint32_t *ids,
                          size_t count, qkv_error *error) {
  const uint64_t first = from > begin ? from : begin;
  const uint64_t end = begin + held_count < from + count ? begin + held_count : from + count;
  for (uint64_t p = first; p < end; p++) {
    if (held[p - begin] != ids[p - from]) return differ(p, held[p - begin], from, ids[p - from], error);
  }
  return QKV_OK;
}

// From the last page down, so the difference that is named is one of the last page that has any.
static qkv_status check_locked(const qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                               qkv_error *error) {
  uint64_t begin = full_pages(tokens) * PAGE;
  QKV_TRY(compare(tokens->open, begin, tokens->length % PAGE, position, ids, count, error));
  for (const qkvi_token_chunk *chunk = tokens->last; chunk != NULL && begin > position; chunk = chunk->before) {
    begin -= PAGE;
    if (chunk->has_ids) QKV_TRY(compare(chunk->ids, begin, PAGE, position, ids, count, error));
  }
  return QKV_OK;
}

qkv_status qkv_session_tokens_check(qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                                    qkv_error *error) {
  lock(tokens);
  const qkv_status status = check_locked(tokens, position, ids, count, error);
  unlock(tokens);
  return status;
}

uint64_t qkv_session_tokens_cost(qkv_session_tokens *tokens, uint64_t position, size_t count) {
  lock(tokens);
  const uint64_t end = position + count;
  const bool continues = position <= tokens->length && end > tokens->length;
  const uint64_t pages = continues ? end / PAGE - full_pages(tokens) : 0;
  unlock(tokens);
  return pages * qkv_arena_cost(chunk_bytes(true));
}

// What stands for the pages before the next one.
static const qkv_prefix_hash *last_hash(const qkv_session_tokens *tokens) {
  return tokens->last != NULL ? &tokens->last->hash : &tokens->config.root;
}

static void attach(qkv_session_tokens *tokens) {
  const qkv_session_tokens_config *config = &tokens->config;
  tokens->holder =
      qkv_prefix_index_attach(config->index, &config->root, config->owner, qkv_account_of(config->arena));
}

// The last chunk, which is page number `page`, goes into the index.
static void index_page(qkv_session_tokens *tokens, uint64_t page) {
  if (tokens->config.index == NULL || tokens->closed) return;
  if (tokens->holder == 0 && page == 0) attach(tokens);
  const qkvi_token_chunk *chunk = tokens->last;
  (void)qkv_prefix_index_extend(tokens->config.index, tokens->holder, page, &chunk->hash,
                                chunk->has_ids ? chunk->ids : NULL);
}

// `chunk` is the page behind the full ones, which is to be indexed once `length` covers it.
static void put_chunk(qkv_session_tokens *tokens, qkvi_token_chunk *chunk, const qkv_prefix_hash *hash,
                      bool has_ids) {
  atomic_init(&chunk->references, 1);
  chunk->before = tokens->last;
  chunk->hash = *hash;
  chunk->has_ids = has_ids;
  tokens->last = chunk;
}

// The open page is full but for one id at the most.
static void close_page(qkv_session_tokens *tokens) {
  const qkv_prefix_hash hash = qkv_prefix_next(last_hash(tokens), tokens->open);
  qkvi_token_chunk *chunk = qkv_arena_alloc(tokens->config.arena, chunk_bytes(true));
  memcpy(chunk->ids, tokens->open, PAGE * sizeof *chunk->ids);
  put_chunk(tokens, chunk, &hash, true);
}

// False where the id completes a page that nothing is reserved for.
static bool push(qkv_session_tokens *tokens, uint32_t id, uint64_t *reserved) {
  const uint64_t cost = qkv_arena_cost(chunk_bytes(true)), page = full_pages(tokens);
  const bool completes = tokens->length % PAGE == PAGE - 1;
  if (completes && *reserved < cost) return false;
  tokens->open[tokens->length % PAGE] = id;
  if (completes) {
    close_page(tokens);
    *reserved -= cost;
    index_page(tokens, page);
  }
  tokens->length++;
  return true;
}

uint64_t qkv_session_tokens_cuts(qkv_session_tokens *tokens) {
  lock(tokens);
  const uint64_t cuts = tokens->cuts;
  unlock(tokens);
  return cuts;
}

void qkv_session_tokens_keep(qkv_session_tokens *tokens, uint64_t cuts, uint64_t position, const uint32_t *ids,
                             size_t count, uint64_t *reserved) {
  assert(tokens->open != NULL);
  lock(tokens);
  const bool continues = cuts == tokens->cuts && position <= tokens->length &&
                         check_locked(tokens, position, ids, count, NULL) == QKV_OK;
  while (continues && tokens->length < position + count && push(tokens, ids[tokens->length - position], reserved)) {
  }
  unlock(tokens);
}

// Only the first `pages` stay; the open page is empty afterwards.
static void drop_pages(qkv_session_tokens *tokens, uint64_t pages) {
  qkvi_token_chunk *left = tokens->last;
  for (uint64_t i = full_pages(tokens); i > pages; i--) left = left->before;
  (void)qkvi_token_chunk_ref(left);
  qkvi_token_chunk_unref(tokens->config.arena, tokens->last);
  tokens->last = left;
  tokens->length = pages * PAGE;
}

// The page that `position` lies in, of which the beginning stays, becomes the open one.
static void cut_page(qkv_session_tokens *tokens, uint64_t position) {
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t i = full_pages(tokens); i > position / PAGE + 1; i--) chunk = chunk->before;
  const bool has_ids = chunk->has_ids;
  assert(!has_ids || tokens->open != NULL);
  if (has_ids) memcpy(tokens->open, chunk->ids, PAGE * sizeof *chunk->ids);
  drop_pages(tokens, position / PAGE);
  if (has_ids) tokens->length = position;
}

static void truncate_locked(qkv_session_tokens *tokens, uint64_t position) {
  if (position / PAGE >= full_pages(tokens)) {
    tokens->length = position;
  } else if (position % PAGE == 0) {
    drop_pages(tokens, position / PAGE);
  } else {
    cut_page(tokens, position);
  }
  qkv_prefix_index_shorten(tokens->config.index, tokens->holder, full_pages(tokens));
}

void qkv_session_tokens_truncate(qkv_session_tokens *tokens, uint64_t position) {
  lock(tokens);
  tokens->cuts++;
  if (position < tokens->length) truncate_locked(tokens, position);
  unlock(tokens);
}

// ---- Forks, and sessions found again ----

// Of the pages [first, end) those that are held, from the last one down.
static void held_hashes(const qkv_session_tokens *tokens, uint64_t first, uint64_t end, qkv_prefix_hash *hashes) {
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t i = full_pages(tokens); i > first; i--, chunk = chunk->before) {
    if (i <= end) hashes[i - 1 - first] = chunk->hash;
  }
}

// The full pages go into the index, as far as it has capacity.
static void index_pages(qkv_session_tokens *tokens) {
  const uint64_t pages = full_pages(tokens);
  if (tokens->config.index == NULL || pages == 0) return;
  qkv_prefix_hash *hashes = malloc((size_t)pages * sizeof *hashes);
  if (hashes == NULL) abort();
  held_hashes(tokens, 0, pages, hashes);
  attach(tokens);
  uint64_t done = 0;
  while (done < pages && qkv_prefix_index_extend(tokens->config.index, tokens->holder, done, &hashes[done], NULL))
    done++;
  free(hashes);
}

void qkv_session_tokens_fork(qkv_session_tokens *of, uint64_t position, qkv_session_tokens *fork) {
  assert(of->config.arena == fork->config.arena && of->config.index == fork->config.index);
  assert(qkv_prefix_hash_equal(&of->config.root, &fork->config.root) && fork->length == 0);
  lock(of);
  lock(fork);  // no other thread can have it locked: no other order is taken
  fork->last = qkvi_token_chunk_ref(of->last);
  fork->length = of->length;
  if (of->open != NULL && fork->open != NULL) memcpy(fork->open, of->open, PAGE * sizeof *fork->open);
  fork->holder = qkv_prefix_index_fork(of->config.index, of->holder, position / PAGE, fork->config.owner);
  const bool closed = of->closed;
  unlock(of);
  if (position < fork->length) truncate_locked(fork, position);
  if (closed) index_pages(fork);
  unlock(fork);
}

qkv_status qkv_session_tokens_recover(qkv_session_tokens *tokens, const qkv_prefix_hash *hash, qkv_error *error) {
  const size_t bytes = chunk_bytes(false);
  QKV_TRY(qkv_arena_reserve(tokens->config.arena, qkv_arena_cost(bytes), error));
  lock(tokens);
  const uint64_t length = tokens->length;
  if (length % PAGE == 0) {
    put_chunk(tokens, qkv_arena_alloc(tokens->config.arena, bytes), hash, false);
    index_page(tokens, length / PAGE);
    tokens->length += PAGE;
  }
  unlock(tokens);
  if (length % PAGE == 0) return QKV_OK;
  qkv_arena_unreserve(tokens->config.arena, qkv_arena_cost(bytes));
  return qkv_fail(error, QKV_FAILED_PRECONDITION, "%" PRIu64 " token ids are held, a page begins at multiples of %d",
                  length, PAGE);
}

// ---- Folding ----

typedef struct packed_chunk {
  qkv_prefix_hash hash;
  uint64_t has_ids;
} packed_chunk;

enum { CHUNK_IDS_BYTES = PAGE * sizeof(uint32_t) };

static size_t packed_chunk_bytes(bool has_ids) {
  return sizeof(packed_chunk) + (has_ids ? CHUNK_IDS_BYTES : 0);
}

// A page that others have is kept with those before it.
qkvi_token_chunk *qkv_session_tokens_shared(qkv_session_tokens *tokens, uint64_t *pages) {
  lock(tokens);
  qkvi_token_chunk *chunk = tokens->last;
  *pages = full_pages(tokens);
  for (; chunk != NULL && atomic_load(&chunk->references) == 1; chunk = chunk->before) --*pages;
  unlock(tokens);
  return chunk;
}

void qkv_session_tokens_adopt(qkv_session_tokens *tokens, qkvi_token_chunk *chunk, uint64_t pages) {
  lock(tokens);
  assert(tokens->last == NULL && tokens->length == 0);
  tokens->last = qkvi_token_chunk_ref(chunk);
  tokens->length = pages * PAGE;
  unlock(tokens);
}

uint64_t qkv_session_tokens_packed_bytes(qkv_session_tokens *tokens, uint64_t first) {
  lock(tokens);
  uint64_t bytes = tokens->length % PAGE * sizeof(uint32_t);
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t page = full_pages(tokens); page > first; page--, chunk = chunk->before)
    bytes += packed_chunk_bytes(chunk->has_ids);
  unlock(tokens);
  return bytes;
}

uint64_t qkv_session_tokens_held_cost(qkv_session_tokens *tokens, uint64_t first) {
  lock(tokens);
  uint64_t bytes = 0;
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t page = full_pages(tokens); page > first; page--, chunk = chunk->before)
    bytes += qkv_arena_cost(chunk_bytes(chunk->has_ids));
  unlock(tokens);
  return bytes;
}

uint64_t qkv_session_tokens_cost_most(uint64_t length) {
  return length / PAGE * qkv_arena_cost(chunk_bytes(true));
}

// Chunks are linked from the last one on: they are written from the end.
uint8_t *qkv_session_tokens_pack(qkv_session_tokens *tokens, uint64_t first, uint8_t *out) {
  const uint64_t bytes = qkv_session_tokens_packed_bytes(tokens, first);
  lock(tokens);
  const size_t open_bytes = tokens->length % PAGE * sizeof(uint32_t);
  uint8_t *end = out + bytes;
  if (open_bytes > 0) memcpy(end - open_bytes, tokens->open, open_bytes);
  uint8_t *at = end - open_bytes;
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t page = full_pages(tokens); page > first; page--, chunk = chunk->before) {
    const packed_chunk packed = {.hash = chunk->hash, .has_ids = chunk->has_ids};
    at -= packed_chunk_bytes(chunk->has_ids);
    memcpy(at, &packed, sizeof packed);
    if (chunk->has_ids) memcpy(at + sizeof packed, chunk->ids, CHUNK_IDS_BYTES);
  }
  assert(at == out);
  unlock(tokens);
  return end;
}

void qkv_session_tokens_attach(qkv_session_tokens *tokens, qkv_prefix_holder holder, bool closed) {
  lock(tokens);
  assert(tokens->holder == 0);
  tokens->holder = holder;
  tokens->closed = closed;
  unlock(tokens);
}

size_t qkv_session_tokens_indexed(qkv_session_tokens *tokens, qkv_prefix_hash *hashes, size_t max) {
  lock(tokens);
  const size_t count = qkv_prefix_index_hashes(tokens->config.index, tokens->holder, hashes, max);
  unlock(tokens);
  return count;
}

bool qkv_session_tokens_are_packed(const uint8_t *bytes, uint64_t count, uint64_t length) {
  packed_chunk packed;
  for (uint64_t page = 0; page < length / PAGE; page++) {
    if (count < sizeof packed) return false;
    memcpy(&packed, bytes, sizeof packed);
    if (packed.has_ids > 1 || count < packed_chunk_bytes(packed.has_ids)) return false;
    bytes += packed_chunk_bytes(packed.has_ids);
    count -= packed_chunk_bytes(packed.has_ids);
  }
  return count == length % PAGE * sizeof(uint32_t);
}

void qkv_session_tokens_unpack(qkv_session_tokens *tokens, const uint8_t *bytes, uint64_t length) {
  packed_chunk packed;
  lock(tokens);
  assert(tokens->length % PAGE == 0 && tokens->open != NULL);
  for (uint64_t page = 0; page < length / PAGE; page++) {
    memcpy(&packed, bytes, sizeof packed);
    qkvi_token_chunk *chunk = qkv_arena_alloc(tokens->config.arena, chunk_bytes(packed.has_ids));
    if (packed.has_ids) memcpy(chunk->ids, bytes + sizeof packed, CHUNK_IDS_BYTES);
    put_chunk(tokens, chunk, &packed.hash, packed.has_ids);
    bytes += packed_chunk_bytes(packed.has_ids);
  }
  memcpy(tokens->open, bytes, length % PAGE * sizeof(uint32_t));
  tokens->length += length;
  unlock(tokens);
}

// ---- Looking ----

uint64_t qkv_session_tokens_length(qkv_session_tokens *tokens) {
  lock(tokens);
  const uint64_t length = tokens->length;
  unlock(tokens);
  return length;
}

bool qkv_session_tokens_hash(qkv_session_tokens *tokens, uint64_t page, qkv_prefix_hash *hash) {
  lock(tokens);
  const uint64_t pages = full_pages(tokens);
  const qkvi_token_chunk *chunk = tokens->last;
  for (uint64_t i = pages; i > page + 1 && chunk != NULL; i--) chunk = chunk->before;
  const bool full = page < pages && chunk != NULL;
  if (full) *hash = chunk->hash;
  unlock(tokens);
  return full;
}

size_t qkv_session_tokens_hashes(qkv_session_tokens *tokens, qkv_prefix_hash *hashes, size_t max) {
  lock(tokens);
  const uint64_t pages = full_pages(tokens), count = pages < max ? pages : max;
  held_hashes(tokens, 0, count, hashes);
  unlock(tokens);
  return (size_t)count;
}

size_t qkv_session_tokens_read_pages(qkv_session_tokens *tokens, uint64_t first, size_t max, qkv_prefix_hash *hashes,
                                     uint32_t *ids) {
  lock(tokens);
  const qkvi_token_chunk *chunk = tokens->last;
  const uint64_t pages = full_pages(tokens);
  uint64_t end = pages > first && pages - first > max ? first + max : pages;
  for (uint64_t page = pages; page > first; page--, chunk = chunk->before) {
    if (page > end) continue;
    hashes[page - first] = chunk->hash;
    if (chunk->has_ids)
      memcpy(ids + (page - 1 - first) * PAGE, chunk->ids, PAGE * sizeof *ids);
    else
      end = page - 1;
  }
  if (end > first) hashes[0] = chunk != NULL ? chunk->hash : tokens->config.root;
  unlock(tokens);
  return end > first ? (size_t)(end - first) : 0;
}

size_t qkv_session_tokens_read_packed(const uint8_t *bytes, uint64_t length, uint64_t from, uint64_t first,
                                      size_t max, qkv_prefix_hash *hashes, uint32_t *ids) {
  packed_chunk packed;
  size_t count = 0;
  for (uint64_t page = from; page < from + length / PAGE && count < max; page++) {
    memcpy(&packed, bytes, sizeof packed);
    if (page + 1 == first) hashes[0] = packed.hash;
    if (page >= first) {
      if (!packed.has_ids) break;
      memcpy(ids + count * PAGE, bytes + sizeof packed, CHUNK_IDS_BYTES);
      hashes[++count] = packed.hash;
    }
    bytes += packed_chunk_bytes(packed.has_ids);
  }
  return count;
}

// The ids of a page that is not full yet, together with those that follow.
static void gather_page(const qkv_session_tokens *tokens, uint64_t page, uint64_t position, const uint32_t *ids,
                        uint32_t *gathered) {
  for (uint64_t p = page * PAGE; p < (page + 1) * PAGE; p++) {
    gathered[p % PAGE] = p < tokens->length ? tokens->open[p % PAGE] : ids[p - position];
  }
}

static size_t chain_locked(const qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                           qkv_prefix_hash *hashes) {
  const uint64_t first = position / PAGE, full = full_pages(tokens), end = (position + count) / PAGE;
  if (position > tokens->length) return 0;
  held_hashes(tokens, first, end, hashes);
  qkv_prefix_hash last = *last_hash(tokens);
  for (uint64_t page = full; page < end; page++) {
    uint32_t gathered[PAGE];
    gather_page(tokens, page, position, ids, gathered);
    last = qkv_prefix_next(&last, gathered);
    hashes[page - first] = last;
  }
  return (size_t)(end - first);
}

size_t qkv_session_tokens_chain(qkv_session_tokens *tokens, uint64_t position, const uint32_t *ids, size_t count,
                                qkv_prefix_hash *hashes) {
  lock(tokens);
  const size_t pages = chain_locked(tokens, position, ids, count, hashes);
  unlock(tokens);
  return pages;
}

// Copies what a page that begins at `begin` has of the positions [position, end).
static void read_page(const uint32_t *held, uint64_t begin, uint64_t position, uint64_t end, uint32_t *out) {
  const uint64_t first = begin > position ? begin : position, behind = begin + PAGE < end ? begin + PAGE : end;
  if (first < behind)
    memcpy(out + (first - position), held + (first - begin), (size_t)(behind - first) * sizeof *out);
}

size_t qkv_session_tokens_read(qkv_session_tokens *tokens, uint64_t position, uint32_t *out, size_t max) {
  lock(tokens);
  uint64_t begin = full_pages(tokens) * PAGE;
  uint64_t end = tokens->length > position && tokens->length - position > max ? position + max : tokens->length;
  if (end > begin) read_page(tokens->open, begin, position, end, out);
  for (const qkvi_token_chunk *chunk = tokens->last; chunk != NULL && begin > position; chunk = chunk->before) {
    begin -= PAGE;
    if (begin >= end) continue;
    if (chunk->has_ids) {
      read_page(chunk->ids, begin, position, end, out);
    } else {
      end = begin;
    }
  }
  unlock(tokens);
  return end > position ? (size_t)(end - position) : 0;
}
