#include "storage/storage.h"

void qkv_storage_config_init(qkv_storage_config *config) {
  *config = (qkv_storage_config){.io = "auto",
                                 .segment_bytes = UINT64_C(256) << 20,
                                 .dirty_bytes_max = UINT64_C(64) << 20,
                                 .compact_bytes_per_s = UINT64_C(64) << 20,
                                 .compact_below = 0.5,
                                 .sync_ms = 1000,
                                 .encoders = 1,
                                 .depth = 32,
                                 .open_files_max = 64,
                                 .compress = true};
}
