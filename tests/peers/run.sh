#!/usr/bin/env bash
# Attention on codes compared with the CPU flash attention of others, outside the project's own build and tests.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
  cat <<'TEXT'
Usage: tests/peers/run.sh [--sources DIR] [--tokens N,...] [--groups G,...] [--threads N,...] [--rounds N]

Clones ggml and ik_llama.cpp into DIR (what is there is taken as it is), builds them for this processor, and times a
decode step of d = 128 and 8 KV heads by each of them, by PyTorch where /usr/bin/python3 has it, and by build/release's
qkv-bench attend with 4 bits, in turn, for so many rounds. Prints the median of each, in microseconds, and how many
times that of qkvd it is.
TEXT
}

fail() {
  echo "tests/peers/run.sh: $*" >&2
  exit 1
}

sources=/tmp/qkvd-peers tokens=4096,32768,131072 groups=1,4,8 threads=1 rounds=5
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --sources | --tokens | --groups | --threads | --rounds)
      (($# > 1)) || fail "$1 needs a value"
      declare "${1#--}=$2"
      shift 2
      ;;
    *) fail "unknown argument $1; see --help" ;;
  esac
done
bench="$here/../../build/release/bin/qkv-bench"
[[ -x $bench ]] || fail "no $bench: build the release preset first"

build() { # name repository folder-of-headers
  [[ ! -x $sources/flash-$1 ]] || return 0
  [[ -d $sources/$1 ]] || git clone --quiet --depth 1 "https://github.com/$2" "$sources/$1"
  cmake -S "$sources/$1" -B "$sources/build-$1" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON \
    -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_SERVER=OFF -DLLAMA_CURL=OFF >"$sources/$1.log" 2>&1
  cmake --build "$sources/build-$1" --target ggml --parallel "$(nproc)" >>"$sources/$1.log" 2>&1
  local libraries
  mapfile -t libraries < <(find "$sources/build-$1" -name 'libggml*.a')
  gcc -O2 -I"$sources/$1/$3" "$here/flash_attention.c" -o "$sources/flash-$1" \
    -Wl,--start-group "${libraries[@]}" -Wl,--end-group -lstdc++ -lgomp -lpthread -ldl -lm
}

mkdir -p "$sources"
echo "building in $sources" >&2
build ggml ggml-org/ggml include
build ik_llama.cpp ikawrakow/ik_llama.cpp ggml/include
commit() { git -C "$sources/$1" rev-parse --short HEAD; }
echo "ggml $(commit ggml), ik_llama.cpp $(commit ik_llama.cpp)" >&2

names=(qkvd "ggml f16" "ggml q4_0" "ik f16" "ik q8_0" "ik q4_0")
if /usr/bin/python3 -c 'import torch' 2>/dev/null; then names+=("torch bf16" "torch fp32"); fi

# Memory of 2 MiB pages for all.
export GLIBC_TUNABLES=glibc.malloc.hugetlb=1
measure() { # name tokens group threads
  case "$1" in
    qkvd)
      "$bench" attend --tokens "$2" --dim 128 --kv-heads 8 --q-heads $((8 * $3)) --threads "$4" --repeats 5 --alone --json |
        sed 's/.*"us":\([0-9.]*\).*/\1/'
      ;;
    ggml\ *) "$sources/flash-ggml" "${1#* }" "$2" "$3" "$4" 5 ;;
    ik\ *) "$sources/flash-ik_llama.cpp" "${1#* }" "$2" "$3" "$4" 5 ;;
    torch\ *) /usr/bin/python3 "$here/torch_attention.py" "${1#* }" "$2" "$3" "$4" 5 ;;
  esac
}
median() { sort -n | awk '{v[NR] = $1} END {print v[int((NR + 1) / 2)]}'; }

printf '%-12s %8s %6s %8s %12s %8s\n' peer tokens group threads us times
for n in ${tokens//,/ }; do
  for g in ${groups//,/ }; do
    for t in ${threads//,/ }; do
      declare -A times=()
      for ((round = 0; round < rounds; round++)); do
        for name in "${names[@]}"; do times[$name]+="$(measure "$name" "$n" "$g" "$t")"$'\n'; done
      done
      own=$(printf '%s' "${times[qkvd]}" | median)
      for name in "${names[@]}"; do
        printf '%s' "${times[$name]}" | median |
          awk -v name="$name" -v n="$n" -v g="$g" -v t="$t" -v own="$own" \
            '{printf "%-12s %8d %6d %8d %12.0f %8.2f\n", name, n, g, t, $1, $1 / own}'
      done
    done
  done
done
