#!/usr/bin/env bash
# qkvd, Prometheus and Grafana on this machine, by compose.yaml: makes what they need and starts them.
set -euo pipefail
umask 077
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'TEXT'
Usage: deploy/compose/up.sh [--memory-budget-mib N] [--grafana-password TEXT] [--host NAME]... [--client NAME=TENANT]...
                            [--operator NAME]... [--dry-run] [--help]

  --memory-budget-mib N     qkvd's memory-budget (4096); the container's limit is a tenth and 256 MiB more
  --grafana-password TEXT   of Grafana's user admin; a random one is made and printed where there is none
  --host, --client, --operator
                            as deploy/compose/authority.sh takes them
  --dry-run                 make certificates and settings, and print the command that would start all

Settings are kept in deploy/compose/.env; a later start without options takes them from there.
TEXT
}

fail() {
  echo "up.sh: $*" >&2
  exit 1
}

budget='' password='' dry='' authority=()
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --memory-budget-mib)
      [[ "${2:-}" =~ ^[1-9][0-9]{0,8}$ ]] || fail "--memory-budget-mib needs a number of MiB"
      budget=$2 && shift 2
      ;;
    --grafana-password)
      [[ "${2:-}" =~ ^[A-Za-z0-9._@%+=:,/-]{8,}$ ]] || fail "--grafana-password needs 8 letters, digits or ._@%+=:,/-"
      password=$2 && shift 2
      ;;
    --host | --client | --operator) authority+=("$1" "${2:?$1 needs a value}") && shift 2 ;;
    --dry-run) dry=1 && shift ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done

# kept NAME: a setting of an earlier start.
kept() {
  [[ ! -f .env ]] || sed -n "s/^$1=//p" .env
}

budget=${budget:-$(kept QKVD_MEMORY_BUDGET_MIB)}
budget=${budget:-4096}
password=${password:-$(kept GRAFANA_PASSWORD)}
if [[ -z $password ]]; then
  password=$(openssl rand -hex 12)
  echo "Grafana's password for the user admin: $password"
fi
others=$([[ ! -f .env ]] || grep -vE '^(QKVD_MEMORY_BUDGET_MIB|QKVD_MEMORY_LIMIT|GRAFANA_PASSWORD)=' .env || true)
printf '%s\n' "QKVD_MEMORY_BUDGET_MIB=$budget" "QKVD_MEMORY_LIMIT=$((budget * 11 / 10 + 256))m" "GRAFANA_PASSWORD=$password" \
  ${others:+"$others"} >.env
./authority.sh "${authority[@]}"

command=(docker compose -f "$PWD/compose.yaml" up -d --build --wait)
if [[ -n $dry ]]; then echo "${command[*]}"; else exec "${command[@]}"; fi
