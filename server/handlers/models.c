// RegisterModel, GetModel, ListModels.
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/log.h"
#include "qkv/v1/admin.pb-c.h"
#include "server/auth/identity.h"
#include "server/daemon.h"
#include "server/handlers/contract.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/reserve.h"
#include "server/residency/residency.h"

// ---- RegisterModel ----

// The message's calibration, else that of --calibration; NULL for neither. It is checked first, so that a model is
// not registered without the calibration that it is to have.
static qkv_status read_calibration(const qkv_daemon *daemon, const Qkv__V1__Model *message, const qkv_model *model,
                                   const qkv_calibration **calibration, qkv_error *error) {
  qkv_model resolved = *model;
  QKV_TRY(qkv_model_resolve(&resolved, error));
  if (message->calibration.len > 0) {
    qkv_calibration *read = NULL;
    QKV_TRY(qkv_calibration_read(message->calibration.data, message->calibration.len, &read, error));
    *calibration = read;
  } else {
    const bool by_default = strcmp(resolved.tenant, QKV_TENANT_DEFAULT) == 0;
    *calibration = by_default ? qkvi_calibrations_get(daemon->calibrations, resolved.name) : NULL;
  }
  if (*calibration == NULL) return QKV_OK;
  const qkv_calibration_shape shape = qkv_model_calibration_shape(&resolved);
  QKV_TRY(qkv_calibration_check(*calibration, &shape, error));
  return qkvi_catalogue_check_calibration(daemon->residency, *calibration, error);
}

// Whether one is in force, or waits for its trial.
static bool has_calibration(const qkv_model *model) {
  qkv_calibration_state state = {.version = qkv_calibration_slot_version(model->calibration)};
  if (model->learner != NULL) qkv_learner_read_state(model->learner, &state);
  return state.version != 0 || state.on_trial != 0;
}

// The calibration in force, or on trial.
static bool is_known(const qkv_model *model, const qkv_calibration *calibration) {
  const uint32_t version = qkv_calibration_version(calibration);
  return qkv_calibration_slot_version(model->calibration) == version ||
         (model->learner != NULL && qkv_learner_brought(model->learner) == version);
}

// All tenants that use a shared model code with the same calibration: a client of one of them cannot replace it for
// others.
static qkv_status check_replacing(const qkv_rpc_call *call, const Qkv__V1__Model *message, const qkv_model *model,
                                  const qkv_calibration *calibration, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_model *known = NULL;
  if (!qkvi_call_is_bound(call) || message->calibration.len == 0 || message->calibration_kept) return QKV_OK;
  if (qkv_store_model(daemon->store, model->tenant, model->name, &known, NULL) != QKV_OK ||
      is_known(known, calibration) || !qkv_store_is_shared(daemon->store, known))
    return QKV_OK;
  return qkv_fail(error, QKV_PERMISSION_DENIED,
                  "the model %s is shared: its calibration is replaced with the role write for all tenants (*), and "
                  "the call has it for %s alone",
                  model->name, model->tenant);
}

static qkv_status check_sharing(const qkv_rpc_call *call, const Qkv__V1__Model *message, const qkv_model *model,
                                qkv_error *error) {
  if (!message->shared) return QKV_OK;
  if (qkvi_call_is_bound(call))
    return qkv_fail(
        error, QKV_PERMISSION_DENIED,
        "model.shared is set: a model is shared with the role write for all tenants (*), and the call has "
        "it for %s alone",
        model->tenant);
  if (strcmp(model->tenant, QKV_TENANT_DEFAULT) == 0) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT,
                  "model.shared is set, and the call's tenant is %s: only models of the tenant " QKV_TENANT_DEFAULT
                  " are shared",
                  model->tenant);
}

static void stop_counting(void *owner, uint64_t bytes) {
  qkv_account *account = owner;
  qkv_arena_unreserve_elsewhere(qkv_account_arena(account), bytes);
  qkv_account_unref(&account);
}

// Whether the daemon has it already, so that this one will not stay.
static bool will_go(const qkv_daemon *daemon, const Qkv__V1__Model *message, const qkv_model *model,
                    const qkv_calibration *calibration) {
  const qkv_model *known = NULL;
  if (qkv_store_model(daemon->store, model->tenant, model->name, &known, NULL) != QKV_OK) return false;
  return message->calibration_kept ? qkvi_kept_renew(daemon->kept, model->tenant, known, calibration)
                                   : is_known(known, calibration);
}

// A calibration that a client brings counts as its tenant's memory as long as anything has it.
static qkv_status count_calibration(const qkv_rpc_call *call, const Qkv__V1__Model *message, const qkv_model *model,
                                    qkv_calibration *calibration, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (message->calibration.len == 0 || will_go(daemon, message, model, calibration)) return QKV_OK;
  const uint64_t bytes = qkv_calibration_memory(calibration);
  qkv_account *account = qkv_accounts_join(qkv_store_accounts(daemon->store), model->tenant);
  const qkv_status status = qkvi_reserve(call, account, bytes, error);
  if (status == QKV_OK) {
    qkv_arena_move_elsewhere(qkv_account_arena(account), bytes);
    qkv_calibration_count_for(calibration, stop_counting, account, bytes);
  } else {
    qkv_account_unref(&account);
    (void)qkv_error_prefix(error, "model.calibration: ");
  }
  return status;
}

// `tenant` is the call's.
static qkv_status apply_calibration(qkv_daemon *daemon, const Qkv__V1__Model *message, const char *tenant,
                                    const qkv_model *model, const qkv_calibration *calibration, qkv_error *error) {
  if (calibration == NULL) return QKV_OK;
  if (message->calibration_kept) return qkvi_kept_put(daemon->kept, tenant, model, calibration, error);
  // The daemon's own file does not replace a later calibration.
  const bool given = message->calibration.len > 0;
  const bool trusted = given ? message->calibration_trusted != 0 : daemon->options->trust_calibration;
  const qkv_calibration_source source = given ? QKV_CALIBRATION_REGISTERED : QKV_CALIBRATION_FILE;
  if (!given && has_calibration(model)) return QKV_OK;
  return qkv_model_calibrate(model, calibration, source, trusted, error);
}

static qkv_status register_within_quota(const qkv_rpc_call *call, const qkv_model *model,
                                        const qkv_model **registered, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_quota quota;
  bool by_default;
  qkvi_quotas_get(daemon->quotas, model->tenant, &quota, &by_default);
  const qkv_status status =
      qkv_store_register_model_within(daemon->store, model, (uint64_t)quota.models, registered, error);
  if (status == QKV_RESOURCE_EXHAUSTED) qkv_rpc_count_refusal(call);
  return status;
}

static qkv_status register_read(const qkv_rpc_call *call, const Qkv__V1__Model *message, const qkv_model *model,
                                const qkv_model **registered, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_calibration *calibration = NULL;
  qkv_status status = read_calibration(daemon, message, model, &calibration, error);
  if (status == QKV_OK) status = check_sharing(call, message, model, error);
  if (status == QKV_OK) status = check_replacing(call, message, model, calibration, error);
  if (status == QKV_OK) status = count_calibration(call, message, model, (qkv_calibration *)calibration, error);
  if (status == QKV_OK) status = register_within_quota(call, model, registered, error);
  if (status == QKV_OK) status = apply_calibration(daemon, message, model->tenant, *registered, calibration, error);
  if (status == QKV_OK && message->shared)
    status = qkvi_catalogue_share_model(daemon->residency, daemon->store, *registered, error);
  qkv_calibration_unref(&calibration);
  return status;
}

// The tenant that the registration counts for is the call's, so a field alone cannot name another one.
static qkv_status read_model(const qkv_rpc_call *call, const Qkv__V1__Model *message, qkv_model *model,
                             qkv_error *error) {
  const char *tenant = NULL;
  QKV_TRY(qkvi_model_read(message, model, error));
  QKV_TRY(qkvi_request_tenant(call, message->tenant, &tenant, error));
  if (strcmp(tenant, qkvi_call_tenant(call)) != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "tenant is %s, the call's tenant is %s", tenant,
                    qkvi_call_tenant(call));
  (void)snprintf(model->tenant, sizeof model->tenant, "%s", tenant);
  return QKV_OK;
}

static qkv_status register_model(qkv_rpc_call *call, const Qkv__V1__RegisterModelRequest *request,
                                 const qkv_model **registered, qkv_error *error) {
  qkv_model model = {0};
  if (request->model == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "model is missing");
  qkv_status status = read_model(call, request->model, &model, error);
  if (status != QKV_OK) {
    status = qkv_error_prefix(error, "model.");
  } else {
    status = register_read(call, request->model, &model, registered, error);
  }
  qkvi_model_clear(&model);
  return status;
}

// Reading a calibration of 100 MB takes a good part of a second, so this is a job of the compute pool.
static void register_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  const qkv_model *registered = NULL;
  if (!qkvi_job_wanted(call)) return;
  if (register_model(call, qkv_rpc_state(call), &registered, &error) != QKV_OK)
    return qkvi_control_fail(call, &error);
  qkvi_model_message parts;
  Qkv__V1__RegisterModelResponse response = QKV__V1__REGISTER_MODEL_RESPONSE__INIT;
  qkvi_model_write(registered, &parts);
  qkvi_calibration_message state;
  qkvi_calibration_write(registered, &state);
  response.model = &parts.model;
  response.calibration = &state.state;
  response.tenant = (char *)registered->tenant;
  response.shared = qkv_store_is_shared(((qkv_daemon *)qkv_rpc_context(call))->store, registered);
  qkvi_control_reply(call, &response.base);
  qkvi_model_message_clear(&parts);
}

static void on_register_model(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  const qkvi_waits most = qkvi_session_waits(call) | QKVI_WAIT_MEMORY;
  if (message.length > QKVI_SOON_BYTES_MAX)
    return qkvi_request_later(call, message, &qkv__v1__register_model_request__descriptor, qkvi_control_unpack_large,
                              qkvi_work_of(most, false), register_job);
  Qkv__V1__RegisterModelRequest *request =
      qkvi_control_unpack_large(message, &qkv__v1__register_model_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_rpc_set_state(call, request);
  const bool waits = request->model != NULL && (request->model->shared || request->model->calibration.len > 0);
  qkvi_job_submit(call, waits ? most : QKVI_WAIT_LAYERS, register_job, call);
}

// ---- GetModel and ListModels ----

typedef struct listing {
  struct entry {
    const qkv_model *model;
    size_t sessions;
  } * entries;
  size_t count, capacity;
} listing;

static bool collect(void *context, const qkv_model *model, size_t sessions) {
  listing *list = context;
  if (list->count == list->capacity) {
    list->capacity = list->capacity * 2 + 16;
    list->entries = realloc(list->entries, list->capacity * sizeof *list->entries);
    if (list->entries == NULL) abort();
  }
  list->entries[list->count++] = (struct entry){model, sessions};
  return true;
}

// An entry as a message, with its parts.
typedef struct entry_message {
  Qkv__V1__GetModelResponse response;
  qkvi_model_message parts;
  qkvi_calibration_message calibration;
} entry_message;

static void write_entry(qkv_store *store, const struct entry *entry, entry_message *message) {
  qkv__v1__get_model_response__init(&message->response);
  qkvi_model_write(entry->model, &message->parts);
  message->response.model = &message->parts.model;
  message->response.sessions = entry->sessions;
  qkvi_calibration_write(entry->model, &message->calibration);
  message->response.calibration = &message->calibration.state;
  message->response.tenant = (char *)entry->model->tenant;
  message->response.shared = qkv_store_is_shared(store, entry->model);
}

// The tenant that models are listed for, and whose sessions are counted: that which the call names. NULL: all.
static const char *listed_tenant(const qkv_rpc_call *call) {
  const char *tenant = NULL;
  const qkv_status status = qkvi_asked_tenant(call, "", &tenant, NULL);
  assert(status == QKV_OK);  // without a field nothing can differ
  (void)status;
  return tenant[0] == '\0' ? NULL : tenant;
}

static qkv_status get_model(const qkv_rpc_call *call, const char *name, struct entry *found, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  QKV_TRY(qkv_name_check(name, "name", error));
  QKV_TRY(qkv_store_model(daemon->store, qkvi_call_tenant(call), name, &found->model, error));
  found->sessions = qkv_store_model_sessions(daemon->store, listed_tenant(call), found->model);
  return QKV_OK;
}

static void on_get_model(qkv_rpc_call *call, qkv_bytes message) {
  qkv_error error = {0};
  struct entry found = {0};
  Qkv__V1__GetModelRequest *request =
      qkvi_control_unpack_here(message, &qkv__v1__get_model_request__descriptor, &error);
  if (request == NULL) return qkvi_control_fail(call, &error);
  qkv_status status = get_model(call, request->name, &found, &error);
  qkvi_control_free(request);
  if (status != QKV_OK) return qkvi_control_fail(call, &error);

  entry_message answer;
  write_entry(((qkv_daemon *)qkv_rpc_context(call))->store, &found, &answer);
  qkvi_control_reply_counted(call, &answer.response.base);
  qkvi_model_message_clear(&answer.parts);
}

// Models have up to 1024 overrides each.
static void list_job(void *context) {
  qkv_rpc_call *call = context;
  const qkv_daemon *daemon = qkv_rpc_context(call);
  if (!qkvi_job_wanted(call)) return;
  listing list = {0};
  qkv_store_each_model(daemon->store, listed_tenant(call), collect, &list);
  entry_message *parts = calloc(list.count + 1, sizeof *parts);
  Qkv__V1__GetModelResponse **rows = calloc(list.count + 1, sizeof *rows);
  if (parts == NULL || rows == NULL) abort();
  for (size_t i = 0; i < list.count; i++) {
    write_entry(daemon->store, &list.entries[i], &parts[i]);
    rows[i] = &parts[i].response;
  }
  Qkv__V1__ListModelsResponse response = QKV__V1__LIST_MODELS_RESPONSE__INIT;
  response.n_models = list.count;
  response.models = rows;
  qkvi_control_reply_counted(call, &response.base);
  for (size_t i = 0; i < list.count; i++) qkvi_model_message_clear(&parts[i].parts);
  free(rows);
  free(parts);
  free(list.entries);
}

static void on_list_models(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__list_models_request__descriptor, QKVI_WAIT_LAYERS, list_job);
}

// ---- UnshareModel ----

static qkv_status unshare_model(const qkv_rpc_call *call, const char *name, qkv_error *error) {
  const qkv_daemon *daemon = qkv_rpc_context(call);
  const qkv_model *model = NULL;
  QKV_TRY(qkv_name_check(name, "name", error));
  QKV_TRY(qkv_store_own_model(daemon->store, QKV_TENANT_DEFAULT, name, &model, error));
  QKV_TRY(qkvi_catalogue_unshare_model(daemon->residency, daemon->store, model, error));
  qkv_log(QKV_LOG_INFO, "a model is not shared", "{s:s}", "model", name);
  return QKV_OK;
}

static void unshare_job(void *context) {
  qkv_rpc_call *call = context;
  const Qkv__V1__UnshareModelRequest *request = qkv_rpc_state(call);
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (unshare_model(call, request->name, &error) != QKV_OK) return qkvi_control_fail(call, &error);
  const Qkv__V1__UnshareModelResponse response = QKV__V1__UNSHARE_MODEL_RESPONSE__INIT;
  qkvi_control_reply(call, &response.base);
}

static void on_unshare_model(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__unshare_model_request__descriptor, qkvi_session_waits(call), unshare_job);
}

const qkv_rpc_method qkvi_models_methods[] = {
    {.path = "/qkv.v1.KvCache/RegisterModel", .message = on_register_model, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.KvCache/GetModel", .message = on_get_model},
    {.path = "/qkv.v1.KvCache/ListModels", .message = on_list_models, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Admin/UnshareModel", .message = on_unshare_model, .destroy = qkvi_control_free},
    {0}};
