#!/usr/bin/env bash
# Rows and pages over a slow link: a daemon and a client in two network namespaces, and a limit between them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/link/measure.sh [--build DIR] [--rate RATE] [--bits BITS] [--repeats N] [--bytes BYTES] [--threads N] [--dump FILE --rope-theta THETA] [--help]

  --build DIR    a finished build; build/release by default
  --rate RATE    of the link, both ways, as tc takes it; 1gbit by default. "none": a unix socket, without namespaces
  --bits BITS    of the session; 2.125 by default, 2.2 with everything counted
  --repeats N    of which the medians are printed; 5 by default
  --bytes BYTES  of fp16 rows fetched and appended at once; 32MiB by default
  --threads N    that the client codes and decodes with; 2 by default
  --dump FILE    rows of a model, as qkv-worker dump writes them, in place of noise; --rope-theta is its RoPE's base

Needs root, ip and tc, but for --rate none. Prints gigabytes of fp16 rows a second, as rows and as pages, and their
ratio. Every row is measured with a daemon of its own.
TEXT
}

build=build/release
rate=1gbit
bits=2.125
repeats=5
bytes=32MiB
threads=2
dump=
rope_theta=10000
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --build | --rate | --bits | --repeats | --bytes | --threads | --dump)
      declare "${1#--}=${2:?$1 needs a value}"
      shift 2
      ;;
    --rope-theta)
      rope_theta=${2:?$1 needs a value}
      shift 2
      ;;
    *)
      echo "measure.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done

readonly server=qkvs$$ client=qkvc$$
folder=$(mktemp -d)
daemon=

stop_daemon() {
  if [[ -n $daemon ]]; then
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
    daemon=
  fi
}

finish() {
  stop_daemon
  if [[ $rate != none ]]; then
    ip netns del "$server" 2>/dev/null || true
    ip netns del "$client" 2>/dev/null || true
  fi
  rm -rf "$folder"
}
trap finish EXIT

in_server=()
in_client=()
address=unix:$folder/qkvd.sock
if [[ $rate != none ]]; then
  if ! ip netns add "$server" || ! ip netns add "$client"; then
    echo "measure.sh: no network namespaces here; --rate none measures over a unix socket" >&2
    exit 1
  fi
  ip link add "$server" netns "$server" type veth peer name "$client" netns "$client"
  for space in "$server" "$client"; do
    # Packets as a network card sends them: what is larger than the bucket would never pass.
    ip netns exec "$space" tc qdisc add dev "$space" root tbf rate "$rate" burst 256kb latency 50ms
    ip netns exec "$space" ip link set lo up
    ip netns exec "$space" ip link set "$space" up
  done
  ip netns exec "$server" ip address add 10.77.0.1/24 dev "$server"
  ip netns exec "$client" ip address add 10.77.0.2/24 dev "$client"
  in_server=(ip netns exec "$server")
  in_client=(ip netns exec "$client")
  address=10.77.0.1:7580
fi

# Gigabytes a second of one way to send.
figure() {
  "${in_server[@]}" "$build/bin/qkvd" --listen "$address" --allow-anonymous all --memory-budget 2GiB 2>"$folder/log" &
  daemon=$!
  "${in_client[@]}" "$build/bin/qkv-bench" "$@" --target "$address" --json --bytes "$bytes" --rounds 2 \
    --repeats "$repeats" --bits "$bits" --threads "$threads" | sed -n 's/.*"gbps":\([0-9.e+-]*\),.*/\1/p'
  stop_daemon
}

printf '%-8s %-12s %10s %10s %8s\n' command session rows pages ratio
for session in "data-free" "calibrated"; do
  more=()
  if [[ $session == calibrated ]]; then more=(--calibrated); fi
  if [[ -n $dump ]]; then more+=(--dump "$dump" --rope-theta "$rope_theta"); fi
  for command in fetch append; do
    rows=$(figure "$command" --store "${more[@]}")
    pages=$(figure "$command" --coded "${more[@]}")
    printf '%-8s %-12s %10.3f %10.3f %8.2f\n' "$command" "$session" "$rows" "$pages" \
      "$(awk -v a="$pages" -v b="$rows" 'BEGIN {print a / b}')"
  done
done
