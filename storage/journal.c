#include "storage/journal.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

uint64_t qkvi_entry_extent(uint64_t payload_bytes) {
  return (sizeof(qkvi_entry_header) + payload_bytes + QKV_STORAGE_BLOCK - 1) / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
}

// In front of the caller's bytes.
typedef struct fork_head {
  uint64_t parent;
  uint32_t layers, zero;
} fork_head;

_Static_assert(sizeof(fork_head) == 16, "16 bytes without padding");

uint64_t qkvi_fork_bytes(uint32_t layers) {
  return sizeof(fork_head) + (uint64_t)layers * sizeof(uint64_t);
}

void qkvi_fork_make(uint8_t *out, const qkv_journal_entry *entry) {
  const fork_head head = {.parent = entry->parent, .layers = entry->layers};
  memcpy(out, &head, sizeof head);
  memcpy(out + sizeof head, entry->positions, entry->layers * sizeof *entry->positions);
  if (entry->bytes > 0) memcpy(out + qkvi_fork_bytes(entry->layers), entry->payload, entry->bytes);
}

qkv_journal_entry qkvi_entry_stored(const qkv_journal_entry *entry) {
  qkv_journal_entry stored = *entry;
  if (entry->kind != QKV_JOURNAL_SESSION_FORK) return stored;
  stored.payload = (const uint8_t *)entry->positions - sizeof(fork_head);
  stored.bytes += qkvi_fork_bytes(entry->layers);
  return stored;
}

// Reads the entry's fields from the beginning of a SESSION_FORK's payload. false: it is invalid.
static bool parse_fork(qkv_journal_entry *entry) {
  fork_head head;
  if (entry->kind != QKV_JOURNAL_SESSION_FORK) return true;
  if (entry->bytes < sizeof head) return false;
  memcpy(&head, entry->payload, sizeof head);
  if (head.zero != 0 || head.layers < 1 || head.layers > QKV_FORK_LAYERS_MAX ||
      entry->bytes < qkvi_fork_bytes(head.layers))
    return false;
  const uint8_t *payload = entry->payload;
  entry->parent = head.parent;
  entry->layers = head.layers;
  entry->positions = (const uint64_t *)(payload + sizeof head);  // the entry lies at a multiple of 4096
  entry->payload = payload + qkvi_fork_bytes(head.layers);
  entry->bytes -= qkvi_fork_bytes(head.layers);
  return true;
}

void qkvi_journal_header_make(uint8_t *out, uint64_t store, uint64_t epoch, uint64_t durable, bool forks) {
  qkvi_journal_header *header = (qkvi_journal_header *)out;
  *header = (qkvi_journal_header){.magic = QKVI_JOURNAL_MAGIC,
                                  .version = forks ? QKVI_JOURNAL_VERSION_FORKS : QKVI_JOURNAL_VERSION,
                                  .store = store,
                                  .epoch = epoch,
                                  .durable = durable};
  header->hash = XXH3_64bits(header, offsetof(qkvi_journal_header, hash));
  memcpy(out + sizeof *header, header, sizeof *header);
}

static uint64_t hash_of(const qkvi_entry_header *header, uint64_t store) {
  return XXH3_64bits_withSeed(header, offsetof(qkvi_entry_header, header_hash), store);
}

static uint64_t hash_of_payload(const qkv_journal_entry *entry) {
  if (entry->rest_bytes == 0) return XXH3_64bits(entry->payload, entry->bytes);
  XXH3_state_t *hash = XXH3_createState();
  if (hash == NULL) abort();
  (void)XXH3_64bits_reset(hash);
  (void)XXH3_64bits_update(hash, entry->payload, entry->bytes);
  (void)XXH3_64bits_update(hash, entry->rest, entry->rest_bytes);
  const uint64_t digest = XXH3_64bits_digest(hash);
  (void)XXH3_freeState(hash);
  return digest;
}

qkvi_entry_header qkvi_entry_header_make(const qkv_journal_entry *entry, uint64_t store, uint64_t durable,
                                         uint64_t offset) {
  assert(entry->bytes + entry->rest_bytes <= QKV_JOURNAL_PAYLOAD_MAX);
  qkvi_entry_header header = {.magic = QKVI_ENTRY_MAGIC,
                              .version = QKVI_JOURNAL_VERSION,
                              .kind = (uint16_t)entry->kind,
                              .layer = entry->layer,
                              .sequence = entry->sequence,
                              .durable = durable,
                              .session = entry->session,
                              .position = entry->position,
                              .watermark = entry->watermark,
                              .offset = offset,
                              .payload_bytes = entry->bytes + entry->rest_bytes,
                              .payload_hash = hash_of_payload(entry)};
  header.header_hash = hash_of(&header, store);
  return header;
}

// The part of `bytes`, which begin at `at` of an entry, that lies in [from, from + size).
static void copy_part(uint8_t *out, uint64_t from, uint64_t size, uint64_t at, const void *bytes, uint64_t length) {
  const uint64_t begin = from > at ? from : at, end = from + size < at + length ? from + size : at + length;
  if (begin < end) memcpy(out + (begin - from), (const uint8_t *)bytes + (begin - at), end - begin);
}

void qkvi_entry_copy(uint8_t *out, const qkvi_entry_header *header, const qkv_journal_entry *entry, uint64_t from,
                     uint64_t size) {
  const uint64_t rest = sizeof *header + entry->bytes, end = rest + entry->rest_bytes;
  assert(from + size <= qkvi_entry_extent(header->payload_bytes));
  copy_part(out, from, size, 0, header, sizeof *header);
  copy_part(out, from, size, sizeof *header, entry->payload, entry->bytes);
  copy_part(out, from, size, rest, entry->rest, entry->rest_bytes);
  const uint64_t zeros = end > from ? end - from : 0;
  if (zeros < size) memset(out + zeros, 0, size - zeros);
}

void qkvi_entry_make(uint8_t *out, const qkv_journal_entry *entry, uint64_t store, uint64_t durable,
                     uint64_t offset) {
  const qkvi_entry_header header = qkvi_entry_header_make(entry, store, durable, offset);
  qkvi_entry_copy(out, &header, entry, 0, qkvi_entry_extent(header.payload_bytes));
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

static qkv_status unread(qkv_error *error, uint64_t offset) {
  return qkv_fail(error, QKV_INTERNAL, "the journal cannot be read at %" PRIu64, offset);
}

qkv_status qkvi_journal_header_read(const qkvi_journal_source *source, qkvi_journal_header *header,
                                    qkv_error *error) {
  if (source->size < 2 * sizeof *header) return qkv_fail(error, QKV_DATA_LOSS, "the journal has no header");
  const qkvi_journal_header *both = (const qkvi_journal_header *)source->at(source->context, 0, 2 * sizeof *header);
  if (both == NULL) return unread(error, 0);
  *header = header_good(&both[0]) ? both[0] : both[1];
  if (!header_good(header)) return qkv_fail(error, QKV_DATA_LOSS, "both headers of the journal are damaged");
  if (header->version < QKVI_JOURNAL_VERSION || header->version > QKVI_JOURNAL_VERSION_FORKS)
    return qkv_fail(error, QKV_DATA_LOSS, "the journal has version %u, known are %u to %u", header->version,
                    QKVI_JOURNAL_VERSION, QKVI_JOURNAL_VERSION_FORKS);
  return QKV_OK;
}

// The block at `offset`, as an entry's header; the payload is not checked. *entry is of kind 0 where it is none.
static qkv_status read_header(const qkvi_journal_source *source, uint64_t store, uint64_t offset,
                              qkvi_entry_header *entry, qkv_error *error) {
  const uint8_t *block = source->at(source->context, offset, QKV_STORAGE_BLOCK);
  if (block == NULL) return unread(error, offset);
  memcpy(entry, block, sizeof *entry);
  if (!entry_good(entry, store, offset)) *entry = (qkvi_entry_header){0};
  return QKV_OK;
}

qkv_status qkvi_journal_durable(const qkvi_journal_source *source, const qkvi_journal_header *header,
                                uint64_t journal_seen, uint64_t *durable, qkv_error *error) {
  *durable = journal_seen >> QKVI_EPOCH_SHIFT == header->epoch ? journal_seen : 0;
  if (header->durable > *durable) *durable = header->durable;
  for (uint64_t offset = 2 * sizeof *header; offset < source->size; offset += QKV_STORAGE_BLOCK) {
    qkvi_entry_header entry = {0};
    QKV_TRY(read_header(source, header->store, offset, &entry, error));
    if (entry.durable > *durable) *durable = entry.durable;
  }
  return QKV_OK;
}

// The whole entry whose header was read. *good is false, and *bytes undefined, where its payload is damaged.
static qkv_status read_payload(const qkvi_journal_source *source, const qkvi_entry_header *entry,
                               const uint8_t **bytes, bool *good, qkv_error *error) {
  const uint64_t extent = qkvi_entry_extent(entry->payload_bytes);
  *good = extent <= source->size - entry->offset;
  if (!*good) return QKV_OK;
  *bytes = source->at(source->context, entry->offset, extent);
  if (*bytes == NULL) return unread(error, entry->offset);
  *good = memcmp(*bytes, entry, sizeof *entry) == 0 &&
          XXH3_64bits(*bytes + sizeof *entry, entry->payload_bytes) == entry->payload_hash;
  return QKV_OK;
}

qkv_status qkvi_journal_scan(const qkvi_journal_source *source, const qkvi_journal_header *header, uint64_t durable,
                             void (*each)(void *context, const qkv_journal_entry *entry), void *context,
                             qkvi_journal_report *report, qkv_error *error) {
  *report = (qkvi_journal_report){.end = 2 * sizeof *header};
  uint64_t next = header->epoch << QKVI_EPOCH_SHIFT | 1;  // sequence of the entry that must follow
  uint64_t offset = report->end;
  while (offset < source->size) {
    qkvi_entry_header entry = {0};
    QKV_TRY(read_header(source, header->store, offset, &entry, error));
    // Sequences are of the epoch that the file was begun in.
    if (entry.sequence < next || entry.sequence >> QKVI_EPOCH_SHIFT != header->epoch) {
      offset += QKV_STORAGE_BLOCK;
      continue;
    }
    if (entry.sequence != next) {
      if (next > durable) break;  // a torn tail: this entry was never acknowledged
      report->bad++;
      report->lost_before = entry.sequence;
    }
    const uint8_t *bytes = NULL;
    bool good;
    QKV_TRY(read_payload(source, &entry, &bytes, &good, error));
    qkv_journal_entry view = {0};
    if (good) view = view_of((const qkvi_entry_header *)bytes);
    good = good && parse_fork(&view);
    if (good) {
      each(context, &view);
      report->end = offset + qkvi_entry_extent(entry.payload_bytes);
    } else {
      if (entry.sequence > durable) break;
      report->bad++;
      // The effect of a lost entry is limited: a model, a calibration, or a session that is not opened or forked, and
      // no heir of it. Only a lost note leaves an older one in force.
      if (entry.kind == QKV_JOURNAL_SESSION_NOTE) report->lost_before = entry.sequence;
    }
    report->last = entry.sequence;
    next = entry.sequence + 1;
    if (next == 0) break;
    offset = good ? report->end : offset + QKV_STORAGE_BLOCK;
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
  uint64_t capacity = QKV_STORAGE_BLOCK;
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
    capacity -= sizeof *header;
    if (header->kind == QKV_JOURNAL_SESSION_FORK) {
      if (header->payload_bytes < sizeof(fork_head)) return false;
      memcpy(&walk->entry.parent, payload, sizeof walk->entry.parent);
    }
  }
  const uint64_t bytes = walk->left < capacity ? walk->left : capacity;
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
