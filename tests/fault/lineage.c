#include "tests/fault/lineage.h"

#include <string.h>

static void renew(lineage *of, size_t session, uint32_t layer, uint64_t position) {
  for (uint64_t i = position; i < LINEAGE_TOKENS; i++) of->tokens[session][layer][i] = ++of->last;
}

void lineage_open(lineage *of, size_t session) {
  of->parents[session] = LINEAGE_NONE;
  for (uint32_t layer = 0; layer < LINEAGE_LAYERS; layer++) renew(of, session, layer, 0);
}

void lineage_fork(lineage *of, size_t session, size_t parent, const uint64_t positions[LINEAGE_LAYERS]) {
  of->parents[session] = (int)parent;
  memcpy(of->tokens[session], of->tokens[parent], sizeof of->tokens[session]);
  for (uint32_t layer = 0; layer < LINEAGE_LAYERS; layer++) renew(of, session, layer, positions[layer]);
}

void lineage_cut(lineage *of, size_t session, uint32_t layer, uint64_t position) {
  for (uint32_t i = 0; i < LINEAGE_LAYERS; i++) {
    if (layer == UINT32_MAX || layer == i) renew(of, session, i, position);
  }
}

void lineage_put(lineage *of, size_t session, size_t record, uint32_t layer, uint64_t position) {
  of->records[record].owner = (int)session;
  of->records[record].layer = layer;
  of->records[record].position = position;
  memcpy(of->records[record].tokens, &of->tokens[session][layer][position], sizeof of->records[record].tokens);
}

bool lineage_inherits(const lineage *of, size_t session, size_t ancestor) {
  int at = (int)session;
  while (at != LINEAGE_NONE && at != (int)ancestor) at = of->parents[at];
  return at != LINEAGE_NONE;
}

uint32_t lineage_tokens(const lineage *of, size_t session, size_t record) {
  if (!lineage_inherits(of, session, (size_t)of->records[record].owner)) return 0;
  const uint32_t *has = &of->tokens[session][of->records[record].layer][of->records[record].position];
  uint32_t tokens = 0;
  while (tokens < LINEAGE_PAGE && has[tokens] == of->records[record].tokens[tokens]) tokens++;
  return tokens;
}

bool lineage_same(const lineage *of, size_t record, size_t other) {
  return of->records[record].owner == of->records[other].owner &&
         of->records[record].position == of->records[other].position &&
         of->records[record].layer == of->records[other].layer &&
         memcmp(of->records[record].tokens, of->records[other].tokens, sizeof of->records[record].tokens) == 0;
}
