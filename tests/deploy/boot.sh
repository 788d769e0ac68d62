#!/usr/bin/env bash
# A Debian 12 that boots with the units of deploy/systemd, in a container of systemd-nspawn: the service starts sandboxed
# and with io_uring, has the sessions of a data directory that was there, keeps the rows of new ones (sync, and async whose
# pages are full) over kill -9 and a restart, is reloaded, has no open port until it serves mutual TLS, with a key that its user cannot read, and stops.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

usage() {
  cat <<'TEXT'
Usage: tests/deploy/boot.sh [--bin DIR | --packages DIR] [--base TAR] [--help]

As root; needs mmdebstrap, systemd-container and the package mirror.

  --bin DIR       qkvd and qkvctl, build/release/bin by default
  --packages DIR  the Debian packages of deploy/debian.sh in their place: installed, upgraded while calls come, and purged
  --base TAR      a root as this script makes it with mmdebstrap; made there where it does not exist
TEXT
}

fail() {
  echo "boot.sh: $*" >&2
  exit 1
}

bin=build/release/bin base= packages=
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --bin) bin=${2:?--bin needs a directory} && shift 2 ;;
    --packages) packages=${2:?--packages needs a directory} && shift 2 ;;
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

install_files() {
  install -D -t "$root/usr/bin" "$bin/qkvd" "$bin/qkvctl"
  install -D -m 644 -t "$root/etc/systemd/system" deploy/systemd/qkvd.service deploy/systemd/qkvd.socket
  install -D -m 644 deploy/systemd/qkvd.yaml "$root/etc/qkvd/qkvd.yaml"
  install -D -m 644 deploy/systemd/qkvd.sysusers "$root/usr/lib/sysusers.d/qkvd.conf"
  for unit in sockets.target.wants/qkvd.socket multi-user.target.wants/qkvd.service; do
    mkdir -p "$root/etc/systemd/system/${unit%/*}"
    ln -s "../${unit#*/}" "$root/etc/systemd/system/$unit"
  done
}

# By apt, with what the packages depend on. /packages stays there for the upgrade.
install_packages() {
  mkdir "$root/packages"
  cp "$packages"/qkvd_*.deb "$packages"/qkvd-tools_*.deb "$root/packages"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  chroot "$root" sh -c 'apt-get -q update && DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install /packages/*.deb' \
    >"$folder/apt" 2>&1 || { tail -n 30 "$folder/apt" >&2; fail "apt-get failed, see above"; }
}

if [[ -n $packages ]]; then install_packages; else install_files; fi
# Sessions with rows, and a model, to make others of.
mkdir -p "$root/var/lib/private/qkvd"
tar -xf tests/golden/data-directory_0.1.0.tar.xz -C "$root/var/lib/private/qkvd" --strip-components=1 data
deploy/compose/authority.sh --dir "$root/etc/qkvd/tls" --operator root >/dev/null
chown -R 0:0 "$root/etc/qkvd/tls"
install -m 644 -t "$root/etc/qkvd" deploy/systemd/tls.conf deploy/systemd/tcp.conf
mkdir -p "$root/etc/systemd/system/multi-user.target.wants"
ln -s ../check.service "$root/etc/systemd/system/multi-user.target.wants/check.service"
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
trap 'echo "failed: $BASH_COMMAND"; journalctl --no-pager -u qkvd.service | tail -n 30' ERR
pid() { systemctl show -P MainPID qkvd.service; }
ctl() { qkvctl "$@" --target unix:/run/qkvd.sock; }
systemctl is-active qkvd.service
[[ $(stat -c %u /proc/"$(pid)") != 0 ]]
[[ $(stat -c '%a %G' /run/qkvd.sock) == "660 qkvd-clients" ]]
ctl status
ctl storage
journalctl -u qkvd.service -o cat | grep '"storage is open","io":"uring"'
qkvd --check-health --admin-listen unix:/run/qkvd/admin.sock
for port in 7580 7581; do
  if : </dev/tcp/127.0.0.1/$port; then false; fi
done 2>/dev/null
echo "no port is open"

# Rows of the sessions that were there, in new ones of both durabilities.
for durability in sync async; do
  ctl fetch async-4 --output /tmp/rows.safetensors
  ctl load /tmp/rows.safetensors --session "$durability" --durability "$durability"
done
durable() { ctl session async --json | grep -q '"durable": *\[64, *64\]'; }
for _ in {1..300}; do if durable; then break; fi; sleep 0.1; done
durable || { ctl session async --json; false; }
ctl truncate async 64
for session in sync async; do ctl fetch "$session" --output "/tmp/$session.before"; done
same() {
  local session
  for session in sync async; do
    ctl fetch "$session" --output "/tmp/$session.after"
    cmp "/tmp/$session.before" "/tmp/$session.after"
    rm "/tmp/$session.after"
  done
}
old=$(pid)
kill -9 "$old"
ctl status >/dev/null # waits on systemd's socket
[[ $(pid) != "$old" ]]
same
echo "rows are there after kill -9"
systemctl stop qkvd.service
[[ $(systemctl show -P Result qkvd.service) == success ]]
systemctl start qkvd.service
same
echo "rows are there after a stop and a start"

mv /var/log/qkvd/audit.log /var/log/qkvd/audit.log.1
systemctl reload qkvd.service
for _ in {1..100}; do if [[ -e /var/log/qkvd/audit.log ]]; then break; fi; sleep 0.1; done
ctl storage verify >/dev/null
grep -q VerifyStorage /var/log/qkvd/audit.log || { cat /var/log/qkvd/audit.log*; false; }
echo "reloaded"

# An upgrade: the service is another process and the sockets are the same. A call that came as the old process stopped
# reads so, and succeeds when it is repeated.
if [[ -d /packages ]]; then
  old=$(pid)
  since=$(systemctl show -P ActiveEnterTimestampMonotonic qkvd.socket)
  : >/tmp/ended
  call() {
    ctl status >/dev/null 2>/tmp/said && return
    cat /tmp/said >>/tmp/ended
    ctl status >/dev/null
  }
  (while [[ ! -e /tmp/enough ]]; do call || echo failed; done >/tmp/calls 2>&1) &
  dpkg -i /packages/*.deb
  touch /tmp/enough
  wait
  [[ $(pid) != "$old" && $(systemctl show -P ActiveEnterTimestampMonotonic qkvd.socket) == "$since" ]]
  [[ ! -s /tmp/calls ]] || { cat /tmp/calls; false; }
  if grep -v "has ended the call, as it does when it stops\|draining: the daemon is about to stop\|the connection to .* is gone" /tmp/ended; then false; fi
  same
  echo "upgraded, calls repeated: $(wc -l </tmp/ended)"
fi

# TCP: what docs/operations.md says.
token=$(qkvctl token new '*' --roles read --json)
sed -n 's/.*"line": *"\([^"]*\)".*/\1/p' <<<"$token" >>/etc/qkvd/tls/daemon/clients
token=$(sed -n 's/.*"token": *"\([^"]*\)".*/\1/p' <<<"$token")
install -D -m 644 /etc/qkvd/tcp.conf /etc/systemd/system/qkvd.socket.d/tcp.conf
install -D -m 644 /etc/qkvd/tls.conf /etc/systemd/system/qkvd.service.d/tls.conf
sed -i 's/^#  - 127/  - 127/; s/^admin-listen:.*/admin-listen: 127.0.0.1:7581\nadmin-auth: true/' /etc/qkvd/qkvd.yaml
systemctl daemon-reload
systemctl stop qkvd.service qkvd.socket
systemctl start qkvd.socket qkvd.service
tcp() { qkvctl "$@" --target 127.0.0.1:7580 --tls-ca /etc/qkvd/tls/authority.pem; }
tcp session sync --tls-cert /etc/qkvd/tls/root.pem --tls-key /etc/qkvd/tls/root.key
if tcp session sync --timeout 2s 2>/dev/null; then false; fi
if qkvctl session sync --target 127.0.0.1:7580 --timeout 2s 2>/dev/null; then false; fi
metrics() {
  exec 3<>/dev/tcp/127.0.0.1/7581
  printf 'GET /metrics HTTP/1.0\r\nHost: localhost\r\n%s\r\n' "${1:+Authorization: Bearer $1$'\r\n'}" >&3
  cat <&3
}
metrics "$token" | grep -x 'qkvd_ready 1'
if metrics | grep qkvd_ready; then false; fi
same
echo "serves TLS"
systemctl stop qkvd.service
[[ $(systemctl show -P Result qkvd.service) == success ]]
journalctl -u qkvd.service -o cat | grep -c '"message":"stopped"'
if [[ -d /packages ]]; then
  DEBIAN_FRONTEND=noninteractive apt-get -q -y purge qkvd qkvd-tools
  [[ ! -e /usr/bin/qkvd && ! -e /etc/qkvd/qkvd.yaml && ! -e /var/lib/private/qkvd && ! -e /var/log/private/qkvd ]]
  [[ ! -e /run/qkvd.sock ]]
  echo "purged"
fi
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
