"""What the page is shown: a daemon with three tenants, some of whose sessions lie on the SSD, and one of 131072 tokens."""

import contextlib

import numpy as np
from daemon import Daemon
from kv import FP16, TIMEOUT, Tenant, tensor
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2, tensor_pb2

TOKENS, LAYERS, HEADS, DIM = 131072, 32, 8, 16
PIECE = 8192
# Names that the grammar of names allows and a careless page trips over.
ODD_NAMES = ["__proto__", "constructor", "javascript:alert", "../../etc/passwd", "x" * 128]
# Names with markup: the daemon refuses them, and the page is shown them by answers that are made up.
MARKUP = [
    "<img src=x onerror=document.title='owned'>",
    "</td></table><script>document.title='owned'</script>",
    "\" onmouseover=\"document.title='owned'",
    "&lt;b&gt; {{7*7}} ${document.title='owned'} ‮",
]


def admin_address(daemon):
    return next(line["address"] for line in daemon.log_lines() if line["message"] == "serving HTTP")


def open_session(stub, name, model, **fields):
    stub.OpenSession(kv.OpenSessionRequest(session=name, model=model, **fields), timeout=TIMEOUT)


def fill(stub, name, model, tokens):
    """Rows of all layers, the same ones again and again, and some attention to them."""
    random = np.random.default_rng(5)
    piece = min(PIECE, tokens)
    k, v = (tensor(random.standard_normal((piece, model.kv_heads, DIM)), FP16) for _ in range(2))
    q = random.standard_normal((1, model.q_heads, DIM))

    def appends(layer):
        for position in range(0, tokens, piece):
            yield kv.AppendRequest(items=[kv.Item(session=name, layer=layer, position=position, k=k, v=v)])

    for layer in range(model.layers):
        stub.Append(appends(layer), timeout=TIMEOUT)
        # Layer by layer the attention gets sharper.
        item = kv.Item(session=name, layer=layer, position=tokens - 1, q=tensor((0.2 + 0.1 * layer) * q, FP16))
        result = stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT).results[0]
        assert result.status.code == 0, result.status


def fill_large(stub, name, model):
    """131072 tokens at bits from 1 to 4, half of them shared with another session."""
    open_session(stub, name, model.name)
    fill(stub, name, model, TOKENS)
    half = TOKENS // 2
    stub.Fork(kv.ForkRequest(session=name, fork=name + "/half", position=half), timeout=TIMEOUT)
    for layer in range(model.layers):
        stub.Demote(
            kv.DemoteRequest(session=name, range=tensor_pb2.TokenRange(begin=half, end=TOKENS - half // 2),
                             bits=1 + layer % 3, layers=[layer]),
            timeout=TIMEOUT)


@contextlib.contextmanager
def scene(folder):
    """A daemon, and who may call it: (daemon, stub)."""
    arguments = ["--admin-listen", "127.0.0.1:0", "--data-dir", str(folder), "--ema-every", "1",
                 "--storage-read-ahead", "0", "--calibrate-tokens", "0"]
    with Daemon(*arguments) as daemon:
        stub = daemon.stub()
        small = model_pb2.Model(name="small", layers=6, kv_heads=2, q_heads=4, key_dim=DIM, value_dim=DIM, dtype=FP16)
        for tenant, sessions, tokens in (("default", 3, 2000), ("search", 5, 6000), ("chat", 60, 300)):
            caller = Tenant(stub, "" if tenant == "default" else tenant)
            caller.RegisterModel(model_pb2.RegisterModelRequest(model=small), timeout=TIMEOUT)
            for number in range(sessions):
                open_session(caller, f"{tenant}/user-{number}", "small", durability=kv.DURABILITY_ASYNC)
                fill(caller, f"{tenant}/user-{number}", small, tokens)
            for number in range(0, sessions, 2):
                caller.CloseSession(kv.CloseSessionRequest(session=f"{tenant}/user-{number}", keep=True), timeout=TIMEOUT)
        # One of which a layer was needed again.
        item = kv.Item(session="default/user-0", layer=1, position=1999, q=tensor(np.ones((1, 4, DIM)), FP16))
        stub.Attend(kv.AttendRequest(items=[item]), timeout=TIMEOUT)
        for name in ODD_NAMES:
            open_session(stub, name, "small")
        model = model_pb2.Model(name="large", layers=LAYERS, kv_heads=HEADS, q_heads=2 * HEADS, key_dim=DIM, value_dim=DIM,
                                dtype=FP16)
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), timeout=TIMEOUT)
        fill_large(stub, "large", model)
        yield daemon, stub
