#!/usr/bin/env bash
# Builds both images of deploy/Containerfile, and runs each with a read-only root, without capabilities and as a user
# without rights: it serves, is healthy, keeps a session over a restart, says that io_uring is forbidden where it is,
# drains on SIGTERM, and is no larger than asked.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/deploy/image.sh [--base IMAGE] [--help]

As root; needs buildah, podman, runc, mmdebstrap and the package mirror.

  --base IMAGE   what the images are made from; made by mmdebstrap as localhost/qkvd-base where it does not exist
TEXT
}

fail() {
  echo "image.sh: $*" >&2
  exit 1
}

base=localhost/qkvd-base
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --base) base=${2:?--base needs an image} && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
for tool in buildah podman runc mmdebstrap; do
  command -v "$tool" >/dev/null || fail "$tool is missing: apt-get install buildah podman runc mmdebstrap"
done
# Works inside of a container, too.
export BUILDAH_ISOLATION=chroot
readonly folder=$(mktemp -d)
name=
end() {
  [[ -z $name ]] || podman rm -f "$name" >/dev/null 2>&1 || true
  rm -rf "$folder"
}
trap end EXIT

if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
  mmdebstrap --quiet --variant=minbase bookworm "$folder/base.tar" </dev/null
  made=$(buildah from scratch)
  buildah add -q "$made" "$folder/base.tar" / >/dev/null
  buildah commit -q --rm "$made" "$base" >/dev/null
  rm "$folder/base.tar"
fi

# One state of the sources for both: the second takes the first one's build from the cache.
mkdir "$folder/context"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$folder/context"

build() { # target
  SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) buildah bud --quiet --layers --format docker --target "$1" \
    --timestamp "$(git log -1 --format=%ct)" --build-arg BASE="$base" --build-arg REVISION="$(git rev-parse HEAD)" \
    --ignorefile deploy/Containerfile.dockerignore -f deploy/Containerfile -t "localhost/qkvd:$1" "$folder/context" \
    >"$folder/build.log" 2>&1 || {
    tail -n 40 "$folder/build.log" >&2
    fail "the image $1 was not built, see above"
  }
}

# runc, and few enough descriptors: crun wants cgroups of one kind, and podman's own limits need CAP_SYS_RESOURCE.
run() { # image [option...]
  local image=$1
  shift
  podman --runtime runc --cgroup-manager cgroupfs run -d --name "$name" --network host --read-only --cap-drop all \
    --security-opt no-new-privileges --ulimit nofile=10000:10000 --ulimit nproc=1000:1000 -m 512m \
    -v "$folder/data-$name:/var/lib/qkvd" -e QKVD_LISTEN="127.0.0.1:$port" -e QKVD_TARGET="127.0.0.1:$port" \
    -e QKVD_ALLOW_ANONYMOUS=all "$@" "localhost/qkvd:$image" --memory-budget 256MiB >/dev/null
}

in_it() {
  podman --runtime runc --cgroup-manager cgroupfs exec "$name" "$@"
}

wait_ready() {
  local i
  for ((i = 0; i < 600; i++)); do
    if podman logs "$name" 2>&1 | grep -q '"message":"ready"'; then return; fi
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
  podman logs "$name" 2>&1 | grep -q '"message":"stopped"' || fail "qkvd in $name did not say that it stopped"
  podman rm "$name" >/dev/null
}

check() { # image MEGABYTES
  local bytes
  bytes=$(podman image inspect -f '{{.Size}}' "localhost/qkvd:$1")
  echo "$1: $((bytes / 1000000)) MB"
  ((bytes <= $2 * 1000000)) || fail "$1 is larger than $2 MB"
  [[ $(podman image inspect -f '{{.Config.User}}' "localhost/qkvd:$1") == 7580:7580 ]] || fail "$1 does not run as 7580"
  name=qkvd-test-$1
  port=$((20000 + RANDOM % 10000))
  podman rm -f "$name" >/dev/null 2>&1 || true
  mkdir "$folder/data-$name"
  chown 7580:7580 "$folder/data-$name"
  run "$1"
  wait_ready
  podman --runtime runc --cgroup-manager cgroupfs healthcheck run "$name" || fail "$1 is not healthy"
  grep -q '^Uid:[[:space:]]*7580' "/proc/$(podman inspect -f '{{.State.Pid}}' "$name")/status" ||
    fail "$1 does not run as user 7580"
  in_it /usr/bin/qkvctl put-object kept /etc/passwd
  podman logs "$name" 2>&1 | grep '"storage is open"'
  stop
  run "$1"
  wait_ready
  in_it /usr/bin/qkvctl objects | grep -q kept || fail "$1 lost what was kept over a restart"
  stop
  name=
}

build scratch
build debian
check scratch 80
check debian 260
echo "image: passed"
