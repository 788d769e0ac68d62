#!/usr/bin/python3
"""Takes what is made up anew for each build out of an image's config.

Usage: deploy/image_config.py DIR

DIR: an image as `buildah push IMAGE dir:DIR` writes it; it is changed in place.
"""

import hashlib
import json
import pathlib
import sys


def without_names(config):
    """The config without names of the containers and images of the build."""
    for name in ("container", "container_config", "parent"):
        config.pop(name, None)
    config["config"].pop("Hostname", None)
    for entry in config["history"]:
        if entry.get("comment", "").startswith("FROM "):
            del entry["comment"]
    return config


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    folder = pathlib.Path(sys.argv[1])
    manifest = json.loads((folder / "manifest.json").read_text())
    old = folder / manifest["config"]["digest"].removeprefix("sha256:")
    text = json.dumps(without_names(json.loads(old.read_text())), sort_keys=True, separators=(",", ":")).encode()
    old.unlink()
    digest = hashlib.sha256(text).hexdigest()
    (folder / digest).write_bytes(text)
    manifest["config"].update(digest=f"sha256:{digest}", size=len(text))
    (folder / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, separators=(",", ":")))


if __name__ == "__main__":
    main()
