"""Which files belong to the project, and what the checks say."""

import os
import shutil
import subprocess
import sys


def project_files(root):
    """Paths of the project's files, relative to root: what git, where it is, knows or would add; else all but builds."""
    if os.path.exists(os.path.join(root, ".git")) and shutil.which("git"):
        command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
        return sorted({name for name in names if name and os.path.isfile(os.path.join(root, name))})
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in (".git", "build", "__pycache__")]
        found += [os.path.relpath(os.path.join(folder, name), root) for name in names]
    return sorted(found)


def is_c(path):
    return path.endswith((".c", ".h"))


def read(root, path):
    """The file's text, or None where it is data."""
    with open(os.path.join(root, path), "rb") as file:
        data = file.read()
    if b"\0" in data:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class Report:
    """Prints violations as they are found."""

    def __init__(self):
        self.count = 0

    def violation(self, path, line, text):
        self.count += 1
        print(f"{path}:{line}: {text}" if line else f"{path}: {text}")

    def exit(self):
        sys.exit(1 if self.count else 0)
