// What a restart must report: nothing that is closed or cut, everything that was durable, and to each view its own
// records.
#include "tests/fault/model.h"

#include <string.h>

model_record *model_record_of(model *on, uint64_t number) {
  for (size_t i = 0; i < on->record_count; i++) {
    if (on->records[i].number == number) return &on->records[i];
  }
  return NULL;
}

size_t model_place_of(const model *on, uint64_t session) {
  size_t at = 0;
  while (at < on->session_count && on->sessions[at].number != session) at++;
  CHECK(on, at < on->session_count, "a session that never was\n");
  return at;
}

void model_apply(const model *on, lineage *to, const model_event *event) {
  if (event->what == OPENED) lineage_open(to, event->session);
  if (event->what == FORKED_FROM) lineage_fork(to, event->session, event->parent, event->positions);
  if (event->what == CUT)
    lineage_cut(to, event->session, on->cuts[event->which].layer, on->cuts[event->which].position);
  if (event->what == PUT)
    lineage_put(to, event->session, event->which, on->records[event->which].layer,
                on->records[event->which].position);
}

bool model_cut_hits(const model_cut *cut, uint64_t session, uint32_t layer, uint64_t number, uint64_t position) {
  return cut->session == session && (cut->layer == QKV_LAYER_ALL || cut->layer == layer) && number < cut->watermark &&
         position >= cut->position;
}

static const qkv_record_info *told_record(const model *on, uint64_t number) {
  for (size_t i = 0; i < on->told_count; i++) {
    if (on->told[i].record == number) return &on->told[i];
  }
  return NULL;
}

static bool told_session(const model *on, uint64_t number) {
  for (size_t i = 0; i < on->told_session_count; i++) {
    if (on->told_sessions[i] == number) return true;
  }
  return false;
}

void model_check_sessions(model *on) {
  if (fault_disk_damaged_journal(on->disk) > 0) return;
  for (size_t i = 0; i < on->session_count; i++) {
    const model_session *session = &on->sessions[i];
    const bool told = told_session(on, session->number);
    if (session->close_durable) CHECK(on, !told, "a closed session is back\n");
    if (session->open_durable && !session->close_asked) CHECK(on, told, "a session is lost\n");
  }
}

// Whether a cut is in the journal. If its session was reported and the cut was not, it was not journaled, or nothing
// depends on it. If its session was not reported, every cut that did not fail was journaled before the close.
static bool cut_counts(const model *on, const model_cut *cut) {
  if (cut->void_) return false;
  return cut->durable || cut->told || (!told_session(on, cut->session) && !cut->failed);
}

// Whether it is undecided if a cut counts that heirs of a closed session depend on.
bool model_is_unsure(const model *on) {
  for (size_t i = 0; i < on->cut_count; i++) {
    const model_cut *cut = &on->cuts[i];
    if (!cut->failed || cut->durable || cut->void_ || told_session(on, cut->session)) continue;
    for (size_t s = 0; s < on->session_count; s++) {
      if (told_session(on, on->sessions[s].number) && lineage_inherits(&on->now, s, model_place_of(on, cut->session)))
        return true;
    }
  }
  return false;
}

// Replays the journaled events into the lineage from the beginning.
static const lineage *replay(const model *on) {
  static lineage again;
  memset(&again, 0, sizeof again);
  for (size_t i = 0; i < on->event_count; i++) {
    const model_event *event = &on->events[i];
    if (event->what != CUT || cut_counts(on, &on->cuts[event->which])) model_apply(on, &again, event);
  }
  return &again;
}

static const qkv_record_info *told_at(const model *on, uint64_t session, uint32_t layer, uint64_t position) {
  for (size_t i = 0; i < on->told_count; i++) {
    const qkv_record_meta *meta = &on->told[i].meta;
    if (meta->session == session && meta->layer == layer && meta->position == position) return &on->told[i];
  }
  return NULL;
}

// Each view has exactly the tokens that it should have.
static void check_views(model *on, const lineage *views) {
  for (size_t i = 0; i < on->told_count; i++) {
    const qkv_record_info *info = &on->told[i];
    const model_record *record = model_record_of(on, info->record);
    const size_t session = model_place_of(on, info->meta.session);
    const uint32_t tokens = lineage_tokens(views, session, (size_t)(record - on->records));
    CHECK(on, tokens == info->meta.tokens, "record %llu: session %llu has %u tokens, %u are told\n",
          (unsigned long long)info->record, (unsigned long long)info->meta.session, tokens, info->meta.tokens);
    CHECK(on, told_at(on, info->meta.session, info->meta.layer, info->meta.position) == info, "a place has two\n");
    on->inherited += record->session != info->meta.session;
  }
}

void model_check_told(model *on) {
  for (size_t i = 0; i < on->told_count; i++) {
    const qkv_record_info *info = &on->told[i];
    const model_record *record = model_record_of(on, info->record);
    CHECK(on, record != NULL, "a record that never was\n");
    CHECK(on,
          record->position == info->meta.position && record->layer == info->meta.layer && record->size == info->bytes,
          "a record's description\n");
    CHECK(on, told_session(on, info->meta.session), "a record of a dead session\n");
    if (record->session != info->meta.session) continue;
    for (size_t j = 0; j < on->cut_count; j++) {
      const model_cut *cut = &on->cuts[j];
      if (cut->void_ || !model_cut_hits(cut, info->meta.session, info->meta.layer, info->record, info->meta.position))
        continue;
      if (fault_disk_damaged_journal(on->disk) == 0) CHECK(on, !cut->durable, "a cut record is back\n");
      // Rows from before the cut are never mixed with rows from after it.
      for (size_t k = 0; k < on->told_count; k++) {
        const model_record *other = model_record_of(on, on->told[k].record);
        CHECK(on, other->session != cut->session || other->number < cut->watermark,
              "records %llu and %llu do not go together\n", (unsigned long long)info->record,
              (unsigned long long)on->told[k].record);
      }
    }
  }
  if (fault_disk_damaged_journal(on->disk) == 0 && !model_is_unsure(on)) check_views(on, replay(on));
}

void model_check_durable(model *on) {
  if (fault_disk_damaged_journal(on->disk) > 0 || fault_disk_damaged_segments(on->disk) > 0 || model_is_unsure(on))
    return;
  const lineage *views = replay(on);
  for (size_t i = 0; i < on->record_count; i++) {
    const model_record *record = &on->records[i];
    for (size_t s = 0; s < on->session_count && record->durable && !record->gone; s++) {
      if (!told_session(on, on->sessions[s].number)) continue;
      const uint32_t tokens = lineage_tokens(views, s, i);
      if (tokens == 0) continue;
      const qkv_record_info *info = told_at(on, on->sessions[s].number, record->layer, record->position);
      CHECK(on, info != NULL && info->meta.tokens >= tokens, "record %llu of session %llu was durable\n",
            (unsigned long long)record->number, (unsigned long long)on->sessions[s].number);
    }
  }
}

// From here on the model has what was reported and nothing else. A record may come back where a newer one is damaged.
void model_believe(model *on) {
  for (size_t i = 0; i < on->cut_count; i++) {
    on->cuts[i].durable = cut_counts(on, &on->cuts[i]);
    on->cuts[i].void_ = !on->cuts[i].durable;
  }
  on->now = *replay(on);
  for (size_t i = 0; i < on->record_count; i++) {
    model_record *record = &on->records[i];
    const bool told = told_record(on, record->number) != NULL;
    record->ended = true;
    record->written = record->written || told;
    // After a failed fdatasync the cache may show what the medium does not have; no later sync reports it.
    record->durable = told && (record->durable || !on->sync_failed);
    record->gone = !told;
    record->dropped = record->dropped && !told;
  }
  for (size_t i = 0; i < on->session_count; i++) {
    const bool told = told_session(on, on->sessions[i].number);
    on->sessions[i] = (model_session){.number = on->sessions[i].number, .open_durable = told, .close_asked = !told};
  }
}
