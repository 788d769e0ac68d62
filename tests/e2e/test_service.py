"""A service manager's part, played by the test: sockets are passed, and readiness, stop and watchdog are told."""

import contextlib
import fcntl
import glob
import os
import select
import socket
import subprocess
import threading

import grpc
import pytest
from health.v1 import health_pb2, health_pb2_grpc
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv

from daemon import PATIENCE, SANITIZED, Daemon, binary, clean_environment, wait_for
from kv import Cache

# Descriptors from 3 on, as LISTEN_FDS means them. LISTEN_PID is the process that becomes the daemon.
PASS = ("bash", "-c", 'n=0; for fd in $FDS; do eval "exec $((3 + n))<&$fd"; n=$((n + 1)); done; '
        'LISTEN_FDS=$n LISTEN_PID=$$ exec "$@"', "bash")


@contextlib.contextmanager
def passed(*sockets):
    """Arguments for Popen that pass sockets; they stay open here."""
    high = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, 100) for each in sockets]
    try:
        yield {"pass_fds": tuple(high), "environment": {"FDS": " ".join(map(str, high))}}
    finally:
        for each in high:
            os.close(each)


def unix_socket(path, backlog=64):
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen(backlog)
    return made


def tcp_socket():
    made = socket.socket(socket.AF_INET)
    made.bind(("127.0.0.1", 0))
    made.listen(64)
    return made


def check(channel):
    return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)


# A connection of its own, which waits long for the daemon to take it.
PATIENT = [("grpc.use_local_subchannel_pool", 1), ("grpc.min_reconnect_backoff_ms", PATIENCE * 1000)]
SERVING = health_pb2.HealthCheckResponse.SERVING


@contextlib.contextmanager
def serving(sockets, addresses, *arguments):
    listen = [word for address in addresses for word in ("--listen", address)]
    with passed(*sockets) as how:
        with Daemon(*listen, *arguments, listen=False, start=PASS, **how) as daemon:
            yield daemon


def test_a_restart_refuses_no_connection(tmp_path):
    path = tmp_path / "qkvd.sock"
    local, port = unix_socket(path), tcp_socket()
    addresses = [f"unix:{path}", f"127.0.0.1:{port.getsockname()[1]}"]
    data = ["--data-dir", str(tmp_path / "data")]
    with contextlib.ExitStack() as stack:
        stack.enter_context(local)
        stack.enter_context(port)
        with serving((local, port), addresses, *data) as first:
            assert first.addresses == addresses
            assert all(check(first.channel(each)).status == SERVING for each in addresses)
            cache = Cache(first.stub(addresses[0]), "kept")
            cache.append(0, *cache.rows(100))
        # There is no daemon, yet connections are taken, and calls on them wait.
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(str(path))
        channels = [stack.enter_context(grpc.insecure_channel(each, options=PATIENT)) for each in addresses]
        answers = {}

        def call(channel):
            answers[channel] = check(channel).status

        callers = [threading.Thread(target=call, args=[channel]) for channel in channels]
        for caller in callers:
            caller.start()
        with serving((local, port), addresses, *data) as second:
            for caller in callers:
                caller.join(PATIENCE)
            assert list(answers.values()) == [SERVING] * 2
            admin = admin_pb2_grpc.AdminStub(second.channel(addresses[1]))
            assert admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=PATIENCE).sessions == 1
        assert os.path.exists(path), "the socket's file is the manager's"
        assert not os.path.exists(f"{path}.lock")


def threads(process):
    names = set()
    for path in glob.glob(f"/proc/{process}/task/*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(path) as file:
            names.add(file.read().strip())
    return names


def test_a_call_that_runs_ends_well_and_a_new_one_waits_for_the_next_process(tmp_path):
    path = tmp_path / "qkvd.sock"
    address = f"unix:{path}"
    go_on = threading.Event()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(unix_socket(path))
        with serving([local], [address], "--drain-grace", "200s") as first:
            cache = Cache(first.stub(address), "running")
            k, v = cache.rows(2)

            def requests():
                yield kv.AppendRequest(items=[cache.item(0, k[:1], v[:1])])
                go_on.wait(PATIENCE)
                yield kv.AppendRequest(items=[cache.item(1, k[1:], v[1:])])

            call = cache.stub.Append.future(requests(), timeout=PATIENCE)
            wait_for(lambda: cache.info().tokens_exact == 1, "the first row is not there")
            first.terminate()
            wait_for(lambda: any(line["message"] == "draining" for line in first.log_lines()), "it does not drain")
            wait_for(lambda: "qkvd-accept" not in threads(first.process.pid), "it goes on accepting")
            late = stack.enter_context(grpc.insecure_channel(address, options=PATIENT))
            answer = health_pb2_grpc.HealthStub(late).Check.future(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
            go_on.set()
            assert call.result().tokens == 2
            assert first.wait() == 0
            assert not answer.done()
        with serving([local], [address]):
            assert answer.result().status == SERVING


def test_some_sockets_passed_and_some_not(tmp_path):
    with unix_socket(tmp_path / "a.sock") as local:
        with serving([local], [f"unix:{tmp_path}/a.sock", "127.0.0.1:0"]) as daemon:
            for address in daemon.addresses:
                assert check(daemon.channel(address)).status == SERVING


def refusal(sockets, *arguments):
    with passed(*sockets) as how:
        result = subprocess.run([*PASS, binary("qkvd"), *arguments], capture_output=True, text=True, timeout=PATIENCE,
                                pass_fds=how["pass_fds"], env=clean_environment(**how["environment"]))
    assert result.returncode == 1
    return result.stderr


def test_a_socket_that_no_option_names_is_refused(tmp_path):
    with unix_socket(tmp_path / "a.sock") as local, tcp_socket() as port:
        assert f"passed a socket at unix:{tmp_path}/a.sock, which no --listen names" in refusal(
            [local], "--listen", "127.0.0.1:0")
        number = port.getsockname()[1]
        assert f"passed a socket at 127.0.0.1:{number}, which no --listen names" in refusal(
            [port], "--listen", f"unix:{tmp_path}/b.sock")


def test_what_is_no_listening_stream_socket_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "datagrams"))
        assert "passed descriptor 3, which is not a listening stream socket" in refusal([other])
    with tcp_socket() as port:
        assert "at most 16 are allowed" in refusal([port] * 17)


def next_message(manager):
    assert select.select([manager], [], [], PATIENCE)[0], "the manager is told nothing"
    return manager.recv(1000).decode()


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        yield made


def test_the_manager_is_told(manager, tmp_path):
    with Daemon(environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "200000"}) as daemon:
        assert next_message(manager) == "READY=1"
        assert check(daemon.channel()).status == SERVING
        for _ in range(3):
            assert next_message(manager) == "WATCHDOG=1"
        daemon.disconnect()
        daemon.terminate()
        while (message := next_message(manager)) == "WATCHDOG=1":
            pass
        assert message == "STOPPING=1"
        assert daemon.wait() == 0


def test_no_watchdog_unless_it_is_asked_for(manager, tmp_path):
    with Daemon(environment={"NOTIFY_SOCKET": str(tmp_path / "notify")}):
        assert next_message(manager) == "READY=1"
    assert next_message(manager) == "STOPPING=1"
    assert not select.select([manager], [], [], 0)[0]


@pytest.mark.skipif(SANITIZED, reason="the sanitizers' libraries come from the path that is changed")
def test_it_serves_without_the_library(tmp_path):
    (tmp_path / "libsystemd.so.0").write_text("")  # found first, and no library
    with Daemon(environment={"NOTIFY_SOCKET": str(tmp_path / "notify"), "LD_LIBRARY_PATH": str(tmp_path)}) as daemon:
        assert check(daemon.channel()).status == SERVING
        assert any(line["message"].startswith("no libsystemd") for line in daemon.log_lines())
