#!/usr/bin/env bash
# On a machine with a GPU: checks the kernels' bits there, times, runs compute-sanitizer, and writes CSV, all within ten
# minutes. A step that fails, lacks something or takes too long is named in steps.csv, and the others go on. Never run
# on a GPU so far: docs/gpu.md.
set -uo pipefail
here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
readonly here
readonly seconds_max=570 # of all steps
readonly targets="on_device_attend on_device_rows qkv-bench"

usage() {
  cat <<'TEXT'
Usage: tests/gpu/on_device.sh [--build DIR | --packed FILE] [--out DIR] [--fake DIR]
       tests/gpu/on_device.sh --pack FILE [--build DIR]

  --build DIR   a build with nvcc (QKV_CUDA=ON); build/release by default, made where there is none
  --pack FILE   builds, and writes the programs and the libraries they need to FILE, a .tar.gz of some 30 MB, for a
                machine that has neither: nothing else is done
  --packed FILE what --pack made; only a driver is needed then, compute-sanitizer for its step, and PyTorch and
                FlashInfer for theirs
  --out DIR     where reports, steps.csv, times.csv and peers.csv go; build/on_device by default
  --fake DIR    a folder with the fake libcuda.so.1 (build/release/tests/gpu/fake), to try this script without a GPU;
                nothing is timed then

Exits with 0 where all steps passed, 1 where one did not, and 77 where there is no GPU.
TEXT
}

cd "$here/../.." || exit 1
build=build/release
out=build/on_device
pack='' packed='' fake=''
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --build | --pack | --packed | --out | --fake)
      declare "${1#--}=${2:?$1 needs a path}"
      shift 2
      ;;
    *)
      echo "on_device.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done

make_programs() {
  [[ -f $build/build.ninja ]] || cmake --preset release -B "$build" -D QKV_CUDA=ON || return 1
  # shellcheck disable=SC2086
  cmake --build "$build" --target $targets
}

# All libraries but those of libc, which belong to the machine's loader.
pack_programs() {
  make_programs || return 1
  local folder program
  folder=$(mktemp -d) || return 1
  # shellcheck disable=SC2064
  trap "rm -r '$folder'" EXIT
  mkdir "$folder/lib" || return 1
  for program in $targets; do
    install -s "$build/bin/$program" "$folder/$program" || return 1
    ldd "$build/bin/$program" | awk '$3 ~ "^/" { print $3 }' | grep -vE '/(libc|libm|libpthread|libdl|librt)\.so' |
      xargs -r cp -Lt "$folder/lib" || return 1
  done
  tar -czf "$pack" -C "$folder" . && du -h "$pack"
}

if [[ -n $pack ]]; then
  pack_programs
  exit
fi
if [[ -z $fake ]] && ! compgen -G "/dev/nvidia[0-9]*" > /dev/null; then
  echo "on_device.sh: skipped, there is no /dev/nvidia0"
  exit 77
fi
mkdir -p "$out" || exit 1
echo "step,result,seconds" > "$out/steps.csv"
failed=0

# note STEP RESULT SECONDS
note() {
  echo "$1,$2,$3" | tee -a "$out/steps.csv"
  [[ $2 == passed ]] || failed=1
}

# step NAME SECONDS COMMAND...: its output goes to NAME.log. No longer than what is left of the ten minutes.
step() {
  local name=$1 limit=$2 left=$((seconds_max - SECONDS)) began=$SECONDS status
  shift 2
  ((left < limit)) && limit=$left
  if ((limit < 5)); then
    note "$name" "no time was left" 0
    return
  fi
  timeout --kill-after=5 "$limit" "$@" > "$out/$name.log" 2>&1
  status=$?
  case $status in
    0) note "$name" passed "$((SECONDS - began))" ;;
    77) note "$name" "lacks something: $(tail -n 1 "$out/$name.log")" "$((SECONDS - began))" ;;
    124 | 137) note "$name" "took more than $limit s" "$((SECONDS - began))" ;;
    *)
      note "$name" "failed with $status" "$((SECONDS - began))"
      tail -n 5 "$out/$name.log"
      ;;
  esac
}

SECONDS=0
if [[ -n $packed ]]; then
  programs=$out/packed
  rm -rf "$programs"
  mkdir "$programs" && tar -xzf "$packed" -C "$programs" || exit 1
  export LD_LIBRARY_PATH=$programs/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  began=$SECONDS
  if make_programs > "$out/build.log" 2>&1; then
    note build passed "$((SECONDS - began))"
  else
    note build "failed, see build.log; --pack and --packed need no build there" "$((SECONDS - began))"
  fi
  programs=$build/bin
fi
unset QKV_ON_DEVICE_IMAGE
if [[ -n $fake ]]; then
  export QKV_ON_DEVICE_IMAGE=fake LD_LIBRARY_PATH=$fake${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
command -v nvidia-smi > /dev/null && nvidia-smi -L | tee "$out/gpu.txt"

# What is known of nothing yet comes first, what repeats last.
for program in attend rows; do step "bits.$program.1" 90 "$programs/on_device_$program" "$RANDOM"; done
if [[ -z $fake ]]; then
  QKV_ON_DEVICE_TIMES=32 step times 90 "$programs/on_device_attend" 1
  sed -n '/^kernel,/,$p' "$out/times.log" 2> /dev/null | tee "$out/times.csv"
  step bench 60 "$programs/qkv-bench" attend --device gpu --repeats 5
  step peers 120 python3 "$here/peers.py"
  sed -n '/^library,/,$p' "$out/peers.log" 2> /dev/null | tee "$out/peers.csv"
fi
if command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck synccheck initcheck; do
    for program in attend rows; do
      step "$tool.$program" 60 compute-sanitizer --tool "$tool" --error-exitcode 1 "$programs/on_device_$program" 1
    done
  done
else
  note compute-sanitizer "is not installed" 0
fi
for i in 2 3; do
  for program in attend rows; do step "bits.$program.$i" 60 "$programs/on_device_$program" "$RANDOM"; done
done
exit $failed
