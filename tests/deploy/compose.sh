#!/usr/bin/env bash
# Usage: tests/deploy/compose.sh [--bin DIR]
# What deploy/compose says, run without containers (compose.py). DIR has qkvd, build/release/bin by default, with the Python
# stubs of its build. Prometheus is used where it is installed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=build/release/bin
case "${1:-}" in
  --help | -h)
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --bin) bin=${2:?--bin needs a directory} ;;
esac
QKV_BIN_DIR=$bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$bin/../tests/e2e/stubs \
  exec /usr/bin/python3 tests/deploy/compose.py --bin "$bin"
