// Codes rows into pages, appends them, fetches the pages and decodes them: all coding is done here, not in the
// daemon.
#include <qkv.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 1, HEADS = 2, DIM = 64, PAGE = 64 };

static float k[PAGE * HEADS * DIM], v[PAGE * HEADS * DIM];  // a model's rows of one page; here zeros

static const qkv_page_code *code;

static bool decode(void *context, const qkv_client_page *page) {
  static float rows[PAGE * HEADS * DIM];
  qkv_client_page_rows to = {.tokens = page->tokens, .dtype = QKV_CLIENT_FP32, .k = rows};
  qkv_call_error error;
  if (qkv_page_decode(code, page, &to, &error)) return fprintf(stderr, "%s\n", error.text), false;
  *(uint64_t *)context += page->tokens;
  return true;
}

static bool exact_rows(void *context, const qkv_client_rows *rows) {
  *(uint64_t *)context += (uint64_t)rows->k.dims[0];
  return true;
}

int main(int argc, char **argv) {
  qkv_client *client;
  qkv_call_error error;
  qkv_client_page page;
  uint64_t tokens = 0;
  qkv_client_model model = {"pages",        .layers = LAYERS, .kv_heads = HEADS, .q_heads = HEADS,
                            .key_dim = DIM, .value_dim = DIM, .dtype = 2};
  qkv_session_options session = {.session = "p", .model = "pages"};
  qkv_client_rows_to_code rows = {.k = {QKV_CLIENT_FP32, 3, {PAGE, HEADS, DIM}, .data = k, .bytes = sizeof k},
                                  .v = {QKV_CLIENT_FP32, 3, {PAGE, HEADS, DIM}, .data = v, .bytes = sizeof v}};
  qkv_client_item item = {.session = "p", .pages = &page, .page_count = 1};
  qkv_client_fetch request = {.session = "p"};
  qkv_client_coded_receiver receiver = {.page = decode, .rows = exact_rows, .context = &tokens};
  if (qkv_client_connect(argc > 1 ? argv[1] : "127.0.0.1:7580", NULL, &client, &error) ||
      qkv_client_register_model(client, &model, &error) || qkv_client_open_session(client, &session, &error) ||
      qkv_client_get_page_code(client, "p", NULL, &code, &error)) {
    return fprintf(stderr, "%s\n", error.text), 1;
  }
  size_t capacity = qkv_page_bytes_max(code, 0);
  void *image = malloc(capacity);
  if (image == NULL || qkv_page_encode(code, &rows, image, capacity, &page, &error) ||
      qkv_client_append(client, &item, 1, NULL, &error) ||
      qkv_client_fetch_pages(client, &request, &receiver, &error)) {
    return fprintf(stderr, "%s\n", error.text), 1;
  }
  printf("%d tokens of one page of %zu bytes\n", (int)tokens, page.bytes);
  free(image);
  qkv_page_code_free(&code);
  qkv_client_close_session(client, "p", NULL, NULL);
  qkv_client_close(&client);
}
