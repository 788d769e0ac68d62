#!/usr/bin/env bash
# Builds an image of deploy/Containerfile with buildah, of what git knows of this checkout. Two builds of the same sources from
# the same base have the same digest, in other stores and on other machines too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
Usage: deploy/image.sh TARGET NAME [option of buildah bud...]

  TARGET   scratch or debian: deploy/Containerfile
  NAME     of the image, such as localhost/qkvd:scratch
  options  such as --build-arg BASE=IMAGE, --platform linux/arm64, --no-cache

Needs buildah and python3.
TEXT
}

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  usage
  exit 0
fi
if (($# < 2)) || [[ $1 != scratch && $1 != debian ]]; then
  usage >&2
  exit 2
fi
target=$1 name=$2
shift 2

folder=$(mktemp -d)
readonly folder
trap 'rm -rf "$folder"' EXIT

revision=$(git rev-parse HEAD)
made_at=$(git log -1 --format=%ct "$revision")
mkdir "$folder/context"
git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C "$folder/context"
SOURCE_DATE_EPOCH=$made_at buildah bud --layers --format docker --target "$target" --timestamp "$made_at" \
  --build-arg REVISION="$revision" --build-arg SOURCE_DATE_EPOCH="$made_at" "$@" \
  --ignorefile "$folder/context/deploy/Containerfile.dockerignore" -f "$folder/context/deploy/Containerfile" \
  --iidfile "$folder/built" "$folder/context"

# buildah writes down what the container was called that it built in, and the images of its steps: made up anew each time.
buildah push -q "$(<"$folder/built")" "dir:$folder/image"
python3 deploy/image_config.py "$folder/image"
buildah tag "$(buildah pull -q "dir:$folder/image")" "$name"
