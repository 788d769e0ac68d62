#include "server/handlers/descriptors.h"

#include <assert.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire.h"

// QKV_DESCRIPTORS is the file that protoc has written (server/CMakeLists.txt).
__asm__(
    ".pushsection .rodata\n"
    "qkvi_descriptors_begin: .incbin \"" QKV_DESCRIPTORS
    "\"\n"
    "qkvi_descriptors_end: .byte 0\n"
    ".popsection\n");
extern const uint8_t qkvi_descriptors_begin[] __attribute__((visibility("hidden")));
extern const uint8_t qkvi_descriptors_end[] __attribute__((visibility("hidden")));

// Field numbers of google/protobuf/descriptor.proto.
enum { SET_FILE = 1 };
enum { FILE_NAME = 1, FILE_PACKAGE = 2, FILE_DEPENDENCY = 3, FILE_MESSAGE = 4, FILE_ENUM = 5, FILE_SERVICE = 6 };
enum { MESSAGE_FIELD = 2, MESSAGE_NESTED = 3, MESSAGE_ENUM = 4 };
enum { SERVICE_METHOD = 2 };
enum { ANY_NAME = 1 };

// What contains named things, and in which fields.
typedef enum scope { NOT_NAMED, IN_FILE, IN_MESSAGE, IN_SERVICE, LEAF } scope;

static scope scope_of(scope outer, uint32_t field) {
  static const struct {
    scope outer;
    uint32_t field;
    scope inner;
  } rows[] = {
      {IN_FILE, FILE_MESSAGE, IN_MESSAGE},      {IN_FILE, FILE_ENUM, LEAF},
      {IN_FILE, FILE_SERVICE, IN_SERVICE},      {IN_MESSAGE, MESSAGE_FIELD, LEAF},
      {IN_MESSAGE, MESSAGE_NESTED, IN_MESSAGE}, {IN_MESSAGE, MESSAGE_ENUM, LEAF},
      {IN_SERVICE, SERVICE_METHOD, LEAF},
  };
  for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
    if (rows[i].outer == outer && rows[i].field == field) return rows[i].inner;
  }
  return NOT_NAMED;
}

// The next length-delimited field of a message of the set; false at its end.
static bool next_part(qkv_wire_reader *reader, uint32_t *number, qkv_segment *part) {
  for (;;) {
    qkv_wire_field field;
    bool more;
    qkv_status status = qkv_wire_next(reader, &field, &more, NULL);
    assert(status == QKV_OK);  // protoc wrote it
    (void)status;
    if (!more) return false;
    if (field.type != QKV_WIRE_BYTES) continue;
    *number = field.number;
    *part =
        (qkv_segment){.data = qkv_bytes_contiguous(field.bytes, 0, field.bytes.length), .length = field.bytes.length};
    return true;
  }
}

static void read_parts(qkv_wire_reader *reader, const qkv_segment *message) {
  qkv_wire_reader_init(reader, qkv_bytes_of(message));
}

// The first field `number`; empty if there is none.
static qkv_segment part_of(qkv_segment message, uint32_t number) {
  qkv_wire_reader reader;
  qkv_segment part;
  uint32_t found;
  read_parts(&reader, &message);
  while (next_part(&reader, &found, &part)) {
    if (found == number) return part;
  }
  return (qkv_segment){0};
}

static bool part_is(qkv_segment part, const char *text, size_t length) {
  return part.length == length && memcmp(part.data, text, length) == 0;
}

static qkv_segment whole_set(void) {
  return (qkv_segment){.data = qkvi_descriptors_begin,
                       .length = (size_t)((uintptr_t)qkvi_descriptors_end - (uintptr_t)qkvi_descriptors_begin)};
}

// All files of the set. Returns how many.
static size_t all_files(qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX]) {
  const qkv_segment set = whole_set();
  qkv_wire_reader reader;
  qkv_segment part;
  uint32_t number;
  size_t count = 0;
  read_parts(&reader, &set);
  while (next_part(&reader, &number, &part)) {
    if (number != SET_FILE) continue;
    assert(count < QKVI_DESCRIPTOR_FILES_MAX);
    files[count++] = part;
  }
  return count;
}

static bool find_file(const qkv_segment *files, size_t count, const char *name, size_t length, size_t *file) {
  for (size_t i = 0; i < count; i++) {
    if (part_is(part_of(files[i], FILE_NAME), name, length)) {
      *file = i;
      return true;
    }
  }
  return false;
}

bool qkvi_descriptors_file(const char *name, size_t *file) {
  qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX];
  size_t count = all_files(files);
  return find_file(files, count, name, strlen(name), file);
}

// Takes "prefix." off; NULL if the symbol does not begin with it.
static const char *after(const char *symbol, qkv_segment prefix) {
  if (strlen(symbol) <= prefix.length || memcmp(symbol, prefix.data, prefix.length) != 0) return NULL;
  return symbol[prefix.length] == '.' ? symbol + prefix.length + 1 : NULL;
}

// Whether `message`, a scope of kind `outer`, declares `symbol`. As deep as declarations are nested.
static bool declares(scope outer, qkv_segment message, const char *symbol) {  // NOLINT(misc-no-recursion)
  qkv_wire_reader reader;
  qkv_segment part;
  uint32_t number;
  read_parts(&reader, &message);
  while (next_part(&reader, &number, &part)) {
    scope inner = scope_of(outer, number);
    if (inner == NOT_NAMED) continue;
    qkv_segment name = part_of(part, ANY_NAME);
    if (part_is(name, symbol, strlen(symbol))) return true;
    const char *rest = after(symbol, name);
    if (rest != NULL && declares(inner, part, rest)) return true;
  }
  return false;
}

bool qkvi_descriptors_symbol(const char *symbol, size_t *file) {
  qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX];
  size_t count = all_files(files);
  for (size_t i = 0; i < count; i++) {
    const char *rest = after(symbol, part_of(files[i], FILE_PACKAGE));
    if (rest != NULL && declares(IN_FILE, files[i], rest)) {
      *file = i;
      return true;
    }
  }
  return false;
}

size_t qkvi_descriptors_with_imports(size_t file, qkv_segment out[QKVI_DESCRIPTOR_FILES_MAX]) {
  qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX];
  size_t order[QKVI_DESCRIPTOR_FILES_MAX], wanted = 1, count = all_files(files);
  bool seen[QKVI_DESCRIPTOR_FILES_MAX] = {false};
  assert(file < count);
  order[0] = file;
  seen[file] = true;
  for (size_t done = 0; done < wanted; done++) {
    out[done] = files[order[done]];
    qkv_wire_reader reader;
    qkv_segment part;
    uint32_t number;
    read_parts(&reader, &out[done]);
    while (next_part(&reader, &number, &part)) {
      size_t import;
      if (number != FILE_DEPENDENCY) continue;
      bool found = find_file(files, count, (const char *)part.data, part.length, &import);
      assert(found);  // --include_imports
      if (found && !seen[import]) {
        seen[import] = true;
        order[wanted++] = import;
      }
    }
  }
  return wanted;
}

size_t qkvi_descriptors_services(char names[QKVI_DESCRIPTOR_SERVICES_MAX][QKVI_DESCRIPTOR_NAME_MAX]) {
  qkv_segment files[QKVI_DESCRIPTOR_FILES_MAX];
  size_t services = 0, count = all_files(files);
  for (size_t i = 0; i < count; i++) {
    qkv_segment package = part_of(files[i], FILE_PACKAGE);
    qkv_wire_reader reader;
    qkv_segment part;
    uint32_t number;
    read_parts(&reader, &files[i]);
    while (next_part(&reader, &number, &part)) {
      if (number != FILE_SERVICE) continue;
      assert(services < QKVI_DESCRIPTOR_SERVICES_MAX);
      qkv_segment name = part_of(part, ANY_NAME);
      int length = snprintf(names[services++], QKVI_DESCRIPTOR_NAME_MAX, "%.*s.%.*s", (int)package.length,
                            (const char *)package.data, (int)name.length, (const char *)name.data);
      assert(length > 0 && length < QKVI_DESCRIPTOR_NAME_MAX);
      (void)length;
    }
  }
  return services;
}
