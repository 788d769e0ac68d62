#!/usr/bin/env bash
# Installs what is needed, builds, and runs every test. The output ends in ctest's own closing line.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=deploy/packages.sh
. deploy/packages.sh

readonly all_stages=(asan tsan fuzz arm release)
readonly more_stages=(rest quality smollm2 transformers vllm lmcache sglang image boot packages arm64 proxies chart compose commands page) # only when they are asked for

usage() {
  cat <<'TEXT'
Usage: tests/run.sh [--only STAGE]... [--fuzz-seconds N] [--help]

Installs the Debian packages that are missing, builds, and runs the tests, stage by stage; stops at the first
stage that fails. Builds lie in build/<preset>; a second run builds only what has changed.

  asan      the tests but the longest ones under AddressSanitizer (with leak check) and UndefinedBehaviorSanitizer
  tsan      the tests of server, storage, the engine's threads, and some end to end, under ThreadSanitizer
  fuzz      every fuzz target for --fuzz-seconds (10 by default)
  arm       the kernels for 64-bit ARM, cross-compiled and run by qemu
  release   the tests with the release build, and the lint

Not among them unless asked for:

  rest      the tests that the stages asan and release leave out as they take long: every kernel at every width and depth,
            every codec at one depth, the longest end-to-end tests with the asan build, and, with the release build, long ones
            that the stage asan runs; 15 minutes
  quality   every codec at all depths against tests/regress/codecs.csv, and 16 windows of each text against quality.csv, of
            which rest has one depth and release one window; 15 minutes. What a trial decides may differ on other processors
  smollm2   quality on a real model, which deploy/smollm2.sh downloads (98 MB), against tests/regress/smollm2.csv, the same
            through a daemon that learns from traffic, against tests/regress/learnt.csv, and the tests that need the model;
            some 30 minutes on two processors
  transformers
            generate() of three versions of Hugging Face transformers with its cache in a daemon, on tinylm and SmolLM2;
            installs 5 GB with pip, some 10 minutes
  vllm, lmcache, sglang
            the engine with its cache in a daemon: client/python/tests/run.sh --help; each installs up to 7 GB with pip
  image     both images of deploy/Containerfile, built by buildah, one of them in two stores, and run by podman, read-only and unprivileged, with
            both seccomp profiles and under load; the end-to-end tests with its daemon; then deploy/compose by Docker's engine, with Prometheus; installs these,
            mmdebstrap, and with pip hadolint and spdx-tools; needs root, 15 to 40 minutes
  boot      deploy/systemd in a Debian that boots under systemd-nspawn: rows after kill -9 and a restart, reload, TLS;
            installs mmdebstrap and systemd-container, needs root, 2 minutes
  packages  the Debian packages of deploy/debian.sh, built, checked by lintian, and booted likewise: installed, upgraded
            while calls come, purged; and a C program built with libqkv-dev; needs root, 5 minutes
  arm64     the daemon and its tools for 64-bit ARM, cross-built by deploy/arm64.sh; tests of sessions, forks, prefixes, streams
            and data directories with that daemon, run by qemu; then the image for linux/arm64, likewise; installs as image
            does; needs root, and registers qemu with the kernel for the time; 20 to 40 minutes
  proxies   sessions, kill -9, drains, TLS and the smallest call behind HAProxy, nginx and Envoy as deploy/proxies sets them up;
            installs them, 2 minutes
  chart     deploy/helm/qkvd without a cluster: lint, schema, manifests of eighteen sets of values and the daemon of each;
            installs with pip, 1 minute
  compose   what deploy/compose says, its processes run by hand: mutual TLS, two tenants, and a Prometheus, in which every
            expression of dashboard and alerts has figures
  commands  the ten commands of docs/operations.md as they stand there; installs with pip, needs ports 7580, 7581 and 9090;
            tests/deploy/commands.sh --fresh runs them in a Debian that has nothing yet
  page      the page of --admin-listen in a headless Chromium: what it shows, by keyboard, on narrow and wide screens, how
            fast; leaves screenshots in build/page/shots; installs chromium, and playwright with pip, 2 minutes

By hand: tests/link/measure.sh, pages over a slow link; tests/mutants/mutants.py, what planted mistakes are caught;
tests/lint/tidy.sh --deep, clang-tidy with the static analyzer's own limits; tests/attacks/measure.py, what attacks cost
others; tests/attacks/identity_cost.py, what TLS and tokens cost; tests/attacks/shares.py, what a flooded tenant has of
its share; tests/attacks/waiting.py, how long a tenant waits while another one's jobs wait.
TEXT
}

fail() {
  echo "tests/run.sh: $*" >&2
  exit 1
}

stages=()
fuzz_seconds=10
while (($# > 0)); do
  case "$1" in
    --help | -h)
      usage
      exit 0
      ;;
    --only)
      (($# > 1)) || fail "--only needs one of: ${all_stages[*]} ${more_stages[*]}"
      [[ " ${all_stages[*]} ${more_stages[*]} " == *" $2 "* ]] ||
        fail "no stage $2; there are: ${all_stages[*]} ${more_stages[*]}"
      stages+=("$2")
      shift 2
      ;;
    --fuzz-seconds)
      [[ "${2:-}" =~ ^[1-9][0-9]*$ ]] || fail "--fuzz-seconds needs a number of seconds, at least 1"
      fuzz_seconds=$2
      shift 2
      ;;
    *) fail "unknown argument $1; see tests/run.sh --help" ;;
  esac
done
((${#stages[@]} > 0)) || stages=("${all_stages[@]}")

# Tests at a time: those that wait, for a disk or a daemon, leave their processor to another one.
at_once=$(($(nproc) + 1))

say() { printf '== %02d:%02d  %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*"; }

# Sanitizers map their shadow memory at fixed places; the kernel's strongest address randomization gets in the
# way of that, so it is switched off for these processes where the system allows it.
unrandomized=()
if setarch "$(uname -m)" -R true 2>/dev/null; then unrandomized=(setarch "$(uname -m)" -R); fi

build() { # preset [target]
  say "build $1"
  cmake --preset "$1" >"build/$1.configure.log" 2>&1 || {
    cat "build/$1.configure.log" >&2
    fail "cmake --preset $1 failed, see above"
  }
  # Ninja's progress line is for people.
  local quiet=(-- --quiet)
  if [[ -t 1 ]]; then quiet=(); fi
  cmake --build --preset "$1" --parallel "$(nproc)" ${2:+--target "$2"} "${quiet[@]}" ||
    fail "the $1 build failed, see above"
}

run_asan() {
  build asan
  say "tests of the asan build"
  "${unrandomized[@]}" ctest --preset asan -j "$at_once" -LE '^rest$'
}

run_tsan() {
  build tsan
  say "tests of the tsan build: server, storage, threads, and the daemon's end to end"
  "${unrandomized[@]}" ctest --preset tsan -j "$at_once"
}

run_fuzz() {
  build fuzz
  say "fuzz targets, $fuzz_seconds s each"
  "${unrandomized[@]}" tests/fuzz/smoke.sh --seconds "$fuzz_seconds"
}

# Those of what the reference wrote, in checkkern's output; each of them once.
digests() {
  sed -n 's/.*equal to the reference, \([0-9a-f]\{16\}\)$/\1/p' "$@" | sort -u
}

run_arm() {
  build arm
  say "tests of the arm build"
  ctest --preset arm -j "$at_once"
  build release checkkern
  say "the reference's bytes here and there"
  local here there
  here=$(build/release/bin/checkkern --rung reference --every 5 | digests)
  there=$(digests build/arm/Testing/Temporary/LastTest.log)
  [[ $here == "$there" ]] || fail "the scalar reference writes other bytes on ARM: digests $here and ${there//$'\n'/ }"
}

run_release() {
  build release
  say "tests of the release build"
  ctest --preset release -j "$at_once" -LE '^rest$'
}

run_rest() {
  build asan
  say "the long tests with the asan build"
  "${unrandomized[@]}" ctest --preset asan -j "$at_once" -L '^rest$'
  build release
  say "the long tests with the release build"
  ctest --preset release -j "$at_once" -L '^rest$'
}

run_quality() {
  build release qkv-bench
  build release qkv-worker
  say "every codec at all depths"
  tests/regress/quality.py --bin build/release/bin --codecs --full
  say "sixteen windows of each text"
  tests/regress/quality.py --bin build/release/bin --full
}

run_smollm2() {
  say "the model"
  local model
  model=$(deploy/smollm2.sh)
  build release
  say "tests that need the model"
  ctest --preset release -R '^client/worker/(tokenizer|lm_gguf)$'
  say "quality on the model"
  tests/regress/quality.py --bin build/release/bin --model "$model"
  say "quality through a daemon that learns"
  tests/regress/learnt.py --bin build/release/bin --model "$model"
}

run_engine() { # name
  build release qkvd
  build release qkvctl
  client/python/tests/run.sh --engine "$1" --bin build/release/bin
}

run_transformers() { run_engine transformers; }
run_vllm() { run_engine vllm; }
run_lmcache() { run_engine lmcache; }
run_sglang() { run_engine sglang; }

run_image() {
  qkv_install buildah podman runc mmdebstrap
  build release qkv-bench
  build release qkv-worker
  build release e2e_stubs
  say "images"
  tests/deploy/image.sh --twice
  qkv_install docker.io docker-compose prometheus
  build release qkvctl
  say "compose by Docker"
  tests/deploy/engine.sh
}

run_boot() {
  qkv_install mmdebstrap systemd-container
  build release qkvd
  build release qkvctl
  say "a boot with the units"
  tests/deploy/boot.sh
}

run_packages() {
  qkv_install mmdebstrap systemd-container dpkg-dev debhelper lintian
  tests/deploy/packages.sh
}

run_arm64() {
  qkv_install mmdebstrap buildah podman runc arch-test qemu-user-static
  say "build arm64"
  deploy/arm64.sh --target qkvd --target qkvctl --target qkv-worker --target test_client_c_rest --target e2e_stubs
  say "tests of the arm64 build"
  # shellcheck source=tests/deploy/emulation.sh
  . tests/deploy/emulation.sh
  trap emulation_end EXIT
  emulation_begin
  export QEMU_LD_PREFIX=$PWD/build/arm64-root
  build/arm64/bin/test_client_c_rest
  # QKV_SANITIZE: as slow as sanitized builds.
  PYTHONPATH=$PWD/build/arm64/tests/e2e/stubs QKV_STUBS=$PWD/build/arm64/tests/e2e/stubs PYTHONDONTWRITEBYTECODE=1 \
    QKV_BIN_DIR=$PWD/build/arm64/bin QKV_SANITIZE=qemu \
    /usr/bin/python3 -m pytest -p no:cacheprovider -q tests/e2e/test_{sessions,forks,prefixes,streams,golden_directory}.py
  unset QEMU_LD_PREFIX
  say "image for arm64"
  tests/deploy/image.sh --arm64
}

run_proxies() {
  qkv_install haproxy nginx-light
  build release qkvd
  build release e2e_stubs
  say "proxies"
  tests/deploy/proxies.sh
}

run_chart() {
  build release qkvd
  build release qkvctl
  say "chart"
  tests/deploy/chart.sh
}

run_compose() {
  qkv_install prometheus openssl python3-yaml
  build release qkvd
  build release qkvctl
  build release e2e_stubs
  say "compose"
  tests/deploy/compose.sh
}

run_commands() {
  say "the ten commands of docs/operations.md"
  tests/deploy/commands.sh
}

run_page() {
  qkv_install chromium
  build release qkvd
  build release e2e_stubs
  say "page"
  tests/page/run.sh
}

say "packages"
mapfile -t packages < <(qkv_packages build && qkv_packages test)
qkv_install "${packages[@]}"
mkdir -p build
if command -v ccache >/dev/null; then export CMAKE_C_COMPILER_LAUNCHER=ccache; fi
# The order is that of all_stages whatever the order of the arguments: release comes last.
for stage in "${all_stages[@]}" "${more_stages[@]}"; do
  if [[ " ${stages[*]} " == *" $stage "* ]]; then "run_$stage"; fi
done
