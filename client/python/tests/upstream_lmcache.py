"""For `upstream.py`: LMCache's tests of what works with an adapter of its second level meet qkvd's, over a daemon of their
own, in the place of LMCache's mock. Each adapter has a model name of its own there, as each mock has its own memory."""

import pytest
from daemon import Daemon
from lmcache.v1.distributed.l2_adapters import mock_l2_adapter
from upstream_report import pytest_collectreport, pytest_runtest_logreport, pytest_unconfigure  # noqa: F401

from qkvd.lmcache import QkvdL2Adapter

DAEMON = Daemon("--limit-models", "10000")
made = 0


class Substitute(QkvdL2Adapter):
    """Made as the mock is; its capacity and its speed are not simulated."""

    def __init__(self, config):
        global made
        made += 1
        super().__init__({"target": DAEMON.target, "bits": "exact", "model_name": f"m{made}", "timeout": 30.0})


def pytest_configure(config):
    mock_l2_adapter.MockL2Adapter = Substitute


def pytest_collection_modifyitems(items):
    for item in items:
        if "TestBandwidthSimulation" in item.nodeid:
            item.add_marker(pytest.mark.skip("about the mock's simulated speed"))


def pytest_sessionfinish():
    DAEMON.__exit__(None, None, None)
