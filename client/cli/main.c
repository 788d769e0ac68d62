// qkvctl: looks at a qkvd, and moves sessions out of it and into it.
#include "client/cli/cli.h"

#define OFFSET(field) offsetof(qkvctl_values, field)

// clang-format off
static const qkv_option common_options[] = {QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option status_options[] = {
    {"metrics", QKV_OPTION_FLAG, OFFSET(metrics), NULL, 0, 0, NULL, "list the metrics, too"},
    {"options", QKV_OPTION_FLAG, OFFSET(options), NULL, 0, 0, NULL, "list the daemon's options in force, too"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option sessions_options[] = {
    {"prefix", QKV_OPTION_STRING, OFFSET(prefix), NULL, 0, 0, "TEXT", "only sessions whose name begins so"},
    {"model", QKV_OPTION_STRING, OFFSET(model), NULL, 0, 0, "NAME", "only sessions of this model"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option fetch_options[] = {
    {"output", QKV_OPTION_STRING, OFFSET(output), NULL, 0, 0, "FILE", "where the rows go; for npy a directory"},
    {"format", QKV_OPTION_STRING, OFFSET(format), "safetensors", 0, 0, "NAME", "safetensors, or npy: one file a tensor"},
    {"layers", QKV_OPTION_STRING, OFFSET(layers), NULL, 0, 0, "LIST", "a list, for example 0,2-5; all when not given"},
    {"begin", QKV_OPTION_INTEGER, OFFSET(begin), "0", 0, 1.0e15, "POSITION", "the first position"},
    {"end", QKV_OPTION_INTEGER, OFFSET(end), "0", 0, 1.0e15, "POSITION", "the position behind the last; 0: to the end"},
    {"dtype", QKV_OPTION_STRING, OFFSET(dtype), NULL, 0, 0, "NAME", "fp32, fp16 or bf16; the model's when not given"},
    {"heads-first", QKV_OPTION_FLAG, OFFSET(heads_first), NULL, 0, 0, NULL,
     "[kv_heads, tokens, dim] instead of [tokens, kv_heads, dim]"},
    {"before-rope", QKV_OPTION_FLAG, OFFSET(before_rope), NULL, 0, 0, NULL, "keys as they were before RoPE"},
    {"coded", QKV_OPTION_FLAG, OFFSET(coded), NULL, 0, 0, NULL,
     "all of the session as the daemon holds it, pages and calibrations, for load; with --output alone"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option load_options[] = {
    {"session", QKV_OPTION_STRING, OFFSET(session), NULL, 0, 0, "NAME", "the session to open; the file's when not given"},
    {"model", QKV_OPTION_STRING, OFFSET(model), NULL, 0, 0, "NAME", "its model, registered; the file's when not given"},
    {"purpose", QKV_OPTION_STRING, OFFSET(purpose), "attend", 0, 0, "NAME", "attend or fetch"},
    {"bits-k", QKV_OPTION_REAL, OFFSET(bits_k), "0", 0, 8, "BITS", "code bits of a key's coordinate; 0: the model's"},
    {"bits-v", QKV_OPTION_REAL, OFFSET(bits_v), "0", 0, 8, "BITS", "code bits of a value's coordinate; 0: the model's"},
    {"tier-bits", QKV_OPTION_REAL, OFFSET(tier_bits), "-1", -1, 8, "BITS",
     "average bits that it is brought to in the background, by attention; 0: none, -1: the daemon's"},
    {"keep-full", QKV_OPTION_FLAG, OFFSET(keep_full), NULL, 0, 0, NULL,
     "keep pages that lose bits also in full, so that promote can give them back"},
    {"durability", QKV_OPTION_STRING, OFFSET(durability), NULL, 0, 0, "KIND",
     "memory, async or sync; the daemon's when not given"},
    {"evict", QKV_OPTION_FLAG, OFFSET(evict), NULL, 0, 0, NULL, "it may be closed where memory, sessions or the SSD are full"},
    {"salt", QKV_OPTION_STRING, OFFSET(salt), NULL, 0, 0, "TEXT",
     "the session's salt; token ids of a file of fetch --coded are loaded where it is the one that it was opened with; none when not given"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option copy_options[] = {
    {"to", QKV_OPTION_STRING, OFFSET(to), NULL, 0, 0, "ADDRESS", "the daemon that gets the session: unix:PATH or HOST:PORT"},
    {"session", QKV_OPTION_STRING, OFFSET(session), NULL, 0, 0, "NAME", "its name there; the same when not given"},
    {"durability", QKV_OPTION_STRING, OFFSET(durability), NULL, 0, 0, "KIND",
     "memory, async or sync; that daemon's when not given"},
    {"salt", QKV_OPTION_STRING, OFFSET(salt), NULL, 0, 0, "TEXT",
     "the salt that it was opened with: token ids are copied where it is given; none when not given"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option session_options[] = {
    {"map", QKV_OPTION_FLAG, OFFSET(map), NULL, 0, 0, NULL, "draw its tokens' bits, layers by positions"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

#define SCOPE_OPTIONS \
    {"layers", QKV_OPTION_STRING, OFFSET(layers), NULL, 0, 0, "LIST", "a list, for example 0,2-5; all when not given"}, \
    {"begin", QKV_OPTION_INTEGER, OFFSET(begin), "0", 0, 1.0e15, "POSITION", "the first position"}, \
    {"end", QKV_OPTION_INTEGER, OFFSET(end), "0", 0, 1.0e15, "POSITION", "the position behind the last; 0: to the end"}

static const qkv_option demote_options[] = {
    {"bits", QKV_OPTION_REAL, OFFSET(bits), "0", 0, 8, "BITS", "average code bits of a coordinate, by attention"},
    {"even", QKV_OPTION_FLAG, OFFSET(even), NULL, 0, 0, NULL, "at most so many bits for all, whatever the attention"},
    SCOPE_OPTIONS,
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option promote_options[] = {
    {"bits", QKV_OPTION_REAL, OFFSET(bits), "0", 0, 8, "BITS", "code bits of a coordinate at least; 0: all that there were"},
    SCOPE_OPTIONS,
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option calibrate_options[] = {
    {"from", QKV_OPTION_STRING, OFFSET(from), NULL, 0, 0, "FILE",
     "learn it from this file instead: layers.N.k and layers.N.v as fetch writes them, and layers.N.q, queries, where it has them"},
    {"output", QKV_OPTION_STRING, OFFSET(output), NULL, 0, 0, "FILE", "the calibration file to write"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option fork_options[] = {
    {"position", QKV_OPTION_INTEGER, OFFSET(position), "0", 0, INT64_MAX, "N", "share what lies below this position; 0: everything"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option match_options[] = {
    {"model", QKV_OPTION_STRING, OFFSET(model), NULL, 0, 0, "NAME", "the model of the sessions"},
    {"tokens", QKV_OPTION_STRING, OFFSET(tokens), NULL, 0, 0, "FILE",
     "token ids of the prompt in decimal digits, separated by white space, commas or square brackets; -: standard input"},
    {"salt", QKV_OPTION_STRING, OFFSET(salt), NULL, 0, 0, "TEXT", "the salt that they were opened with; none when not given"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option has_options[] = {
    {"touch", QKV_OPTION_FLAG, OFFSET(touch), NULL, 0, 0, NULL, "count this as a use of those that are open"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option watch_options[] = {
    {"model", QKV_OPTION_STRING, OFFSET(model), NULL, 0, 0, "NAME", "only prefixes of this model"},
    {"ids", QKV_OPTION_FLAG, OFFSET(ids), NULL, 0, 0, NULL, "with --json: their token ids, too"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option objects_options[] = {
    {"prefix", QKV_OPTION_STRING, OFFSET(prefix), NULL, 0, 0, "TEXT", "only objects whose name begins so"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option put_object_options[] = {
    {"durability", QKV_OPTION_STRING, OFFSET(durability), NULL, 0, 0, "KIND",
     "memory, async or sync; the daemon's when not given"},
    {"evict", QKV_OPTION_FLAG, OFFSET(evict), NULL, 0, 0, NULL, "it may go where memory, objects or the SSD are full"},
    {"replace", QKV_OPTION_FLAG, OFFSET(replace), NULL, 0, 0, NULL, "it takes the place of another one of this name"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option get_object_options[] = {
    {"output", QKV_OPTION_STRING, OFFSET(output), NULL, 0, 0, "FILE", "where the bytes go"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option token_options[] = {
    {"roles", QKV_OPTION_STRING, OFFSET(roles), "read,write", 0, 0, "ROLES", "some of read, write and admin, with commas"},
    {"expires", QKV_OPTION_STRING, OFFSET(expires), NULL, 0, 0, "TIME",
     "when it ends, YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ; never when not given"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option drain_options[] = {
    {"grace", QKV_OPTION_DURATION, OFFSET(grace), "0", 0, 3600000, "TIME", "how long running calls may go on; 0: the daemon's drain-grace"},
    {"notice", QKV_OPTION_DURATION, OFFSET(notice), "0", 0, 600000, "TIME",
     "how long the daemon is not ready and serves new calls still; 0: its drain-notice"},
    {"wait", QKV_OPTION_FLAG, OFFSET(wait), NULL, 0, 0, NULL, "until the daemon does not answer any more"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

static const qkv_option size_options[] = {
    {"tokens", QKV_OPTION_INTEGER, OFFSET(token_count), "0", 0, 1 << 30, "N", "tokens of a session"},
    {"sessions", QKV_OPTION_INTEGER, OFFSET(session_count), "1", 1, 1.0e12, "N", "how many there are at once"},
    {"model", QKV_OPTION_STRING, OFFSET(model), NULL, 0, 0, "NAME", "a model that the daemon knows, for what is not given here"},
    {"layers", QKV_OPTION_INTEGER, OFFSET(model_layers), "0", 0, 65536, "N", "the model's layers"},
    {"kv-heads", QKV_OPTION_INTEGER, OFFSET(kv_heads), "0", 0, 65536, "N", "its KV heads"},
    {"q-heads", QKV_OPTION_INTEGER, OFFSET(q_heads), "0", 0, 65536, "N", "its query heads; 0: the model's, or as many"},
    {"key-dim", QKV_OPTION_INTEGER, OFFSET(key_dim), "0", 0, 65536, "N", "the width of a key's head"},
    {"value-dim", QKV_OPTION_INTEGER, OFFSET(value_dim), "0", 0, 65536, "N", "of a value's; 0: the model's, or as that"},
    {"dtype", QKV_OPTION_STRING, OFFSET(dtype), NULL, 0, 0, "NAME", "of its rows: fp32, fp16 or bf16; fp16 when not given"},
    {"purpose", QKV_OPTION_STRING, OFFSET(purpose), "attend", 0, 0, "NAME", "attend or fetch"},
    {"codec", QKV_OPTION_STRING, OFFSET(codec), NULL, 0, 0, "NAME", "the codec; the model's or qkvd's default when not given"},
    {"bits", QKV_OPTION_REAL, OFFSET(bits), "0", 0, 8, "BITS", "code bits of a coordinate; 0: the model's, or 4"},
    {"bits-k", QKV_OPTION_REAL, OFFSET(bits_k), "0", 0, 8, "BITS", "of a key's alone; 0: --bits"},
    {"bits-v", QKV_OPTION_REAL, OFFSET(bits_v), "0", 0, 8, "BITS", "of a value's alone; 0: --bits"},
    {"recent-window", QKV_OPTION_INTEGER, OFFSET(recent_window), "-1", -1, 1048576, "TOKENS", "newest tokens kept exact; -1: the model's, or 64"},
    {"appends-per-second", QKV_OPTION_REAL, OFFSET(append_rate), "0", 0, 1.0e9, "N", "tokens that are appended, in all sessions"},
    {"steps-per-second", QKV_OPTION_REAL, OFFSET(step_rate), "0", 0, 1.0e9, "N", "queries of all layers, in all sessions"},
    QKV_PROGRAM_OPTIONS(qkvctl_values)};

#define OPTIONS(table) table, sizeof(table) / sizeof *(table)

static const qkv_command commands[] = {
    {"status", "", "Shows what the daemon is and holds.", OPTIONS(status_options), 0, 0, qkvctl_status},
    {"models", "", "Lists the models; of all tenants, unless one is given.", OPTIONS(common_options), 0, 0, qkvctl_models},
    {"share", "MODEL", "Lets all tenants that have no model of its name use a model of the tenant default.", OPTIONS(common_options), 1, 1,
     qkvctl_share},
    {"unshare", "MODEL", "Ends that; not while other tenants have sessions of it.", OPTIONS(common_options), 1, 1, qkvctl_unshare},
    {"sessions", "", "Lists the sessions; of all tenants, unless one is given.", OPTIONS(sessions_options), 0, 0, qkvctl_sessions},
    {"session", "SESSION", "Shows one session.", OPTIONS(session_options), 1, 1, qkvctl_session},
    {"has", "SESSION...", "Says which sessions are open; fails where one is not.", OPTIONS(has_options), 1, SIZE_MAX, qkvctl_has},
    {"fetch", "SESSION", "Writes a session's rows to a file.", OPTIONS(fetch_options), 1, 1, qkvctl_fetch},
    {"load", "FILE", "Opens a session with the rows of a safetensors file, or the pages of one that fetch --coded has written.",
     OPTIONS(load_options), 1, 1, qkvctl_load},
    {"copy", "SESSION", "Copies a session to another daemon, pages as they are; again, it goes on where it ended.",
     OPTIONS(copy_options), 1, 1, qkvctl_copy},
    {"calibrate", "MODEL", "Writes a model's calibration to a file: what the daemon has learnt, or what a file of rows tells.", OPTIONS(calibrate_options), 1, 1,
     qkvctl_calibrate},
    {"compare", "SESSION", "Shows what each codec would take for a session's rows, and what attention would miss.", OPTIONS(common_options), 1, 1,
     qkvctl_compare},
    {"demote", "SESSION", "Takes bits of a session's rows.", OPTIONS(demote_options), 1, 1, qkvctl_demote},
    {"promote", "SESSION", "Gives them back, where they were kept.", OPTIONS(promote_options), 1, 1, qkvctl_promote},
    {"match", "", "Finds the session that holds the longest prefix of a prompt.", OPTIONS(match_options), 0, 0, qkvctl_match},
    {"watch", "", "Tells what prefixes of tokens come and go, of all tenants, unless one is given, until it is interrupted.", OPTIONS(watch_options), 0, 0, qkvctl_watch},
    {"truncate", "SESSION POSITION", "Drops the positions from POSITION on.", OPTIONS(common_options), 2, 2,
     qkvctl_truncate},
    {"fork", "SESSION NEW", "Opens a session that shares what another one has.", OPTIONS(fork_options), 2, 2, qkvctl_fork},
    {"storage", "[show|verify|compact]", "Shows the SSD tier, reads all of it, or frees space there.", OPTIONS(common_options), 0, 1,
     qkvctl_storage},
    {"sink", "SESSION...", "Takes sessions out of memory, which stay on the SSD.", OPTIONS(common_options), 1, SIZE_MAX,
     qkvctl_sink},
    {"objects", "", "Lists the opaque objects.", OPTIONS(objects_options), 0, 0, qkvctl_objects},
    {"put-object", "OBJECT FILE", "Keeps a file's bytes as an object.", OPTIONS(put_object_options), 2, 2, qkvctl_put_object},
    {"get-object", "OBJECT", "Writes an object's bytes to a file.", OPTIONS(get_object_options), 1, 1, qkvctl_get_object},
    {"rm-object", "OBJECT...", "Deletes objects; fails where one is not there.", OPTIONS(common_options), 1, SIZE_MAX, qkvctl_rm_object},
    {"token", "new TENANT", "Prints a new bearer token, and its line for the daemon's auth-file; TENANT may be \"*\", any.",
     OPTIONS(token_options), 2, 2, qkvctl_token},
    {"quota", "[show [TENANT]|set TENANT FIELD=VALUE...|rm TENANT]",
     "Shows what tenants take and may take, or changes fields of a quota, for example host_bytes=4GiB; TENANT may be \"*\": those without one.",
     OPTIONS(common_options), 0, SIZE_MAX, qkvctl_quota},
    {"drain", "", "Ends the daemon as SIGTERM does: not ready, no new calls, running ones end, sessions are on the SSD.",
     OPTIONS(drain_options), 0, 0, qkvctl_drain},
    {"size", "", "Says what memory, SSD and processors so many sessions of a model take, without a daemon, by coding some rows here.",
     OPTIONS(size_options), 0, 0, qkvctl_size},
    {"rm", "SESSION...", "Closes sessions.", OPTIONS(common_options), 1, SIZE_MAX, qkvctl_rm},
};
// clang-format on

int main(int argc, char **argv) {
  qkvctl_values values = {0};
  qkv_command_set set = {
      .program = "qkvctl",
      .summary = "Looks at a qkvd, and moves sessions out of it and into it.",
      .commands = commands,
      .command_count = sizeof commands / sizeof *commands,
      .values = &values,
  };
  return qkv_program_run(&set, argc, argv);
}
