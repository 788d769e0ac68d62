"""The committed messages are what generate.sh makes of proto/qkv/v1, and the package says one version."""

import filecmp
import importlib.metadata
import os
import subprocess
import sys

import pytest

import qkvd

HERE = os.path.dirname(__file__)
PACKAGE = os.path.join(HERE, "..")


def test_messages_are_up_to_date(tmp_path):
    try:
        importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("grpcio-tools is not installed")
    command = [os.path.join(PACKAGE, "generate.sh"), "--output", str(tmp_path), "--python", sys.executable]
    subprocess.run(command, check=True)
    committed = os.path.join(PACKAGE, "src", "qkvd", "v1")
    made = sorted(os.listdir(tmp_path))
    assert made == sorted(name for name in os.listdir(committed) if "_pb2." in name)
    assert filecmp.cmpfiles(tmp_path, committed, made, shallow=False)[0] == made, "run client/python/generate.sh"


def test_version():
    assert importlib.metadata.version("qkvd") == qkvd.__version__
