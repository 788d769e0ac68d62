"""vLLM's engine, LMCache's server and a real daemon: what the server kept there outlives it."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys

import pytest
from daemon import Daemon, clean_environment, wait_for
from proxy import Proxy

pytest.importorskip("vllm")
pytest.importorskip("lmcache")

from readme import configuration
from vllm_process import Engine

import qkvd

TINYLM = os.path.realpath(os.path.join(os.path.dirname(__file__), "..", "..", "..", "tests", "data", "tinylm"))
COUNT, CHUNK = 160, 64
HEADS = 2


def ids(name):
    with open(os.path.join(TINYLM, name), "rb") as file:
        return list(file.read())


PROMPT = ids("prompt.txt")
EXPECTED = ids("greedy_continuation_160.txt")
CHUNKS = len(PROMPT) // CHUNK


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def server(target, log):
    """LMCache's server, whose second level is the daemon; gives its port."""
    port, http = free_port(), free_port()
    adapter = configuration("--l2-adapter")
    adapter["adapter_params"] |= {"target": target, "kv_heads": HEADS, "bits": "exact", "timeout": 30.0}
    command = [
        "setpriv", "--pdeathsig", "KILL", os.path.join(os.path.dirname(sys.executable), "lmcache"), "server",
        "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http), "--disable-observability",
        "--chunk-size", str(CHUNK), "--l1-size-gb", "1", "--l1-init-size-gb", "1", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "engine_driven",  # on processors there is no other
        "--shm-name", f"qkvd-{secrets.token_hex(4)}", "--l2-adapter", json.dumps(adapter),
    ]  # fmt: skip
    with open(log, "ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=clean_environment(LMCACHE_TRACK_USAGE="false"))

    def listens():
        assert process.poll() is None, open(log).read()[-4000:]  # noqa: SIM115
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_for(listens, "LMCache's server does not listen")
        yield port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def engine(port, log):
    config = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }  # fmt: skip
    return Engine(TINYLM, log=log, kv_transfer_config=config, max_model_len=1024, block_size=CHUNK)


def held(daemon):
    with qkvd.Client(daemon.target) as client:
        return sum(info.session.startswith("chunk/") for info in client.sessions())


def test_chunks_outlive_lmcache(tmp_path):
    logs = os.environ.get("QKV_ENGINE_LOGS", str(tmp_path))
    os.environ["LMCACHE_TRACK_USAGE"] = "false"
    with Daemon() as daemon, Proxy(daemon.target) as proxy:
        with server(daemon.target, f"{logs}/server-1.log") as port, engine(port, f"{logs}/lmcache-1.log") as first:
            made = first.generate(PROMPT, COUNT)
            assert (made["tokens"], made["cached"]) == (EXPECTED, 0)
            wait_for(lambda: held(daemon) >= CHUNKS, "LMCache does not keep the prompt's chunks")
        # Another server, which has nothing of its own, and another engine.
        with server(proxy.target, f"{logs}/server-2.log") as port, engine(port, f"{logs}/lmcache-2.log") as second:
            made = second.generate(PROMPT, COUNT)
            assert made["tokens"] == EXPECTED
            assert made["cached"] >= (CHUNKS - 1) * CHUNK
        # The daemon dies while a third one loads: the engine goes on.
        with server(proxy.target, f"{logs}/server-3.log") as port, engine(port, f"{logs}/lmcache-3.log") as third:
            proxy.after(1_000_000, daemon.kill)
            assert third.generate(PROMPT, COUNT)["tokens"] == EXPECTED
            wait_for(lambda: daemon.process.poll() is not None, "the load has ended before it was broken off")
            daemon.start()
