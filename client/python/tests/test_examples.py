"""The examples run, and leave no session open."""

import importlib.util
import os
import subprocess
import sys

import pytest
from daemon import PATIENCE, clean_environment

EXAMPLES = os.path.join(os.path.dirname(__file__), "..", "examples")
TINYLM = os.path.join(os.path.dirname(__file__), "..", "..", "..", "tests", "data", "tinylm")
OUTPUTS = {
    "attend.py": "(1, 8, 64) length 100\n",
    "decode_loop.py": "(1, 8, 64) length 50\n",
    "merge_with_own_tokens.py": "largest difference below 1e-5: True\n",
    "asynchronous.py": "10 sessions: (1, 8, 64) (300, 2, 64)\n",
}


def run(example, *arguments):
    result = subprocess.run(
        [sys.executable, os.path.join(EXAMPLES, example), *arguments],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("example", OUTPUTS)
def test_examples(daemon, client, example):
    for target in (daemon.target, daemon.tcp):
        assert run(example, target) == OUTPUTS[example]
    assert client.status().sessions == 0


def test_example_of_transformers(daemon, client):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    output = run("generate.py", daemon.target, TINYLM)
    assert output.startswith("And God said, Let there be light") and output.endswith("113 tokens in transformers\n")
    assert client.status().sessions == 0


def test_all_examples_are_tested():
    assert {*OUTPUTS, "generate.py"} == {name for name in os.listdir(EXAMPLES) if name.endswith(".py")}
