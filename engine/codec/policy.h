// A policy: how the rows of a model, of a session or of a layer are to be coded. What a codec makes of it is a coder
// (codec.h).
#ifndef QKV_ENGINE_CODEC_POLICY_H
#define QKV_ENGINE_CODEC_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/codec/anchor.h"
#include "engine/codec/low_rank.h"

typedef struct qkv_codec qkv_codec;  // codec.h

#define QKV_RECENT_WINDOW_MAX 1048576  // tokens
#define QKV_SINK_TOKENS_MAX 16         // positions; as many as a page's part can have outliers

#define QKV_ANCHOR_EVERY_MAX QKV_PAGE_TOKENS  // rows of a segment
#define QKV_ANCHOR_THRESHOLD_MAX 1e6

// What a session is for. The values are those of qkv.v1.Purpose.
typedef enum qkv_purpose { QKV_PURPOSE_ATTEND = 1, QKV_PURPOSE_FETCH = 2 } qkv_purpose;

#define QKV_PARAMETERS_MAX 4  // of a codec, and of those in it

// 0, NULL and -1 mean "not said here" until qkv_policy_merge (cache/model.h) has filled them in.
typedef struct qkv_policy {
  const qkv_codec *codec;    // of keys, and of values, too, unless the next one is said
  const qkv_codec *codec_v;  // NULL: the same
  // Of the codecs of keys and of values (by qkv_part), as qkv_codec_parameter counts them; 0: the codec's own
  // default. Parameters that are said with a codec belong to it.
  uint32_t parameters[2][QKV_PARAMETERS_MAX];
  double bits_k, bits_v;
  int64_t recent_window;  // tokens kept exact in addition to the open page; -1 not said
  bool learn_said;
  bool learn;  // rows teach the model's calibration
  bool gqa_said;
  bool gqa_compensation;  // bits grow by ceil(log4(query heads of a KV head)), at most to QKV_DEPTH_MAX
  // Of the codec embedded:
  int64_t sink_tokens;  // first positions whose coded rows are kept as outliers (outliers.h); -1 not said
  bool anchor_said;
  qkv_anchor_options anchor;  // of keys and values, where said
  bool low_rank_said;
  qkv_low_rank_options low_rank;  // of keys and values, where said
} qkv_policy;

#define QKV_POLICY_UNSET ((qkv_policy){.recent_window = -1, .sink_tokens = -1})

#endif
