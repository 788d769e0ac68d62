"""A real qkvd process for tests."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time

import grpc
from qkv.v1 import admin_pb2, admin_pb2_grpc, kv_cache_pb2_grpc

BIN_DIR = os.environ["QKV_BIN_DIR"]
SANITIZER = os.environ.get("QKV_SANITIZE", "")
SANITIZED = SANITIZER != ""
PATIENCE = 240  # seconds for what has to happen, however slow the build and busy the machine
SANITIZER_REPORT = re.compile(r"(Address|Leak|Thread|UndefinedBehavior)Sanitizer|runtime error:")


def binary(name):
    return os.path.join(BIN_DIR, name)


def clean_environment(**more):
    """This process's environment without the daemon's variables."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("QKV")}
    environment.update(more)
    return environment


def wait_for(condition, what):
    """Fails where `condition()` does not come true."""
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


class Daemon:
    """Starts qkvd on a unix socket and a TCP port of the system's choice; `arguments` are added.

    `before` is called in the new process before it becomes the daemon; the process starts as the command `start`, which
    must become the command that follows it, and gets the descriptors `pass_fds`. Use as a context manager: leaving it stops the daemon with SIGTERM and asserts a clean exit.
    """

    def __init__(self, *arguments, environment=None, listen=True, before=None, start=(), pass_fds=()):
        self.folder = tempfile.TemporaryDirectory(prefix="qkvd-e2e-")
        self.socket = os.path.join(self.folder.name, "qkvd.sock")
        self.log_path = os.path.join(self.folder.name, "log")
        # However pytest ends, the daemon does not outlive it.
        command = [*start, "setpriv", "--pdeathsig", "KILL", binary("qkvd")]
        if listen:
            command += ["--listen", f"unix:{self.socket}", "--listen", "127.0.0.1:0"]
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(command + list(arguments), stderr=log, stdin=subprocess.DEVNULL,
                                            env=clean_environment(**(environment or {})), preexec_fn=before,
                                            pass_fds=pass_fds)
        self.channels = []
        self.killed = False
        self.wait_until_ready()

    def log_text(self):
        with open(self.log_path, errors="replace") as file:
            return file.read()

    def log_lines(self):
        """The log as objects; a line that is still being written is left out."""
        text = self.log_text()
        lines = text[:text.rfind("\n") + 1].splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def wait_until_ready(self):
        deadline = time.monotonic() + PATIENCE
        while not any(line["message"] == "ready" for line in self.log_lines()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"qkvd did not get ready, exit {self.process.wait()}:\n{self.log_text()}")
            time.sleep(0.01)
        self.addresses = [line["address"] for line in self.log_lines() if line["message"] == "listening"]

    @property
    def target(self):
        return f"unix:{self.socket}"

    @property
    def tcp(self):
        return next(address for address in self.addresses if not address.startswith("unix:"))

    def channel(self, target=None):
        """A connection of its own, not shared with other channels."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
                   ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(target or self.target, options=options)
        self.channels.append(channel)
        return channel

    def stub(self, target=None):
        return kv_cache_pb2_grpc.KvCacheStub(self.channel(target))

    def status(self):
        return admin_pb2_grpc.AdminStub(self.channel()).GetStatus(admin_pb2.GetStatusRequest(), timeout=PATIENCE)

    def metric(self, name):
        return next(metric.value for metric in self.status().metrics if metric.name == name)

    def rss_bytes(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS:"))

    def alive(self):
        return self.process.poll() is None

    def disconnect(self):
        while self.channels:
            self.channels.pop().close()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def kill(self):
        """On purpose: leaving the context then expects just this."""
        self.process.kill()
        self.process.wait()
        self.killed = True

    def wait(self):
        return self.process.wait(timeout=PATIENCE)

    def stop(self):
        """Asserts that SIGTERM ends the daemon with 0, without a sanitizer's report and without its socket."""
        self.disconnect()
        if self.alive():
            self.terminate()
        try:
            status = self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"qkvd did not end after SIGTERM:\n{self.log_text()}") from None
        text = self.log_text()
        assert not SANITIZER_REPORT.search(text), text
        if self.killed:
            return
        assert status == 0, f"qkvd ended with {status}:\n{text}"
        assert not os.path.exists(self.socket), "the socket file is left behind"

    def __enter__(self):
        return self

    def __exit__(self, kind, value, traceback):
        try:
            if kind is None:
                self.stop()
        finally:
            self.disconnect()
            if self.alive():
                self.process.kill()
                self.process.wait()
            if kind is not None:
                print(self.log_text()[-4000:])
            self.folder.cleanup()
