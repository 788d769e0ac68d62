"""Clients that do not read, or send nothing more: they take their part of the memory for responses and no more, and
their calls end."""

import threading

import grpc
import pytest

from daemon import SANITIZED, Daemon, wait_for
from http2 import END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, Raw, data, frame, head, request
from kv import TIMEOUT, Cache, Tenant
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import tensor_pb2

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


@pytest.mark.parametrize("method", ["GetSession", "ListSessions"])
def test_answers_without_rows_count(method):
    """Token ids and lists, which are large, too: what a client does not read of them is bounded, and others get theirs."""
    with Daemon("--limit-response-bytes", "1MiB") as daemon:
        cache = Cache(Tenant(daemon.stub(), "slow"), "of-slow", layers=1)
        cache.append(0, *cache.rows(TOKENS), token_ids=[(1 << 32) - 1] * TOKENS)
        for i in range(200):
            cache.stub.OpenSession(kv.OpenSessionRequest(session=f"{'long' * 25}-{i}", model=cache.model.name), timeout=TIMEOUT)
        ids = kv.GetSessionRequest(session="of-slow", token_ids=tensor_pb2.TokenRange(begin=0))
        blind = Blind(daemon)
        for _ in range(200):
            blind.call(method, ids if method == "GetSession" else kv.ListSessionsRequest())
        wait_for(lambda: b"limit-response-bytes is 1048576 bytes, of which this connection may have" in blind.received,
                 "nothing is refused")
        assert 0 < daemon.metric("qkvd_response_bytes") <= MIB // 2
        assert len(cache.stub.GetSession(ids, timeout=TIMEOUT).token_ids) == TOKENS  # another connection
        small = kv.GetSessionRequest(session="of-slow")
        blind.call("GetSession", small)  # counts nothing
        admin = admin_pb2_grpc.AdminStub(daemon.channel())
        assert admin.GetStatus(admin_pb2.GetStatusRequest(), timeout=TIMEOUT).metrics
        blind.close()
        wait_for(lambda: daemon.metric("qkvd_response_bytes") == 0, "what nobody reads is held")


def test_messages_that_wait_are_bounded(tmp_path):
    """Whole messages that wait for their tenant's rate: one connection gets half of 512 MiB, and another tenant's go on."""
    quotas = tmp_path / "quotas"
    quotas.write_text("slow bytes_per_second=64KiB\n")
    with Daemon("--quota-file", str(quotas)) as daemon:
        other = cache_of(daemon, "other")
        slow = Cache(Tenant(daemon.stub(), "slow"), "of-slow", layers=1)
        first = kv.AppendRequest(items=[slow.item(0, *slow.rows(1))])
        before = daemon.rss_bytes()
        raw = Raw(daemon.tcp)
        raw.greet()
        for stream in range(1, 17, 2):
            raw.send(frame(HEADERS, END_HEADERS, stream, request("/qkv.v1.KvCache/Append", ("qkv-tenant", "slow"))))
            sent = first.SerializeToString()
            assert raw.upload(stream, sent, len(sent) + 5) == len(sent) + 5
        refusal = b"messages that have arrived may have 536870912 bytes, of which this connection may have"
        for stream in range(1, 17, 2):
            if refusal not in raw.received:
                raw.upload(stream, 60 * MIB, 60 * MIB + 5)
        wait_for(lambda: refusal in raw.received, "nothing is refused")
        assert SANITIZED or daemon.rss_bytes() < before + 768 * MIB
        assert other.fetch()[0].shape[0] == TOKENS
        big = other.rows(TOKENS)
        for i in range(1, 4):
            other.append(i * TOKENS, *big)
        raw.close()


def test_messages_ahead_are_bounded():
    """What a client may send on a stream that is not read from is little, and a message that is read comes whole."""
    with Daemon() as daemon:
        cache = cache_of(daemon)
        raw = Raw(daemon.tcp)
        raw.greet((INITIAL_WINDOW_SIZE, 0))
        raw.send(frame(HEADERS, END_HEADERS, 1, request("/qkv.v1.KvCache/Decode", ("qkv-tenant", "slow"))))
        sent = kv.AttendRequest(items=[cache.item(0, q=cache.queries(1))]).SerializeToString()
        assert raw.upload(1, sent, len(sent) + 5) == len(sent) + 5
        wait_for(lambda: daemon.metric("qkvd_response_bytes") > 0, "it is not answered")
        assert raw.upload(1, 8 * MIB, 8 * MIB + 5, 1) <= 256 * 1024
        cache.append(TOKENS, *cache.rows(4 * TOKENS))  # 8 MiB in fp32
        raw.close()


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
