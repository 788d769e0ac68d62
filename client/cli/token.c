// qkvctl token: makes bearer tokens for an auth-file of qkvd (docs/security.md).
#include <jansson.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "client/cli/cli.h"
#include "engine/base/name.h"

// 256 random bits, so that nobody finds the token of a hash.
enum { SECRET_BYTES = 32, TOKEN_TEXT = 4 + 2 * SECRET_BYTES + 1 };
#define PREFIX "qkv_"

static void print_hex(const uint8_t *bytes, size_t count, char *text) {
  for (size_t i = 0; i < count; i++) (void)snprintf(text + 2 * i, 3, "%02x", bytes[i]);
}

static bool has_roles(const char *roles) {
  static const char *const known[] = {"read", "write", "admin"};
  while (true) {
    const size_t length = strcspn(roles, ",");
    size_t i = 0;
    while (i < 3 && (strlen(known[i]) != length || strncmp(known[i], roles, length) != 0)) i++;
    if (i == 3) return false;
    if (roles[length] == '\0') return true;
    roles += length + 1;
  }
}

// As the daemon reads it (server/auth/auth.c).
static bool is_time(const char *text) {
  struct tm broken = {0};
  const char *rest = strptime(text, "%Y-%m-%dT%H:%M:%SZ", &broken);
  if (rest == NULL || *rest != '\0') {
    memset(&broken, 0, sizeof broken);
    rest = strptime(text, "%Y-%m-%d", &broken);
  }
  const struct tm asked = broken;
  (void)timegm(&broken);  // makes the third of March of the 31st of February
  return rest != NULL && *rest == '\0' && broken.tm_mon == asked.tm_mon && broken.tm_mday == asked.tm_mday;
}

int qkvctl_token(void *values, const qkv_option_list *arguments) {
  const qkvctl_values *asked = values;
  const char *tenant = arguments->items[1];
  qkv_error error = {0};
  uint8_t secret[SECRET_BYTES], digest[SHA256_DIGEST_LENGTH];
  char token[TOKEN_TEXT] = PREFIX, hash[2 * SHA256_DIGEST_LENGTH + 1], line[1024];
  if (strcmp(arguments->items[0], "new") != 0)
    return qkv_program_misused("token %s: known is token new TENANT", arguments->items[0]);
  if (strcmp(tenant, "*") != 0 && qkv_name_check(tenant, "tenant", &error) != QKV_OK)
    return qkv_program_misused("%s", error.text);
  if (!has_roles(asked->roles))
    return qkv_program_misused("--roles is %s, known are read, write and admin", asked->roles);
  if (asked->expires != NULL && !is_time(asked->expires))
    return qkv_program_misused("--expires is %s, must be YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ", asked->expires);
  if (getrandom(secret, sizeof secret, 0) != sizeof secret) return qkv_program_failed("no random bytes: %m");
  print_hex(secret, sizeof secret, token + strlen(PREFIX));
  (void)SHA256((const unsigned char *)token, strlen(token), digest);
  print_hex(digest, sizeof digest, hash);
  (void)snprintf(line, sizeof line, "token sha256:%s %s %s%s%s", hash, tenant, asked->roles,
                 asked->expires != NULL ? " expires=" : "", asked->expires != NULL ? asked->expires : "");
  if (!asked->program.json) {
    printf("%s\n%s\n", token, line);
    return QKV_EXIT_OK;
  }
  json_t *object = json_pack("{s:s, s:s}", "token", token, "line", line);
  json_dumpf(object, stdout, 0);
  putchar('\n');
  json_decref(object);
  return QKV_EXIT_OK;
}
