#!/usr/bin/env bash
# The Debian packages: what deploy/debian.sh makes passes lintian, installs on a bare Debian 12, runs as a service there
# (boot.sh), and libqkv-dev is enough to build the C program of README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
  echo "packages.sh: $*" >&2
  exit 1
}

(($# == 0)) || fail "takes no argument: as root; needs dpkg-dev, debhelper, lintian, mmdebstrap and systemd-container"
(($(id -u) == 0)) || fail "needs root, for systemd-nspawn"

readonly out=build/debian
deploy/debian.sh --out "$out" >"build/debian.log" 2>&1 || {
  tail -n 30 build/debian.log >&2
  fail "deploy/debian.sh failed, see above"
}
# As root a warning of lintian's own is in the way.
lintian --allow-root --pedantic --fail-on error,warning --suppress-tags bad-distribution-in-changes-file "$out"/*.changes
echo "lintian finds nothing"

readonly folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
sed -n '/^```c$/,/^```$/{/^```/d;p}' README.md >"$folder/readme.c"
[[ -s $folder/readme.c ]] || fail "README.md has no C program"
mmdebstrap --quiet --variant=minbase --include=gcc,libc6-dev,pkg-config bookworm "$folder/root" </dev/null
mkdir "$folder/root/packages"
cp "$out"/libqkv*.deb "$folder/readme.c" "$folder/root/packages"
cp /etc/resolv.conf "$folder/root/etc/resolv.conf"
chroot "$folder/root" sh -ec 'apt-get -q update
  DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install /packages/*.deb
  cc -o /packages/readme /packages/readme.c $(pkg-config --cflags --libs qkv)' >"$folder/log" 2>&1 || {
  tail -n 30 "$folder/log" >&2
  fail "the C program of README.md does not build with libqkv-dev"
}
# No daemon is there: the program says so.
said=$(chroot "$folder/root" /packages/readme 127.0.0.1:1 2>&1) && fail "the C program reaches a daemon where there is none"
[[ $said == *127.0.0.1:1* ]] || fail "the C program says: $said"
echo "the C program of README.md builds with libqkv-dev"

tests/deploy/boot.sh --packages "$out"
