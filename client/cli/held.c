#include "client/cli/held.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <xxhash.h>

#include "client/cli/cli.h"
#include "engine/codec/page.h"

static qkv_code refuse(qkv_call_error *error, const char *format, ...) __attribute__((format(printf, 2, 3)));

static qkv_code refuse(qkv_call_error *error, const char *format, ...) {
  va_list arguments;
  error->code = QKV_FAILED_PRECONDITION;
  va_start(arguments, format);
  (void)vsnprintf(error->text, sizeof error->text, format, arguments);
  va_end(arguments);
  return error->code;
}

// ---- Token ids ----

// `*all`: both have the ids of all that the target holds, and they are the same.
static qkv_code compare_ids(const qkvctl_target_config *config, const qkvctl_held *held, bool *all,
                            qkv_call_error *error) {
  const size_t known = config->token_count;
  uint32_t *ids = NULL;
  size_t count = 0, same = 0;
  uint64_t longest = 0;
  *all = false;
  if (known == 0) return 0;
  qkv_code code = qkvctl_source_ids(config->client, config->session, &ids, &count, error);
  while (same < count && same < known && ids[same] == config->token_ids[same]) same++;
  if (code == 0 && same < count && same < known)
    code =
        refuse(error,
               "the target's session %s has another token at position %zu; truncate it to %zu, or close it, and copy "
               "again",
               config->session, same, same / QKV_PAGE_TOKENS * QKV_PAGE_TOKENS);
  for (size_t layer = 0; layer < held->layers; layer++)
    longest = held->lengths[layer] > longest ? held->lengths[layer] : longest;
  *all = held->same_root && same >= longest;
  free(ids);
  return code;
}

// ---- Rows ----

// What holds one position: a page, or an exact row.
typedef struct witness {
  bool found, page;
  uint64_t position;  // of the page
  uint64_t hash;
} witness;

static bool see_page(void *context, const qkv_client_page *page) {
  *(witness *)context = (witness){true, true, page->position, XXH3_64bits(page->image, page->bytes)};
  return true;
}

static bool see_rows(void *context, const qkv_client_rows *rows) {
  const uint64_t keys = XXH3_64bits(rows->k.data, rows->k.bytes);
  *(witness *)context =
      (witness){true, false, rows->position, XXH3_64bits_withSeed(rows->v.data, rows->v.bytes, keys)};
  return true;
}

// The layer's position, as both have it.
static qkv_code compare_at(const qkvctl_target_config *config, uint32_t layer, uint64_t position,
                           qkv_call_error *error) {
  witness ours = {0}, theirs = {0};
  const qkv_client_coded_receiver to_ours = {see_page, see_rows, &ours}, to_theirs = {see_page, see_rows, &theirs};
  const qkv_client_fetch request = {.session = config->session,
                                    .layers = &layer,
                                    .layer_count = 1,
                                    .begin = position,
                                    .end = position + 1,
                                    .dtype = (int)config->model->dtype};
  qkv_code code = config->rows(config->context, layer, position, position + 1, &to_ours, error);
  if (code == 0) code = qkv_client_fetch_pages(config->client, &request, &to_theirs, error);
  if (code != 0) return code;
  if (ours.found && theirs.found && ours.page == theirs.page && ours.hash == theirs.hash) return 0;
  // Exact rows that have been coded since, on one side: the page before is looked at next time.
  if (ours.found && theirs.found && ours.page != theirs.page)
    return refuse(error,
                  "layer %" PRIu32 " of the target's session %s has %s at position %" PRIu64
                  ", the source has %s; truncate the target to %" PRIu64 " and copy again",
                  layer, config->session, theirs.page ? "a page" : "exact rows", position,
                  ours.page ? "a page" : "exact rows", ours.page ? ours.position : theirs.position);
  return refuse(
      error,
      "layer %" PRIu32 " of the target's session %s has other rows at position %" PRIu64
      " than the source: it is of other tokens, or has lost bits (token ids of all its rows, which could tell, "
      "are not known); truncate it to 0, or close it, and copy again",
      layer, config->session, position);
}

static qkv_code compare_layer(const qkvctl_target_config *config, uint32_t layer, uint64_t length,
                              qkv_call_error *error) {
  const uint64_t first = config->info->first_position;
  if (length <= first) return 0;
  const qkv_code code = compare_at(config, layer, length - 1, error);
  if (code != 0 || length - first <= QKV_PAGE_TOKENS) return code;
  return compare_at(config, layer, first, error);
}

qkv_code qkvctl_held_check(const qkvctl_target_config *config, const qkvctl_held *held, qkv_call_error *error) {
  bool all = false;
  qkv_code code = compare_ids(config, held, &all, error);
  for (uint32_t layer = 0; layer < held->layers && code == 0; layer++) {
    const uint64_t most = layer < config->info->n_lengths ? config->info->lengths[layer] : 0;
    if (held->lengths[layer] > most)
      code =
          refuse(error,
                 "the target's session %s has %" PRIu64 " positions in layer %" PRIu32 ", the source has %" PRIu64
                 ": it has gone on since, or is another one; truncate it to %" PRIu64 ", or close it, and copy again",
                 config->session, held->lengths[layer], layer, most, most);
  }
  for (uint32_t layer = 0; layer < held->layers && code == 0 && !all; layer++)
    code = compare_layer(config, layer, held->lengths[layer], error);
  return code;
}
