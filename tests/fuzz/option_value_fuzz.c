// engine/base/option.h: any text as the value of an option of any kind, and as a command line.
#include <stdlib.h>
#include <string.h>

#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/options.h"

#define WORDS_MAX 8

static void set_each(const char *text) {
  fuzz_values values;
  qkv_options *options = qkv_options_create(fuzz_options, FUZZ_OPTIONS, NULL, &values);
  for (size_t row = 0; row < FUZZ_OPTIONS; row++) {
    qkv_error error = {0};
    qkv_status status = qkv_options_set(options, fuzz_options[row].name, text, QKV_FROM_FLAG, &error);
    if (status != QKV_OK && error.text[0] == '\0') __builtin_trap();
    char shown[256];
    qkv_options_text(options, row, shown, sizeof shown);
  }
  qkv_options_set(options, text, "1", QKV_FROM_FLAG, NULL);
  fuzz_values_check(&values);
  qkv_options_destroy(&options);
}

// Lines of `text` as the words of a command line.
static void read_words(char *text) {
  char *words[WORDS_MAX + 2] = {(char *)"program"};
  int count = 1;
  for (char *word = text; word != NULL && count <= WORDS_MAX; count++) {
    char *end = strchr(word, '\n');
    if (end != NULL) *end++ = '\0';
    words[count] = word;
    word = end;
  }
  fuzz_values values;
  qkv_options *options = qkv_options_create(fuzz_options, FUZZ_OPTIONS, NULL, &values);
  qkv_option_list positional;
  qkv_error error = {0};
  qkv_status status = qkv_options_read_arguments(options, count, words, &positional, &error);
  if (status != QKV_OK && error.text[0] == '\0') __builtin_trap();
  fuzz_values_check(&values);
  qkv_options_destroy(&options);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  char *text = malloc(size + 1);
  if (text == NULL) abort();
  if (size > 0) memcpy(text, data, size);
  text[size] = '\0';
  set_each(text);
  read_words(text);
  free(text);
  return 0;
}
