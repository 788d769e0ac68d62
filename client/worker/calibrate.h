// Learning a calibration from text: the model runs over windows of it with an exact cache, and keys, values and
// queries leave their moments (engine/codec/moments.h) behind. Some pages do not, on which it is tried
// (engine/cache/probation.h) and its bits are distributed.
//
// Threads: one at a time for each qkvi_calibrator.
#ifndef QKV_CLIENT_WORKER_CALIBRATE_H
#define QKV_CLIENT_WORKER_CALIBRATE_H

#include "client/worker/lm.h"
#include "engine/cache/probation.h"
#include "engine/codec/calibration.h"

typedef struct qkvi_calibrator qkvi_calibrator;

// For windows of up to `window` tokens; `lm` is borrowed. INVALID_ARGUMENT for a model that no calibration takes.
qkv_status qkvi_calibrator_create(const qkvi_lm *lm, int64_t window, qkvi_calibrator **calibrator, qkv_error *error);
void qkvi_calibrator_destroy(qkvi_calibrator **calibrator);

// All rows are learnt from, and nothing is tried. Before the first window.
void qkvi_calibrator_learn_all(qkvi_calibrator *calibrator);

// The calibration is to have these sections of codecs. Before the end.
void qkvi_calibrator_want(qkvi_calibrator *calibrator, const qkv_section_wants *wants);

// Runs the model over a window, from position 0 on.
qkv_status qkvi_calibrator_add(qkvi_calibrator *calibrator, const int32_t *window, int64_t tokens, qkv_error *error);

// From all windows so far; a reference for the caller. *verdict tells what the trial found; of texts too short to
// hold pages out nothing is tried: verdict->parts is 0. FAILED_PRECONDITION without any window, and where the
// calibration is no better than data-free code.
qkv_status qkvi_calibrator_finish(const qkvi_calibrator *calibrator, qkv_verdict *verdict,
                                  const qkv_calibration **calibration, qkv_error *error);

#endif
