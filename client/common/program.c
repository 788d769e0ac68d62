#include "client/common/program.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/edit_distance.h"

static const char *program_name = "qkv";

static void say(const char *format, va_list arguments) {
  fprintf(stderr, "%s: ", program_name);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
}

int qkv_program_failed(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  say(format, arguments);
  va_end(arguments);
  return QKV_EXIT_FAILED;
}

int qkv_program_misused(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  say(format, arguments);
  va_end(arguments);
  return QKV_EXIT_USAGE;
}

static void print_help(const qkv_command_set *set, FILE *out) {
  fprintf(out, "usage: %s COMMAND [ARGUMENTS] [OPTIONS]\n\n%s\n\ncommands:\n", set->program, set->summary);
  for (size_t i = 0; i < set->command_count; i++) {
    const qkv_command *command = &set->commands[i];
    int width = fprintf(out, "  %s %s", command->name, command->arguments);
    fprintf(out, "%*s%s\n", width < 34 ? 34 - width : 2, "", command->summary);
  }
  fprintf(out,
          "\nThe daemon is at --target ADDRESS (unix:PATH or HOST:PORT), else at $QKVD_TARGET.\n"
          "%s COMMAND --help lists a command's options.\n",
          set->program);
}

static void print_command_help(const qkv_command_set *set, const qkv_command *command, const qkv_options *options) {
  bool spaced = command->arguments[0] != '\0';
  printf("usage: %s %s%s%s [OPTIONS]\n\n%s\n\noptions:\n", set->program, command->name, spaced ? " " : "",
         command->arguments, command->summary);
  qkv_options_help(options, stdout);
}

static int unknown_command(const qkv_command_set *set, const char *word) {
  const char *closest = NULL;
  size_t closest_distance = 4;  // further away it is no misspelling
  for (size_t i = 0; i < set->command_count; i++) {
    size_t distance = qkv_edit_distance(word, set->commands[i].name);
    if (distance < closest_distance) {
      closest_distance = distance;
      closest = set->commands[i].name;
    }
  }
  if (closest != NULL) return qkv_program_misused("unknown command \"%s\"; did you mean %s?", word, closest);
  return qkv_program_misused("unknown command \"%s\"; %s --help lists the commands", word, set->program);
}

// Where the command stands in argv: the first word that is neither an option nor the value of one that every command
// has.
static int find_command(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    if (argv[i][0] != '-') return i;
    static const char *const valued[] = {"--target", "--tenant",   "--placement", "--timeout",
                                         "--tls-ca", "--tls-cert", "--tls-key",   "--token-file"};
    const char *option = argv[i];
    for (size_t j = 0; j < sizeof valued / sizeof *valued; j++) i += strcmp(option, valued[j]) == 0;
  }
  return argc;
}

static bool has_word(int argc, char **argv, const char *word) {
  for (int i = 1; i < argc; i++) {
    if (strcmp(argv[i], word) == 0) return true;
  }
  return false;
}

static int without_command(const qkv_command_set *set, int argc, char **argv) {
  if (has_word(argc, argv, "--help")) {
    print_help(set, stdout);
    return QKV_EXIT_OK;
  }
  if (has_word(argc, argv, "--version")) {
    printf("%s %s\n", set->program, QKV_VERSION);
    return QKV_EXIT_OK;
  }
  print_help(set, stderr);
  return QKV_EXIT_USAGE;
}

static int check_arguments(const qkv_command_set *set, const qkv_command *command, const qkv_option_list *words) {
  if (words->count < command->arguments_min) {
    return qkv_program_misused("%s needs %s; see %s %s --help", command->name, command->arguments, set->program,
                               command->name);
  }
  if (words->count > command->arguments_max) {
    return qkv_program_misused("%s: unexpected word \"%s\"; see %s %s --help", command->name,
                               words->items[command->arguments_max], set->program, command->name);
  }
  return QKV_EXIT_OK;
}

const char *qkv_program_environment(const char *variable) {
  const char *value = getenv(variable);
  return value != NULL && value[0] != '\0' ? value : NULL;
}

// Does nothing where the command does not have this option.
static qkv_status read_environment(const qkv_command *command, qkv_options *options, const char *name,
                                   const char *variable, qkv_error *error) {
  const char *value = qkv_program_environment(variable);
  bool has = false;
  for (size_t i = 0; i < command->option_count; i++) has |= strcmp(command->options[i].name, name) == 0;
  return value == NULL || !has ? QKV_OK : qkv_options_set(options, name, value, QKV_FROM_ENVIRONMENT, error);
}

static qkv_status read_all_environment(const qkv_command *command, qkv_options *options, qkv_error *error) {
  static const char *const names[][2] = {{"target", "QKVD_TARGET"},        {"tenant", "QKVD_TENANT"},
                                         {"placement", "QKVD_PLACEMENT"},  {"tls-ca", "QKVD_TLS_CA"},
                                         {"tls-cert", "QKVD_TLS_CERT"},    {"tls-key", "QKVD_TLS_KEY"},
                                         {"token-file", "QKVD_TOKEN_FILE"}};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    QKV_TRY(read_environment(command, options, names[i][0], names[i][1], error));
  return QKV_OK;
}

// `argv` without the command's name.
static int run_command(const qkv_command_set *set, const qkv_command *command, int argc, char **argv) {
  qkv_options *options = qkv_options_create(command->options, command->option_count, NULL, set->values);
  const qkv_program *common = set->values;
  qkv_error error = {0};
  qkv_option_list words = {0};
  int status = QKV_EXIT_USAGE;
  if (read_all_environment(command, options, &error) != QKV_OK ||
      qkv_options_read_arguments(options, argc, argv, &words, &error) != QKV_OK) {
    qkv_program_misused("%s", error.text);
  } else if (common->help) {
    print_command_help(set, command, options);
    status = QKV_EXIT_OK;
  } else if (common->version) {
    printf("%s %s\n", set->program, QKV_VERSION);
    status = QKV_EXIT_OK;
  } else {
    status = check_arguments(set, command, &words);
    if (status == QKV_EXIT_OK) status = command->run(set->values, &words);
    if (status == QKV_EXIT_OK && (fflush(stdout) != 0 || ferror(stdout) != 0))
      status = qkv_program_failed("standard output cannot be written to");
  }
  qkv_options_destroy(&options);
  return status;
}

int qkv_program_run(const qkv_command_set *set, int argc, char **argv) {
  program_name = set->program;
  int place = find_command(argc, argv);
  if (place >= argc) return without_command(set, argc, argv);
  const qkv_command *command = NULL;
  for (size_t i = 0; i < set->command_count && command == NULL; i++) {
    if (strcmp(argv[place], set->commands[i].name) == 0) command = &set->commands[i];
  }
  if (command == NULL) return unknown_command(set, argv[place]);

  char **rest = calloc((size_t)argc + 1, sizeof *rest);
  assert(rest != NULL);
  int count = 0;
  for (int i = 0; i < argc; i++) {
    if (i != place) rest[count++] = argv[i];
  }
  int status = run_command(set, command, count, rest);
  free(rest);
  return status;
}
