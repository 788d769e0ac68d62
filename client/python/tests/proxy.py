"""A relay between a client and a daemon that does something when so many bytes have come back."""

import contextlib
import os
import socket
import tempfile
import threading


class Proxy:
    """Listens on a unix socket of its own and passes bytes to and from `target` ("unix:PATH"). A context manager."""

    def __init__(self, target):
        self.folder = tempfile.TemporaryDirectory(prefix="qkvd-proxy-")
        self.path = os.path.join(self.folder.name, "proxy.sock")
        self.target = "unix:" + self.path
        self._behind = target.removeprefix("unix:")
        self._lock = threading.Lock()
        self._left = self._act = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, count, act):
        """Calls `act` once, when `count` more bytes have come from the daemon, and ends their connection: nothing more is
        passed on, such as what the daemon has written before `act` has killed it."""
        with self._lock:
            self._left, self._act = count, act

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._listener.close()
        self.folder.cleanup()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.socket(socket.AF_UNIX)
                try:
                    far.connect(self._behind)
                except OSError:
                    near.close()
                    continue
                threading.Thread(target=self._pass, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, True), daemon=True).start()

    def _pass(self, source, sink, back):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if back and self._count(len(data)):
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _count(self, count):
        """Whether it was so many now."""
        with self._lock:
            if self._act is None:
                return False
            self._left -= count
            act = self._act if self._left <= 0 else None
            if act:
                self._act = None
        if act:
            act()
        return act is not None
