#include "server/tenants/usage.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAMES_FIRST = 64 };

// The first `max` names, each once, of those that have come so far and are behind `after`. Of `count` rows the first
// `sorted` are in order, each once.
typedef struct names {
  const char *after;
  size_t max;
  char (*rows)[QKV_NAME_MAX + 1];
  size_t count, sorted, capacity;
} names;

static int by_name(const void *a, const void *b) {
  return strcmp(a, b);
}

static void sort_names(names *all) {
  size_t kept = 0;
  if (all->count > 0) qsort(all->rows, all->count, sizeof *all->rows, by_name);
  for (size_t i = 0; i < all->count && kept < all->max; i++) {
    if (kept > 0 && strcmp(all->rows[i], all->rows[kept - 1]) == 0) continue;
    if (kept++ < i) memcpy(all->rows[kept - 1], all->rows[i], sizeof *all->rows);
  }
  all->count = all->sorted = kept;
}

// Whether `max` names before this one have come already.
static bool is_behind(const names *all, const char *tenant) {
  return all->sorted == all->max && strcmp(tenant, all->rows[all->max - 1]) >= 0;
}

static void add_name(void *context, const char *tenant) {
  names *all = context;
  if (strcmp(tenant, all->after) <= 0 || is_behind(all, tenant)) return;
  if (all->count == all->capacity) {
    all->capacity = all->capacity == 0 ? NAMES_FIRST : 2 * all->capacity;
    all->rows = realloc(all->rows, all->capacity * sizeof *all->rows);
    assert(all->rows != NULL);
  }
  memcpy(all->rows[all->count++], tenant, strlen(tenant) + 1);
  if (all->count / 2 >= all->max) sort_names(all);
}

static void add_quotas(qkvi_quotas *quotas, names *all) {
  char tenants[QKVI_QUOTAS_AT_ONCE][QKV_NAME_MAX + 1], after[QKV_NAME_MAX + 1] = "";
  size_t count = QKVI_QUOTAS_AT_ONCE;
  (void)snprintf(after, sizeof after, "%s", all->after);
  while (count == QKVI_QUOTAS_AT_ONCE && !is_behind(all, after)) {
    count = qkvi_quotas_list(quotas, after, tenants);
    for (size_t i = 0; i < count; i++) {
      if (strcmp(tenants[i], QKV_QUOTA_DEFAULT) != 0) add_name(all, tenants[i]);
    }
    if (count > 0) memcpy(after, tenants[count - 1], sizeof after);
  }
}

void qkvi_tenant_usage_read(qkv_daemon *daemon, const char *tenant, qkvi_tenant_usage *usage) {
  qkv_account_usage account;
  *usage = (qkvi_tenant_usage){0};
  qkvi_quotas_get(daemon->quotas, tenant, &usage->quota, &usage->by_default);
  usage->calls = qkv_rpc_server_usage(daemon->rpc, tenant);
  (void)qkv_accounts_read(qkv_store_accounts(daemon->store), tenant, &account);
  usage->host_bytes = account.host_bytes;
  usage->ssd_bytes = account.ssd_bytes;
  usage->gpu_bytes = account.gpu_bytes;
  usage->sessions = account.sessions;
  usage->models = qkv_store_tenant_models(daemon->store, tenant);
}

size_t qkvi_tenant_usage_list(qkv_daemon *daemon, const char *after, size_t max, qkvi_tenant_usage **out) {
  names all = {.after = after, .max = max};
  assert(max > 0);
  add_quotas(daemon->quotas, &all);
  qkv_accounts_each(qkv_store_accounts(daemon->store), add_name, &all);
  qkv_rpc_server_each_tenant(daemon->rpc, add_name, &all);
  sort_names(&all);
  *out = calloc(all.count + 1, sizeof **out);
  assert(*out != NULL);
  for (size_t i = 0; i < all.count; i++) qkvi_tenant_usage_read(daemon, all.rows[i], &(*out)[i]);
  free(all.rows);
  return all.count;
}
