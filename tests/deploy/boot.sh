#!/usr/bin/env bash
# A Debian 12 that boots with the units of deploy/systemd, in a container of systemd-nspawn: the service starts sandboxed
# and with io_uring, keeps a session over kill -9, and stops cleanly.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

usage() {
  cat <<'TEXT'
Usage: tests/deploy/boot.sh [--bin DIR] [--base TAR] [--help]

As root; needs mmdebstrap, systemd-container and the package mirror.

  --bin DIR    qkvd and qkvctl, build/release/bin by default
  --base TAR   a root as this script makes it with mmdebstrap; made there where it does not exist
TEXT
}

fail() {
  echo "boot.sh: $*" >&2
  exit 1
}

bin=build/release/bin base=
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --bin) bin=${2:?--bin needs a directory} && shift 2 ;;
    --base) base=${2:?--base needs a file} && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
(($(id -u) == 0)) || fail "needs root, for systemd-nspawn"
for tool in mmdebstrap systemd-nspawn; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install mmdebstrap systemd-container"
done

readonly folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
readonly root=$folder/root
base=${base:-$folder/root.tar}
if [[ ! -f $base ]]; then
  mmdebstrap --quiet --variant=minbase --include="systemd,systemd-sysv,$(qkv_packages run | paste -sd,)" bookworm "$base" </dev/null
fi
mkdir "$root"
tar -xf "$base" -C "$root"

install -D -t "$root/usr/bin" "$bin/qkvd" "$bin/qkvctl"
install -D -m 644 -t "$root/etc/systemd/system" deploy/systemd/qkvd.service deploy/systemd/qkvd.socket
install -D -m 644 deploy/systemd/qkvd.yaml "$root/etc/qkvd/qkvd.yaml"
install -D -m 644 deploy/systemd/qkvd.sysusers "$root/usr/lib/sysusers.d/qkvd.conf"
for unit in sockets.target.wants/qkvd.socket multi-user.target.wants/qkvd.service multi-user.target.wants/check.service; do
  mkdir -p "$root/etc/systemd/system/${unit%/*}"
  ln -s "../${unit#*/}" "$root/etc/systemd/system/$unit"
done
# The check is a unit, too: what it says is the container's result.
cat >"$root/etc/systemd/system/check.service" <<'UNIT'
[Unit]
After=qkvd.service
SuccessAction=exit
FailureAction=exit
FailureActionExitStatus=1
[Service]
Type=oneshot
StandardOutput=truncate:/result
StandardError=inherit
ExecStart=/check
UNIT
cat >"$root/check" <<'CHECK'
#!/bin/bash
set -euo pipefail
trap 'echo "failed at line $LINENO"; journalctl --no-pager -u qkvd.service | tail -n 30' ERR
pid() { systemctl show -P MainPID qkvd.service; }
ctl() { qkvctl --target unix:/run/qkvd.sock "$@"; }
systemctl is-active qkvd.service
[[ $(stat -c %u /proc/"$(pid)") != 0 ]]
[[ $(stat -c '%a %G' /run/qkvd.sock) == "660 qkvd-clients" ]]
ctl status
ctl storage
journalctl -u qkvd.service -o cat | grep '"storage is open","io":"uring"'
old=$(pid)
kill -9 "$old"
ctl status >/dev/null # waits on systemd's socket
[[ $(pid) != "$old" ]]
echo "serves again after kill -9"
systemctl restart qkvd.service
[[ $(systemctl show -P Result qkvd.service) == success ]]
systemctl stop qkvd.service
journalctl -u qkvd.service -o cat | grep -c '"message":"stopped"'
echo passed
CHECK
chmod +x "$root/check"
touch "$root/result"
status=0
timeout 300 systemd-nspawn --quiet --boot --directory="$root" --register=no --keep-unit --private-network \
  >"$folder/console" 2>&1 </dev/null || status=$?
cat "$root/result"
if ((status != 0)) || ! grep -qx passed "$root/result"; then
  tail -n 30 "$folder/console" >&2
  fail "the boot ended with $status, see above"
fi
