"""Clients that do not read, or send nothing more: they take their part of the memory for responses and no more, and
their calls end."""

import threading

import grpc
import pytest

from daemon import Daemon, wait_for
from http2 import END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, Raw, data, frame, head, request
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import kv_cache_pb2 as kv

MIB = 1 << 20
TOKENS = 4096  # of 256 bytes each in fp32, K and V: a layer is 1 MiB


def message(protobuf):
    serialized = protobuf.SerializeToString()
    return head(len(serialized)) + serialized


class Blind(Raw):
    """A connection whose windows are closed: what the daemon sends stays there."""

    def __init__(self, daemon):
        super().__init__(daemon.tcp)
        self.greet((INITIAL_WINDOW_SIZE, 0))
        self.next = 1

    def call(self, method, sent, tenant="slow"):
        self.send(frame(HEADERS, END_HEADERS, self.next, request(f"/qkv.v1.KvCache/{method}", ("qkv-tenant", tenant))) +
                  data(self.next, message(sent), END_STREAM))
        self.next += 2


def cache_of(daemon, tenant="slow", **fields):
    cache = Cache(Tenant(daemon.stub(), tenant), f"of-{tenant}", layers=1, **fields)
    cache.append(0, *cache.rows(TOKENS))
    return cache


def fetch_of(cache):
    return kv.FetchRequest(session=cache.name, layers=[0], dtype=1, chunk_tokens=1024)


def test_one_connection_leaves_others_their_part():
    with Daemon("--limit-response-bytes", "8MiB") as daemon:
        cache, other = cache_of(daemon), cache_of(daemon, "other")
        blind = Blind(daemon)
        for _ in range(200):
            blind.call("Fetch", fetch_of(cache))
        wait_for(lambda: b"limit-response-bytes is 8388608 bytes, of which this connection may have" in blind.received,
                 "nothing is refused")
        held = daemon.metric("qkvd_response_bytes")
        assert MIB < held <= 4 * MIB, held
        for reader in (cache, other):  # another connection of its tenant, and another tenant
            assert reader.fetch()[0].shape[0] == TOKENS
        second = Blind(daemon)
        for _ in range(200):
            second.call("Fetch", fetch_of(cache))
        wait_for(lambda: b"of which this tenant may have" in second.received or
                 b"of which this connection may have" in second.received, "nothing is refused")
        third = Blind(daemon)
        for _ in range(200):
            third.call("Fetch", fetch_of(cache))
        wait_for(lambda: b"of which this tenant may have" in third.received, "nothing is refused")
        assert daemon.metric("qkvd_response_bytes") <= 8 * MIB * 2 // 3
        assert other.fetch()[0].shape[0] == TOKENS
        for connection in (blind, second, third):
            connection.close()
        wait_for(lambda: daemon.metric("qkvd_response_bytes") == 0, "what nobody reads is held")
        assert cache.fetch()[0].shape[0] == TOKENS


@pytest.mark.parametrize("method", ["Fetch", "Attend"])
def test_what_is_not_read_ends(method):
    with Daemon("--limit-unread-response", "1s") as daemon:
        cache = cache_of(daemon)
        sent = fetch_of(cache) if method == "Fetch" else \
            kv.AttendRequest(items=[cache.item(TOKENS - 1, q=cache.queries(1))])
        blind = Blind(daemon)
        blind.call(method, sent)
        wait_for(lambda: daemon.metric("qkvd_response_bytes") > 0, "nothing is sent")
        wait_for(lambda: b"limit-unread-response is 1000 ms and a message to the client has not been read in that time"
                 in blind.received, "the call goes on")
        wait_for(lambda: daemon.metric("qkvd_response_bytes") == 0, "what nobody reads is held")
        assert daemon.metric("qkvd_calls_stalled_total") == 1
        assert not blind.closed
        blind.close()
        assert cache.fetch()[0].shape[0] == TOKENS


@pytest.mark.parametrize("method", ["Append", "Decode"])
def test_a_stream_that_sends_nothing_more_ends(method):
    with Daemon("--limit-idle-stream", "1s") as daemon:
        cache = cache_of(daemon)
        raw = Raw(daemon.tcp)
        raw.greet()
        item = cache.item(TOKENS, *cache.rows(1)) if method == "Append" else cache.item(0, q=cache.queries(1))
        first = (kv.AppendRequest if method == "Append" else kv.AttendRequest)(items=[item])
        raw.send(frame(HEADERS, END_HEADERS, 1, request(f"/qkv.v1.KvCache/{method}", ("qkv-tenant", "slow"))) +
                 data(1, message(first)) + data(1, head(1000) + b"x" * 500))
        wait_for(lambda: b"limit-idle-stream is 1000 ms and the stream's next message has not arrived in that time"
                 in raw.received, "the stream goes on")
        wait_for(lambda: daemon.metric("qkvd_calls_running") == 1, "the call runs")
        assert daemon.metric("qkvd_calls_stalled_total") == 1
        raw.close()


def test_a_stream_that_sends_goes_on():
    with Daemon("--limit-idle-stream", "1s") as daemon:
        cache = cache_of(daemon)

        def requests():
            for _ in range(30):
                yield kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))])
                ticks.wait(0.1)

        ticks = threading.Event()
        assert len(list(cache.stub.Decode(requests(), timeout=TIMEOUT))) == 30
        with pytest.raises(grpc.RpcError) as ended:
            def silent():
                yield kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))])
                ticks.wait(TIMEOUT)

            list(cache.stub.Decode(silent(), timeout=TIMEOUT))
        ticks.set()
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert ended.value.details().startswith("limit-idle-stream is 1000 ms")
