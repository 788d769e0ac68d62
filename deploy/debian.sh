#!/usr/bin/env bash
# Makes the Debian packages of the commit that is checked out, and the source package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
Usage: deploy/debian.sh [--out DIR] [--help]

Needs a clone of the repository, dpkg-dev, debhelper, and the build dependencies of deploy/debian/control.

  --out DIR   where qkvd, qkvd-tools, libqkv1 and libqkv-dev go (.deb), with the source package (.dsc) and the list of all
              (.changes); build/debian by default
TEXT
}

fail() {
  echo "debian.sh: $*" >&2
  exit 1
}

out=build/debian
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --out) out=${2:?--out needs a directory} && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
for tool in dpkg-buildpackage dh; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install dpkg-dev debhelper"
done
version=$(dpkg-parsechangelog --file deploy/debian/changelog --show-field Version)
grep -q "^project(qkvd VERSION ${version//./\\.} " CMakeLists.txt ||
  fail "deploy/debian/changelog has version $version, CMakeLists.txt another one"

readonly tree=$out/qkvd-$version
rm -rf "$tree"
mkdir -p "$tree"
git archive HEAD | tar -x -C "$tree"
# dpkg wants its directory at the top.
cp -r "$tree/deploy/debian" "$tree/debian"
(cd "$tree" && dpkg-buildpackage --no-sign --build=full)
rm -rf "$tree"
