// Append of an item's pages (Item.pages): copied out of the message, checked, given to the session.
//
// The copy is validated, and the session copies from it, so a later write into the message cannot change a page that
// was checked.
#ifndef QKV_SERVER_HANDLERS_APPEND_CODED_H
#define QKV_SERVER_HANDLERS_APPEND_CODED_H

#include "server/daemon.h"
#include "server/handlers/items.h"
#include "server/handlers/jobs.h"

// As qkvi_append_item, of an item that has pages. Errors are qkv_session_append_pages's, INVALID_ARGUMENT for a
// malformed one, FAILED_PRECONDITION "pages[0].image has calibration 7, which the daemon does not have".
qkv_status qkvi_append_pages(const qkv_rpc_call *call, qkv_session *session, const qkvi_item *item, qkvi_waits *waits,
                             uint64_t *appended, uint64_t *length, qkv_error *error);

#endif
