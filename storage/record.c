#include "storage/record.h"

#include <assert.h>
#include <math.h>
#include <string.h>
#include <xxhash.h>
#include <zstd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are read where they lie");

// Level 1 is what a disk of some GB/s leaves time for. Samples: three pieces of a payload predict the saving well
// enough to skip the attempt for codes that do not compress.
enum { LEVEL = 1, SAMPLE_BYTES = 8192, SAMPLES = 3 };

uint64_t qkvi_record_extent(uint64_t stored_bytes) {
  return (sizeof(qkv_record_header) + stored_bytes + QKV_STORAGE_BLOCK - 1) / QKV_STORAGE_BLOCK * QKV_STORAGE_BLOCK;
}

void qkvi_record_describe(qkv_record_header *header, const qkv_record_meta *meta, uint64_t record, uint64_t raw_bytes,
                          qkv_record_encoding encoding, const void *payload, uint64_t stored_bytes) {
  *header = (qkv_record_header){.magic = QKV_RECORD_MAGIC,
                                .version = QKV_RECORD_VERSION,
                                .header_bytes = sizeof *header,
                                .kind = meta->kind,
                                .encoding = (uint8_t)encoding,
                                .record = record,
                                .session = meta->session,
                                .position = meta->position,
                                .layer = meta->layer,
                                .tokens = meta->tokens,
                                .codec = meta->codec,
                                .calibration = meta->calibration,
                                .hash = {meta->hash[0], meta->hash[1]},
                                .raw_bytes = raw_bytes,
                                .stored_bytes = stored_bytes,
                                .payload_hash = XXH3_64bits(payload, stored_bytes)};
}

static uint64_t hash_of(const qkv_record_header *header, uint64_t store) {
  return XXH3_64bits_withSeed(header, offsetof(qkv_record_header, header_hash), store);
}

void qkvi_record_place(qkv_record_header *header, uint64_t store, uint64_t segment, uint64_t offset,
                       uint64_t journal) {
  header->segment = segment;
  header->offset = offset;
  header->journal = journal;
  header->header_hash = hash_of(header, store);
}

const char *qkvi_record_check(const qkv_record_header *header, uint64_t store, uint64_t segment, uint64_t offset) {
  if (header->magic != QKV_RECORD_MAGIC) return "no record";
  if (header->header_hash != hash_of(header, store)) return "header is damaged";
  if (header->version != QKV_RECORD_VERSION || header->header_bytes != sizeof *header) return "unknown version";
  if (header->encoding > QKV_RECORD_ZSTD || header->zero != 0) return "unknown encoding";
  if (header->segment != segment || header->offset != offset) return "lies elsewhere than it should";
  if (offset % QKV_STORAGE_BLOCK != 0 || offset >= QKV_SEGMENT_BYTES_MAX) return "impossible offset";
  if (header->raw_bytes < 1 || header->raw_bytes > QKV_RECORD_BYTES_MAX || header->stored_bytes < 1 ||
      header->stored_bytes > header->raw_bytes) {
    return "impossible size";
  }
  if (header->encoding == QKV_RECORD_PLAIN && header->stored_bytes != header->raw_bytes) return "impossible size";
  if (header->tokens < 1 || header->tokens > QKV_RECORD_TOKENS_MAX) return "impossible tokens";
  if (header->layer >= QKV_RECORD_LAYERS_MAX || header->kind > QKV_RECORD_KINDS || header->record == 0)
    return "impossible layer, kind or number";
  return NULL;
}

const char *qkvi_record_check_payload(const qkv_record_header *header, const void *payload) {
  return XXH3_64bits(payload, header->stored_bytes) == header->payload_hash ? NULL : "payload is damaged";
}

const char *qkvi_record_decode(const qkv_record_header *header, const void *payload, void *raw) {
  if (header->encoding == QKV_RECORD_PLAIN) {
    memcpy(raw, payload, header->raw_bytes);
    return NULL;
  }
  const size_t made = ZSTD_decompress(raw, header->raw_bytes, payload, header->stored_bytes);
  return made == header->raw_bytes ? NULL : "zstd does not take the payload";
}

// The least saving that is worth the time of decompression.
static uint64_t saving_of(uint64_t bytes) {
  return bytes - bytes * 3 / 100 - 1;
}

// Shorter payloads are tried as a whole.
static bool has_samples(uint64_t bytes) {
  return bytes > (uint64_t)SAMPLES * SAMPLE_BYTES;
}

static const uint8_t *sample_of(const uint8_t *raw, uint64_t bytes, uint64_t i) {
  return raw + (bytes - SAMPLE_BYTES) / (SAMPLES - 1) * i;
}

// Whether the samples' bytes are so evenly frequent that no code for single bytes saves 3 %, by their entropy,
// log2(n) - sum(count * log2(count)) / n. zstd at this level finds no more in codes: what repeats in them are single
// bytes. Takes a fifth of the time of trying zstd.
static bool samples_are_dense(const uint8_t *raw, uint64_t bytes) {
  const float n = SAMPLES * SAMPLE_BYTES;
  uint32_t counts[4][256] = {0};  // four, so that equal neighbours do not wait for each other
  for (uint64_t i = 0; i < SAMPLES; i++) {
    const uint8_t *sample = sample_of(raw, bytes, i);
    for (size_t at = 0; at < SAMPLE_BYTES; at += 4) {
      for (size_t lane = 0; lane < 4; lane++) counts[lane][sample[at + lane]]++;
    }
  }
  float sum = 0;
  for (size_t value = 0; value < 256; value++) {
    const uint32_t count = counts[0][value] + counts[1][value] + counts[2][value] + counts[3][value];
    if (count > 0) sum += (float)count * log2f((float)count);
  }
  return log2f(n) - sum / n > 8 * 0.97f;
}

static bool samples_shrink(ZSTD_CCtx *zstd, const uint8_t *raw, uint64_t bytes, uint8_t *out) {
  if (!has_samples(bytes)) return true;
  uint64_t made = 0;
  for (uint64_t i = 0; i < SAMPLES; i++) {
    const size_t size = ZSTD_compressCCtx(zstd, out, bytes, sample_of(raw, bytes, i), SAMPLE_BYTES, LEVEL);
    if (ZSTD_isError(size)) return false;
    made += size;
  }
  return made <= saving_of((uint64_t)SAMPLES * SAMPLE_BYTES);
}

uint64_t qkvi_record_compress(const void *raw, uint64_t bytes, void *out) {
  assert(bytes <= QKV_RECORD_BYTES_MAX);
  if (has_samples(bytes) && samples_are_dense(raw, bytes)) return 0;
  ZSTD_CCtx *zstd = ZSTD_createCCtx();
  if (zstd == NULL) return 0;
  uint64_t stored = 0;
  if (samples_shrink(zstd, raw, bytes, out)) {
    const size_t made = ZSTD_compressCCtx(zstd, out, saving_of(bytes), raw, bytes, LEVEL);
    if (!ZSTD_isError(made)) stored = made;
  }
  ZSTD_freeCCtx(zstd);
  return stored;
}
