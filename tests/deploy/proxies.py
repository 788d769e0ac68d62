#!/usr/bin/python3
"""Traffic through the proxies of deploy/proxies: three daemons behind each of them.

Sessions spread over all daemons, every kind of call passes, kill -9 of a daemon moves its sessions alone, and a daemon that
drains gets no further calls: the proxy sees its health, or has been told by its configuration (nginx). With the examples'
TLS, clients with a certificate are served and others are not, and a token's tenant reaches the daemon. Started by
tests/deploy/proxies.sh, which says how.
"""

import argparse
import contextlib
import hashlib
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402
from daemon import PATIENCE, Daemon, wait_for  # noqa: E402
from health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from kv import Cache  # noqa: E402
from qkv.v1 import kv_cache_pb2 as kv  # noqa: E402
from qkv.v1 import kv_cache_pb2_grpc  # noqa: E402

SESSIONS = 60
TOKENS = 100
ADDED_US_MAX = {"haproxy": 200}  # what the proxy may add to the smallest call
UNARY = ("RegisterModel", "OpenSession", "GetSession", "Attend")


class Placed:
    """A stub whose calls have a session's key."""

    def __init__(self, stub, session):
        self._stub, self._session = stub, session

    def __getattr__(self, method):
        call = getattr(self._stub, method)
        return lambda request, **fields: call(request, metadata=(("x-qkv-session", self._session),), **fields)


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def example_of(name, tls):
    """An example in clear, or with what follows its line "With TLS", and without what is "in clear"."""
    lines, of_tls = [], False
    for line in (ROOT / "deploy/proxies" / name).read_text().splitlines():
        comment = line.lstrip().startswith("#")
        if comment and of_tls:
            lines += [line.replace("#", "", 1)] if tls else []
        elif not (tls and line.endswith("# in clear")):
            lines.append(line)
        of_tls = comment and (of_tls or "# With TLS" in line)
    return "\n".join(lines).replace("/etc/qkvd/tls", str(tls)) + "\n"


class Proxy:
    """A proxy with its example, whose ports are others, and whose TLS files are those of the folder `tls`."""

    def __init__(self, command, check, example, backends, folder, tls=None):
        self.port = free_port()
        text = example_of(example, tls)
        for old, new in [(7580, self.port)] + [(7581 + i, port) for i, port in enumerate(backends)]:
            text, count = re.subn(rf"\b{old}\b", str(new), text)
            assert count == 1, f"{example} has port {old} {count} times"
        self.config = pathlib.Path(folder) / example
        self.config.write_text(text)
        words = {"CONFIG": str(self.config), "FOLDER": str(folder)}
        subprocess.run([words.get(word, word) for word in check], check=True, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
        self.log = open(pathlib.Path(folder) / f"{example}.log", "wb")
        self.process = subprocess.Popen(["setpriv", "--pdeathsig", "KILL"] + [words.get(word, word) for word in command],
                                        stdout=self.log, stderr=self.log)

    def leave_out(self, port):
        """What nginx has to be told before a daemon is stopped."""
        text = self.config.read_text()
        assert text.count(f":{port} ") == 1
        self.config.write_text(text.replace(f":{port} ", f":{port} down "))
        self.process.send_signal(signal.SIGHUP)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


def channel(target, credentials=None):
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.secure_channel(target, credentials, options) if credentials else grpc.insecure_channel(target, options)


def serves(target, credentials=None):
    try:
        with channel(target, credentials) as made:
            health_pb2_grpc.HealthStub(made).Check(health_pb2.HealthCheckRequest(), timeout=2)
        return True
    except grpc.RpcError:
        return False


def held_by(daemon):
    """The names of a daemon's sessions, asked for without the proxy."""
    return {info.session for info in daemon.stub().ListSessions(kv.ListSessionsRequest(), timeout=PATIENCE).sessions}


def code_of(stub, name):
    try:
        Placed(stub, name).GetSession(kv.GetSessionRequest(session=name), timeout=10)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def use_all(stub, names):
    """Every kind of call, with one session's rows each: streams either way, and single messages."""
    for name in names:
        cache = Cache(Placed(stub, name), name)
        k, v = cache.rows(TOKENS)
        for layer in range(2):
            cache.append(0, k, v, layer=layer)
        fetched, _ = cache.fetch()
        assert fetched.shape == k.shape
        out, _ = cache.attend(TOKENS - 1, cache.queries(1))
        assert np.isfinite(out).all()


def call_us(made, session, count=100):
    stub = health_pb2_grpc.HealthStub(made)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE, metadata=(("x-qkv-session", session),))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def measure(direct, through, rounds=9):
    """Medians of the smallest call, in turns, as other work on the machine comes and goes: direct, through the proxy, and of
    the differences."""
    with channel(direct) as one, channel(through) as other:
        pairs = [(call_us(one, "x"), call_us(other, "x")) for _ in range(rounds)]
    return (*map(statistics.median, zip(*pairs)), statistics.median(other - one for one, other in pairs))


def check_kill(stub, daemons, homes):
    daemons[0].kill()
    gone = homes[0]
    wait_for(lambda: all(code_of(stub, name) == grpc.StatusCode.NOT_FOUND for name in gone),
             "sessions of a dead daemon were not placed elsewhere")
    for kept in homes[1:]:
        for name in kept:
            assert code_of(stub, name) == grpc.StatusCode.OK, f"{name} moved, too"
    return len(gone)


def check_drain(stub, daemon, home):
    """While a stream is open the daemon drains; a call to it would be answered UNAVAILABLE."""

    name = f"own-{len(home)}"
    own = channel(daemon.tcp)
    cache = Cache(kv_cache_pb2_grpc.KvCacheStub(own), name)

    def requests():
        yield kv.AppendRequest(items=[cache.item(0, *cache.rows(1))])
        while not ended:
            time.sleep(0.05)

    ended = []
    _open_stream = cache.stub.Append.future(requests())
    wait_for(lambda: daemon.metric("qkvd_calls_running") > 1, "the stream is not there")
    daemon.disconnect()
    daemon.terminate()
    wait_for(lambda: all(code_of(stub, name) == grpc.StatusCode.NOT_FOUND for name in home),
             "calls still go to a daemon that drains")
    still = daemon.alive()
    ended.append(True)
    own.close()
    assert still, "the daemon had ended before: the check of draining says nothing"
    assert daemon.wait() == 0


def check_left_out(proxy, port, stub, daemon, homes):
    """A daemon that serves on, and that the proxy was told to leave out."""
    proxy.leave_out(port)
    wait_for(lambda: all(code_of(stub, name) == grpc.StatusCode.NOT_FOUND for name in homes[1]),
             "calls still go to a daemon that is left out")
    assert held_by(daemon) >= homes[1]
    assert all(code_of(stub, name) == grpc.StatusCode.OK for name in homes[2]), "sessions of another daemon moved, too"


def check_tls(folder, name, command, check, example):
    """Clients with a certificate of the authority, and tokens for their tenants; daemons in clear behind the proxy."""
    tls = pathlib.Path(folder, "tls")
    subprocess.run([ROOT / "deploy/compose/authority.sh", "--dir", tls], check=True, stdout=subprocess.DEVNULL)
    tls.joinpath("proxy.pem").write_bytes(tls.joinpath("daemon/daemon.pem").read_bytes() + tls.joinpath("daemon/daemon.key").read_bytes())
    tokens = pathlib.Path(folder, "tokens")
    tokens.write_text("".join(f"token sha256:{hashlib.sha256(team.encode()).hexdigest()} {team} read,write\n"
                              for team in ("team-a", "team-b")))
    authority = tls.joinpath("authority.pem").read_bytes()
    known = grpc.ssl_channel_credentials(authority, tls.joinpath("worker-a.key").read_bytes(),
                                         tls.joinpath("worker-a.pem").read_bytes())
    ports = [free_port() for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(Daemon("--listen", f"127.0.0.1:{port}", "--auth-file", str(tokens)))
        proxy = stack.enter_context(Proxy(command, check, example, ports, folder, tls))
        target = f"localhost:{proxy.port}"
        wait_for(lambda: serves(target, known) or proxy.process.poll() is not None, f"{name} does not serve TLS")
        assert proxy.process.poll() is None, f"{name} ended"
        assert not serves(target, grpc.ssl_channel_credentials(authority)), f"{name} serves clients without a certificate"
        assert not serves(target), f"{name} serves clients without TLS"
        for team in ("team-a", "team-b"):
            bearer = grpc.composite_channel_credentials(known, grpc.access_token_call_credentials(team))
            stub = kv_cache_pb2_grpc.KvCacheStub(stack.enter_context(channel(target, bearer)))
            use_all(stub, ["same"])
            info = Placed(stub, "same").GetSession(kv.GetSessionRequest(session="same"), timeout=PATIENCE)
            assert info.tenant == team


def try_proxy(name, command, check, example, sees_health):
    ports = [free_port() for _ in range(3)]
    with tempfile.TemporaryDirectory(prefix="qkvd-proxies-") as folder:
        daemons = [Daemon("--listen", f"127.0.0.1:{port}", "--memory-budget", "64MiB", "--drain-grace", "60s",
                          "--limit-models", "1000") for port in ports]
        try:
            with Proxy(command, check, example, ports, folder) as proxy:
                target = f"127.0.0.1:{proxy.port}"
                wait_for(lambda: serves(target) or proxy.process.poll() is not None, f"{name} does not serve")
                assert proxy.process.poll() is None, f"{name} ended"
                names = [f"{name}-{i}" for i in range(SESSIONS)]
                with channel(target) as made:
                    stub = kv_cache_pb2_grpc.KvCacheStub(made)
                    use_all(stub, names)
                    homes = [held_by(daemon) for daemon in daemons]
                    assert sorted(set.union(*homes)) == sorted(names) and sum(map(len, homes)) == SESSIONS
                    assert min(map(len, homes)) >= SESSIONS // 12, f"unevenly spread: {list(map(len, homes))}"
                    direct, through, added = measure(f"127.0.0.1:{ports[0]}", target)
                    moved = check_kill(stub, daemons, homes)
                    if sees_health:
                        check_drain(stub, daemons[1], homes[1])
                    else:
                        check_left_out(proxy, ports[1], stub, daemons[1], homes)
            check_tls(folder, name, command, check, example)
            assert added <= ADDED_US_MAX.get(name, added), f"{name} adds {added:.0f} us to the smallest call"
            print(f"{name}: sessions {'/'.join(str(len(home)) for home in homes)}, {moved} moved with kill -9, "
                  f"smallest call p50 {through:.0f} us, direct {direct:.0f} us, {added:.0f} us more, "
                  f"{'drains seen' if sees_health else 'left out when told'}, TLS", flush=True)
        except BaseException:
            for log in pathlib.Path(folder).glob("*.log"):
                print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
            raise
        finally:
            for daemon in daemons:
                daemon.disconnect()
                if daemon.alive():
                    daemon.kill()
                daemon.folder.cleanup()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envoy", help="the program; where it is not given Envoy is left out, and that is said")
    arguments = parser.parse_args()
    proxies = [
        ("haproxy", ["haproxy", "-db", "-f", "CONFIG"], ["haproxy", "-c", "-f", "CONFIG"], "haproxy.cfg", True),
        ("nginx", ["nginx", "-p", "FOLDER", "-c", "CONFIG", "-g", "daemon off; pid nginx.pid; error_log stderr;"],
         ["nginx", "-t", "-p", "FOLDER", "-c", "CONFIG", "-g", "pid nginx.pid; error_log stderr;"], "nginx.conf", False),
    ]
    if arguments.envoy:
        proxies.append(("envoy", [arguments.envoy, "-c", "CONFIG", "--concurrency", "1", "--use-dynamic-base-id"],
                        [arguments.envoy, "-c", "CONFIG", "--mode", "validate"], "envoy.yaml", True))
    else:
        print("envoy: left out, no --envoy")
    for name, *rest in proxies:
        assert shutil.which(rest[0][0]), f"{name} is missing"
        try_proxy(name, *rest)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
