# The Debian packages that building and testing need, and how they are installed. Sourced, not run:
#
#   . deploy/packages.sh
#   qkv_install $(qkv_packages build)
#
# shellcheck shell=bash

# qkv_packages build|cross|test|run: the names, one a line. `build` has all that configuring needs, tests included (and gRPC's
# CMake package wants libgrpc++-dev and protobuf-compiler-grpc to be there); `cross` is what deploy/arm64.sh needs as well;
# `test` is what comes on top of `build`; `run` is what qkvd and qkvctl are linked with, for images.
qkv_packages() {
  case "$1" in
    build)
      printf '%s\n' \
        gcc libc6-dev cmake ninja-build pkg-config \
        libgrpc-dev libgrpc++-dev libssl-dev protobuf-compiler protobuf-c-compiler libprotobuf-c-dev \
        libuv1-dev liburing-dev libmicrohttpd-dev libgnutls28-dev libyaml-dev libjansson-dev libxxhash-dev libzstd-dev uthash-dev \
        libpcre2-dev libopenblas-dev libcmocka-dev libsystemd-dev python3 protobuf-compiler-grpc
      ;;
    cross) printf '%s\n' gcc-aarch64-linux-gnu libc6-dev-arm64-cross mmdebstrap ;;
    test)
      printf '%s\n' \
        clang-14 clang-format-14 clang-tidy-14 libclang-rt-14-dev binutils curl \
        python3-pytest python3-numpy python3-grpcio python3-protobuf python3-venv python3-dev openssl prometheus nodejs \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user libsimde-dev
      ;;
    run)
      printf '%s\n' \
        libgnutls30 libgrpc29 libjansson4 libmicrohttpd12 libopenblas0-pthread libpcre2-8-0 libprotobuf-c1 liburing2 libuv1 \
        libxxhash0 libyaml-0-2 libzstd1
      ;;
    *)
      echo "qkv_packages: $1 is none of build, cross, test and run" >&2
      return 2
      ;;
  esac
}

# qkv_missing PACKAGE...: those that are not installed, one a line.
qkv_missing() {
  local installed package
  installed=$(dpkg-query -W -f '${Package} ${db:Status-Status}\n' "$@" 2>/dev/null) || true # 1 where one is unknown
  for package in "$@"; do
    grep -qxF "$package installed" <<<"$installed" || echo "$package"
  done
}

# qkv_install PACKAGE...: installs those that are missing and says so; nothing where none is. Output of apt-get
# is appended to $QKV_INSTALL_LOG where that is set. Fails with a sentence that says what to do.
qkv_install() {
  local missing as_root=() output=${QKV_INSTALL_LOG:-/dev/stdout}
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    echo "This script installs Debian packages, but there is no apt-get here. Use Debian 12, or install the" >&2
    echo "equivalents of: $*" >&2
    return 1
  fi
  mapfile -t missing < <(qkv_missing "$@")
  ((${#missing[@]} > 0)) || return 0
  if (($(id -u) != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "Packages are missing. Install them as root, then start again:" >&2
      echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
      return 1
    fi
    sudo -v || return 1 # asks for the password before anything else is printed
    as_root=(sudo)
  fi
  echo "installing ${#missing[@]} Debian packages: ${missing[*]}"
  if ! { "${as_root[@]}" apt-get update -q &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
      apt-get install -q -y --no-install-recommends "${missing[@]}"; } >>"$output" 2>&1; then
    echo "apt-get failed${QKV_INSTALL_LOG:+ (its output is in $QKV_INSTALL_LOG)}. Check the network and the" >&2
    echo "package sources, then start again." >&2
    return 1
  fi
}
