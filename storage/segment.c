#include "storage/segment.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

void qkvi_segment_name(uint64_t segment, char name[QKVI_SEGMENT_NAME_MAX]) {
  (void)snprintf(name, QKVI_SEGMENT_NAME_MAX, "segment-%016" PRIx64 ".qkv", segment);
}

bool qkvi_segment_parse_name(const char *name, uint64_t *segment) {
  char again[QKVI_SEGMENT_NAME_MAX];
  if (strncmp(name, "segment-", 8) != 0) return false;
  *segment = strtoull(name + 8, NULL, 16);
  qkvi_segment_name(*segment, again);
  return strcmp(name, again) == 0;
}

static uint64_t summary_bytes(uint64_t records) {
  return (records * sizeof(qkv_record_header) + QKV_STORAGE_BLOCK - 1) / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
}

uint64_t qkvi_segment_tail_bytes(uint64_t records) {
  return summary_bytes(records) + sizeof(qkvi_segment_footer);
}

void qkvi_segment_header_make(qkvi_segment_header *header, uint64_t store, uint64_t segment, uint64_t epoch) {
  *header = (qkvi_segment_header){.magic = QKVI_SEGMENT_MAGIC,
                                  .version = QKVI_SEGMENT_VERSION,
                                  .store = store,
                                  .segment = segment,
                                  .epoch = epoch};
  header->hash = XXH3_64bits(header, offsetof(qkvi_segment_header, hash));
}

const char *qkvi_segment_header_check(const qkvi_segment_header *header, uint64_t store, uint64_t segment) {
  if (header->magic != QKVI_SEGMENT_MAGIC) return "no segment";
  if (header->hash != XXH3_64bits(header, offsetof(qkvi_segment_header, hash))) return "header is damaged";
  if (header->version != QKVI_SEGMENT_VERSION) return "unknown version";
  if (store != 0 && header->store != store) return "belongs to another store";
  return header->segment == segment ? NULL : "is another segment";
}

void qkvi_segment_tail_make(uint8_t *out, uint64_t store, uint64_t segment, uint64_t end,
                            const qkv_record_header *headers, uint64_t records) {
  const uint64_t summary = records * sizeof *headers;
  memset(out, 0, summary_bytes(records));
  if (records > 0) memcpy(out, headers, summary);
  qkvi_segment_footer *footer = (qkvi_segment_footer *)(out + summary_bytes(records));
  *footer = (qkvi_segment_footer){.magic = QKVI_FOOTER_MAGIC,
                                  .version = QKVI_SEGMENT_VERSION,
                                  .store = store,
                                  .segment = segment,
                                  .end = end,
                                  .records = records,
                                  .summary_hash = XXH3_64bits(out, summary)};
  footer->hash = XXH3_64bits(footer, offsetof(qkvi_segment_footer, hash));
}

const char *qkvi_segment_footer_check(const qkvi_segment_footer *footer, uint64_t store, uint64_t segment,
                                      uint64_t file_bytes) {
  if (footer->magic != QKVI_FOOTER_MAGIC) return "no footer";
  if (footer->hash != XXH3_64bits(footer, offsetof(qkvi_segment_footer, hash))) return "footer is damaged";
  if (footer->version != QKVI_SEGMENT_VERSION) return "unknown version";
  if (footer->store != store || footer->segment != segment) return "footer of another segment";
  if (footer->end % QKV_STORAGE_BLOCK != 0 || footer->end < sizeof(qkvi_segment_header) || footer->end > file_bytes ||
      footer->records > file_bytes / QKV_STORAGE_BLOCK ||
      qkvi_segment_tail_bytes(footer->records) != file_bytes - footer->end) {
    return "footer of a file of another size";
  }
  return NULL;
}

const char *qkvi_segment_summary_check(const qkvi_segment_footer *footer, const qkv_record_header *headers) {
  if (XXH3_64bits(headers, footer->records * sizeof *headers) != footer->summary_hash) return "summary is damaged";
  for (uint64_t i = 0; i < footer->records; i++) {
    const qkv_record_header *header = &headers[i];
    const char *wrong = qkvi_record_check(header, footer->store, footer->segment, header->offset);
    if (wrong != NULL) return wrong;
    if (header->offset % QKV_STORAGE_BLOCK != 0 || header->offset < sizeof(qkvi_segment_header) ||
        header->offset > footer->end || qkvi_record_extent(header->stored_bytes) > footer->end - header->offset) {
      return "a record lies outside";
    }
  }
  return NULL;
}

// ---- Scanning ----

void qkvi_segment_scan_init(qkvi_segment_scan *scan, uint64_t store, uint64_t segment, uint64_t file_bytes) {
  *scan = (qkvi_segment_scan){.store = store,
                              .segment = segment,
                              .file_bytes = file_bytes / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK,
                              .offset = sizeof(qkvi_segment_header),
                              .end = sizeof(qkvi_segment_header)};
}

static void note_bad(qkvi_segment_scan *scan) {
  scan->bad++;
  scan->bad_offset = scan->offset;
}

const qkv_record_header *qkvi_segment_scan_next(qkvi_segment_scan *scan, const uint8_t *bytes, uint64_t size,
                                                uint64_t *wanted) {
  const uint64_t begin = scan->offset;
  assert(begin % QKV_STORAGE_BLOCK == 0);
  for (; scan->offset < scan->file_bytes; scan->offset += QKV_STORAGE_BLOCK) {
    const uint64_t at = scan->offset - begin;
    if (size - at < QKV_STORAGE_BLOCK) {
      *wanted = QKV_STORAGE_BLOCK;
      return NULL;
    }
    const qkv_record_header *header = (const qkv_record_header *)(bytes + at);
    if (header->magic != QKV_RECORD_MAGIC) continue;
    // A valid header at another place belongs to a summary whose footer is missing.
    if (header->offset != scan->offset &&
        qkvi_record_check(header, scan->store, scan->segment, header->offset) == NULL) {
      continue;
    }
    if (qkvi_record_check(header, scan->store, scan->segment, scan->offset) != NULL) {
      note_bad(scan);
      continue;
    }
    const uint64_t extent = qkvi_record_extent(header->stored_bytes);
    if (extent > scan->file_bytes - scan->offset) {
      note_bad(scan);
      continue;
    }
    if (size - at < extent) {
      *wanted = extent;
      return NULL;
    }
    if (qkvi_record_check_payload(header, header + 1) != NULL) {
      note_bad(scan);
      continue;
    }
    scan->offset += extent;
    scan->end = scan->offset;
    return header;
  }
  *wanted = 0;
  return NULL;
}
