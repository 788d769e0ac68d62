#!/usr/bin/env bash
# Makes the message classes in src/qkvd/v1 from proto/qkv/v1. Run it after a change there, and commit what it writes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  cat <<'TEXT'
Usage: client/python/generate.sh [--output DIR] [--python PYTHON] [--help]

  --output DIR     where the files go; src/qkvd/v1 of this directory by default
  --python PYTHON  an interpreter that has grpcio-tools 1.71.2; python3 by default

grpcio-tools is of this version on purpose: protobuf 5.29, which it writes for, is the oldest that the package supports,
and 6 and 7 load what was written for it.
TEXT
}

output=src/qkvd/v1
python=python3
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --output)
      output=${2:?--output needs a directory}
      shift 2
      ;;
    --python)
      python=${2:?--python needs an interpreter}
      shift 2
      ;;
    *)
      echo "generate.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done

readonly version=1.71.2
found=$("$python" -c 'from importlib.metadata import version; print(version("grpcio-tools"))' 2>/dev/null) || found=none
if [[ $found != "$version" ]]; then
  echo "generate.sh: $python has grpcio-tools $found; pip install grpcio-tools==$version" >&2
  exit 1
fi

mkdir -p "$output"
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$python" -m grpc_tools.protoc -I../../proto --python_out="$made" --pyi_out="$made" \
  qkv/v1/tensor.proto qkv/v1/model.proto qkv/v1/kv_cache.proto qkv/v1/objects.proto qkv/v1/shared_memory.proto qkv/v1/admin.proto
# The messages stay qkv.v1, as on the wire; the Python modules belong to this package.
for file in "$made"/qkv/v1/*; do
  sed -e 's/^from qkv\.v1 import /from qkvd.v1 import /' -e "s/, 'qkv\.v1\.\([a-z_]*_pb2\)', _globals)/, 'qkvd.v1.\1', _globals)/" \
    "$file" >"$output/$(basename "$file")"
done
