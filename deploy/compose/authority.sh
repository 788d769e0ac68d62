#!/usr/bin/env bash
# Makes what compose.yaml mounts: an authority, a certificate for the daemon, one for each client, and the auth-file that
# gives each client its tenant. Run again it adds what is missing, takes what has changed, and renews what is about to end.
set -euo pipefail
umask 077

usage() {
  cat <<'TEXT'
Usage: deploy/compose/authority.sh [--dir DIR] [--host NAME]... [--client NAME=TENANT]... [--operator NAME]...
                                   [--days N] [--renew] [--help]

  --dir DIR              where the files go (tls, in the directory of this script)
  --host NAME            a name or address that clients call the daemon by; localhost, 127.0.0.1 and qkvd always are
  --client NAME=TENANT   a certificate NAME.pem with NAME.key for a client of this tenant (the first time, where none is
                         given: worker-a=team-a, worker-b=team-b)
  --operator NAME        the same for one who may do everything for all tenants, set quotas for instance (none)
  --days N               how long the daemon's and the clients' certificates are valid (365)
  --renew                renew all of them, not only those that have less than a third of --days left

DIR has authority.pem (for clients: --tls-ca), authority.key (keep it elsewhere), NAME.pem and NAME.key; DIR/daemon has what
the daemon reads, and nothing else: daemon.pem, daemon.key, authority.pem, and clients, the auth-file. It runs as user
7580: as root its files are given to that user, else they can be read by all users of the machine that can enter DIR.

Run it again: a --host is added to the daemon's names, a --client gets another tenant, certificates are renewed with their
keys, and the daemon takes them without a restart. A client whose line is taken from DIR/daemon/clients is let in no more.
A new authority, after ten years, or after its key was lost: delete DIR, and give all clients their files anew.
TEXT
}

fail() {
  echo "authority.sh: $*" >&2
  exit 1
}

dir=$(dirname "${BASH_SOURCE[0]}")/tls days=365 renew=
hosts=(localhost 127.0.0.1 qkvd) clients=() operators=()
while (($# > 0)); do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --dir) dir=${2:?--dir needs a folder} && shift 2 ;;
    --host)
      [[ "${2:-}" =~ ^[A-Za-z0-9.:*_-]+$ ]] || fail "--host needs a name or an address"
      # As openssl shows it, so that it is known again.
      [[ $2 != *:* || $2 =~ ^((0|[1-9A-F][0-9A-F]{0,3})(:|$)){8}$ ]] || fail "--host: eight groups of an IPv6 address, as 2001:DB8:0:0:0:0:0:1"
      hosts+=("$2") && shift 2
      ;;
    --client)
      [[ "${2:-}" =~ ^[A-Za-z0-9._-]+=[A-Za-z0-9._:/@-]+$ ]] || fail "--client needs NAME=TENANT"
      clients+=("$2") && shift 2
      ;;
    --operator)
      [[ "${2:-}" =~ ^[A-Za-z0-9._-]+$ ]] || fail "--operator needs a name"
      operators+=("$2") && shift 2
      ;;
    --days) [[ "${2:-}" =~ ^[1-9][0-9]{0,4}$ ]] || fail "--days needs a number" && days=$2 && shift 2 ;;
    --renew) renew=1 && shift ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
for name in "${clients[@]%%=*}" "${operators[@]}"; do
  [[ $name != authority && $name != daemon ]] || fail "$name is no client's name"
done
command -v openssl >/dev/null || fail "openssl is missing"
mkdir -p "$dir/daemon"
chmod 755 "$dir" "$dir/daemon"
cd "$dir"
if [[ ! -e daemon/clients ]]; then
  ((${#clients[@]} > 0)) || clients=(worker-a=team-a worker-b=team-b)
  touch daemon/clients
fi

# Whether NAME.pem is there, was signed by this authority, and is valid for long enough.
good() {
  [[ -z $renew && -e $1.pem ]] && openssl verify -CAfile authority.pem "$1.pem" >/dev/null 2>&1 &&
    openssl x509 -in "$1.pem" -noout -checkend $((days * 86400 / 3)) >/dev/null
}

# certificate PATH NAME EXTENSIONS: PATH.key, where it is not there, and PATH.pem, signed by the authority.
certificate() {
  local word=made
  [[ ! -e $1.pem ]] || word=renewed
  [[ -e $1.key ]] || openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"
  openssl req -new -key "$1.key" -subj "/CN=$2" -out request 2>/dev/null
  openssl x509 -req -in request -CA authority.pem -CAkey authority.key -CAcreateserial -days "$days" -extfile <(echo "$3") \
    -out new 2>/dev/null || fail "authority.key and authority.pem do not sign $2"
  rm request
  chmod 644 new
  mv new "$1.pem" # as a whole: the daemon reads it when it changes
  echo "$word $1.pem"
}

if [[ ! -e authority.pem ]]; then
  openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj "/CN=qkvd authority" \
    -keyout authority.key -out authority.pem 2>/dev/null
  chmod 644 authority.pem
  echo "made authority.pem"
fi
cmp -s authority.pem daemon/authority.pem || install -m 644 authority.pem daemon/authority.pem

# names PATH: of a certificate, one a line, as openssl takes them.
names() {
  [[ ! -e $1 ]] || openssl x509 -in "$1" -noout -ext subjectAltName 2>/dev/null | grep -oE '(DNS|IP Address):[^, ]+' | sed 's/^IP Address/IP/'
}
had=$(names daemon/daemon.pem || true)
wanted=$(
  for host in "${hosts[@]}"; do
    if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then echo "IP:$host"; else echo "DNS:$host"; fi
  done
)
all=$(printf '%s\n' "$had" "$wanted" | sed '/^$/d' | awk '!seen[$0]++')
if ! good daemon/daemon || [[ $all != "$had" ]]; then
  certificate daemon/daemon daemon "subjectAltName=$(paste -sd, <<<"$all")"$'\n'"extendedKeyUsage=serverAuth"
fi

# known NAME TENANT ROLES: has this line, in place of another one of the same name.
known() {
  local line="cert CN=$1 $2 $3" old
  old=$(awk -v name="CN=$1" '$1 == "cert" && $2 == name' daemon/clients)
  [[ $old != "$line" ]] || return 0
  awk -v name="CN=$1" '!($1 == "cert" && $2 == name)' daemon/clients >new
  echo "$line" >>new
  chown --reference=daemon/clients new
  chmod --reference=daemon/clients new
  mv new daemon/clients
  [[ -z $old ]] || echo "changed $1: $2 $3"
}
for client in "${clients[@]}"; do known "${client%%=*}" "${client#*=}" read,write; done
for operator in "${operators[@]}"; do known "$operator" '*' read,write,admin; done
while read -r name; do
  good "$name" || certificate "$name" "$name" "extendedKeyUsage=clientAuth"
done < <(sed -nE 's/^cert +CN=([A-Za-z0-9._-]+) .*/\1/p' daemon/clients)
if (($(id -u) == 0)); then
  chown 7580:7580 daemon/daemon.key daemon/clients
else
  chmod 644 daemon/daemon.key daemon/clients
fi
