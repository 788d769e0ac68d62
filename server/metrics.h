// The daemon's metrics: one row each. Handlers update them with
//
//   qkv_metric_add(&daemon->metrics[QKV_METRIC_APPEND_TOKENS], tokens);
#ifndef QKV_SERVER_METRICS_H
#define QKV_SERVER_METRICS_H

#include "engine/base/metric.h"
#include "engine/base/status.h"

// id, name, kind, help
#define QKV_METRIC_MAP(X)                                                                                           \
  X(CALLS, "qkvd_calls_total", QKV_COUNTER, "Calls that have begun, whatever became of them.")                      \
  X(CALLS_RUNNING, "qkvd_calls_running", QKV_GAUGE, "Calls running now.")                                           \
  X(CALLS_OK, "qkvd_calls_ok_total", QKV_COUNTER, "Calls answered OK.")                                             \
  X(CALLS_CANCELLED, "qkvd_calls_cancelled_total", QKV_COUNTER,                                                     \
    "Calls whose client cancelled, went away or ran into its deadline.")                                            \
  X(CALLS_BAD_REQUEST, "qkvd_calls_bad_request_total", QKV_COUNTER, "Calls answered INVALID_ARGUMENT.")             \
  X(CALLS_REFUSED, "qkvd_calls_refused_total", QKV_COUNTER,                                                         \
    "Calls answered NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION or UNIMPLEMENTED.")                              \
  X(CALLS_EXHAUSTED, "qkvd_calls_exhausted_total", QKV_COUNTER, "Calls answered RESOURCE_EXHAUSTED.")               \
  X(CALLS_DENIED, "qkvd_calls_denied_total", QKV_COUNTER, "Calls answered UNAUTHENTICATED or PERMISSION_DENIED.")   \
  X(JWT_ACCEPTED, "qkvd_jwt_accepted_total", QKV_COUNTER,                                                           \
    "JWTs with a good signature and claims, whether the auth-file knows their subject or not.")                     \
  X(JWT_REFUSED, "qkvd_jwt_refused_total", QKV_COUNTER,                                                             \
    "JWTs with a wrong signature or claims, or that had expired.")                                                  \
  X(CALLS_SILENT, "qkvd_calls_silent_total", QKV_COUNTER,                                                           \
    "Calls ended before their first message: it was late, or others needed their places.")                          \
  X(CALLS_STALLED, "qkvd_calls_stalled_total", QKV_COUNTER,                                                         \
    "Calls ended because their client did not read, or sent nothing more, for too long.")                           \
  X(CONNECTIONS, "qkvd_connections", QKV_GAUGE, "Connections open now.")                                            \
  X(CONNECTIONS_REFUSED, "qkvd_connections_refused_total", QKV_COUNTER,                                             \
    "Connections closed at once, for limit-connections or limit-peer-connections.")                                 \
  X(CONNECTIONS_CLOSED_HEADERS, "qkvd_connections_closed_headers_total", QKV_COUNTER,                               \
    "Connections closed for a header block of more than 64 KiB.")                                                   \
  X(CONNECTIONS_CLOSED_FRAMES, "qkvd_connections_closed_frames_total", QKV_COUNTER,                                 \
    "Connections closed for limit-control-frames.")                                                                 \
  X(CONNECTION_PAUSES, "qkvd_connection_pauses_total", QKV_COUNTER,                                                 \
    "Pauses of 5 ms of connections that come near a limit.")                                                        \
  X(CONNECTIONS_CLOSED_MESSAGES, "qkvd_connections_closed_messages_total", QKV_COUNTER,                             \
    "Connections closed for holding the most bytes of messages that are not whole.")                                \
  X(HTTP_ENDED, "qkvd_http_connections_ended_total", QKV_COUNTER,                                                   \
    "Connections of admin-listen that had waited longest for their client, ended for new ones.")                    \
  X(CALLS_UNAVAILABLE, "qkvd_calls_unavailable_total", QKV_COUNTER, "Calls answered UNAVAILABLE (draining).")       \
  X(CALLS_FAILED, "qkvd_calls_failed_total", QKV_COUNTER, "Calls answered INTERNAL or DATA_LOSS.")                  \
  X(APPEND_ITEMS, "qkvd_append_items_total", QKV_COUNTER, "Items appended.")                                        \
  X(APPEND_TOKENS, "qkvd_append_tokens_total", QKV_COUNTER, "Rows appended, counted per layer.")                    \
  X(APPEND_BYTES, "qkvd_append_bytes_total", QKV_COUNTER, "Bytes of appended rows as they arrived.")                \
  X(ATTEND_ITEMS, "qkvd_attend_items_total", QKV_COUNTER, "Items attended.")                                        \
  X(ATTEND_QUERIES, "qkvd_attend_queries_total", QKV_COUNTER, "Query rows attended.")                               \
  X(FETCH_BYTES, "qkvd_fetch_bytes_total", QKV_COUNTER, "Bytes of rows and pages sent by Fetch.")                   \
  X(CLIENT_SHM_REGIONS, "qkvd_client_shm_regions", QKV_GAUGE,                                                       \
    "Regions of clients' shared memory that are registered.")                                                       \
  X(CLIENT_SHM_BYTES, "qkvd_client_shm_bytes", QKV_GAUGE, "Bytes of these regions.")                                \
  X(CLIENT_SHM_CUDA_REGIONS, "qkvd_client_shm_cuda_regions", QKV_GAUGE, "Those of them that lie on the GPU.")       \
  X(CLIENT_SHM_READ, "qkvd_client_shm_read_bytes_total", QKV_COUNTER, "Bytes of rows copied from them.")            \
  X(CLIENT_SHM_WRITTEN, "qkvd_client_shm_written_bytes_total", QKV_COUNTER,                                         \
    "Bytes of rows and results copied into them.")                                                                  \
  X(CLIENT_SHM_LOST, "qkvd_client_shm_lost_total", QKV_COUNTER,                                                     \
    "Copies that failed because a client had made its object shorter, /dev/shm was full, or the GPU had failed.")   \
  X(CLIENT_SHM_DESCRIPTORS, "qkvd_client_shm_descriptors", QKV_GAUGE,                                               \
    "Descriptors that clients have passed by shm-listen and that no call has used yet.")                            \
  X(CLIENT_SHM_PASSED, "qkvd_client_shm_passed_total", QKV_COUNTER, "Messages with descriptors that were taken.")   \
  X(CLIENT_SHM_PASSED_REFUSED, "qkvd_client_shm_passed_refused_total", QKV_COUNTER,                                 \
    "Messages and connections of shm-listen that were refused.")                                                    \
  X(REFUSED_BUDGET, "qkvd_refused_budget_total", QKV_COUNTER, "Appends refused because memory-budget is full.")     \
  X(REFUSED_QUEUE, "qkvd_refused_queue_total", QKV_COUNTER, "Requests refused because limit-queue is reached.")     \
  X(CALIBRATIONS, "qkvd_calibrations_total", QKV_COUNTER, "Calibrations learnt from traffic.")                      \
  X(CALIBRATIONS_REFUSED, "qkvd_calibrations_refused_total", QKV_COUNTER,                                           \
    "Calibrations that were tried and are not better than data-free code, learnt or brought.")                      \
  X(CALIBRATIONS_WITHDRAWN, "qkvd_calibrations_withdrawn_total", QKV_COUNTER,                                       \
    "Calibrations that were in force and turned out worse than data-free code.")                                    \
  X(ARCHIVE_CODECS_REFUSED, "qkvd_archive_codecs_refused_total", QKV_COUNTER,                                       \
    "Calibrations that were put in force, but not for the archive codec, which is worse with them than data-free.") \
  X(CALIBRATION_GAIN, "qkvd_calibration_gain_thousandths", QKV_GAUGE,                                               \
    "Data-free error of attention over that of the calibration in force, as last tried; 0: none has been.")         \
  X(WATCHED_ERROR, "qkvd_watched_error_millionths", QKV_GAUGE,                                                      \
    "Error of attention of pages that were sealed lately, the mean over models that were measured.")                \
  X(WATCHED_DATA_FREE, "qkvd_watched_error_data_free_millionths", QKV_GAUGE,                                        \
    "What data-free code of the same pages would have.")                                                            \
  X(CALIBRATIONS_WAITING, "qkvd_calibrations_waiting", QKV_GAUGE,                                                   \
    "1 while one is due that memory-budget has no headroom for.")                                                   \
  X(COMPARISONS, "qkvd_comparisons_total", QKV_COUNTER,                                                             \
    "Comparisons of codecs on a session's rows (Admin.Compare).")                                                   \
  X(TIER_PAGES, "qkvd_tier_pages_total", QKV_COUNTER, "Pages that went to other tiers.")                            \
  X(TIER_BYTES_FREED, "qkvd_tier_bytes_freed_total", QKV_COUNTER, "Bytes that lower tiers have freed.")             \
  X(SPILL_PAGES, "qkvd_storage_pages_total", QKV_COUNTER, "Pages given to the SSD tier.")                           \
  X(SPILL_BYTES, "qkvd_storage_page_bytes_total", QKV_COUNTER, "Their bytes, before they are packed.")              \
  X(SPILL_ROW_RECORDS, "qkvd_storage_row_records_total", QKV_COUNTER,                                               \
    "Records of exact rows of SYNC sessions given to the SSD tier.")                                                \
  X(SPILL_REFUSED, "qkvd_storage_refused_total", QKV_COUNTER,                                                       \
    "Pages that were refused there and were given again later.")                                                    \
  X(SPILL_FAILED, "qkvd_storage_failed_total", QKV_COUNTER,                                                         \
    "Writes, syncs and journal entries that failed: data is in memory only.")                                       \
  X(SPILL_DEGRADED, "qkvd_storage_degraded", QKV_GAUGE, "1 while the disk refuses: sessions are in memory alone.")  \
  X(SPILL_EXPELLED, "qkvd_storage_expelled_sessions_total", QKV_COUNTER,                                            \
    "Sessions deleted because storage-budget was full.")                                                            \
  X(SPILL_WAITS, "qkvd_storage_waits_total", QKV_COUNTER,                                                           \
    "Times that a request waited for pages to be written before memory had headroom.")                              \
  X(SPILL_EVICTED_BYTES, "qkvd_storage_evicted_bytes_total", QKV_COUNTER,                                           \
    "Bytes that left memory, being on the SSD.")                                                                    \
  X(EVICTION_LOOKS, "qkvd_eviction_looks_total", QKV_COUNTER, "Sessions and objects that evictions looked at.")     \
  X(RESTORED_PAGES, "qkvd_storage_restored_pages_total", QKV_COUNTER, "Pages brought back into memory.")            \
  X(RESTORED_BYTES, "qkvd_storage_restored_bytes_total", QKV_COUNTER, "Their bytes.")                               \
  X(READ_AHEAD_BYTES, "qkvd_storage_read_ahead_bytes_total", QKV_COUNTER,                                           \
    "Of these, bytes that were brought back before they were asked for.")                                           \
  X(RESTORE_LOST, "qkvd_storage_lost_pages_total", QKV_COUNTER,                                                     \
    "Pages that could not be brought back: damaged, or not there.")                                                 \
  X(STORAGE_RECORDS, "qkvd_storage_records", QKV_GAUGE,                                                             \
    "Records on the SSD: pages, and exact rows of SYNC sessions.")                                                  \
  X(STORAGE_KNOWN_BYTES, "qkvd_storage_known_bytes", QKV_GAUGE,                                                     \
    "Memory for what is known of records on the SSD, at most 48 bytes of each of many.")                            \
  X(STORAGE_FOLDED, "qkvd_storage_folded_sessions", QKV_GAUGE,                                                      \
    "Sessions on the SSD whose layers have left memory, too (fold-after).")                                         \
  X(STORAGE_UNFOLDED, "qkvd_storage_unfolded_sessions_total", QKV_COUNTER,                                          \
    "Folded sessions whose layers were made again, for their next use.")                                            \
  X(STORAGE_SEGMENTS, "qkvd_storage_segments", QKV_GAUGE, "Files they lie in.")                                     \
  X(STORAGE_LIVE_BYTES, "qkvd_storage_live_bytes", QKV_GAUGE, "Bytes of these that are needed.")                    \
  X(STORAGE_DEAD_BYTES, "qkvd_storage_dead_bytes", QKV_GAUGE, "Bytes that compaction can free.")                    \
  X(STORAGE_BUDGET_BYTES, "qkvd_storage_budget_bytes", QKV_GAUGE,                                                   \
    "What the files of the SSD may take: storage-budget, or what follows from the file system; 0: no limit.")       \
  X(STORAGE_DIRTY_BYTES, "qkvd_storage_dirty_bytes", QKV_GAUGE, "Bytes that wait to be written.")                   \
  X(STORAGE_UNREAD_SEGMENTS, "qkvd_storage_unread_segments", QKV_GAUGE,                                             \
    "Files of the SSD that the device did not give at the start; they stay for the next one.")                      \
  X(STORAGE_BAD_RECORDS, "qkvd_storage_bad_records_total", QKV_COUNTER,                                             \
    "Damaged records that recovery, compaction or a read has found.")                                               \
  X(GPU_DOWN, "qkvd_gpu_down", QKV_GAUGE, "GPUs of gpu-devices that are not used, while gpu-memory is given.")      \
  X(GPU_BYTES, "qkvd_gpu_bytes", QKV_GAUGE, "Memory of GPUs that is in use, of gpu-memory on each.")                \
  X(GPU_RANGES, "qkvd_gpu_ranges", QKV_GAUGE, "Ranges of up to 64 pages of which a GPU has copies.")                \
  X(GPU_HITS, "qkvd_gpu_hits_total", QKV_COUNTER,                                                                   \
    "Ranges of requests that the GPU had copies of; one that the kernels can take counts here or as a miss.")       \
  X(GPU_MISSES, "qkvd_gpu_misses_total", QKV_COUNTER, "Ranges of requests that it had no copies of.")               \
  X(GPU_CALLS, "qkvd_gpu_calls_total", QKV_COUNTER, "Calls of kernels whose results were used.")                    \
  X(GPU_UPLOADS, "qkvd_gpu_uploads_total", QKV_COUNTER, "Ranges copied to the GPU.")                                \
  X(GPU_UPLOAD_BYTES, "qkvd_gpu_upload_bytes_total", QKV_COUNTER, "Their bytes.")                                   \
  X(GPU_EVICTIONS, "qkvd_gpu_evictions_total", QKV_COUNTER, "Ranges that left the GPU for others.")                 \
  X(GPU_LESS_ATTENDED, "qkvd_gpu_less_attended_total", QKV_COUNTER,                                                 \
    "Attends of ranges that were not uploaded as those that the GPU has get more attention.")                       \
  X(GPU_FAILURES, "qkvd_gpu_failures_total", QKV_COUNTER,                                                           \
    "Times that the GPU was taken out of use because of an error.")                                                 \
  X(GPU_FETCH_TOKENS, "qkvd_gpu_fetch_tokens_total", QKV_COUNTER,                                                   \
    "Tokens whose rows the GPU decoded into its memory, counted per layer.")                                        \
  X(GPU_FETCH_HOST_TOKENS, "qkvd_gpu_fetch_host_tokens_total", QKV_COUNTER,                                         \
    "Tokens whose rows were decoded by the CPU and copied into the GPU's memory, counted per layer.")               \
  X(GPU_APPEND_TOKENS, "qkvd_gpu_append_tokens_total", QKV_COUNTER,                                                 \
    "Tokens appended from the GPU's memory whose pages it coded, counted per layer.")                               \
  X(GPU_APPEND_HOST_TOKENS, "qkvd_gpu_append_host_tokens_total", QKV_COUNTER,                                       \
    "Tokens appended from the GPU's memory whose pages the CPU coded, counted per layer.")                          \
  X(FORKS, "qkvd_forks_total", QKV_COUNTER, "Sessions that were made as forks of others.")                          \
  X(SESSIONS_EXPIRED, "qkvd_sessions_expired_total", QKV_COUNTER, "Sessions closed because their ttl_ms was over.") \
  X(SESSIONS_EVICTED, "qkvd_sessions_evicted_total", QKV_COUNTER,                                                   \
    "Sessions of retention EVICT that were closed for want of memory or places.")                                   \
  X(SESSIONS_COMPLETED, "qkvd_sessions_completed_total", QKV_COUNTER,                                               \
    "Sessions that a stream of appends has opened and made visible as a whole.")                                    \
  X(SESSIONS_INCOMPLETE, "qkvd_sessions_incomplete_total", QKV_COUNTER,                                             \
    "Sessions dropped because their stream ended before they were complete, or a crash left less than all.")        \
  X(LOOKUP_NAMES, "qkvd_lookup_names_total", QKV_COUNTER, "Names that HasSessions was asked for.")                  \
  X(LOOKUP_HITS, "qkvd_lookup_hits_total", QKV_COUNTER, "Of these, sessions that were open.")                       \
  X(OBJECTS, "qkvd_objects", QKV_GAUGE, "Opaque objects held.")                                                     \
  X(OBJECT_BYTES, "qkvd_object_bytes", QKV_GAUGE, "Their bytes, in memory or on the SSD.")                          \
  X(OBJECT_MEMORY_BYTES, "qkvd_object_memory_bytes", QKV_GAUGE,                                                     \
    "Bytes of memory-budget that objects take, those that are being written included.")                             \
  X(OBJECTS_PUT, "qkvd_objects_put_total", QKV_COUNTER, "Objects that became visible as a whole.")                  \
  X(OBJECTS_INCOMPLETE, "qkvd_objects_incomplete_total", QKV_COUNTER,                                               \
    "Objects dropped because their stream ended before they were whole, or a crash left less than all.")            \
  X(OBJECT_PUT_BYTES, "qkvd_object_put_bytes_total", QKV_COUNTER, "Bytes of objects that were put.")                \
  X(OBJECT_GETS, "qkvd_object_gets_total", QKV_COUNTER, "Names that GetObjects was asked for.")                     \
  X(OBJECT_HITS, "qkvd_object_hits_total", QKV_COUNTER, "Of these, objects that were sent whole.")                  \
  X(OBJECT_GET_BYTES, "qkvd_object_get_bytes_total", QKV_COUNTER, "Bytes of objects that were sent.")               \
  X(OBJECTS_LOST, "qkvd_objects_lost_total", QKV_COUNTER, "Objects that were damaged on the SSD: misses.")          \
  X(OBJECTS_EVICTED, "qkvd_objects_evicted_total", QKV_COUNTER,                                                     \
    "Objects of retention EVICT that were deleted for want of memory or places.")                                   \
  X(OBJECTS_EXPELLED, "qkvd_objects_expelled_total", QKV_COUNTER,                                                   \
    "Objects deleted because storage-budget was full.")                                                             \
  X(OBJECTS_UNDURABLE, "qkvd_objects_undurable", QKV_GAUGE,                                                         \
    "Objects held whose entry the journal has not taken; it is written again.")                                     \
  X(OBJECTS_STALLED, "qkvd_objects_stalled_total", QKV_COUNTER,                                                     \
    "Deleted objects whose memory was taken from readers that had read nothing for 5 s.")                           \
  X(OBJECTS_EXPIRED, "qkvd_objects_expired_total", QKV_COUNTER, "Objects deleted because their ttl_ms was over.")   \
  X(PREFIX_PAGES, "qkvd_prefix_pages", QKV_GAUGE, "Distinct pages of 64 token ids that are indexed for Match.")     \
  X(PREFIX_BYTES, "qkvd_prefix_bytes", QKV_GAUGE, "Bytes of their index, outside the memory budget.")               \
  X(PREFIX_REFUSED, "qkvd_prefix_refused_total", QKV_COUNTER,                                                       \
    "Times that a session's further pages were not indexed because limit-prefixes was reached.")                    \
  X(PREFIX_MATCHES, "qkvd_prefix_match_total", QKV_COUNTER, "Match calls answered.")                                \
  X(PREFIX_MATCH_HITS, "qkvd_prefix_match_hits_total", QKV_COUNTER, "Of these, those that found a session.")        \
  X(PREFIX_TOKENS_ASKED, "qkvd_prefix_asked_tokens_total", QKV_COUNTER, "Token ids that Match was asked for.")      \
  X(PREFIX_TOKENS_MATCHED, "qkvd_prefix_matched_tokens_total", QKV_COUNTER, "Of these, tokens that were found.")    \
  X(APPEND_SHARED_PAGES, "qkvd_append_shared_pages_total", QKV_COUNTER,                                             \
    "Pages that appends took from other sessions that hold the same tokens, and did not code.")                     \
  X(PREFIX_TOKENS_OPENED, "qkvd_prefix_opened_tokens_total", QKV_COUNTER,                                           \
    "Tokens that OpenSession found with other sessions, which new sessions began with.")                            \
  X(WATCHERS, "qkvd_watchers", QKV_GAUGE, "Watch calls that run.")                                                  \
  X(WATCH_EVENTS, "qkvd_watch_events_total", QKV_COUNTER,                                                           \
    "Changes of pages sent to watchers, snapshots not counted.")                                                    \
  X(WATCH_MISSED, "qkvd_watch_missed_total", QKV_COUNTER,                                                           \
    "Times that a watcher was too slow and began again with a snapshot.")                                           \
  X(MODELS, "qkvd_models", QKV_GAUGE, "Models registered.")                                                         \
  X(SESSIONS, "qkvd_sessions", QKV_GAUGE, "Sessions open.")                                                         \
  X(KV_BYTES, "qkvd_kv_bytes", QKV_GAUGE, "Bytes held: codes, exact rows, the sessions themselves.")                \
  X(TIER_WIDTH, "qkvd_tier_width_thousandths", QKV_GAUGE,                                                           \
    "Thousandths of a bit that a coordinate of coded pages in memory takes on average, all in.")                    \
  X(KV_RESERVED_BYTES, "qkvd_kv_reserved_bytes", QKV_GAUGE,                                                         \
    "Bytes of KV promised to appends that run now, and to buffers of the SSD tier.")                                \
  X(KV_RESIDENT_BYTES, "qkvd_kv_resident_bytes", QKV_GAUGE,                                                         \
    "Memory that these lie in, holes included; at most, as not every page of 2 MiB can be had.")                    \
  X(KV_HUGE_PAGES, "qkvd_kv_huge_pages", QKV_GAUGE, "1 where they lie on pages of 2 MiB.")                          \
  X(KV_SPLIT_PAGES, "qkvd_kv_split_pages", QKV_GAUGE, "Of these, pages of which a part went back to the machine.")  \
  X(KV_LIMIT_BYTES, "qkvd_kv_limit_bytes", QKV_GAUGE, "The memory budget for KV.")                                  \
  X(KV_ALLOWED_BYTES, "qkvd_kv_allowed_bytes", QKV_GAUGE,                                                           \
    "What of it KV may take now, so that the process keeps to the budget and a tenth.")                             \
  X(OTHER_BYTES, "qkvd_other_bytes", QKV_GAUGE,                                                                     \
    "Resident memory that KV does not lie in: code, buffers, messages, calibrations.")                              \
  X(LEARNING_BYTES, "qkvd_learning_bytes", QKV_GAUGE, "Bytes of memory-budget taken to learn calibrations.")        \
  X(CALIBRATION_BYTES, "qkvd_calibration_bytes", QKV_GAUGE, "Bytes of calibrations and coders in use.")             \
  X(CONTRACT_PAGES, "qkvd_contract_pages_total", QKV_COUNTER,                                                       \
    "Pages whose attention error was measured for a session's max_attention_error.")                                \
  X(CONTRACT_MISSED, "qkvd_contract_missed_total", QKV_COUNTER,                                                     \
    "Of these, pages that miss it with all the bits of their policy.")                                              \
  X(CONTRACT_ERROR, "qkvd_contract_error_millionths", QKV_GAUGE,                                                    \
    "Their attention error, the root of the mean square over all of them.")                                         \
  X(QUEUE_JOBS, "qkvd_queue_jobs", QKV_GAUGE, "Jobs that wait for a thread of the executor.")                       \
  X(JOB_THREADS, "qkvd_job_threads", QKV_GAUGE,                                                                     \
    "Threads of the executor: two for each of threads, and those that wait for a disk.")                            \
  X(REQUEST_BYTES, "qkvd_request_bytes", QKV_GAUGE,                                                                 \
    "Bytes of request messages that have begun to arrive and are not whole.")                                       \
  X(RESPONSE_BYTES, "qkvd_response_bytes", QKV_GAUGE, "Bytes of results and rows that are not sent yet.")           \
  X(RSS_BYTES, "qkvd_rss_bytes", QKV_GAUGE, "Resident memory of the process.")                                      \
  X(CERTIFICATE_EXPIRES, "qkvd_certificate_expires_seconds", QKV_GAUGE,                                             \
    "Unix time at which the certificate of tls-cert ends; 0: there is none.")                                       \
  X(UPTIME, "qkvd_uptime_seconds", QKV_GAUGE, "Time since the start.")

typedef enum qkv_metric_id {
#define X(id, name, kind, help) QKV_METRIC_##id,
  QKV_METRIC_MAP(X)
#undef X
      QKV_METRIC_COUNT
} qkv_metric_id;

extern const qkv_metric qkv_metric_table[QKV_METRIC_COUNT];

#endif
