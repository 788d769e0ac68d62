// A simulated disk in memory: a driver of storage/io.h with latency, short results, errors, damage, and crashes, all
// drawn from one seed.
//
//   write ──► in flight ──► done: in the file, not durable ──► fdatasync ──► durable
//
// At a crash each sector of 512 bytes that was not durable may be written or not, regardless of the order of writes.
//
// Names become durable by sync_directory; at a power cut a prefix of the changes since then is durable. A killed
// process loses only requests in flight. The disk counts the damage that it does, so that a test knows when DATA_LOSS
// is allowed.
//
// Threads: one. The seed alone decides.
#ifndef QKV_TESTS_FAULT_DISK_H
#define QKV_TESTS_FAULT_DISK_H

#include <stdbool.h>
#include <stdint.h>

#include "storage/io.h"

typedef struct fault_disk fault_disk;

// Probabilities of a request.
typedef struct fault_plan {
  double shorter;                                          // a short result
  double interrupted;                                      // EINTR, EAGAIN
  double write_error, read_error, sync_error, name_error;  // EIO
  double directory_error;                                  // EIO of the directory's sync, in addition to name_error
  double segment_error;                                    // EIO of a read of a segment, in addition to read_error
  double full;                                             // ENOSPC of an allocation
  double flip;                                             // a written bit is flipped
  double lost;                                             // a write reports success, and was not done
  double misdirected;                                      // it goes to another block of the file
  double stale_read;                                       // a bit of one read is flipped, only this once
  uint64_t crash_after;                                    // requests and names; 0: none
} fault_plan;

fault_disk *fault_disk_create(uint64_t seed);
void fault_disk_destroy(fault_disk **disk);

// Creates an io with this disk as its driver, on a loop; once for every run between crashes.
qkv_io *fault_disk_attach(fault_disk *disk, uv_loop_t *loop, unsigned depth);

void fault_disk_plan(fault_disk *disk, const fault_plan *plan);
// While held, no request completes by itself. fault_disk_land completes one request of a kind, the oldest behind
// `skip` others, with `error` (an errno) or as the plan says. false: there is none.
void fault_disk_hold(fault_disk *disk, bool held);
bool fault_disk_land(fault_disk *disk, qkv_io_kind kind, size_t skip, int error);

// From now on every request fails and nothing changes.
void fault_disk_crash(fault_disk *disk);
bool fault_disk_crashed(const fault_disk *disk);
// After the io has been destroyed: decides what survives, with or without a power cut, and works again.
void fault_disk_restart(fault_disk *disk, bool power_cut);

// Durable bytes that the disk has damaged since its creation: of segments, and of other files.
uint64_t fault_disk_damaged_segments(const fault_disk *disk);
uint64_t fault_disk_damaged_journal(const fault_disk *disk);

// The generator, for tests: in [0, bound), and whether something with that probability happens.
uint64_t fault_disk_random(fault_disk *disk, uint64_t bound);
bool fault_disk_chance(fault_disk *disk, double probability);

// The current bytes of a file, or NULL; for a test that damages them itself.
uint8_t *fault_disk_bytes(fault_disk *disk, const char *name, uint64_t *size);

#endif
