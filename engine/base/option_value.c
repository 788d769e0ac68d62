// Option values: text to number and back.
#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "engine/base/option_internal.h"

typedef struct unit_row {
  const char *name;
  int64_t factor;
} unit_row;

// Each ends with an empty row. In the order in which text prefers them.
static const unit_row byte_units[] = {{"TiB", INT64_C(1) << 40},
                                      {"TB", 1000000000000},
                                      {"GiB", 1 << 30},
                                      {"GB", 1000000000},
                                      {"MiB", 1 << 20},
                                      {"MB", 1000000},
                                      {"KiB", 1 << 10},
                                      {"KB", 1000},
                                      {"B", 1},
                                      {"", 1},
                                      {NULL, 0}};
static const unit_row duration_units[] = {{"h", 3600000}, {"m", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0}};

static const unit_row *find_unit(const unit_row *units, const char *name) {
  for (const unit_row *unit = units; unit->name != NULL; unit++) {
    if (strcasecmp(name, unit->name) == 0) return unit;
  }
  return NULL;
}

// "1.5GB": digits, perhaps a point with more digits, a unit. False for anything else and for overflow.
static bool parse_scaled(const unit_row *units, const char *text, int64_t *value) {
  size_t whole = strspn(text, "0123456789");
  size_t number = whole;
  if (text[whole] == '.') number += 1 + strspn(text + whole + 1, "0123456789");
  const unit_row *unit = find_unit(units, text + number);
  if (whole == 0 || text[number - 1] == '.' || unit == NULL) return false;
  errno = 0;
  long long integer = strtoll(text, NULL, 10);
  if (errno != 0 || __builtin_mul_overflow((int64_t)integer, unit->factor, value)) return false;
  if (number == whole) return true;
  double fraction = strtod(text + whole, NULL) * (double)unit->factor;
  return !__builtin_add_overflow(*value, (int64_t)llround(fraction), value);
}

static bool parse_integer(const char *text, int64_t *value) {
  size_t sign = text[0] == '-' || text[0] == '+' ? 1 : 0;
  size_t digits = strspn(text + sign, "0123456789");
  if (digits == 0 || text[sign + digits] != '\0') return false;
  errno = 0;
  *value = strtoll(text, NULL, 10);
  return errno == 0;
}

static bool parse_real(const char *text, double *value) {
  if (text[0] == '\0' || text[strspn(text, "+-.0123456789eE")] != '\0') return false;
  char *end = NULL;
  *value = strtod(text, &end);
  return *end == '\0' && isfinite(*value);
}

static bool parse_flag(const char *text, bool *value) {
  *value = strcmp(text, "true") == 0;
  return *value || strcmp(text, "false") == 0;
}

static bool parse_kind(qkv_option_kind kind, const char *text, qkvi_option_value *value, const char **needed) {
  switch (kind) {
    case QKV_OPTION_FLAG:
      *needed = "true or false is needed";
      return parse_flag(text, &value->flag);
    case QKV_OPTION_INTEGER:
      *needed = "a whole number is needed";
      return parse_integer(text, &value->integer);
    case QKV_OPTION_REAL:
      *needed = "a number is needed";
      return parse_real(text, &value->real);
    case QKV_OPTION_BYTES:
      *needed = "bytes are needed, such as 4096, 64KiB or 1.5GB";
      return parse_scaled(byte_units, text, &value->integer);
    case QKV_OPTION_DURATION:
      *needed = "a time with its unit is needed, such as 250ms, 60s, 5m or 1h";
      if (strcmp(text, "0") == 0) return parse_integer(text, &value->integer);
      return parse_scaled(duration_units, text, &value->integer);
    case QKV_OPTION_STRING:
    case QKV_OPTION_LIST:
      return true;
  }
  return false;
}

// What comes out again in JSON, and in protobuf's strings.
static bool is_utf8(const char *text) {
  json_t *string = json_string(text);
  json_decref(string);
  return string != NULL;
}

qkv_status qkvi_option_parse(const qkv_option *row, const char *label, const char *text, qkvi_option_value *value,
                             qkv_error *error) {
  *value = (qkvi_option_value){0};
  const char *needed = "";
  if (!is_utf8(text)) return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is no UTF-8", label);
  if (!parse_kind(row->kind, text, value, &needed)) {
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is \"%s\", %s", label, text, needed);
  }
  if (row->min == 0 && row->max == 0) return QKV_OK;
  double number = row->kind == QKV_OPTION_REAL ? value->real : (double)value->integer;
  if (number < row->min || number > row->max) {
    char limits[64];
    qkvi_option_limits_text(row, limits, sizeof limits);
    return qkv_fail(error, QKV_INVALID_ARGUMENT, "%s is %s, allowed are %s", label, text, limits);
  }
  return QKV_OK;
}

// In the largest unit that divides it. The last unit of a table, a factor of 1, divides everything.
static void scaled_text(const unit_row *units, int64_t value, char *text, size_t size) {
  const unit_row *unit = units;
  while (unit->factor > 1 && (value == 0 || value % unit->factor != 0)) unit++;
  bool bare = value == 0 || units == byte_units;
  (void)snprintf(text, size, "%" PRId64 "%s", value / unit->factor, unit->factor == 1 && bare ? "" : unit->name);
}

void qkvi_option_number_text(qkv_option_kind kind, int64_t integer, double real, char *text, size_t size) {
  switch (kind) {
    case QKV_OPTION_BYTES:
      scaled_text(byte_units, integer, text, size);
      return;
    case QKV_OPTION_DURATION:
      scaled_text(duration_units, integer, text, size);
      return;
    case QKV_OPTION_REAL:
      (void)snprintf(text, size, "%g", real);
      return;
    default:
      (void)snprintf(text, size, "%" PRId64, integer);
  }
}

static int64_t nearest_integer(double number) {
  if (number >= 0x1p63) return INT64_MAX;
  return number <= -0x1p63 ? INT64_MIN : (int64_t)number;
}

void qkvi_option_limits_text(const qkv_option *row, char *text, size_t size) {
  text[0] = '\0';
  if (row->min == 0 && row->max == 0) return;
  char min[32];
  char max[32];
  qkvi_option_number_text(row->kind, nearest_integer(row->min), row->min, min, sizeof min);
  qkvi_option_number_text(row->kind, nearest_integer(row->max), row->max, max, sizeof max);
  (void)snprintf(text, size, "%s to %s", min, max);
}
