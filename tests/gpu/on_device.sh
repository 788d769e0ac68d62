#!/usr/bin/env bash
# On a machine with a GPU: builds, checks the kernels' bits there, runs compute-sanitizer, times, and writes CSV. About five
# minutes, ten at most. Never run so far: docs/gpu.md.
set -euo pipefail
readonly here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

usage() {
  cat <<'TEXT'
Usage: tests/gpu/on_device.sh [--build DIR] [--out DIR] [--help]

  --build DIR   a build with nvcc (QKV_CUDA=ON); build/release by default, made where there is none
  --out DIR     where the reports and times.csv go; build/on_device by default

Where there is no GPU it prints why and exits with 77.
TEXT
}

cd "$here/../.."
build=build/release
out=build/on_device
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --build)
      build=${2:?--build needs a directory}
      shift 2
      ;;
    --out)
      out=${2:?--out needs a directory}
      shift 2
      ;;
    *)
      echo "on_device.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done
if ! compgen -G "/dev/nvidia[0-9]*" > /dev/null; then
  echo "on_device.sh: skipped, there is no /dev/nvidia0"
  exit 77
fi
mkdir -p "$out"
[[ -f $build/build.ninja ]] || cmake --preset release -B "$build" -D QKV_CUDA=ON
cmake --build "$build" --target on_device_attend on_device_rows
readonly programs="$build/bin/on_device_attend $build/bin/on_device_rows"
unset QKV_ON_DEVICE_IMAGE

failed=0
for program in $programs; do
  for ((i = 0; i < 3; i++)); do
    "$program" "$((RANDOM * 32768 + RANDOM))" 2>&1 | tee "$out/${program##*/on_device_}.bits.$i.log" || failed=1
  done
done
# The programs at the same time, so that all tools end within six minutes.
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    checks=()
    for program in $programs; do
      log=$out/${program##*/on_device_}.$tool.log
      timeout 90 compute-sanitizer --tool "$tool" --error-exitcode 1 "$program" 1 > "$log" 2>&1 &
      checks+=("$!")
    done
    for check in "${checks[@]}"; do wait "$check" || failed=1; done
    tail -n 1 "$out"/*."$tool".log
  done
else
  echo "on_device.sh: there is no compute-sanitizer"
fi
QKV_ON_DEVICE_TIMES=32 "$build/bin/on_device_attend" 1 | tee "$out/times.log" | sed -n '/^kernel,/,$p' > "$out/times.csv" || failed=1
cat "$out/times.csv"
exit $failed
