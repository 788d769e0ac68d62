// The contract's own description: protoc's FileDescriptorSet, embedded at build time, for server reflection.
//
// Files and symbols are looked for by walking the set, which has a few kilobytes. Threads: any; nothing changes.
#ifndef QKV_SERVER_HANDLERS_DESCRIPTORS_H
#define QKV_SERVER_HANDLERS_DESCRIPTORS_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/bytes.h"

#define QKVI_DESCRIPTOR_FILES_MAX 32
#define QKVI_DESCRIPTOR_SERVICES_MAX 32
#define QKVI_DESCRIPTOR_NAME_MAX 128

// The file "qkv/v1/model.proto", or false.
bool qkvi_descriptors_file(const char *name, size_t *file);

// The file that declares a package's message, enum, service, method or field: "qkv.v1.KvCache.Attend".
bool qkvi_descriptors_symbol(const char *symbol, size_t *file);

// The FileDescriptorProto of `file` and of all it imports, itself first. Returns how many.
size_t qkvi_descriptors_with_imports(size_t file, qkv_segment out[QKVI_DESCRIPTOR_FILES_MAX]);

// Full names of all services. Returns how many.
size_t qkvi_descriptors_services(char names[QKVI_DESCRIPTOR_SERVICES_MAX][QKVI_DESCRIPTOR_NAME_MAX]);

#endif
