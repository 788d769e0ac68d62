#!/usr/bin/env bash
# clang-tidy over our sources, with .clang-tidy's checks and the flags of a build. Usage: tidy.sh [BUILD]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
build=${1:-build/release}
output=$(nice run-clang-tidy-14 -quiet -j "$(nproc)" -p "$build" "^$PWD/(engine|proto|storage|server|client)/.*\.c$" 2>&1) || {
  # Colours and the lines that say nothing.
  sed 's/\x1b\[[0-9;]*m//g' <<<"$output" |
    grep -vE '^(clang-tidy-14 |[0-9]+ warnings? generated|Suppressed|Use -header-filter)'
  exit 1
}
