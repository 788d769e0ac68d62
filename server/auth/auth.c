#include "server/auth/auth.h"

#include <assert.h>
#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "engine/base/status.h"
#include "server/reread.h"

#define LINE_MAX_BYTES 1024
#define ENTRIES_MAX 65536
#define SUBJECT_MAX 256
#define BEARER "Bearer "
#define TOKEN_MAX QKVI_JWT_BYTES_MAX
#define ADMIN "/qkv.v1.Admin/"

enum { DIGEST = SHA256_DIGEST_LENGTH };

// The key of a token is its hash; of others the hash of the name, "CN=..." or "uid=...".
typedef struct entry {
  uint8_t key[DIGEST];
  qkvi_grant grant;
  int64_t expires;  // seconds since 1970; INT64_MAX: never
} entry;

typedef struct table {
  entry *entries;  // by key
  size_t count;
} table;

struct qkvi_auth {
  char *path;
  qkvi_jwt *jwt;
  pthread_rwlock_t lock;
  table tokens, names;
  struct stat seen;  // of the file that was last read
};

static const char *const roles[] = {"read", "write", "admin"};

// ---- The file ----

static bool parse_hex(const char *text, uint8_t *bytes) {
  if (strlen(text) != 2 * (size_t)DIGEST || strspn(text, "0123456789abcdefABCDEF") != 2 * (size_t)DIGEST)
    return false;
  for (size_t i = 0; i < DIGEST; i++) {
    const char pair[3] = {text[2 * i], text[2 * i + 1], '\0'};
    bytes[i] = (uint8_t)strtoul(pair, NULL, 16);
  }
  return true;
}

static bool parse_roles(char *text, unsigned *found) {
  char *rest = NULL;
  *found = 0;
  for (const char *word = strtok_r(text, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
    size_t role = 0;
    while (role < 3 && strcmp(word, roles[role]) != 0) role++;
    if (role == 3) return false;
    *found |= 1U << role;
  }
  return *found != 0;
}

static bool parse_time(const char *text, int64_t *seconds) {
  struct tm broken = {0};
  const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%SZ", &broken);
  if (rest == NULL || *rest != '\0') {
    memset(&broken, 0, sizeof broken);
    rest = strptime(text, "%Y-%m-%d", &broken);
  }
  if (rest == NULL || *rest != '\0') return false;
  const struct tm asked = broken;
  *seconds = (int64_t)timegm(&broken);  // makes the third of March of the 31st of February
  return broken.tm_mon == asked.tm_mon && broken.tm_mday == asked.tm_mday;
}

// Users and groups, without leading zeros: a name has one form.
static bool is_number(const char *text) {
  const size_t digits = strspn(text, "0123456789");
  return digits > 0 && digits <= 10 && text[digits] == '\0' && (text[0] != '0' || digits == 1);
}

static const struct kind {
  const char *word, *names[2];  // what a name begins with
  bool numbers;                 // that a number follows
  const char *rule;
} kinds[] = {
    {"cert", {"CN=", "SAN="}, false, "a certificate must be CN=NAME or SAN=NAME of at most 256 bytes"},
    {"unix", {"uid=", "gid="}, true, "a client of a unix socket must be uid=NUMBER or gid=NUMBER"},
    {"jwt",
     {"sub=", "sub="},
     false,
     "a JWT must be sub=SUBJECT, or sub=PART:* for all that begin so, of at most 256 bytes"},
};

// "*" stands for the last part of a JWT's subject alone.
static bool has_stray_star(const char *name) {
  const char *star = strchr(name, '*');
  return star != NULL && (star[1] != '\0' || star[-1] != ':');
}

static bool is_name_of(const struct kind *kind, const char *name) {
  if (strlen(name) > SUBJECT_MAX || (strcmp(kind->word, "jwt") == 0 && has_stray_star(name))) return false;
  for (size_t i = 0; i < 2; i++) {
    const size_t bytes = strlen(kind->names[i]);
    if (strncmp(name, kind->names[i], bytes) == 0 && name[bytes] != '\0')
      return !kind->numbers || is_number(name + bytes);
  }
  return false;
}

static void hash_name(const char *name, uint8_t *key) {
  (void)SHA256((const unsigned char *)name, strlen(name), key);
}

static qkv_status parse_subject(const char *kind, const char *subject, entry *into, table **list, table *tokens,
                                table *names, qkv_error *error) {
  if (strcmp(kind, "token") == 0) {
    *list = tokens;
    if (strncmp(subject, "sha256:", 7) == 0 && parse_hex(subject + 7, into->key)) return QKV_OK;
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "a token must be sha256: and 64 hexadecimal digits");
  }
  *list = names;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    if (strcmp(kind, kinds[i].word) != 0) continue;
    if (!is_name_of(&kinds[i], subject)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s", kinds[i].rule);
    hash_name(subject, into->key);
    return QKV_OK;
  }
  return qkv_fail(error, QKV_INVALID_ARGUMENT, "it begins with %.32s, must be token, cert, unix or jwt", kind);
}

static qkv_status parse_rest(char **words, entry *into, qkv_error *error) {
  const bool any = strcmp(words[2], "*") == 0;
  if (!any) QKV_TRY(qkv_name_check(words[2], "tenant", error));
  memcpy(into->grant.tenant, any ? "" : words[2], any ? 1 : strlen(words[2]) + 1);
  if (!parse_roles(words[3], &into->grant.roles))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "roles must be some of read, write and admin, with commas");
  into->expires = INT64_MAX;
  if (words[4] == NULL) return QKV_OK;
  if (strncmp(words[4], "expires=", 8) != 0 || !parse_time(words[4] + 8, &into->expires))
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%.64s must be expires=YYYY-MM-DD or expires=YYYY-MM-DDTHH:MM:SSZ",
                    words[4]);
  return QKV_OK;
}

static qkv_status add(table *list, const entry *added, qkv_error *error) {
  if (list->count == ENTRIES_MAX)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "more than %d entries of a kind", ENTRIES_MAX);
  if ((list->count & (list->count - 1)) == 0) {  // a power of two, or none
    list->entries = realloc(list->entries, (list->count == 0 ? 1 : 2 * list->count) * sizeof(*list->entries));
    assert(list->entries != NULL);
  }
  list->entries[list->count++] = *added;
  return QKV_OK;
}

static qkv_status parse_line(char *line, table *tokens, table *names, qkv_error *error) {
  char *words[6] = {NULL}, *rest = NULL;
  size_t count = 0;
  for (char *word = strtok_r(line, " \t\r\n", &rest); word != NULL && count < 6;
       word = strtok_r(NULL, " \t\r\n", &rest))
    words[count++] = word;
  if (count == 0 || words[0][0] == '#') return QKV_OK;
  if (count < 4 || count > 5)
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "a line must be KIND WHO TENANT ROLES [expires=TIME]");
  entry read = {0};
  table *list = NULL;
  QKV_TRY(parse_subject(words[0], words[1], &read, &list, tokens, names, error));
  QKV_TRY(parse_rest(words, &read, error));
  return add(list, &read, error);
}

static int compare_entries(const void *a, const void *b) {
  return memcmp(((const entry *)a)->key, ((const entry *)b)->key, DIGEST);
}

static qkv_status finish(table *list, const char *path, qkv_error *error) {
  if (list->count > 1) qsort(list->entries, list->count, sizeof(*list->entries), compare_entries);
  for (size_t i = 1; i < list->count; i++) {
    if (compare_entries(&list->entries[i - 1], &list->entries[i]) == 0)
      return qkv_fail(error, QKV_INVALID_ARGUMENT, "%.200s: two lines are about the same token or name", path);
  }
  return QKV_OK;
}

static qkv_status read_lines(FILE *file, const char *path, table *tokens, table *names, qkv_error *error) {
  char line[LINE_MAX_BYTES];
  for (size_t number = 1; fgets(line, sizeof line, file) != NULL; number++) {
    qkv_error reason = {0};
    qkv_status status = QKV_OK;
    if (strchr(line, '\n') == NULL && !feof(file))
      status = qkv_fail(&reason, QKV_INVALID_ARGUMENT, "a line of more than %d bytes", LINE_MAX_BYTES - 2);
    if (status == QKV_OK) status = parse_line(line, tokens, names, &reason);
    if (status != QKV_OK) return qkv_fail(error, status, "%.200s:%zu: %.200s", path, number, reason.text);
  }
  if (ferror(file)) return qkv_fail(error, QKV_UNAVAILABLE, "cannot read %.200s", path);
  QKV_TRY(finish(tokens, path, error));
  return finish(names, path, error);
}

static qkv_status read_file(const char *path, struct stat *seen, table *tokens, table *names, qkv_error *error) {
  FILE *file = fopen(path, "re");
  if (file == NULL || fstat(fileno(file), seen) != 0) {
    if (file != NULL) (void)fclose(file);
    return qkv_fail(error, QKV_UNAVAILABLE, "cannot read auth-file %.200s: %m", path);
  }
  const qkv_status status = read_lines(file, path, tokens, names, error);
  (void)fclose(file);
  return status;
}

// ---- Life ----

qkv_status qkvi_auth_reload(qkvi_auth *auth, bool always, bool *changed, qkv_error *error) {
  *changed = always || qkvi_file_is_changed(auth->path, &auth->seen);
  if (!*changed) return QKV_OK;
  table tokens = {0}, names = {0}, old[2];
  const qkv_status status = read_file(auth->path, &auth->seen, &tokens, &names, error);
  if (status == QKV_OK) {
    pthread_rwlock_wrlock(&auth->lock);
    old[0] = auth->tokens;
    old[1] = auth->names;
    auth->tokens = tokens;
    auth->names = names;
    pthread_rwlock_unlock(&auth->lock);
  } else {
    old[0] = tokens;
    old[1] = names;
  }
  for (size_t i = 0; i < 2; i++) free(old[i].entries);
  return status;
}

qkv_status qkvi_auth_create(const char *path, qkvi_jwt *jwt, qkvi_auth **out, qkv_error *error) {
  qkvi_auth *auth = calloc(1, sizeof(*auth));
  assert(auth != NULL);
  auth->path = strdup(path);
  assert(auth->path != NULL);
  auth->jwt = jwt;
  pthread_rwlock_init(&auth->lock, NULL);
  bool changed;
  const qkv_status status = qkvi_auth_reload(auth, true, &changed, error);
  if (status != QKV_OK) qkvi_auth_destroy(&auth);
  *out = auth;
  return status;
}

void qkvi_auth_destroy(qkvi_auth **auth) {
  qkvi_auth *old = *auth;
  if (old == NULL) return;
  *auth = NULL;
  pthread_rwlock_destroy(&old->lock);
  free(old->tokens.entries);
  free(old->names.entries);
  free(old->path);
  free(old);
}

// ---- Questions ----

// Looked up by the first bytes of the hash, which reveal nothing of the token; all of them are compared in constant
// time.
static const entry *find(const table *list, const uint8_t *key) {
  size_t low = 0, high = list->count;
  while (low < high) {
    const size_t middle = low + (high - low) / 2;
    if (memcmp(list->entries[middle].key, key, 8) < 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  for (; low < list->count && memcmp(list->entries[low].key, key, 8) == 0; low++) {
    if (CRYPTO_memcmp(list->entries[low].key, key, DIGEST) == 0) return &list->entries[low];
  }
  return NULL;
}

static int64_t now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME_COARSE, &now);
  return (int64_t)now.tv_sec;
}

static qkv_status look_up(qkvi_auth *auth, const table *list, const uint8_t *key, const char *what, qkvi_grant *grant,
                          bool *known, qkv_error *error) {
  const int64_t now = now_s();
  pthread_rwlock_rdlock(&auth->lock);
  const entry *found = find(list, key);
  const bool expired = found != NULL && found->expires <= now;
  *known = found != NULL;
  if (*known) *grant = found->grant;
  pthread_rwlock_unlock(&auth->lock);
  if (!*known) return qkv_fail(error, QKV_UNAUTHENTICATED, "%s is not known to this daemon", what);
  if (expired) return qkv_fail(error, QKV_UNAUTHENTICATED, "%s has expired", what);
  return QKV_OK;
}

static qkv_status look_up_name(qkvi_auth *auth, const char *name, const char *what, qkvi_grant *grant, bool *known,
                               qkv_error *error) {
  uint8_t key[DIGEST];
  hash_name(name, key);
  return look_up(auth, &auth->names, key, what, grant, known, error);
}

qkv_status qkvi_auth_certificate(qkvi_auth *auth, const char *kind, const char *name, qkvi_grant *grant, bool *known,
                                 qkv_error *error) {
  char subject[SUBJECT_MAX + 8];
  const int length = snprintf(subject, sizeof subject, "%s=%s", kind, name);
  *known = false;
  if (length < 0 || (size_t)length > SUBJECT_MAX)
    return qkv_fail(error, QKV_UNAUTHENTICATED, "the client certificate's %s has more than %d bytes", kind,
                    SUBJECT_MAX);
  return look_up_name(auth, subject, "the client certificate", grant, known, error);
}

qkv_status qkvi_auth_process(qkvi_auth *auth, uid_t user, gid_t group, qkvi_grant *grant, bool *known,
                             qkv_error *error) {
  char name[32];
  (void)snprintf(name, sizeof name, "uid=%u", (unsigned)user);
  const qkv_status status = look_up_name(auth, name, "the client's user", grant, known, error);
  if (*known) return status;
  *error = (qkv_error){0};
  (void)snprintf(name, sizeof name, "gid=%u", (unsigned)group);
  return look_up_name(auth, name, "the client's group", grant, known, error);
}

// The subject's own line, else that of its longest prefix: "sub=system:serviceaccount:team-a:*".
static qkv_status look_up_subject(qkvi_auth *auth, const char *subject, qkvi_grant *grant, qkv_error *error) {
  char name[SUBJECT_MAX + 8];
  bool known;
  (void)snprintf(name, sizeof name, "sub=%s", subject);
  qkv_status status = look_up_name(auth, name, "the JWT's sub", grant, &known, error);
  for (char *colon = strrchr(name, ':'); colon != NULL && !known; colon = strrchr(name, ':')) {
    *error = (qkv_error){0};
    memcpy(colon + 1, "*", 2);
    status = look_up_name(auth, name, "the JWT's sub", grant, &known, error);
    *colon = '\0';
  }
  return status;
}

static qkv_status check_jwt(qkvi_auth *auth, const char *token, size_t bytes, qkvi_grant *grant, qkv_error *error) {
  char subject[QKVI_JWT_SUBJECT_MAX + 1];
  QKV_TRY(qkvi_jwt_check(auth->jwt, token, bytes, now_s(), subject, error));
  return look_up_subject(auth, subject, grant, error);
}

// The time this takes does not depend on how much of a known token matches.
static qkv_status check_token(qkvi_auth *auth, const void *token, size_t bytes, qkvi_grant *grant, qkv_error *error) {
  uint8_t key[DIGEST];
  bool known;
  if (bytes == 0 || bytes > TOKEN_MAX)
    return qkv_fail(error, QKV_UNAUTHENTICATED, "the token has %zu bytes, allowed are 1 to %d", bytes, TOKEN_MAX);
  (void)SHA256(token, bytes, key);
  const qkv_status status = look_up(auth, &auth->tokens, key, "the token", grant, &known, error);
  if (known || auth->jwt == NULL || !qkvi_jwt_is_one(token, bytes)) return status;
  *error = (qkv_error){0};
  return check_jwt(auth, token, bytes, grant, error);
}

qkv_status qkvi_auth_bearer(qkvi_auth *auth, const char *value, size_t bytes, qkvi_grant *grant, qkv_error *error) {
  const size_t prefix = strlen(BEARER);
  if (bytes < prefix || strncasecmp(value, BEARER, prefix) != 0)
    return qkv_fail(error, QKV_UNAUTHENTICATED, "authorization must be \"Bearer TOKEN\"");
  return check_token(auth, value + prefix, bytes - prefix, grant, error);
}

// ---- Roles ----

static bool is_of(const char *path, const char *service) {
  return strncmp(path, service, strlen(service)) == 0;
}

unsigned qkvi_auth_role_of(const char *path) {
  static const char *const reading[] = {
      "/qkv.v1.KvCache/Attend",
      "/qkv.v1.KvCache/Fetch",
      "/qkv.v1.KvCache/GetAttentionStats",
      "/qkv.v1.KvCache/GetCalibration",
      "/qkv.v1.KvCache/GetModel",
      "/qkv.v1.KvCache/GetSession",
      "/qkv.v1.KvCache/HasSessions",
      "/qkv.v1.KvCache/ListModels",
      "/qkv.v1.KvCache/ListSessions",
      "/qkv.v1.KvCache/Match",
      "/qkv.v1.KvCache/Watch",
      "/qkv.v1.Objects/GetObjects",
      "/qkv.v1.Objects/HasObjects",
      "/qkv.v1.Objects/ListObjects",
      "/qkv.v1.SharedMemory/CudaSharedMemoryStatus",
      "/qkv.v1.SharedMemory/SystemSharedMemoryStatus",
  };
  if (strcmp(path, "/grpc.health.v1.Health/Check") == 0) return 0;
  if (is_of(path, "/grpc.health.v1.Health/")) return QKVI_ROLE_READ;
  if (is_of(path, "/grpc.reflection.")) return QKVI_ROLE_READ;
  if (is_of(path, ADMIN)) return QKVI_ROLE_ADMIN;
  for (size_t i = 0; i < sizeof reading / sizeof *reading; i++) {
    if (strcmp(path, reading[i]) == 0) return QKVI_ROLE_READ;
  }
  return QKVI_ROLE_WRITE;
}

bool qkvi_auth_is_daemon_wide(const char *path) {
  return is_of(path, ADMIN) && strcmp(path, ADMIN "GetQuota") != 0 && strcmp(path, ADMIN "Compare") != 0;
}

const char *qkvi_auth_role_name(unsigned role) {
  return roles[role >= QKVI_ROLE_ADMIN ? 2 : role >= QKVI_ROLE_WRITE ? 1 : 0];
}
