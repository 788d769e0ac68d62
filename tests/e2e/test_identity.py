"""Who may call: TLS, client certificates, bearer tokens, roles, and what a tenant does not see of another."""

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import ssl
import stat
import subprocess
import threading
import time
from multiprocessing import shared_memory

import grpc
import numpy as np
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from health.v1 import health_pb2, health_pb2_grpc
from kv import FP32, TIMEOUT, tensor
from qkv.v1 import admin_pb2, admin_pb2_grpc, kv_cache_pb2_grpc, model_pb2, objects_pb2, objects_pb2_grpc
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import shared_memory_pb2, shared_memory_pb2_grpc

Code = grpc.StatusCode
MODEL = {"name": "m", "layers": 1, "kv_heads": 1, "q_heads": 1, "key_dim": 16, "value_dim": 16, "dtype": FP32}


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=PATIENCE).stdout


class Authority:
    """Makes certificates."""

    def __init__(self, folder, name):
        self.folder, self.name = folder, name
        self.ca, self.key = folder / f"{name}.pem", folder / f"{name}.key"
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-keyout", self.key, "-out", self.ca)

    def issue(self, name, alternative="DNS:localhost,IP:127.0.0.1", days="2"):
        """(certificate, key)"""
        base = self.folder / f"{self.name}-{name}"
        key, request, certificate, extra = (base.with_suffix(end) for end in (".key", ".csr", ".pem", ".ext"))
        extra.write_text(f"subjectAltName={alternative}\n")
        run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
            "-keyout", key, "-out", request)
        run("openssl", "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.key, "-CAcreateserial", "-days",
            days, "-extfile", extra, "-out", certificate)
        return certificate, key


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def server(authority):
    return authority.issue("daemon")


def new_token(tenant, roles="read,write", *more):
    """(token, its line)"""
    return run(binary("qkvctl"), "token", "new", tenant, "--roles", roles, *more).splitlines()


def tls_channel(daemon, authority, certificate=None):
    files = [authority.ca.read_bytes()] + ([path.read_bytes() for path in reversed(certificate)] if certificate else [])
    channel = grpc.secure_channel(daemon.tcp, grpc.ssl_channel_credentials(*files),
                                  options=[("grpc.use_local_subchannel_pool", 1)])
    daemon.channels.append(channel)
    return channel


def bearer(token, tenant=None):
    return (("authorization", f"Bearer {token}"),) + ((("qkv-tenant", tenant),) if tenant else ())


@contextlib.contextmanager
def fails(code, text=""):
    with pytest.raises(grpc.RpcError) as refusal:
        yield
    assert refusal.value.code() == code, refusal.value.details()
    assert text in refusal.value.details()


def list_sessions(channel, metadata=(), **fields):
    answer = kv_cache_pb2_grpc.KvCacheStub(channel).ListSessions(kv.ListSessionsRequest(**fields), metadata=metadata,
                                                                 timeout=TIMEOUT)
    return [info.session for info in answer.sessions]


def get_status(channel, metadata=()):
    return admin_pb2_grpc.AdminStub(channel).GetStatus(admin_pb2.GetStatusRequest(), metadata=metadata, timeout=TIMEOUT)


def check_health(channel):
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def open_session(channel, name, metadata, **fields):
    stub = kv_cache_pb2_grpc.KvCacheStub(channel)
    with contextlib.suppress(grpc.RpcError):
        stub.RegisterModel(model_pb2.RegisterModelRequest(model=model_pb2.Model(**MODEL)), metadata=metadata, timeout=TIMEOUT)
    stub.OpenSession(kv.OpenSessionRequest(session=name, model="m", **fields), metadata=metadata, timeout=TIMEOUT)


# ---- Tokens ----

@pytest.fixture(scope="module")
def tokens(folder):
    made = {who: new_token(*how) for who, how in {
        "a": ("team-a",), "b": ("team-b",), "reader": ("team-a", "read"), "operator": ("*", "read,write,admin"),
        "admin-a": ("team-a", "read,write,admin"),
        "late": ("team-a", "read", "--expires", "2020-01-01")}.items()}
    path = folder / "tokens"
    path.write_text("# who may call\n\n" + "".join(f"{line}\n" for _, line in made.values()))
    return path, {who: token for who, (token, _) in made.items()}


@pytest.fixture(scope="module")
def guarded(tokens):
    with Daemon("--auth-file", tokens[0]) as daemon:
        yield daemon


def test_token_new():
    token, line = new_token("team-a", "read", "--expires", "2999-01-02T03:04:05Z")
    assert line == f"token sha256:{hashlib.sha256(token.encode()).hexdigest()} team-a read expires=2999-01-02T03:04:05Z"
    assert token != new_token("team-a")[0]
    answer = json.loads(run(binary("qkvctl"), "token", "new", "*", "--json"))
    assert answer["line"].endswith(" * read,write")
    for wrong in (("old", "a"), ("new", "a b"), ("new", "a", "--roles", "all"), ("new", "a", "--expires", "soon")):
        result = subprocess.run([binary("qkvctl"), "token", *wrong], capture_output=True, text=True, timeout=PATIENCE)
        assert result.returncode == 2 and result.stderr, wrong


def test_calls_need_a_token(guarded, tokens):
    known = tokens[1]
    for target in (guarded.target, guarded.tcp):
        channel = guarded.channel(target)
        check_health(channel)
        assert list_sessions(channel, bearer(known["a"])) is not None
        with fails(Code.UNAUTHENTICATED, "wants a bearer token or a client certificate"):
            list_sessions(channel)
        for wrong in ("x", known["a"][:-1], known["a"] + "0", known["a"].upper(), ""):
            with fails(Code.UNAUTHENTICATED, "token"):
                list_sessions(channel, bearer(wrong))
        with fails(Code.UNAUTHENTICATED, "the token has expired"):
            list_sessions(channel, bearer(known["late"]))
        with fails(Code.UNAUTHENTICATED, "wants a bearer token"):  # it may last for ever
            next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT))
        with fails(Code.UNAUTHENTICATED, "Bearer TOKEN"):
            list_sessions(channel, (("authorization", known["a"]),))
        with fails(Code.UNAUTHENTICATED, "given twice"):
            list_sessions(channel, bearer(known["a"]) + bearer(known["b"]))


def test_roles(guarded, tokens):
    known, channel = tokens[1], guarded.channel()
    list_sessions(channel, bearer(known["reader"]))
    with fails(Code.PERMISSION_DENIED, "needs the role write"):
        kv_cache_pb2_grpc.KvCacheStub(channel).OpenSession(kv.OpenSessionRequest(session="s", model="m"),
                                                           metadata=bearer(known["reader"]), timeout=TIMEOUT)
    with fails(Code.PERMISSION_DENIED, "needs the role admin"):
        get_status(channel, bearer(known["a"]))
    status = get_status(channel, bearer(known["operator"]))
    assert next(metric.value for metric in status.metrics if metric.name == "qkvd_calls_denied_total") >= 2


def test_a_reader_appends_nothing(guarded, tokens):
    """Attend needs the role read; its items may have rows, which are appended first."""
    _, known = tokens
    channel = guarded.channel()
    stub = kv_cache_pb2_grpc.KvCacheStub(channel)
    open_session(channel, "read-only", bearer(known["a"]))
    rows, queries = (tensor(np.ones((count, 1, 16), np.float32)) for count in (3, 1))

    def attend(who, **fields):
        item = kv.Item(session="read-only", q=queries, **fields)
        return stub.Attend(kv.AttendRequest(items=[item]), metadata=bearer(known[who]), timeout=TIMEOUT)

    def length():
        return stub.GetSession(kv.GetSessionRequest(session="read-only"), metadata=bearer(known["a"]),
                               timeout=TIMEOUT).lengths[0]

    attend("a", k=rows, v=rows, position=0)
    assert length() == 3
    with fails(Code.PERMISSION_DENIED, "role write"):
        attend("reader", k=rows, v=rows, position=3)
    assert length() == 3
    assert attend("reader", position=2).results[0].length == 3
    stub.CloseSession(kv.CloseSessionRequest(session="read-only"), metadata=bearer(known["a"]), timeout=TIMEOUT)


def test_admin_of_one_tenant_is_not_the_daemons(guarded, tokens):
    """Whatever else Admin gets, it is the daemon's unless this says otherwise."""
    known, channel = tokens[1], guarded.channel()
    stub, own = admin_pb2_grpc.AdminStub(channel), {"GetQuota", "Compare"}
    methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
    assert own < {method.name for method in methods}
    for method in methods:
        request = getattr(admin_pb2, method.input_type.name)()
        if method.name in own:
            continue
        with fails(Code.PERMISSION_DENIED, "the role admin for all tenants (*), and has it for team-a"):
            getattr(stub, method.name)(request, metadata=bearer(known["admin-a"]), timeout=TIMEOUT)
        with fails(Code.PERMISSION_DENIED, "needs the role admin"):
            getattr(stub, method.name)(request, metadata=bearer(known["a"]), timeout=TIMEOUT)
    answer = stub.GetQuota(admin_pb2.GetQuotaRequest(), metadata=bearer(known["admin-a"]), timeout=TIMEOUT)
    assert [row.quota.tenant for row in answer.tenants] == ["team-a"]
    with fails(Code.NOT_FOUND, "no session nothing of tenant team-a"):
        stub.Compare(admin_pb2.CompareRequest(session="nothing"), metadata=bearer(known["admin-a"]), timeout=TIMEOUT)
    check_health(channel)  # it has not drained


def test_tenants_do_not_see_each_other(guarded, tokens):
    known, channel = tokens[1], guarded.channel()
    stub = kv_cache_pb2_grpc.KvCacheStub(channel)
    for who in "ab":
        open_session(channel, f"only-{who}", bearer(known[who]))
    assert list_sessions(channel, bearer(known["a"])) == ["only-a"]
    assert list_sessions(channel, bearer(known["operator"])) == ["only-a", "only-b"]
    assert list_sessions(channel, bearer(known["operator"], "team-b")) == ["only-b"]
    request = kv.GetSessionRequest(session="only-b")
    with fails(Code.NOT_FOUND):
        stub.GetSession(request, metadata=bearer(known["a"]), timeout=TIMEOUT)
    for other in ("team-b", "nobody"):  # the same words, whether there is one or not
        with fails(Code.NOT_FOUND, f"no tenant {other}"):
            stub.GetSession(request, metadata=bearer(known["a"], other), timeout=TIMEOUT)
        with fails(Code.NOT_FOUND, f"no tenant {other}"):
            list_sessions(channel, bearer(known["a"]), tenant=other)
    assert stub.GetSession(request, metadata=bearer(known["b"], "team-b"), timeout=TIMEOUT).session == "only-b"


def test_one_tenant_leaves_a_part_for_others(tokens, tmp_path):
    """Three of four: sessions, models, objects, Watch calls, regions of shared memory. A quota says otherwise."""
    known, quotas = tokens[1], tmp_path / "quotas"
    quotas.write_text("team-b sessions=4\n")
    limits = [text for what in ("sessions", "models", "objects", "watchers", "client-shm") for text in (f"--limit-{what}", "4")]
    region = shared_memory.SharedMemory(create=True, size=4096)
    with Daemon("--auth-file", tokens[0], "--quota-file", quotas, "--allow-client-shm", *limits) as daemon:
        channel = daemon.channel()
        stub = kv_cache_pb2_grpc.KvCacheStub(channel)
        regions = shared_memory_pb2_grpc.SharedMemoryStub(channel)
        objects = objects_pb2_grpc.ObjectsStub(channel)
        watches = []

        def add_session(who, i):
            stub.OpenSession(kv.OpenSessionRequest(session=f"s{i}", model="m0"), metadata=bearer(known[who]), timeout=TIMEOUT)

        def add_model(who, i):
            model = model_pb2.Model(**{**MODEL, "name": f"m{i}"})
            stub.RegisterModel(model_pb2.RegisterModelRequest(model=model), metadata=bearer(known[who]), timeout=TIMEOUT)

        def add_watch(who, _):
            watches.append(stub.Watch(kv.WatchRequest(), metadata=bearer(known[who]), timeout=TIMEOUT))
            next(watches[-1])

        def add_region(who, i):
            named = shared_memory_pb2.SystemSharedMemoryRegion(name=f"r{i}", key=region.name, byte_size=4096)
            regions.SystemSharedMemoryRegister(shared_memory_pb2.SystemSharedMemoryRegisterRequest(region=named),
                                               metadata=bearer(known[who]), timeout=TIMEOUT)

        def add_object(who, i, retention=kv.RETENTION_KEEP):
            begin = objects_pb2.ObjectInfo(object=f"o{i}", bytes=1, retention=retention)
            piece = objects_pb2.PutPiece(data=b"x", begin=begin)
            objects.PutObjects(iter([objects_pb2.PutObjectsRequest(pieces=[piece])]), metadata=bearer(known[who]),
                               timeout=TIMEOUT)

        def has_objects(who, *names):
            request = objects_pb2.HasObjectsRequest(objects=names)
            return [at != 0 for at in objects.HasObjects(request, metadata=bearer(known[who]), timeout=TIMEOUT).presence]

        for add, text, full in (
                (add_model, "quota models of tenant team-a is 3", "limit-models is 4"),
                (add_object, "limit-objects is 4, and one tenant may have 3", "limit-objects is 4, that many"),
                (add_watch, "limit-watchers is 4, and one tenant may have 3", "limit-watchers is 4, all"),
                (add_region, "limit-client-shm is 4, and one tenant may have 3", "limit-client-shm is 4, all")):
            for i in range(3):
                add("a", i)
            with fails(Code.RESOURCE_EXHAUSTED, text):
                add("a", 3)
            add("b", 0)
            with fails(Code.RESOURCE_EXHAUSTED, full):
                add("b", 1)
        # Objects that may go make place for the tenant's own.
        objects.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=["o0", "o1"]), metadata=bearer(known["a"]),
                              timeout=TIMEOUT)
        for i in range(10, 14):
            add_object("a", i, kv.RETENTION_EVICT)
        assert has_objects("a", "o2", "o10", "o11", "o12", "o13") == [True, False, False, True, True]
        assert has_objects("b", "o0") == [True]
        # Where all places are taken, too, it loses its own, though those of others were not used for longer.
        objects.DeleteObjects(objects_pb2.DeleteObjectsRequest(objects=["o0"]), metadata=bearer(known["b"]),
                              timeout=TIMEOUT)
        add_object("b", 5, kv.RETENTION_EVICT)
        objects.HasObjects(objects_pb2.HasObjectsRequest(objects=["o2", "o12", "o13"], touch=True),
                           metadata=bearer(known["a"]), timeout=TIMEOUT)
        add_object("a", 14, kv.RETENTION_EVICT)
        assert has_objects("a", "o2", "o12", "o13", "o14") == [True, False, True, True]
        assert has_objects("b", "o5") == [True]
        for i in range(3):
            add_session("a", i)
        with fails(Code.RESOURCE_EXHAUSTED, "quota sessions of tenant team-a is 3, 3 are open"):
            add_session("a", 3)
        for i in range(3):
            stub.CloseSession(kv.CloseSessionRequest(session=f"s{i}"), metadata=bearer(known["a"]), timeout=TIMEOUT)
        for i in range(4):
            add_session("b", i)
        for call in watches:
            call.cancel()
    region.close()
    region.unlink()


def test_one_tenant_leaves_prefixes_for_others(tokens):
    """Three quarters of the places, one of them for its root: the other tenant's prompt is found."""
    known = tokens[1]
    with Daemon("--auth-file", tokens[0], "--limit-prefixes", "16") as daemon:
        stub = kv_cache_pb2_grpc.KvCacheStub(daemon.channel())

        def fill(who, pages):
            ids, metadata = list(range(64 * pages)), bearer(known[who])
            open_session(daemon.channel(), "s", metadata)
            rows = tensor(np.zeros((len(ids), MODEL["kv_heads"], MODEL["key_dim"]), np.float32), MODEL["dtype"])
            item = kv.Item(session="s", layer=0, position=0, k=rows, v=rows, token_ids=ids)
            stub.Append(iter([kv.AppendRequest(items=[item])]), metadata=metadata, timeout=TIMEOUT)
            request = kv.MatchRequest(model=MODEL["name"], token_ids=ids)
            return stub.Match(request, metadata=metadata, timeout=TIMEOUT).tokens

        assert fill("a", 20) == 64 * 11
        assert fill("b", 3) == 64 * 3
        metrics = {metric.name: metric.value for metric in get_status(daemon.channel(), bearer(known["operator"])).metrics}
        assert (metrics["qkvd_prefix_pages"], metrics["qkvd_prefix_refused_total"]) == (14, 1)


def test_file_is_read_anew(folder):
    path = folder / "changing"
    (first, line_a), (second, line_b) = new_token("team-a"), new_token("team-b")
    path.write_text(line_a + "\n")
    with Daemon("--auth-file", path) as daemon:
        channel = daemon.channel()
        list_sessions(channel, bearer(first))
        path.write_text(line_b + "\n")

        def refused(token):
            try:
                list_sessions(channel, bearer(token))
            except grpc.RpcError as error:
                return error.code() == Code.UNAUTHENTICATED
            return False

        wait_for(lambda: refused(first) and not refused(second), "the file is not read anew")
        path.write_text("nonsense\n")
        wait_for(lambda: f"{path}:1: a line must be" in daemon.log_text(), "the log does not say what is wrong")
        assert not refused(second)
        path.write_text(line_a + "\n")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: refused(second) and not refused(first), "SIGHUP does not help")


@pytest.mark.parametrize("text,reason", [
    ("token sha256:12 a read", "64 hexadecimal digits"), ("key x a read", "must be token, cert, unix or jwt"),
    ("cert x a read", "must be CN=NAME or SAN=NAME"), ("cert CN= a read", "must be CN=NAME or SAN=NAME"),
    ("unix CN=x a read", "must be uid=NUMBER or gid=NUMBER"), ("unix uid=root a read", "must be uid=NUMBER"),
    ("unix uid=007 a read", "must be uid=NUMBER"), ("unix gid= a read", "must be uid=NUMBER or gid=NUMBER"),
    ("unix uid=7 a read\nunix uid=7 b read", "two lines"), ("cert CN=x a,b read", "tenant"),
    ("cert CN=x a all", "some of read, write and admin"), ("cert CN=x a read until=1", "expires="),
    ("cert CN=x a read expires=1", "expires="), ("cert CN=x a read expires=2027-02-31", "expires="),
    ("cert CN=x a", "KIND WHO TENANT ROLES"),
    ("cert CN=x a read\ncert CN=x b read", "two lines"), ("#" * 2000, "a line of more than")])
def test_bad_file(folder, text, reason):
    path = folder / "bad"
    path.write_text(text + "\n")
    refused_start(reason, "--auth-file", path)


def refused_start(reason, *arguments):
    result = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", *map(str, arguments)], capture_output=True,
                            text=True, timeout=PATIENCE, env=clean_environment())
    assert result.returncode == 1 and reason in result.stderr, result.stderr


def test_wrong_options(folder, authority, server):
    other = authority.issue("other")
    empty = folder / "empty"
    empty.write_text("")
    refused_start("need each other", "--tls-cert", server[0])
    refused_start("--tls-client-ca needs --tls-cert", "--tls-client-ca", authority.ca)
    refused_start("is not the key of", "--tls-cert", server[0], "--tls-key", other[1])
    refused_start("holds no PEM certificate", "--tls-cert", server[1], "--tls-key", server[1])
    refused_start("holds no PEM private key", "--tls-cert", server[0], "--tls-key", server[0])
    refused_start("holds no PEM certificate", "--tls-cert", server[0], "--tls-key", server[1], "--tls-client-ca", server[1])
    refused_start("has nothing", "--tls-cert", empty, "--tls-key", server[1])
    refused_start("cannot read", "--tls-cert", folder / "none", "--tls-key", server[1])
    refused_start("cannot read auth-file", "--auth-file", folder / "none")
    refused_start("--listen-mode is 8", "--listen-mode", "8")
    refused_start("known are unix and all", "--allow-anonymous", "some")
    refused_start("needs --auth-file", "--allow-anonymous", "unix")
    refused_start("contradicts --auth-file", "--allow-anonymous", "all", "--auth-file", empty)


def test_addresses_that_others_reach(tokens):
    for address in ("0.0.0.0:0", "[::]:0"):
        refused_start("--allow-anonymous all", "--listen", address)
    for arguments in (("--allow-anonymous", "all"), ("--auth-file", tokens[0])):
        with Daemon("--listen", "0.0.0.0:0", *arguments):
            pass


def test_anonymous_on_the_unix_socket(tokens):
    with Daemon("--auth-file", tokens[0], "--allow-anonymous", "unix", "--listen-mode", "0600") as daemon:
        assert stat.S_IMODE(os.stat(daemon.socket).st_mode) == 0o600
        get_status(daemon.channel())
        with fails(Code.UNAUTHENTICATED):
            list_sessions(daemon.channel(daemon.tcp))
        with fails(Code.UNAUTHENTICATED):  # who shows a token is held to it
            list_sessions(daemon.channel(), bearer("wrong"))


def test_users_of_the_unix_socket(folder, tokens):
    """The line of the user counts, else that of its group; a token goes before both; TCP has no users."""
    path, (token, line) = folder / "users", new_token("team-b")
    user, group = f"unix uid={os.getuid()} team-a read", f"unix gid={os.getgid()} team-c read,write"

    def write(*lines):
        path.write_text("".join(f"{each}\n" for each in (line, f"unix uid={os.getuid() + 1} * admin", *lines)))
        daemon.process.send_signal(signal.SIGHUP)

    def tenants():
        """Who may list, and whose sessions."""
        try:
            return [name for name in ("team-a", "team-b", "team-c", "default") if may_list(daemon.channel(), name)]
        finally:
            daemon.disconnect()

    def may_list(channel, tenant):
        try:
            list_sessions(channel, (("qkv-tenant", tenant),))
        except grpc.RpcError as error:
            assert error.code() in (Code.NOT_FOUND, Code.UNAUTHENTICATED), error.details()
            return False
        return True

    path.write_text(line + "\n")
    with Daemon("--auth-file", path) as daemon:
        assert tenants() == []
        write(group)
        wait_for(lambda: tenants() == ["team-c"], "the group is not known")
        write(user, group)
        wait_for(lambda: tenants() == ["team-a"], "the user does not go before its group")
        with fails(Code.PERMISSION_DENIED, "needs the role write"):
            kv_cache_pb2_grpc.KvCacheStub(daemon.channel()).OpenSession(kv.OpenSessionRequest(session="s", model="m"),
                                                                        timeout=TIMEOUT)
        list_sessions(daemon.channel(), bearer(token, "team-b"))
        with fails(Code.UNAUTHENTICATED, "the token is not known"):
            list_sessions(daemon.channel(), bearer("wrong"))
        with fails(Code.UNAUTHENTICATED, "wants a bearer token"):
            list_sessions(daemon.channel(daemon.tcp))
        write(user + " expires=2020-01-01", group)
        wait_for(lambda: tenants() == [], "an expired line of the user falls back to the group's")
        with fails(Code.UNAUTHENTICATED, "the client's user has expired"):
            list_sessions(daemon.channel())


# ---- TLS ----

def test_tls(authority, server, folder):
    stranger = Authority(folder, "stranger")
    with Daemon("--tls-cert", server[0], "--tls-key", server[1]) as daemon:
        check_health(tls_channel(daemon, authority))
        check_health(daemon.channel())  # the unix socket is not encrypted
        with fails(Code.UNAVAILABLE):
            check_health(daemon.channel(daemon.tcp))
        with fails(Code.UNAVAILABLE):
            check_health(tls_channel(daemon, stranger))
        qkvctl = [binary("qkvctl"), "--target", daemon.tcp, "status"]
        run(*qkvctl, "--tls-ca", authority.ca)
        result = subprocess.run([*qkvctl, "--tls-ca", stranger.ca, "--timeout", "1s"], capture_output=True, text=True,
                                timeout=PATIENCE)
        assert result.returncode == 1
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
        with pytest.raises(OSError), socket.create_connection(tuple(daemon.tcp.rsplit(":", 1)), timeout=PATIENCE) as plain:
            old.wrap_socket(plain)
        check_health(tls_channel(daemon, authority))


def test_certificate_is_read_anew(authority, folder, server):
    paths = [folder / "current.pem", folder / "current.key"]

    def install(pair):
        for to, path in zip(paths, pair, strict=True):
            to.with_suffix(".new").write_bytes(path.read_bytes())
            to.with_suffix(".new").rename(to)

    def shown():
        context = ssl.create_default_context(cafile=str(authority.ca))
        with socket.create_connection(tuple(daemon.tcp.rsplit(":", 1)), timeout=PATIENCE) as plain, \
                context.wrap_socket(plain, server_hostname="localhost") as secure:
            return dict(part[0] for part in secure.getpeercert()["subject"])["commonName"]

    install(server)
    with Daemon("--tls-cert", paths[0], "--tls-key", paths[1]) as daemon:
        kept = tls_channel(daemon, authority)
        check_health(kept)
        assert shown() == "daemon"
        ends = daemon.metric("qkvd_certificate_expires_seconds")
        assert abs(ends - time.time() - 2 * 86400) < 3600
        install(authority.issue("renewed", days="5"))
        wait_for(lambda: shown() == "renewed", "the new certificate is not shown")
        assert abs(daemon.metric("qkvd_certificate_expires_seconds") - ends - 3 * 86400) < 3600
        check_health(kept)
        paths[0].write_text("nonsense")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "not read anew" in daemon.log_text(), "the log does not say that the certificate is wrong")
        assert shown() == "renewed"
        check_health(kept)


def test_client_certificates(authority, server, folder):
    stranger = Authority(folder, "foreign")
    mapping = folder / "mapping"
    mapping.write_text("cert CN=alice team-a read,write\ncert SAN=bob.example team-b read\n"
                       "cert CN=old team-a read expires=2020-01-01\ncert SAN=gone.example team-b read expires=2020-01-01\n")
    with Daemon("--tls-cert", server[0], "--tls-key", server[1], "--tls-client-ca", authority.ca, "--auth-file", mapping,
                "--allow-anonymous", "unix") as daemon:
        alice = tls_channel(daemon, authority, authority.issue("alice"))
        bob = tls_channel(daemon, authority, authority.issue("robert", "DNS:x.example,DNS:bob.example"))
        open_session(alice, "hers", ())
        assert list_sessions(alice) == ["hers"] and list_sessions(bob) == []
        with fails(Code.PERMISSION_DENIED, "needs the role write"):
            kv_cache_pb2_grpc.KvCacheStub(bob).OpenSession(kv.OpenSessionRequest(session="s", model="m"), timeout=TIMEOUT)
        for name, text in (("mallory", "not known"), ("old", "expired")):
            with fails(Code.UNAUTHENTICATED, text):
                list_sessions(tls_channel(daemon, authority, authority.issue(name)))
        with fails(Code.UNAUTHENTICATED, "expired"):  # and its common name does not bring it back
            list_sessions(tls_channel(daemon, authority, authority.issue("alice", "DNS:x.example,DNS:gone.example")))
        for channel in (tls_channel(daemon, authority), tls_channel(daemon, authority, stranger.issue("alice"))):
            with fails(Code.UNAVAILABLE):
                list_sessions(channel)
        expired = authority.issue("alice2", days="-1")
        with fails(Code.UNAVAILABLE):
            list_sessions(tls_channel(daemon, authority, expired))
        certificate, key = authority.issue("alice")
        answer = run(binary("qkvctl"), "--target", daemon.tcp, "sessions", "--json", "--tls-ca", authority.ca, "--tls-cert",
                     certificate, "--tls-key", key)
        assert json.loads(answer.splitlines()[0])["session"] == "hers"


@contextlib.contextmanager
def far_away(address, delay):
    """An address whose bytes come and go with a delay of so many seconds, as on a long way."""
    ends = []

    def pump(source, sink):
        waiting = queue.SimpleQueue()

        def late():
            with contextlib.suppress(OSError):
                while True:
                    at, data = waiting.get()
                    time.sleep(max(at - time.monotonic(), 0))
                    if not data:
                        break
                    sink.sendall(data)
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

        threading.Thread(target=late, daemon=True).start()
        data = True
        while data:
            try:
                data = source.recv(1 << 16)
            except OSError:
                data = b""
            waiting.put((time.monotonic() + delay, data))

    def accept(listener):
        with contextlib.suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection(tuple(address.rsplit(":", 1)), timeout=PATIENCE)
                ends.extend(pair)
                for source, sink in (pair, pair[::-1]):
                    threading.Thread(target=pump, args=(source, sink), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        yield "127.0.0.1:%d" % listener.getsockname()[1]
    for end in ends:
        end.close()


def test_tls_over_a_long_way(authority, server):
    """A handshake takes several round trips: of 200 ms each."""
    with Daemon("--tls-cert", server[0], "--tls-key", server[1]) as daemon, far_away(daemon.tcp, 0.1) as address:
        run(binary("qkvctl"), "--target", address, "status", "--tls-ca", authority.ca)


def test_tls_connections_that_say_nothing(authority, server):
    """Half of a handshake, and none: others are served, and accepting does not wait for them."""
    with Daemon("--tls-cert", server[0], "--tls-key", server[1]) as daemon:
        silent = [socket.create_connection(tuple(daemon.tcp.rsplit(":", 1)), timeout=PATIENCE) for _ in range(100)]
        for connection in silent[::2]:
            connection.send(b"\x16\x03\x01\x02\x00\x01\x00")
        check_health(tls_channel(daemon, authority))
        for connection in silent:
            connection.close()
        check_health(tls_channel(daemon, authority))


def test_tools_with_tokens(guarded, tokens, folder):
    path = folder / "token"
    path.write_text(tokens[1]["operator"] + "\n")
    command = [binary("qkvctl"), "--target", guarded.target, "status"]
    run(*command, "--token-file", path)
    for environment in ({"QKVD_TOKEN": tokens[1]["operator"]}, {"QKVD_TOKEN_FILE": str(path)}):
        subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE, env=clean_environment(**environment))
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=clean_environment())
    assert result.returncode == 1 and "wants a bearer token" in result.stderr
    result = subprocess.run([*command, "--token-file", folder / "none"], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 1 and "cannot read token_file" in result.stderr
