"""qkvctl and a server that is no qkvd, or one of another version: what it answers is refused with a word, never a crash."""

import json
import socket
import struct
import subprocess
import threading
from concurrent import futures

import grpc
import pytest

from daemon import PATIENCE, binary, clean_environment
from http2 import END_HEADERS, END_STREAM, GOAWAY, HEADERS, PREFACE, SETTINGS, data, frame, head, header, setting
from kv import FP16
from qkv.v1 import admin_pb2, model_pb2, objects_pb2, tensor_pb2
from qkv.v1 import kv_cache_pb2 as kv
from test_cli import run


class Answers(grpc.GenericRpcHandler):
    """Answers each method with the messages that it was given for it, one a call and the last one for good; a status code
    is an error, a list a stream."""

    def __init__(self):
        self.answers = {}
        self.server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[self])
        self.target = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *_):
        self.server.stop(None)

    def will(self, method, *answers):
        self.answers[method] = list(answers)

    def service(self, details):
        name = details.method.rsplit("/", 1)[1]
        left = self.answers.get(name)
        if left is None:
            return None
        answer = left.pop(0) if len(left) > 1 else left[0]

        def unary(_request, context):
            if isinstance(answer, grpc.StatusCode):
                context.abort(answer, "so it was told")
            return answer.SerializeToString()

        def stream(_request, _context):
            yield from (message.SerializeToString() for message in answer)

        if isinstance(answer, list):
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(unary)


@pytest.fixture
def odd():
    with Answers() as running:
        yield running


def fails(odd, *arguments, text):
    result = run("qkvctl", *arguments, "--target", odd.target)
    assert result.returncode == 1 and text in result.stderr, (result.returncode, result.stderr)
    assert result.stdout == ""


def test_parts_that_are_not_there(odd):
    odd.will("GetModel", model_pb2.GetModelResponse())
    fails(odd, "share", "m", text="does not describe model m")
    fails(odd, "size", "--model", "m", "--tokens", "1000", text="does not describe model m")
    odd.will("GetQuota", admin_pb2.GetQuotaResponse(tenants=[admin_pb2.TenantQuota()]))
    fails(odd, "quota", text="a tenant without a quota")
    fails(odd, "quota", "--json", text="a tenant without a quota")
    fails(odd, "quota", "set", "t", "sessions=3", text="a tenant without a quota")


def test_numbers_that_are_none(odd):
    odd.will("GetSession", kv.SessionInfo(session="s", bits_per_coordinate=float("nan")))
    fails(odd, "session", "s", "--json", text="has no form in JSON")
    head = kv.GetAttentionStatsResponse(tokens=128, tokens_per_bucket=64, ema=[0, 0], bits=[float("nan"), -1e9])
    odd.will("GetAttentionStats", [head])
    result = run("qkvctl", "session", "s", "--map", "--target", odd.target)
    assert result.returncode == 0 and "layer 0" in result.stdout, result.stderr


def test_keys_without_values(odd, daemon):
    model = model_pb2.Model(name="odd", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16, dtype=FP16)
    daemon.stub().RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=PATIENCE)
    info = daemon.stub().OpenSession(kv.OpenSessionRequest(session="like", model="odd"), timeout=PATIENCE).info
    info.session = "s"
    del info.lengths[:]
    info.lengths.append(10)
    odd.will("GetSession", info)
    odd.will("GetModel", model_pb2.GetModelResponse(model=model))
    k = tensor_pb2.Tensor(dtype=FP16, dims=[10, 1, 16], data=bytes(320))
    odd.will("Fetch", [kv.FetchResponse(layer=0, position=0, k=k)])
    fails(odd, "copy", "s", "--to", daemon.target, text="do not belong together")
    info.lengths[:] = [0, 10, 10]
    odd.will("GetSession", info)
    fails(odd, "copy", "s", "--to", daemon.target, text="session s has 3 layers, its model has 1")


def test_a_list_without_end(odd):
    """The same page token again and again, or one that is too long."""
    odd.will("ListSessions", kv.ListSessionsResponse(next_page_token="a"), kv.ListSessionsResponse(next_page_token="b"))
    odd.will("ListObjects", objects_pb2.ListObjectsResponse(next_page_token="b"))
    odd.will("GetQuota", admin_pb2.GetQuotaResponse(next_page_token="a"))
    for list_of in ("sessions", "objects", "quota"):
        fails(odd, list_of, text="gives the same page token again")
    odd.will("ListSessions", kv.ListSessionsResponse(next_page_token="x" * 1024))
    odd.will("ListObjects", objects_pb2.ListObjectsResponse(next_page_token="x" * 1024))
    odd.will("GetQuota", admin_pb2.GetQuotaResponse(next_page_token="x" * 1024))
    for list_of in ("sessions", "objects", "quota"):
        fails(odd, list_of, text="page token has 1024 bytes, at most 1023")


def test_token_ids_without_end(odd, daemon):
    """However often they are asked for."""
    model = model_pb2.Model(name="ids", layers=1, kv_heads=1, q_heads=1, key_dim=16, value_dim=16, dtype=FP16)
    odd.will("GetSession", kv.SessionInfo(session="s", model="ids", lengths=[4], policy=model_pb2.CodecPolicy(),
                                          token_ids=[1, 2, 3]))
    odd.will("GetModel", model_pb2.GetModelResponse(model=model))
    fails(odd, "copy", "s", "--to", daemon.target, text="more token ids than session s has tokens")


def test_an_instance_of_64_bits(odd):
    """It has all its digits."""
    odd.will("Watch", [kv.WatchResponse(reset=True, complete=True, instance=2**64 - 3, sequence=2**40)])
    result = run("qkvctl", "watch", "--json", "--target", odd.target)
    line = json.loads(result.stdout)
    assert (line["instance"], line["sequence"]) == (str(2**64 - 3), 2**40)


def test_what_a_gpu_does(odd):
    gpu = admin_pb2.GpuStatus(device="0", name="card", up=True, bytes_limit=1 << 30, hits=3, misses=1, less_attended=12)
    options = [admin_pb2.OptionValue(name="gpu-memory", value="1GiB", source="command line")]
    odd.will("GetStatus", admin_pb2.GetStatusResponse(state="serving", gpus=[gpu], options=options))
    result = run("qkvctl", "status", "--target", odd.target)
    assert "75 % of those attended\n            12 attends of ranges that get less attention" in result.stdout
    result = run("qkvctl", "status", "--json", "--target", odd.target)
    assert json.loads(result.stdout)["gpus"][0]["less_attended"] == 12


def test_drain_knows_the_end(odd):
    drains, serves = admin_pb2.GetStatusResponse(state="draining"), admin_pb2.GetStatusResponse(state="serving")
    odd.will("Drain", admin_pb2.DrainResponse())
    odd.will("GetStatus", serves, drains, grpc.StatusCode.PERMISSION_DENIED)
    fails(odd, "drain", "--wait", text="whether it has ended is not known: so it was told")
    # Another one is there in its place; that it is busy says nothing.
    odd.will("GetStatus", drains, grpc.StatusCode.RESOURCE_EXHAUSTED, serves)
    result = run("qkvctl", "drain", "--wait", "--target", odd.target)
    assert (result.returncode, result.stdout) == (0, "the daemon has ended\n"), result.stderr
    assert len(odd.answers["GetStatus"]) == 1


def test_names_that_are_no_text(daemon):
    result = run("qkvctl", "has", "\udcff", "--json", "--target", daemon.target)
    assert result.returncode == 1 and result.stdout == "" and result.stderr


def test_an_output_that_is_full(daemon):
    for more in ((), ("--json",)):
        with open("/dev/full", "wb") as full:
            result = subprocess.run([binary("qkvctl"), "status", "--target", daemon.target, *more], stdout=full,
                                    stderr=subprocess.PIPE, env=clean_environment(), timeout=PATIENCE, check=False)
        assert result.returncode == 1


def next_call(stream):
    kind = SETTINGS
    while kind != HEADERS:
        begin = stream.read(9)
        kind = begin[3]
        stream.read(int.from_bytes(begin[:3], "big"))


def stops_at_a_call(server):
    """A server whose health is good, and that says GOAWAY as the next call comes."""
    connection = server.accept()[0]
    with connection, connection.makefile("rb") as stream:
        connection.sendall(setting())
        stream.read(len(PREFACE))
        next_call(stream)
        connection.sendall(frame(HEADERS, END_HEADERS, 1, header(":status", "200") + header("content-type", "application/grpc")) +
                           data(1, head(2) + b"\x08\x01") +  # SERVING
                           frame(HEADERS, END_HEADERS | END_STREAM, 1, header("grpc-status", "0")))
        next_call(stream)
        connection.sendall(frame(GOAWAY, payload=struct.pack(">II", 1, 0)))
        stream.read()  # until the client goes


def test_a_daemon_that_stops_as_a_call_comes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=stops_at_a_call, args=(server,), daemon=True).start()
        target = f"127.0.0.1:{server.getsockname()[1]}"
        result = run("qkvctl", "status", "--target", target)
        assert result.returncode == 1
        assert result.stderr == f"qkvctl: {target} has ended the call, as it does when it stops\n"
