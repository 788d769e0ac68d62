// A simple model of which rows a session's view has. Every token of every session and layer has a number, which a
// fork copies from its parent and a truncation replaces by a new one. A record has the numbers that its session had
// when it was put. A session has the tokens of a record, its own or an ancestor's, whose numbers equal the session's.
//
//   parent  1 2 3 4 5 6      fork at 4      child  1 2 3 4 12 13      parent cut at 2      parent  1 2 14 15 16 17
#ifndef QKV_TESTS_FAULT_LINEAGE_H
#define QKV_TESTS_FAULT_LINEAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  LINEAGE_SESSIONS = 200,
  LINEAGE_RECORDS = 4000,
  LINEAGE_LAYERS = 3,
  LINEAGE_TOKENS = 832,
  LINEAGE_PAGE = 64,  // tokens of a record
  LINEAGE_NONE = -1,
};

typedef struct lineage {
  uint32_t last;  // number that was assigned
  uint32_t tokens[LINEAGE_SESSIONS][LINEAGE_LAYERS][LINEAGE_TOKENS];
  int parents[LINEAGE_SESSIONS];
  struct {
    int owner;
    uint32_t layer;
    uint64_t position;
    uint32_t tokens[LINEAGE_PAGE];
  } records[LINEAGE_RECORDS];
} lineage;

void lineage_open(lineage *of, size_t session);
void lineage_fork(lineage *of, size_t session, size_t parent, const uint64_t positions[LINEAGE_LAYERS]);
// `layer` may be UINT32_MAX: all.
void lineage_cut(lineage *of, size_t session, uint32_t layer, uint64_t position);
void lineage_put(lineage *of, size_t session, size_t record, uint32_t layer, uint64_t position);
uint32_t lineage_tokens(const lineage *of, size_t session, size_t record);
// Whether every view has the same tokens of both records.
bool lineage_same(const lineage *of, size_t record, size_t other);
// Whether `ancestor` is the session, or what it was forked from directly or not.
bool lineage_inherits(const lineage *of, size_t session, size_t ancestor);

#endif
