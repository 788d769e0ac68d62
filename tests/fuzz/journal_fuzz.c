// storage/journal.h: recovery takes any bytes for a journal, piece by piece; entries come in ascending order.
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "storage/journal.h"
#include "tests/fuzz/fuzz.h"

typedef struct told {
  uint64_t size, last, sum;
} told;

// A piece of its own for every call, so that a sanitizer sees what is looked at too long or too far.
typedef struct pieces {
  const uint8_t *bytes;
  uint64_t size;
  uint8_t *piece;
} pieces;

static const uint8_t *at(void *context, uint64_t offset, uint64_t size) {
  pieces *on = context;
  if (offset % QKV_STORAGE_BLOCK != 0 || size % QKV_STORAGE_BLOCK != 0 || offset > on->size ||
      size > on->size - offset)
    __builtin_trap();
  free(on->piece);
  on->piece = aligned_alloc(QKV_STORAGE_BLOCK, size);
  if (on->piece == NULL) abort();
  memcpy(on->piece, on->bytes + offset, size);
  return on->piece;
}

static void tell(void *context, const qkv_journal_entry *entry) {
  told *all = context;
  const uint8_t *payload = entry->payload;
  if (entry->sequence <= all->last) __builtin_trap();
  if (entry->bytes > all->size) __builtin_trap();
  for (uint64_t i = 0; i < entry->bytes; i++) all->sum += payload[i];
  for (uint64_t i = 0; i < entry->layers; i++) all->sum += entry->positions[i];
  all->last = entry->sequence;
}

static void scan(const uint8_t *bytes, uint64_t size) {
  static const uint64_t seen[] = {0, UINT64_C(1) << QKVI_EPOCH_SHIFT | 3};
  pieces on = {.bytes = bytes, .size = size};
  const qkvi_journal_source source = {.context = &on, .size = size, .at = at};
  for (size_t i = 0; i < 2; i++) {
    told all = {.size = size};
    qkvi_journal_header header;
    qkvi_journal_report report = {0};
    qkv_error error = {0};
    uint64_t durable;
    qkv_status status = qkvi_journal_header_read(&source, &header, &error);
    if (status == QKV_OK) status = qkvi_journal_durable(&source, &header, seen[i], &durable, &error);
    if (status == QKV_OK) status = qkvi_journal_scan(&source, &header, durable, tell, &all, &report, &error);
    if (status != QKV_OK && error.text[0] == '\0') __builtin_trap();
    if (status == QKV_OK && (report.end > size || report.last < all.last)) __builtin_trap();
  }
  free(on.piece);
}

// What is written anew is read block by block.
static void walk(const uint8_t *bytes, uint64_t size) {
  if (size < 2 * (uint64_t)QKV_STORAGE_BLOCK) return;
  const qkvi_journal_header *header = (const qkvi_journal_header *)bytes;
  qkvi_journal_walk on;
  uint64_t entries = 0;
  qkvi_journal_walk_init(&on, header->store, header->epoch);
  const uint64_t first = on.next;
  while (on.offset < size && qkvi_journal_walk_block(&on, bytes + on.offset)) {
    entries += on.first ? 1 : 0;
    if (on.used > QKV_STORAGE_BLOCK || on.left > QKV_JOURNAL_PAYLOAD_MAX) __builtin_trap();
  }
  if (on.next - first < entries) __builtin_trap();
  qkvi_journal_walk_deinit(&on);
}

// A fuzzer does not guess checksums: they are put right.
static void seal(uint8_t *bytes, uint64_t size) {
  const uint64_t store = size >= QKV_STORAGE_BLOCK ? ((qkvi_journal_header *)bytes)->store : 0;
  for (uint64_t at = 0; at + QKV_STORAGE_BLOCK <= size; at += QKV_STORAGE_BLOCK) {
    qkvi_entry_header *entry = (qkvi_entry_header *)(bytes + at);
    qkvi_journal_header *header = (qkvi_journal_header *)(bytes + at);
    if (entry->magic == QKVI_ENTRY_MAGIC) {
      entry->offset = at;
      if (entry->payload_bytes <= size - at - sizeof *entry) {
        entry->payload_hash = XXH3_64bits(entry + 1, entry->payload_bytes);
      }
      entry->header_hash = XXH3_64bits_withSeed(entry, offsetof(qkvi_entry_header, header_hash), store);
    } else if (header->magic == QKVI_JOURNAL_MAGIC) {
      header->hash = XXH3_64bits(header, offsetof(qkvi_journal_header, hash));
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const size_t whole = size / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
  uint8_t *bytes = aligned_alloc(QKV_STORAGE_BLOCK, whole + QKV_STORAGE_BLOCK);
  if (bytes == NULL) abort();
  memcpy(bytes, data, whole);
  scan(bytes, whole);
  walk(bytes, whole);
  seal(bytes, whole);
  scan(bytes, whole);
  walk(bytes, whole);
  free(bytes);
  return 0;
}
