#!/usr/bin/env bash
# Usage: tests/page/run.sh [--bin DIR] [PYTEST ARGUMENTS]
# The admin page in Debian's Chromium, driven by playwright, which comes with pip into an environment of its own. DIR has
# qkvd, build/release/bin by default. Screenshots go to build/page/shots.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$PWD/build/release/bin
case "${1:-}" in
  --help | -h)
    sed -n '2,4s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
    ;;
  --bin)
    bin=$(readlink -f "${2:?--bin needs a directory}")
    shift 2
    ;;
esac
readonly venv=$bin/../../page/venv
if [[ ! -x $venv/bin/playwright ]]; then
  /usr/bin/python3 -m venv --system-site-packages "$venv"
  "$venv/bin/pip" install --quiet playwright==1.65.2
fi
export QKV_BIN_DIR=$bin QKV_PAGE_SHOTS=${QKV_PAGE_SHOTS:-$bin/../../page/shots} PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$bin/../tests/e2e/stubs:$PWD/tests/e2e:$PWD/tests/page
exec "$venv/bin/python" -m pytest -p no:cacheprovider -q "$@" tests/page
