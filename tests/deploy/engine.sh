#!/usr/bin/env bash
# deploy/compose by Docker's own engine, in network and mounts of its own: the image that image.sh has built, with Prometheus.
# Two tenants attend from Python by their certificates, Prometheus has their figures and the alert rules, and sessions are
# there after all containers were stopped and made anew. Grafana is not started: no Debian package has it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/deploy/engine.sh [--bin DIR] [--help]

As root; needs docker.io, docker-compose, prometheus, python3-venv, pip, and the image localhost/qkvd:scratch of buildah.

  --bin DIR   has qkvctl, build/release/bin by default
TEXT
}

fail() {
  echo "engine.sh: $*" >&2
  exit 1
}

bin=$PWD/build/release/bin
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --bin) bin=$(realpath "${2:?--bin needs a directory}") && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
folder=$(mktemp -d)
readonly folder
readonly compose=$folder/deploy/compose
export DOCKER_HOST=unix://$folder/socket PROMETHEUS_IMAGE=prometheus:debian
engine=
# Compose 1.29 takes a seccomp profile's path as from where it is called.
composed() { (cd "$compose" && docker-compose --ansi never -p qkvd -f first.yaml "$@"); }
end() {
  if [[ -n $engine ]]; then
    composed down -v >/dev/null 2>&1 || true
    kill "$engine" 2>/dev/null || true
    wait "$engine" 2>/dev/null || true
  fi
  rm -rf "$folder"
}
trap end EXIT

unshare -n -m sh -c 'ip link set lo up && exec dockerd --data-root "$0/data" --exec-root "$0/exec" --pidfile "$0/pid" -H "unix://$0/socket" \
  --exec-opt native.cgroupdriver=cgroupfs' "$folder" >"$folder/engine.log" 2>&1 &
engine=$!
for _ in {1..600}; do if docker version >/dev/null 2>&1; then break; fi; sleep 0.1; done
docker version >/dev/null 2>&1 || { tail -n 20 "$folder/engine.log" >&2; fail "dockerd does not start"; }
here() { nsenter -t "$(cat "$folder/pid")" -n "$@"; }

buildah push -q localhost/qkvd:scratch "docker-archive:$folder/image.tar:qkvd:scratch" >/dev/null
docker load -q -i "$folder/image.tar" >/dev/null
# Debian's Prometheus with its libraries.
deploy/closure.sh "$folder/prometheus" "$folder/list" /usr/bin/prometheus
install -D -t "$folder/prometheus/usr/bin" /usr/bin/prometheus
install -d -m 777 "$folder/prometheus/prometheus"
tar -c -C "$folder/prometheus" . | docker import --change 'ENTRYPOINT ["/usr/bin/prometheus"]' --change 'USER 65534' - prometheus:debian >/dev/null
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ./client/python

cp -r deploy "$folder"
rm -rf "$compose/tls" "$compose/.env"
begin=$SECONDS
"$compose/up.sh" --dry-run --memory-budget-mib 256 --operator root >/dev/null
# Debian has Compose 1.29, which takes the project's name as an option alone.
sed '/^name:/d' "$compose/compose.yaml" >"$compose/first.yaml"
up() {
  composed up -d qkvd prometheus >"$folder/up.log" 2>&1 || { cat "$folder/up.log" >&2; fail "compose up failed"; }
  for _ in {1..600}; do
    if [[ $(docker inspect -f '{{.State.Health.Status}}' qkvd_qkvd_1) == healthy ]]; then return; fi
    sleep 0.1
  done
  docker logs qkvd_qkvd_1 >&2
  fail "qkvd is not healthy"
}
up
docker logs qkvd_qkvd_1 2>&1 | grep '"storage is open","io":"uring"' >/dev/null || fail "no io_uring with the profile that is shipped"
ctl() { # client command...
  local client=$1
  shift
  here "$bin/qkvctl" "$@" --target localhost:7580 --tls-ca "$compose/tls/authority.pem" --tls-cert "$compose/tls/$client.pem" \
    --tls-key "$compose/tls/$client.key"
}
ctl root quota set team-b sessions=1000 >/dev/null
for worker in worker-a worker-b; do
  here "$folder/venv/bin/python" docs/examples/tenant.py localhost:7580 "$compose/tls" "$worker" | grep "^$worker (1, 8, 64) length 100$"
done
if here "$bin/qkvctl" sessions --target localhost:7580 --tls-ca "$compose/tls/authority.pem" --timeout 2s 2>/dev/null; then
  fail "a client without a certificate is served"
fi
asked() { # path text...: does the answer of Prometheus have the text
  local address
  address=$(docker inspect -f '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' qkvd_prometheus_1)
  here curl --silent --get "${@:3}" "http://$address:9090/api/v1/$1" | grep -q "$2"
}
figures() { asked query '"1000"' --data-urlencode 'query=qkvd_tenant_quota_limit{tenant="team-b",resource="sessions"}'; }
for _ in {1..120}; do if figures; then break; fi; sleep 0.5; done
figures || fail "Prometheus has nothing of team-b"
asked rules QkvdStorageDegraded || fail "Prometheus has no alert rules"
echo "two tenants attend, and Prometheus has their figures: $((SECONDS - begin)) s"

composed stop >/dev/null 2>&1
[[ $(docker inspect -f '{{.State.ExitCode}}' qkvd_qkvd_1) == 0 ]] || fail "qkvd does not end with 0 when it is stopped"
composed rm -f >/dev/null 2>&1
up
for team in a b; do
  ctl "worker-$team" session chat --json | grep -q "\"tenant\": *\"team-$team\"" || fail "the session of team-$team is gone"
done
echo "engine: passed"
