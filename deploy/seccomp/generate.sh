#!/usr/bin/env bash
# Writes deploy/seccomp/qkvd.json, the seccomp profile for containers that allows io_uring: systemd's set @system-service,
# which qkvd.service has, too, with io_uring and what an OCI runtime calls before it starts the program, and without keys
# and namespaces, which a container has no use for. Needs systemd (systemd-analyze) of Debian 12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  echo "Usage: deploy/seccomp/generate.sh [--help]"
}

case "${1:-}" in
  --help | -h) usage && exit 0 ;;
  "") ;;
  *) usage >&2 && exit 2 ;;
esac

names() { # set
  local name
  systemd-analyze syscall-filter "$1" | tail -n +2 | while read -r name _; do
    case $name in
      @*) names "$name" ;;
      "#"* | "") ;;
      *) echo "$name" ;;
    esac
  done
}

{
  names @system-service
  printf '%s\n' io_uring_setup io_uring_enter io_uring_register
  # The runtime's, after the profile is in force.
  printf '%s\n' close_range execveat faccessat2 openat2 pidfd_open pidfd_send_signal prctl seccomp statx
} | grep -vxE 'add_key|keyctl|request_key|unshare|setns|userfaultfd' | sort -u | python3 -c '
import json, sys

profile = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 1,
    "archMap": [
        {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": []},
        {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": []},
    ],
    "syscalls": [{"names": sys.stdin.read().split(), "action": "SCMP_ACT_ALLOW"}],
}
json.dump(profile, sys.stdout, indent=2)
print()
' >qkvd.json
