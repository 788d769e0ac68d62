"""The extension module qkvd_native._qkv: the part of qkv.h that Python uses, in cffi's API mode.

libqkv is found by pkg-config (`qkv.pc`), or where QKV_INCLUDE_DIR and QKV_LIBRARY_DIR say; of the latter the module
remembers the place.
"""

import os
import subprocess

from cffi import FFI


def pkg_config(option, prefix):
    """What pkg-config says, without the options' letters."""
    words = subprocess.run(["pkg-config", option, "qkv"], check=True, capture_output=True, text=True).stdout.split()
    return [word.removeprefix(prefix) for word in words]


def places():
    """Where header and library are, as arguments of an extension."""
    include, library = os.environ.get("QKV_INCLUDE_DIR"), os.environ.get("QKV_LIBRARY_DIR")
    if include and library:
        return {"include_dirs": [include], "library_dirs": [library], "runtime_library_dirs": [library]}
    try:
        return {"include_dirs": pkg_config("--cflags-only-I", "-I"), "library_dirs": pkg_config("--libs-only-L", "-L")}
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            "qkvd-native needs libqkv: install it (cmake --install), or set QKV_INCLUDE_DIR and QKV_LIBRARY_DIR to the"
            f" folders of qkv.h and libqkv.so. {error}"
        ) from error


# Only what is used: "..." stands for the other members, whose places the compiler knows.
DECLARATIONS = """
typedef int qkv_code;
typedef struct { int code; char text[512]; ...; } qkv_call_error;
typedef struct qkv_client qkv_client;
typedef struct { int64_t timeout_ms; int64_t connect_timeout_ms; const char *tenant;
  const char *tls_ca, *tls_cert, *tls_key; const char *token; const char *placement; ...; } qkv_client_options;
qkv_code qkv_client_connect(const char *target, const qkv_client_options *options, qkv_client **client,
                            qkv_call_error *error);
void qkv_client_set_timeout(qkv_client *client, int64_t timeout_ms);
void qkv_client_close(qkv_client **client);

typedef struct {
  int dtype;
  int rank;
  int64_t dims[4];
  int64_t strides[4];
  const void *data;
  size_t bytes;
  ...;
} qkv_client_tensor;
typedef struct {
  const char *session;
  uint32_t layer;
  uint64_t position;
  bool k_before_rope;
  qkv_client_tensor k, v;
  const uint32_t *token_ids;
  ...;
} qkv_client_item;
qkv_code qkv_client_append(qkv_client *client, const qkv_client_item *items, size_t count, uint64_t *appended,
                           qkv_call_error *error);
qkv_code qkv_client_append_encoded(qkv_client *client, const qkv_client_item *item, unsigned threads,
                                   uint64_t *appended, qkv_call_error *error);

typedef struct {
  const char *session;
  const uint32_t *layers;
  size_t layer_count;
  uint64_t begin, end;
  int dtype;
  bool before_rope;
  ...;
} qkv_client_fetch;
typedef struct { void *data; size_t bytes; int dtype; int64_t heads, dim; ...; } qkv_client_memory;
typedef struct { qkv_client_memory k, v; uint64_t position; uint64_t tokens; ...; } qkv_client_layer_memory;
qkv_code qkv_client_fetch_into(qkv_client *client, const qkv_client_fetch *request, qkv_client_layer_memory *layers,
                               qkv_call_error *error);
typedef struct {
  void *k, *v; uint64_t capacity; uint64_t position; uint64_t tokens; size_t k_bytes, v_bytes; ...;
} qkv_client_layer_rows;
qkv_code qkv_client_fetch_decoded(qkv_client *client, const qkv_client_fetch *request, unsigned threads,
                                  qkv_client_layer_rows *layers, qkv_call_error *error);
"""

builder = FFI()
builder.cdef(DECLARATIONS)
builder.set_source("qkvd_native._qkv", '#include "qkv.h"', libraries=["qkv"], **places())

if __name__ == "__main__":
    builder.compile(verbose=True)
