#include "storage/journal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

uint64_t qkvi_entry_extent(uint64_t payload_bytes) {
  return (sizeof(qkvi_entry_header) + payload_bytes + QKV_STORAGE_BLOCK - 1) / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
}

void qkvi_journal_header_make(uint8_t *out, uint64_t store, uint64_t epoch, uint64_t durable) {
  qkvi_journal_header *header = (qkvi_journal_header *)out;
  *header = (qkvi_journal_header){.magic = QKVI_JOURNAL_MAGIC,
                                  .version = QKVI_JOURNAL_VERSION,
                                  .store = store,
                                  .epoch = epoch,
                                  .durable = durable};
  header->hash = XXH3_64bits(header, offsetof(qkvi_journal_header, hash));
  memcpy(out + sizeof *header, header, sizeof *header);
}

static uint64_t hash_of(const qkvi_entry_header *header, uint64_t store) {
  return XXH3_64bits_withSeed(header, offsetof(qkvi_entry_header, header_hash), store);
}

void qkvi_entry_make(uint8_t *out, const qkv_journal_entry *entry, uint64_t store, uint64_t durable,
                     uint64_t offset) {
  assert(entry->bytes <= QKV_JOURNAL_PAYLOAD_MAX);
  const uint64_t extent = qkvi_entry_extent(entry->bytes);
  qkvi_entry_header *header = (qkvi_entry_header *)out;
  *header = (qkvi_entry_header){.magic = QKVI_ENTRY_MAGIC,
                                .version = QKVI_JOURNAL_VERSION,
                                .kind = (uint16_t)entry->kind,
                                .layer = entry->layer,
                                .sequence = entry->sequence,
                                .durable = durable,
                                .session = entry->session,
                                .position = entry->position,
                                .watermark = entry->watermark,
                                .offset = offset,
                                .payload_bytes = entry->bytes,
                                .payload_hash = XXH3_64bits(entry->payload, entry->bytes)};
  header->header_hash = hash_of(header, store);
  if (entry->bytes > 0) memcpy(out + sizeof *header, entry->payload, entry->bytes);
  memset(out + sizeof *header + entry->bytes, 0, extent - sizeof *header - entry->bytes);
}

static bool header_good(const qkvi_journal_header *header) {
  return header->magic == QKVI_JOURNAL_MAGIC &&
         header->hash == XXH3_64bits(header, offsetof(qkvi_journal_header, hash));
}

static bool entry_good(const qkvi_entry_header *header, uint64_t store, uint64_t offset) {
  return header->magic == QKVI_ENTRY_MAGIC && header->header_hash == hash_of(header, store) &&
         header->version == QKVI_JOURNAL_VERSION && header->offset == offset && header->sequence != 0 &&
         header->payload_bytes <= QKV_JOURNAL_PAYLOAD_MAX;
}

typedef enum entry_state { NO_ENTRY, BAD_PAYLOAD, GOOD_ENTRY } entry_state;

static entry_state look_at(const uint8_t *bytes, uint64_t size, uint64_t offset, uint64_t store) {
  const qkvi_entry_header *header = (const qkvi_entry_header *)(bytes + offset);
  if (!entry_good(header, store, offset)) return NO_ENTRY;
  if (qkvi_entry_extent(header->payload_bytes) > size - offset) return BAD_PAYLOAD;
  const bool good = XXH3_64bits(header + 1, header->payload_bytes) == header->payload_hash;
  return good ? GOOD_ENTRY : BAD_PAYLOAD;
}

// The newest entry that is known to have been durable: nothing up to it can be missing by a crash alone.
static uint64_t find_durable(const uint8_t *bytes, uint64_t size, const qkvi_journal_header *header,
                             uint64_t journal_seen) {
  uint64_t durable = journal_seen >> QKVI_EPOCH_SHIFT == header->epoch ? journal_seen : 0;
  if (header->durable > durable) durable = header->durable;
  for (uint64_t offset = 2 * sizeof *header; size - offset >= QKV_STORAGE_BLOCK; offset += QKV_STORAGE_BLOCK) {
    const qkvi_entry_header *entry = (const qkvi_entry_header *)(bytes + offset);
    if (look_at(bytes, size, offset, header->store) != NO_ENTRY && entry->durable > durable) durable = entry->durable;
  }
  return durable;
}

static qkv_journal_entry view_of(const qkvi_entry_header *header) {
  return (qkv_journal_entry){.kind = (qkv_journal_kind)header->kind,
                             .layer = header->layer,
                             .sequence = header->sequence,
                             .session = header->session,
                             .position = header->position,
                             .watermark = header->watermark,
                             .payload = header + 1,
                             .bytes = header->payload_bytes};
}

qkv_status qkvi_journal_scan(const uint8_t *bytes, uint64_t size, uint64_t journal_seen,
                             void (*each)(void *context, const qkv_journal_entry *entry), void *context,
                             qkvi_journal_report *report, qkv_error *error) {
  *report = (qkvi_journal_report){0};
  if (size < 2 * sizeof(qkvi_journal_header)) return qkv_fail(error, QKV_DATA_LOSS, "the journal has no header");
  const qkvi_journal_header *header = (const qkvi_journal_header *)bytes;
  if (!header_good(header)) header++;
  if (!header_good(header)) return qkv_fail(error, QKV_DATA_LOSS, "both headers of the journal are damaged");
  if (header->version != QKVI_JOURNAL_VERSION) {
    return qkv_fail(error, QKV_DATA_LOSS, "the journal has version %u, known is %u", header->version,
                    QKVI_JOURNAL_VERSION);
  }
  *report = (qkvi_journal_report){.store = header->store, .epoch = header->epoch, .end = 2 * sizeof *header};
  const uint64_t durable = find_durable(bytes, size, header, journal_seen);
  uint64_t next = header->epoch << QKVI_EPOCH_SHIFT | 1;  // sequence of the entry that must come
  uint64_t offset = report->end;
  while (size - offset >= QKV_STORAGE_BLOCK) {
    const qkvi_entry_header *entry = (const qkvi_entry_header *)(bytes + offset);
    const entry_state state = look_at(bytes, size, offset, header->store);
    // Sequences are of the epoch that the file was begun in.
    if (state == NO_ENTRY || entry->sequence < next || entry->sequence >> QKVI_EPOCH_SHIFT != header->epoch) {
      offset += QKV_STORAGE_BLOCK;
      continue;
    }
    if (entry->sequence != next) {
      if (next > durable) break;  // a torn tail: nobody was told that this one is there
      report->bad++;
      report->lost_before = entry->sequence;
    }
    if (state == BAD_PAYLOAD) {
      if (entry->sequence > durable) break;
      report->bad++;
      // What is lost is known: a model, a calibration, or a session that is not opened. Only a note leaves an older
      // one in force.
      if (entry->kind == QKV_JOURNAL_SESSION_NOTE) report->lost_before = entry->sequence;
    } else {
      const qkv_journal_entry view = view_of(entry);
      each(context, &view);
      report->end = offset + qkvi_entry_extent(entry->payload_bytes);
    }
    report->last = entry->sequence;
    next = entry->sequence + 1;
    if (next == 0) break;
    offset += state == GOOD_ENTRY ? qkvi_entry_extent(entry->payload_bytes) : QKV_STORAGE_BLOCK;
  }
  if (next <= durable) {
    report->bad++;
    report->lost_before = UINT64_MAX;
  }
  return QKV_OK;
}

void qkvi_journal_walk_init(qkvi_journal_walk *walk, uint64_t store, uint64_t epoch) {
  *walk = (qkvi_journal_walk){.store = store,
                              .offset = 2 * sizeof(qkvi_journal_header),
                              .next = epoch << QKVI_EPOCH_SHIFT | 1,
                              .hash = XXH3_createState()};
  if (walk->hash == NULL) abort();
}

void qkvi_journal_walk_deinit(qkvi_journal_walk *walk) {
  (void)XXH3_freeState(walk->hash);
  walk->hash = NULL;
}

bool qkvi_journal_walk_block(qkvi_journal_walk *walk, const uint8_t *block) {
  const uint8_t *payload = block;
  uint64_t room = QKV_STORAGE_BLOCK;
  walk->first = walk->left == 0;
  if (walk->first) {
    const qkvi_entry_header *header = (const qkvi_entry_header *)block;
    if (!entry_good(header, walk->store, walk->offset) || header->sequence != walk->next) return false;
    walk->entry = view_of(header);
    walk->entry.payload = NULL;
    walk->next++;
    walk->left = header->payload_bytes;
    walk->payload_hash = header->payload_hash;
    (void)XXH3_64bits_reset(walk->hash);
    payload += sizeof *header;
    room -= sizeof *header;
  }
  const uint64_t bytes = walk->left < room ? walk->left : room;
  if (bytes > 0) (void)XXH3_64bits_update(walk->hash, payload, bytes);
  walk->used = (uint64_t)(payload - block) + bytes;
  walk->left -= bytes;
  walk->offset += QKV_STORAGE_BLOCK;
  return walk->left > 0 || XXH3_64bits_digest(walk->hash) == walk->payload_hash;
}

void qkvi_entry_renumber(uint8_t *block, uint64_t store, uint64_t sequence, uint64_t offset) {
  qkvi_entry_header *header = (qkvi_entry_header *)block;
  header->sequence = sequence;
  header->durable = 0;
  header->offset = offset;
  header->header_hash = hash_of(header, store);
}
