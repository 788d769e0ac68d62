#!/usr/bin/env bash
# Runs every fuzz target for a while, two at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

usage() {
  cat <<'TEXT'
Usage: tests/fuzz/smoke.sh [--seconds N] [--build DIR] [TARGET]...

  --seconds N   for each target, 30 by default
  --build DIR   a finished build of the preset `fuzz`; build/fuzz by default

Without targets all of them run: the seeds and kept crashes in tests/fuzz/corpus/TARGET and what earlier runs have
found, then new inputs. Exits 1 if one crashed, leaked, hung, or took too much memory, and names the input; keep
it as tests/fuzz/corpus/TARGET/regress-WHAT.
TEXT
}

seconds=30
build=build/fuzz
targets=()
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --seconds)
      seconds=${2:?--seconds needs a number}
      shift 2
      ;;
    --build)
      build=${2:?--build needs a directory}
      shift 2
      ;;
    -*)
      echo "smoke.sh: unknown option $1; see --help" >&2
      exit 2
      ;;
    *)
      targets+=("$1")
      shift
      ;;
  esac
done
if [[ ! -x $build/bin/fuzz_seeds ]]; then
  echo "smoke.sh: there are no fuzz targets in $build; cmake --preset fuzz && cmake --build --preset fuzz" >&2
  exit 2
fi
if ((${#targets[@]} == 0)); then
  for source in tests/fuzz/*_fuzz.c; do targets+=("$(basename "$source" _fuzz.c)"); done
fi

mkdir -p "$build/seeds" "$build/found" "$build/logs"
"$build/bin/fuzz_seeds" "$build/seeds"

run_target() {
  local name=$1 log=$build/logs/$1.log committed=tests/fuzz/corpus/$1
  mkdir -p "$build/found/$name" "$build/seeds/$name"
  local corpora=("$build/found/$name" "$build/seeds/$name")
  if [[ -d $committed ]]; then corpora+=("$committed"); fi
  if "$build/bin/fuzz_$name" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
    -verbosity=1 -artifact_prefix="$build/crash-$name-" "${corpora[@]}" >"$log" 2>&1; then
    echo "fuzz $name: ok, $(awk '/number_of_executed_units/ {print $2}' "$log") runs, $(
      grep -oE 'cov: [0-9]+' "$log" | tail -1
    )"
  else
    echo "fuzz $name: FAILED"
    grep -vE '^#[0-9]+\s+(NEW|REDUCE|pulse|INITED|RELOAD)' "$log" | tail -60
    return 1
  fi
}
export -f run_target
export build seconds

printf '%s\n' "${targets[@]}" | xargs -P2 -I{} bash -c 'run_target {}' || {
  echo "smoke.sh: a fuzz target failed, see above; logs are in $build/logs" >&2
  exit 1
}
