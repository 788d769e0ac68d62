// Sessions that are not used: their records packed, and out of memory. The layouts are drawn in index.h.
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "storage/index_internal.h"

typedef struct payload_header {
  uint64_t magic;
  uint32_t version, count;
} payload_header;

_Static_assert(sizeof(payload_header) == 16, "no padding");

#define PAYLOAD_MAGIC UINT64_C(0x5845444e49564b51)  // "QKVINDEX"
enum { PAYLOAD_VERSION = 1 };

// ---- Packing ----

enum {
  NUMBER = 1 << 0,
  POSITION = 1 << 1,
  LAYER = 1 << 2,
  PLACE = 1 << 3,
  BLOCKS = 1 << 4,
  RAW = 1 << 5,
  TOKENS = 1 << 6,
  KIND = 1 << 7,
  PACKED_MAX = 1 + 9 * 10  // bytes of a record: flags, and nine varints
};

_Static_assert(sizeof(payload_header) + QKVI_PACKED_MAX * PACKED_MAX < 1 << 23,
               "as wide as the fields of index_session");

static uint8_t *put_varint(uint8_t *at, uint64_t value) {
  for (; value >= 0x80; value >>= 7) *at++ = (uint8_t)(value | 0x80);
  *at++ = (uint8_t)value;
  return at;
}

// NULL: it does not end before `end`, or is no 64-bit number.
static const uint8_t *take_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
  *value = 0;
  for (unsigned shift = 0; at < end && shift < 64; shift += 7) {
    *value |= (uint64_t)(*at & 0x7f) << shift;
    if ((*at++ & 0x80) == 0) return at;
  }
  return NULL;
}

// What follows from a record, of the session.
static qkvi_entry expected_after(const qkvi_entry *entry) {
  qkvi_entry next = *entry;
  next.record++;
  next.position += entry->tokens;
  next.offset += entry->extent;
  return next;
}

static uint8_t *pack_entry(uint8_t *at, const qkvi_entry *entry, const qkvi_entry *wanted) {
  uint8_t *flags = at++;
  *flags =
      (uint8_t)((entry->record != wanted->record ? NUMBER : 0) |
                (entry->position != wanted->position ? POSITION : 0) | (entry->layer != wanted->layer ? LAYER : 0) |
                (entry->segment != wanted->segment || entry->offset != wanted->offset ? PLACE : 0) |
                (entry->extent != wanted->extent ? BLOCKS : 0) | (entry->raw_bytes != wanted->raw_bytes ? RAW : 0) |
                (entry->tokens != wanted->tokens ? TOKENS : 0) | (entry->kind != wanted->kind ? KIND : 0));
  if (*flags & NUMBER) at = put_varint(at, entry->record - wanted->record);  // they ascend
  if (*flags & POSITION) at = put_varint(at, entry->position);
  if (*flags & LAYER) at = put_varint(at, entry->layer);
  if (*flags & PLACE) at = put_varint(put_varint(at, entry->segment), entry->offset / QKV_STORAGE_BLOCK);
  if (*flags & BLOCKS) at = put_varint(at, entry->extent / QKV_STORAGE_BLOCK);
  if (*flags & RAW) at = put_varint(at, entry->raw_bytes);
  if (*flags & TOKENS) at = put_varint(at, entry->tokens);
  if (*flags & KIND) at = put_varint(at, entry->kind);
  return at;
}

// `entry` is what is expected, and becomes what is there. NULL: the bytes end before, or have a field that is too
// large.
static const uint8_t *unpack_entry(const uint8_t *at, const uint8_t *end, qkvi_entry *entry) {
  uint64_t more = 0, layer = entry->layer, segment = entry->segment, block = entry->offset / QKV_STORAGE_BLOCK;
  uint64_t blocks = entry->extent / QKV_STORAGE_BLOCK, raw = entry->raw_bytes, tokens = entry->tokens;
  uint64_t kind = entry->kind;
  if (at == NULL || at == end) return NULL;
  const uint8_t flags = *at++;
  const struct {
    uint8_t flag;
    uint64_t *value, max;
  } fields[] = {{NUMBER, &more, UINT64_MAX},
                {POSITION, &entry->position, UINT64_MAX},
                {LAYER, &layer, QKV_RECORD_LAYERS_MAX - 1},
                {PLACE, &segment, QKVI_SEGMENTS_MAX - 1},
                {PLACE, &block, (1u << 24) - 1},
                {BLOCKS, &blocks, (1u << 20) - 1},
                {RAW, &raw, QKV_RECORD_BYTES_MAX},
                {TOKENS, &tokens, QKV_RECORD_TOKENS_MAX},
                {KIND, &kind, QKVI_RECORD_INDEX}};
  for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
    if (flags & fields[i].flag) at = take_varint(at, end, fields[i].value);
    if (at == NULL || *fields[i].value > fields[i].max) return NULL;
  }
  entry->record += more;
  entry->layer = (uint32_t)layer;
  entry->segment = (uint32_t)segment;
  entry->offset = block * QKV_STORAGE_BLOCK;
  entry->extent = blocks * QKV_STORAGE_BLOCK;
  entry->raw_bytes = (uint32_t)raw;
  entry->tokens = (uint32_t)tokens;
  entry->kind = (uint16_t)kind;
  return at;
}

static int compare_entries(const void *a, const void *b) {
  const qkvi_entry *first = a, *second = b;
  return first->record < second->record ? -1 : first->record > second->record;
}

// The session's records, which are not packed, in the order of their numbers; the caller frees them.
static qkvi_entry *list_entries(const qkvi_index *index, const index_session *session, uint32_t *count) {
  const uint64_t all = qkvi_index_count(index, session);
  qkvi_entry *entries = qkvi_index_checked(malloc((all + 1) * sizeof *entries));
  qkvi_index_walk walk;
  *count = 0;
  qkvi_index_walk_init(index, session->session, &walk);
  while (*count < all && qkvi_index_walk_next(index, &walk, &entries[*count])) ++*count;
  qsort(entries, *count, sizeof *entries, compare_entries);
  return entries;
}

#define MASK (UINT64_MAX >> (64 - QKVI_INDEX_MASK))

static uint64_t segment_bit(uint32_t segment) {
  return UINT64_C(1) << segment % QKVI_INDEX_MASK;
}

static packed_session *pack_entries(const qkvi_entry *entries, uint32_t count, uint64_t *segments) {
  uint8_t *data = qkvi_index_checked(malloc((size_t)count * PACKED_MAX + 1)), *at = data;
  qkvi_entry wanted = {0};
  packed_session head = {.count = count};
  *segments = 0;
  for (uint32_t i = 0; i < count; i++) {
    at = pack_entry(at, &entries[i], &wanted);
    wanted = expected_after(&entries[i]);
    *segments |= segment_bit(entries[i].segment);
  }
  head.bytes = (uint32_t)(at - data);
  packed_session *packed = qkvi_index_checked(malloc(sizeof *packed + head.bytes));
  *packed = head;
  memcpy(packed->data, data, head.bytes);
  free(data);
  return packed;
}

static void add_packed(qkvi_index *index, const index_session *session, const uint8_t *data, uint64_t bytes,
                       uint32_t count) {
  const uint8_t *at = data;
  qkvi_entry entry = {.session = session->session};
  for (uint32_t i = 0; i < count; i++) {
    at = unpack_entry(at, data + bytes, &entry);
    qkvi_index_add(index, &entry);
    entry = expected_after(&entry);
  }
  assert(at == data + bytes);
}

static void set_address(index_session *session, const void *block) {
  assert((uintptr_t)block % INDEX_ALIGN == 0);
  session->address = (uintptr_t)block / INDEX_ALIGN & (UINT64_MAX >> 4);
}

void qkvi_index_free_address(index_session *session) {
  if (qkvi_index_has_runs(session)) free((void *)(uintptr_t)(session->address * INDEX_ALIGN));
  set_address(session, NULL);
}

static qkvi_entry single_of(const index_session *session) {
  return (qkvi_entry){.record = (uint64_t)session->record_high << 40 | session->record_low,
                      .session = session->session,
                      QKVI_INDEX_FIELDS(session)};
}

static void put_place(index_session *session, const qkvi_entry *entry) {
  session->record_high = entry->record >> 40 & 0xffffff;
  session->record_low = entry->record & (UINT64_MAX >> 24);
  session->at = entry->offset / QKV_STORAGE_BLOCK & 0xffffff;
  session->segment = entry->segment & 0xffffff;
  session->raw = (entry->raw_bytes - 1) & 0xffffff;
  session->blocks = entry->extent / QKV_STORAGE_BLOCK & 0xfff;
}

static bool may_be_single(const qkvi_entry *entry) {
  return entry->position == 0 && entry->extent / QKV_STORAGE_BLOCK < 1u << 12 && entry->raw_bytes - 1 < 1u << 24;
}

static void make_single(index_session *session, const qkvi_entry *entry) {
  session->single = 1;
  put_place(session, entry);
  session->layer = entry->layer & 0xffff;
  session->tokens = (entry->tokens - 1) & 0x3ff;
  session->kind = entry->kind & 0xf;
  session->unused = 0;
}

// The caller adds the record, or packs it otherwise.
static qkvi_entry end_single(index_session *session) {
  const qkvi_entry entry = single_of(session);
  session->single = 0;
  session->runs = NULL;
  session->segments = segment_bit(entry.segment) & MASK;
  set_address(session, NULL);
  return entry;
}

// Adds the packed ones to the table.
static void unpack_session(qkvi_index *index, index_session *session) {
  if (session->single) {
    const qkvi_entry entry = end_single(session);
    index->packed_records--;
    qkvi_index_add(index, &entry);
    return;
  }
  packed_session *packed = qkvi_index_packed(session);
  if (packed == NULL) return;
  set_address(session, NULL);
  index->packed_records -= packed->count;
  index->packed_bytes -= sizeof *packed + packed->bytes;
  add_packed(index, session, packed->data, packed->bytes, packed->count);
  free(packed);
}

static void note_fresh(qkvi_index *index, const index_session *session) {
  if (qkvi_index_packed(session)->bytes < QKVI_PACKED_KEPT) return;
  if (index->fresh_count == index->fresh_capacity) {
    index->fresh_capacity = index->fresh_capacity == 0 ? 16 : 2 * index->fresh_capacity;
    index->fresh = qkvi_index_checked(realloc(index->fresh, index->fresh_capacity * sizeof *index->fresh));
  }
  index->fresh[index->fresh_count++] = session->session;
}

static void keep_packed(qkvi_index *index, index_session *session, const qkvi_entry *entries, uint32_t count) {
  uint64_t segments;
  packed_session *packed = pack_entries(entries, count, &segments);
  set_address(session, packed);
  session->segments = segments & MASK;
  index->packed_bytes += sizeof *packed + packed->bytes;
}

// Of one that is unloaded, what came since stays as it is.
static void pack_session(qkvi_index *index, index_session *session) {
  if (session->unloaded || session->single || session->runs == NULL) return;
  unpack_session(index, session);  // what came since goes with the others
  if (qkvi_index_count(index, session) > QKVI_PACKED_MAX) return;
  uint32_t count;
  qkvi_entry *entries = list_entries(index, session, &count);
  index->packing = true;
  for (uint32_t i = 0; i < count; i++) qkvi_index_remove(index, entries[i].record);
  index->packing = false;
  index->packed_records += count;
  if (count == 1 && may_be_single(entries)) {
    make_single(session, entries);
  } else {
    keep_packed(index, session, entries, count);
    note_fresh(index, session);
  }
  free(entries);
}

void qkvi_index_pack(qkvi_index *index, uint64_t session, bool now) {
  index_session *found = qkvi_index_session(index, session);
  if (found == NULL) return;
  found->stays_packed = true;
  if (!now) return;
  pack_session(index, found);
  qkvi_index_shrink(index);
}

void qkvi_index_unpack(qkvi_index *index, uint64_t session) {
  index_session *found = qkvi_index_session(index, session);
  if (found == NULL) return;
  found->stays_packed = false;
  unpack_session(index, found);
}

static bool may_lie_in(uint64_t segments, uint32_t segment) {
  return segment == QKVI_ANY_SEGMENT || (segments & segment_bit(segment)) != 0;
}

static bool lies_in(const index_session *session, uint32_t segment) {
  if (session->single) return segment == QKVI_ANY_SEGMENT || session->segment == segment;
  const packed_session *packed = qkvi_index_packed(session);
  if (packed == NULL || !may_lie_in(session->segments, segment)) return false;
  const uint8_t *at = packed->data;
  qkvi_entry entry = {.session = session->session};
  for (uint32_t i = 0; i < packed->count; i++) {
    at = unpack_entry(at, packed->data + packed->bytes, &entry);
    if (segment == QKVI_ANY_SEGMENT || entry.segment == segment) return true;
    entry = expected_after(&entry);
  }
  return false;
}

void qkvi_index_unpack_segment(qkvi_index *index, uint32_t segment) {
  index_session *at;
  for (uint32_t place = 0; (at = qkvi_numbered_next(&index->sessions, &place)) != NULL;) {
    if (lies_in(at, segment)) unpack_session(index, at);
  }
}

void qkvi_index_pack_again(qkvi_index *index) {
  index_session *at;
  for (uint32_t place = 0; (at = qkvi_numbered_next(&index->sessions, &place)) != NULL;) {
    if (at->stays_packed) pack_session(index, at);
  }
  qkvi_index_shrink(index);
}

// ---- Leaving memory ----

static qkvi_entry *apart_of(const index_session *session) {
  return (qkvi_entry *)(uintptr_t)(session->address * INDEX_ALIGN);
}

static qkvi_entry unloaded_to(const index_session *session) {
  if (session->apart) return *apart_of(session);
  qkvi_entry entry = single_of(session);
  entry.layer = 0;
  entry.tokens = 1;
  entry.kind = QKVI_RECORD_INDEX;
  return entry;
}

static void put_apart(index_session *session, const qkvi_entry *entry) {
  qkvi_entry *apart = qkvi_index_checked(malloc(sizeof *apart));
  *apart = *entry;
  session->apart = 1;
  set_address(session, apart);
}

static void put_inside(index_session *session, const qkvi_entry *entry) {
  assert(entry->extent / QKV_STORAGE_BLOCK < 1u << 12 && entry->raw_bytes - 1 < 1u << 24);
  session->apart = 0;
  put_place(session, entry);
}

static void set_apart(index_session *session) {
  const qkvi_entry entry = unloaded_to(session);
  put_apart(session, &entry);
  session->runs = NULL;
}

void qkvi_index_make_place(qkvi_index *index, index_session *session) {
  if (session->single) {
    const qkvi_entry entry = end_single(session);
    keep_packed(index, session, &entry, 1);
  } else {
    set_apart(session);
  }
}

void qkvi_index_join(index_session *session) {
  qkvi_entry *apart = apart_of(session);
  put_inside(session, apart);
  free(apart);
}

bool qkvi_index_take_fresh(qkvi_index *index, uint64_t *session) {
  if (index->fresh_count == 0) return false;
  *session = index->fresh[--index->fresh_count];
  if (index->fresh_count == 0) qkvi_index_drop_fresh(index);
  return true;
}

void qkvi_index_drop_fresh(qkvi_index *index) {
  free(index->fresh);
  index->fresh = NULL;
  index->fresh_count = index->fresh_capacity = 0;
}

uint8_t *qkvi_index_payload(const qkvi_index *index, uint64_t session, uint64_t *bytes) {
  const index_session *found = qkvi_index_session(index, session);
  const packed_session *packed = found == NULL ? NULL : qkvi_index_packed(found);
  if (packed == NULL || packed->writing != 0) return NULL;
  const payload_header header = {.magic = PAYLOAD_MAGIC, .version = PAYLOAD_VERSION, .count = packed->count};
  *bytes = sizeof header + packed->bytes;
  uint8_t *payload = qkvi_index_checked(malloc(*bytes));
  memcpy(payload, &header, sizeof header);
  memcpy(payload + sizeof header, packed->data, packed->bytes);
  return payload;
}

void qkvi_index_writing(qkvi_index *index, uint64_t session, uint64_t record) {
  qkvi_index_packed(qkvi_index_session(index, session))->writing = record;
}

bool qkvi_index_unload(qkvi_index *index, const qkvi_entry *entry) {
  index_session *session = qkvi_index_session(index, entry->session);
  packed_session *packed = session == NULL ? NULL : qkvi_index_packed(session);
  if (packed == NULL || packed->writing != entry->record) return false;
  packed->writing = 0;
  if (entry->extent == 0) {
    note_fresh(index, session);
    return false;
  }
  index->packed_bytes -= sizeof *packed + packed->bytes;
  session->unloaded = 1;
  session->segments |= segment_bit(entry->segment) & MASK;
  if (session->runs == NULL) {
    put_inside(session, entry);
  } else {
    put_apart(session, entry);
  }
  free(packed);
  return true;
}

bool qkvi_index_unloaded(const qkvi_index *index, uint64_t session, qkvi_entry *entry) {
  const index_session *found = qkvi_index_session(index, session);
  if (found == NULL || !found->unloaded) return false;
  *entry = unloaded_to(found);
  return true;
}

// Whether the packed records are possible, and not in the index yet.
static bool are_right(const qkvi_index *index, const index_session *unloaded, uint32_t count, const uint8_t *data,
                      uint64_t bytes, bool (*lies)(void *context, const qkvi_entry *entry), void *context) {
  const uint8_t *at = data;
  qkvi_entry entry = {0};
  uint64_t before = 0;
  for (uint32_t i = 0; i < count; i++) {
    at = unpack_entry(at, data + bytes, &entry);
    if (at == NULL || entry.record <= before || entry.tokens == 0 || entry.raw_bytes == 0 || entry.extent == 0 ||
        (unloaded->segments & segment_bit(entry.segment)) == 0 || !lies(context, &entry) ||
        qkvi_index_find(index, entry.record, NULL))
      return false;
    before = entry.record;
    entry = expected_after(&entry);
  }
  return at == data + bytes;
}

bool qkvi_index_load(qkvi_index *index, uint64_t session, const uint8_t *payload, uint64_t bytes,
                     bool (*lies)(void *context, const qkvi_entry *entry), void *context) {
  index_session *found = qkvi_index_session(index, session);
  payload_header header = {0};
  if (bytes >= sizeof header) memcpy(&header, payload, sizeof header);
  if (header.magic != PAYLOAD_MAGIC || header.version != PAYLOAD_VERSION || header.count > QKVI_PACKED_MAX ||
      !are_right(index, found, header.count, payload + sizeof header, bytes - sizeof header, lies, context))
    return false;
  if (!found->apart) set_apart(found);
  qkvi_index_free_address(found);
  found->unloaded = found->apart = 0;
  index->packed_records -= header.count;
  add_packed(index, found, payload + sizeof header, bytes - sizeof header, header.count);
  return true;
}

uint64_t *qkvi_index_list_unloaded(const qkvi_index *index, uint32_t segment, size_t *count) {
  uint64_t *list = qkvi_index_checked(malloc((index->sessions.count + 1) * sizeof *list));
  const index_session *at;
  *count = 0;
  for (uint32_t place = 0; (at = qkvi_numbered_next(&index->sessions, &place)) != NULL;) {
    if (at->unloaded && may_lie_in(at->segments, segment)) list[(*count)++] = at->session;
  }
  return list;
}
