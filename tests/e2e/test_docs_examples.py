"""The examples of the documentation run, and the README shows exactly them."""

import os
import re
import subprocess
import sys

import pytest

from daemon import PATIENCE, clean_environment

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")


def read(path):
    with open(os.path.join(ROOT, path)) as file:
        return file.read()


def test_python_example(daemon, stub):
    example = os.path.join(ROOT, "docs", "examples", "attend.py")
    environment = clean_environment(PYTHONPATH=os.environ["QKV_STUBS"])
    for target in (daemon.target, daemon.tcp):
        result = subprocess.run([sys.executable, example, target], env=environment, capture_output=True, text=True,
                                timeout=PATIENCE)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "[1, 8, 64] length 100\n"
    assert daemon.status().sessions == 0


@pytest.mark.parametrize("example,output", [("attend", r"\[1, 8, 64\] length 100\n"),
                                            ("pages", r"64 tokens of one page of \d+ bytes\n")])
def test_c_example(daemon, stub, example, output):
    result = subprocess.run([os.path.join(os.environ["QKV_BIN_DIR"], f"example_{example}"), daemon.target],
                            env=clean_environment(), capture_output=True, text=True, timeout=PATIENCE)
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(output, result.stdout)
    assert daemon.status().sessions == 0


@pytest.mark.parametrize("language,example", [("c", "docs/examples/attend.c"),
                                              ("python", "client/python/examples/attend.py")])
def test_readme_shows_the_examples(language, example):
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", read("README.md"), re.MULTILINE | re.DOTALL)
    assert read(example) in blocks
