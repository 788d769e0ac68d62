"""HTTP/2 by hand, for clients that do harm: frames, headers without compression, a connection."""

import socket
import struct
import threading

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = 4, 5
FRAME_BYTES = 16384  # of a payload, at most
WINDOW = 65535  # bytes that a connection and a stream may send at first


def frame(kind, flags=0, stream=0, payload=b""):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def setting(*pairs):
    return frame(SETTINGS, payload=b"".join(struct.pack(">HI", *pair) for pair in pairs))


def integer(value, bits):
    """HPACK: a number with a prefix of so many bits."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = [most], value - most
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def header(name, value):
    """HPACK, a literal without indexing."""
    name, value = name.encode(), value.encode()
    return b"\0" + integer(len(name), 7) + name + integer(len(value), 7) + value


def request(path, *more):
    return b"".join(header(*pair) for pair in (
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
        ("content-type", "application/grpc"), ("te", "trailers"), *more))


def head(length):
    """What gRPC puts before a message."""
    return b"\0" + struct.pack(">I", length)


def data(stream, payload, flags=0):
    """A message, or a part of one, as frames."""
    pieces = [payload[at:at + FRAME_BYTES] for at in range(0, len(payload), FRAME_BYTES)] or [b""]
    return b"".join(frame(DATA, flags if i + 1 == len(pieces) else 0, stream, piece)
                    for i, piece in enumerate(pieces))


class Raw:
    """A connection that speaks HTTP/2 by hand. What the daemon sends is read and thrown away, but for what `keep` last
    bytes of it are in `received`; the windows that it opens are in `windows`, by stream. With `reads` false nothing is
    read."""

    def __init__(self, address, timeout=240, source=None, reads=True, keep=1 << 20):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=timeout,
                                               source_address=(source, 0) if source else None)
        self.received = bytearray()
        self.closed = False
        self.keep = keep
        self.changed, self.sending = threading.Condition(), threading.Lock()
        self.windows = {0: WINDOW}
        self.initial = WINDOW
        self.unread = b""
        self.greeted, self.owed = False, 0
        self.thread = threading.Thread(target=self.read, daemon=True) if reads else None
        if self.thread:
            self.thread.start()

    def read(self):
        try:
            while received := self.socket.recv(65536):
                self.received += received
                del self.received[:-self.keep]
                self.look(received)
        except OSError:
            pass
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def look(self, received):
        self.unread += received
        while len(self.unread) >= 9:
            length = int.from_bytes(self.unread[:3], "big")
            if len(self.unread) < 9 + length:
                return
            kind, flags, stream = self.unread[3], self.unread[4], int.from_bytes(self.unread[5:9], "big")
            payload, self.unread = self.unread[9:9 + length], self.unread[9 + length:]
            with self.changed:
                if kind == WINDOW_UPDATE:
                    self.windows[stream] = self.windows.get(stream, self.initial) + int.from_bytes(payload, "big")
                elif kind == SETTINGS and not flags & ACK:
                    for at in range(0, length, 6):
                        name, value = struct.unpack(">HI", payload[at:at + 6])
                        if name == INITIAL_WINDOW_SIZE:
                            self.windows = {of: window + (value - self.initial if of else 0)
                                            for of, window in self.windows.items()}
                            self.initial = value
                self.changed.notify_all()
            if kind == SETTINGS and not flags & ACK:
                self.acknowledge(1)

    def acknowledge(self, settings):
        """The daemon's settings may come before the preface has been sent."""
        with self.sending:
            self.owed += settings
            if not self.greeted:
                return
            acknowledged, self.owed = frame(SETTINGS, ACK) * self.owed, 0
        self.send(acknowledged)

    def send(self, sent):
        """False: the daemon has cut the connection off, as well it may."""
        try:
            with self.sending:
                self.socket.sendall(sent)
                greets = not self.greeted
                self.greeted = True
        except OSError:
            return False
        if greets:
            self.acknowledge(0)
        return not self.closed

    def greet(self, *settings):
        return self.send(PREFACE + setting(*settings))

    def upload(self, stream, message, count, patience=1.0):
        """So many bytes of a message, its head included, as far as the windows allow within `patience` seconds of the last
        progress. `message` is what it holds, or how many zeros. Returns how many bytes were sent."""
        zeros = isinstance(message, int)
        sent, first = 0, head(message if zeros else len(message)) + (b"" if zeros else message)
        while sent < count and not self.closed:
            with self.changed:
                self.windows.setdefault(stream, self.initial)
                most = min(self.windows[0], self.windows[stream], count - sent, FRAME_BYTES)
                if most <= 0:
                    if not self.changed.wait(patience):
                        return sent
                    continue
                self.windows[0] -= most
                self.windows[stream] -= most
            payload = first[sent:sent + most]
            if not self.send(frame(DATA, 0, stream, payload + bytes(most - len(payload)))):
                return sent
            sent += most
        return sent

    def open(self, count, path="/qkv.v1.KvCache/Attend", payload=None, headers=()):
        """So many calls, on which nothing is sent, or the beginning of a message."""
        parts = [PREFACE, setting()]
        for stream in range(1, 2 * count, 2):
            parts.append(frame(HEADERS, END_HEADERS, stream, request(path, *headers)))
            if payload is not None:
                parts.append(frame(DATA, 0, stream, payload))
        self.send(b"".join(parts))

    def close(self):
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if self.thread:
            self.thread.join()
        self.socket.close()
