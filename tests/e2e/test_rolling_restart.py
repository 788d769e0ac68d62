"""A rolling restart, with processes in place of pods: each of three daemons stops and starts anew on its own directory and
address, one after the other, and no session is lost. qkvctl has all three as its target, as workers do."""

import contextlib
import socket
import subprocess

import numpy as np

from daemon import PATIENCE, Daemon, binary
from kv import FP16, Cache
from qkv.v1 import model_pb2

DAEMONS, SESSIONS_MAX, TOKENS = 3, 60, 150


def free_ports(count):
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


def test_no_session_is_lost(tmp_path):
    ports = free_ports(DAEMONS)
    target = ",".join(f"127.0.0.1:{port}" for port in ports)

    def start(i):
        return Daemon("--listen", f"127.0.0.1:{ports[i]}", "--data-dir", str(tmp_path / str(i)))

    def qkvctl(*words, check=True):
        done = subprocess.run([binary("qkvctl"), *words, "--target", target], capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0 or not check, done.stderr
        return done

    def rows(session):
        path = tmp_path / "rows"
        path.unlink(missing_ok=True)
        qkvctl("fetch", session, "--output", str(path), "--placement", session)
        data = path.read_bytes()
        head = 8 + int.from_bytes(data[:8], "little")  # safetensors: the length of a JSON head, that, and the numbers
        return np.frombuffer(data[head:], "<f2").astype(np.float32)

    names = []
    daemons = [start(i) for i in range(DAEMONS)]
    try:
        for i, daemon in enumerate(daemons):
            cache = Cache(daemon.stub(), "seed" if i == 0 else f"own-{i}", layers=2, dtype=FP16)
            cache.model.name = "model-seed"
            cache.stub.RegisterModel(model_pb2.RegisterModelRequest(model=cache.model), timeout=PATIENCE)
            if i == 0:
                k, v = cache.rows(TOKENS)
                for layer in range(2):
                    cache.append(0, k, v, layer=layer, dtype=FP16)
        source = tmp_path / "source"
        subprocess.run([binary("qkvctl"), "fetch", "seed", "--output", str(source), "--format", "safetensors", "--target",
                        daemons[0].target], check=True, timeout=PATIENCE, capture_output=True)
        # Names decide, with the ports, whose a session is: as many as it takes that each daemon has two.
        while min(daemon.metric("qkvd_sessions") for daemon in daemons) < 3 and len(names) < SESSIONS_MAX:
            names.append(f"session-{len(names)}")
            qkvctl("load", str(source), "--session", names[-1], "--durability", ("async", "sync")[len(names) % 2])
        assert sum(daemon.metric("qkvd_sessions") for daemon in daemons) == len(names) + DAEMONS
        before = {name: rows(name) for name in names}
        for i, daemon in enumerate(daemons):
            daemon.stop()
            assert qkvctl("has", *names, check=False).returncode != 0
            daemons[i] = start(i)
            assert qkvctl("has", *names).returncode == 0
            after = {name: rows(name) for name in names}
            assert all(after[name].shape == before[name].shape for name in names)
            # A clean stop codes what was exact, at 4 bits.
            errors = {name: np.mean((after[name] - before[name]) ** 2) / np.mean(before[name] ** 2) for name in names}
            assert max(errors.values()) < 0.02, f"after daemon {i} was started anew: {errors}"
    finally:
        for daemon in daemons:
            if daemon.alive():
                daemon.stop()
