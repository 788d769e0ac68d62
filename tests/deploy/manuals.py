#!/usr/bin/python3
"""Manual pages and completion (deploy/manuals.py): nothing that --help has is missing, troff and both shells take them, and
bash completes commands, options and files.

Usage: tests/deploy/manuals.py DIR, which has the programs.
"""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRY = """source "$1"
compopt() { :; }
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
"_${1//-/_}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def output(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def completed(out, *words):
    return set(output("bash", "-c", TRY, "try", out / "bash" / words[0], *words).split())


def check_page(programs, page):
    """Every option and command of --help is in the page, and troff warns of nothing."""
    name = page.stem
    text = page.read_text().replace("\\-", "-")
    helps = output(programs / name, "--help")
    commands = re.findall(r"^  ([a-z][a-z-]*)", helps.partition("commands:")[2], re.MULTILINE)
    for command in commands:
        assert f".SS {name} {command}" in text, f"{name} {command} is missing"
        helps += output(programs / name, command, "--help")
    options = set(re.findall(r"^  (--[a-z0-9-]+)", helps, re.MULTILINE))
    assert len(options) > 5 and (name == "qkvd" or len(commands) > 2)
    missing = [option for option in options if f"\\fB{option}\\fR" not in text]
    assert not missing, f"{name}: {missing}"
    if shutil.which("groff"):
        warned = subprocess.run(["groff", "-man", "-Tutf8", "-ww", page], capture_output=True, text=True, check=True).stderr
        assert not warned, warned
    return commands, options


def main():
    programs = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory(prefix="qkvd-manuals-") as folder:
        out = pathlib.Path(folder)
        subprocess.run([ROOT / "deploy/manuals.py", "--bin", programs, "--out", out], check=True)
        found = {page.stem: check_page(programs, page) for page in sorted((out / "man").iterdir())}
        assert set(found) == {"qkvd", "qkvctl", "qkv-worker", "qkv-bench"}
        for name, (commands, options) in found.items():
            subprocess.run(["bash", "-n", out / "bash" / name], check=True)
            if shutil.which("zsh"):
                subprocess.run(["zsh", "-n", out / "zsh" / f"_{name}"], check=True)
            if commands:
                assert completed(out, name, "") == set(commands)
        assert completed(out, "qkvd", "--") == found["qkvd"][1]
        assert completed(out, "qkvctl", "--target", "x", "fe") == {"fetch"}
        assert completed(out, "qkvctl", "fetch", "--he") == {"--heads-first", "--help"}
        assert "--metrics" in completed(out, "qkvctl", "status", "--") and "--heads-first" not in completed(
            out, "qkvctl", "status", "--")
        assert completed(out, "qkvctl", "fetch", "--output", "/etc/hostnam") == {"/etc/hostname"}
    print("passed")


if __name__ == "__main__":
    main()
