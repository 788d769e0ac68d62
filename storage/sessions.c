#include "storage/sessions_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "storage/internal.h"

enum { ALIKE_MAX = 16 };  // heirs that a new fork is compared with

qkvi_sessions *qkvi_sessions_create(void) {
  qkvi_sessions *sessions = qkvi_checked(calloc(1, sizeof *sessions));
  qkvi_numbered_init(&sessions->known, sizeof(qkvi_session));
  qkvi_numbered_init(&sessions->scanned, sizeof(scanned));
  return sessions;
}

static void free_lineage(qkvi_session *session) {
  lineage *lines = own_lines(session);
  if (lines == NULL) return;
  session->at = lines->time & AT_MAX;
  session->lined = false;
  if (--lines->sharers > 0) return;
  while (lines->cuts != NULL) {
    qkvi_cut *earlier = lines->cuts->earlier;
    free(lines->cuts);
    lines->cuts = earlier;
  }
  free((void *)lines->ordered);
  qkvi_positions_deinit(&lines->limits);
  qkvi_positions_deinit(&lines->parent_limits);
  qkvi_positions_deinit(&lines->reach);
  free(lines);
}

void qkvi_sessions_destroy(qkvi_sessions **sessions) {
  if (*sessions == NULL) return;
  qkvi_session *session;
  for (uint32_t place = 0; (session = qkvi_numbered_next(&(*sessions)->known, &place)) != NULL;)
    free_lineage(session);
  qkvi_numbered_deinit(&(*sessions)->known);
  qkvi_numbered_deinit(&(*sessions)->scanned);
  free(*sessions);
  *sessions = NULL;
}

static qkvi_session *find(const qkvi_sessions *sessions, uint64_t number) {
  return qkvi_numbered_find(&sessions->known, number);
}

// ---- The tree ----

// Of a fork: the next older heir of its parent.
static void link_lines(lineage *lines, lineage *older) {
  lineage *above = own_lines(lines->parent);
  lines->older = older;
  lines->newer = older == NULL ? NULL : older->newer;
  if (older != NULL) older->newer = lines;
  if (lines->newer != NULL) {
    lines->newer->older = lines;
  } else {
    above->heirs = lines;
  }
}

// One that the session has alone, as it gets an heir or a cut.
static lineage *need_lines(qkvi_session *session) {
  lineage *shared = own_lines(session);
  if (shared != NULL && shared->sharers == 1) return shared;
  lineage *lines = qkvi_checked(calloc(1, sizeof *lines));
  lines->time = time_of(session);
  if (shared != NULL) {
    lines->depth = shared->depth;
    lines->layers = shared->layers;
    lines->parent = shared->parent;
    qkvi_positions_copy(&lines->limits, &shared->limits, shared->layers);
    qkvi_positions_copy(&lines->parent_limits, &shared->parent_limits, shared->layers);
    qkvi_positions_copy(&lines->reach, &shared->reach, shared->layers);
    link_lines(lines, shared);
    shared->sharers--;
  }
  set_lines(session, lines);
  return lines;
}

// Once nothing of it is left.
static void drop_lines(qkvi_session *session) {
  const lineage *lines = lines_of(session);
  if (lines->parent == NULL && lines->heirs == NULL && lines->cuts == NULL && lines->layers == 0)
    free_lineage(session);
}

static qkvi_session *add(qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  qkvi_session *session = qkvi_numbered_add(&sessions->known, entry->session);
  session->at = ++sessions->clock & AT_MAX;
  if (sessions->sweep == NULL)
    ((scanned *)qkvi_numbered_add(&sessions->scanned, entry->session))->opened = entry->sequence;
  return session;
}

// Whether a fork at these positions (NULL: only the tree counts) sees what the heir does.
static bool is_alike(const lineage *heir, const qkv_journal_entry *entry) {
  const uint32_t layers = entry->positions == NULL ? 0 : entry->layers;
  if (heir->heirs != NULL || heir->cuts != NULL || heir->layers != layers) return false;
  for (uint32_t layer = 0; layer < layers; layer++) {
    if (qkvi_positions_at(&heir->limits, layer) != entry->positions[layer]) return false;
  }
  return true;
}

// An heir that was forked alike behind the parent's last cut, among the newest ones; NULL: none.
static lineage *find_alike(const lineage *above, const qkv_journal_entry *entry) {
  lineage *heir = above->heirs;
  for (int looked = 0; looked < ALIKE_MAX && heir != NULL; looked++, heir = heir->older) {
    if (above->cuts != NULL && heir->time < above->cuts->time) return NULL;
    if (is_alike(heir, entry)) return heir;
  }
  return NULL;
}

static void set_limits(lineage *lines, const lineage *above, const qkv_journal_entry *entry) {
  lines->layers = entry->layers;
  qkvi_positions_init(&lines->limits, entry->positions, entry->layers);
  qkvi_positions_init(&lines->reach, entry->positions, entry->layers);
  for (uint32_t layer = 0; layer < lines->layers; layer++)
    qkvi_positions_set(&lines->parent_limits, lines->layers, layer, limit_of(above, layer));
  qkvi_positions_pack(&lines->parent_limits, lines->layers);
}

static void link_heir(qkvi_session *parent, qkvi_session *heir, const qkv_journal_entry *entry) {
  lineage *above = need_lines(parent), *alike = find_alike(above, entry);
  assert(!parent->quiet && !heir->quiet);
  above->used_heirs++;
  if (alike != NULL) {
    set_lines(heir, alike);
    return;
  }
  lineage *lines = need_lines(heir);
  lines->parent = parent;
  lines->depth = above->depth + 1;
  link_lines(lines, above->heirs);
  if (entry->positions != NULL) set_limits(lines, above, entry);
}

static void unlink_heir(const qkvi_session *heir) {
  const lineage *lines = lines_of(heir);
  if (lines->parent == NULL) return;
  lineage *above = own_lines(lines->parent);
  if (!heir->quiet) above->used_heirs--;
  if (lines->sharers > 1) return;
  if (lines->newer != NULL) {
    lines->newer->older = lines->older;
  } else {
    above->heirs = lines->older;
  }
  if (lines->older != NULL) lines->older->newer = lines->newer;
  drop_lines(lines->parent);
}

static void bury(qkvi_sessions *sessions, qkvi_session *session) {
  assert(lines_of(session)->heirs == NULL);
  unlink_heir(session);
  free_lineage(session);
  const scanned *found = qkvi_numbered_find(&sessions->scanned, session->session);
  if (found != NULL) qkvi_numbered_remove(&sessions->scanned, found);
  qkvi_numbered_remove(&sessions->known, session);
}

static qkv_status add_fork(qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  qkvi_session *parent = find(sessions, entry->parent);
  qkv_status status = QKV_OK;
  if (parent == NULL || parent->dead) {
    status = QKV_FAILED_PRECONDITION;
  } else if (lines_of(parent)->depth >= QKV_FORK_DEPTH_MAX) {
    status = QKV_RESOURCE_EXHAUSTED;
  }
  if (status != QKV_OK && sessions->sweep != NULL) return status;
  qkvi_session *heir = add(sessions, entry);
  heir->lost = status != QKV_OK;
  if (heir->lost) return status;
  link_heir(parent, heir, entry);
  return QKV_OK;
}

// ---- Tokens ----

static uint32_t clip(const qkvi_entry *entry, uint32_t tokens, uint64_t limit) {
  if (entry->position >= limit) return 0;
  const uint64_t left = limit - entry->position;
  return left < tokens ? (uint32_t)left : tokens;
}

// Of an own record: what a fork at `time` sees of it, or with UINT64_MAX the session itself.
static uint32_t tokens_at(const qkvi_session *owner, const qkvi_entry *entry, uint64_t time) {
  uint32_t tokens = entry->tokens;
  for (const qkvi_cut *cut = lines_of(owner)->cuts; cut != NULL && tokens > 0; cut = cut->earlier) {
    if (cut->layer != QKV_LAYER_ALL && cut->layer != entry->layer) continue;
    // The row existed and was cut, or it was put behind the cut after the fork had separated.
    if ((cut->time < time) == (entry->record < cut->watermark)) tokens = clip(entry, tokens, cut->position);
  }
  return tokens;
}

// ---- Cuts ----

// When the heirs were forked, in ascending order. The caller frees it.
static uint64_t *times_of_heirs(const qkvi_session *session, size_t *count) {
  *count = 0;
  for (const lineage *heir = lines_of(session)->heirs; heir != NULL; heir = heir->older) ++*count;
  uint64_t *times = qkvi_checked(malloc((*count + 1) * sizeof *times));
  size_t at = *count;
  for (const lineage *heir = lines_of(session)->heirs; heir != NULL; heir = heir->older) times[--at] = heir->time;
  return times;
}

// `alone`: the session's own view counts, too, which is that of a future fork. The caller frees it.
static qkvi_cut **decide_cuts(const qkvi_session *session, bool alone, size_t *count) {
  size_t heirs;
  uint64_t *times = times_of_heirs(session, &heirs);
  qkvi_cut **cuts = qkvi_cuts_decide(lines_of(session)->cuts, times, heirs, alone, count);
  free(times);
  return cuts;
}

static void forget_cuts(qkvi_session *session) {
  lineage *lines = own_lines(session);
  size_t count;
  if (lines == NULL) return;
  qkvi_cut **cuts = decide_cuts(session, false, &count);
  lines->cuts = NULL;
  for (size_t i = 0; i < count; i++) {
    if (cuts[i]->needed) {
      cuts[i]->earlier = lines->cuts;
      lines->cuts = cuts[i];
    } else {
      free(cuts[i]);
    }
  }
  free((void *)cuts);
  drop_lines(session);
}

static void add_cut(qkvi_sessions *sessions, qkvi_session *session, const qkv_journal_entry *entry) {
  lineage *lines = need_lines(session);
  qkvi_cut *cut = qkvi_checked(malloc(sizeof *cut));
  *cut = (qkvi_cut){.time = ++sessions->clock,
                    .sequence = entry->sequence,
                    .position = entry->position,
                    .watermark = entry->watermark,
                    .layer = entry->layer,
                    .earlier = lines->cuts};
  lines->cuts = cut;
  for (uint32_t layer = 0; layer < lines->layers; layer++) {
    if (entry->layer != QKV_LAYER_ALL && entry->layer != layer) continue;
    if (qkvi_positions_at(&lines->limits, layer) > entry->position)
      qkvi_positions_set(&lines->limits, lines->layers, layer, entry->position);
  }
  qkvi_positions_pack(&lines->limits, lines->layers);
}

// ---- Lost tokens ----

// It only ever shrinks: a fork takes no more than the session itself has.
static uint64_t reach_of(const qkvi_session *session, uint32_t layer) {
  const lineage *lines = own_lines(session);
  const uint64_t most = qkvi_positions_at(&lines->reach, layer);
  uint64_t reach = session->dead ? 0 : qkvi_positions_at(&lines->limits, layer);
  for (const lineage *heir = lines->heirs; heir != NULL && reach < most; heir = heir->older) {
    if (layer >= heir->layers) continue;
    const uint64_t limit = qkvi_positions_at(&heir->parent_limits, layer), own = reach_at(heir, layer);
    const uint64_t both = limit < own ? limit : own;
    if (both > reach) reach = both;
  }
  return reach < most ? reach : most;
}

// Whether another heir, with the same cuts of the parent before and behind its fork, goes as far.
static bool is_reached(const lineage *heir, uint32_t layer, uint64_t reach) {
  uint64_t after = 0, before = UINT64_MAX;
  for (const qkvi_cut *cut = lines_of(heir->parent)->cuts; cut != NULL && after == 0; cut = cut->earlier) {
    if (cut->time > heir->time) before = cut->time;
    if (cut->time < heir->time) after = cut->time;
  }
  for (const lineage *other = lines_of(heir->parent)->heirs; other != NULL && other->time > after;
       other = other->older) {
    if (other != heir && other->time < before && layer < other->layers && reach_at(other, layer) >= reach)
      return true;
  }
  return false;
}

// Recomputes how far a session and its heirs reach; true: no sibling reaches what they have lost.
static bool shrink(qkvi_session *session) {
  lineage *lines = own_lines(session);
  bool lost = false;
  if (lines != NULL && lines->sharers > 1) return false;
  for (uint32_t layer = 0; lines != NULL && layer < lines->layers; layer++) {
    const uint64_t before = reach_at(lines, layer), reach = reach_of(session, layer);
    qkvi_positions_set(&lines->reach, lines->layers, layer, reach);
    if (reach < before && !lost) lost = !is_reached(lines, layer, before);
  }
  if (lines != NULL) qkvi_positions_pack(&lines->reach, lines->layers);
  return lost;
}

static void bury_all(qkvi_sessions *sessions, qkvi_session *session) {
  while (session != NULL && session->dead && lines_of(session)->heirs == NULL) {
    qkvi_session *parent = lines_of(session)->parent;
    bury(sessions, session);
    session = parent;
  }
}

// A session was closed or cut: sweeps its own records, then those of its ancestors that this may affect.
static void settle(qkvi_sessions *sessions, qkvi_session *session) {
  if (sessions->sweep == NULL) {
    bury_all(sessions, session);
    return;
  }
  for (bool lost = true; session != NULL;) {
    if (lost) session->unswept = !sessions->sweep(sessions->context, session);
    if (!session->unswept) forget_cuts(session);
    qkvi_session *parent = lines_of(session)->parent;
    lost = parent != NULL && shrink(session) && (parent->dead || lines_of(parent)->cuts != NULL);
    const bool gone = session->dead && lines_of(session)->heirs == NULL;
    if (gone) bury(sessions, session);
    if (!lost && !gone) return;
    session = parent;
  }
}

qkv_status qkvi_sessions_note(qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  qkvi_session *session = find(sessions, entry->session);
  if (entry->kind == QKV_JOURNAL_SESSION_OPEN || entry->kind == QKV_JOURNAL_SESSION_FORK) {
    if (session != NULL && entry->kind == QKV_JOURNAL_SESSION_FORK) return QKV_FAILED_PRECONDITION;
    if (session != NULL) session->failed = false;  // written once more, as the first result was uncertain
    if (session != NULL) return QKV_OK;
    if (entry->kind == QKV_JOURNAL_SESSION_FORK) return add_fork(sessions, entry);
    (void)add(sessions, entry);
    return QKV_OK;
  }
  scanned *found = qkvi_numbered_find(&sessions->scanned, entry->session);
  if (entry->kind == QKV_JOURNAL_SESSION_NOTE && found != NULL) found->noted = entry->sequence;
  if (entry->kind != QKV_JOURNAL_SESSION_CLOSE && entry->kind != QKV_JOURNAL_SESSION_TRUNCATE) return QKV_OK;
  const bool stranger = session == NULL;  // records may have been put for it
  if (stranger && sessions->sweep == NULL) return QKV_OK;
  if (stranger) session = add(sessions, entry);
  if (entry->kind == QKV_JOURNAL_SESSION_CLOSE) session->dead = true;
  if (entry->kind == QKV_JOURNAL_SESSION_TRUNCATE) add_cut(sessions, session, entry);
  settle(sessions, session);
  if (stranger && entry->kind == QKV_JOURNAL_SESSION_TRUNCATE) bury(sessions, session);
  return QKV_OK;
}

// ---- Scanning ----

static int compare_times(const void *a, const void *b) {
  const qkvi_session *first = *(qkvi_session *const *)a, *second = *(qkvi_session *const *)b;
  const uint64_t before = time_of(first), after = time_of(second);
  return before < after ? -1 : before > after;
}

// All sessions in the order of their opening, parents first. The caller frees it.
static qkvi_session **list_all(const qkvi_sessions *sessions, size_t *count) {
  qkvi_session **list = qkvi_checked(malloc((sessions->known.count + 1) * sizeof(qkvi_session *))), *session;
  *count = 0;
  for (uint32_t place = 0; (session = qkvi_numbered_next(&sessions->known, &place)) != NULL;)
    list[(*count)++] = session;
  if (*count > 0) qsort((void *)list, *count, sizeof *list, compare_times);
  return list;
}

uint64_t qkvi_sessions_give_up(qkvi_sessions *sessions, uint64_t sequence) {
  size_t count, lost = 0;
  uint64_t given_up = 0;
  qkvi_session **list = list_all(sessions, &count);
  for (size_t i = 0; i < count; i++) {
    qkvi_session *session = list[i];
    const scanned *found = qkvi_numbered_find(&sessions->scanned, session->session);
    const qkvi_session *parent = lines_of(session)->parent;
    session->lost = session->lost || found->opened < sequence || (parent != NULL && parent->lost);
    if (!session->lost) continue;
    given_up += session->dead ? 0 : 1;
    list[lost++] = session;
  }
  while (lost-- > 0) {
    qkvi_session *parent = lines_of(list[lost])->parent;
    bury(sessions, list[lost]);
    if (parent != NULL && !parent->lost) bury_all(sessions, parent);
  }
  free((void *)list);
  return given_up;
}

void qkvi_sessions_drop(qkvi_sessions *sessions, uint64_t session) {
  qkvi_session *found = find(sessions, session);
  if (found == NULL || found->dead) return;
  found->dead = found->dropped = true;
  settle(sessions, found);
}

void qkvi_sessions_dropped(const qkvi_sessions *sessions, void (*each)(void *context, uint64_t session),
                           void *context) {
  const qkvi_session *at;
  for (uint32_t place = 0; (at = qkvi_numbered_next(&sessions->known, &place)) != NULL;) {
    if (at->dropped) each(context, at->session);
  }
}

static const qkvi_cut *cut_of(const lineage *lines, uint64_t sequence) {
  size_t low = 0, high = lines->ordered_count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (lines->ordered[middle]->sequence < sequence) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < lines->ordered_count && lines->ordered[low]->sequence == sequence ? lines->ordered[low] : NULL;
}

bool qkvi_sessions_keep(const qkvi_sessions *sessions, const qkv_journal_entry *entry) {
  if (entry->kind < QKV_JOURNAL_SESSION_OPEN) return true;
  qkvi_session *session = find(sessions, entry->session);
  const scanned *found = qkvi_numbered_find(&sessions->scanned, entry->session);
  if (session == NULL || found == NULL) return false;
  if (entry->kind == QKV_JOURNAL_SESSION_NOTE) return !session->dead && entry->sequence == found->noted;
  if (entry->kind == QKV_JOURNAL_SESSION_OPEN) return entry->sequence == found->opened;
  if (entry->kind != QKV_JOURNAL_SESSION_TRUNCATE) return true;
  lineage *lines = own_lines(session);
  if (lines != NULL && lines->ordered == NULL)
    lines->ordered = decide_cuts(session, !session->dead, &lines->ordered_count);
  const qkvi_cut *cut = cut_of(lines_of(session), entry->sequence);
  return cut != NULL && cut->needed;
}

bool qkvi_sessions_alive(const qkvi_sessions *sessions, uint64_t session) {
  const qkvi_session *found = find(sessions, session);
  return found != NULL && !found->dead;
}

bool qkvi_sessions_known(const qkvi_sessions *sessions, uint64_t session) {
  return find(sessions, session) != NULL;
}

static int compare_numbers(const void *a, const void *b) {
  const qkvi_session *first = *(qkvi_session *const *)a, *second = *(qkvi_session *const *)b;
  return first->session < second->session ? -1 : first->session > second->session;
}

size_t qkvi_sessions_live(const qkvi_sessions *sessions, const qkvi_session ***live) {
  size_t count, alive = 0;
  qkvi_session **list = list_all(sessions, &count);
  for (size_t i = 0; i < count; i++) {
    if (!list[i]->dead) list[alive++] = list[i];
  }
  if (alive > 0) qsort((void *)list, alive, sizeof *list, compare_numbers);
  *live = (const qkvi_session **)list;
  return alive;
}

uint64_t qkvi_session_number(const qkvi_session *session) {
  return session->session;
}

// ---- What heirs still take ----

static uint32_t heirs_layers(const qkvi_session *session) {
  uint32_t layers = 0;
  for (const lineage *heir = lines_of(session)->heirs; heir != NULL; heir = heir->older) {
    if (heir->layers > layers) layers = heir->layers;
  }
  return layers;
}

static void lower(uint64_t *limits, uint32_t layers, const qkvi_cut *cut) {
  for (uint32_t layer = 0; layer < layers; layer++) {
    if (cut->layer != QKV_LAYER_ALL && cut->layer != layer) continue;
    if (cut->position < limits[layer]) limits[layer] = cut->position;
  }
}

// `reach` and `limits` have place for the layers.
static void reach_behind(const qkvi_session *session, uint64_t *reach, uint64_t *limits, uint32_t layers) {
  // Cuts behind a fork separate it from what is put later: all of these, as nothing was put before now.
  memset(limits, 0xff, layers * sizeof *limits);
  memset(reach, 0, layers * sizeof *reach);
  const qkvi_cut *cut = lines_of(session)->cuts;
  for (const lineage *heir = lines_of(session)->heirs; heir != NULL; heir = heir->older) {
    for (; cut != NULL && cut->time > heir->time; cut = cut->earlier) lower(limits, layers, cut);
    for (uint32_t layer = 0; layer < heir->layers; layer++) {
      const uint64_t own = reach_at(heir, layer), both = own < limits[layer] ? own : limits[layer];
      if (both > reach[layer]) reach[layer] = both;
    }
  }
}

void qkvi_sessions_tell_reach(const qkvi_sessions *sessions,
                              void (*tell)(void *context, uint64_t session, const uint64_t *reach, uint32_t layers),
                              void *context) {
  const qkvi_session *at;
  for (uint32_t place = 0; (at = qkvi_numbered_next(&sessions->known, &place)) != NULL;) {
    const uint32_t layers = at->dead ? 0 : heirs_layers(at);
    if (layers == 0) continue;
    uint64_t *reach = qkvi_checked(malloc(2 * layers * sizeof *reach));
    reach_behind(at, reach, reach + layers, layers);
    tell(context, at->session, reach, layers);
    free(reach);
  }
}

// ---- One view ----

void qkvi_view_init(qkvi_view *view, const qkvi_session *session) {
  *view = (qkvi_view){.owner = session};
}

void qkvi_view_deinit(qkvi_view *view) {
  free(view->limits);
  view->limits = NULL;
}

bool qkvi_view_up(qkvi_view *view) {
  const qkvi_session *heir = view->owner;
  if (lines_of(heir)->parent == NULL || lines_of(heir)->layers == 0) return false;
  if (view->from == NULL) {
    view->layers = lines_of(heir)->layers;
    view->limits = qkvi_checked(malloc(view->layers * sizeof *view->limits));
    for (uint32_t layer = 0; layer < view->layers; layer++) view->limits[layer] = limit_of(own_lines(heir), layer);
  } else {
    // Through the last heir: what the owner had when that heir was forked.
    for (uint32_t layer = 0; layer < view->layers; layer++) {
      const lineage *from = own_lines(view->from);
      const uint64_t limit = layer < from->layers ? qkvi_positions_at(&from->parent_limits, layer) : 0;
      if (limit < view->limits[layer]) view->limits[layer] = limit;
    }
  }
  view->from = heir;
  view->owner = lines_of(heir)->parent;
  return true;
}

uint32_t qkvi_view_tokens(const qkvi_view *view, const qkvi_entry *entry) {
  if (view->from == NULL) return tokens_at(view->owner, entry, UINT64_MAX);
  if (entry->layer >= view->layers) return 0;
  return clip(entry, tokens_at(view->owner, entry, time_of(view->from)), view->limits[entry->layer]);
}

// ---- Running ----

void qkvi_sessions_run(qkvi_sessions *sessions, qkvi_sweep_fn *sweep, void *context) {
  size_t count;
  qkvi_session **list = list_all(sessions, &count);
  while (count-- > 0) {  // heirs first
    qkvi_session *session = list[count];
    lineage *lines = own_lines(session);
    if (lines == NULL) continue;
    for (uint32_t layer = 0; layer < lines->layers; layer++)
      qkvi_positions_set(&lines->reach, lines->layers, layer, reach_of(session, layer));
    qkvi_positions_pack(&lines->reach, lines->layers);
    free((void *)lines->ordered);
    lines->ordered = NULL;
    forget_cuts(session);
  }
  free((void *)list);
  qkvi_numbered_deinit(&sessions->scanned);
  sessions->sweep = sweep;
  sessions->context = context;
}

const qkvi_session *qkvi_sessions_find(const qkvi_sessions *sessions, uint64_t session) {
  return find(sessions, session);
}

void qkvi_sessions_swept(qkvi_sessions *sessions, uint64_t session) {
  qkvi_session *found = find(sessions, session);
  if (found == NULL || !found->unswept) return;
  found->unswept = false;
  forget_cuts(found);
}

// ---- Use ----

static void set_quiet(qkvi_session *session, bool quiet) {
  if (session->quiet == quiet) return;
  session->quiet = quiet;
  qkvi_session *parent = lines_of(session)->parent;
  if (parent == NULL) return;
  if (quiet) {
    own_lines(parent)->used_heirs--;
  } else {
    own_lines(parent)->used_heirs++;
  }
}

uint64_t *qkvi_sessions_use(qkvi_sessions *sessions, uint64_t session, size_t *count) {
  qkvi_session *found = find(sessions, session);
  uint64_t *line = qkvi_checked(malloc((found == NULL ? 1 : lines_of(found)->depth + 1) * sizeof *line));
  *count = 0;
  line[(*count)++] = session;
  if (found == NULL) return line;
  found->rests = 0;
  for (qkvi_session *at = found; at != NULL; at = lines_of(at)->parent) {
    set_quiet(at, false);
    if (at != found) line[(*count)++] = at->session;
  }
  return line;
}

void qkvi_sessions_rest(qkvi_sessions *sessions, uint64_t session) {
  qkvi_session *found = find(sessions, session);
  if (found != NULL) found->rests = 1;
}

void qkvi_sessions_quiet(qkvi_sessions *sessions, uint64_t session, void (*each)(void *context, uint64_t session),
                         void *context) {
  qkvi_session *at = find(sessions, session);
  for (; at != NULL && (at->rests || at->dead) && lines_of(at)->used_heirs == 0; at = lines_of(at)->parent) {
    set_quiet(at, true);
    each(context, at->session);
  }
}

uint64_t qkvi_sessions_parent(const qkvi_sessions *sessions, uint64_t session) {
  const qkvi_session *found = find(sessions, session);
  const qkvi_session *parent = found == NULL ? NULL : lines_of(found)->parent;
  return parent == NULL ? 0 : parent->session;
}

void qkvi_sessions_fail(qkvi_sessions *sessions, uint64_t session) {
  qkvi_session *found = find(sessions, session);
  if (found != NULL) found->failed = true;
}

bool qkvi_sessions_failed(const qkvi_sessions *sessions, uint64_t session) {
  const qkvi_session *found = find(sessions, session);
  return found != NULL && found->failed;
}

// The heirs in groups: `count` of them, and `layers` of the fork that has most. Arrays may be NULL.
static void group_heirs(qkvi_needs *needs) {
  const qkvi_cut *cut = lines_of(needs->owner)->cuts;
  bool fresh = true;
  size_t count = 0;
  for (const lineage *heir = lines_of(needs->owner)->heirs; heir != NULL; heir = heir->older) {
    for (; cut != NULL && cut->time > heir->time; cut = cut->earlier) fresh = true;
    count += fresh ? 1 : 0;
    fresh = false;
    if (needs->times == NULL) {
      if (heir->layers > needs->layers) needs->layers = heir->layers;
      continue;
    }
    uint64_t *reach = needs->reach + (count - 1) * needs->layers;
    needs->times[count - 1] = heir->time;
    for (uint32_t layer = 0; layer < heir->layers; layer++) {
      if (reach_at(heir, layer) > reach[layer]) reach[layer] = reach_at(heir, layer);
    }
  }
  needs->count = count;
}

void qkvi_needs_init(qkvi_needs *needs, const qkvi_session *owner) {
  *needs = (qkvi_needs){.owner = owner};
  if (lines_of(owner)->heirs == NULL) return;
  group_heirs(needs);
  needs->times = qkvi_checked(calloc(needs->count + 1, sizeof *needs->times));
  needs->reach = qkvi_checked(calloc(needs->count * needs->layers + 1, sizeof *needs->reach));
  group_heirs(needs);
}

void qkvi_needs_deinit(qkvi_needs *needs) {
  free(needs->times);
  free(needs->reach);
}

uint32_t qkvi_needs_tokens(const qkvi_needs *needs, const qkvi_entry *entry) {
  uint32_t most = needs->owner->dead ? 0 : tokens_at(needs->owner, entry, UINT64_MAX);
  for (size_t i = 0; i < needs->count && entry->layer < needs->layers && most < entry->tokens; i++) {
    const uint64_t reach = needs->reach[i * needs->layers + entry->layer];
    if (reach <= entry->position) continue;
    const uint32_t tokens = clip(entry, tokens_at(needs->owner, entry, needs->times[i]), reach);
    if (tokens > most) most = tokens;
  }
  return most;
}

uint32_t qkvi_sessions_needed(const qkvi_sessions *sessions, const qkvi_entry *entry) {
  const qkvi_session *owner = find(sessions, entry->session);
  if (owner == NULL || !owner->dead) return entry->tokens;
  qkvi_needs needs;
  qkvi_needs_init(&needs, owner);
  const uint32_t tokens = qkvi_needs_tokens(&needs, entry);
  qkvi_needs_deinit(&needs);
  return tokens;
}
