// The tables of RPC methods, one for each file of handlers. Each ends with a row with a NULL path. Methods that are
// in no table are answered UNIMPLEMENTED.
#ifndef QKV_SERVER_HANDLERS_HANDLERS_H
#define QKV_SERVER_HANDLERS_HANDLERS_H

#include "server/rpc/rpc.h"

extern const qkv_rpc_method qkvi_models_methods[];         // models.c: RegisterModel, GetModel, ListModels
extern const qkv_rpc_method qkvi_calibration_methods[];    // calibrations.c: GetCalibration
extern const qkv_rpc_method qkvi_open_session_methods[];   // open_session.c
extern const qkv_rpc_method qkvi_sessions_methods[];       // sessions.c: Close, Get, List, Truncate
extern const qkv_rpc_method qkvi_forks_methods[];          // forks.c
extern const qkv_rpc_method qkvi_append_methods[];         // append.c
extern const qkv_rpc_method qkvi_attend_methods[];         // attend.c: Attend, Decode
extern const qkv_rpc_method qkvi_fetch_methods[];          // fetch.c
extern const qkv_rpc_method qkvi_tiers_methods[];          // tiers.c: Demote, Prefetch, GetAttentionStats
extern const qkv_rpc_method qkvi_lifetime_methods[];       // lifetime.c: Pin, Touch
extern const qkv_rpc_method qkvi_lookup_methods[];         // lookup.c: HasSessions
extern const qkv_rpc_method qkvi_prefixes_methods[];       // prefixes.c: Match
extern const qkv_rpc_method qkvi_watch_methods[];          // watch.c
extern const qkv_rpc_method qkvi_put_objects_methods[];    // objects/put.c
extern const qkv_rpc_method qkvi_get_objects_methods[];    // objects/get.c
extern const qkv_rpc_method qkvi_objects_methods[];        // objects/control.c: Has, Delete, List
extern const qkv_rpc_method qkvi_shared_memory_methods[];  // shared_memory/control.c
extern const qkv_rpc_method qkvi_admin_methods[];          // admin.c: GetStatus, Drain
extern const qkv_rpc_method qkvi_compare_methods[];        // compare.c
extern const qkv_rpc_method qkvi_storage_methods[];        // storage.c: GetStorage, VerifyStorage, Compact
extern const qkv_rpc_method qkvi_quota_methods[];          // quota_calls.c: SetQuota, GetQuota
extern const qkv_rpc_method qkvi_health_methods[];         // health.c
extern const qkv_rpc_method qkvi_reflection_methods[];     // reflection.c

#endif
