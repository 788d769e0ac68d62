#include "proto/quota.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/option.h"

static const qkv_option fields[] = {
#define X(id, kind, most) {#id, kind, offsetof(qkv_quota, id), "0", 0, most, "N", "of a tenant"},
    QKV_QUOTA_MAP(X)
#undef X
};
enum { FIELDS = sizeof fields / sizeof *fields };

static int64_t value_of(const qkv_quota *quota, size_t field) {
  int64_t value;
  memcpy(&value, (const char *)quota + fields[field].offset, sizeof value);
  return value;
}

bool qkv_quota_is_empty(const qkv_quota *quota) {
  for (size_t i = 0; i < FIELDS; i++) {
    if (value_of(quota, i) != 0) return false;
  }
  return true;
}

static qkv_status check_part(const char *field, int64_t part, int64_t whole, qkv_error *error) {
  if (whole == 0 || part <= whole) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s_guaranteed is %" PRId64 ", at most %s, which is %" PRId64, field,
                  part, field, whole);
}

qkv_status qkv_quota_check(const qkv_quota *quota, qkv_error *error) {
  const bool all = strcmp(quota->tenant, QKV_QUOTA_DEFAULT) == 0;
  if (!all) QKV_TRY(qkv_name_check(quota->tenant, "tenant", error));
  for (size_t i = 0; i < FIELDS; i++) {
    const int64_t value = value_of(quota, i);
    if (value < 0 || (double)value > fields[i].max)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %" PRIu64 ", at most %.0f", fields[i].name, (uint64_t)value,
                      fields[i].max);
  }
  if (all && (quota->host_bytes_guaranteed > 0 || quota->ssd_bytes_guaranteed > 0))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s_guaranteed is given for *: nothing can be guaranteed to all",
                    quota->host_bytes_guaranteed > 0 ? "host_bytes" : "ssd_bytes");
  QKV_TRY(check_part("host_bytes", quota->host_bytes_guaranteed, quota->host_bytes, error));
  return check_part("ssd_bytes", quota->ssd_bytes_guaranteed, quota->ssd_bytes, error);
}

qkv_status qkv_quota_change(qkv_quota *quota, const char *word, unsigned *which, qkv_error *error) {
  const char *equals = strchr(word, '=');
  if (equals == NULL) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%.64s must be FIELD=VALUE", word);
  const size_t bytes = (size_t)(equals - word);
  size_t field = 0;
  while (field < FIELDS && (strlen(fields[field].name) != bytes || strncmp(fields[field].name, word, bytes) != 0))
    field++;
  if (field == FIELDS) return qkv_fail(error, QKV_INVALID_ARGUMENT, "unknown field %.64s", word);
  qkv_quota read = {0};
  qkv_options *set = qkv_options_create(fields, FIELDS, NULL, &read);
  const qkv_status status = qkv_options_set(set, fields[field].name, equals + 1, QKV_FROM_FILE, error);
  const int64_t value = value_of(&read, field);
  qkv_options_destroy(&set);  // clears what it has set
  if (status == QKV_OK) memcpy((char *)quota + fields[field].offset, &value, sizeof value);
  *which = (unsigned)field;
  return status;
}

static qkv_status parse_field(qkv_quota *quota, const char *word, unsigned *given, qkv_error *error) {
  unsigned which = 0;
  QKV_TRY(qkv_quota_change(quota, word, &which, error));
  if ((*given & 1U << which) != 0)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is given twice", fields[which].name);
  *given |= 1U << which;
  return QKV_OK;
}

qkv_status qkv_quota_parse(char *line, qkv_quota *quota, bool *has, qkv_error *error) {
  char *rest = NULL;
  const char *tenant = strtok_r(line, " \t\r\n", &rest);
  unsigned given = 0;
  *quota = (qkv_quota){0};
  *has = tenant != NULL && tenant[0] != '#';
  if (!*has) return QKV_OK;
  if (strcmp(tenant, QKV_QUOTA_DEFAULT) != 0) QKV_TRY(qkv_name_check(tenant, "tenant", error));
  (void)snprintf(quota->tenant, sizeof quota->tenant, "%s", tenant);
  for (const char *word = strtok_r(NULL, " \t\r\n", &rest); word != NULL; word = strtok_r(NULL, " \t\r\n", &rest))
    QKV_TRY(parse_field(quota, word, &given, error));
  return qkv_quota_check(quota, error);
}

void qkv_quota_write(const qkv_quota *quota, char *line, size_t bytes) {
  size_t used = (size_t)snprintf(line, bytes, "%s", quota->tenant);
  for (size_t i = 0; i < FIELDS && used < bytes; i++) {
    if (value_of(quota, i) == 0) continue;
    used += (size_t)snprintf(line + used, bytes - used, " %s=%" PRId64, fields[i].name, value_of(quota, i));
  }
}
