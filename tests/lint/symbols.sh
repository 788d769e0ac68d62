#!/usr/bin/env bash
# What our static libraries export begins with qkv: qkv_ (public), qkvi_ (between files), or a program's own name. The
# server replaces functions of libraries on purpose (server/rpc/inspect.h).
# Usage: symbols.sh BUILD
set -euo pipefail
failed=0
while read -r library; do
  # Generated protobuf code has names of its own.
  [[ $(basename "$library") == libqkv_messages.a ]] && continue
  replaced=' '
  [[ $(basename "$library") == libqkv_server.a ]] && replaced=' recvmsg sendmsg close epoll_ctl SSL_read SSL_write '
  while read -r symbol; do
    [[ $replaced == *" $symbol "* ]] && continue
    echo "$library: exports $symbol, which does not begin with qkv"
    failed=1
  done < <(nm --extern-only --defined-only --format=posix "$library" 2>/dev/null |
    awk 'NF >= 3 && $1 !~ /^qkv/ {print $1}')
done < <(find "$1" -name '*.a' -not -path "$1/tests/*")
exit $failed
