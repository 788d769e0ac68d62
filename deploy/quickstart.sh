#!/usr/bin/env bash
# From a fresh clone to a language model whose KV cache lives in qkvd, on a bare Debian 12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

usage() {
  cat <<'TEXT'
Usage: deploy/quickstart.sh [--model NAME] [--prompt TEXT] [--tokens N] [--bits BITS] [--help]

Installs the Debian packages that are missing (as root, or with sudo), builds the release in build/release, starts
qkvd on a unix socket and a TCP port of its own, lets qkv-worker continue a prompt with its KV cache in that daemon,
prints what it cost in comparison with an exact fp32 cache, and stops the daemon. Bits per byte or token are those of the text
that the model has just made itself; for held-out text see qkv-worker score. The first run takes some minutes, a second
one seconds. What the tools print goes to build/quickstart.log.

  --model NAME   tinylm, a byte-level model of this repository that continues a text (the default), or smollm2,
                 SmolLM2-135M-Instruct, which answers a question: deploy/smollm2.sh downloads 98 MB once
  --prompt TEXT  the text to continue, or the question
  --tokens N     tokens to generate at most, bytes of tinylm (256); --bytes is the same
  --bits BITS    code bits per coordinate of keys and values, in eighths up to 8 (4)
TEXT
}

fail() {
  echo "deploy/quickstart.sh: $*" >&2
  exit 1
}

model_name=tinylm
prompt=
tokens=256
bits=4
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --model)
      [[ "${2:-}" == tinylm || "${2:-}" == smollm2 ]] || fail "--model needs one of: tinylm smollm2"
      model_name=$2
      shift 2
      ;;
    --prompt)
      [[ -n "${2:-}" ]] || fail "--prompt needs a text"
      prompt=$2
      shift 2
      ;;
    --tokens | --bytes)
      [[ "${2:-}" =~ ^[1-9][0-9]{0,5}$ ]] || fail "$1 needs a number of at least 1"
      tokens=$2
      shift 2
      ;;
    --bits)
      [[ "${2:-}" =~ ^[0-8](\.[0-9]{1,3})?$ ]] || fail "--bits needs a number of up to 8"
      bits=$2
      shift 2
      ;;
    *) fail "unknown argument $1; see deploy/quickstart.sh --help" ;;
  esac
done

model=tests/data/tinylm
readonly bin=build/release/bin
readonly log=build/quickstart.log
directory= # of the daemon's socket and log
daemon=    # its process
ticker=    # that of the progress line

# ---- progress ----

say() { printf '== %d:%02d  %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Says every now and then how far the work is that writes to the log: one line that moves on a terminal, a line
# every ten seconds elsewhere.
tick() { # what
  local last
  sleep 1
  while :; do
    # Of ninja "[12/345] ...", of apt-get its latest line.
    last=$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-60)
    if [[ -t 1 ]]; then
      printf '\r\033[K   %d:%02d  %s: %s' $((SECONDS / 60)) $((SECONDS % 60)) "$1" "$last"
      sleep 1
    else
      printf '   %d:%02d  %s: %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$1" "$last"
      sleep 10
    fi
  done
}

stop_ticker() {
  [[ -n $ticker ]] || return 0
  kill "$ticker" 2>/dev/null || true
  wait "$ticker" 2>/dev/null || true
  ticker=
  if [[ -t 1 ]]; then printf '\r\033[K'; fi
}

# Runs a command with its output in the log and a progress line here.
logged() { # what, command...
  local what=$1
  shift
  echo "== $*" >>"$log"
  tick "$what" &
  ticker=$!
  if ! "$@" >>"$log" 2>&1; then
    stop_ticker
    tail -n 25 "$log" >&2
    fail "$what failed; above are the last lines of $log"
  fi
  stop_ticker
}

# ---- the daemon ----

cleanup() {
  stop_ticker
  if [[ -n $daemon ]]; then
    kill "$daemon" 2>/dev/null || true
    wait "$daemon" 2>/dev/null || true
  fi
  if [[ -n $directory ]]; then rm -rf "$directory"; fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

start_daemon() {
  directory=$(mktemp -d)
  : >"$directory/qkvd.log"
  "$bin/qkvd" --listen "unix:$directory/qkvd.sock" --listen 127.0.0.1:0 2>"$directory/qkvd.log" &
  daemon=$!
  local i
  for ((i = 0; i < 200; i++)); do
    if grep -q '"message":"ready"' "$directory/qkvd.log"; then return 0; fi
    kill -0 "$daemon" 2>/dev/null || break
    sleep 0.05
  done
  cat "$directory/qkvd.log" >&2
  fail "qkvd did not become ready; its log is above"
}

stop_daemon() {
  local status=0
  kill -TERM "$daemon"
  wait "$daemon" || status=$?
  daemon=
  if ((status != 0)); then
    tail -n 25 "$directory/qkvd.log" >&2
    fail "qkvd ended with status $status after SIGTERM, 0 was expected; the end of its log is above"
  fi
}

# ---- all of it ----

mkdir -p build
: >"$log"
mapfile -t packages < <(qkv_packages build)
mapfile -t missing < <(qkv_missing "${packages[@]}")
if ((${#missing[@]} > 0)); then
  say "packages"
  # The password, before the progress line writes over the question.
  if (($(id -u) != 0)) && command -v sudo >/dev/null; then sudo -v || exit 1; fi
  tick "installing" &
  ticker=$!
  QKV_INSTALL_LOG=$log qkv_install "${packages[@]}" || exit 1
  stop_ticker
fi

say "build"
logged "configuring" cmake --preset release
logged "building" cmake --build --preset release --parallel "$(nproc)" --target qkvd qkv-worker qkvctl qkv-bench

if [[ $model_name == smollm2 ]]; then
  model=build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
  logged "fetching the model" deploy/smollm2.sh
fi

start_daemon
addresses=$(sed -n 's/.*"address":"\([^"]*\)".*/\1/p' "$directory/qkvd.log" | paste -sd ' ')
say "qkvd serves on $addresses"
generate=("$bin/qkv-worker" generate --target "unix:$directory/qkvd.sock" --model "$model" --prompt "$directory/prompt"
  --tokens "$tokens" --bits "$bits" --compare)
if [[ $model_name == smollm2 ]]; then
  # By default a text is to be summed up: a cache that holds some hundreds of tokens shows what codes are worth.
  [[ -n $prompt ]] || prompt="$(awk -v RS= -v ORS='\n\n' 'NR <= 4' tests/data/smollm2/report.txt)

What is this text about? Answer in three sentences."
  printf '%s' "$prompt" >"$directory/prompt"
  generate+=(--chat)
  say "qkv-worker asks SmolLM2-135M-Instruct ($(wc -c <"$directory/prompt") bytes), which answers:"
  printf '\n...%s\n\n' "$(tail -n 5 "$directory/prompt")"
else
  if [[ -n $prompt ]]; then
    printf '%s' "$prompt" >"$directory/prompt"
  else
    cp "$model/prompt.txt" "$directory/prompt"
  fi
  say "qkv-worker reads a prompt ($(wc -c <"$directory/prompt") bytes) and goes on:"
  printf '\n...%s' "$(tail -c 120 "$directory/prompt")"
fi
if [[ -t 1 ]]; then
  printf '\033[1m'
elif [[ $model_name == tinylm ]]; then
  printf ' >>> '
fi
"${generate[@]}" 2>"$directory/table" || {
  status=$?
  if [[ -t 1 ]]; then printf '\033[0m'; fi
  cat "$directory/table" >&2
  fail "qkv-worker ended with status $status"
}
if [[ -t 1 ]]; then printf '\033[0m'; fi
cat "$directory/table"
echo
stop_daemon
say "qkvd has stopped. Next: README.md; $bin/qkvctl --help; $bin/qkv-worker score --help"
