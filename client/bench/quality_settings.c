// The ways to code that `qkv-bench quality` compares.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/bench/quality.h"

// Measured where nothing else is asked for. Those of calibrated frames only with --calibration.
static const struct {
  bool calibrated;
  const char *setting;
} defaults[] = {
    {false, "plain:8"},
    {false, "plain:4"},
    {false, "plain:3"},
    {false, "plain:2"},
    {false, "plain:1"},
    {false, "plain:4.125:mean"},
    {false, "plain:3.125:mean"},
    {false, "plain:2.125:mean"},
    {false, "plain:1.125:mean"},
    {false, "plain:4.125:auto"},
    {false, "plain:3.125:auto"},
    {false, "plain:2.125:auto"},
    {false, "plain:1.125:auto"},
    {false, "archive:4"},
    {false, "archive:3"},
    {false, "archive:2"},
    {false, "archive:3.125:auto"},
    {false, "archive:2.125:auto"},
    {false, "archive:3.125:auto:auto"},
    {false, "archive:2.125:auto:auto"},
    {false, "plain:3.125:mean:predictor"},
    {false, "plain:3.125:mean:correction"},
    {false, "plain:2.125:mean:predictor"},
    {false, "plain:2.125:mean:correction"},
    {false, "plain:4@2"},
    {true, "attend:4"},
    {true, "attend:3"},
    {true, "attend:3/2"},
    {true, "attend:2.5/2"},
    {true, "attend:2.5/1.5"},
    {true, "attend:2"},
    {true, "attend:2/1"},
    {true, "attend:1.5/1"},
    {true, "attend:1"},
    {true, "archive:3"},
    {true, "archive:3/2"},
    {true, "archive:2"},
    {true, "archive:2/1"},
    {true, "archive:1.5/1"},
    {true, "archive:1.25/1.125"},
    {true, "archive:1"},
    {true, "attend:2.5/2:auto"},
    {true, "attend:2/1:auto"},
    {true, "archive:2:auto"},
    {true, "archive:1.25/1.125:auto"},
    {true, "attend:4@2"},
    {true, "attend:4@1.5"},
    {true, "attend:4@1.375"},
    {true, "attend:4@1"},
    {true, "archive:4@1.5"},
};

// ---- Names ----

static const char *const frame_names[] = {
    [QKV_FRAME_PLAIN] = "plain", [QKV_FRAME_ATTEND] = "attend", [QKV_FRAME_ARCHIVE] = "archive"};

static void name_free(const qkvi_setting *setting, char name[QKVI_SETTING_NAME_MAX]) {
  static const char *const anchors[] = {[QKV_ANCHOR_NONE] = "Hadamard + gain, no anchor",
                                        [QKV_ANCHOR_MEAN] = "page mean anchor + Hadamard + gain",
                                        [QKV_ANCHOR_GROUP] = "group anchor + Hadamard + gain",
                                        [QKV_ANCHOR_CHAIN] = "chain + Hadamard + gain",
                                        [QKV_ANCHOR_AUTO] = "best anchor + Hadamard + gain"};
  const qkv_policy *policy = &setting->policy;
  // A mean takes an eighth of a bit from the codes, which the baselines count apart.
  const double mean = policy->anchor.kind == QKV_ANCHOR_MEAN ? 0.125 : 0;
  char bits[48];
  if (policy->bits_k == policy->bits_v) {
    snprintf(bits, sizeof bits, "%g", policy->bits_k - mean);
  } else {
    snprintf(bits, sizeof bits, "K %g / V %g", policy->bits_k - mean, policy->bits_v - mean);
  }
  snprintf(name, QKVI_SETTING_NAME_MAX, "%s%s, %s",
           setting->frame == QKV_FRAME_ARCHIVE ? "archive frame: pre-RoPE " : "", anchors[policy->anchor.kind], bits);
}

static void name_calibrated(const qkvi_setting *setting, char name[QKVI_SETTING_NAME_MAX]) {
  const qkv_policy *policy = &setting->policy;
  const char *frame = setting->frame == QKV_FRAME_ARCHIVE ? "archive frame: pre-RoPE"
                                                          : "attend frame: rotating mean anchor + query-aware";
  const int end =
      snprintf(name, QKVI_SETTING_NAME_MAX, "%s KLT K %g / KLT V %g", frame, policy->bits_k, policy->bits_v);
  if (policy->anchor.kind == QKV_ANCHOR_NONE) return;
  snprintf(name + end, QKVI_SETTING_NAME_MAX - (size_t)end, ", %s anchor",
           policy->anchor.kind == QKV_ANCHOR_AUTO ? "best" : qkv_anchor_name(policy->anchor.kind));
}

// What comes on top of the codes, and what becomes of them later.
static void name_rest(const qkvi_setting *setting, char name[QKVI_SETTING_NAME_MAX]) {
  const qkv_low_rank_options *low_rank = &setting->policy.low_rank;
  size_t length = strlen(name);
  if (low_rank->mode != QKV_LOW_RANK_OFF) {
    snprintf(name + length, QKVI_SETTING_NAME_MAX - length, ", low-rank %s %u", qkv_low_rank_name(low_rank->mode),
             low_rank->rank);
  }
  length = strlen(name);
  if (setting->tier_bits > 0) {
    snprintf(name + length, QKVI_SETTING_NAME_MAX - length, ", by attention to %g", setting->tier_bits);
  }
}

// "kivi q_group_size=64"
static size_t name_codec(const qkv_policy *policy, qkv_part part, char name[QKVI_SETTING_NAME_MAX], size_t length) {
  const qkv_codec *codec = qkv_policy_codec(policy, part);
  const char *of;
  const qkv_parameter *parameter;
  length += (size_t)snprintf(name + length, QKVI_SETTING_NAME_MAX - length, "%s", codec->name);
  for (size_t i = 0; (parameter = qkv_codec_parameter(codec, i, &of)) != NULL; i++) {
    const uint32_t value = policy->parameters[part][i];
    if (value == 0 || value == parameter->fallback) continue;
    length += (size_t)snprintf(name + length, QKVI_SETTING_NAME_MAX - length, " %s=%" PRIu32, parameter->name, value);
  }
  return length;
}

static void name_parts(const qkv_policy *policy, char name[QKVI_SETTING_NAME_MAX]) {
  size_t length = name_codec(policy, QKV_K, name, 0);
  if (policy->codec_v != NULL) {
    name[length++] = '/';
    length = name_codec(policy, QKV_V, name, length);
  }
  length += (size_t)snprintf(name + length, QKVI_SETTING_NAME_MAX - length, " %g", policy->bits_k);
  if (policy->bits_v != policy->bits_k)
    (void)snprintf(name + length, QKVI_SETTING_NAME_MAX - length, "/%g", policy->bits_v);
}

char *qkvi_setting_name(const qkvi_setting *setting, char name[QKVI_SETTING_NAME_MAX]) {
  if (qkv_codec_is_exact(setting->policy.codec)) {
    (void)snprintf(name, QKVI_SETTING_NAME_MAX, "exact");
    return name;
  }
  if (setting->policy.codec->part != NULL) {
    name_parts(&setting->policy, name);
    return name;
  }
  if (setting->calibrated) {
    name_calibrated(setting, name);
  } else {
    name_free(setting, name);
  }
  name_rest(setting, name);
  return name;
}

// ---- Parsing ----

enum { PARTS = 4, PART_BYTES = 96 };

static qkv_status parse_frame(const char *text, qkv_frame *frame, qkv_error *error) {
  for (size_t i = 0; i < sizeof frame_names / sizeof *frame_names; i++) {
    if (strcmp(text, frame_names[i]) != 0) continue;
    *frame = (qkv_frame)i;
    return QKV_OK;
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the frame is %s, known are plain, attend and archive", text);
}

// The codec that `text` begins with, and where its name ends; NULL: none.
static const qkv_codec *find_codec(const char *text, const char **end) {
  char name[PART_BYTES];
  const size_t length = strcspn(text, ",/");
  if (length >= sizeof name) return NULL;
  memcpy(name, text, length);
  name[length] = '\0';
  *end = text + length;
  return qkv_codec_by_name(name);
}

const qkv_codec *qkvi_setting_codec(const char *text) {
  const char *end;
  return find_codec(text, &end);
}

// ",NAME=VALUE" as often as it is there, until a slash or the end.
static qkv_status parse_parameters(const char **text, const qkv_codec *codec, uint32_t values[QKV_PARAMETERS_MAX],
                                   qkv_error *error) {
  while (**text == ',') {
    const char *name = *text + 1, *equals = strchr(name, '=');
    char *end = NULL;
    const unsigned long value = equals != NULL ? strtoul(equals + 1, &end, 10) : 0;
    if (equals == NULL || end == equals + 1 || value == 0 || value > UINT32_MAX ||
        (*end != ',' && *end != '/' && *end != '\0'))
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no parameter, expected NAME=VALUE", name);
    size_t i = 0;
    const char *of;
    const qkv_parameter *parameter;
    while ((parameter = qkv_codec_parameter(codec, i, &of)) != NULL &&
           (strlen(parameter->name) != (size_t)(equals - name) ||
            strncmp(parameter->name, name, (size_t)(equals - name)) != 0))
      i++;
    if (parameter == NULL)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s has no parameter %.*s", codec->name, (int)(equals - name),
                      name);
    values[i] = (uint32_t)value;
    *text = end;
  }
  return QKV_OK;
}

// "CODEC[,NAME=VALUE...][/CODEC_V[,NAME=VALUE...]]" of codecs whose pages are made of parts, in place of a frame; or
// "exact".
static qkv_status parse_codecs(const char *text, qkv_policy *policy, qkv_error *error) {
  char known[QKV_CODEC_NAMES_MAX];
  const char *at = text;
  const qkv_codec *codec = find_codec(text, &at);
  policy->codec = codec;
  QKV_TRY(parse_parameters(&at, codec, policy->parameters[QKV_K], error));
  memcpy(policy->parameters[QKV_V], policy->parameters[QKV_K], sizeof policy->parameters[QKV_V]);
  if (*at == '/') {
    const char *second = at + 1;
    policy->codec_v = find_codec(second, &at);
    if (policy->codec_v == NULL)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "the codec of values is %s, known are %s", second,
                      qkv_codec_names(known));
    memset(policy->parameters[QKV_V], 0, sizeof policy->parameters[QKV_V]);
    QKV_TRY(parse_parameters(&at, policy->codec_v, policy->parameters[QKV_V], error));
    if (policy->codec_v == policy->codec &&
        memcmp(policy->parameters[QKV_K], policy->parameters[QKV_V], sizeof policy->parameters[QKV_K]) == 0)
      policy->codec_v = NULL;
  }
  if (*at == '\0') return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the codec is %s, expected CODEC[,NAME=VALUE][/CODEC[,NAME=VALUE]]",
                  text);
}

// What stands before the bits: codecs or a frame.
static qkv_status parse_way(const char *text, qkvi_setting *setting, qkv_error *error) {
  const qkv_codec *codec = qkvi_setting_codec(text);
  setting->frame = QKV_FRAME_PLAIN;
  if (codec == NULL || codec->id == QKV_CODEC_EMBEDDED) return parse_frame(text, &setting->frame, error);
  return parse_codecs(text, &setting->policy, error);
}

static qkv_status parse_bits(const char *text, qkv_policy *policy, qkv_error *error) {
  char *end = NULL;
  policy->bits_k = policy->bits_v = strtod(text, &end);
  const bool first = end != text;
  if (first && *end == '/') {
    const char *second = end + 1;
    policy->bits_v = strtod(second, &end);
    if (end == second) end = (char *)text;
  }
  if (first && *end == '\0') return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the bits are %s, expected K or K/V", text);
}

static qkv_status parse_anchor(const char *text, qkv_policy *policy, qkv_error *error) {
  if (qkv_anchor_parse(text, &policy->anchor.kind)) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the anchor is %s, known are none, mean, group, chain and auto", text);
}

// "MODE" or "MODE/RANK"
static qkv_status parse_low_rank(const char *text, qkv_policy *policy, qkv_error *error) {
  char mode[PART_BYTES];
  const char *slash = strchr(text, '/');
  const size_t length = slash != NULL ? (size_t)(slash - text) : strlen(text);
  char *end = NULL;
  const unsigned long rank = slash != NULL ? strtoul(slash + 1, &end, 10) : QKV_RANK_DEFAULT;
  memcpy(mode, text, length);
  mode[length] = '\0';
  if (!qkv_low_rank_parse(mode, &policy->low_rank.mode)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the low rank is %s, known are none, predictor, correction and auto",
                    mode);
  }
  policy->low_rank_said = true;
  policy->low_rank.rank = (uint8_t)rank;
  if (slash == NULL || (slash[1] >= '0' && slash[1] <= '9' && *end == '\0' && rank >= 1 && rank <= QKV_RANK_MAX))
    return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the rank is %s, allowed are 1 to %d", slash + 1, QKV_RANK_MAX);
}

static qkv_status parse_tiers(const char *text, double *bits, qkv_error *error) {
  char *end = NULL;
  *bits = strtod(text, &end);
  if (end != text && *end == '\0' && *bits > 0 && qkv_codec_by_id(QKV_CODEC_EMBEDDED)->bits_valid(*bits))
    return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "the average is %s, allowed are multiples of %g up to %d", text,
                  1.0 / QKV_TIER_BIT, QKV_DEPTH_MAX);
}

static qkv_status resolve(qkvi_setting *setting, bool calibrated, qkv_error *error) {
  const qkv_codec *codec = setting->policy.codec;
  setting->calibrated = calibrated && (codec != NULL ? codec->calibrated : setting->frame != QKV_FRAME_PLAIN);
  if (codec != NULL && setting->tier_bits > 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "pages of %s cannot lose bits, of embedded they can", codec->name);
  if (setting->frame == QKV_FRAME_ATTEND && !calibrated) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the attend frame needs --calibration; without one it is plain");
  }
  qkv_policy *policy = &setting->policy;
  if (policy->codec == NULL) policy->codec = qkv_codec_by_id(QKV_CODEC_EMBEDDED);
  policy->recent_window = 0;
  policy->sink_tokens = 4;
  policy->anchor_said = true;
  if (!(policy->bits_k > 0 && policy->bits_v > 0)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "the bits are %g/%g, both must be above 0", policy->bits_k,
                    policy->bits_v);
  }
  return qkv_policy_check(policy, error);
}

qkv_status qkvi_setting_parse(const char *text, bool calibrated, qkvi_setting *setting, qkv_error *error) {
  char parts[PARTS][PART_BYTES] = {"", "", "none", "none"}, whole[PARTS * PART_BYTES] = "";
  const char *tiers = strchr(text, '@');
  *setting = (qkvi_setting){.policy = QKV_POLICY_UNSET};
  snprintf(whole, sizeof whole, "%.*s", tiers != NULL ? (int)(tiers - text) : (int)sizeof whole, text);
  const char *at = whole;
  for (size_t i = 0; at != NULL; i++) {
    const char *colon = strchr(at, ':');
    const size_t bytes = colon != NULL ? (size_t)(colon - at) : strlen(at);
    if (i == PARTS || bytes >= PART_BYTES) {
      return qkv_fail(
          error, QKV_INVALID_ARGUMENT,
          "--setting %.64s: expected FRAME:K[/V][:ANCHOR[:LOW_RANK[/RANK]]][@BITS] or CODEC[/CODEC]:K[/V]", text);
    }
    memcpy(parts[i], at, bytes);
    parts[i][bytes] = '\0';
    at = colon != NULL ? colon + 1 : NULL;
  }
  qkv_status status = parse_way(parts[0], setting, error);
  if (status == QKV_OK) status = parse_bits(parts[1], &setting->policy, error);
  if (status == QKV_OK) status = parse_anchor(parts[2], &setting->policy, error);
  if (status == QKV_OK) status = parse_low_rank(parts[3], &setting->policy, error);
  if (status == QKV_OK && tiers != NULL) status = parse_tiers(tiers + 1, &setting->tier_bits, error);
  if (status == QKV_OK) status = resolve(setting, calibrated, error);
  return status == QKV_OK ? QKV_OK : qkv_error_prefix(error, "--setting %.64s: ", text);
}

// ---- The list ----

static void add(qkvi_setting_list *list, const qkvi_setting *setting) {
  if (list->count == list->capacity) {
    list->capacity = list->capacity == 0 ? 32 : 2 * list->capacity;
    list->items = realloc(list->items, list->capacity * sizeof *list->items);
    if (list->items == NULL) abort();
  }
  list->items[list->count++] = *setting;
}

static qkv_status add_text(qkvi_setting_list *list, const char *text, bool calibrated, qkv_error *error) {
  qkvi_setting setting;
  QKV_TRY(qkvi_setting_parse(text, calibrated, &setting, error));
  add(list, &setting);
  return QKV_OK;
}

// Of --bits-k, --bits-v, --frame and --anchor.
static qkv_status add_flags(qkvi_setting_list *list, const qkv_bench_settings *options, bool calibrated,
                            qkv_error *error) {
  qkvi_setting setting = {.policy = QKV_POLICY_UNSET};
  setting.policy.bits_k = options->code_k;
  setting.policy.bits_v = options->code_v > 0 ? options->code_v : options->code_k;
  QKV_TRY(parse_frame(options->frame != NULL ? options->frame
                      : calibrated           ? "attend"
                                             : "plain",
                      &setting.frame, error));
  QKV_TRY(parse_anchor(options->anchor != NULL ? options->anchor : "none", &setting.policy, error));
  QKV_TRY(resolve(&setting, calibrated, error));
  add(list, &setting);
  return QKV_OK;
}

// ---- Codecs ----

static qkv_status add_way(qkvi_setting_list *list, const char *way, double bits_k, double bits_v, bool calibrated,
                          qkv_error *error) {
  char text[PARTS * PART_BYTES];
  (void)snprintf(text, sizeof text, "%.96s:%g/%g", way, bits_k, bits_v);
  return add_text(list, text, calibrated, error);
}

// A codec, by a way of --setting: at `only` bits, or its default where it has none of these; 0: at the whole bits
// that people use.
static qkv_status add_depths(qkvi_setting_list *list, const qkv_codec *codec, const char *way, double only,
                             bool learns, qkv_error *error) {
  static const double bits[] = {1, 2, 3, 4, 5, 8};
  if (only > 0) {
    const double depth = codec->bits_valid(only) ? only : qkv_codec_bits_default(codec);
    return add_way(list, way, depth, depth, learns, error);
  }
  for (size_t i = 0; i < sizeof bits / sizeof *bits; i++) {
    if (codec->bits_valid(bits[i])) QKV_TRY(add_way(list, way, bits[i], bits[i], learns, error));
  }
  return QKV_OK;
}

// Every codec of the table, for --codec all; embedded in its frames. What is exact is in every table.
static qkv_status add_all_codecs(qkvi_setting_list *list, double only, bool calibrated, qkv_error *error) {
  for (size_t row = 0; qkv_codec_at(row) != NULL; row++) {
    const qkv_codec *codec = qkv_codec_at(row);
    if (codec->part != NULL && (calibrated || !codec->calibrated))
      QKV_TRY(add_depths(list, codec, codec->name, only, codec->calibrated, error));
    if (codec->id != QKV_CODEC_EMBEDDED) continue;
    QKV_TRY(add_depths(list, codec, "plain", only, false, error));
    if (!calibrated) continue;
    QKV_TRY(add_depths(list, codec, "attend", only, true, error));
    QKV_TRY(add_depths(list, codec, "archive", only, true, error));
  }
  return QKV_OK;
}

// Of --codec and --bits: embedded is measured in the frame of sessions to attend, calibrated where it can be.
static qkv_status add_codec(qkvi_setting_list *list, const qkv_bench_settings *options, bool calibrated,
                            qkv_error *error) {
  char known[QKV_CODEC_NAMES_MAX];
  if (strcmp(options->codec, "all") == 0) return add_all_codecs(list, options->code_bits, calibrated, error);
  const qkv_codec *codec = qkvi_setting_codec(options->codec), *codec_v = codec;
  if (codec == NULL)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "--codec is %.64s, known are all, %s", options->codec,
                    qkv_codec_names(known));
  const char *slash = strchr(options->codec, '/');
  if (slash != NULL && qkvi_setting_codec(slash + 1) != NULL) codec_v = qkvi_setting_codec(slash + 1);
  const bool embedded = codec->id == QKV_CODEC_EMBEDDED;
  const double bits = options->code_bits;
  return add_way(list,
                 !embedded    ? options->codec
                 : calibrated ? "attend"
                              : "plain",
                 bits > 0 ? bits : qkv_codec_bits_default(codec), bits > 0 ? bits : qkv_codec_bits_default(codec_v),
                 calibrated && codec->calibrated, error);
}

qkv_status qkvi_settings_collect(const qkv_bench_settings *options, bool calibrated, qkvi_setting_list *list,
                                 qkv_error *error) {
  const bool flags = options->code_k > 0 || options->code_v > 0 || options->frame != NULL || options->anchor != NULL;
  for (size_t i = 0; i < options->ways.count; i++) {
    QKV_TRY(add_text(list, options->ways.items[i], calibrated, error));
  }
  if (flags) QKV_TRY(add_flags(list, options, calibrated, error));
  if (options->codec != NULL) QKV_TRY(add_codec(list, options, calibrated, error));
  if (list->count > 0) return QKV_OK;
  for (size_t i = 0; i < sizeof defaults / sizeof *defaults; i++) {
    if (calibrated || !defaults[i].calibrated) {
      QKV_TRY(add_text(list, defaults[i].setting, defaults[i].calibrated, error));
    }
  }
  return QKV_OK;
}

void qkvi_settings_clear(qkvi_setting_list *list) {
  free(list->items);
  *list = (qkvi_setting_list){0};
}

qkv_purpose qkvi_setting_purpose(const qkvi_setting *setting) {
  return setting->frame == QKV_FRAME_ARCHIVE ? QKV_PURPOSE_FETCH : QKV_PURPOSE_ATTEND;
}

qkv_coding *qkvi_setting_coding(const qkvi_setting *setting, const qkv_model *model,
                                const qkv_calibration *calibration) {
  return qkv_coding_get(model, &setting->policy, qkvi_setting_purpose(setting),
                        setting->calibrated ? calibration : NULL);
}
