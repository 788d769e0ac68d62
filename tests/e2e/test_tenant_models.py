"""Models are a tenant's: two have the same name with another geometry and another calibration, in memory, on the SSD and
after kill -9; and a model of the default tenant that is shared with the others."""

import json
import pathlib
import subprocess
import tarfile
import time

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment
from kv import TIMEOUT, Cache, Tenant, refused
from qkv.v1 import admin_pb2, admin_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import model_pb2
from test_http import ADMIN, ask
from test_identity import new_token
from test_isolation import Client, calibrations

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
Code = grpc.StatusCode


def register(stub, model, **fields):
    made = model_pb2.Model()
    made.CopyFrom(model)
    for field, value in fields.items():
        setattr(made, field, value)
    return stub.RegisterModel(model_pb2.RegisterModelRequest(model=made), timeout=TIMEOUT)


def get(stub, name):
    return stub.GetModel(model_pb2.GetModelRequest(name=name), timeout=TIMEOUT)


def listed(stub, *names):
    """(name, tenant, shared, sessions) of those of these names."""
    models = stub.ListModels(model_pb2.ListModelsRequest(), timeout=TIMEOUT).models
    return [(one.model.name, one.tenant, one.shared, one.sessions) for one in models if one.model.name in names]


def open_session(stub, session, model, **fields):
    return stub.OpenSession(kv.OpenSessionRequest(session=session, model=model, **fields), timeout=TIMEOUT)


def cache_of(cache, stub, **fields):
    """The same session of another tenant, or in another process."""
    made = object.__new__(Cache)
    made.__dict__.update(cache.__dict__, stub=stub, **fields)
    return made


def calls_with_model(model):
    """Every call that names a model and reads or uses it."""
    return {"GetModel": model_pb2.GetModelRequest(name=model),
            "GetCalibration": model_pb2.GetCalibrationRequest(model=model),
            "OpenSession": kv.OpenSessionRequest(session="none", model=model),
            "Match": kv.MatchRequest(model=model, token_ids=range(64))}


def error_of(stub, method, request):
    with pytest.raises(grpc.RpcError) as caught:
        answer = getattr(stub, method)(request, timeout=TIMEOUT)
        list(answer)  # of a stream
    return caught.value.code(), caught.value.details()


# ---- Of two tenants ----


def test_same_name_with_another_geometry(daemon, name):
    stubs = {"": daemon.stub(), "a": Tenant(daemon.stub(), "a")}
    dims = {"": 16, "a": 32}
    caches = {tenant: Cache(stub, name, key_dim=dims[tenant], value_dim=16) for tenant, stub in stubs.items()}
    model = caches[""].model.name
    for tenant, cache in caches.items():
        cache.append(0, *cache.rows(100))
        assert cache.fetch()[0].shape == (100, 2, dims[tenant])
        found = get(cache.stub, model)
        assert (found.model.key_dim, found.tenant, found.shared) == (dims[tenant], tenant or "default", False)
        assert cache.info().model_tenant == (tenant or "default")
        with refused(Code.ALREADY_EXISTS, f"the name {model} is taken by a model with another key_dim"):
            register(cache.stub, cache.model, key_dim=64)
        answer = register(cache.stub, cache.model)
        assert (answer.tenant, answer.shared) == (tenant or "default", False)
    assert listed(stubs[""], model) == [(model, "a", False, 1), (model, "default", False, 1)]  # of all tenants
    assert listed(Tenant(daemon.stub(), "default"), model) == [(model, "default", False, 1)]
    assert listed(stubs["a"], model) == [(model, "a", False, 1)]
    assert listed(Tenant(daemon.stub(), "b"), model) == []


def test_another_tenants_model_is_not_found(daemon, name):
    Cache(daemon.stub(), name, layers=1)
    other = Tenant(daemon.stub(), "b")
    for there, nowhere in zip(calls_with_model(f"model-{name}").items(), calls_with_model("model-nowhere").items()):
        found, missing = (error_of(other, method, request) for method, request in (there, nowhere))
        assert found == (Code.NOT_FOUND, f"no model model-{name} of tenant b")
        assert missing == (Code.NOT_FOUND, "no model model-nowhere of tenant b")


def test_the_tenant_is_that_of_the_call(daemon, name):
    model = Cache(daemon.stub(), name, layers=1).model
    stub = Tenant(daemon.stub(), "t")
    assert register(stub, model, tenant="t").tenant == "t"
    with refused(Code.INVALID_ARGUMENT, "model.tenant is u, the call's qkv-tenant is t"):
        register(stub, model, tenant="u")
    with refused(Code.INVALID_ARGUMENT, "model.tenant is u, the call's tenant is default"):
        register(daemon.stub(), model, tenant="u")


def test_models_of_others_make_a_look_no_slower():
    """GetModel is answered on a thread that reads requests: it walks over no other models."""
    with Daemon("--limit-models", "10000") as daemon:
        mine, other = Tenant(daemon.stub(), "mine"), Tenant(daemon.stub(), "other")
        model = Cache(mine, "s", layers=1).model

        def shortest():
            times = []
            for _ in range(200):
                begin = time.perf_counter()
                assert get(mine, model.name).sessions == 1
                times.append(time.perf_counter() - begin)
            return min(times)

        alone = shortest()
        for i in range(8000, 0, -1):
            register(other, model, name=f"{i:04}")
        assert any(shortest() < 3 * alone for _ in range(5))


def test_clients_of_one_tenant_see_their_own(tmp_path):
    lines, tokens = [], {}
    for who, tenant in (("a", "team-a"), ("b", "team-b"), ("default", "default"), ("all", "*")):
        tokens[who], line = new_token(tenant, "read,write")
        lines.append(line)
    (tmp_path / "auth").write_text("\n".join(lines) + "\n")
    first, second = calibrations(tmp_path, "s")
    with Daemon("--auth-file", str(tmp_path / "auth")) as daemon:
        stubs = {who: Client(daemon, token) for who, token in tokens.items()}
        model = Cache(stubs["a"], "s", layers=1).model
        with refused(Code.NOT_FOUND, f"no model {model.name} of tenant team-b"):
            get(stubs["b"], model.name)
        assert listed(stubs["b"], model.name) == []
        # Each has a calibration of its own.
        Cache(stubs["b"], "s", layers=1)
        for who, calibration in (("a", first), ("b", second)):
            register(stubs[who], model, calibration=calibration, calibration_trusted=True)
        versions = [get(stubs[who], model.name).calibration.version for who in "ab"]
        assert versions[0] != versions[1] and 0 not in versions
        assert listed(stubs["all"], model.name) == [(model.name, tenant, False, 1) for tenant in ("team-a", "team-b")]
        with refused(Code.NOT_FOUND, f"no model {model.name}"):
            get(stubs["all"], model.name)  # of the default tenant
        # Who shares a model, and who replaces its calibration.
        for who, tenant in (("a", "team-a"), ("default", "default")):
            with refused(Code.PERMISSION_DENIED, f"model.shared is set: a model is shared with the role write for all "
                                                 f"tenants (*), and the call has it for {tenant} alone"):
                register(stubs[who], model, name="base", shared=True)
        assert register(stubs["all"], model, name="base", shared=True).shared
        register(stubs["all"], model, name="base", calibration=first, calibration_trusted=True)
        for who in ("a", "default"):
            register(stubs[who], model, name="base", calibration=first)  # the one that it has
            with refused(Code.PERMISSION_DENIED, "the model base is shared: its calibration is replaced with the role write"):
                register(stubs[who], model, name="base", calibration=second)


def test_two_names_of_one_quota(tmp_path):
    (tmp_path / "quotas").write_text("a models=1\n")
    with Daemon("--quota-file", str(tmp_path / "quotas")) as daemon:
        model = Cache(daemon.stub(), "s", layers=1, shared=True).model
        stub = Tenant(daemon.stub(), "a")
        register(stub, model, shared=False)  # the shared one is not the tenant's
        register(stub, model, shared=False, name="first")
        register(stub, model, shared=False, name="first")
        with refused(Code.RESOURCE_EXHAUSTED, "quota models of tenant a is 1, it has registered 1"):
            register(stub, model, shared=False, name="second")


# ---- On the SSD ----


@pytest.mark.parametrize("killed", [False, True])
def test_restart_keeps_both(tmp_path, killed):
    given = calibrations(tmp_path, "s", layers=2)
    arguments = ("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0")
    tenants = ("", "a", "b")  # b's has another geometry
    with Daemon(*arguments) as daemon:
        caches, before = [], []
        for i, tenant in enumerate(tenants):
            dims = 32 if tenant == "b" else 16
            cache = Cache(Tenant(daemon.stub(), tenant), "s", seed=i, key_dim=dims, value_dim=dims, recent_window=0,
                          durability=kv.DURABILITY_SYNC)
            if tenant != "b":
                register(cache.stub, cache.model, calibration=given[i], calibration_trusted=True)
            for layer in range(2):
                cache.append(0, *cache.rows(256), layer=layer, token_ids=list(range(256)))
            caches.append(cache)
            before.append((cache.fetch(), get(cache.stub, cache.model.name).calibration.version))
        assert len({version for _, version in before}) == 3 and before[2][1] == 0
        if killed:
            daemon.kill()
    for _ in range(2):
        with Daemon(*arguments) as daemon:
            assert [row[1:] for row in listed(daemon.stub(), "model-s")] == [(tenant, False, 1)
                                                                             for tenant in ("a", "b", "default")]
            for tenant, cache, (rows, version) in zip(tenants, caches, before):
                now = cache_of(cache, Tenant(daemon.stub(), tenant))
                info = now.info()
                assert (list(info.lengths), info.model_tenant) == ([256] * 2, tenant or "default")
                for array, earlier in zip(now.fetch(), rows):
                    assert np.array_equal(array, earlier)
                assert get(now.stub, "model-s").calibration.version == version
                match = now.stub.Match(kv.MatchRequest(model="model-s", token_ids=range(256)), timeout=TIMEOUT)
                assert (match.session, match.tokens) == ("s", 256)
            if killed:
                daemon.kill()


@pytest.mark.parametrize("first", ["shared", "session", "own"])
def test_restart_keeps_a_model_shared(tmp_path, first):
    """Whether it is shared before the first session is on the SSD or after it, or after another tenant has one of its name."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0")
    with Daemon(*arguments) as daemon:
        stub = daemon.stub()
        own = Cache(Tenant(stub, "own"), "o", layers=1, kv_heads=1, q_heads=1, durability=kv.DURABILITY_SYNC) if first == "own" else None
        base = Cache(stub, "o", layers=1, durability=kv.DURABILITY_SYNC, shared=first == "shared")
        register(stub, base.model, shared=True)
        if own is None:
            own = cache_of(base, Tenant(stub, "own"))
            open_session(own.stub, "o", base.model.name, durability=kv.DURABILITY_SYNC)
        own.append(0, *own.rows(100))
        rows = own.fetch()
        daemon.kill()
    for _ in range(2):
        with Daemon(*arguments) as daemon:
            mine = [("model-o", "own", False, 1)] if first == "own" else []
            assert listed(daemon.stub(), "model-o") == [("model-o", "default", True, 1 if mine else 2), *mine]
            assert get(Tenant(daemon.stub(), "own"), "model-o").tenant == ("own" if mine else "default")
            assert get(Tenant(daemon.stub(), "third"), "model-o").shared
            for array, earlier in zip(cache_of(own, Tenant(daemon.stub(), "own")).fetch(), rows):
                assert np.array_equal(array, earlier)
            daemon.kill()


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_unshared_models_stay_so(tmp_path, killed):
    """Not while another tenant has a session of it, in memory or on the SSD; then also after a restart."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--calibrate-tokens", "0")

    def unshare(daemon):
        admin_pb2_grpc.AdminStub(daemon.channel()).UnshareModel(admin_pb2.UnshareModelRequest(name="model-o"), timeout=TIMEOUT)

    with Daemon(*arguments) as daemon:
        base = Cache(daemon.stub(), "o", layers=1, durability=kv.DURABILITY_SYNC, shared=True)
        base.append(0, *base.rows(100))
        other = cache_of(base, Tenant(daemon.stub(), "other"))
        open_session(other.stub, "o", "model-o", durability=kv.DURABILITY_SYNC)
        other.append(0, *other.rows(100))
        for keep in (True, False):
            with refused(Code.FAILED_PRECONDITION, "the model model-o has 1 sessions of other tenants"):
                unshare(daemon)
            assert get(other.stub, "model-o").shared
            other.stub.CloseSession(kv.CloseSessionRequest(session="o", keep=keep), timeout=TIMEOUT)
        unshare(daemon)
        unshare(daemon)
        with refused(Code.NOT_FOUND, "no model model-o of tenant other"):
            get(other.stub, "model-o")
        if killed:
            daemon.kill()
    for _ in range(2):
        with Daemon(*arguments) as daemon:
            assert listed(daemon.stub(), "model-o") == [("model-o", "default", False, 1)]
            with refused(Code.NOT_FOUND, "no model model-o of tenant other"):
                get(Tenant(daemon.stub(), "other"), "model-o")
            if killed:
                daemon.kill()
    with Daemon(*arguments) as daemon:  # and it can be shared again
        register(daemon.stub(), base.model, shared=True)
        assert get(Tenant(daemon.stub(), "other"), "model-o").shared
    with Daemon(*arguments) as daemon:
        assert get(Tenant(daemon.stub(), "other"), "model-o").shared


def test_directory_of_a_daemon_without_models_of_tenants(tmp_path):
    """Written by version 0.1.0 before models had tenants: sessions `s` of the tenants `default` and `other`, 256 tokens
    each, of the model `model-s`, with a calibration. The model is the default tenant's, and shared as long as the other
    one has a session of it, which teaches it no more."""
    with tarfile.open(GOLDEN / "data-directory-of-tenants_0.1.0.tar.xz") as tar:
        tar.extractall(tmp_path)
    rows = np.load(tmp_path / "rows.npz")
    for last in (False, False, True):
        with Daemon("--data-dir", str(tmp_path / "data")) as daemon:
            stub = daemon.stub()
            assert listed(stub, "model-s") == [("model-s", "default", True, 2)]
            assert get(stub, "model-s").calibration.version == int(rows["version"])
            for tenant, learns in (("default", True), ("other", False)):
                cache = object.__new__(Cache)
                cache.stub, cache.name = Tenant(stub, tenant), "s"
                for array, earlier in zip(cache.fetch(), rows[tenant]):
                    # That version multiplied by the calibration's matrices in fp32, later ones do in 16-bit whole numbers.
                    assert np.abs(array - earlier).max() < 5e-4 * earlier.std()
                info = cache.info()
                assert (info.model_tenant, info.policy.self_calibration) == ("default", learns)
            with refused(Code.ALREADY_EXISTS, "the name model-s is taken by a shared model with another key_dim"):
                register(Tenant(stub, "other"), get(stub, "model-s").model, key_dim=64)
            if last:
                Tenant(stub, "other").CloseSession(kv.CloseSessionRequest(session="s"), timeout=TIMEOUT)
            daemon.kill()
    with Daemon("--data-dir", str(tmp_path / "data")) as daemon:
        assert listed(daemon.stub(), "model-s") == [("model-s", "default", False, 1)]


# ---- Shared models ----


def test_shared_model(daemon, name):
    base = Cache(daemon.stub(), name, layers=1, recent_window=0)
    model = base.model.name
    a, b = (Tenant(daemon.stub(), tenant) for tenant in "ab")
    register(b, base.model, key_dim=32)  # before it is shared
    with refused(Code.NOT_FOUND, f"no model {model} of tenant a"):
        get(a, model)
    with refused(Code.INVALID_ARGUMENT, "model.shared is set, and the call's tenant is a: only models of the tenant default"):
        register(a, base.model, shared=True)
    answer = register(daemon.stub(), base.model, shared=True)
    assert (answer.tenant, answer.shared) == ("default", True)
    assert register(daemon.stub(), base.model).shared  # for good
    answer = register(a, base.model)
    assert (answer.tenant, answer.shared) == ("default", True)
    with refused(Code.ALREADY_EXISTS, f"the name {model} is taken by a shared model with another value_dim"):
        register(a, base.model, value_dim=32)
    assert get(a, model).tenant == "default" and get(b, model).tenant == "b"
    register(b, base.model, key_dim=32)
    assert listed(a, model) == [(model, "default", True, 0)] and listed(b, model) == [(model, "b", False, 0)]
    assert listed(daemon.stub(), model) == [(model, "b", False, 0), (model, "default", True, 1)]
    # Sessions, prefixes and forks stay each tenant's.
    open_session(a, name, model, policy=model_pb2.CodecPolicy(recent_window=0))
    open_session(b, name, model)
    of_a = cache_of(base, a)
    ids = list(range(256))
    of_a.append(0, *of_a.rows(256), token_ids=ids)
    assert of_a.info().model_tenant == "default"
    match = kv.MatchRequest(model=model, token_ids=ids)
    assert [stub.Match(match, timeout=TIMEOUT).tokens for stub in (a, b, daemon.stub())] == [256, 0, 0]
    more = open_session(a, name + "-more", model, prefix_token_ids=ids, policy=model_pb2.CodecPolicy(recent_window=0))
    assert more.matched_tokens == 256
    with refused(Code.NOT_FOUND, f"no session {name}-more"):
        daemon.stub().GetSession(kv.GetSessionRequest(session=name + "-more"), timeout=TIMEOUT)


def test_tenants_opt_in_to_teaching(name):
    with Daemon() as daemon:
        base = Cache(daemon.stub(), name, layers=1, shared=True)
        for tenant, policy, learns in (("a", None, False), ("a", model_pb2.CodecPolicy(self_calibration=False), False),
                                       ("a", model_pb2.CodecPolicy(self_calibration=True), True), ("default", None, True)):
            cache = cache_of(base, Tenant(daemon.stub(), tenant), name=f"{tenant}-{policy is not None}-{learns}")
            info = open_session(cache.stub, cache.name, cache.model.name, policy=policy).info
            assert info.policy.self_calibration == learns
            if not learns:
                cache.append(0, *cache.rows(300))
                assert daemon.status().learning_bytes == 0
            elif tenant == "a":
                cache.append(0, *cache.rows(300))
                assert daemon.status().learning_bytes > 0


# ---- What shows models ----


def test_metrics_name_the_tenant():
    with Daemon(*ADMIN, "--limit-metric-labels", "2") as daemon:
        for tenant in ("", "a", "b"):
            Cache(Tenant(daemon.stub(), tenant), "s", layers=1)
        lines = [line for line in ask(daemon, "/metrics")[2].splitlines() if line.startswith("qkvd_model_sessions{")]
        assert sorted(lines) == ['qkvd_model_sessions{model="model-s",tenant="a"} 1',
                                 'qkvd_model_sessions{model="model-s",tenant="b"} 1',
                                 'qkvd_model_sessions{model="other",tenant="other"} 1']


def test_qkvctl(daemon, name):
    def qkvctl(*arguments):
        result = subprocess.run([binary("qkvctl"), *arguments, "--target", daemon.target, "--json"], capture_output=True,
                                text=True, env=clean_environment(), timeout=PATIENCE, stdin=subprocess.DEVNULL)
        return [json.loads(line) for line in result.stdout.splitlines()] if result.returncode == 0 else result.stderr.strip()

    model = Cache(daemon.stub(), name, layers=1).model
    register(Tenant(daemon.stub(), "a"), model, key_dim=32)

    def rows(*more):
        return [(row["tenant"], row["shared"], row["key_dim"]) for row in qkvctl("models", *more) if row["model"] == model.name]

    assert rows() == [("a", False, 32), ("default", False, 16)]
    assert rows("--tenant", "a") == [("a", False, 32)] and rows("--tenant", "b") == []
    assert "only models of the tenant default are shared" in qkvctl("share", model.name, "--tenant", "a")
    assert qkvctl("share", "nothing") == "qkvctl: no model nothing"
    assert qkvctl("share", model.name) == [{"model": model.name, "shared": True}]
    assert qkvctl("unshare", "nothing") == "qkvctl: no model nothing"
    assert qkvctl("unshare", model.name) == [{"model": model.name, "shared": False}]
    assert rows("--tenant", "b") == []
    assert qkvctl("share", model.name) == [{"model": model.name, "shared": True}]
    assert rows() == [("a", False, 32), ("default", True, 16)] and rows("--tenant", "b") == [("default", True, 16)]
