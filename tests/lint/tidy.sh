#!/usr/bin/env bash
# clang-tidy over our sources, with .clang-tidy's checks and the flags of a build. Usage: tidy.sh [--deep] [BUILD]
# The static analyzer follows at most 30,000 states of a function, with --deep its own 225,000: six times the time. With
# 10,000 it reports what is no mistake, as it no longer looks into the functions that are called.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
states=(-extra-arg=-Xclang -extra-arg=-analyzer-config -extra-arg=-Xclang -extra-arg=max-nodes=30000)
if [[ "${1:-}" == --deep ]]; then
  states=()
  shift
fi
build=${1:-build/release}
output=$(nice run-clang-tidy-14 -quiet "${states[@]}" -j "$(nproc)" -p "$build" \
  "^$PWD/(engine|proto|storage|server|client)/.*\.c$" 2>&1) || {
  # Colours and the lines that say nothing.
  sed 's/\x1b\[[0-9;]*m//g' <<<"$output" |
    grep -vE '^(clang-tidy-14 |[0-9]+ warnings? generated|Suppressed|Use -header-filter)'
  exit 1
}
