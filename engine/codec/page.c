#include "engine/codec/page.h"

#define XXH_STATIC_LINKING_ONLY  // the hash state on the stack
#include <assert.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>  // with the widest vectors that the machine has
#else
#include <xxhash.h>
#endif

#include "engine/codec/outliers.h"

enum { ALIGN = 64 };

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

// Bytes of one head's gains and codes.
static size_t coded_bytes(const uint8_t tier_k[QKV_PAGE_GROUPS], const uint8_t tier_v[QKV_PAGE_GROUPS],
                          const qkv_schedule *const schedules[2]) {
  return (size_t)2 * QKV_PAGE_TOKENS + groups_bytes(schedules[QKV_K], tier_k) +
         groups_bytes(schedules[QKV_V], tier_v);
}

// Bytes of one head's block, padding included.
static size_t head_bytes(const qkv_head_layout *head) {
  return align_up(coded_bytes(head->tiers[QKV_K], head->tiers[QKV_V], head->schedules) + head->section_bytes);
}

size_t qkv_page_bytes(const qkv_head_layout *heads, uint16_t kv_heads) {
  size_t bytes = directory_end(kv_heads);
  for (size_t h = 0; h < kv_heads; h++) bytes += head_bytes(&heads[h]);
  return bytes;
}

static qkv_page_directory entry_of(const qkv_head_layout *head, size_t offset) {
  qkv_page_directory entry = {.offset = (uint32_t)offset,
                              .anchor_k = head->anchors[QKV_K],
                              .anchor_v = head->anchors[QKV_V],
                              .low_rank_k = head->ranks[QKV_K],
                              .low_rank_v = head->ranks[QKV_V]};
  memcpy(entry.tier_k, head->tiers[QKV_K], sizeof entry.tier_k);
  memcpy(entry.tier_v, head->tiers[QKV_V], sizeof entry.tier_v);
  return entry;
}

void qkv_page_format(void *image, const qkv_page_header *header, const qkv_head_layout *heads) {
  assert((uintptr_t)image % ALIGN == 0);
  assert(header->kv_heads >= 1 && header->kv_heads <= QKV_KV_HEADS_MAX);
  const size_t bytes = qkv_page_bytes(heads, header->kv_heads);
  assert(bytes <= UINT32_MAX);
  memset(image, 0, bytes);
  qkv_page_header *written = image;
  *written = *header;
  written->magic = QKV_PAGE_MAGIC;
  written->version = QKV_PAGE_VERSION;
  written->bytes = (uint32_t)bytes;
  written->checksum = 0;
  written->outliers = 0;
  written->features = (uint16_t)(header->features & ~QKV_FEATURE_OUTLIERS);
  qkv_page_directory *directory = (qkv_page_directory *)(written + 1);
  size_t offset = directory_end(header->kv_heads);
  for (size_t h = 0; h < header->kv_heads; h++) {
    assert(header->key_dim == heads[h].schedules[QKV_K]->dim && header->value_dim == heads[h].schedules[QKV_V]->dim);
    directory[h] = entry_of(&heads[h], offset);
    offset += head_bytes(&heads[h]);
  }
}

uint8_t *qkv_page_add_outliers(void *image, size_t bytes) {
  qkv_page_header *header = image;
  assert(header->outliers == 0 && bytes > 0 && bytes % ALIGN == 0 && bytes <= UINT32_MAX - header->bytes);
  header->outliers = header->bytes;
  header->bytes += (uint32_t)bytes;
  header->features |= QKV_FEATURE_OUTLIERS;
  return (uint8_t *)image + header->outliers;
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
  header->checksum = 0;
  header->checksum = XXH3_64bits(image, header->bytes);
}

void qkv_page_find(const void *page, uint16_t kv_head, qkv_part part, const qkv_schedule *const schedules[2],
                   qkv_page_codes *codes) {
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const uint8_t *block = (const uint8_t *)page + entry->offset;
  const uint8_t *at = block + (size_t)2 * QKV_PAGE_TOKENS;
  if (part == QKV_V) at += groups_bytes(schedules[QKV_K], entry->tier_k);
  codes->gains = block + (part == QKV_V ? QKV_PAGE_TOKENS : 0);
  codes->schedule = schedules[part];
  memcpy(codes->tiers, part == QKV_K ? entry->tier_k : entry->tier_v, sizeof codes->tiers);
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    codes->groups[g] = at;
    at += qkv_schedule_group_bytes(codes->schedule, codes->tiers[g]);
  }
}

const uint8_t *qkv_page_sections(const void *page, uint16_t kv_head, const qkv_schedule *const schedules[2],
                                 size_t *bytes) {
  const qkv_page_header *header = page;
  const qkv_page_directory *entry = qkv_page_entry_of(page, kv_head);
  const size_t at = entry->offset + coded_bytes(entry->tier_k, entry->tier_v, schedules);
  const size_t end = kv_head + 1 < header->kv_heads ? entry[1].offset : qkv_page_heads_end(header);
  *bytes = end - at;
  return (const uint8_t *)page + at;
}

#define REFUSE(...) return qkv_fail(error, QKV_DATA_LOSS, __VA_ARGS__)

static qkv_status validate_layout_version(const qkv_page_header *header, uint16_t features, qkv_error *error) {
  if (header->magic != QKV_PAGE_MAGIC) {
    REFUSE("page.magic is 0x%08" PRIx32 ", expected 0x%08" PRIx32, header->magic, QKV_PAGE_MAGIC);
  }
  if (header->version < QKV_PAGE_VERSION_LEAST || header->version > QKV_PAGE_VERSION) {
    REFUSE("page.version is %u, known are %d to %d", header->version, QKV_PAGE_VERSION_LEAST, QKV_PAGE_VERSION);
  }
  if ((header->features & ~features) != 0) {
    REFUSE("page.features is 0x%x, known are 0x%x", header->features, features);
  }
  if (header->frame > QKV_FRAME_ARCHIVE) REFUSE("page.frame is %u, at most %d", header->frame, QKV_FRAME_ARCHIVE);
  if (header->reserved0 != 0 || header->reserved1 != 0 || header->reserved2 != 0) REFUSE("page.reserved is not 0");
  const bool outliers = (header->features & QKV_FEATURE_OUTLIERS) != 0;
  if (outliers != (header->outliers != 0) || (outliers && header->version < QKV_PAGE_VERSION)) {
    REFUSE("page.outliers is %" PRIu32 ", page.features is 0x%x and page.version %u", header->outliers,
           header->features, header->version);
  }
  return QKV_OK;
}

static qkv_status validate_shape(const qkv_page_header *header, const qkv_page_expected *expected, qkv_error *error) {
  if (header->tokens < 1 || header->tokens > QKV_PAGE_TOKENS) {
    REFUSE("page.tokens is %u, allowed are 1 to %d", header->tokens, QKV_PAGE_TOKENS);
  }
  if (header->kv_heads != expected->kv_heads) {
    REFUSE("page.kv_heads is %u, expected %u", header->kv_heads, expected->kv_heads);
  }
  if (header->key_dim != expected->key_dim) {
    REFUSE("page.key_dim is %u, expected %u", header->key_dim, expected->key_dim);
  }
  if (header->value_dim != expected->value_dim) {
    REFUSE("page.value_dim is %u, expected %u", header->value_dim, expected->value_dim);
  }
  if (header->position > QKV_PAGE_POSITION_MAX - header->tokens) {
    REFUSE("page.position is %" PRIu64 " for %u tokens, positions end at %" PRIu64, header->position, header->tokens,
           QKV_PAGE_POSITION_MAX);
  }
  if (header->tier_k > QKV_TIER_MAX) REFUSE("page.tier_k is %u, at most %d", header->tier_k, QKV_TIER_MAX);
  if (header->tier_v > QKV_TIER_MAX) REFUSE("page.tier_v is %u, at most %d", header->tier_v, QKV_TIER_MAX);
  return QKV_OK;
}

static qkv_status validate_entry(const qkv_page_header *header, size_t head, const qkv_page_directory *entry,
                                 size_t offset, qkv_error *error) {
  if (entry->offset != offset) {
    REFUSE("page.directory[%zu].offset is %" PRIu32 ", expected %zu", head, entry->offset, offset);
  }
  for (size_t g = 0; g < QKV_PAGE_GROUPS; g++) {
    if (entry->tier_k[g] > QKV_TIER_MAX) {
      REFUSE("page.directory[%zu].tier_k[%zu] is %u, at most %d", head, g, entry->tier_k[g], QKV_TIER_MAX);
    }
    if (entry->tier_v[g] > QKV_TIER_MAX) {
      REFUSE("page.directory[%zu].tier_v[%zu] is %u, at most %d", head, g, entry->tier_v[g], QKV_TIER_MAX);
    }
  }
  if ((header->features & QKV_FEATURE_ANCHOR) == 0 && (entry->anchor_k || entry->anchor_v)) {
    REFUSE("page.directory[%zu] has an anchor, which page.features does not say", head);
  }
  if ((header->features & QKV_FEATURE_LOW_RANK) == 0 && (entry->low_rank_k || entry->low_rank_v)) {
    REFUSE("page.directory[%zu] has low-rank factors, which page.features does not say", head);
  }
  return QKV_OK;
}

static bool has_sections(const qkv_page_directory *entry) {
  return entry->anchor_k || entry->anchor_v || entry->low_rank_k || entry->low_rank_v;
}

// Where the next head's block begins, which is where this one's has to end.
static qkv_status validate_block(const uint8_t *image, const qkv_page_header *header, size_t head,
                                 const qkv_page_expected *expected, size_t *offset, qkv_error *error) {
  const uint8_t *at = image + sizeof *header + head * sizeof(qkv_page_directory);
  qkv_page_directory entry;
  memcpy(&entry, at, sizeof entry);
  QKV_TRY(validate_entry(header, head, &entry, *offset, error));
  const size_t coded =
      coded_bytes(entry.tier_k, entry.tier_v, expected->schedules_of(expected->context, (uint16_t)head));
  uint32_t end = qkv_page_heads_end(header);
  if (head + 1 < header->kv_heads) memcpy(&end, at + sizeof entry, sizeof end);
  if (!has_sections(&entry)) {
    *offset += align_up(coded);
    return QKV_OK;
  }
  if (end % ALIGN != 0 || end < *offset + align_up(coded) || end > header->bytes) {
    REFUSE("page.directory[%zu] ends at %" PRIu32 ", at least %zu of %" PRIu32 " are needed", head, end,
           *offset + align_up(coded), header->bytes);
  }
  *offset = end;
  return QKV_OK;
}

// The directory lies inside the image. Heads follow each other without gaps, so nothing can overlap.
static qkv_status validate_directory(const uint8_t *image, const qkv_page_header *header,
                                     const qkv_page_expected *expected, qkv_error *error) {
  size_t offset = directory_end(header->kv_heads);
  for (size_t head = 0; head < header->kv_heads; head++) {
    QKV_TRY(validate_block(image, header, head, expected, &offset, error));
  }
  if (offset != qkv_page_heads_end(header)) {
    REFUSE("page.%s is %" PRIu32 ", its heads make %zu", header->outliers != 0 ? "outliers" : "bytes",
           qkv_page_heads_end(header), offset);
  }
  return QKV_OK;
}

qkv_status qkv_page_validate(const void *image, size_t bytes, const qkv_page_expected *expected, qkv_error *error) {
  qkv_page_header header;
  if (bytes < sizeof header) REFUSE("the page is %zu bytes, its header is %zu", bytes, sizeof header);
  memcpy(&header, image, sizeof header);
  QKV_TRY(validate_layout_version(&header, expected->features, error));
  if (header.bytes != bytes) REFUSE("page.bytes is %" PRIu32 ", the page is %zu bytes", header.bytes, bytes);
  QKV_TRY(validate_shape(&header, expected, error));
  if (directory_end(header.kv_heads) > bytes) {
    REFUSE("page.kv_heads is %u, whose directory does not fit %zu bytes", header.kv_heads, bytes);
  }
  if (header.outliers > bytes) {
    REFUSE("page.outliers is %" PRIu32 ", the page is %zu bytes", header.outliers, bytes);
  }
  QKV_TRY(validate_directory(image, &header, expected, error));
  if (header.outliers != 0) {
    QKV_TRY(qkv_outliers_validate((const uint8_t *)image + header.outliers, bytes - header.outliers, header.kv_heads,
                                  header.key_dim, header.value_dim, header.tokens, error));
  }
  const uint64_t sum = checksum(image, bytes);
  if (header.checksum != sum) {
    REFUSE("page.checksum is 0x%016" PRIx64 ", the bytes have 0x%016" PRIx64, header.checksum, sum);
  }
  return QKV_OK;
}
