"""A name that another tenant has is to each rpc as one that nobody has, and nothing happens to what it stands for."""

import re

import grpc
import numpy as np
import pytest

from daemon import Daemon
from kv import TIMEOUT, Cache, tensor
from qkv.v1 import (admin_pb2, admin_pb2_grpc, kv_cache_pb2_grpc, model_pb2, objects_pb2, objects_pb2_grpc, shared_memory_pb2,
                    shared_memory_pb2_grpc, tensor_pb2)
from qkv.v1 import kv_cache_pb2 as kv
from test_identity import bearer, new_token
from test_isolation import Client
from test_shared_memory import Object

OWN, THERE, NOWHERE = "own", "there", "where"
SERVICES = {"KvCache": (kv, kv_cache_pb2_grpc.KvCacheStub), "Objects": (objects_pb2, objects_pb2_grpc.ObjectsStub),
            "SharedMemory": (shared_memory_pb2, shared_memory_pb2_grpc.SharedMemoryStub),
            "Admin": (admin_pb2, admin_pb2_grpc.AdminStub)}


def item(session, fields):
    """One row, query, or both."""
    rows = tensor(np.zeros((1, 2, 16), np.float32))
    return kv.Item(session=session, **dict.fromkeys(fields, rows))


def inside(region):
    """A query that lies there."""
    q = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP32, dims=(1, 2, 16), shared_memory_region=region,
                          shared_memory_byte_size=128)
    return kv.Item(session=OWN, position=256, q=q)


def part(region):
    return tensor_pb2.RegionPart(shared_memory_region=region, shared_memory_byte_size=4096)


def opening(model):
    return kv.OpenSessionRequest(session="new", model=model)


# Requests about what has a name.
ABOUT = {
    ("KvCache", "GetModel"): [lambda name: model_pb2.GetModelRequest(name=name)],
    ("KvCache", "GetCalibration"): [lambda name: model_pb2.GetCalibrationRequest(model=name)],
    ("KvCache", "OpenSession"): [opening],
    ("KvCache", "HasSessions"): [lambda name: kv.HasSessionsRequest(sessions=[name], tokens=True, touch=True)],
    ("KvCache", "ListSessions"): [lambda name: kv.ListSessionsRequest(prefix=name),
                                  lambda name: kv.ListSessionsRequest(model=name)],
    ("KvCache", "Append"): [lambda name: kv.AppendRequest(items=[item(name, "kv")]),
                            lambda name: kv.AppendRequest(open=[opening(name)], complete=True)],
    ("KvCache", "Attend"): [lambda name: kv.AttendRequest(items=[item(name, "q")]),
                            lambda name: kv.AttendRequest(items=[inside(name)]),
                            lambda name: kv.AttendRequest(items=[item(OWN, "q")], results_into=part(name))],
    ("KvCache", "Decode"): [lambda name: kv.AttendRequest(items=[item(name, "q")])],
    ("KvCache", "Fetch"): [lambda name: kv.FetchRequest(session=name), lambda name: kv.FetchRequest(session=name, coded=True),
                           lambda name: kv.FetchRequest(session=OWN, k_into=part(name))],
    ("KvCache", "Match"): [lambda name: kv.MatchRequest(model=name, token_ids=range(256))],
    **{("KvCache", rpc): [lambda name, rpc=rpc, more=more: getattr(kv, f"{rpc}Request")(session=name, **more)] for rpc, more in {
        "CloseSession": {}, "GetSession": {}, "Truncate": {"position": 1}, "Demote": {"bits": 1}, "Prefetch": {},
        "GetAttentionStats": {}, "Pin": {}, "Touch": {"ttl_ms": 1}, "Fork": {"fork": "new"}}.items()},
    **{("Objects", rpc): [lambda name, rpc=rpc: getattr(objects_pb2, f"{rpc}Request")(objects=[name])]
       for rpc in ("GetObjects", "HasObjects", "DeleteObjects")},
    ("Objects", "ListObjects"): [lambda name: objects_pb2.ListObjectsRequest(prefix=name)],
    **{("SharedMemory", rpc): [lambda name, rpc=rpc: getattr(shared_memory_pb2, f"{rpc}Request")(name=name)]
       for rpc in (f"{kind}SharedMemory{what}" for kind in ("System", "Cuda") for what in ("Status", "Unregister"))},
    ("Admin", "Compare"): [lambda name: admin_pb2.CompareRequest(session=name)],
}
# Those that are about no thing that is there already, and those of the whole daemon, which a tenant may not call.
OTHERS = {
    ("KvCache", "RegisterModel"), ("KvCache", "ListModels"), ("KvCache", "Watch"), ("Objects", "PutObjects"),
    ("SharedMemory", "SystemSharedMemoryRegister"), ("SharedMemory", "CudaSharedMemoryRegister"), ("Admin", "GetQuota"),
    *(("Admin", rpc) for rpc in ("GetStatus", "GetStorage", "VerifyStorage", "Compact", "Drain", "SetQuota", "UnshareModel"))}
# What they answer where there is no such thing; all others NOT_FOUND.
EMPTY = {("KvCache", "HasSessions"), ("KvCache", "ListSessions"), *(key for key in ABOUT if key[0] == "Objects")}


class Team:
    def __init__(self, daemon, token):
        self.channel, self.metadata = daemon.channel(), bearer(token)
        self.cache = Client(daemon, token)

    def ask(self, service, rpc, request):
        """(code, text), of the item's status where it has one; (0, answers)."""
        module, stub = SERVICES[service]
        shape = module.DESCRIPTOR.services_by_name[service].methods_by_name[rpc]
        call = getattr(stub(self.channel), rpc)
        try:
            answer = call(iter([request]) if shape.client_streaming else request, timeout=TIMEOUT, metadata=self.metadata)
            answers = list(answer) if shape.server_streaming else [answer]
        except grpc.RpcError as error:
            return error.code(), error.details()
        failed = [result.status for each in answers for result in getattr(each, "results", ()) if result.status.code != 0]
        if failed:
            return next(code for code in grpc.StatusCode if code.value[0] == failed[0].code), failed[0].message
        return grpc.StatusCode.OK, str(answers)

    def have(self, name, region):
        """A model, a session, an object and a region of this name."""
        model = model_pb2.Model(name=name, layers=1, kv_heads=2, q_heads=2, key_dim=16, value_dim=16, dtype=tensor_pb2.DTYPE_FP32)
        self.cache.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
        rows = Cache(self.cache, name, layers=1, q_heads=2)
        rows.append(0, *rows.rows(256), token_ids=range(256))
        begin = objects_pb2.ObjectInfo(object=name, bytes=3)
        put = objects_pb2.PutObjectsRequest(pieces=[objects_pb2.PutPiece(begin=begin, data=b"abc")])
        assert self.ask("Objects", "PutObjects", put)[0] == grpc.StatusCode.OK
        at = shared_memory_pb2.SystemSharedMemoryRegion(name=name, key=region.key, byte_size=4096)
        request = shared_memory_pb2.SystemSharedMemoryRegisterRequest(region=at)
        assert self.ask("SharedMemory", "SystemSharedMemoryRegister", request)[0] == grpc.StatusCode.OK

    def state(self):
        """Of all that it has, but for times, which are told to a few milliseconds."""
        lists = (("KvCache", "ListSessions", kv.ListSessionsRequest()), ("KvCache", "ListModels", model_pb2.ListModelsRequest()),
                 ("KvCache", "GetSession", kv.GetSessionRequest(session=THERE)),
                 ("Objects", "ListObjects", objects_pb2.ListObjectsRequest()),
                 ("SharedMemory", "SystemSharedMemoryStatus", shared_memory_pb2.SystemSharedMemoryStatusRequest()))
        return [re.sub(r"_unix_ms: \d+", "", str(self.ask(*each))) for each in lists]


@pytest.fixture(scope="module")
def teams(tmp_path_factory):
    """One that asks, and one that has what it asks for."""
    auth = tmp_path_factory.mktemp("foreign") / "auth"
    (asks, first), (has, second) = (new_token(team, "read,write,admin") for team in ("team-a", "team-b"))
    auth.write_text(f"{first}\n{second}\n")
    with Object(4096) as region, Daemon("--auth-file", auth, "--allow-client-shm") as daemon:
        both = Team(daemon, asks), Team(daemon, has)
        for team, name in zip(both, (OWN, THERE), strict=True):
            team.have(name, region)
        yield both


def test_every_rpc_is_here():
    """What is new in the contract needs a request here, or a reason why not."""
    rpcs = {(name, rpc.name) for name, (module, _) in SERVICES.items()
            for rpc in module.DESCRIPTOR.services_by_name[name].methods}
    assert set(ABOUT) | OTHERS == rpcs and not set(ABOUT) & OTHERS


@pytest.mark.parametrize("service,rpc", ABOUT)
def test_as_if_nobody_had_it(teams, service, rpc):
    asks, has = teams
    before = has.state()
    for request in ABOUT[service, rpc]:
        there, nowhere = (asks.ask(service, rpc, request(name)) for name in (THERE, NOWHERE))
        assert there[0] == nowhere[0] and there[1].replace(THERE, NOWHERE) == nowhere[1]
        assert there[0] == (grpc.StatusCode.OK if (service, rpc) in EMPTY else grpc.StatusCode.NOT_FOUND), there
    assert has.state() == before
