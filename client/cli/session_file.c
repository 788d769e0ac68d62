#include "client/cli/session_file.h"

#define XXH_STATIC_LINKING_ONLY  // the hash state on the stack
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "client/format/mapping.h"

#define FILE_MAGIC 0x53564b51u    // "QKVS"
#define RECORD_MAGIC 0x52564b51u  // "QKVR"
enum { FORMAT = 2, FORMAT_LEAST = 1, PAYLOAD_ALIGN = 8 };

typedef struct file_header {
  uint32_t magic, format;
  uint64_t reserved;
} file_header;
_Static_assert(sizeof(file_header) == 16, "session file header");

typedef struct record_header {
  uint32_t magic, kind;
  uint64_t bytes;
  uint64_t position;
  uint32_t layer, tokens;
  uint64_t hash;
  uint64_t checksum;
} record_header;
_Static_assert(sizeof(record_header) == 48, "session file record");

// The header's checksum is 0.
static uint64_t checksum(const record_header *header, const void *const payload[2], const size_t bytes[2]) {
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, header, sizeof *header);
  for (int i = 0; i < 2; i++) {
    if (bytes[i] > 0) XXH3_64bits_update(&state, payload[i], bytes[i]);
  }
  return XXH3_64bits_digest(&state);
}

// ---- Writing ----

struct qkvctl_session_writer {
  FILE *file;
  char *path, *partial;
  uint64_t records, bytes;
};

static qkv_status refuse(const qkvctl_session_writer *writer, qkv_error *error) {
  return qkv_fail(error, QKV_UNAVAILABLE, "%s: %s", writer->partial, strerror(errno));
}

qkv_status qkvctl_session_writer_create(const char *path, qkvctl_session_writer **out, qkv_error *error) {
  static const char suffix[] = ".partial";
  qkvctl_session_writer *writer = calloc(1, sizeof *writer);
  assert(writer != NULL);
  const size_t length = strlen(path);
  writer->path = strdup(path);
  writer->partial = malloc(length + sizeof suffix);
  assert(writer->path != NULL && writer->partial != NULL);
  (void)snprintf(writer->partial, length + sizeof suffix, "%s%s", path, suffix);
  writer->file = fopen(writer->partial, "wbe");
  const file_header header = {.magic = FILE_MAGIC, .format = FORMAT};
  writer->bytes = sizeof header;
  qkv_status status = QKV_OK;
  if (writer->file == NULL || fwrite(&header, sizeof header, 1, writer->file) != 1) status = refuse(writer, error);
  if (status != QKV_OK) qkvctl_session_writer_destroy(&writer);
  *out = writer;
  return status;
}

qkv_status qkvctl_session_writer_put(qkvctl_session_writer *writer, const qkvctl_record *record, qkv_error *error) {
  static const uint8_t zeros[PAYLOAD_ALIGN] = {0};
  const size_t bytes = record->bytes[0] + record->bytes[1];
  record_header header = {.magic = RECORD_MAGIC,
                          .kind = (uint32_t)record->kind,
                          .bytes = bytes,
                          .position = record->position,
                          .layer = record->layer,
                          .tokens = record->tokens,
                          .hash = record->hash};
  header.checksum = checksum(&header, record->payload, record->bytes);
  const size_t padding = (PAYLOAD_ALIGN - bytes % PAYLOAD_ALIGN) % PAYLOAD_ALIGN;
  bool written = fwrite(&header, sizeof header, 1, writer->file) == 1;
  for (int i = 0; i < 2; i++)
    written = written && fwrite(record->payload[i], 1, record->bytes[i], writer->file) == record->bytes[i];
  written = written && fwrite(zeros, 1, padding, writer->file) == padding;
  if (!written) return refuse(writer, error);
  writer->records++;
  writer->bytes += sizeof header + bytes + padding;
  return QKV_OK;
}

qkv_status qkvctl_session_writer_finish(qkvctl_session_writer **writer, qkv_error *error) {
  qkvctl_session_writer *ending = *writer;
  const qkvctl_record end = {.kind = QKVCTL_RECORD_END, .position = ending->records, .payload = {"", ""}};
  qkv_status status = qkvctl_session_writer_put(ending, &end, error);
  FILE *file = ending->file;
  if (status == QKV_OK && (fflush(file) != 0 || fsync(fileno(file)) != 0)) status = refuse(ending, error);
  ending->file = NULL;
  if (fclose(file) != 0 && status == QKV_OK) status = refuse(ending, error);
  if (status == QKV_OK && rename(ending->partial, ending->path) != 0) status = refuse(ending, error);
  if (status == QKV_OK) ending->partial[0] = '\0';
  qkvctl_session_writer_destroy(writer);
  return status;
}

void qkvctl_session_writer_destroy(qkvctl_session_writer **writer) {
  qkvctl_session_writer *left = *writer;
  if (left == NULL) return;
  *writer = NULL;
  if (left->file != NULL) (void)fclose(left->file);
  if (left->partial[0] != '\0') (void)unlink(left->partial);
  free(left->partial);
  free(left->path);
  free(left);
}

uint64_t qkvctl_session_writer_bytes(const qkvctl_session_writer *writer) {
  return writer->bytes;
}

// ---- Reading ----

struct qkvctl_session_file {
  void *mapping;
  size_t bytes;
  qkvctl_record *records;
  size_t count, capacity;
};

bool qkvctl_session_file_is(const char *path) {
  uint32_t magic = 0;
  FILE *file = fopen(path, "rbe");
  if (file == NULL) return false;
  const bool read = fread(&magic, sizeof magic, 1, file) == 1;
  (void)fclose(file);
  return read && magic == FILE_MAGIC;
}

static void add_record(qkvctl_session_file *file, const record_header *header, const uint8_t *payload) {
  if (file->count == file->capacity) {
    file->capacity = file->capacity * 2 + 64;
    file->records = realloc(file->records, file->capacity * sizeof *file->records);
    assert(file->records != NULL);
  }
  file->records[file->count++] = (qkvctl_record){.kind = (qkvctl_record_kind)header->kind,
                                                 .layer = header->layer,
                                                 .position = header->position,
                                                 .tokens = header->tokens,
                                                 .hash = header->hash,
                                                 .payload = {payload},
                                                 .bytes = {(size_t)header->bytes}};
}

// The record at *at, which then moves behind it.
static qkv_status read_record(qkvctl_session_file *file, size_t *at, bool *end, qkv_error *error) {
  const uint8_t *bytes = file->mapping;
  record_header header;
  if (file->bytes - *at < sizeof header)
    return qkv_fail(error, QKV_DATA_LOSS, "it ends after %zu records, it was not written in full", file->count);
  memcpy(&header, bytes + *at, sizeof header);
  const size_t left = file->bytes - *at - sizeof header;
  if (header.magic != RECORD_MAGIC || header.kind < QKVCTL_RECORD_MODEL || header.kind > QKVCTL_RECORD_IDS)
    return qkv_fail(error, QKV_DATA_LOSS, "record %zu at byte %zu is none", file->count, *at);
  if (header.bytes > left)
    return qkv_fail(error, QKV_DATA_LOSS, "record %zu has %" PRIu64 " bytes, the file has %zu more", file->count,
                    header.bytes, left);
  const uint8_t *payload = bytes + *at + sizeof header;
  const uint64_t sum = header.checksum;
  header.checksum = 0;
  if (checksum(&header, (const void *const[2]){payload, NULL}, (const size_t[2]){(size_t)header.bytes, 0}) != sum)
    return qkv_fail(error, QKV_DATA_LOSS, "record %zu at byte %zu is damaged", file->count, *at);
  *end = header.kind == QKVCTL_RECORD_END;
  if (*end && header.position != file->count)
    return qkv_fail(error, QKV_DATA_LOSS, "it has %zu records, its end says %" PRIu64, file->count, header.position);
  if (!*end) add_record(file, &header, payload);
  const size_t padded = ((size_t)header.bytes + PAYLOAD_ALIGN - 1) / PAYLOAD_ALIGN * PAYLOAD_ALIGN;
  *at += sizeof header + (padded < left ? padded : left);
  return QKV_OK;
}

static qkv_status read_records(qkvctl_session_file *file, qkv_error *error) {
  file_header header = {0};
  size_t at = sizeof header;
  bool end = false;
  if (file->bytes >= sizeof header) memcpy(&header, file->mapping, sizeof header);
  if (header.magic != FILE_MAGIC) return qkv_fail(error, QKV_DATA_LOSS, "it is no session of qkvctl fetch --coded");
  if (header.format < FORMAT_LEAST || header.format > FORMAT || header.reserved != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "its format is %" PRIu32 ", known are %d to %d", header.format,
                    FORMAT_LEAST, FORMAT);
  while (!end) QKV_TRY(read_record(file, &at, &end, error));
  return at == file->bytes ? QKV_OK : qkv_fail(error, QKV_DATA_LOSS, "it goes on behind its end");
}

qkv_status qkvctl_session_file_open(const char *path, qkvctl_session_file **out, qkv_error *error) {
  qkvctl_session_file *file = calloc(1, sizeof *file);
  assert(file != NULL);
  qkv_status status = qkv_format_map(path, &file->mapping, &file->bytes, error);
  if (status == QKV_OK && read_records(file, error) != QKV_OK) status = qkv_error_prefix(error, "%s: ", path);
  if (status != QKV_OK) qkvctl_session_file_close(&file);
  *out = file;
  return status;
}

void qkvctl_session_file_close(qkvctl_session_file **file) {
  qkvctl_session_file *left = *file;
  if (left == NULL) return;
  *file = NULL;
  if (left->mapping != NULL) (void)munmap(left->mapping, left->bytes);
  free(left->records);
  free(left);
}

size_t qkvctl_session_file_count(const qkvctl_session_file *file) {
  return file->count;
}

qkvctl_record qkvctl_session_file_at(const qkvctl_session_file *file, size_t i) {
  assert(i < file->count);
  return file->records[i];
}
