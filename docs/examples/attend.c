#include <qkv.h>
#include <stdio.h>

static float k[100 * 2 * 64], v[100 * 2 * 64], q[8 * 64];  // a model's rows; here zeros

int main(int argc, char **argv) {
  qkv_client *client;
  qkv_call_error error;
  qkv_client_result result;
  qkv_client_model model = {"small",       .layers = 1,     .kv_heads = 2, .q_heads = 8,
                            .key_dim = 64, .value_dim = 64, .dtype = 2};
  qkv_session_options session = {.session = "c", .model = "small"};
  qkv_client_item rows = {.session = "c",
                          .k = {QKV_CLIENT_FP32, 3, {100, 2, 64}, .data = k, .bytes = sizeof k},
                          .v = {QKV_CLIENT_FP32, 3, {100, 2, 64}, .data = v, .bytes = sizeof v}};
  qkv_client_item query = {
      .session = "c", .position = 99, .q = {QKV_CLIENT_FP32, 3, {1, 8, 64}, .data = q, .bytes = sizeof q}};
  if (qkv_client_connect(argc > 1 ? argv[1] : "127.0.0.1:7580", NULL, &client, &error) ||
      qkv_client_register_model(client, &model, &error) || qkv_client_open_session(client, &session, &error) ||
      qkv_client_append(client, &rows, 1, NULL, &error) || qkv_client_attend(client, &query, 1, &result, &error)) {
    return fprintf(stderr, "%s\n", error.text), 1;
  }
  printf("[1, 8, %zu] length %d\n", result.out_count / 8, (int)result.length);
  qkv_client_results_free(&result, 1);
  qkv_client_close_session(client, "c", NULL, NULL);
  qkv_client_close(&client);
}
