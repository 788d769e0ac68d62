#include "engine/codec/page.h"

#define XXH_STATIC_LINKING_ONLY  // the hash state on the stack
#include <assert.h>
#include <inttypes.h>
#include <string.h>
#include <xxhash.h>

enum { ALIGN = 64, FRAMES = 3 };

static size_t align_up(size_t bytes) {
  return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static size_t directory_end(uint16_t kv_heads) {
  return align_up(sizeof(qkv_page_header) + kv_heads * sizeof(qkv_page_directory));
}

static size_t groups_bytes(const qkv_schedule *schedule, const uint8_t tiers[QKV_PAGE_GROUPS]) {
  size_t bytes = 0;
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) bytes += qkv_schedule_group_bytes(schedule, tiers[g]);
  return bytes;
}

// Bytes of one head's block, padding included.
static size_t head_bytes(const qkv_page_directory *entry, const qkv_schedule *k, const qkv_schedule *v) {
  return align_up((size_t)2 * QKV_PAGE_TOKENS + groups_bytes(k, entry->tier_k) + groups_bytes(v, entry->tier_v));
}

static qkv_page_directory top_entry(const qkv_page_shape *shape) {
  qkv_page_directory entry = {0};
  memset(entry.tier_k, shape->bits_k, sizeof entry.tier_k);
  memset(entry.tier_v, shape->bits_v, sizeof entry.tier_v);
  return entry;
}

size_t qkv_page_bytes(const qkv_page_shape *shape, const qkv_schedule *k, const qkv_schedule *v) {
  const qkv_page_directory entry = top_entry(shape);
  return directory_end(shape->kv_heads) + shape->kv_heads * head_bytes(&entry, k, v);
}

void qkv_page_format(void *image, const qkv_page_shape *shape, uint8_t codec, uint32_t layer, uint64_t position,
                     const qkv_schedule *k, const qkv_schedule *v) {
  assert((uintptr_t)image % ALIGN == 0);
  assert(shape->kv_heads >= 1 && shape->kv_heads <= QKV_KV_HEADS_MAX);
  assert(shape->key_dim == k->dim && shape->value_dim == v->dim);
  const size_t bytes = qkv_page_bytes(shape, k, v);
  assert(bytes <= UINT32_MAX);
  memset(image, 0, bytes);
  qkv_page_header *header = image;
  *header = (qkv_page_header){.magic = QKV_PAGE_MAGIC,
                              .version = QKV_PAGE_VERSION,
                              .codec = codec,
                              .bits_k = shape->bits_k,
                              .bits_v = shape->bits_v,
                              .bytes = (uint32_t)bytes,
                              .layer = layer,
                              .position = position,
                              .tokens = QKV_PAGE_TOKENS,
                              .kv_heads = shape->kv_heads,
                              .key_dim = shape->key_dim,
                              .value_dim = shape->value_dim};
  qkv_page_directory *directory = (qkv_page_directory *)(header + 1);
  size_t offset = directory_end(shape->kv_heads);
  for (size_t h = 0; h < shape->kv_heads; h++) {
    directory[h] = top_entry(shape);
    directory[h].offset = (uint32_t)offset;
    offset += head_bytes(&directory[h], k, v);
  }
}

// Of any alignment; the checksum field counts as 0.
static uint64_t checksum(const void *image, size_t bytes) {
  static const uint8_t zero[sizeof(uint64_t)] = {0};
  const uint8_t *from = image;
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, from, offsetof(qkv_page_header, checksum));
  XXH3_64bits_update(&state, zero, sizeof zero);
  XXH3_64bits_update(&state, from + sizeof(qkv_page_header), bytes - sizeof(qkv_page_header));
  return XXH3_64bits_digest(&state);
}

void qkv_page_seal(void *image) {
  qkv_page_header *header = image;
  header->checksum = checksum(image, header->bytes);
}

void qkv_page_find(const void *page, uint16_t kv_head, qkv_part part, const qkv_schedule *k, const qkv_schedule *v,
                   qkv_page_codes *codes) {
  const qkv_page_header *header = page;
  assert(kv_head < header->kv_heads);
  assert(header->key_dim == k->dim && header->value_dim == v->dim);
  const qkv_page_directory *entry = (const qkv_page_directory *)(header + 1) + kv_head;
  const uint8_t *block = (const uint8_t *)page + entry->offset;
  const uint8_t *at = block + (size_t)2 * QKV_PAGE_TOKENS;
  if (part == QKV_V) at += groups_bytes(k, entry->tier_k);
  codes->gains = block + (part == QKV_V ? QKV_PAGE_TOKENS : 0);
  codes->schedule = part == QKV_K ? k : v;
  memcpy(codes->tiers, part == QKV_K ? entry->tier_k : entry->tier_v, sizeof codes->tiers);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    codes->groups[g] = at;
    at += qkv_schedule_group_bytes(codes->schedule, codes->tiers[g]);
  }
}

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

static qkv_status validate_layout_version(const qkv_page_header *header, qkv_error *error) {
  if (header->magic != QKV_PAGE_MAGIC) {
    REFUSE("page.magic is 0x%08" PRIx32 ", expected 0x%08" PRIx32, header->magic, QKV_PAGE_MAGIC);
  }
  if (header->version != QKV_PAGE_VERSION) {
    REFUSE("page.version is %u, known is %d", header->version, QKV_PAGE_VERSION);
  }
  if (header->features != 0) REFUSE("page.features is 0x%x, none is known", header->features);
  if (header->frame >= FRAMES) REFUSE("page.frame is %u, at most %d", header->frame, FRAMES - 1);
  if (header->reserved0 != 0 || header->reserved[0] != 0 || header->reserved[1] != 0) {
    REFUSE("page.reserved is not 0");
  }
  return QKV_OK;
}

static qkv_status validate_shape(const qkv_page_header *header, const qkv_schedule *k, const qkv_schedule *v,
                                 qkv_error *error) {
  if (header->tokens < 1 || header->tokens > QKV_PAGE_TOKENS) {
    REFUSE("page.tokens is %u, allowed are 1 to %d", header->tokens, QKV_PAGE_TOKENS);
  }
  if (header->kv_heads < 1 || header->kv_heads > QKV_KV_HEADS_MAX) {
    REFUSE("page.kv_heads is %u, allowed are 1 to %d", header->kv_heads, QKV_KV_HEADS_MAX);
  }
  if (header->key_dim != k->dim) REFUSE("page.key_dim is %u, expected %u", header->key_dim, k->dim);
  if (header->value_dim != v->dim) REFUSE("page.value_dim is %u, expected %u", header->value_dim, v->dim);
  if (header->bits_k < 1 || header->bits_k > QKV_TIER_MAX) {
    REFUSE("page.bits_k is %u, allowed are 1 to %d", header->bits_k, QKV_TIER_MAX);
  }
  if (header->bits_v < 1 || header->bits_v > QKV_TIER_MAX) {
    REFUSE("page.bits_v is %u, allowed are 1 to %d", header->bits_v, QKV_TIER_MAX);
  }
  return QKV_OK;
}

static qkv_status validate_entry(const qkv_page_header *header, size_t head, const qkv_page_directory *entry,
                                 size_t offset, qkv_error *error) {
  if (entry->offset != offset) {
    REFUSE("page.directory[%zu].offset is %" PRIu32 ", expected %zu", head, entry->offset, offset);
  }
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    if (entry->tier_k[g] > header->bits_k) {
      REFUSE("page.directory[%zu].tier_k[%zu] is %u, at most %u", head, g, entry->tier_k[g], header->bits_k);
    }
    if (entry->tier_v[g] > header->bits_v) {
      REFUSE("page.directory[%zu].tier_v[%zu] is %u, at most %u", head, g, entry->tier_v[g], header->bits_v);
    }
  }
  if (entry->anchor_k || entry->anchor_v || entry->low_rank_k || entry->low_rank_v) {
    REFUSE("page.directory[%zu] has an anchor or low-rank factors, which page.features does not say", head);
  }
  return QKV_OK;
}

// The directory lies inside the image. Heads follow each other without gaps, so nothing can overlap.
static qkv_status validate_directory(const uint8_t *image, const qkv_page_header *header, const qkv_schedule *k,
                                     const qkv_schedule *v, qkv_error *error) {
  size_t offset = directory_end(header->kv_heads);
  for (size_t head = 0; head < header->kv_heads; head++) {
    qkv_page_directory entry;
    memcpy(&entry, image + sizeof *header + head * sizeof entry, sizeof entry);
    QKV_TRY(validate_entry(header, head, &entry, offset, error));
    offset += head_bytes(&entry, k, v);
  }
  if (offset != header->bytes) REFUSE("page.bytes is %" PRIu32 ", its heads make %zu", header->bytes, offset);
  return QKV_OK;
}

qkv_status qkv_page_validate(const void *image, size_t bytes, const qkv_schedule *k, const qkv_schedule *v,
                             qkv_error *error) {
  qkv_page_header header;
  if (bytes < sizeof header) REFUSE("the page is %zu bytes, its header is %zu", bytes, sizeof header);
  memcpy(&header, image, sizeof header);
  QKV_TRY(validate_layout_version(&header, error));
  if (header.bytes != bytes) REFUSE("page.bytes is %" PRIu32 ", the page is %zu bytes", header.bytes, bytes);
  QKV_TRY(validate_shape(&header, k, v, error));
  if (directory_end(header.kv_heads) > bytes) {
    REFUSE("page.kv_heads is %u, whose directory does not fit %zu bytes", header.kv_heads, bytes);
  }
  QKV_TRY(validate_directory(image, &header, k, v, error));
  const uint64_t sum = checksum(image, bytes);
  if (header.checksum != sum) {
    REFUSE("page.checksum is 0x%016" PRIx64 ", the bytes have 0x%016" PRIx64, header.checksum, sum);
  }
  return QKV_OK;
}
