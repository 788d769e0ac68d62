#!/usr/bin/env bash
# Runs the commands of "In ten commands" of docs/operations.md as they stand there, in one shell, and asks the daemon and
# Prometheus whether both tenants have what they should.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/deploy/commands.sh [--fresh] [--help]

Needs ports 7580, 7581 and 9090, and /tmp/kv, which it removes.

  --fresh   in a bare Debian 12, which mmdebstrap makes and systemd-nspawn starts, in a copy of the sources without anything
            built: the time is that of a new machine; as root
TEXT
}

fail() {
  echo "commands.sh: $*" >&2
  exit 1
}

fresh=
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --fresh) fresh=1 && shift ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done

if [[ -n $fresh ]]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  mmdebstrap --quiet --variant=minbase --include=ca-certificates bookworm "$folder/root" </dev/null
  mkdir "$folder/root/qkvd"
  git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$folder/root/qkvd"
  # Where packages of apt and pip come from is this machine's business.
  cp /etc/resolv.conf "$folder/root/etc/resolv.conf"
  echo "127.0.0.1 localhost" >"$folder/root/etc/hosts" # as the installer does
  cp /etc/ssl/certs/ca-certificates.crt "$folder/root/etc/ssl/certs/ca-certificates.crt"
  [[ ! -e /etc/pip.conf ]] || cp /etc/pip.conf "$folder/root/etc/pip.conf"
  systemd-nspawn --quiet --directory="$folder/root" --register=no --keep-unit --pipe --chdir=/qkvd tests/deploy/commands.sh </dev/null
  exit
fi

for port in 7580 7581 9090; do
  if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then fail "port $port is in use"; fi
done
[[ ! -e /tmp/kv ]] || fail "/tmp/kv is there already"
block=$(sed -n '/^## In ten commands/,/^## [^I]/p' docs/operations.md | sed -n '/^```sh$/,/^```$/p' | sed '1d;$d')
count=$(sed -e ':a' -e '/\\$/N; s/\\\n//; ta' <<<"$block" | wc -l)
((count == 10)) || fail "docs/operations.md has $count commands there, not 10"
end() {
  # Bash's jobs are those that the block has started.
  mapfile -t left < <(jobs -p)
  if ((${#left[@]} > 0)); then
    kill "${left[@]}" 2>/dev/null || true
    wait "${left[@]}" 2>/dev/null || true
  fi
  rm -rf /tmp/kv
}
trap end EXIT
begin=$SECONDS
mkdir /tmp/kv
exec 3>&2 # where the block's redirection does not reach
trap 'tail -n 30 /tmp/kv/output >&3; echo "commands.sh: failed: $BASH_COMMAND" >&3' ERR
# shellcheck disable=SC1090
. <(echo "$block") >/tmp/kv/output 2>&1
# Processor time is that of what has ended.
times >/tmp/kv/times
echo "ten commands: $((SECONDS - begin)) s, of processor time (user, system): $(tail -n 1 /tmp/kv/times)"
trap - ERR
grep '^worker-[ab] (1, 8, 64) length 100$' /tmp/kv/output

build/release/bin/qkvctl sessions --json | tee /tmp/kv/sessions
for team in team-a team-b; do
  grep -q "\"session\":\"chat\".*\"tenant\":\"$team\"" /tmp/kv/sessions || fail "$team has no session"
  build/release/bin/qkvctl quota show "$team" --json | grep -q 268435456 || fail "$team has no quota"
done
if env -u QKVD_TLS_CERT -u QKVD_TLS_KEY build/release/bin/qkvctl sessions --timeout 2s 2>/dev/null; then
  fail "a client without a certificate is served"
fi
[[ $(curl --fail --silent http://127.0.0.1:7581/) == *'<title>'* ]] || fail "the page is not there"
asked() {
  curl --silent --get --data-urlencode "query=qkvd_tenant_quota_limit{tenant=\"team-b\",resource=\"sessions\"}" \
    http://127.0.0.1:9090/api/v1/query | grep -q '"1000"'
}
for _ in {1..120}; do if asked; then break; fi; sleep 0.5; done
asked || fail "Prometheus has nothing of team-b"
echo "commands: passed"
