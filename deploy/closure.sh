#!/bin/sh
# Usage: deploy/closure.sh FOLDER LIST PROGRAM...
# Copies the loader and every library that the programs are linked with into FOLDER, at their places, and a passwd with
# the image's user; writes the names of the libraries' Debian packages to LIST.
set -eu
folder=$1
list=$2
shift 2
mkdir -p "$folder/etc"
ldd "$@" | sed -n 's|.*=> \(/[^ ]*\) .*|\1|p; s|^[[:space:]]*\(/[^ ]*ld-linux[^ ]*\) .*|\1|p' | sort -u >"$list.files"
while read -r library; do
  mkdir -p "$folder$(dirname "$library")"
  cp -L "$library" "$folder$library"
done <"$list.files"
# dpkg knows files by where they really are: /usr is merged, and some are links of update-alternatives. Of each file one of two
# names is unknown to it.
xargs readlink -f <"$list.files" | sed 'p; s|^/usr||' | sort -u | xargs dpkg-query -S 2>/dev/null | sed 's/:.*//' | sort -u >"$list"
rm "$list.files"
echo "qkvd:x:7580:7580:qkvd:/var/lib/qkvd:/sbin/nologin" >"$folder/etc/passwd"
echo "qkvd:x:7580:" >"$folder/etc/group"
