# Programs for 64-bit ARM run on this machine as they are: the kernel starts qemu for them (binfmt_misc). As root, with
# Debian's qemu-user-static. Sourced, not run:
#
#   . tests/deploy/emulation.sh
#   emulation_begin    # nothing where it is set up already
#   emulation_end      # takes back what emulation_begin has done
#
# Programs with shared libraries need QEMU_LD_PREFIX, the root that has theirs, or a root of their own.
#
# shellcheck shell=bash

emulation_registered=
emulation_begin() {
  local kernel=/proc/sys/fs/binfmt_misc
  [[ -e $kernel/status ]] || mount -t binfmt_misc binfmt_misc "$kernel"
  [[ ! -e $kernel/qemu-aarch64 ]] || return 0
  [[ $(dpkg --print-architecture) != arm64 ]] || return 0
  cat /usr/lib/binfmt.d/qemu-aarch64.conf >"$kernel/register"
  emulation_registered=1
}

emulation_end() {
  [[ -z $emulation_registered ]] || echo -1 >/proc/sys/fs/binfmt_misc/qemu-aarch64
  emulation_registered=
}
