#!/usr/bin/env bash
# Rules that a compiler does not check. Prints every violation as file:line: text; exits 1 where there is one.
set -euo pipefail
readonly here=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")

usage() {
  cat <<'TEXT'
Usage: tests/lint/lint.sh [--build DIR] [--help]

  --build DIR   a finished build, for header self-containment and exported symbols; build/release by default

Checks: dependency direction by #include, banned functions, unfinished marks, paths of somebody's machine, blanks,
length of files and functions, the top level, metric and option tables, clang-format, headers that compile
alone, prefixes of exported symbols, texts that tests/mutants replaces, the syntax of the admin page's script.
TEXT
}

cd "$here/../.."
build=build/release
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --build)
      build=${2:?--build needs a directory}
      shift 2
      ;;
    *)
      echo "lint.sh: unknown argument $1; see --help" >&2
      exit 2
      ;;
  esac
done
if [[ ! -f $build/compile_commands.json ]]; then
  echo "lint.sh: there is no build in $build; cmake --preset release && cmake --build --preset release" >&2
  exit 2
fi

failed=0
python3 "$here/source.py" . || failed=1
python3 "$here/tables.py" . || failed=1
mutants=$(python3 "$here/../mutants/mutants.py" --list) || {
  grep -E ': (its text stands|there is no) ' <<<"$mutants" || true
  failed=1
}
python3 "$here/headers.py" . "$build" || failed=1
"$here/symbols.sh" "$build" || failed=1
script=$(mktemp --suffix .js)
trap 'rm -f "$script"' EXIT
sed '1,/<script/d; /<\/script>/,$d' server/http/page.html >"$script"
[[ -s $script ]] || { echo "server/http/page.html has no script" && failed=1; }
node --check "$script" || failed=1
python3 "$here/source.py" --list-c . | xargs clang-format-14 --dry-run -Werror || failed=1
exit $failed
