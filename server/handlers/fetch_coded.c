#include "server/handlers/fetch_coded.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "engine/cache/layer_coded.h"
#include "engine/cache/session_spill.h"
#include "server/handlers/block.h"
#include "server/handlers/discard.h"

enum { PAGES_MAX = 1024, RESPONSE_BYTES = 1048576 };

// Fields of FetchResponse and CodedPage.
enum { RESPONSE_PAGES = 5, PAGE_TOKENS = 1, PAGE_HASH = 2, PAGE_IMAGE = 15 };

typedef struct run_page {
  size_t offset;  // of its image in the block
  uint32_t bytes, tokens;
  uint64_t hash;  // of its calibration; 0: none
} run_page;

struct qkvi_coded_run {
  uint64_t position, tokens;
  qkvi_response_block *block;
  size_t count;
  run_page pages[PAGES_MAX];
};

// Of the calibration that a page of the session names.
static uint64_t find_hash(qkv_session *session, uint32_t version) {
  enum { AT_ONCE = 16 };
  const qkv_calibration *calibrations[AT_ONCE];
  uint64_t hash = 0;
  for (size_t first = 0, count = AT_ONCE; count == AT_ONCE && hash == 0; first += count) {
    count = qkv_session_calibrations(session, first, calibrations, AT_ONCE);
    for (size_t i = 0; i < count; i++) {
      if (qkv_calibration_version(calibrations[i]) == version) hash = qkv_calibration_hash(calibrations[i]);
      qkv_calibration_unref(&calibrations[i]);
    }
  }
  return hash;
}

// How many of the pages a response takes: by tokens where the client sets a number, else by bytes.
static size_t choose_pages(const qkvi_coded_wanted *wanted, qkv_coded_page *pages) {
  const uint64_t bytes_max = wanted->tokens_max > 0 ? QKVI_DISCARD_BYTES : RESPONSE_BYTES;
  const size_t count = qkv_layer_coded_pages(wanted->layer, wanted->begin, wanted->end, bytes_max, pages, PAGES_MAX);
  if (wanted->tokens_max == 0 || count == 0) return count;
  uint64_t tokens = pages[0].tokens;
  size_t taken = 1;
  while (taken < count && tokens + pages[taken].tokens <= wanted->tokens_max) tokens += pages[taken++].tokens;
  return taken;
}

static void copy_pages(qkvi_coded_run *run, qkv_session *session, const qkv_coded_page *pages) {
  uint32_t version = 0;
  uint64_t hash = 0;
  size_t offset = 0;
  for (size_t i = 0; i < run->count; i++) {
    if (pages[i].coder->calibration != version) {
      version = pages[i].coder->calibration;
      hash = version == 0 ? 0 : find_hash(session, version);
    }
    memcpy(run->block->data + offset, pages[i].image, pages[i].bytes);
    run->pages[i] = (run_page){.offset = offset, .bytes = pages[i].bytes, .tokens = pages[i].tokens, .hash = hash};
    run->tokens += pages[i].tokens;
    offset += pages[i].bytes;
  }
}

qkv_status qkvi_coded_run_create(const qkv_daemon *daemon, const qkvi_coded_wanted *wanted, qkvi_coded_run **out,
                                 qkv_error *error) {
  qkv_coded_page pages[PAGES_MAX];
  uint64_t bytes = 0;
  *out = NULL;
  assert(wanted->begin < wanted->layer->sealed);
  const size_t count = choose_pages(wanted, pages);
  if (count == 0) return QKV_UNAVAILABLE;
  for (size_t i = 0; i < count; i++) bytes += pages[i].bytes;
  qkvi_response_block *block = NULL;
  QKV_TRY(qkvi_block_create(wanted->call, bytes, (uint64_t)daemon->options->limit_response_bytes, &block, error));
  qkvi_coded_run *run = malloc(sizeof *run);
  if (run == NULL) abort();
  run->position = pages[0].position;
  run->tokens = 0;
  run->block = block;
  run->count = count;
  copy_pages(run, wanted->session, pages);
  *out = run;
  return QKV_OK;
}

void qkvi_coded_run_destroy(qkvi_coded_run **run) {
  qkvi_coded_run *left = *run;
  if (left == NULL) return;
  *run = NULL;
  qkvi_block_release(left->block);
  free(left);
}

uint64_t qkvi_coded_run_position(const qkvi_coded_run *run) {
  return run->position;
}

uint64_t qkvi_coded_run_tokens(const qkvi_coded_run *run) {
  return run->tokens;
}

uint64_t qkvi_coded_run_put(const qkvi_coded_run *run, qkv_wire_writer *writer) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < run->count; i++) {
    const run_page *page = &run->pages[i];
    qkv_wire_begin(writer, RESPONSE_PAGES);
    qkv_wire_put_varint(writer, PAGE_TOKENS, page->tokens);
    qkv_wire_put_fixed64(writer, PAGE_HASH, page->hash);
    qkvi_block_hold(run->block);
    qkv_wire_put_reference(writer, PAGE_IMAGE, run->block->data + page->offset, page->bytes, run->block);
    qkv_wire_end(writer);
    bytes += page->bytes;
  }
  return bytes;
}
