#!/usr/bin/env bash
# Usage: tests/deploy/chart.sh [--bin DIR]
# Checks deploy/helm/qkvd without a cluster (chart.py); what it needs comes with pip into a folder of its own. DIR has
# qkvd and qkvctl, build/release/bin by default.
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
readonly venv=$bin/../helm
if [[ ! -x $venv/bin/kubernetes-validate ]]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet helm-python-sdk==0.2.2 kubernetes-validate==1.37.0 pyyaml
fi
PYTHONDONTWRITEBYTECODE=1 exec "$venv/bin/python" tests/deploy/chart.py --qkvd "$bin/qkvd"
