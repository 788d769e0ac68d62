#!/usr/bin/env python3
"""Plants mistakes, one at a time, and tells which of them the tests catch. By hand: it builds and tests for each.

A mutant is one edit: a text that stands once in a file, and another one in its place. It is caught where a test of its
list fails; one that does not compile, or whose text is not there any more, is an error and counts for nothing.

  tests/mutants/mutants.py                all of them, in a copy of the tree
  tests/mutants/mutants.py --list
  tests/mutants/mutants.py --only fork    those whose name has "fork" in it
"""

import argparse
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Tests of pages that sessions share.
SHARED = "engine/cache/(fork|session_fork|session_share|layer_spill|session_spill)$"

# Tests of folding.
FOLDED = "engine/cache/session_fold(_forks)?$|server/fold"

# name, file, what stands there, what is planted, regular expression of tests
MUTANTS = [
    # ---- What is acknowledged as durable ----
    ("a later write clears an error", "storage/put.c", "    if (error != 0) put->error = error;\n",
     "    put->error = error;\n", "storage/|fault/moment"),
    ("an error of the device while compacting drops a record", "storage/compact.c",
     "  if (unread) {\n    leave_record(storage, read, wrong);\n  } else if (wrong != NULL) {",
     "  if (unread && storage == NULL) {\n    leave_record(storage, read, wrong);\n  } else if (wrong != NULL) {",
     "storage/|fault/moment"),
    ("io_uring leaves fdatasync out", "storage/io_uring.c",
     "      io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);", "      io_uring_prep_nop(sqe);", "storage/|fault/"),
    ("a record is placed before its session's entry is durable", "storage/put.c",
     "    if (put->after > storage->journal.resolved) return false;\n", "", "storage/|fault/"),
    ("a start takes the copy that may not be durable", "storage/recover.c",
     "    if (on->storage->segments[copy->entry.segment]->state == QKVI_SEGMENT_SEALED) return copy;",
     "    if (on->storage->segments[copy->entry.segment]->state != QKVI_SEGMENT_SEALED) return copy;",
     "storage/|fault/"),
    ("the tail is sealed without a sync", "storage/recover.c",
     "  error = request_now(on, QKV_IO_SYNC, segment->file, 0, NULL, 0);\n"
     "  if (error == 0) error = request_now(on, QKV_IO_WRITE, segment->file, segment->end, tail, bytes);",
     "  error = request_now(on, QKV_IO_WRITE, segment->file, segment->end, tail, bytes);", "storage/|fault/"),
    ("a cut of an unloaded session is forgotten", "storage/sessions.c", "    if (!session->unswept) forget_cuts(session);\n",
     "    forget_cuts(session);\n", "storage/unload|fault/model"),
    ("compaction overlooks unloaded sessions", "storage/pack.c",
     "  uint64_t *sessions = qkvi_index_list_unloaded(storage->index, segment, &count);\n",
     "  uint64_t *sessions = qkvi_index_list_unloaded(storage->index, segment == QKVI_ANY_SEGMENT ? segment : segment + 1,\n"
     "                                                &count);\n", "storage/unload"),
    ("an ancestor is packed that an heir uses", "storage/sessions.c", " && lines_of(at)->used_heirs == 0;", ";",
     "storage/unload|fault/model"),
    ("a use brings back no ancestor", "storage/sessions.c", "    if (at != found) line[(*count)++] = at->session;\n", "",
     "storage/unload|fault/model"),
    ("a start takes an unloaded index for the caller's record", "storage/recover.c", "entry->kind != QKVI_RECORD_INDEX && ", "",
     "storage/unload|fault/model"),
    ("a sync takes an index for a record", "storage/sync.c", " && put->request.meta.kind != QKVI_RECORD_INDEX;", ";",
     "storage/unload"),
    ("a page's record counts as durable when it is written", "server/residency/write_back.c",
     "  pending->state = QKV_RECORD_WRITTEN;\n", "  pending->state = QKV_RECORD_DURABLE;\n", "server/residency"),
    ("settling skips what is not durable", "engine/cache/layer_spill.c",
     "    if (state == QKV_RECORD_DURABLE) continue;", "    if (state >= QKV_RECORD_WRITTEN) continue;",
     "engine/cache/(layer_spill|session_spill|fork|session_fork)$"),
    ("pages that are only written leave memory", "engine/cache/layer_spill.c",
     "  return state_at(layer, index, &held) == QKV_RECORD_DURABLE && held;",
     "  return state_at(layer, index, &held) >= QKV_RECORD_WRITTEN && held;", "engine/cache/(layer_spill|session_spill)$"),
    # ---- Forks that have one lineage ----
    ("forks see the same though their parent was cut between them", "storage/sessions.c",
     "    if (above->cuts != NULL && heir->time < above->cuts->time) return NULL;\n", "", "storage/sessions|fault/model"),
    ("a cut of a fork is that of others", "storage/sessions.c",
     "  if (shared != NULL && shared->sharers == 1) return shared;", "  if (shared != NULL) return shared;",
     "storage/sessions|fault/model"),
    ("a closed fork takes what others see", "storage/sessions.c",
     "  if (lines != NULL && lines->sharers > 1) return false;\n", "", "storage/sessions|fault/model"),
    ("a fork is taken for one with heirs", "storage/sessions.c",
     "  if (heir->heirs != NULL || heir->cuts != NULL || heir->layers != layers) return false;",
     "  if (heir->layers != layers) return false;", "storage/sessions|fault/model"),
    ("a single packed record lies in no segment", "storage/index_packed.c",
     "  if (session->single) return segment == QKVI_ANY_SEGMENT || session->segment == segment;",
     "  if (session->single) return segment == QKVI_ANY_SEGMENT;", "storage/index"),
    ("folded sessions that keep the same do not share it", "engine/cache/session_codings.c",
     "  if (found == NULL) HASH_ADD_KEYPTR(hh, all_kept, &made->trunk, bytes, made);\n",
     "  found = NULL;\n  HASH_ADD_KEYPTR(hh, all_kept, &made->trunk, bytes, made);\n", "engine/cache/session_fold_forks"),
    ("references of what is kept already are lost", "engine/cache/session_codings.c",
     "  if (found != NULL) let_go(made);", "  if (found != NULL) free(made);", "engine/cache/session_fold_forks"),
    # ---- Folding ----
    ("a session that is in memory for itself alone is folded", "engine/cache/session_fold.c",
     "  return qkvi_range_is_used_elsewhere(range) ||\n", "  return qkvi_range_is_shared(range) ||\n", FOLDED),
    ("a trunk takes the ranges that are no layer's with it", "engine/cache/page_range.c",
     "  if (layers_left > 0 && layers_left == trunks_left) qkvi_range_leave_memory(left, 0, arena);\n", "", FOLDED),
    ("pages that a trunk has are dropped with those that are not seen", "engine/cache/page_range.c",
     "  const uint32_t kept = count > trunk_pages ? count : trunk_pages;\n",
     "  const uint32_t kept = count;\n  (void)trunk_pages;\n", FOLDED),
    ("what a trunk had leaves with the last trunk", "engine/cache/page_range.c",
     "  if (--left->trunks > 0) return;\n", "  if (--left->trunks > 0 || range->reaches->next != NULL) return;\n", FOLDED),
    ("pages that a session does not see keep it from being folded", "engine/cache/session_fold.c",
     "  drop_unseen(session, working);\n", "  (void)drop_unseen;\n", FOLDED),
    ("pages for trunks alone stay in memory", "engine/cache/layer_spill.c",
     "  if (!qkvi_range_is_used_elsewhere(range) && range->count > end - first)\n",
     "  if (!qkvi_range_is_shared(range) && range->count > end - first)\n", FOLDED),
    ("shared records are counted once more for a folded session", "engine/cache/session_fold.c",
     "account, qkvi_session_stored(session) - shared);", "account, qkvi_session_stored(session) - 0 * shared);", FOLDED),
    ("equal trunks are not found", "engine/cache/trunk.c", "  if (kept == NULL) {\n", "  kept = NULL;\n  if (kept == NULL) {\n",
     FOLDED),
    ("a trunk has what is behind its own pages of a range", "engine/cache/trunk.c",
     "      qkvi_layer_adopt_range(layer, trunk->parts[i].range, trunk->parts[i].pages);\n",
     "      qkvi_layer_adopt_range(layer, trunk->parts[i].range, trunk->parts[i].range->count);\n", FOLDED),
    ("a folded session's pages are counted with those of its trunk", "engine/cache/session_fold.c",
     "pages += own_pages(&layers->at[i].layer, trunk);", "pages += own_pages(&layers->at[i].layer, trunk) + (trunk != NULL);",
     FOLDED),
    ("an unfolded fork is not listed as one that shares pages", "engine/cache/session_fold.c",
     "  atomic_store(&all->working->shares, all->trunk != NULL);\n", "", FOLDED + "|e2e/forks"),
    ("token ids of a trunk are read from the record", "engine/cache/session_fold.c",
     "  qkvi_trunk_give_tokens(all->trunk, &all->working->tokens);\n", "", FOLDED),
    # ---- Locks ----
    ("an attend goes on where rows were truncated", "server/handlers/attend_turn.c",
     "part->cut = part->attended > 0 && part->cuts != layer->cuts;", "part->cut = false;", "e2e/attend"),
    ("layers are locked in the request's order", "server/handlers/attend_turn.c", "  qsort(order, count, sizeof *order, compare_slots);\n",
     "  qsort(order, 0, sizeof *order, compare_slots);\n", "e2e/attend"),
    ("an append reads its layer's pages unpinned", "engine/cache/session.c",
     "static qkv_layer *begin_write(locked_layer *layer, int64_t used_ms) {\n  qkvi_layer_pin(&layer->layer, used_ms);\n",
     "static qkv_layer *begin_write(locked_layer *layer, int64_t used_ms) {\n  (void)used_ms;\n",
     "engine/cache/(session|session_fork|session_spill|layer_spill)$"),
    ("a page leaves memory that another thread reads", "engine/cache/layer_spill.c",
     "  if (!qkvi_range_seize(range)) {\n    *in_use = true;\n    return 0;\n  }\n",
     "  atomic_store(&range->pins, -1);\n  (void)in_use;\n", SHARED),
    ("a fork's use does not keep shared pages", "engine/cache/layer_spill.c",
     "(qkvi_range_is_used_elsewhere(range) && atomic_load(&range->used_ms) > unused_since_ms);\n",
     "(qkvi_range_is_used_elsewhere(range) && unused_since_ms < 0);\n", SHARED),
    ("a folded fork's use keeps shared pages", "engine/cache/layer_spill.c",
     "(qkvi_range_is_used_elsewhere(range) && atomic_load(&range->used_ms) > unused_since_ms);\n",
     "(qkvi_range_is_shared(range) && atomic_load(&range->used_ms) > unused_since_ms);\n", FOLDED),
    ("a session's hold does not keep its pages", "engine/cache/layer_spill.c",
     "  return atomic_load(&range->keepers) > 0 ||\n", "  return ", SHARED + "|e2e/forks"),
    ("an eviction waits for readers first", "engine/cache/session_spill.c",
     "  return how == READ ? qkvi_session_look(session, layer) : qkvi_session_change(session, layer);\n",
     "  return qkvi_session_change(session, layer);\n", "engine/cache/session_spill$"),
    ("an eviction never waits for readers", "engine/cache/session_spill.c",
     "i <= layers && wait && in_use && freed < bytes", "i <= layers && wait && in_use && bytes == 0",
     "engine/cache/session_spill$|server/residency"),
    ("a restore excludes readers", "engine/cache/session_spill.c",
     "  const qkv_layer *reading = qkvi_session_look(session, layer);\n",
     "  const qkv_layer *reading = qkvi_session_change(session, layer);\n", "engine/cache/session_spill$"),
    ("what a reader has done to pages is not published", "engine/cache/session.c",
     "  publish(session, layer_at(session, layer));\n  end_read(layer_at(session, layer));\n",
     "  end_read(layer_at(session, layer));\n", "engine/cache/session_spill$"),
    ("a range's unseen pages stay when it is one's own", "engine/cache/layer_spill.c",
     "  for (size_t i = 0; i < layer->range_count; i++) drop_unseen(layer, i);\n",
     "  for (size_t i = layer->range_count; i < layer->range_count; i++) drop_unseen(layer, i);\n", SHARED),
    ("pages come back without a reservation", "server/residency/restore.c",
     "  uint64_t part = take_part(all, cost);\n", "  uint64_t part = take_part(all, 0);\n", "server/residency"),
    # ---- Threads ----
    ("a flow has all threads that may wait", "engine/base/pool.c", "config->waits ? config->threads : 0", "0",
     "engine/base/pool|engine/base/executor|e2e/quotas"),
    ("threads on demand do not call each other", "engine/base/pool.c", "  if (pool->config.on_demand) call_thread(pool);",
     "  if (pool->ending) call_thread(pool);", "engine/base/pool"),
    ("each item of a call waits for memory as long", "server/residency/budget.c", "qkv_rpc_waited_ms(call, QKV_RPC_WAIT_MEMORY)",
     "0", "e2e/device"),
    ("a truncation waits for the disk without a client", "server/residency/acknowledge.c",
     "{\n    if (qkvi_client_is_gone(call)) return qkv_fail(error, QKV_CANCELLED, \"the client has gone\");\n    if (qkv_now_ms()",
     "{\n    if (qkv_now_ms()", "e2e/device"),
    ("a demotion waits for the disk without a client", "server/residency/acknowledge.c",
     "await_durable(residency, call, session, ends, error)", "await_durable(residency, NULL, session, ends, error)",
     "e2e/device"),
    ("a tenant fills limit-queue", "engine/base/fair.c", "of->waiting >= QKV_FAIR_PART * (fair->max - fair->length)", "false",
     "engine/base/fair|e2e/tenants"),
    ("an attend that has had its turn goes on for want of a place", "engine/base/fair.c", "!share->again && ", "",
     "engine/base/fair|e2e/tenants"),
    ("a job that computes waits for another append", "server/handlers/append.c",
     "(waits & (QKVI_WAIT_ROWS | QKVI_WAIT_DISK)) == 0", "false", "e2e/tenants"),
    ("an append of pages with at_once waits", "engine/cache/session_append.c", "if (!use->at_once) return", "return",
     "engine/cache/session|e2e/tenants"),
    ("the thread that reads closes sessions for memory", "server/handlers/open_session.c",
     "status == QKV_RESOURCE_EXHAUSTED && (waits & QKVI_WAIT_MEMORY) == 0", "false", "e2e/evicting"),
    ("a job that computes waits for an append to a prefix", "server/handlers/open_session.c",
     "qkvi_session_waits(call) | JOB_WAITS", "QKVI_WAIT_LAYERS", "e2e/tenants"),
    ("a job that computes closes sessions for an append that opens one", "server/handlers/append.c",
     "if ((wanted & ~stream->waits) == 0)", "if (true)", "e2e/evicting"),
    ("a job that computes closes sessions for memory", "server/handlers/append.c", "(QKVI_WAIT_MEMORY | QKVI_WAIT_DISK)",
     "(QKVI_WAIT_LAYERS | QKVI_WAIT_DISK)", "e2e/quotas"),
    # ---- Shared pages ----
    ("a fork writes into shared rows", "engine/cache/layer_tail.c",
     "  if (block->share == NULL) return false;\n  if (!qkvi_block_is_shared(block)) {",
     "  if (block->share == NULL) return false;\n  if (qkvi_block_is_shared(block)) return false;\n  {", SHARED),
    ("truncation cuts a shared range", "engine/cache/layer.c",
     "  if (qkvi_range_is_shared(slot->range) && kept > 1 && may_begin_range(layer)) split_last_page(layer);\n"
     "  qkv_page_range *own = qkvi_layer_own_range(layer, layer->range_count - 1);",
     "  if (qkvi_range_is_shared(slot->range) && kept > 1 && may_begin_range(layer)) split_last_page(layer);\n"
     "  qkv_page_range *own = layer->ranges[layer->range_count - 1].range;", SHARED),
    ("demotion changes a shared range", "engine/cache/layer_retier.c",
     "  qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, cut->index));",
     "  qkv_page_range *range = range_with(layer, cut->index);",
     "engine/cache/(fork|session_fork|layer_retier|session_retier)$"),
    ("an image of a copied range has one holder", "engine/cache/page_range.c",
     "    if (pages[i].page != NULL) (void)qkvi_image_share(&pages[i].page_holders);\n", "", SHARED),
    ("a block that another calibration has coded is taken", "engine/cache/layer_tail.c",
     "share->of.calibration != wanted->calibration ||", "", SHARED),
    ("a record that forks need is dropped", "engine/cache/layer.c",
     "  if (backing == NULL || atomic_load(&range->was_shared)) return;", "  if (backing == NULL) return;", SHARED),
    ("a fork's page is put for one session alone", "engine/cache/layer_spill.c",
     "  qkv_page_range *range = qkvi_layer_own_range(layer, qkv_layer_range_of(layer, index));\n"
     "  qkv_page_entry *entry = qkv_layer_page(layer, index);\n  assert(entry->page != NULL);",
     "  qkv_page_range *range = layer->ranges[qkv_layer_range_of(layer, index)].range;\n"
     "  qkv_page_entry *entry = qkv_layer_page(layer, index);\n  assert(entry->page != NULL);", SHARED),
    ("a fork keeps its parent's ids beyond its position", "engine/cache/session_tokens.c",
     "  if (position < fork->length) truncate_locked(fork, position);\n", "  (void)position;\n",
     "engine/cache/(session_fork|session_tokens)$"),
    ("a truncation of forked rows is not written", "engine/cache/layer.c", " || from < layer->forked_to ||", " ||",
     "e2e/forks"),
    ("a fork keeps its limits after a crash", "server/residency/recovery.c",
     "  if (found->limits != NULL && found->limits[layer] > beyond) beyond = found->limits[layer];\n", "", "e2e/forks"),
    ("ids count again whose rows were cut", "server/residency/recovery.c",
     "    if (info->record < cut->watermark && cut->position < end) end = cut->position;\n",
     "    if (info->record > cut->watermark && cut->position < end) end = cut->position;\n", "e2e/forks"),
    ("a fork of what was cut to nothing is shared with it", "engine/cache/session_spill.c",
     "  if (!qkvi_session_has_layers(session) || !qkvi_session_has_layers(other)) return;",
     "  if (!qkvi_session_has_layers(session)) return;", "e2e/forks"),
    ("a cut clips what a fork has had", "storage/sessions.c",
     "    if ((cut->time < time) == (entry->record < cut->watermark)) tokens",
     "    if (time > 0 && entry->record < cut->watermark) tokens", "storage/forks"),
    ("an heir's truncation does not lower its limits", "storage/sessions.c",
     "      qkvi_positions_set(&lines->limits, lines->layers, layer, entry->position);\n", "      (void)session;\n",
     "storage/forks"),
    # ---- Prefixes ----
    ("a fork is found by all of its parent's pages", "engine/cache/prefix_index.c",
     "new_holder(index, ancestor(index, index->holders[of].node, pages), owner)",
     "new_holder(index, ancestor(index, index->holders[of].node, pages + 1), owner)",
     "engine/cache/(prefix_index|session_tokens)"),
    ("a node forgets who came last", "engine/cache/prefix_index.c", "  index->nodes[from].latest = at;\n", "",
     "engine/cache/(prefix_index|session_tokens)|e2e/prefixes"),
    ("a page's hash leaves out the one before", "engine/cache/prefix_index.c", "  page.parent = *parent;\n",
     "  page.parent = (qkv_prefix_hash){0};\n  (void)parent;\n", "engine/cache/(prefix_index|session_tokens)"),
    ("a salt does not count", "server/handlers/open_session.c", "qkv_prefix_root(tenant, request->model, request->salt.data, request->salt.len)",
     "qkv_prefix_root(tenant, request->model, request->salt.data, 0)", "e2e/(prefixes|open_prefix)"),
    ("a session begins with pages of another policy", "server/handlers/open_prefix.c",
     "qkv_policy_equal(&held->policy, &wanted->policy)", "held->policy.codec == wanted->policy.codec", "e2e/open_prefix"),
    ("pages of another calibration are taken", "engine/cache/session_share.c",
     "  if (made->image == NULL || made->calibration != calibration) return false;",
     "  if (made->image == NULL || calibration == UINT32_MAX) return false;",
     "engine/cache/session_share"),
    ("pages that have lost bits are taken", "engine/cache/session_share.c", "      is_whole(entry)) {", "      (is_whole(entry) || entry->bytes > 0)) {",
     "engine/cache/session_share"),
    # ---- Codes on the wire ----
    ("a page of another layer is appended", "engine/cache/layer_coded.c",
     "    if (header->layer != layer->config.layer)", "    if (header->layer > layer->config.layer)",
     "e2e/coded"),
    ("a page that was cut short is sent whole", "engine/cache/layer_coded.c", "                          .tokens = entry->tokens,",
     "                          .tokens = ((const qkv_page_header *)entry->page)->tokens,",
     "engine/cache/layer_coded|e2e/coded"),
    ("a page follows exact rows", "engine/cache/layer_coded.c", "  if (layer->length != layer->sealed)",
     "  if (layer->length < layer->sealed)", "engine/cache/layer_coded"),
    ("a calibration's content is not looked at", "server/handlers/append_coded.c",
     "  if (qkv_calibration_hash(page->calibration) == hash) return QKV_OK;",
     "  if (hash != 0 || qkv_calibration_hash(page->calibration) == hash) return QKV_OK;",
     "server/kept_calibrations|client/c/coded_append|e2e/coded"),
    # ---- Exact rows of sync sessions ----
    ("exact rows count as durable when they are written", "engine/cache/layer_rows.c",
     "    if (state != QKV_RECORD_DURABLE) return;", "    if (state < QKV_RECORD_WRITTEN) return;",
     "engine/cache/layer_rows"),
    ("rows go that a page of which is only written covers", "engine/cache/layer_rows.c",
     "  const uint64_t durable = qkvi_layer_pages_durable(layer);", "  const uint64_t durable = layer->sealed;",
     "engine/cache/layer_rows"),
    ("exact rows of a fork go with its parent", "engine/cache/layer_rows.c", "    parent->saved_rows[i].shared = true;\n", "",
     "engine/cache/layer_rows|e2e/crash"),
    # ---- Memory on paths that fail ----
    ("a reservation leaks where an append fails", "server/handlers/append.c",
     "    qkvi_budget_unreserve(daemon->residency, &headroom);\n",
     "    if (status == QKV_OK) qkvi_budget_unreserve(daemon->residency, &headroom);\n", "e2e/storage"),
    ("token ids stay reserved where an append fails", "server/handlers/append_ids.c",
     "  qkv_arena_unreserve(ids->tokens->config.arena, ids->reserved);\n",
     "  if (appended) qkv_arena_unreserve(ids->tokens->config.arena, ids->reserved);\n", "server/token_ids|e2e/prefixes"),
    ("blocks that were not needed stay reserved", "engine/cache/layer_append.c",
     "  qkv_arena_unreserve(layer->config.arena, work->reserved * qkv_arena_cost(qkvi_block_bytes(layer->config.model)));\n",
     "",
     "engine/cache/(layer|session|session_share)$"),
    # ---- Calibrations that are learnt ----
    ("a calibration that failed is due again at once", "engine/cache/learner_run.c",
     "  if (!made) next = tokens + learner->first;\n", "  if (!made) next = tokens;\n", "engine/cache/learner"),
    ("a learnt calibration is taken for a brought one", "engine/cache/learner_run.c",
     "  return source != QKV_CALIBRATION_NONE && source != QKV_CALIBRATION_LEARNT;\n",
     "  return source != QKV_CALIBRATION_NONE;\n", "engine/cache/learner"),
    # ---- Codes ----
    ("the contract's judge ignores the window", "engine/cache/layer_seal.c",
     "                  .begin = window != 0 && end > window ? end - window : 0,", "                  .begin = window != 0 && end > window ? 0 : 0,",
     "engine/cache/(layer|quality)"),
    ("an outlier row is decoded to the next token", "engine/codec/outliers.c",
     "    memcpy(rows + slot * outliers->dim, row, outliers->dim * sizeof *rows);",
     "    memcpy(rows + (slot ^ 1) * outliers->dim, row, outliers->dim * sizeof *rows);",
     "engine/codec/|engine/cache/outliers"),
    ("a page of another layer is put back", "engine/cache/layer_spill.c",
     "header->position == entry->position && header->layer == layer->config.layer &&\n",
     "header->position == entry->position && layer != NULL &&\n", "engine/cache/(layer_spill|session_spill)$"),
    ("a page that was cut short matches by all of its rows", "engine/cache/page_range.c",
     "    if (qkvi_range_span(range, middle).end > position) {", "    if (qkvi_range_span(range, middle).begin + 64 > position) {",
     "engine/cache/(layer|fork|session_share|session_fork)"),
    # ---- Kernels for GPUs ----
    ("gpu: scores are weighed before all lanes have them", "engine/kernel/simt/attend_shape.inc",
     "    simt_sync_warp();\n    SHAPE(_weigh)",
     "    SHAPE(_weigh)", "gpu/attend"),
    ("gpu: values are not waited for", "engine/kernel/simt/attend_shape.inc",
     "    half = SHAPE(_wait)(shared, slots, 2 * i + 1);\n",
     "    half = slots + (2 * i + 1) % QKV_SIMT_SLOTS * QKV_SIMT_SLOT_BYTES(SHAPE_DIM);\n", "gpu/attend"),
    ("gpu: a half page goes over one in use", "engine/kernel/simt/codes_plain.inc",
     "  const unsigned slot = half % QKV_SIMT_SLOTS, group",
     "  const unsigned slot = half % 2, group", "gpu/attend"),
    ("gpu: half a warp exchanges", "engine/kernel/simt/attend_shape.inc",
     "  largest = simt_larger(largest, simt_exchange_float(largest, 2));",
     "  if (QUAD < 4) largest = simt_larger(largest, simt_exchange_float(largest, 2));", "gpu/attend"),
    ("gpu: two numbers of an operand change places", "engine/kernel/simt/attend.c",
     "natural.words[i + 2], 0x7362);",
     "natural.words[i + 2], 0x6372);", "gpu/attend"),
    ("gpu: a nibble's second entry is chosen by another bit", "engine/kernel/simt/attend.c",
     "i == 0 ? 0 : 0x88888888",
     "i == 0 ? 0 : 0x88888880", "gpu/attend"),
    ("gpu: a power of two is off in its last bit", "engine/kernel/simt/attend.c",
     "0.693121791f",
     "0.693121851f", "gpu/attend"),
    ("gpu: sums of an outlier's score are added in another order", "engine/kernel/simt/attend.c",
     "(sums[0] + sums[1]) + (sums[2] + sums[3])",
     "(sums[0] + sums[2]) + (sums[1] + sums[3])", "gpu/attend"),
    ("gpu: a row sees one token too many", "engine/kernel/simt/attend_shape.inc",
     "token < begin || token >= end",
     "token < begin || token > end", "gpu/attend"),
    ("gpu: the merge leaves out a run", "engine/kernel/simt/attend.c",
     "for (uint32_t i = 1; i < merge->end - merge->first; i++)",
     "for (uint32_t i = 2; i < merge->end - merge->first; i++)", "gpu/attend"),
    ("gpu: a gate is not made", "engine/kernel/simt/attend_shape.inc",
     "if (LANE < SHAPE_SLOTS) simt_gate_init",
     "if (LANE + 1 < SHAPE_SLOTS) simt_gate_init", "gpu/attend"),
    ("gpu: low bytes of wide centroids are left out", "engine/kernel/simt/codes_calibrated.inc",
     "return sum_value(sum) + sum_value(low) * 0.0078125f;",
     "return sum_value(sum) + sum_value(low) * 0.0f;", "gpu/attend"),
    ("gpu: halves of a block have the bits of the first", "engine/kernel/simt/codes_calibrated.inc",
     "&block, block.kinds[0], block.kinds[1], words",
     "&block, block.kinds[0], block.kinds[0], words", "gpu/attend"),
    ("gpu: outlier values of calibrated pages have steps of 1", "engine/kernel/simt/attend_shape.inc",
     "if (SHAPE_CALIBRATED) value *= ",
     "if (SHAPE_CALIBRATED && SHAPE_DIM == 0) value *= ", "gpu/attend"),
    ("gpu: terms of the last pairs are left out", "engine/kernel/simt/turn.inc",
     "first < end; first += 8)",
     "first + 8 <= end; first += 8)", "gpu/attend"),
    ("gpu: plain pairs are turned", "engine/codec/walk.c",
     "    turns->sines[0][pair] = 0;",
     "    turns->sines[0][pair] = 0.01f;", "gpu/attend"),
    ("gpu: a page's turned queries are read before all lanes wrote them", "engine/kernel/simt/turn.inc",
     "  simt_sync_warp();\n  TURN(_transform)",
     "  TURN(_transform)", "gpu/attend"),
    ("gpu: soft caps are left out", "engine/kernel/simt/attend_shape.inc",
     "range->soft_cap != 0) SHAPE(_cap)",
     "range->soft_cap < 0) SHAPE(_cap)", "gpu/attend"),
    ("gpu: a soft cap's polynomial reaches further", "engine/kernel/simt/attend.c",
     "size < 0.5f ? small : large",
     "size < 0.6f ? small : large", "gpu/attend"),
    ("gpu: all groups have the anchor of the first", "engine/kernel/simt/turn.inc",
     "group = i % GROUPS",
     "group = 0 * i", "gpu/attend"),
    ("gpu: a narrow line of eight coordinates is taken for one of sixteen", "engine/kernel/simt/tile.h",
     "place.width = left >= 16 ? 1 : 0;",
     "place.width = 1;", "gpu/rows"),
    ("gpu: outputs are written before all threads have read their group", "engine/kernel/simt/tile.h",
     "    simt_sync_block();  // all have read the group\n",
     "", "gpu/rows"),
    ("gpu: a chain goes on beyond its segment", "engine/kernel/simt/decode.c",
     "starts || anchor->kind != ANCHOR_CHAIN ? value : before",
     "t == 0 || anchor->kind != ANCHOR_CHAIN ? value : before", "gpu/rows"),
    ("gpu: outlier keys turn like the other rows", "engine/kernel/simt/decode.c",
     "is_kept(kept, token) ?",
     "is_kept(kept, token + TILE_TOKENS) ?", "gpu/rows"),
    ("gpu: fours count by their first weight", "engine/kernel/simt/encode.c",
     "const float weight = e->fours != NULL ? e->fours[four] : 1;",
     "const float weight = e->fours != NULL ? e->weights[four * FOURS] : 1;", "gpu/rows"),
    ("gpu: a row's anchor is added on its way to the frame", "engine/kernel/simt/encode.c",
     "*first = a * c + b * s - (x * slot_c - y * slot_s);",
     "*first = a * c + b * s + (x * slot_c - y * slot_s);", "gpu/rows"),
    ("gpu: scales are added to decoded rows in place of the mean", "engine/kernel/simt/decode.c",
     "(matrix + 2 * dim * dim) + dim;",
     "(matrix + 2 * dim * dim);", "gpu/rows"),
    ("gpu: a scale is judged before all lanes have their sums", "engine/kernel/simt/encode.c",
     "i / TILE_TOKENS, i % TILE_TOKENS);\n    simt_sync_block();",
     "i / TILE_TOKENS, i % TILE_TOKENS);", "gpu/rows"),
    ("gpu: codes are those of the first scale", "engine/kernel/simt/encode.c",
     "e->states->best[token], *number",
     "e->states->best[token] / 4, *number", "gpu/rows"),
    ("gpu: a line of 16 bytes behind one of 32 is taken for its end", "engine/kernel/simt/encode.c",
     "bytes >= 32 && left < 32 ? 1 : 0",
     "bytes >= 32 ? 1 : 0", "gpu/rows"),
]


def run(command, cwd, seconds):
    """(exit status, output); a run that takes too long has status None."""
    try:
        done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
        return done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")


def configure(tree):
    status, output = run(["cmake", "--preset", "release"], tree, 600)
    return None if status == 0 else output


def programs(tree, tests):
    """What a list of tests needs, as targets of the build."""
    _, output = run(["ctest", "--preset", "release", "-N", "-R", tests], tree, 600)
    names = re.findall(r"Test +#\d+: (\S+)", output)
    targets = {"test_" + name.replace("/", "_") for name in names if not name.startswith("e2e/")}
    if any(name.startswith("e2e/") for name in names):
        targets |= {"qkvd", "qkvctl", "qkv-worker", "failing_disk", "e2e_stubs"}
    return sorted(targets)


def build(tree, tests):
    status, output = run(["cmake", "--build", "--preset", "release", "-j2", "--target", *programs(tree, tests), "--",
                          "--quiet"], tree, 3600)
    return None if status == 0 else output


def failed_test(tree, tests, seconds):
    """The first test that fails; None where all pass."""
    status, output = run(["ctest", "--preset", "release", "-R", tests, "-j2", "--stop-on-failure", "--timeout", str(seconds)],
                         tree, 3600)
    if status == 0:
        return None
    failed = [line.split(" - ")[1] for line in output.splitlines() if " - " in line and ("Failed" in line or "Timeout" in line
              or "Exception" in line or "SEGFAULT" in line or "aborted" in line)]
    return failed[0] if failed else "the run"


def mismatch(tree, mutant):
    """What is wrong with the mutant, or None."""
    _, name, old, *_ = mutant
    if not (tree / name).is_file():
        return f"there is no {name}"
    count = (tree / name).read_text().count(old)
    return None if count == 1 else f"its text stands {count} times in {name}"


def plant(tree, mutant):
    """What is wrong with the mutant, or None."""
    _, name, old, new, _ = mutant
    if (wrong := mismatch(tree, mutant)) is not None:
        return wrong
    (tree / name).write_text((tree / name).read_text().replace(old, new))
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="mutants whose name has this")
    parser.add_argument("--list", action="store_true", help="names and files, and whether the texts are there; nothing is built")
    parser.add_argument("--timeout", type=int, default=300, metavar="SECONDS", help="of a test, which then has failed")
    values = parser.parse_args()
    mutants = [mutant for mutant in MUTANTS if re.search(values.only, mutant[0])]
    if values.list:
        wrong = {mutant[0]: mismatch(ROOT, mutant) for mutant in mutants}
        for name, path, *_ in mutants:
            print(f"{path}: {name}" + (f": {wrong[name]}" if wrong[name] else ""))
        return 1 if any(wrong.values()) else 0
    caught = missed = errors = 0
    with tempfile.TemporaryDirectory(prefix="qkv-mutants-") as directory:
        tree = pathlib.Path(directory) / "tree"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
        if (wrong := configure(tree)) is not None:
            print(wrong, file=sys.stderr)
            return 2
        for mutant in mutants:
            begin = time.monotonic()
            kept = (tree / mutant[1]).read_text()
            wrong = plant(tree, mutant) or build(tree, mutant[4])
            if wrong is not None:
                errors += 1
                print(f"ERROR   {mutant[0]}: {wrong[-2000:]}", flush=True)
            else:
                failed = failed_test(tree, mutant[4], values.timeout)
                caught, missed = caught + (failed is not None), missed + (failed is None)
                took = time.monotonic() - begin
                print(f"{'caught' if failed else 'MISSED'}  {mutant[0]} ({failed or mutant[4]}, {took:.0f} s)", flush=True)
            (tree / mutant[1]).write_text(kept)
    print(f"{caught} of {caught + missed} caught, {errors} errors")
    return 0 if errors == 0 and missed == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
