// A disk in memory that does what disks do: a driver of storage/io.h with latency, short results, errors, damage, and
// crashes, all drawn from one seed.
//
//   write ──► in flight ──► done: in the file, not durable ──► fdatasync ──► durable
//
// At a crash each 512 bytes of what was not durable may be there or not, whatever was written later.
//
// Names become durable by sync_directory; at a power cut a beginning of what was done since then is. A killed process
// loses only what was in flight. What the disk damages by itself it counts, so that a test knows when DATA_LOSS may
// be.
//
// Threads: one. Nothing but the seed decides.
#ifndef QKV_TESTS_FAULT_DISK_H
#define QKV_TESTS_FAULT_DISK_H

#include <stdbool.h>
#include <stdint.h>

#include "storage/io.h"

typedef struct fault_disk fault_disk;

// Probabilities of a request.
typedef struct fault_plan {
  double shorter;                                          // does a part
  double interrupted;                                      // EINTR, EAGAIN
  double write_error, read_error, sync_error, name_error;  // EIO
  double directory_error;                                  // EIO of the directory's sync, beside name_error
  double segment_error;                                    // EIO of a read of a segment, beside read_error
  double full;                                             // ENOSPC of an allocation
  double flip;                                             // a bit of what was written is another
  double lost;                                             // a write says that it was done, and was not
  double misdirected;                                      // it goes to another block of the file
  double stale_read;                                       // a bit of what was read is another, this once
  uint64_t crash_after;                                    // requests and names; 0: none
} fault_plan;

fault_disk *fault_disk_create(uint64_t seed);
void fault_disk_destroy(fault_disk **disk);

// For a loop and the io over it, which gets the driver; once for every run between crashes.
qkv_io *fault_disk_attach(fault_disk *disk, uv_loop_t *loop, unsigned depth);

void fault_disk_plan(fault_disk *disk, const fault_plan *plan);
// Held, nothing lands by itself. fault_disk_land lets one request of a kind land, the oldest behind `skip` others,
// with `error` (an errno) or as the plan says. false: there is none.
void fault_disk_hold(fault_disk *disk, bool held);
bool fault_disk_land(fault_disk *disk, qkv_io_kind kind, size_t skip, int error);

// Dead from now on: every request fails, nothing changes any more.
void fault_disk_crash(fault_disk *disk);
bool fault_disk_crashed(const fault_disk *disk);
// After the io has been destroyed: decides what is left, with or without power, and lives again.
void fault_disk_restart(fault_disk *disk, bool power_cut);

// Durable bytes that the disk has damaged, ever: of segments, and of anything else.
uint64_t fault_disk_damaged_segments(const fault_disk *disk);
uint64_t fault_disk_damaged_journal(const fault_disk *disk);

// The generator, for tests: in [0, bound), and whether something with that probability happens.
uint64_t fault_disk_random(fault_disk *disk, uint64_t bound);
bool fault_disk_chance(fault_disk *disk, double probability);

// The bytes of a file as they are, or NULL; for damage by hand.
uint8_t *fault_disk_bytes(fault_disk *disk, const char *name, uint64_t *size);

#endif
