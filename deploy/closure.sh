#!/bin/sh
# Usage: deploy/closure.sh FOLDER PROGRAM...
# Copies the loader and every library that the programs are linked with into FOLDER, at their places, and a passwd with
# the image's user.
set -eu
folder=$1
shift
mkdir -p "$folder/etc"
ldd "$@" | sed -n 's|.*=> \(/[^ ]*\) .*|\1|p; s|^[[:space:]]*\(/[^ ]*ld-linux[^ ]*\) .*|\1|p' | sort -u |
  while read -r library; do
    mkdir -p "$folder$(dirname "$library")"
    cp -L "$library" "$folder$library"
  done
echo "qkvd:x:7580:7580:qkvd:/var/lib/qkvd:/sbin/nologin" >"$folder/etc/passwd"
echo "qkvd:x:7580:" >"$folder/etc/group"
