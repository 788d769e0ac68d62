// Probation: a calibration is tried on held-out traffic (holdout.h) before pages are coded with it.
//
// The sample's pages are coded with the candidate and with the data-free code, at few bits and at many, for both
// purposes, by the archive codec, too (model.h; the data-free code is then what sessions have without a calibration),
// and otherwise as sessions are (kinds). Measured are, for each layer
// and KV head, the errors of attention (probe.h) with the keys' codes alone, with the values' and with both, and the
// worst error of a row. A part (keys in the attend frame, keys in the archive frame, values) is kept where with every
// kind
//
//   - its squared error of attention is below QKV_PROBATION_BETTER times that of the data-free code, or below
//     QKV_PROBATION_NOTHING: what is not clearly better may be worse, for so small a sample, and falling back costs
//     nothing,
//   - its worst row errs at most QKV_PROBATION_WORST times as much (squared) as the data-free code's worst one,
//   - and keys and values together are not worse.
//
// Where it is not, it gets the data-free transform; so one head that is unlike the others, or dead, does not cost the
// rest. What is left is measured once more, as in the attend frame data-free keys are turned before they are coded
// and so err by chance otherwise; where it is not better over all heads and kinds, or nothing is left, the candidate
// is refused. Layers that do not teach are left as they are. Codes that are made without a calibration say nothing.
//
// By the archive codec, which moves bits between heads, what is left is judged over all heads. Where it is worse than
// the data-free code with any kind, the archive codec is refused (calibration.h): sessions to be fetched are opened
// with the codec of others, and the calibration is used all the same. Another trial does not take that back, only
// another calibration does.
//
// What is in force and is tried again has proved itself: a part falls back, and the archive codec is refused, where
// it errs more than QKV_PROBATION_STAYS times as much as the data-free code, and bits and heavy hitters stay.
// Otherwise trials, each on another small sample, would wear it down.
//
// Errors are those of decoded rows; what attention in integers adds (codec/precision.h) is small compared with them.
//
// Cost: each kind codes the sample twice, or four times where parts fall back, about a second or two for 32 layers of
// 8 heads of 128.
//
// Threads: one at a time; `hold` orders it with the threads that fill the sample.
#ifndef QKV_ENGINE_CACHE_PROBATION_H
#define QKV_ENGINE_CACHE_PROBATION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/cache/coding.h"
#include "engine/cache/holdout.h"

#define QKV_PROBATION_BETTER 0.9  // of squared errors
#define QKV_PROBATION_STAYS 1.5   // the same, of what is in force
#define QKV_PROBATION_WORST 4.0   // the same
#define QKV_PROBATION_NOTHING 1e-5
#define QKV_PROBATION_RUNGS 4  // kinds that everything is tried with
#define QKV_PROBATION_REASON_MAX 192

// The shape of a model's held-out sample; the model is resolved.
qkv_holdout_shape qkv_probation_sample(const qkv_model *model);

// How sessions code: their policy, resolved, and what they are for.
typedef struct qkv_kind {
  qkv_policy policy;
  qkv_purpose purpose;
  const qkv_codec *otherwise;  // codec of the data-free code that it is compared with; NULL: the policy's
} qkv_kind;

// The policy at QKV_RUNG_MANY and at QKV_RUNG_FEW bits, where its codecs have them, for both purposes.
#define QKV_RUNG_MANY 4.0
#define QKV_RUNG_FEW 2.0
void qkv_probation_rungs(const qkv_policy *policy, qkv_kind rungs[QKV_PROBATION_RUNGS]);
// The kind that stands for sessions of this policy and purpose: with bits between 1 and 6 that of the nearer rung, as
// each bit more makes all errors alike smaller.
qkv_kind qkv_probation_kind(const qkv_policy *policy, qkv_purpose purpose);

typedef struct qkv_probation {
  const qkv_model *model;
  const qkv_holdout *holdout;
  const qkv_calibration *candidate;  // a reference, which is taken
  bool in_force;                     // it has been tried before
  const qkv_kind *kinds;
  size_t kind_count;
  // Called before and behind copying a layer's sample, `holds` true and false.
  void (*hold)(void *context, uint32_t layer, bool holds);
  void *context;
  const _Atomic bool *cancelled;  // read before each layer
} qkv_probation;

typedef struct qkv_verdict {
  bool accepted;
  uint32_t parts, dropped;  // of heads that were tried; of these, those that fell back
  // Of attention, the root over heads and kinds: with what is left, and without it. Of the archive codec, too; 0: it
  // was not tried.
  double error, data_free;
  double archive_error, archive_data_free;
  bool archive_refused;                  // in this trial
  char worst[QKV_PROBATION_REASON_MAX];  // of the part that did worst against the data-free code; "": none was tried
} qkv_verdict;

// CANCELLED; FAILED_PRECONDITION where the sample has no rows of a layer that teaches. On success *accepted gets a
// reference to what is to be used, the candidate itself or what is left of it, or NULL where it is refused.
qkv_status qkv_probation_try(const qkv_probation *probation, qkv_verdict *verdict, const qkv_calibration **accepted,
                             qkv_error *error);

#endif
