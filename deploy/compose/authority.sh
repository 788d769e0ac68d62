#!/usr/bin/env bash
# Makes what compose.yaml mounts: an authority, a certificate for the daemon, one for each client, and the auth-file that
# gives each client its tenant. Files that are there stay, so that it can be run again for one more client.
set -euo pipefail
umask 077

usage() {
  cat <<'TEXT'
Usage: deploy/compose/authority.sh [--dir DIR] [--host NAME]... [--client NAME=TENANT]... [--operator NAME]...
                                   [--days N] [--help]

  --dir DIR              where the files go (tls, in the directory of this script)
  --host NAME            a name or address that clients call the daemon by; localhost, 127.0.0.1 and qkvd always are
  --client NAME=TENANT   a certificate NAME.pem with NAME.key for a client of this tenant (worker-a=team-a, worker-b=team-b)
  --operator NAME        the same for one who may do everything for all tenants, set quotas for instance (none)
  --days N               how long the daemon's and the clients' certificates are valid (365)

DIR has authority.pem (for clients: --tls-ca), authority.key (keep it elsewhere), daemon.pem, daemon.key, clients (the
auth-file), NAME.pem and NAME.key. The daemon runs as user 7580: as root its files are given to that user, else they can
be read by all users of the machine that can enter DIR.
TEXT
}

fail() {
  echo "authority.sh: $*" >&2
  exit 1
}

dir=$(dirname "${BASH_SOURCE[0]}")/tls days=365
hosts=(localhost 127.0.0.1 qkvd) clients=() operators=()
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dir) dir=${2:?--dir needs a folder} && shift 2 ;;
    --host) hosts+=("${2:?--host needs a name}") && shift 2 ;;
    --client)
      [[ "${2:-}" =~ ^[A-Za-z0-9._-]+=[A-Za-z0-9._:/@-]+$ ]] || fail "--client needs NAME=TENANT"
      clients+=("$2") && shift 2
      ;;
    --operator)
      [[ "${2:-}" =~ ^[A-Za-z0-9._-]+$ ]] || fail "--operator needs a name"
      operators+=("$2") && shift 2
      ;;
    --days) [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail "--days needs a number" && days=$2 && shift 2 ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
((${#clients[@]} > 0)) || clients=(worker-a=team-a worker-b=team-b)
command -v openssl >/dev/null || fail "openssl is missing"
mkdir -p "$dir"
chmod 755 "$dir"
cd "$dir"

# certificate NAME EXTENSIONS: NAME.key and NAME.pem, signed by the authority.
certificate() {
  [[ ! -e $1.pem ]] || return 0
  openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout "$1.key" -subj "/CN=$1" -out "$1.csr" 2>/dev/null
  openssl x509 -req -in "$1.csr" -CA authority.pem -CAkey authority.key -days "$days" -extfile <(echo "$2") -out "$1.pem" 2>/dev/null
  rm "$1.csr"
  echo "made $1.pem"
}

if [[ ! -e authority.pem ]]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=qkvd authority" \
    -keyout authority.key -out authority.pem 2>/dev/null
  echo "made authority.pem"
fi
names=
for host in "${hosts[@]}"; do
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then names+=",IP:$host"; else names+=",DNS:$host"; fi
done
certificate daemon "subjectAltName=${names#,}"$'\n'"extendedKeyUsage=serverAuth"
touch clients
known() { # NAME TENANT ROLES
  certificate "$1" "extendedKeyUsage=clientAuth"
  grep -qE "^cert +CN=$1 " clients || echo "cert CN=$1 $2 $3" >>clients
}
for client in "${clients[@]}"; do known "${client%%=*}" "${client#*=}" read,write; done
for operator in "${operators[@]}"; do known "$operator" '*' read,write,admin; done
chmod 644 ./*.pem
if (($(id -u) == 0)); then chown 7580:7580 daemon.key clients; else chmod 644 daemon.key clients; fi
