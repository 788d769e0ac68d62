// A start that the power fails in.
#include "tests/fault/moment.h"

// Sanitizers take four times as long for a seed, and cover the same code with each.
#ifdef QKV_SANITIZED
enum { SEEDS = 40 };
#else
enum { SEEDS = 120 };
#endif

// A killed process leaves a record that is not durable. The power fails while the next one seals its segment: what
// the start after that tells of, it can read.
static void sealed_by_a_start(uint64_t seed) {
  moment on;
  piece pieces[2];
  qkv_error ignored = {0};
  begin(&on, seed);
  put(&on, &pieces[0], 0, SMALL);
  assert_int_equal(settle(&on, &pieces[0]), QKV_OK);
  fault_disk_hold(on.disk, true);
  const qkvi_segment *segment = on.storage->segments[0];
  const uint64_t tail_bytes = qkvi_segment_tail_bytes(2);
  // The footer lies at the end of the file before that is cut.
  put(&on, &pieces[1], 1, SEGMENT - tail_bytes - segment->end - sizeof(qkv_record_header));
  while (fault_disk_land(on.disk, QKV_IO_WRITE, 0, 0)) turn(&on);
  assert_true(pieces[1].ended && !pieces[1].settled);
  fault_disk_crash(on.disk);
  fault_disk_hold(on.disk, false);
  qkv_storage_close(&on.storage);
  fault_disk_restart(on.disk, false);
  fault_disk_plan(on.disk, &(fault_plan){.crash_after = 1 + seed % 40});
  if (try_open(&on, 0, &ignored) == QKV_OK) {
    assert_int_equal(on.told, 2);
    fault_disk_crash(on.disk);
    qkv_storage_close(&on.storage);
  } else {
    qkvi_storage_destroy(&on.storage);
  }
  fault_disk_restart(on.disk, true);
  fault_disk_plan(on.disk, &(fault_plan){0});
  open_storage(&on);
  for (size_t i = 0; i < on.told; i++) check(&on, &pieces[i]);
  free_pieces(pieces, 2);
  finish(&on);
}

static void a_start_seals_what_is_durable(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= SEEDS; seed++) sealed_by_a_start(seed);
}

int main(void) {
  FILE *nowhere = fopen("/dev/null", "we");
  if (nowhere != NULL) qkv_log_setup(nowhere, QKV_LOG_ERROR);
  const struct CMUnitTest tests[] = {cmocka_unit_test(a_start_seals_what_is_durable)};
  const int failed = cmocka_run_group_tests(tests, NULL, NULL);
  if (nowhere != NULL) (void)fclose(nowhere);
  return failed;
}
