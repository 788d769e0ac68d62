// Exact rows of SYNC sessions on the SSD: the payload of a record of kind QKVI_RECORD_ROWS.
//
//   0     8   magic "QKVROWS\0"
//   8     2   version (1, 2)          10  2  dtype, of tensor.proto
//   12    4   kv_heads                16  4  key_dim              20  4  value_dim
//   24    8   position: the first token
//   32    4   tokens (1 to 64)        36  4  layer
//   40        K [tokens][kv_heads][key_dim], then V [tokens][kv_heads][value_dim], in this dtype
//             version 2: then the rows' token ids [tokens], 4 bytes each
//
// Numbers are little-endian. The checksum is the record's (storage/record.h).
//
// A start appends these rows again behind the pages that it has found, where positions continue. Rows that pages
// cover are left out: a record that was dropped may be found again. Their ids continue those of the session. Where
// records of rows of one session overlap they hold the same rows, as each truncation cuts them.
//
// Threads: the start's alone, but qkvi_rows_put (internal.h), which any may call.
#ifndef QKV_SERVER_RESIDENCY_ROWS_H
#define QKV_SERVER_RESIDENCY_ROWS_H

#include "server/residency/internal.h"

// Records of rows that recovery reported, of all sessions; each once for every session whose view has it.
typedef struct qkvi_found_rows qkvi_found_rows;

qkvi_found_rows *qkvi_found_rows_create(void);
void qkvi_found_rows_destroy(qkvi_found_rows **found);
// `ids_end`: ids of positions below count.
void qkvi_found_rows_add(qkvi_found_rows *found, const qkv_record_info *info, uint64_t ids_end);

// Once the storage is open: appends the rows found of the layer to it, from its length on, but no more than
// `tokens_max` tokens; `number` is the session's in the storage. `*length` gets the layer's length then. `*beyond` is
// raised to the end of the records, `*readable` says whether all that were needed could be read: the next start may
// be able to read the others. RESOURCE_EXHAUSTED (the arena's).
qkv_status qkvi_found_rows_take(qkvi_found_rows *found, qkv_storage *storage, qkv_session *session, uint64_t number,
                                uint32_t layer, uint64_t tokens_max, uint64_t *length, uint64_t *beyond,
                                bool *readable, qkv_error *error);
// After that: drops the records that no session needs, as pages cover them.
void qkvi_found_rows_drop(qkvi_found_rows *found, qkv_storage *storage);

#endif
