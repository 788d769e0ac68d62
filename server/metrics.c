#include "server/metrics.h"

const qkv_metric qkv_metric_table[QKV_METRIC_COUNT] = {
#define X(id, name, kind, help) {name, kind, help},
    QKV_METRIC_MAP(X)
#undef X
};
