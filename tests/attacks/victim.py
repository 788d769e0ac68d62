"""A tenant that decodes, and one who asks for the daemon's health, while others do harm: how long they wait."""

import os
import subprocess
import sys
import threading
import time

import grpc

from daemon import PATIENCE
from health.v1 import health_pb2, health_pb2_grpc
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import kv_cache_pb2 as kv

MIB = 1 << 20


def percentile(times, part):
    return sorted(times)[min(len(times) - 1, int(len(times) * part))]


class Attacker:
    """A process of attackers.py. Use as a context manager."""

    def __init__(self, daemon, name):
        here = os.path.dirname(os.path.abspath(__file__))
        path = [os.path.join(os.path.dirname(here), "e2e"), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen([sys.executable, os.path.join(here, "attackers.py"), name, daemon.tcp],
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)}, stdout=subprocess.PIPE,
                                        text=True)

    def __enter__(self):
        assert self.process.stdout.readline() == "begins\n"
        return self

    def __exit__(self, *_):
        assert self.process.poll() is None, f"the attack has ended: {self.process.returncode}"
        self.process.kill()
        self.process.communicate()


class Look:
    """What was seen: times in seconds, and the most resident memory in bytes."""

    def __init__(self):
        self.decodes, self.checks, self.rss, self.failures = [], [], 0, []

    def __str__(self):
        return (f"decode p50 {percentile(self.decodes, .5) * 1e3:.2f} p99 {percentile(self.decodes, .99) * 1e3:.2f} ms, "
                f"health p99 {percentile(self.checks, .99) * 1e3:.1f} max {max(self.checks) * 1e3:.1f} ms, "
                f"{self.rss / MIB:.0f} MiB")


class Victim:
    def __init__(self, daemon, tenant="victim", tokens=512):
        self.daemon = daemon
        self.cache = Cache(Tenant(daemon.stub(daemon.tcp), tenant), f"of-{tenant}", layers=1, kv_heads=4, q_heads=16,
                           key_dim=64, value_dim=64)
        self.cache.append(0, *self.cache.rows(tokens))
        self.request = kv.AttendRequest(items=[self.cache.item(tokens - 1, q=self.cache.queries(1))])
        self.expected = self.attend()
        self.health = health_pb2_grpc.HealthStub(daemon.channel(daemon.tcp))
        self.check()

    def attend(self):
        return self.cache.stub.Attend(self.request, timeout=TIMEOUT).SerializeToString()

    def check(self):
        answer = self.health.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

    def look(self, seconds, pause=0.001):
        """Decodes with a pause between steps, and checks the health 50 times a second."""
        seen, ended = Look(), threading.Event()

        def checks():
            while not ended.is_set():
                begin = time.monotonic()
                try:
                    self.check()
                except grpc.RpcError as error:
                    seen.failures.append(error)
                seen.checks.append(time.monotonic() - begin)
                seen.rss = max(seen.rss, self.daemon.rss_bytes())
                ended.wait(0.02)

        checker = threading.Thread(target=checks)
        checker.start()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            begin = time.monotonic()
            try:
                assert self.attend() == self.expected, "the answer has changed"
            except grpc.RpcError as error:
                seen.failures.append(error)
            seen.decodes.append(time.monotonic() - begin)
            time.sleep(pause)
        ended.set()
        checker.join()
        return seen
