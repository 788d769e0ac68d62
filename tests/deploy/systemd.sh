#!/usr/bin/env bash
# The units as systemd reads them: no warning of systemd-analyze verify, and an exposure of 1.5 at most.
set -euo pipefail
readonly here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
readonly units=$here/../../deploy/systemd
readonly exposure_max=15 # tenths

if [[ ${1:-} == --help || $# -ne 1 ]]; then
  echo "Usage: tests/deploy/systemd.sh QKVD"
  echo "Checks deploy/systemd with systemd-analyze; QKVD, the daemon, stands for the one of the installation."
  [[ ${1:-} == --help ]] && exit 0
  exit 2
fi
command -v systemd-analyze >/dev/null || {
  echo "skipped: no systemd-analyze"
  exit 77
}
readonly qkvd=$(readlink -f "$1")
readonly folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() {
  echo "systemd.sh: $*" >&2
  exit 1
}

sed "s|/usr/bin/qkvd|$qkvd|" "$units/qkvd.service" >"$folder/qkvd.service"
cp "$units/qkvd.socket" "$folder"
said=$(systemd-analyze verify --man=no "$folder/qkvd.service" "$folder/qkvd.socket" 2>&1) || fail "verify: $said"
# It warns of other units of the machine, too.
if grep -E 'qkvd\.(service|socket)' <<<"$said"; then fail "verify warns, see above"; fi
systemd-analyze security --offline=true --no-pager --threshold="$exposure_max" "$folder/qkvd.service" \
  >"$folder/security" 2>&1 || {
  cat "$folder/security" >&2
  fail "exposed more than $exposure_max tenths"
}
tail -n 1 "$folder/security"
