"""A real qkvd process for tests and benchmarks: QKV_BIN_DIR says where its binaries are."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time

PATIENCE = 240  # seconds for what has to happen, however slow the build and busy the machine


def binary(name):
    return os.path.join(os.environ["QKV_BIN_DIR"], name)


def clean_environment(**more):
    """This process's environment without the daemon's variables."""
    return {key: value for key, value in os.environ.items() if not key.startswith("QKV")} | more


def wait_for(condition, what):
    """Fails where `condition()` does not come true."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


class Daemon:
    """qkvd on a unix socket and a TCP port of the system's choice; `arguments` are added. A context manager."""

    def __init__(self, *arguments):
        self.folder = tempfile.TemporaryDirectory(prefix="qkvd-python-")
        self.target = "unix:" + os.path.join(self.folder.name, "qkvd.sock")
        self.arguments = arguments
        self.start()

    def start(self):
        # However the tests end, the daemon does not outlive them.
        command = ["setpriv", "--pdeathsig", "KILL", binary("qkvd"), "--listen", self.target, "--listen", "127.0.0.1:0"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                command + list(self.arguments), stderr=log, stdin=subprocess.DEVNULL, env=clean_environment()
            )
        wait_for(lambda: self.logged("ready") or self.process.poll() is not None, "qkvd does not get ready")
        assert self.logged("ready"), self.log()

    @contextlib.contextmanager
    def stopped(self):
        """No thread of it runs: a signal reaches those on other processors later."""

        def is_stopped():
            states = []
            for task in os.listdir(f"/proc/{self.process.pid}/task"):
                with open(f"/proc/{self.process.pid}/task/{task}/stat") as file:
                    states.append(file.read().rpartition(")")[2].split()[0])
            return set(states) == {"T"}

        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            wait_for(is_stopped, "qkvd does not stop")
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    @property
    def log_path(self):
        return os.path.join(self.folder.name, "log")

    def log(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def logged(self, message):
        """The log's lines of this message; one that is still being written is left out."""
        lines = self.log().split("\n")[:-1]
        return [
            line for line in map(json.loads, filter(lambda line: line.startswith("{"), lines)) if line["message"] == message
        ]

    @property
    def tcp(self):
        return next(line["address"] for line in self.logged("listening") if not line["address"].startswith("unix:"))

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """SIGTERM, and a clean exit."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE) == 0, self.log()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        with contextlib.ExitStack() as ends:
            ends.callback(self.folder.cleanup)
            if self.process.poll() is None:
                ends.callback(self.process.wait)
                ends.callback(self.process.kill)
                if kind is None:
                    self.stop()
            if kind is not None:
                print(self.log()[-4000:])
