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
     "Where to serve HTTP for operators (metrics, health, JSON and a page): HOST:PORT, 127.0.0.1:7581 for instance, "
     "or "
     "unix:PATH. Without it there is none."},
    {"admin-auth", QKV_OPTION_FLAG, AT(admin_auth), NULL, 0, 0, NULL,
     "Requests to --admin-listen, but for /health and the page itself, need a bearer token of --auth-file that may "
     "read "
     "for all tenants."},
    {"admin-anonymous", QKV_OPTION_FLAG, AT(admin_anonymous), NULL, 0, 0, NULL,
     "Serve --admin-listen also where other machines may reach it, though nobody is asked for credentials there."},
    {"config", QKV_OPTION_STRING, AT(config), NULL, 0, 0, "FILE", "YAML file with these options as keys."},
    {"listen-mode", QKV_OPTION_STRING, AT(listen_mode), "0660", 0, 0, "MODE",
     "Access to the files of unix sockets, in octal: who may write to one may connect."},
    {"tls-cert", QKV_OPTION_STRING, AT(tls_cert), NULL, 0, 0, "FILE",
     "Certificate of the daemon and those that lead to its authority, PEM: TCP connections are TLS 1.2 or later. It "
     "is "
     "read anew when it changes, and on SIGHUP."},
    {"tls-key", QKV_OPTION_STRING, AT(tls_key), NULL, 0, 0, "FILE", "Its private key, PEM, without a passphrase."},
    {"tls-client-ca", QKV_OPTION_STRING, AT(tls_client_ca), NULL, 0, 0, "FILE",
     "Authorities, PEM: each client of TCP must have a certificate of one of them."},
    {"auth-file", QKV_OPTION_STRING, AT(auth_file), NULL, 0, 0, "FILE",
     "Bearer tokens (hashes of them), client certificates and users of unix sockets that are known, each with a "
     "tenant and roles; other calls are refused. It is read anew when it changes, and on SIGHUP."},
    {"jwks", QKV_OPTION_STRING, AT(jwks), NULL, 0, 0, "FILE",
     "JSON Web Key Set: bearer tokens may be JWTs that a key of it has signed (RS256, ES256, EdDSA). The auth-file "
     "says what their subjects may do. It is read anew when it changes, and on SIGHUP."},
    {"jwt-issuer", QKV_OPTION_STRING, AT(jwt_issuer), NULL, 0, 0, "ISSUER", "What iss of a JWT must be."},
    {"jwt-audience", QKV_OPTION_STRING, AT(jwt_audience), NULL, 0, 0, "AUDIENCE",
     "What aud of a JWT must be, or have among others."},
    {"quota-file", QKV_OPTION_STRING, AT(quota_file), NULL, 0, 0, "FILE",
     "What each tenant may take. It is read anew when it changes, and on SIGHUP; qkvctl quota writes it. Without it "
     "the file quotas in data-dir, if there is one."},
    {"allow-anonymous", QKV_OPTION_STRING, AT(allow_anonymous), NULL, 0, 0, "WHERE",
     "Calls that show nothing may do everything: unix, with auth-file those of unix sockets; all, "
     "without "
     "auth-file, also where other machines reach the daemon."},
    {"memory-budget", QKV_OPTION_BYTES, AT(memory_budget), "4GiB", MIB, 1024 * 1024 * GIB, "BYTES",
     "Memory for all sessions, their keys and values; sessions and appends beyond it are refused. The whole process "
     "keeps to it and a tenth."},
    {"gpu-memory", QKV_OPTION_BYTES, AT(gpu_memory), "0", 0, 1024 * GIB, "BYTES",
     "Memory on a GPU for copies of pages, where attention is computed on them; what does not fit, and what its "
     "kernels "
     "do not take, is computed by the CPU. 0: no GPU is used, else at least 16MiB."},
    {"gpu-device", QKV_OPTION_STRING, AT(gpu_device), "0", 0, 0, "GPU",
     "The GPU that is used: its number or its UUID, that of a MIG slice too."},
    {"gpu-kernels", QKV_OPTION_STRING, AT(gpu_kernels), NULL, 0, 0, "FILE",
     "Its kernels, a fat binary, a cubin or PTX, instead of those that are part of the program."},
    {"huge-pages", QKV_OPTION_STRING, AT(huge_pages), "auto", 0, 0, "PAGES",
     "What keys and values lie on: auto, pages of 2 MiB where the kernel gives them on request, or off. The log says "
     "which."},
    {"numa", QKV_OPTION_STRING, AT(numa), "off", 0, 0, "PLACE",
     "Where keys and values lie on a machine of several nodes: off, where the kernel likes, interleave, on all in "
     "turn, or local, on the node of the thread that writes them."},
    {"threads", QKV_OPTION_INTEGER, AT(threads), "0", 0, 1024, "N",
     "Compute threads, for encoding and attention; 0: one for each processor that qkvd may use. Bulk work, which "
     "yields to "
     "attention, has as many, and up to 8 threads of each start where jobs wait for the disk."},
    {"pin-threads", QKV_OPTION_FLAG, AT(pin_threads), NULL, 0, 0, NULL,
     "Each compute thread keeps a processor of its own: attention is slowed down less by other work, and "
     "what comes back from the SSD gets less of them. For machines that qkvd has to itself."},
    {"rpc-threads", QKV_OPTION_INTEGER, AT(rpc_threads), "1", 1, 64, "N",
     "Threads that read and answer calls; on few cores one is the fastest."},
    {"limit-message", QKV_OPTION_BYTES, AT(limit_message), "64MiB", 4096, 2047 * MIB, "BYTES",
     "Largest request message."},
    {"limit-response-bytes", QKV_OPTION_BYTES, AT(limit_response_bytes), "1GiB", MIB, 1024 * GIB, "BYTES",
     "Memory for results and rows that are computed, but not sent yet."},
    {"limit-items", QKV_OPTION_INTEGER, AT(limit_items), "1024", 1, 1048576, "N", "Items in one request."},
    {"limit-sessions", QKV_OPTION_INTEGER, AT(limit_sessions), "65536", 1, 16777216, "N", "Sessions open at once."},
    {"limit-objects", QKV_OPTION_INTEGER, AT(limit_objects), "65536", 0, 16777216, "N",
     "Opaque objects held; 0: none."},
    {"limit-object-bytes", QKV_OPTION_BYTES, AT(limit_object_bytes), "1GiB", 1, INT64_C(1) << 40, "BYTES",
     "Size of one opaque object."},
    {"limit-models", QKV_OPTION_INTEGER, AT(limit_models), "64", 1, 65536, "N", "Models registered."},
    {"limit-prefixes", QKV_OPTION_INTEGER, AT(limit_prefixes), "1048576", 0, QKV_PREFIX_PAGES_MAX, "N",
     "Distinct pages of 64 token ids that are indexed for Match, 64 bytes each; 0: none, Match finds nothing."},
    {"limit-calls", QKV_OPTION_INTEGER, AT(limit_calls), "1024", 1, 1048576, "N", "Calls running at once."},
    {"limit-control-calls", QKV_OPTION_INTEGER, AT(limit_control_calls), "64", 4, 65536, "N",
     "Health checks and calls of Admin running at once. They have places of their own, so that a daemon that is full "
     "answers them."},
    {"limit-connection-calls", QKV_OPTION_INTEGER, AT(limit_connection_calls), "512", 1, 1048576, "N",
     "Calls of one connection running at once."},
    {"limit-tenant-calls", QKV_OPTION_INTEGER, AT(limit_tenant_calls), "0", 0, 1048576, "N",
     "Calls of one tenant running at once; 0: as limit-calls says."},
    {"limit-connections", QKV_OPTION_INTEGER, AT(limit_connections), "16384", 1, 1048576, "N",
     "Connections at once, those of unix sockets included; more are closed as they come."},
    {"limit-peer-connections", QKV_OPTION_INTEGER, AT(limit_peer_connections), "0", 0, 1048576, "N",
     "Connections of one IPv4 address, or of one IPv6 network of 64 bits; 0: half of limit-connections."},
    {"limit-control-frames", QKV_OPTION_INTEGER, AT(limit_control_frames), "1000", 0, 1000000, "N",
     "HTTP/2 frames without a message of one connection a second, each counted for what it costs, and five times as "
     "many at once; a connection that sends more is closed. 0: no limit."},
    {"limit-first-message", QKV_OPTION_DURATION, AT(limit_first_message), "10s", 0, 3600000, "TIME",
     "How long a call may take until its first message has arrived as a whole; 0: as long as it likes. Where "
     "limit-calls is reached, calls without a message lose their places at once."},
    {"limit-unread-response", QKV_OPTION_DURATION, AT(limit_unread_response), "5m", 0, 86400000, "TIME",
     "How long a message to a client may lie unread before its call is ended; 0: as long as it likes."},
    {"limit-idle-stream", QKV_OPTION_DURATION, AT(limit_idle_stream), "24h", 0, 604800000, "TIME",
     "How long a stream may wait for its client's next message before it is ended; 0: as long as it likes."},
    {"limit-watchers", QKV_OPTION_INTEGER, AT(limit_watchers), "16", 0, 1024, "N", "Watch calls at once; 0: none."},
    {"limit-client-shm", QKV_OPTION_INTEGER, AT(limit_client_shm), "256", 1, 65536, "N",
     "Regions of clients' shared memory registered at once."},
    {"limit-metric-labels", QKV_OPTION_INTEGER, AT(limit_metric_labels), "64", 0, 1024, "N",
     "Tenants, and models, that /metrics names; those that come later are summed as \"other\"."},
    {"limit-queue", QKV_OPTION_INTEGER, AT(limit_queue), "1024", 1, 1048576, "N",
     "Requests that wait for a compute thread."},
    {"codec", QKV_OPTION_STRING, AT(codec), "embedded", 0, 0, "NAME",
     "What codes rows where neither model nor session says: embedded, exact or another codec of the table."},
    {"codec-v", QKV_OPTION_STRING, AT(codec_v), NULL, 0, 0, "NAME",
     "The same for values alone; both are then neither embedded nor exact. Without it --codec."},
    {"bits", QKV_OPTION_REAL, AT(bits), "0", 0, 0, "BITS",
     "Bits per coordinate where neither model nor session says; 0: 4, or where the codec has no 4 bits 8 or 2. With "
     "embedded in eighths up to 8, and an average, which a calibration distributes over keys and values, layers and "
     "heads by what they miss."},
    {"bits-k", QKV_OPTION_REAL, AT(bits_k), "0", 0, 0, "BITS", "The same for keys alone; 0: --bits."},
    {"bits-v", QKV_OPTION_REAL, AT(bits_v), "0", 0, 0, "BITS", "The same for values alone; 0: --bits."},
    {"recent-window", QKV_OPTION_INTEGER, AT(recent_window), "64", 0, 1048576, "TOKENS",
     "Newest tokens kept exact where neither model nor session says."},
    {"sink-tokens", QKV_OPTION_INTEGER, AT(sink_tokens), "4", 0, QKV_SINK_TOKENS_MAX, "TOKENS",
     "First tokens of a sequence whose coded rows keep at least 8 bits a coordinate, where neither model nor session "
     "says."},
    {"anchor", QKV_OPTION_STRING, AT(anchor), "none", 0, 0, "KIND",
     "What rows are predicted by where neither model nor session says: none, mean, group, chain, or auto, whichever "
     "errs least at equal bytes."},
    {"anchor-every", QKV_OPTION_INTEGER, AT(anchor_every), "0", 0, QKV_ANCHOR_EVERY_MAX, "TOKENS",
     "Chains store a new anchor after so many tokens; 0: only as a page begins."},
    {"anchor-threshold", QKV_OPTION_REAL, AT(anchor_threshold), "0", 0, QKV_ANCHOR_THRESHOLD_MAX, "RATIO",
     "Chains store a new anchor where a row differs from the one before by more than this part of its norm; 0: off."},
    {"low-rank", QKV_OPTION_STRING, AT(low_rank), "none", 0, 0, "KIND",
     "Low-rank factors of pages where neither model nor session says: none, predictor, correction, or auto, where "
     "they "
     "lower the error at equal bytes."},
    {"rank", QKV_OPTION_INTEGER, AT(rank), "4", 1, QKV_RANK_MAX, "N",
     "The rank of such factors; for auto the highest."},
    {"gqa-compensation", QKV_OPTION_FLAG, AT(gqa_compensation), NULL, 0, 0, NULL,
     "More bits, up to 8, where several query heads share a KV head: one for 2 to 4, two for up to 16, where neither "
     "model nor session says."},
    {"calibration", QKV_OPTION_LIST, AT(calibration), NULL, 0, 0, "MODEL=FILE",
     "Calibration file for the model of the tenant default that is registered under this name, where its "
     "registration "
     "brings none; may be given several times."},
    {"trust-calibration", QKV_OPTION_FLAG, AT(trust_calibration), NULL, 0, 0, NULL,
     "Use calibrations of --calibration at once, and neither try them on traffic nor withdraw them."},
    {"calibrate-tokens", QKV_OPTION_INTEGER, AT(calibrate_tokens), "16384", 0, 1e12, "TOKENS",
     "Tokens after which a model's code is calibrated from its traffic, for pages to come; 0: never."},
    {"calibrate-skip", QKV_OPTION_LIST, AT(calibrate_skip), NULL, 0, 0, "TENANT",
     "Tenants whose rows do not teach calibrations."},
    {"ema-alpha", QKV_OPTION_REAL, AT(ema_alpha), "0.996", 0, 0, "FACTOR",
     "What a token's average of received attention keeps with each query; 0.996 is about the last 256."},
    {"ema-every", QKV_OPTION_INTEGER, AT(ema_every), "16", 0, 1048576, "N",
     "Attention is counted for one of so many decode steps or blocks of queries, of every layer; 0: never."},
    {"keep-full", QKV_OPTION_FLAG, AT(keep_full), NULL, 0, 0, NULL,
     "Keep pages also in full when they go to lower tiers, where the session does not say: nothing is freed, and "
     "the way back is exact."},
    {"allow-client-shm", QKV_OPTION_FLAG, AT(allow_client_shm), NULL, 0, 0, NULL,
     "Clients that call by a unix socket may register POSIX shared memory of their user, which rows are then copied "
     "from and to instead of crossing the socket."},
    {"separate-appends", QKV_OPTION_FLAG, AT(separate_appends), NULL, 0, 0, NULL,
     "Code the rows of every append, also those whose token ids another session of the tenant, model and salt holds. "
     "Without it the other session's pages are taken, and the rows are not compared with them."},
    {"tier-bits", QKV_OPTION_REAL, AT(tier_bits), "0", 0, 0, "BITS",
     "Average code bits per coordinate, in eighths up to 8, that sessions are brought to by attention, in the "
     "background, where they do not say; 0: they are left as they are."},
    {"tier-thresholds", QKV_OPTION_STRING, AT(tier_thresholds), NULL, 0, 0, "HI,MID,LO",
     "Where tier-bits is 0: groups of tokens go to 4, 3, 2 or 1 bits where the average attention to their best token "
     "is at least HI, MID, LO or below."},
    {"tier-sinks", QKV_OPTION_INTEGER, AT(tier_sinks), "4", 0, 1048576, "TOKENS",
     "First tokens of a session that the background leaves as they are."},
    {"tier-pages", QKV_OPTION_INTEGER, AT(tier_pages), "256", 1, 1048576, "N",
     "Pages of 64 tokens that the background changes at once, four times a second."},
    {"memory-high", QKV_OPTION_REAL, AT(memory_high), "0.9", 0, 1, "PART",
     "Part of memory-budget beyond which sessions are demoted, the longest unused ones first, to 2 bits at least; "
     "1: never."},
    {"memory-low", QKV_OPTION_REAL, AT(memory_low), "0.8", 0, 1, "PART", "Part of memory-budget at which that ends."},
    {"data-dir", QKV_OPTION_STRING, AT(data_dir), NULL, 0, 0, "DIR",
     "Directory of the SSD tier: sessions that are not in memory alone outlive the process, and memory-budget."},
    {"durability", QKV_OPTION_STRING, AT(durability), NULL, 0, 0, "KIND",
     "Of sessions that do not say: memory, async (written behind) or sync (appends are acknowledged once their rows "
     "are on the device). Without it async with a data-dir, and memory otherwise."},
    {"retention", QKV_OPTION_STRING, AT(retention), "keep", 0, 0, "KIND",
     "Of sessions and objects that do not say: keep, or evict (the longest unused are closed where memory, sessions "
     "or "
     "the SSD are full)."},
    {"storage-io", QKV_OPTION_STRING, AT(storage_io), "auto", 0, 0, "DRIVER",
     "How the disk is read and written: uring, pread, or auto, io_uring where it is allowed."},
    {"storage-budget", QKV_OPTION_BYTES, AT(storage_budget), "0", 0, 1024 * 1024 * GIB, "BYTES",
     "What the files in data-dir may take, at least four segments; before that is exceeded the longest unused "
     "sessions "
     "and objects are deleted. 0: nine tenths of what these files have and the file system has free when the daemon "
     "starts."},
    {"storage-segment", QKV_OPTION_BYTES, AT(storage_segment), "256MiB", MIB, 16 * GIB, "BYTES",
     "Size of a file there, a multiple of 4096."},
    {"storage-dirty", QKV_OPTION_BYTES, AT(storage_dirty), "64MiB", MIB, 64 * GIB, "BYTES",
     "Pages that wait to be written. They and other buffers of the SSD tier take a sixteenth of memory-budget at "
     "most, so "
     "that they may be fewer."},
    {"storage-read-ahead", QKV_OPTION_BYTES, AT(storage_read_ahead), "256MiB", 0, 64 * GIB, "BYTES",
     "Pages of the layers to come that are brought back ahead of the requests for them, an eighth of memory-budget "
     "at "
     "most; 0: none."},
    {"fold-after", QKV_OPTION_DURATION, AT(fold_after), "30s", 0, 86400000, "TIME",
     "After so long without a use a session of which nothing is in memory but on the SSD gives up its layers' "
     "tables, "
     "token ids and averages of attention, too; 0: never."},
    {"storage-compact-rate", QKV_OPTION_BYTES, AT(storage_compact_rate), "64MiB", 0, 64 * GIB, "BYTES",
     "Bytes a second that files are compacted by in the background, where less than half of one is needed; 0: "
     "never."},
    {"drain-grace", QKV_OPTION_DURATION, AT(drain_grace), "10s", 0, 3600000, "TIME",
     "How long running calls may go on after SIGTERM or qkvctl drain."},
    {"drain-notice", QKV_OPTION_DURATION, AT(drain_notice), "0s", 0, 600000, "TIME",
     "How long the daemon says that it is not ready, and serves new calls still, before that begins."},
    {"cpu-mask", QKV_OPTION_LIST, AT(cpu_mask), NULL, 0, 0, "LIST",
     "Processor features that may be used, as far as they are there: none, or some of avx2, fma, f16c, avx512, "
     "avx512-vnni, avx512-vbmi, neon, neon-dotprod, amx-int8. Kernels for avx2 need fma and f16c, too. Without it "
     "all."},
    {"log-level", QKV_OPTION_STRING, AT(log_level), "info", 0, 0, "LEVEL",
     "Least level that is logged: debug, info, warn or error."},
    {"audit-log", QKV_OPTION_STRING, AT(audit_log), NULL, 0, 0, "FILE",
     "Where calls of Admin, and refusals for want of a token, a certificate or a role, are written to, a line of "
     "JSON "
     "each. It is opened again on SIGHUP."},
    {"slow-call", QKV_OPTION_DURATION, AT(slow_call), "0", 0, 3600000, "TIME",
     "Calls, and messages of streams of rows, that take longer are in the log, with where their time went; 0: none."},
    {"discard", QKV_OPTION_FLAG, AT(discard), NULL, 0, 0, NULL,
     "For transport benchmarks: rows are read, checked and acknowledged, but not kept."},
    {"check-health", QKV_OPTION_FLAG, AT(check_health), NULL, 0, 0, NULL,
     "Ask the daemon at --admin-listen, else at the first --listen without TLS, whether it is ready, and exit with 0 "
     "if "
     "it is, 1 if not."},
    {"print-options", QKV_OPTION_FLAG, AT(print_options), NULL, 0, 0, NULL,
     "Print the options in force and where they come from, and exit."},
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
  const qkv_codec *codec = NULL, *codec_v = NULL;
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
