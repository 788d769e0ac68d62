#include "server/options.h"

#include <assert.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/cpu.h"
#include "engine/cache/ema.h"
#include "engine/cache/model.h"
#include "engine/codec/codec.h"
#include "server/gpu/gpu.h"

#define AT(field) offsetof(qkv_server_options, field)
#define MIB 1048576.0
#define GIB (1024 * MIB)

const qkv_option qkv_server_option_table[] = {
    {"listen", QKV_OPTION_LIST, AT(listen), "127.0.0.1:7580", 0, 0, "ADDRESS",
     "Where to serve gRPC: unix:PATH or HOST:PORT; may be given several times. Port 0 takes any free one."},
    {"admin-listen", QKV_OPTION_STRING, AT(admin_listen), NULL, 0, 0, "ADDRESS",
     "Where to serve HTTP for operators (metrics, health, JSON and a page): HOST:PORT, 127.0.0.1:7581 for "
     "instance, or unix:PATH. Without it nothing is served."},
    {"admin-auth", QKV_OPTION_FLAG, AT(admin_auth), NULL, 0, 0, NULL,
     "Ask for a bearer token on --admin-listen: one of --auth-file with the role read and the tenant *. /health "
     "and the page, which has no figures of its own, need none."},
    {"admin-tls", QKV_OPTION_FLAG, AT(admin_tls), NULL, 0, 0, NULL,
     "Serve HTTPS on --admin-listen, which must be HOST:PORT, with --tls-cert and --tls-key."},
    {"admin-anonymous", QKV_OPTION_FLAG, AT(admin_anonymous), NULL, 0, 0, NULL,
     "Allow an --admin-listen that other machines can reach without --admin-auth, which is refused otherwise."},
    {"config", QKV_OPTION_STRING, AT(config), NULL, 0, 0, "FILE",
     "YAML file with these options as keys. Arguments and environment variables go before it."},
    {"listen-mode", QKV_OPTION_STRING, AT(listen_mode), "0660", 0, 0, "MODE",
     "Mode of the unix sockets' files, in octal: who may write to a file may connect to it."},
    {"tls-cert", QKV_OPTION_STRING, AT(tls_cert), NULL, 0, 0, "FILE",
     "The daemon's certificate and the chain up to its authority, PEM. TCP connections are then TLS 1.2 or later. "
     "The file is read again when it changes, and on SIGHUP."},
    {"tls-key", QKV_OPTION_STRING, AT(tls_key), NULL, 0, 0, "FILE",
     "The private key of --tls-cert, PEM, without a passphrase."},
    {"tls-client-ca", QKV_OPTION_STRING, AT(tls_client_ca), NULL, 0, 0, "FILE",
     "Certificates of authorities, PEM: each client on TCP must show a certificate that one of them has signed."},
    {"auth-file", QKV_OPTION_STRING, AT(auth_file), NULL, 0, 0, "FILE",
     "Who may call: hashes of bearer tokens, names of client certificates and users of unix sockets, each with a "
     "tenant and roles. Other calls are refused. The file is read again when it changes, and on SIGHUP."},
    {"jwks", QKV_OPTION_STRING, AT(jwks), NULL, 0, 0, "FILE",
     "JSON Web Key Set: bearer tokens may also be JWTs that are signed with a key of it (RS256, ES256, EdDSA). The "
     "auth-file says what their subjects may do. The file is read again when it changes, and on SIGHUP."},
    {"jwt-issuer", QKV_OPTION_STRING, AT(jwt_issuer), NULL, 0, 0, "ISSUER", "The issuer (iss) that a JWT must name."},
    {"jwt-audience", QKV_OPTION_STRING, AT(jwt_audience), NULL, 0, 0, "AUDIENCE",
     "The audience (aud) that a JWT must name, alone or among others."},
    {"quota-file", QKV_OPTION_STRING, AT(quota_file), NULL, 0, 0, "FILE",
     "What each tenant may take, one a line; qkvctl quota set writes it. The file is read again when it changes, "
     "and on SIGHUP. Without this option it is the file quotas in --data-dir, if there is one."},
    {"allow-anonymous", QKV_OPTION_STRING, AT(allow_anonymous), NULL, 0, 0, "WHERE",
     "Let in calls without credentials, with all rights. unix: on unix sockets, although there is an --auth-file. "
     "all: on every --listen, where other machines reach it too; needs that there is no --auth-file."},
    {"memory-budget", QKV_OPTION_BYTES, AT(memory_budget), "4GiB", MIB, 1024 * 1024 * GIB, "BYTES",
     "Memory for all sessions: keys, values and what belongs to them. What does not fit leaves for --data-dir, or "
     "is refused where there is none. The whole process keeps to this and a tenth."},
    {"gpu-memory", QKV_OPTION_BYTES, AT(gpu_memory), "0", 0, 1024 * GIB, "BYTES",
     "Memory on each GPU for copies of coded pages, whose attention is computed there; for all other pages it is "
     "computed by the CPU. At least 16MiB; 0: no GPU is used."},
    {"gpu-devices", QKV_OPTION_LIST, AT(gpu_devices), "0", 0, 0, "GPU",
     "GPUs that are used, each with gpu-memory: their numbers or UUIDs, or that of a MIG slice; all: every one."},
    {"gpu-kernels", QKV_OPTION_STRING, AT(gpu_kernels), NULL, 0, 0, "FILE",
     "File with the GPU's kernels (a fat binary, a cubin or PTX) in place of those that are part of the program."},
    {"huge-pages", QKV_OPTION_STRING, AT(huge_pages), "auto", 0, 0, "PAGES",
     "Memory pages for keys and values. auto: of 2 MiB, where the kernel gives them on request; off: of the usual "
     "size. The log says which."},
    {"numa", QKV_OPTION_STRING, AT(numa), "off", 0, 0, "PLACE",
     "Where keys and values lie on a machine with several NUMA nodes. off: where the kernel puts them; interleave: "
     "on all nodes in turn; local: on the node of the thread that writes them."},
    {"threads", QKV_OPTION_INTEGER, AT(threads), "0", 0, 1024, "N",
     "Compute threads, for encoding and attention; 0: one for each processor that the daemon may use. As many "
     "more, of a lower priority, do bulk work, and up to 8 more of each kind run while others wait for the disk."},
    {"pin-threads", QKV_OPTION_FLAG, AT(pin_threads), NULL, 0, 0, NULL,
     "Bind each compute thread to a processor of its own: attention is slowed down less by other work, and pages "
     "that come back from the SSD get fewer processors. For machines that run nothing else."},
    {"rpc-threads", QKV_OPTION_INTEGER, AT(rpc_threads), "1", 1, 64, "N",
     "Threads that read requests and write responses; on few cores one is the fastest."},
    {"limit-message", QKV_OPTION_BYTES, AT(limit_message), "64MiB", 4096, 2047 * MIB, "BYTES",
     "Largest request message."},
    {"limit-response-bytes", QKV_OPTION_BYTES, AT(limit_response_bytes), "1GiB", MIB, 1024 * GIB, "BYTES",
     "Memory for responses that are computed and not sent yet."},
    {"limit-items", QKV_OPTION_INTEGER, AT(limit_items), "1024", 1, 1048576, "N", "Items in one request."},
    {"limit-sessions", QKV_OPTION_INTEGER, AT(limit_sessions), "65536", 1, 16777216, "N", "Sessions open at once."},
    {"limit-objects", QKV_OPTION_INTEGER, AT(limit_objects), "65536", 0, 16777216, "N",
     "Opaque objects held; 0: none."},
    {"limit-object-bytes", QKV_OPTION_BYTES, AT(limit_object_bytes), "1GiB", 1, INT64_C(1) << 40, "BYTES",
     "Size of one opaque object."},
    {"limit-models", QKV_OPTION_INTEGER, AT(limit_models), "64", 1, 65536, "N",
     "Models registered. With --auth-file one tenant without a quota may have three quarters of them. The same holds "
     "for --limit-sessions, --limit-objects, --limit-prefixes, --limit-watchers and --limit-client-shm."},
    {"limit-prefixes", QKV_OPTION_INTEGER, AT(limit_prefixes), "1048576", 0, QKV_PREFIX_PAGES_MAX, "N",
     "How many distinct pages of 64 token ids Match can find, at 64 bytes of memory each; 0: Match finds nothing."},
    {"limit-calls", QKV_OPTION_INTEGER, AT(limit_calls), "1024", 1, 1048576, "N", "Calls running at once."},
    {"limit-control-calls", QKV_OPTION_INTEGER, AT(limit_control_calls), "64", 4, 65536, "N",
     "Health checks and calls of Admin running at once. They have places of their own, so that a daemon that is "
     "full answers them."},
    {"limit-connection-calls", QKV_OPTION_INTEGER, AT(limit_connection_calls), "512", 1, 1048576, "N",
     "Calls of one connection running at once."},
    {"limit-tenant-calls", QKV_OPTION_INTEGER, AT(limit_tenant_calls), "0", 0, 1048576, "N",
     "Calls of one tenant running at once; 0: of those that have sent a message three times as many as it leaves to "
     "others, three quarters of --limit-calls."},
    {"limit-connections", QKV_OPTION_INTEGER, AT(limit_connections), "16384", 1, 1048576, "N",
     "Connections at once, those of unix sockets included; more are closed as they come."},
    {"limit-peer-connections", QKV_OPTION_INTEGER, AT(limit_peer_connections), "0", 0, 1048576, "N",
     "Connections of one IPv4 address, or of one IPv6 network of 64 bits; 0: half of --limit-connections."},
    {"limit-control-frames", QKV_OPTION_INTEGER, AT(limit_control_frames), "1000", 0, 1000000, "N",
     "HTTP/2 frames that carry no message (SETTINGS, PING, RST_STREAM and others), for one connection and second, "
     "each weighted by what it costs; five times as many may come at once. A connection that sends more is closed. "
     "0: no limit."},
    {"limit-first-message", QKV_OPTION_DURATION, AT(limit_first_message), "10s", 0, 3600000, "TIME",
     "Time until a call's first message has arrived as a whole; 0: no limit. Once --limit-calls is reached, calls "
     "without one are ended at once."},
    {"limit-unread-response", QKV_OPTION_DURATION, AT(limit_unread_response), "5m", 0, 86400000, "TIME",
     "Time that a response may wait for its client to read it before the call is ended; 0: no limit."},
    {"limit-idle-stream", QKV_OPTION_DURATION, AT(limit_idle_stream), "24h", 0, 604800000, "TIME",
     "Time that a stream may wait for its client's next message before it is ended; 0: no limit."},
    {"limit-watchers", QKV_OPTION_INTEGER, AT(limit_watchers), "16", 0, 1024, "N", "Watch calls at once; 0: none."},
    {"limit-client-shm", QKV_OPTION_INTEGER, AT(limit_client_shm), "256", 1, 65536, "N",
     "Regions of clients' shared memory registered at once."},
    {"limit-metric-labels", QKV_OPTION_INTEGER, AT(limit_metric_labels), "64", 0, 1024, "N",
     "Tenants, and models, that /metrics shows by name; those that come later are summed as \"other\"."},
    {"limit-queue", QKV_OPTION_INTEGER, AT(limit_queue), "1024", 1, 1048576, "N",
     "Requests that wait for a thread of a kind at once; more are refused. Those of one tenant may be three times as "
     "many as the places that are left to others."},
    {"codec", QKV_OPTION_STRING, AT(codec), "embedded", 0, 0, "NAME",
     "Codec of keys and values where neither model nor session names one: embedded, exact, or another one of "
     "docs/codecs.md."},
    {"codec-v", QKV_OPTION_STRING, AT(codec_v), NULL, 0, 0, "NAME",
     "Codec of values, where it differs from that of keys; neither may then be embedded or exact. Without it "
     "--codec."},
    {"archive-codec", QKV_OPTION_STRING, AT(archive_codec), "ecsq", 0, 0, "NAME",
     "Codec of keys and values in place of embedded, where neither model nor session names one, of sessions to be "
     "fetched that are opened while a calibration is in force, have no tiers and no quality contract, and can leave "
     "memory: of durability async or sync, or of retention evict. So without --data-dir only sessions of retention "
     "evict have it. Pages of ecsq have no planes to drop: pinned sessions do not shrink. embedded: that of "
     "--codec."},
    {"bits", QKV_OPTION_REAL, AT(bits), "0", 0, 0, "BITS",
     "Bits per coordinate where neither model nor session says; 0: 4, or where the codec has no 4 bits 8 or 2. "
     "embedded takes eighths up to 8, as an average: with a calibration, keys or values, layers and heads that err "
     "more get more of them."},
    {"bits-k", QKV_OPTION_REAL, AT(bits_k), "0", 0, 0, "BITS", "The same for keys alone; 0: --bits."},
    {"bits-v", QKV_OPTION_REAL, AT(bits_v), "0", 0, 0, "BITS", "The same for values alone; 0: --bits."},
    {"recent-window", QKV_OPTION_INTEGER, AT(recent_window), "64", 0, 1048576, "TOKENS",
     "How many of the newest tokens are kept exact, not coded, where neither model nor session says."},
    {"sink-tokens", QKV_OPTION_INTEGER, AT(sink_tokens), "4", 0, QKV_SINK_TOKENS_MAX, "TOKENS",
     "How many of a sequence's first tokens are coded with at least 8 bits a coordinate, or by ecsq with finer "
     "steps, where neither model nor session says."},
    {"anchor", QKV_OPTION_STRING, AT(anchor), "none", 0, 0, "KIND",
     "What a page's rows are predicted by, so that only the difference is coded, where neither model nor session "
     "says: none; mean, of the page; group, the mean of 16 tokens; chain, the row before; auto, whichever errs "
     "least at equal bytes."},
    {"anchor-every", QKV_OPTION_INTEGER, AT(anchor_every), "0", 0, QKV_ANCHOR_EVERY_MAX, "TOKENS",
     "For chains: a new anchor is stored after so many tokens; 0: only where a page begins."},
    {"anchor-threshold", QKV_OPTION_REAL, AT(anchor_threshold), "0", 0, QKV_ANCHOR_THRESHOLD_MAX, "RATIO",
     "For chains: a new anchor is stored where a row differs from the one before by more than this part of its "
     "norm; 0: never."},
    {"low-rank", QKV_OPTION_STRING, AT(low_rank), "none", 0, 0, "KIND",
     "Low-rank factors that are stored with a page, where neither model nor session says: none; predictor, taken "
     "off before rows are coded; correction, fitted to what the codes miss; auto, a predictor where it lowers the "
     "error at equal bytes."},
    {"rank", QKV_OPTION_INTEGER, AT(rank), "4", 1, QKV_RANK_MAX, "N",
     "Rank of the factors of --low-rank; for auto the highest."},
    {"gqa-compensation", QKV_OPTION_FLAG, AT(gqa_compensation), NULL, 0, 0, NULL,
     "Code with more bits where several query heads share a KV head: one more for 2 to 4, two more for up to 16, 8 "
     "bits at most. Where neither model nor session says."},
    {"calibration", QKV_OPTION_LIST, AT(calibration), NULL, 0, 0, "MODEL=FILE",
     "Calibration file for the model that the tenant default has registered under this name without one; may be "
     "given several times."},
    {"trust-calibration", QKV_OPTION_FLAG, AT(trust_calibration), NULL, 0, 0, NULL,
     "Use the files of --calibration at once: they are not tried on traffic before, and not withdrawn."},
    {"calibrate-tokens", QKV_OPTION_INTEGER, AT(calibrate_tokens), "16384", 0, 1e12, "TOKENS",
     "Tokens of a model after which a calibration is learnt from its traffic, for pages that come after; 0: never."},
    {"calibrate-skip", QKV_OPTION_LIST, AT(calibrate_skip), NULL, 0, 0, "TENANT",
     "Tenant whose rows are not used to learn calibrations; may be given several times."},
    {"ema-alpha", QKV_OPTION_REAL, AT(ema_alpha), "0.996", 0, 0, "FACTOR",
     "Part of a token's average of received attention that stays with each query: 0.996 averages about the last "
     "256."},
    {"ema-every", QKV_OPTION_INTEGER, AT(ema_every), "16", 0, 1048576, "N",
     "Received attention is counted in one of so many decode steps, or blocks of queries, of every layer; 0: "
     "never."},
    {"keep-full", QKV_OPTION_FLAG, AT(keep_full), NULL, 0, 0, NULL,
     "Keep pages that go to lower tiers also as they were, where the session does not say: no memory is freed, and "
     "the way back is exact."},
    {"allow-client-shm", QKV_OPTION_FLAG, AT(allow_client_shm), NULL, 0, 0, NULL,
     "Let clients on a unix socket register POSIX shared memory that their user owns, and memory on the GPU that the "
     "daemon uses. Rows are then copied from and to it, and do not cross the socket."},
    {"shm-listen", QKV_OPTION_STRING, AT(shm_listen), NULL, 0, 0, "unix:PATH",
     "Where clients pass descriptors of memory that has no name: memfds, and memory on the GPU that was exported. "
     "Needs --allow-client-shm."},
    {"separate-appends", QKV_OPTION_FLAG, AT(separate_appends), NULL, 0, 0, NULL,
     "Code the rows of every append. Without it an append whose token ids another session of the same tenant, "
     "model and salt holds gets that session's pages, and its rows are not compared with them."},
    {"tier-bits", QKV_OPTION_REAL, AT(tier_bits), "0", 0, 0, "BITS",
     "Average bits per coordinate, in eighths up to 8, to which sessions that do not say are brought in the "
     "background: tokens that receive less attention get fewer. 0: sessions are left as they are."},
    {"tier-thresholds", QKV_OPTION_STRING, AT(tier_thresholds), NULL, 0, 0, "HI,MID,LO",
     "Where --tier-bits is 0: groups of tokens go to 4, 3, 2 or 1 bits where the average attention to their best "
     "token is at least HI, at least MID, at least LO, or less."},
    {"tier-sinks", QKV_OPTION_INTEGER, AT(tier_sinks), "4", 0, 1048576, "TOKENS",
     "How many of a session's first tokens are left as they are by --tier-bits and --tier-thresholds."},
    {"tier-pages", QKV_OPTION_INTEGER, AT(tier_pages), "256", 1, 1048576, "N",
     "Pages of 64 tokens that are brought to other bits at once, four times a second."},
    {"memory-high", QKV_OPTION_REAL, AT(memory_high), "0.9", 0, 1, "PART",
     "Part of --memory-budget above which sessions are brought to fewer bits, down to 2, the longest unused ones "
     "first; 1: never."},
    {"memory-low", QKV_OPTION_REAL, AT(memory_low), "0.8", 0, 1, "PART",
     "Part of --memory-budget at which that ends."},
    {"data-dir", QKV_OPTION_STRING, AT(data_dir), NULL, 0, 0, "DIR",
     "Directory of the SSD tier. Sessions that lie there outlive the process, and together they may be larger than "
     "--memory-budget."},
    {"durability", QKV_OPTION_STRING, AT(durability), NULL, 0, 0, "KIND",
     "Of sessions that do not say: memory, they are lost with the process; async, rows are written in the "
     "background; sync, appends are acknowledged once their rows are on the device. Without this option async with "
     "--data-dir, else memory."},
    {"retention", QKV_OPTION_STRING, AT(retention), "keep", 0, 0, "KIND",
     "Of sessions and objects that do not say: keep; or evict, the longest unused are closed where memory, "
     "--limit-sessions or the SSD are full."},
    {"storage-io", QKV_OPTION_STRING, AT(storage_io), "auto", 0, 0, "DRIVER",
     "How files are read and written: uring, pread (by threads), or auto, io_uring where it is allowed."},
    {"storage-budget", QKV_OPTION_BYTES, AT(storage_budget), "0", 0, 1024 * 1024 * GIB, "BYTES",
     "What the files in --data-dir may take, at least four segments; the longest unused sessions and objects are "
     "deleted before it is exceeded. 0: nine tenths of what these files have and the file system has free when the "
     "daemon starts."},
    {"storage-segment", QKV_OPTION_BYTES, AT(storage_segment), "256MiB", MIB, 16 * GIB, "BYTES",
     "Size of a file in --data-dir, a multiple of 4096."},
    {"storage-dirty", QKV_OPTION_BYTES, AT(storage_dirty), "64MiB", MIB, 64 * GIB, "BYTES",
     "Memory for pages that wait to be written. All buffers of the SSD tier take at most a sixteenth of "
     "--memory-budget, so that it may be less."},
    {"storage-read-ahead", QKV_OPTION_BYTES, AT(storage_read_ahead), "256MiB", 0, 64 * GIB, "BYTES",
     "Memory for pages of the next layers that are read before requests ask for them, at most an eighth of "
     "--memory-budget; 0: none are."},
    {"fold-after", QKV_OPTION_DURATION, AT(fold_after), "30s", 0, 86400000, "TIME",
     "Time without a use after which a session that lies on the SSD alone gives up its tables, token ids and "
     "averages of attention in memory, too; its next use reads them back. 0: never."},
    {"storage-compact-rate", QKV_OPTION_BYTES, AT(storage_compact_rate), "64MiB", 0, 64 * GIB, "BYTES",
     "Rate of compaction in the background, in bytes a second. It empties files of which less than half is needed; "
     "0: never."},
    {"drain-grace", QKV_OPTION_DURATION, AT(drain_grace), "10s", 0, 3600000, "TIME",
     "How long calls that run on SIGTERM or qkvctl drain may go on."},
    {"drain-notice", QKV_OPTION_DURATION, AT(drain_notice), "0s", 0, 600000, "TIME",
     "How long the daemon says before that that it is not ready, and still serves new calls."},
    {"cpu-mask", QKV_OPTION_LIST, AT(cpu_mask), NULL, 0, 0, "LIST",
     "Processor features that may be used, of those that there are: none, or a list of avx2, fma, f16c, avx512, "
     "avx512-vnni, avx512-vbmi, neon, neon-dotprod and amx-int8. Kernels for avx2 need fma and f16c, too. Without "
     "it all are."},
    {"log-level", QKV_OPTION_STRING, AT(log_level), "info", 0, 0, "LEVEL",
     "Lowest level that is logged: debug, info, warn or error."},
    {"audit-log", QKV_OPTION_STRING, AT(audit_log), NULL, 0, 0, "FILE",
     "File for calls of Admin, and for calls that were refused for want of a token, a certificate or a role, a "
     "line of JSON each. It is opened again on SIGHUP."},
    {"slow-call", QKV_OPTION_DURATION, AT(slow_call), "0", 0, 3600000, "TIME",
     "Calls, and messages of streams of rows, that take longer are logged with where their time went; 0: none are."},
    {"discard", QKV_OPTION_FLAG, AT(discard), NULL, 0, 0, NULL,
     "Keep no rows: they are read, checked and acknowledged. For benchmarks of the transport."},
    {"check-health", QKV_OPTION_FLAG, AT(check_health), NULL, 0, 0, NULL,
     "Ask the daemon at --admin-listen, else at the first --listen that has no TLS, whether it is ready; exit with "
     "0 if it is, else with 1."},
    {"print-options", QKV_OPTION_FLAG, AT(print_options), NULL, 0, 0, NULL,
     "Print the options in force and where each comes from, and exit."},
    {"print-metrics", QKV_OPTION_FLAG, AT(print_metrics), NULL, 0, 0, NULL, "Print the list of metrics, and exit."},
    {"help", QKV_OPTION_FLAG, AT(help), NULL, 0, 0, NULL, "Print this, and exit."},
    {"version", QKV_OPTION_FLAG, AT(version), NULL, 0, 0, NULL, "Print the version, and exit."},
};
const size_t qkv_server_option_count = sizeof(qkv_server_option_table) / sizeof(qkv_server_option_table[0]);

static qkv_status check_bits(const char *name, const qkv_codec *codec, double bits, qkv_error *error) {
  if (bits == 0 || codec->bits_valid(bits)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--%s is %g, allowed are %s", name, bits, codec->bits_text);
}

static qkv_status find_codec(const char *option, const char *name, const qkv_codec **codec, qkv_error *error) {
  char known[QKV_CODEC_NAMES_MAX];
  *codec = name != NULL ? qkv_codec_by_name(name) : NULL;
  if (*codec != NULL || name == NULL) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--%s is %.64s, known are %s", option, name, qkv_codec_names(known));
}

static qkv_status check_codecs(const qkv_server_options *values, qkv_error *error) {
  const qkv_codec *codec = NULL, *codec_v = NULL, *archive_codec = NULL;
  QKV_TRY(find_codec("archive-codec", values->archive_codec, &archive_codec, error));
  QKV_TRY(find_codec("codec", values->codec, &codec, error));
  QKV_TRY(find_codec("codec-v", values->codec_v, &codec_v, error));
  assert(codec != NULL);  // it has a default
  if (codec_v == NULL) codec_v = codec;
  if (codec_v != codec && (codec->part == NULL || codec_v->part == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "--codec-v is %s and --codec is %s: %s codes keys and values together", codec_v->name,
                    codec->name, codec->part == NULL ? codec->name : codec_v->name);
  QKV_TRY(check_bits("bits", codec, values->bits, error));
  QKV_TRY(check_bits("bits-k", codec, values->bits_k, error));
  return check_bits("bits-v", codec_v, values->bits_v, error);
}

// "HI,MID,LO" into thresholds; false for anything else. Whether they are in descending order is checked with the
// policy.
static bool read_thresholds(const char *text, double *thresholds) {
  for (size_t i = 0; i < QKV_RETIER_LEVELS - 1; i++) {
    char *end = NULL;
    thresholds[i] = strtod(text, &end);
    if (end == text || *end != (i + 2 < QKV_RETIER_LEVELS ? ',' : '\0')) return false;
    text = end + 1;
  }
  return true;
}

static qkv_status check_tiers(const qkv_server_options *values, qkv_error *error) {
  const qkv_ema_options ema = {.alpha = values->ema_alpha, .sample_every = (uint32_t)values->ema_every};
  double thresholds[QKV_RETIER_LEVELS - 1];
  if (qkv_ema_check(&ema, error) != QKV_OK) return qkv_error_prefix(error, "--");
  QKV_TRY(check_bits("tier-bits", qkv_codec_by_id(QKV_CODEC_EMBEDDED), values->tier_bits, error));
  if (values->memory_low > values->memory_high) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--memory-low is %g, at most --memory-high %g", values->memory_low,
                    values->memory_high);
  }
  if (values->tier_thresholds == NULL) return QKV_OK;
  if (values->ema_every == 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--tier-thresholds need attention to be counted, --ema-every is 0");
  }
  if (!read_thresholds(values->tier_thresholds, thresholds)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--tier-thresholds is \"%.64s\", three numbers HI,MID,LO are needed",
                    values->tier_thresholds);
  }
  qkv_retier_policy policy = qkv_server_options_retier(values);
  policy.bits = 0;
  if (qkv_retier_policy_check(&policy, error) == QKV_OK) return QKV_OK;
  return qkv_error_prefix(error, "--tier-thresholds: ");
}

static bool read_durability(const char *text, qkv_durability *durability) {
  static const char *const names[] = {"memory", "async", "sync"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
    if (strcmp(text, names[i]) != 0) continue;
    *durability = (qkv_durability)(QKV_DURABILITY_MEMORY + i);
    return true;
  }
  return false;
}

static qkv_status check_storage(const qkv_server_options *values, qkv_error *error) {
  const char *io = values->storage_io, *retention = values->retention;
  qkv_durability durability;
  if (strcmp(retention, "keep") != 0 && strcmp(retention, "evict") != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--retention is %s, known are keep and evict", retention);
  if (strcmp(io, "auto") != 0 && strcmp(io, "uring") != 0 && strcmp(io, "pread") != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--storage-io is %s, known are auto, uring and pread", io);
  if (values->storage_segment % 4096 != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--storage-segment is %" PRId64 ", allowed are multiples of 4096",
                    values->storage_segment);
  if (values->durability == NULL) return QKV_OK;
  if (!read_durability(values->durability, &durability))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--durability is %s, known are memory, async and sync",
                    values->durability);
  if (durability == QKV_DURABILITY_MEMORY || values->data_dir != NULL) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--durability is %s, which needs a --data-dir", values->durability);
}

static qkv_status check_memory(const qkv_server_options *values, qkv_error *error) {
  const char *pages = values->huge_pages;
  qkv_heap_numa numa;
  if (values->gpu_memory != 0 && values->gpu_memory < QKVI_GPU_MEMORY_LEAST)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "--gpu-memory is %" PRId64 " bytes, allowed are 0 and %" PRId64 " bytes or more",
                    values->gpu_memory, (int64_t)QKVI_GPU_MEMORY_LEAST);
  if (strcmp(pages, "auto") != 0 && strcmp(pages, "off") != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--huge-pages is %s, known are auto and off", pages);
  if (!qkv_heap_numa_parse(values->numa, &numa))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--numa is %s, known are off, interleave and local", values->numa);
  const qkv_heap_config config = qkv_server_options_heap(values);
  if (qkv_heap_check(&config, error) == QKV_OK) return QKV_OK;
  return qkv_error_prefix(error, "--");
}

qkv_heap_config qkv_server_options_heap(const qkv_server_options *values) {
  qkv_heap_config config = {.pages =
                                strcmp(values->huge_pages, "off") == 0 ? QKV_HEAP_PAGES_SMALL : QKV_HEAP_PAGES_AUTO};
  (void)qkv_heap_numa_parse(values->numa, &config.numa);
  return config;
}

int64_t qkv_server_options_tenant_part(const qkv_server_options *values, int64_t limit) {
  return values->auth_file == NULL ? limit : limit - limit / 4;
}

bool qkv_server_options_evict(const qkv_server_options *values) {
  return strcmp(values->retention, "evict") == 0;
}

qkv_durability qkv_server_options_durability(const qkv_server_options *values) {
  qkv_durability durability = values->data_dir == NULL ? QKV_DURABILITY_MEMORY : QKV_DURABILITY_ASYNC;
  if (values->durability != NULL) (void)read_durability(values->durability, &durability);
  return durability;
}

void qkv_server_options_keep_out(const qkv_server_options *values, const char *tenant, qkv_policy *policy) {
  const qkv_option_list *skipped = &values->calibrate_skip;
  for (size_t i = 0; i < skipped->count; i++) {
    if (strcmp(skipped->items[i], tenant) != 0) continue;
    policy->learn_said = true;
    policy->learn = false;
  }
}

unsigned qkv_server_options_listen_mode(const qkv_server_options *values) {
  return (unsigned)strtoul(values->listen_mode, NULL, 8);
}

static qkv_status check_access(const qkv_server_options *values, qkv_error *error) {
  const char *mode = values->listen_mode, *where = values->allow_anonymous;
  const size_t digits = strlen(mode);
  if (digits < 3 || digits > 4 || strspn(mode, "01234567") != digits || strtoul(mode, NULL, 8) > 0777)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--listen-mode is %.32s, must be octal, 000 to 777", mode);
  if ((values->tls_cert == NULL) != (values->tls_key == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--tls-cert and --tls-key need each other");
  if (values->tls_client_ca != NULL && values->tls_cert == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--tls-client-ca needs --tls-cert and --tls-key");
  if (values->admin_auth && (values->auth_file == NULL || values->admin_listen == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--admin-auth needs --admin-listen and --auth-file");
  if (values->admin_tls && (values->tls_cert == NULL || values->admin_listen == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--admin-tls needs --admin-listen, --tls-cert and --tls-key");
  if (values->admin_tls && strncmp(values->admin_listen, "unix:", 5) == 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--admin-tls needs --admin-listen HOST:PORT, it is %.64s",
                    values->admin_listen);
  if (values->shm_listen != NULL && !values->allow_client_shm)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--shm-listen needs --allow-client-shm");
  if (values->shm_listen != NULL && strncmp(values->shm_listen, "unix:", 5) != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--shm-listen is %.64s, must be unix:PATH", values->shm_listen);
  const int jwt = (values->jwks != NULL) + (values->jwt_issuer != NULL) + (values->jwt_audience != NULL);
  if (jwt != 0 && (jwt != 3 || values->auth_file == NULL))
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "--jwks, --jwt-issuer and --jwt-audience need each other, and --auth-file");
  if (where == NULL) return QKV_OK;
  if (strcmp(where, "all") == 0 && values->auth_file != NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "--allow-anonymous is all, which contradicts --auth-file; unix does not");
  if (strcmp(where, "all") == 0) return QKV_OK;
  if (strcmp(where, "unix") != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--allow-anonymous is %.32s, known are unix and all", where);
  if (values->auth_file != NULL) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--allow-anonymous is unix, which needs --auth-file");
}

static qkv_status check(const qkv_server_options *values, qkv_error *error) {
  QKV_TRY(check_access(values, error));
  qkv_log_level level;
  if (qkv_log_level_parse(values->log_level, &level) != QKV_OK) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--log-level is %s, allowed are debug, info, warn and error",
                    values->log_level);
  }
  if (values->listen.count == 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--listen is empty, at least one address is needed");
  }
  for (size_t i = 0; i < values->cpu_mask.count; i++) {
    uint32_t flags;
    if (qkv_cpu_parse(values->cpu_mask.items[i], &flags) == QKV_OK) continue;
    return qkv_fail(error, QKV_INVALID_ARGUMENT,
                    "--cpu-mask is %s, allowed are none and lists of avx2, fma, f16c, avx512, avx512-vnni, "
                    "avx512-vbmi, neon, neon-dotprod and amx-int8",
                    values->cpu_mask.items[i]);
  }
  QKV_TRY(check_codecs(values, error));
  QKV_TRY(check_tiers(values, error));
  QKV_TRY(check_storage(values, error));
  QKV_TRY(check_memory(values, error));
  qkv_anchor_kind kind;
  qkv_low_rank_mode mode;
  if (!qkv_low_rank_parse(values->low_rank, &mode)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--low-rank is %s, known are none, predictor, correction and auto",
                    values->low_rank);
  }
  if (qkv_anchor_parse(values->anchor, &kind)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "--anchor is %s, known are none, mean, group, chain and auto",
                  values->anchor);
}

qkv_retier_policy qkv_server_options_retier(const qkv_server_options *values) {
  qkv_retier_policy policy = QKV_RETIER_POLICY;
  policy.bits = values->tier_bits;
  policy.tier_least = QKV_RETIER_LEAST_AUTO;
  policy.sinks = (uint64_t)values->tier_sinks;
  policy.pages_max = (size_t)values->tier_pages;
  if (values->tier_thresholds != NULL) (void)read_thresholds(values->tier_thresholds, policy.thresholds);
  return policy;
}

static double bits_of(const qkv_codec *codec, double own, double both) {
  if (own != 0) return own;
  return both != 0 && codec->bits_valid(both) ? both : qkv_codec_bits_default(codec);
}

qkv_policy qkv_server_options_policy(const qkv_server_options *values) {
  const qkv_codec *codec = qkv_codec_by_name(values->codec);
  const qkv_codec *codec_v = values->codec_v != NULL ? qkv_codec_by_name(values->codec_v) : codec;
  qkv_policy policy = {
      .codec = codec,
      .codec_v = codec_v != codec ? codec_v : NULL,
      .bits_k = bits_of(codec, values->bits_k, values->bits),
      .bits_v = bits_of(codec_v, values->bits_v, values->bits),
      .recent_window = values->recent_window,
      .sink_tokens = values->sink_tokens,
      .low_rank_said = true,
      .low_rank = {.rank = (uint8_t)values->rank},
      .gqa_said = true,
      .gqa_compensation = values->gqa_compensation,
      .learn_said = true,
      .learn = true,
      .anchor_said = true,
      .anchor = {.every = (uint32_t)values->anchor_every, .threshold = (float)values->anchor_threshold}};
  bool known = qkv_anchor_parse(values->anchor, &policy.anchor.kind);
  known &= qkv_low_rank_parse(values->low_rank, &policy.low_rank.mode);
  assert(known);
  (void)known;
  return policy;
}

const qkv_codec *qkv_server_options_archive_codec(const qkv_server_options *values) {
  const qkv_codec *codec = qkv_codec_by_name(values->archive_codec);
  return codec->id == QKV_CODEC_EMBEDDED ? NULL : codec;
}

qkv_status qkv_server_options_read(int argc, char **argv, qkv_server_options *values, qkv_options **set,
                                   qkv_error *error) {
  *set = qkv_options_create(qkv_server_option_table, qkv_server_option_count, "QKVD_", values);
  qkv_option_list words;
  QKV_TRY(qkv_options_read_arguments(*set, argc, argv, &words, error));
  if (words.count > 0) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "unexpected argument %s", words.items[0]);
  }
  QKV_TRY(qkv_options_read_environment(*set, error));
  if (values->config != NULL) QKV_TRY(qkv_options_read_file(*set, values->config, error));
  return check(values, error);
}

qkv_log_level qkv_server_options_log_level(const qkv_server_options *values) {
  qkv_log_level level = QKV_LOG_INFO;
  qkv_status status = qkv_log_level_parse(values->log_level, &level);
  assert(status == QKV_OK);
  (void)status;
  return level;
}

uint32_t qkv_server_options_cpu_mask(const qkv_server_options *values) {
  if (values->cpu_mask.count == 0) return UINT32_MAX;
  uint32_t mask = 0;
  for (size_t i = 0; i < values->cpu_mask.count; i++) {
    uint32_t flags = 0;
    qkv_status status = qkv_cpu_parse(values->cpu_mask.items[i], &flags);
    assert(status == QKV_OK);
    (void)status;
    mask |= flags;
  }
  return mask;
}
