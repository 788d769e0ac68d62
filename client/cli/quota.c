// qkvctl quota: what tenants of a daemon take, and may take.
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/cli/cli.h"
#include "client/common/terminal.h"
#include "proto/quota.h"
#include "qkv/v1/admin.pb-c.h"

enum { PAGE_SIZE = 1000 };  // the most that a daemon takes

// `token`: of the page, of all tenants; "" is the first one.
static int get(qkv_client *client, const char *tenant, const char *token, Qkv__V1__GetQuotaResponse **answer) {
  Qkv__V1__GetQuotaRequest request = QKV__V1__GET_QUOTA_REQUEST__INIT;
  ProtobufCMessage *got = NULL;
  qkv_call_error error = {0};
  request.tenant = (char *)tenant;
  request.page_size = PAGE_SIZE;
  request.page_token = (char *)token;
  if (qkv_client_call_message(client, "/qkv.v1.Admin/GetQuota", &request.base,
                              &qkv__v1__get_quota_response__descriptor, &got, &error) != 0)
    return qkv_program_failed("%s", error.text);
  Qkv__V1__GetQuotaResponse *response = (Qkv__V1__GetQuotaResponse *)got;
  size_t whole = 0;
  while (whole < response->n_tenants && response->tenants[whole]->quota != NULL &&
         response->tenants[whole]->usage != NULL)
    whole++;
  if (whole < response->n_tenants) {
    protobuf_c_message_free_unpacked(got, NULL);
    return qkv_program_failed("the daemon's answer has a tenant without a quota or a usage");
  }
  *answer = response;
  return QKV_EXIT_OK;
}

// ---- show ----

static json_t *usage_json(const Qkv__V1__QuotaUsage *usage) {
  return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "host_bytes", (json_int_t)usage->host_bytes,
                   "ssd_bytes", (json_int_t)usage->ssd_bytes, "gpu_bytes", (json_int_t)usage->gpu_bytes, "sessions",
                   (json_int_t)usage->sessions, "models", (json_int_t)usage->models, "calls",
                   (json_int_t)usage->calls, "bytes", (json_int_t)usage->bytes, "rows", (json_int_t)usage->rows,
                   "refused", (json_int_t)usage->refused);
}

static json_t *quota_json(const Qkv__V1__Quota *quota) {
  json_t *object = json_object();
#define X(id, kind, most) json_object_set_new(object, #id, json_integer((json_int_t)quota->id));
  QKV_QUOTA_MAP(X)
#undef X
  return object;
}

static int print_json(const Qkv__V1__GetQuotaResponse *answer) {
  bool good = true;
  for (size_t i = 0; i < answer->n_tenants; i++) {
    const Qkv__V1__TenantQuota *tenant = answer->tenants[i];
    good &= qkv_json_line(json_pack("{s:s, s:b, s:o, s:o}", "tenant", tenant->quota->tenant, "by_default",
                                    (int)tenant->by_default, "quota", quota_json(tenant->quota), "usage",
                                    usage_json(tenant->usage)));
  }
  return good ? QKV_EXIT_OK : QKV_EXIT_FAILED;
}

// "1.5 GiB of 4.0 GiB".
static void put_bytes(qkv_table *table, uint64_t used, uint64_t most) {
  char one[QKV_HUMAN_MAX], other[QKV_HUMAN_MAX];
  qkv_table_cell(table, "%s of %s", qkv_human_bytes(used, one), most == 0 ? "any" : qkv_human_bytes(most, other));
}

static void put_count(qkv_table *table, uint64_t used, uint64_t most) {
  if (most == 0) {
    qkv_table_cell(table, "%" PRIu64 " of any", used);
  } else {
    qkv_table_cell(table, "%" PRIu64 " of %" PRIu64, used, most);
  }
}

static qkv_table *quota_table(void) {
  static const char *const heads[] = {"TENANT", "MEMORY", "SSD", "SESSIONS", "CALLS", "WEIGHT", "REFUSED"};
  qkv_table *table = qkv_table_create(sizeof heads / sizeof *heads);
  for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) qkv_table_cell(table, "%s", heads[i]);
  return table;
}

static void add_rows(qkv_table *table, const Qkv__V1__GetQuotaResponse *answer) {
  for (size_t i = 0; i < answer->n_tenants; i++) {
    const Qkv__V1__Quota *quota = answer->tenants[i]->quota;
    const Qkv__V1__QuotaUsage *usage = answer->tenants[i]->usage;
    qkv_table_cell(table, "%s%s", quota->tenant, answer->tenants[i]->by_default ? " (*)" : "");
    put_bytes(table, usage->host_bytes, quota->host_bytes);
    put_bytes(table, usage->ssd_bytes, quota->ssd_bytes);
    put_count(table, usage->sessions, quota->sessions);
    put_count(table, usage->calls, quota->calls);
    qkv_table_cell(table, "%" PRIu32, quota->weight == 0 ? (uint32_t)QKV_WEIGHT_DEFAULT : quota->weight);
    qkv_table_cell(table, "%" PRIu64, usage->refused);
  }
}

// All pages; into `table`, or as JSON lines where it is NULL.
static int show_pages(qkv_client *client, const char *tenant, qkv_table *table) {
  char token[QKVCTL_PAGE_TOKEN_BYTES] = "";
  int status;
  do {
    Qkv__V1__GetQuotaResponse *answer = NULL;
    status = get(client, tenant, token, &answer);
    if (status != QKV_EXIT_OK) return status;
    assert(answer != NULL);
    if (table != NULL) add_rows(table, answer);
    if (table == NULL) status = print_json(answer);
    if (status == QKV_EXIT_OK) status = qkvctl_next_page(answer->next_page_token, token);
    protobuf_c_message_free_unpacked(&answer->base, NULL);
  } while (status == QKV_EXIT_OK && token[0] != '\0');
  return status;
}

static int show(const qkvctl_values *values, qkv_client *client, const char *tenant) {
  qkv_table *table = values->program.json ? NULL : quota_table();
  const int status = show_pages(client, tenant, table);
  if (table != NULL && status == QKV_EXIT_OK) qkv_table_print(table, stdout);
  qkv_table_destroy(&table);
  return status;
}

// ---- set, rm ----

static int send_quota(qkv_client *client, const qkv_quota *quota) {
  Qkv__V1__Quota message = QKV__V1__QUOTA__INIT;
  Qkv__V1__SetQuotaRequest request = QKV__V1__SET_QUOTA_REQUEST__INIT;
  ProtobufCMessage *answer = NULL;
  qkv_call_error error = {0};
  message.tenant = (char *)quota->tenant;
#define X(id, kind, most) message.id = (__typeof__(message.id))quota->id;
  QKV_QUOTA_MAP(X)
#undef X
  request.quota = &message;
  if (qkv_client_call_message(client, "/qkv.v1.Admin/SetQuota", &request.base,
                              &qkv__v1__set_quota_response__descriptor, &answer, &error) != 0)
    return qkv_program_failed("%s", error.text);
  protobuf_c_message_free_unpacked(answer, NULL);
  return QKV_EXIT_OK;
}

// What the tenant has of its own.
static int read_own(qkv_client *client, const char *tenant, qkv_quota *quota) {
  Qkv__V1__GetQuotaResponse *answer = NULL;
  const int status = get(client, tenant, "", &answer);
  if (status != QKV_EXIT_OK) return status;
  assert(answer != NULL);
  const bool own = answer->n_tenants == 1 && !answer->tenants[0]->by_default;
  const Qkv__V1__Quota *from = own ? answer->tenants[0]->quota : NULL;
#define X(id, kind, most) quota->id = from == NULL ? 0 : (int64_t)from->id;
  QKV_QUOTA_MAP(X)
#undef X
  protobuf_c_message_free_unpacked(&answer->base, NULL);
  return QKV_EXIT_OK;
}

static int set(const qkvctl_values *values, qkv_client *client, const qkv_option_list *arguments) {
  qkv_quota quota = {0};
  qkv_error error = {0};
  const char *tenant = arguments->items[1];
  if (strlen(tenant) > QKV_NAME_MAX) return qkv_program_misused("tenant is longer than %d characters", QKV_NAME_MAX);
  (void)snprintf(quota.tenant, sizeof quota.tenant, "%s", tenant);
  int status = read_own(client, tenant, &quota);
  for (size_t i = 2; i < arguments->count && status == QKV_EXIT_OK; i++) {
    unsigned which;
    if (qkv_quota_change(&quota, arguments->items[i], &which, &error) != QKV_OK)
      status = qkv_program_misused("%s", error.text);
  }
  if (status == QKV_EXIT_OK) status = send_quota(client, &quota);
  return status == QKV_EXIT_OK ? show(values, client, tenant) : status;
}

static int take_away(qkv_client *client, const char *tenant) {
  qkv_quota quota = {0};
  if (strlen(tenant) > QKV_NAME_MAX) return qkv_program_misused("tenant is longer than %d characters", QKV_NAME_MAX);
  (void)snprintf(quota.tenant, sizeof quota.tenant, "%s", tenant);
  return send_quota(client, &quota);
}

int qkvctl_quota(void *values_in, const qkv_option_list *arguments) {
  const qkvctl_values *values = values_in;
  const char *what = arguments->count > 0 ? arguments->items[0] : "show";
  const bool shows = strcmp(what, "show") == 0 && arguments->count <= 2;
  const bool sets = strcmp(what, "set") == 0 && arguments->count >= 3;
  const bool removes = strcmp(what, "rm") == 0 && arguments->count == 2;
  if (!shows && !sets && !removes)
    return qkv_program_misused("quota is followed by show [TENANT], set TENANT FIELD=VALUE... or rm TENANT");
  qkv_client *client = qkvctl_connect(values);
  if (client == NULL) return QKV_EXIT_FAILED;
  const int status = shows  ? show(values, client, arguments->count == 2 ? arguments->items[1] : "")
                     : sets ? set(values, client, arguments)
                            : take_away(client, arguments->items[1]);
  qkv_client_close(&client);
  return status;
}
