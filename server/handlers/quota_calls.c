// Admin.SetQuota and Admin.GetQuota (docs/tenants.md).
#include <inttypes.h>
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "qkv/v1/admin.pb-c.h"
#include "server/auth/identity.h"
#include "server/handlers/control.h"
#include "server/handlers/handlers.h"
#include "server/handlers/jobs.h"
#include "server/tenants/usage.h"

enum { PAGE_SIZE_MAX = 1000 };

// ---- SetQuota ----

static qkv_status read_quota(const Qkv__V1__Quota *message, qkv_quota *quota, qkv_error *error) {
  *quota = (qkv_quota){0};
  if (message == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "quota is missing");
  if (strcmp(message->tenant, QKV_QUOTA_DEFAULT) != 0) QKV_TRY(qkv_name_check(message->tenant, "tenant", error));
  (void)snprintf(quota->tenant, sizeof quota->tenant, "%s", message->tenant);
#define X(id, kind, most) quota->id = (int64_t)message->id;
  QKV_QUOTA_MAP(X)
#undef X
  return QKV_OK;
}

static qkv_status set_quota(qkv_rpc_call *call, const Qkv__V1__SetQuotaRequest *request, qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  qkv_quota quota;
  char line[QKV_QUOTA_LINE_MAX];
  QKV_TRY(read_quota(request->quota, &quota, error));
  QKV_TRY(qkvi_quotas_set(daemon->quotas, &quota, error));
  qkv_daemon_apply_quotas(daemon);
  qkv_quota_write(&quota, line, sizeof line);
  qkv_log(QKV_LOG_INFO, "a quota was set", "{s:s}", "quota", line);
  return QKV_OK;
}

static void set_job(void *context) {
  qkv_rpc_call *call = context;
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (set_quota(call, qkv_rpc_state(call), &error) != QKV_OK) return qkvi_control_fail(call, &error);
  const Qkv__V1__SetQuotaResponse response = QKV__V1__SET_QUOTA_RESPONSE__INIT;
  qkvi_control_reply(call, &response.base);
}

static void on_set_quota(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__set_quota_request__descriptor, QKVI_WAIT_DISK, set_job);
}

// ---- GetQuota ----

typedef struct tenant_message {
  Qkv__V1__TenantQuota message;
  Qkv__V1__Quota quota;
  Qkv__V1__QuotaUsage usage;
} tenant_message;

static void write_tenant(qkvi_tenant_usage *from, tenant_message *to) {
  qkv__v1__tenant_quota__init(&to->message);
  qkv__v1__quota__init(&to->quota);
  qkv__v1__quota_usage__init(&to->usage);
  to->quota.tenant = from->quota.tenant;
#define X(id, kind, most) to->quota.id = (__typeof__(to->quota.id))from->quota.id;
  QKV_QUOTA_MAP(X)
#undef X
  to->usage.host_bytes = from->host_bytes;
  to->usage.ssd_bytes = from->ssd_bytes;
  to->usage.gpu_bytes = from->gpu_bytes;
  to->usage.sessions = from->sessions;
  to->usage.models = from->models;
  to->usage.calls = from->calls.calls;
  to->usage.bytes = from->calls.bytes;
  to->usage.rows = from->calls.rows;
  to->usage.refused = from->calls.refused;
  to->message.quota = &to->quota;
  to->message.usage = &to->usage;
  to->message.by_default = from->by_default;
}

// What is answered: one tenant, or a page of all.
typedef struct quota_page {
  qkvi_tenant_usage *tenants;
  size_t count;
  bool more;  // behind it
} quota_page;

static void reply(qkv_rpc_call *call, quota_page *page) {
  tenant_message *parts = calloc(page->count + 1, sizeof *parts);
  Qkv__V1__TenantQuota **rows = calloc(page->count + 1, sizeof *rows);
  Qkv__V1__GetQuotaResponse response = QKV__V1__GET_QUOTA_RESPONSE__INIT;
  if (parts == NULL || rows == NULL) abort();
  for (size_t i = 0; i < page->count; i++) {
    write_tenant(&page->tenants[i], &parts[i]);
    rows[i] = &parts[i].message;
  }
  response.n_tenants = page->count;
  response.tenants = rows;
  if (page->more) response.next_page_token = page->tenants[page->count - 1].quota.tenant;
  qkvi_control_reply(call, &response.base);
  free(rows);
  free(parts);
}

static qkv_status list_quotas(qkv_daemon *daemon, const Qkv__V1__GetQuotaRequest *request, quota_page *page,
                              qkv_error *error) {
  if (request->page_token[0] != '\0') QKV_TRY(qkv_name_check(request->page_token, "page_token", error));
  const size_t size = request->page_size == 0 ? SIZE_MAX - 1 : request->page_size;
  page->count = qkvi_tenant_usage_list(daemon, request->page_token, size + 1, &page->tenants);
  page->more = page->count > size;
  if (page->more) page->count = size;
  return QKV_OK;
}

static qkv_status get_quota(const qkv_rpc_call *call, const Qkv__V1__GetQuotaRequest *request, quota_page *page,
                            qkv_error *error) {
  qkv_daemon *daemon = qkv_rpc_context(call);
  const char *tenant = NULL;
  const bool all = strcmp(request->tenant, QKV_QUOTA_DEFAULT) == 0;
  if (request->page_size > PAGE_SIZE_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "page_size is %" PRIu32 ", at most %d", request->page_size,
                    PAGE_SIZE_MAX);
  if (all && qkvi_call_is_bound(call)) return qkv_fail(error, QKV_NOT_FOUND, "no tenant *");
  if (!all) QKV_TRY(qkvi_asked_tenant(call, request->tenant, &tenant, error));
  if (tenant == NULL) tenant = QKV_QUOTA_DEFAULT;
  if (tenant[0] == '\0') return list_quotas(daemon, request, page, error);
  page->tenants = calloc(1, sizeof *page->tenants);
  if (page->tenants == NULL) abort();
  page->count = 1;
  qkvi_tenant_usage_read(daemon, tenant, page->tenants);
  return QKV_OK;
}

static void get_job(void *context) {
  qkv_rpc_call *call = context;
  quota_page page = {.tenants = NULL};
  qkv_error error = {0};
  if (!qkvi_job_wanted(call)) return;
  if (get_quota(call, qkv_rpc_state(call), &page, &error) != QKV_OK) {
    qkvi_control_fail(call, &error);
  } else {
    reply(call, &page);
  }
  free(page.tenants);
}

static void on_get_quota(qkv_rpc_call *call, qkv_bytes message) {
  qkvi_request_job(call, message, &qkv__v1__get_quota_request__descriptor, QKVI_WAIT_LAYERS, get_job);
}

const qkv_rpc_method qkvi_quota_methods[] = {
    {.path = "/qkv.v1.Admin/SetQuota", .message = on_set_quota, .destroy = qkvi_control_free},
    {.path = "/qkv.v1.Admin/GetQuota", .message = on_get_quota, .destroy = qkvi_control_free},
    {0}};
