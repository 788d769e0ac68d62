#include "server/tenants/quotas.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// In the order of tenants.
typedef struct table {
  qkv_quota *rows;
  size_t count;
} table;

struct qkvi_quotas {
  qkvi_quotas_config config;
  char *path;
  pthread_mutex_t changing;  // one reading or writing of the file at a time
  pthread_mutex_t lock;      // of the table
  table known;               // changed by the thread that holds both
  struct stat seen;          // of the file that was last read; zeros: it did not exist
};

static int by_tenant(const void *a, const void *b) {
  return strcmp(((const qkv_quota *)a)->tenant, ((const qkv_quota *)b)->tenant);
}

static qkv_quota *find(const table *all, const char *tenant) {
  qkv_quota key = {.tenant = ""};
  (void)snprintf(key.tenant, sizeof key.tenant, "%s", tenant);
  return all->count == 0 ? NULL : bsearch(&key, all->rows, all->count, sizeof key, by_tenant);
}

static void add(table *all, const qkv_quota *quota) {
  if ((all->count & (all->count - 1)) == 0) {  // a power of two, or none
    all->rows = realloc(all->rows, (all->count == 0 ? 1 : 2 * all->count) * sizeof *all->rows);
    assert(all->rows != NULL);
  }
  all->rows[all->count++] = *quota;
}

static qkv_status check_sum(const char *field, const char *option, uint64_t sum, uint64_t most, qkv_error *error) {
  if (most == 0 || sum <= most) return QKV_OK;
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s_guaranteed of all tenants is %" PRIu64 ", %s is %" PRIu64, field,
                  sum, option, most);
}

static qkv_status check_all(const qkvi_quotas_config *config, const table *all, qkv_error *error) {
  uint64_t host = 0, ssd = 0;  // QKVI_QUOTAS_MAX times what each may be fits in: 2^16 * 2^47, which budgets keep to
  for (size_t i = 0; i < all->count; i++) {
    host += (uint64_t)all->rows[i].host_bytes_guaranteed;
    ssd += (uint64_t)all->rows[i].ssd_bytes_guaranteed;
    QKV_TRY(check_sum("host_bytes", "memory-budget", host, config->host_bytes, error));
    QKV_TRY(check_sum("ssd_bytes", "storage-budget", ssd, config->ssd_bytes, error));
    if (i > 0 && strcmp(all->rows[i - 1].tenant, all->rows[i].tenant) == 0)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "two lines are about the tenant %s", all->rows[i].tenant);
  }
  return QKV_OK;
}

// ---- Reading ----

static qkv_status read_line(const char *line, FILE *file, table *all, qkv_error *error) {
  char copy[QKV_QUOTA_LINE_MAX];
  qkv_quota quota;
  bool has;
  if (strchr(line, '\n') == NULL && !feof(file))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "a line of more than %d bytes", QKV_QUOTA_LINE_MAX - 2);
  memcpy(copy, line, strlen(line) + 1);
  QKV_TRY(qkv_quota_parse(copy, &quota, &has, error));
  if (!has || qkv_quota_is_empty(&quota)) return QKV_OK;
  if (all->count == QKVI_QUOTAS_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "more than %d quotas", QKVI_QUOTAS_MAX);
  add(all, &quota);
  return QKV_OK;
}

static qkv_status read_lines(FILE *file, const qkvi_quotas *quotas, table *all, qkv_error *error) {
  char line[QKV_QUOTA_LINE_MAX];
  qkv_error reason = {0};
  for (size_t number = 1; fgets(line, sizeof line, file) != NULL; number++) {
    const qkv_status status = read_line(line, file, all, &reason);
    if (status != QKV_OK) return qkv_fail(error, status, "%.200s:%zu: %.200s", quotas->path, number, reason.text);
  }
  if (ferror(file)) return qkv_fail(error, QKV_UNAVAILABLE, "cannot read %.200s", quotas->path);
  if (all->count > 1) qsort(all->rows, all->count, sizeof *all->rows, by_tenant);
  const qkv_status status = check_all(&quotas->config, all, &reason);
  return status == QKV_OK ? QKV_OK : qkv_fail(error, status, "%.200s: %.200s", quotas->path, reason.text);
}

static qkv_status read_file(const qkvi_quotas *quotas, struct stat *seen, table *all, qkv_error *error) {
  FILE *file = fopen(quotas->path, "re");
  *seen = (struct stat){0};
  if (file == NULL && errno == ENOENT && quotas->config.may_be_missing) return QKV_OK;
  if (file == NULL || fstat(fileno(file), seen) != 0) {
    if (file != NULL) (void)fclose(file);
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot read quota-file %.200s: %m", quotas->path);
  }
  const qkv_status status = read_lines(file, quotas, all, error);
  (void)fclose(file);
  return status;
}

static bool same_file(const struct stat *a, const struct stat *b) {
  return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size &&
         a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

// With `changing`.
static qkv_status reload(qkvi_quotas *quotas, bool always, bool *changed, qkv_error *error) {
  struct stat now = {0};
  if (stat(quotas->path, &now) != 0) now = (struct stat){0};
  *changed = always || !same_file(&now, &quotas->seen);
  if (!*changed) return QKV_OK;
  table all = {0};
  const qkv_status status = read_file(quotas, &quotas->seen, &all, error);
  (void)pthread_mutex_lock(&quotas->lock);
  const table old = status == QKV_OK ? quotas->known : all;
  if (status == QKV_OK) quotas->known = all;
  (void)pthread_mutex_unlock(&quotas->lock);
  free(old.rows);
  return status;
}

qkv_status qkvi_quotas_reload(qkvi_quotas *quotas, bool always, bool *changed, qkv_error *error) {
  *changed = false;
  if (quotas->path == NULL) return QKV_OK;
  (void)pthread_mutex_lock(&quotas->changing);
  const qkv_status status = reload(quotas, always, changed, error);
  (void)pthread_mutex_unlock(&quotas->changing);
  return status;
}

qkv_status qkvi_quotas_create(const qkvi_quotas_config *config, qkvi_quotas **out, qkv_error *error) {
  qkvi_quotas *quotas = calloc(1, sizeof *quotas);
  bool changed;
  assert(quotas != NULL);
  quotas->config = *config;
  if (config->path != NULL) quotas->path = strdup(config->path);
  const int failed = pthread_mutex_init(&quotas->lock, NULL) | pthread_mutex_init(&quotas->changing, NULL);
  assert(failed == 0 && (config->path == NULL) == (quotas->path == NULL));
  (void)failed;
  const qkv_status status = qkvi_quotas_reload(quotas, true, &changed, error);
  if (status == QKV_OK) *out = quotas;
  if (status != QKV_OK) qkvi_quotas_destroy(&quotas);
  return status;
}

void qkvi_quotas_destroy(qkvi_quotas **quotas) {
  qkvi_quotas *old = *quotas;
  if (old == NULL) return;
  *quotas = NULL;
  (void)pthread_mutex_destroy(&old->changing);
  (void)pthread_mutex_destroy(&old->lock);
  free(old->known.rows);
  free(old->path);
  free(old);
}

// ---- Looking ----

void qkvi_quotas_get(qkvi_quotas *quotas, const char *tenant, qkv_quota *quota, bool *by_default) {
  (void)pthread_mutex_lock(&quotas->lock);
  const qkv_quota *found = find(&quotas->known, tenant);
  *by_default = found == NULL;
  if (found == NULL) found = find(&quotas->known, QKV_QUOTA_DEFAULT);
  *quota = found == NULL ? (qkv_quota){0} : *found;
  (void)pthread_mutex_unlock(&quotas->lock);
  *by_default &= found != NULL;
  (void)snprintf(quota->tenant, sizeof quota->tenant, "%s", tenant);
  if (quota->sessions == 0) quota->sessions = quotas->config.sessions;
  if (quota->models == 0) quota->models = quotas->config.models;
}

// The number of rows up to and with this tenant.
static size_t rows_up_to(const table *all, const char *tenant) {
  size_t low = 0, high = all->count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (strcmp(all->rows[middle].tenant, tenant) <= 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

size_t qkvi_quotas_list(qkvi_quotas *quotas, const char *after, char names[QKVI_QUOTAS_AT_ONCE][QKV_NAME_MAX + 1]) {
  (void)pthread_mutex_lock(&quotas->lock);
  const size_t first = rows_up_to(&quotas->known, after), left = quotas->known.count - first;
  const size_t count = left < QKVI_QUOTAS_AT_ONCE ? left : QKVI_QUOTAS_AT_ONCE;
  for (size_t i = 0; i < count; i++) memcpy(names[i], quotas->known.rows[first + i].tenant, sizeof names[i]);
  (void)pthread_mutex_unlock(&quotas->lock);
  return count;
}

// ---- Writing ----

static bool is_about(const char *line, const char *tenant) {
  line += strspn(line, " \t");
  const size_t bytes = strcspn(line, " \t\r\n");
  return bytes == strlen(tenant) && strncmp(line, tenant, bytes) == 0;
}

// The lines of other tenants as they are, and the tenant's in its place, or at the end.
static void copy_lines(FILE *from, FILE *to, const qkv_quota *quota) {
  char line[QKV_QUOTA_LINE_MAX], own[QKV_QUOTA_LINE_MAX];
  bool written = qkv_quota_is_empty(quota), ended = true;
  qkv_quota_write(quota, own, sizeof own);
  while (from != NULL && fgets(line, sizeof line, from) != NULL) {
    if (!is_about(line, quota->tenant)) {
      (void)fputs(line, to);
      ended = line[strlen(line) - 1] == '\n';
    } else if (!written) {
      (void)fprintf(to, "%s\n", own);
      written = true;
    }
  }
  if (!ended) (void)fputc('\n', to);
  if (!written) (void)fprintf(to, "%s\n", own);
}

static qkv_status sync_directory(const char *path) {
  char copy[PATH_MAX];
  (void)snprintf(copy, sizeof copy, "%s", path);
  const int directory = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = directory >= 0 && fsync(directory) == 0;
  if (directory >= 0) (void)close(directory);
  return synced ? QKV_OK : QKV_UNAVAILABLE;
}

static qkv_status replace_file(const qkvi_quotas *quotas, const char *temporary, const qkv_quota *quota) {
  const mode_t mode = quotas->seen.st_ino != 0 ? quotas->seen.st_mode & 0777 : 0640;
  const int written = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  FILE *to = written < 0 ? NULL : fdopen(written, "w");
  if (to == NULL) {
    if (written >= 0) (void)close(written);
    return QKV_UNAVAILABLE;
  }
  FILE *from = fopen(quotas->path, "re");
  copy_lines(from, to, quota);
  if (from != NULL) (void)fclose(from);
  bool good = fflush(to) == 0 && fsync(written) == 0;
  good = fclose(to) == 0 && good;
  good = good && rename(temporary, quotas->path) == 0;
  if (!good) (void)unlink(temporary);
  return good ? sync_directory(quotas->path) : QKV_UNAVAILABLE;
}

// What it would be then, in order.
static table with(const table *known, const qkv_quota *quota) {
  table all = {0};
  for (size_t i = 0; i < known->count; i++) {
    if (strcmp(known->rows[i].tenant, quota->tenant) != 0) add(&all, &known->rows[i]);
  }
  if (!qkv_quota_is_empty(quota)) add(&all, quota);
  if (all.count > 1) qsort(all.rows, all.count, sizeof *all.rows, by_tenant);
  return all;
}

// With `changing`. Changes that an operator has written meanwhile are read first, so that none is lost.
static qkv_status set(qkvi_quotas *quotas, const qkv_quota *quota, qkv_error *error) {
  char temporary[PATH_MAX];
  bool changed;
  QKV_TRY(reload(quotas, true, &changed, error));  // an error is told each time
  if (quotas->known.count == QKVI_QUOTAS_MAX && find(&quotas->known, quota->tenant) == NULL)
    return qkv_fail(error, QKV_RESOURCE_EXHAUSTED, "there are %d quotas already", QKVI_QUOTAS_MAX);
  table all = with(&quotas->known, quota);
  qkv_status status = check_all(&quotas->config, &all, error);
  if (status == QKV_OK && snprintf(temporary, sizeof temporary, "%s.new", quotas->path) >= (int)sizeof temporary)
    status = qkv_fail(error, QKV_INVALID_ARGUMENT, "quota-file is a path of more than %d bytes", PATH_MAX - 5);
  if (status == QKV_OK && replace_file(quotas, temporary, quota) != QKV_OK)
    status = qkv_fail(error, QKV_UNAVAILABLE, "cannot write quota-file %.200s: %m", quotas->path);
  free(all.rows);
  return status == QKV_OK ? reload(quotas, true, &changed, error) : status;
}

qkv_status qkvi_quotas_set(qkvi_quotas *quotas, const qkv_quota *quota, qkv_error *error) {
  QKV_TRY(qkv_quota_check(quota, error));
  if (quotas->path == NULL)
    return qkv_fail(error, QKV_FAILED_PRECONDITION,
                    "there is no place to keep quotas: the daemon has neither a quota-file nor a data-dir");
  (void)pthread_mutex_lock(&quotas->changing);
  const qkv_status status = set(quotas, quota, error);
  (void)pthread_mutex_unlock(&quotas->changing);
  return status;
}
