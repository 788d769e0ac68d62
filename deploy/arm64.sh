#!/usr/bin/env bash
# Builds qkvd for 64-bit ARM on another machine, against Debian 12's libraries for it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

usage() {
  cat <<'TEXT'
Usage: deploy/arm64.sh [--target NAME]... [--help]

Needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, mmdebstrap, the packages of a build for this machine, and the package
mirror. Debian's libraries for arm64 are put in build/arm64-root, once; programs go to build/arm64/bin.

  --target NAME  what is built; qkvd, qkvctl, qkv-worker, qkv-bench and qkv_shared by default; `all` has the tests, too
TEXT
}

fail() {
  echo "arm64.sh: $*" >&2
  exit 1
}

targets=()
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --target) targets+=("${2:?--target needs a name}") && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
((${#targets[@]} > 0)) || targets=(qkvd qkvctl qkv-worker qkv-bench qkv_shared)
for tool in aarch64-linux-gnu-gcc mmdebstrap cmake; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross mmdebstrap"
done

readonly root=$PWD/build/arm64-root
readonly libraries=usr/lib/aarch64-linux-gnu
# Packages are unpacked, not configured: nothing of theirs runs, and no chroot is needed, which containers may forbid. What
# their scripts would do follows below.
if [[ ! -e $root/made ]]; then
  rm -rf "$root"
  mkdir -p build
  mapfile -t packages < <(qkv_packages build | grep -E '^lib|^uthash-dev$|^protobuf-compiler')
  mmdebstrap --quiet --mode=chrootless --architectures=arm64 --variant=extract --include="$(IFS=, && echo "${packages[*]}")" \
    bookworm "$root" </dev/null
  # Links to absolute paths mean the root's.
  while read -r link; do
    to=$(readlink "$link")
    if [[ $to == /* && -e $root$to ]]; then ln -sfr "$root$to" "$link"; fi
  done < <(find "$root/$libraries" -maxdepth 1 -xtype l)
  # Debian's alternatives.
  for name in libopenblas.so libopenblas.so.0; do ln -sf "openblas-pthread/$name" "$root/$libraries/$name"; done
  touch "$root/made"
fi

export PKG_CONFIG_SYSROOT_DIR=$root
export PKG_CONFIG_LIBDIR=$root/$libraries/pkgconfig:$root/$libraries/openblas-pthread/pkgconfig:$root/usr/share/pkgconfig
cmake -S . -B build/arm64 -G Ninja -D CMAKE_BUILD_TYPE=Release \
  -D CMAKE_SYSTEM_NAME=Linux -D CMAKE_SYSTEM_PROCESSOR=aarch64 -D CMAKE_LIBRARY_ARCHITECTURE=aarch64-linux-gnu \
  -D CMAKE_C_COMPILER=aarch64-linux-gnu-gcc -D CMAKE_SYSROOT="$root" -D CMAKE_FIND_ROOT_PATH="$root" \
  -D CMAKE_FIND_ROOT_PATH_MODE_PROGRAM=NEVER -D CMAKE_FIND_ROOT_PATH_MODE_LIBRARY=ONLY \
  -D CMAKE_FIND_ROOT_PATH_MODE_INCLUDE=ONLY -D CMAKE_FIND_ROOT_PATH_MODE_PACKAGE=ONLY \
  -D CMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;$root" -D QKV_CUDA=OFF >build/arm64.configure.log 2>&1 || {
  tail -n 20 build/arm64.configure.log >&2
  fail "cmake failed, see above"
}
cmake --build build/arm64 --parallel "$(nproc)" --target "${targets[@]}" -- --quiet -k 0
