#include "server/tenants/usage.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct names {
  char (*rows)[QKV_NAME_MAX + 1];
  size_t count, capacity;
} names;

static void add_name(void *context, const char *tenant) {
  names *all = context;
  if (all->count == all->capacity) {
    all->capacity = all->capacity == 0 ? 64 : 2 * all->capacity;
    all->rows = realloc(all->rows, all->capacity * sizeof *all->rows);
    assert(all->rows != NULL);
  }
  memcpy(all->rows[all->count++], tenant, strlen(tenant) + 1);
}

static int by_name(const void *a, const void *b) {
  return strcmp(a, b);
}

void qkvi_tenant_usage_read(qkv_daemon *daemon, const char *tenant, qkvi_tenant_usage *usage) {
  qkv_account_usage account;
  *usage = (qkvi_tenant_usage){0};
  qkvi_quotas_get(daemon->quotas, tenant, &usage->quota, &usage->by_default);
  usage->calls = qkv_rpc_server_usage(daemon->rpc, tenant);
  (void)qkv_accounts_read(qkv_store_accounts(daemon->store), tenant, &account);
  usage->host_bytes = account.host_bytes;
  usage->ssd_bytes = account.ssd_bytes;
  usage->sessions = account.sessions;
  usage->models = qkv_store_tenant_models(daemon->store, tenant);
}

size_t qkvi_tenant_usage_list(qkv_daemon *daemon, qkvi_tenant_usage **out) {
  names all = {0};
  qkv_quota *quotas = NULL;
  const size_t quota_count = qkvi_quotas_list(daemon->quotas, &quotas);
  for (size_t i = 0; i < quota_count; i++) {
    if (strcmp(quotas[i].tenant, QKV_QUOTA_DEFAULT) != 0) add_name(&all, quotas[i].tenant);
  }
  free(quotas);
  qkv_accounts_each(qkv_store_accounts(daemon->store), add_name, &all);
  qkv_rpc_server_each_tenant(daemon->rpc, add_name, &all);
  if (all.count > 0) qsort(all.rows, all.count, sizeof *all.rows, by_name);
  *out = calloc(all.count + 1, sizeof **out);
  assert(*out != NULL);
  size_t count = 0;
  for (size_t i = 0; i < all.count; i++) {
    if (i > 0 && strcmp(all.rows[i], all.rows[i - 1]) == 0) continue;
    qkvi_tenant_usage_read(daemon, all.rows[i], &(*out)[count++]);
  }
  free(all.rows);
  return count;
}
