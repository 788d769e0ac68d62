// storage/record.h, segment.h, journal.h: encoded bytes are read back, damaged ones are refused, torn ones cut;
// golden files of version 1 stay readable.
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <xxhash.h>

#include "storage/internal.h"

enum { STORE = 0x5107, SEGMENT = 3 };

static uint8_t *aligned(size_t size) {
  uint8_t *bytes = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  assert_non_null(bytes);
  memset(bytes, 0, (size + 4095) / 4096 * 4096);
  return bytes;
}

static void fill(uint8_t *bytes, size_t size, unsigned seed) {
  uint32_t x = seed * 2654435761u + 1;
  for (size_t i = 0; i < size; i++) {
    x = x * 1664525u + 1013904223u;
    bytes[i] = seed % 2 == 0 ? (uint8_t)(x >> 24) : (uint8_t)(x >> 28);
  }
}

// A record of `size` bytes at `at`; returns its extent.
static uint64_t make_record(uint8_t *out, uint64_t record, size_t size, uint64_t at) {
  uint8_t *raw = aligned(size), *packed = aligned(size);
  const qkv_record_meta meta = {
      .session = 8, .position = 64 * record, .layer = 2, .tokens = 64, .codec = 4, .calibration = 5, .kind = 6};
  fill(raw, size, (unsigned)record);
  const uint64_t stored = qkvi_record_compress(raw, size, packed);
  qkv_record_header header;
  qkvi_record_describe(&header, &meta, record, size, stored > 0 ? QKV_RECORD_ZSTD : QKV_RECORD_PLAIN,
                       stored > 0 ? packed : raw, stored > 0 ? stored : size);
  qkvi_record_place(&header, STORE, SEGMENT, at, 17);
  memcpy(out, &header, sizeof header);
  memcpy(out + sizeof header, stored > 0 ? packed : raw, header.stored_bytes);
  free(raw);
  free(packed);
  return qkvi_record_extent(header.stored_bytes);
}

static void check_record(const uint8_t *bytes, uint64_t record, size_t size, uint64_t at) {
  const qkv_record_header *header = (const qkv_record_header *)bytes;
  uint8_t *wanted = aligned(size), *got = aligned(size);
  fill(wanted, size, (unsigned)record);
  assert_null(qkvi_record_check(header, STORE, SEGMENT, at));
  assert_null(qkvi_record_check_payload(header, header + 1));
  assert_int_equal(header->record, record);
  assert_int_equal(header->session, 8);
  assert_int_equal(header->raw_bytes, size);
  assert_int_equal(header->calibration, 5);
  assert_null(qkvi_record_decode(header, header + 1, got));
  assert_memory_equal(wanted, got, size);
  free(wanted);
  free(got);
}

static void records_are_read_back(void **state) {
  (void)state;
  static const size_t sizes[] = {1, 100, 4096 - 128, 5000, 100000};
  uint8_t *bytes = aligned(200000);
  for (size_t i = 0; i < 5; i++) {
    for (uint64_t record = 1; record <= 2; record++) {
      memset(bytes, 0, 200000);
      const uint64_t extent = make_record(bytes, record, sizes[i], 4096);
      assert_int_equal(extent % 4096, 0);
      check_record(bytes, record, sizes[i], 4096);
    }
  }
  // Nibbles compress, noise does not.
  assert_int_equal(((qkv_record_header *)bytes)->encoding, QKV_RECORD_PLAIN);
  (void)make_record(bytes, 1, 100000, 4096);
  assert_int_equal(((qkv_record_header *)bytes)->encoding, QKV_RECORD_ZSTD);
  assert_true(((qkv_record_header *)bytes)->stored_bytes <= 97000);
  free(bytes);
}

static void every_bit_of_a_record_counts(void **state) {
  (void)state;
  uint8_t *bytes = aligned(8192);
  (void)make_record(bytes, 2, 600, 4096);
  for (size_t i = 0; i < 128 + 600; i++) {
    const qkv_record_header *header = (const qkv_record_header *)bytes;
    bytes[i] ^= 4;
    const char *wrong = qkvi_record_check(header, STORE, SEGMENT, 4096);
    if (wrong == NULL) wrong = qkvi_record_check_payload(header, header + 1);
    assert_non_null(wrong);
    bytes[i] ^= 4;
  }
  const qkv_record_header *header = (const qkv_record_header *)bytes;
  assert_non_null(qkvi_record_check(header, STORE + 1, SEGMENT, 4096));
  assert_non_null(qkvi_record_check(header, STORE, SEGMENT + 1, 4096));
  assert_non_null(qkvi_record_check(header, STORE, SEGMENT, 8192));
  assert_null(qkvi_record_check(header, STORE, SEGMENT, 4096));
  free(bytes);
}

// ---- Segments ----

typedef struct segment_image {
  uint8_t *bytes;
  uint64_t size, end;
  uint64_t offsets[8];
} segment_image;

static const size_t sizes_in_segment[8] = {100, 5000, 20000, 1, 4096, 70000, 300, 9000};

static segment_image make_segment(void) {
  segment_image image = {.size = 256 << 10, .end = 4096};
  image.bytes = aligned(image.size);
  qkvi_segment_header_make((qkvi_segment_header *)image.bytes, STORE, SEGMENT, 1);
  for (size_t i = 0; i < 8; i++) {
    image.offsets[i] = image.end;
    image.end += make_record(image.bytes + image.end, i + 1, sizes_in_segment[i], image.end);
  }
  return image;
}

// Scans with windows of `window` bytes; `seen[i]`: record i + 1 was found. Returns how many were bad.
static uint64_t scan_all(const segment_image *image, uint64_t window, bool seen[8]) {
  qkvi_segment_scan scan;
  qkvi_segment_scan_init(&scan, STORE, SEGMENT, image->size);
  memset(seen, 0, 8 * sizeof *seen);
  for (uint64_t wanted = window; wanted > 0;) {
    const uint64_t begin = scan.offset, left = image->size - begin;
    const uint64_t size = wanted > window ? wanted : window;
    uint8_t *piece = aligned(size);
    memcpy(piece, image->bytes + begin, left < size ? left : size);
    for (const qkv_record_header *header;;) {
      const uint64_t at = scan.offset - begin, limit = left < size ? left : size;
      header = qkvi_segment_scan_next(&scan, piece + at, limit - at, &wanted);
      if (header == NULL) break;
      assert_false(seen[header->record - 1]);
      seen[header->record - 1] = true;
    }
    free(piece);
  }
  return scan.bad;
}

static void segments_are_scanned(void **state) {
  (void)state;
  segment_image image = make_segment();
  bool seen[8];
  static const uint64_t windows[] = {4096, 8192, 64 << 10, 1 << 20};
  for (size_t w = 0; w < 4; w++) {
    assert_int_equal(scan_all(&image, windows[w], seen), 0);
    for (size_t i = 0; i < 8; i++) assert_true(seen[i]);
  }
  // One is damaged, in the header or in the payload: the others are found.
  for (size_t hurt = 0; hurt < 8; hurt++) {
    for (int part = 0; part < 2; part++) {
      uint8_t *byte = &image.bytes[image.offsets[hurt] + (part == 0 ? 20 : 128)];
      *byte ^= 1;
      assert_int_equal(scan_all(&image, 8192, seen), 1);
      for (size_t i = 0; i < 8; i++) assert_int_equal(seen[i], i != hurt);
      *byte ^= 1;
    }
  }
  // A hole, as after a power cut.
  memset(image.bytes + image.offsets[5], 0, 4096);
  assert_int_equal(scan_all(&image, 8192, seen), 0);
  for (size_t i = 0; i < 8; i++) assert_int_equal(seen[i], i != 5);
  free(image.bytes);
}

static void footers_are_checked(void **state) {
  (void)state;
  qkv_record_header headers[40];
  uint8_t payload[600];
  fill(payload, sizeof payload, 2);
  const qkv_record_meta meta = {.session = 1, .tokens = 64};
  for (uint64_t i = 0; i < 40; i++) {
    qkvi_record_describe(&headers[i], &meta, i + 1, sizeof payload, QKV_RECORD_PLAIN, payload, sizeof payload);
    qkvi_record_place(&headers[i], STORE, SEGMENT, 4096 * (i + 1), 0);
  }
  const uint64_t end = 41 * 4096, tail = qkvi_segment_tail_bytes(40), size = end + tail;
  uint8_t *bytes = aligned(tail);
  qkvi_segment_tail_make(bytes, STORE, SEGMENT, end, headers, 40);
  const qkvi_segment_footer *footer = (const qkvi_segment_footer *)(bytes + tail - 4096);
  assert_null(qkvi_segment_footer_check(footer, STORE, SEGMENT, size));
  assert_null(qkvi_segment_summary_check(footer, (const qkv_record_header *)bytes));
  assert_non_null(qkvi_segment_footer_check(footer, STORE, SEGMENT, size + 4096));
  assert_non_null(qkvi_segment_footer_check(footer, STORE, SEGMENT + 1, size));
  assert_non_null(qkvi_segment_footer_check(footer, STORE + 1, SEGMENT, size));
  bytes[200] ^= 1;
  assert_non_null(qkvi_segment_summary_check(footer, (const qkv_record_header *)bytes));
  bytes[200] ^= 1;
  bytes[tail - 4096 + 40] ^= 1;
  assert_non_null(qkvi_segment_footer_check(footer, STORE, SEGMENT, size));
  free(bytes);
  char name[QKVI_SEGMENT_NAME_MAX];
  uint64_t number = 0;
  qkvi_segment_name(0xa1, name);
  assert_string_equal(name, "segment-00000000000000a1.qkv");
  assert_true(qkvi_segment_parse_name(name, &number));
  assert_int_equal(number, 0xa1);
  assert_false(qkvi_segment_parse_name("segment-a1.qkv", &number));
  assert_false(qkvi_segment_parse_name("segment-00000000000000a1.qkv.old", &number));
}

// ---- Journals ----

typedef struct heard {
  size_t count;
  uint64_t sessions[16];
} heard;

static void hear(void *context, const qkv_journal_entry *entry) {
  heard *all = context;
  assert_true(all->count < 16);
  all->sessions[all->count++] = entry->session;
}

// Five entries of epoch 1: the first two were in the file from the beginning, each later one says that the one before
// it is durable. Entry i is of session 100 + i and begins at offsets[i].
static uint8_t *make_journal(uint64_t *size, uint64_t offsets[5]) {
  uint8_t *bytes = aligned(64 << 10), payload[5000];
  fill(payload, sizeof payload, 4);
  qkvi_journal_header_make(bytes, STORE, 1, UINT64_C(1) << 40 | 2, false);
  uint64_t at = 8192;
  for (uint64_t i = 0; i < 5; i++) {
    const qkv_journal_entry entry = {.kind = QKV_JOURNAL_SESSION_OPEN,
                                     .sequence = UINT64_C(1) << 40 | (i + 1),
                                     .session = 100 + i,
                                     .payload = payload,
                                     .bytes = i * 1200};
    offsets[i] = at;
    qkvi_entry_make(bytes + at, &entry, STORE, i < 2 ? 0 : UINT64_C(1) << 40 | i, at);
    at += qkvi_entry_extent(entry.bytes);
  }
  *size = at;
  return bytes;
}

static const uint8_t *in_memory(void *context, uint64_t offset, uint64_t size) {
  (void)size;
  return (const uint8_t *)context + offset;
}

static qkvi_journal_source source_of(const uint8_t *bytes, uint64_t size) {
  return (qkvi_journal_source){.context = (void *)(uintptr_t)bytes, .size = size, .at = in_memory};
}

static qkvi_journal_report scan_journal(const uint8_t *bytes, uint64_t size, uint64_t seen, heard *all) {
  const qkvi_journal_source source = source_of(bytes, size);
  qkvi_journal_header header;
  qkvi_journal_report report;
  uint64_t durable;
  *all = (heard){0};
  assert_int_equal(qkvi_journal_header_read(&source, &header, NULL), QKV_OK);
  assert_int_equal(header.store, STORE);
  assert_int_equal(qkvi_journal_durable(&source, &header, seen, &durable, NULL), QKV_OK);
  assert_int_equal(qkvi_journal_scan(&source, &header, durable, hear, all, &report, NULL), QKV_OK);
  return report;
}

static void journals_are_scanned(void **state) {
  (void)state;
  uint64_t size, offsets[5];
  uint8_t *bytes = make_journal(&size, offsets);
  heard all;
  qkvi_journal_report report = scan_journal(bytes, size, 0, &all);
  assert_int_equal(all.count, 5);
  assert_int_equal(report.end, size);
  assert_int_equal(report.lost_before, 0);
  assert_int_equal(report.last, UINT64_C(1) << 40 | 5);
  // The last entry is torn: it was never acknowledged.
  bytes[offsets[4] + 300] ^= 1;
  report = scan_journal(bytes, size, 0, &all);
  assert_int_equal(all.count, 4);
  assert_int_equal(report.lost_before, 0);
  assert_int_equal(report.bad, 0);
  // By a record it was durable. Its header says that it only opened a session.
  report = scan_journal(bytes, size, UINT64_C(1) << 40 | 5, &all);
  assert_int_equal(all.count, 4);
  assert_int_equal(report.bad, 1);
  assert_int_equal(report.lost_before, 0);
  bytes[offsets[4] + 30] ^= 1;
  report = scan_journal(bytes, size, UINT64_C(1) << 40 | 5, &all);
  assert_int_equal(report.lost_before, UINT64_MAX);
  bytes[offsets[4] + 30] ^= 1;
  // Records of another epoch say nothing about it.
  report = scan_journal(bytes, size, 5, &all);
  assert_int_equal(report.lost_before, 0);
  bytes[offsets[4] + 300] ^= 1;
  // A durable entry in the middle is damaged: sessions that were opened before the next one are given up.
  for (int part = 0; part < 2; part++) {
    bytes[offsets[2] + (part == 0 ? 20 : 300)] ^= 1;
    report = scan_journal(bytes, size, 0, &all);
    assert_int_equal(all.count, 4);
    assert_int_equal(all.sessions[2], 103);
    assert_int_equal(report.bad, 1);
    assert_int_equal(report.lost_before, part == 0 ? (UINT64_C(1) << 40 | 4) : 0);
    bytes[offsets[2] + (part == 0 ? 20 : 300)] ^= 1;
  }
  free(bytes);
}

// Of version 2: a session that is opened, and two forks of it, the second one's positions in several blocks. `bytes`
// is of FORKS_BYTES_MAX.
enum { FORKS_BYTES_MAX = 64 << 10, FORKS_LAYERS = 600 };

static uint64_t make_forks(uint8_t *bytes, uint64_t offsets[3]) {
  uint64_t positions[FORKS_LAYERS], at = 8192;
  uint8_t *payload = aligned(8192);
  for (uint64_t i = 0; i < FORKS_LAYERS; i++) positions[i] = 64 * i + 1;
  qkvi_journal_header_make(bytes, STORE, 1, UINT64_C(1) << 40 | 3, true);
  for (uint64_t i = 0; i < 3; i++) {
    qkv_journal_entry entry = {.kind = i == 0 ? QKV_JOURNAL_SESSION_OPEN : QKV_JOURNAL_SESSION_FORK,
                               .sequence = UINT64_C(1) << 40 | (i + 1),
                               .session = 100 + i,
                               .parent = 100,
                               .layers = i == 1 ? 2 : FORKS_LAYERS,
                               .positions = positions,
                               .payload = "bytes",
                               .bytes = 5};
    if (i > 0) {
      qkvi_fork_make(payload, &entry);
      entry.payload = payload;
      entry.bytes += qkvi_fork_bytes(entry.layers);
    }
    offsets[i] = at;
    qkvi_entry_make(bytes + at, &entry, STORE, 0, at);
    at += qkvi_entry_extent(entry.bytes);
  }
  free(payload);
  return at;
}

static void hear_fork(void *context, const qkv_journal_entry *entry) {
  size_t *count = context;
  assert_int_equal(entry->bytes, 5);
  assert_memory_equal(entry->payload, "bytes", 5);
  assert_int_equal(entry->session, 100 + *count);
  assert_int_equal(entry->layers, *count == 0 ? 0 : *count == 1 ? 2 : FORKS_LAYERS);
  if (*count > 0) assert_int_equal(entry->parent, 100);
  for (uint64_t i = 0; i < entry->layers; i++) assert_int_equal(entry->positions[i], 64 * i + 1);
  // The entry as it is written again.
  const qkv_journal_entry stored = qkvi_entry_stored(entry);
  assert_int_equal(stored.bytes, entry->layers == 0 ? 5 : 16 + 8 * (uint64_t)entry->layers + 5);
  assert_true((const uint8_t *)stored.payload + stored.bytes == (const uint8_t *)entry->payload + entry->bytes);
  ++*count;
}

static qkvi_journal_report scan_forks(const uint8_t *bytes, uint64_t size, size_t *count) {
  const qkvi_journal_source source = source_of(bytes, size);
  qkvi_journal_header header;
  qkvi_journal_report report;
  *count = 0;
  assert_int_equal(qkvi_journal_header_read(&source, &header, NULL), QKV_OK);
  assert_int_equal(header.version, QKVI_JOURNAL_VERSION_FORKS);
  assert_int_equal(qkvi_journal_scan(&source, &header, header.durable, hear_fork, count, &report, NULL), QKV_OK);
  return report;
}

static void forks_are_read_back(void **state) {
  (void)state;
  uint8_t *bytes = aligned(FORKS_BYTES_MAX);
  uint64_t offsets[3];
  size_t count;
  const uint64_t size = make_forks(bytes, offsets);
  qkvi_journal_report report = scan_forks(bytes, size, &count);
  assert_int_equal(count, 3);
  assert_int_equal(report.bad, 0);
  qkvi_journal_walk on;
  qkvi_journal_walk_init(&on, STORE, 1);
  while (on.offset < size) {
    assert_true(qkvi_journal_walk_block(&on, bytes + on.offset));
    if (on.entry.kind == QKV_JOURNAL_SESSION_FORK) assert_int_equal(on.entry.parent, 100);
    assert_null(on.entry.positions);
  }
  qkvi_journal_walk_deinit(&on);
  // Layers that the payload does not have, no layers, and nonzero padding: invalid, and nothing is read beyond it.
  const uint32_t wrong[] = {0, 3, UINT32_MAX};
  for (size_t i = 0; i <= 3; i++) {
    const qkvi_entry_header header = *(const qkvi_entry_header *)(bytes + offsets[1]);
    uint8_t payload[37];
    memcpy(payload, bytes + offsets[1] + sizeof header, sizeof payload);
    if (i < 3) memcpy(payload + 8, &wrong[i], 4);
    if (i == 3) payload[12] = 1;
    const qkv_journal_entry entry = {.kind = QKV_JOURNAL_SESSION_FORK,
                                     .sequence = header.sequence,
                                     .session = header.session,
                                     .payload = payload,
                                     .bytes = sizeof payload};
    qkvi_entry_make(bytes + offsets[1], &entry, STORE, 0, offsets[1]);
    const qkvi_journal_source source = source_of(bytes, size);
    heard all = {0};
    qkvi_journal_header read;
    assert_int_equal(qkvi_journal_header_read(&source, &read, NULL), QKV_OK);
    assert_int_equal(qkvi_journal_scan(&source, &read, read.durable, hear, &all, &report, NULL), QKV_OK);
    assert_int_equal(all.count, 2);
    assert_int_equal(report.bad, 1);
    assert_int_equal(report.lost_before, 0);
    (void)make_forks(bytes, offsets);
  }
  // An unknown version.
  ((qkvi_journal_header *)bytes)->version = 3;
  ((qkvi_journal_header *)bytes)->hash = XXH3_64bits(bytes, offsetof(qkvi_journal_header, hash));
  const qkvi_journal_source source = source_of(bytes, size);
  qkvi_journal_header header;
  qkv_error error = {0};
  assert_int_equal(qkvi_journal_header_read(&source, &header, &error), QKV_DATA_LOSS);
  assert_non_null(strstr(error.text, "the journal has version 3, known are 1 to 2"));
  free(bytes);
}

// At every cut of an entry, and for every alignment of its payload, its bytes are the same.
static void an_entry_is_written_in_pieces(void **state) {
  (void)state;
  enum { BYTES = 5000, CAPACITY = 8192 };
  uint8_t payload[BYTES], *whole = aligned(CAPACITY), *pieces = aligned(CAPACITY);
  fill(payload, sizeof payload, 5);
  qkv_journal_entry entry = {
      .kind = QKV_JOURNAL_CALIBRATION, .sequence = 7, .payload = payload, .bytes = sizeof payload};
  assert_int_equal(qkvi_entry_extent(BYTES), CAPACITY);
  qkvi_entry_make(whole, &entry, STORE, 6, 3 * 4096);
  for (size_t size = 500; size < CAPACITY; size += 777) {
    entry.bytes = size < BYTES ? size : BYTES;
    entry.rest = payload + entry.bytes;
    entry.rest_bytes = BYTES - entry.bytes;
    const qkvi_entry_header header = qkvi_entry_header_make(&entry, STORE, 6, 3 * 4096);
    memset(pieces, 0xff, CAPACITY);
    for (size_t from = 0, next; from < CAPACITY; from = next) {
      next = from + size < CAPACITY ? from + size : CAPACITY;
      qkvi_entry_copy(pieces + from, &header, &entry, from, next - from);
    }
    assert_memory_equal(pieces, whole, CAPACITY);
  }
  free(whole);
  free(pieces);
}

static void one_header_is_enough(void **state) {
  (void)state;
  uint64_t size, offsets[5];
  uint8_t *bytes = make_journal(&size, offsets);
  heard all;
  bytes[100] ^= 1;
  scan_journal(bytes, size, 0, &all);
  assert_int_equal(all.count, 5);
  bytes[4096 + 100] ^= 1;
  qkvi_journal_header header;
  qkvi_journal_source source = source_of(bytes, size);
  qkv_error error = {0};
  assert_int_equal(qkvi_journal_header_read(&source, &header, &error), QKV_DATA_LOSS);
  assert_non_null(strstr(error.text, "both headers"));
  source.size = 4096;
  assert_int_equal(qkvi_journal_header_read(&source, &header, NULL), QKV_DATA_LOSS);
  free(bytes);
}

// A source that returns blocks until it has returned `left` of them.
typedef struct failing {
  const uint8_t *bytes;
  uint64_t left;
} failing;

static const uint8_t *at_first(void *context, uint64_t offset, uint64_t size) {
  failing *device = context;
  if (device->left < size / QKV_STORAGE_BLOCK) return NULL;
  device->left -= size / QKV_STORAGE_BLOCK;
  return device->bytes + offset;
}

// A failed read makes the whole scan fail.
static void what_cannot_be_read_is_an_error(void **state) {
  (void)state;
  uint64_t size, offsets[5], gives = 0;
  uint8_t *bytes = make_journal(&size, offsets);
  for (bool whole = false; !whole; gives++) {
    failing device = {.bytes = bytes, .left = gives};
    const qkvi_journal_source source = {.context = &device, .size = size, .at = at_first};
    qkvi_journal_header header;
    qkvi_journal_report report;
    uint64_t durable;
    heard all = {0};
    qkv_error error = {0};
    qkv_status status = qkvi_journal_header_read(&source, &header, &error);
    if (status == QKV_OK) status = qkvi_journal_durable(&source, &header, 0, &durable, &error);
    if (status == QKV_OK) status = qkvi_journal_scan(&source, &header, durable, hear, &all, &report, &error);
    whole = status == QKV_OK;
    if (whole) assert_int_equal(all.count, 5);
    if (!whole) assert_int_equal(status, QKV_INTERNAL);
    if (!whole) assert_non_null(strstr(error.text, "the journal cannot be read at "));
  }
  assert_true(gives > size / QKV_STORAGE_BLOCK);
  free(bytes);
}

static bool walk(const uint8_t *bytes, uint64_t size, uint64_t epoch) {
  qkvi_journal_walk on;
  qkvi_journal_walk_init(&on, STORE, epoch);
  uint64_t entries = 0;
  bool good = true;
  while (good && on.offset < size) {
    good = qkvi_journal_walk_block(&on, bytes + on.offset);
    if (!good || !on.first) continue;
    assert_int_equal(on.entry.session, 100 + entries);
    assert_int_equal(on.entry.bytes, 1200 * entries);
    entries++;
  }
  assert_true(!good || (entries == 5 && on.left == 0 && on.next == (epoch << QKVI_EPOCH_SHIFT | 6)));
  qkvi_journal_walk_deinit(&on);
  return good;
}

static void journals_are_walked(void **state) {
  (void)state;
  uint64_t size, offsets[5];
  uint8_t *bytes = make_journal(&size, offsets);
  heard all;
  assert_true(walk(bytes, size, 1));
  assert_false(walk(bytes, size, 2));
  for (size_t i = 0; i < 5; i++) {
    const uint64_t last = sizeof(qkvi_entry_header) + i * 1200 - 1;
    for (size_t part = 0; part < 2; part++) {  // of the header, and of what counts the last byte
      const uint64_t at = offsets[i] + (part == 0 ? 16 : last);
      bytes[at] ^= 1;
      assert_false(walk(bytes, size, 1));
      bytes[at] ^= 1;
    }
  }
  // An entry is left out.
  memmove(bytes + offsets[1], bytes + offsets[2], size - offsets[2]);
  assert_false(walk(bytes, size - (offsets[2] - offsets[1]), 1));
  free(bytes);
  // Entries that are renumbered for another file.
  bytes = make_journal(&size, offsets);
  qkvi_journal_header_make(bytes, STORE, 7, UINT64_C(7) << 40 | 5, false);
  for (uint64_t i = 0; i < 5; i++)
    qkvi_entry_renumber(bytes + offsets[i], STORE, UINT64_C(7) << 40 | (i + 1), offsets[i]);
  assert_true(walk(bytes, size, 7));
  const qkvi_journal_report report = scan_journal(bytes, size, 0, &all);
  assert_int_equal(all.count, 5);
  assert_int_equal(report.bad, 0);
  assert_int_equal(report.end, size);
  free(bytes);
}

// ---- Golden ----

static uint8_t *read_golden(const char *name, size_t *size) {
  char path[400];
  (void)snprintf(path, sizeof path, QKV_SOURCE_DIR "/tests/golden/%s", name);
  FILE *file = fopen(path, "rb");
  assert_non_null(file);
  uint8_t *bytes = aligned(1 << 20);
  *size = fread(bytes, 1, 1 << 20, file);
  assert_int_equal(fclose(file), 0);
  return bytes;
}

// Written once by version 1: a sealed segment of eight records, four of them zstd's, and a journal of five entries.
// By version 2: a journal of three entries, two of them forks.
static void golden_files_stay_readable(void **state) {
  (void)state;
  size_t size;
  uint8_t *bytes = read_golden("storage_segment_v1.bin", &size);
  assert_null(qkvi_segment_header_check((qkvi_segment_header *)bytes, STORE, SEGMENT));
  const qkvi_segment_footer *footer = (const qkvi_segment_footer *)(bytes + size - 4096);
  assert_null(qkvi_segment_footer_check(footer, STORE, SEGMENT, size));
  const qkv_record_header *headers = (const qkv_record_header *)(bytes + footer->end);
  assert_null(qkvi_segment_summary_check(footer, headers));
  assert_int_equal(footer->records, 8);
  unsigned packed = 0;
  for (size_t i = 0; i < 8; i++) {
    packed += headers[i].encoding == QKV_RECORD_ZSTD;
    check_record(bytes + headers[i].offset, i + 1, sizes_in_segment[i], headers[i].offset);
  }
  assert_int_equal(packed, 4);
  free(bytes);
  bytes = read_golden("storage_journal_v1.bin", &size);
  heard all;
  const qkvi_journal_report report = scan_journal(bytes, size, 0, &all);
  assert_int_equal(all.count, 5);
  for (size_t i = 0; i < 5; i++) assert_int_equal(all.sessions[i], 100 + i);
  assert_int_equal(report.lost_before, 0);
  // The journal's bytes are made the same way today.
  uint64_t size_now, offsets[5];
  uint8_t *now = make_journal(&size_now, offsets);
  assert_int_equal(size_now, size);
  assert_memory_equal(now, bytes, size);
  free(now);
  free(bytes);
  bytes = read_golden("storage_journal_v2.bin", &size);
  size_t forks;
  assert_int_equal(scan_forks(bytes, size, &forks).bad, 0);
  assert_int_equal(forks, 3);
  now = aligned(FORKS_BYTES_MAX);
  uint64_t begins[3];
  assert_int_equal(make_forks(now, begins), size);
  assert_memory_equal(now, bytes, size);
  free(now);
  free(bytes);
}

// QKV_GOLDEN=DIR writes the files that golden_files_stay_readable reads; for a new version, under a new name.
static int write_golden(void **state) {
  (void)state;
  const char *directory = getenv("QKV_GOLDEN");
  if (directory == NULL) return 0;
  const segment_image image = make_segment();
  qkv_record_header headers[8];
  for (size_t i = 0; i < 8; i++) memcpy(&headers[i], image.bytes + image.offsets[i], sizeof headers[i]);
  qkvi_segment_tail_make(image.bytes + image.end, STORE, SEGMENT, image.end, headers, 8);
  uint64_t size, offsets[5];
  uint8_t *journal = make_journal(&size, offsets), *forks = aligned(FORKS_BYTES_MAX);
  const uint64_t forks_size = make_forks(forks, offsets);
  const struct {
    const char *name;
    const uint8_t *bytes;
    size_t size;
  } files[] = {{"storage_segment_v1.bin", image.bytes, image.end + qkvi_segment_tail_bytes(8)},
               {"storage_journal_v1.bin", journal, size},
               {"storage_journal_v2.bin", forks, forks_size}};
  for (size_t i = 0; i < 3; i++) {
    char path[400];
    (void)snprintf(path, sizeof path, "%s/%s", directory, files[i].name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(files[i].bytes, 1, files[i].size, file) != files[i].size || fclose(file) != 0)
      return -1;
  }
  free(forks);
  free(journal);
  free(image.bytes);
  return 0;
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(records_are_read_back),
      cmocka_unit_test(every_bit_of_a_record_counts),
      cmocka_unit_test(segments_are_scanned),
      cmocka_unit_test(footers_are_checked),
      cmocka_unit_test(journals_are_scanned),
      cmocka_unit_test(journals_are_walked),
      cmocka_unit_test(what_cannot_be_read_is_an_error),
      cmocka_unit_test(forks_are_read_back),
      cmocka_unit_test(an_entry_is_written_in_pieces),
      cmocka_unit_test(one_header_is_enough),
      cmocka_unit_test(golden_files_stay_readable),
  };
  return cmocka_run_group_tests(tests, write_golden, NULL);
}
