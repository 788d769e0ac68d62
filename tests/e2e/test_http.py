"""HTTP for operators: metrics, health, JSON, and who may ask."""

import concurrent.futures
import hashlib
import http.client
import json
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import urllib.parse

import grpc
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, Cache
from qkv.v1 import kv_cache_pb2 as kv

ADMIN = ("--admin-listen", "127.0.0.1:0")


def address(daemon):
    return next(line["address"] for line in daemon.log_lines() if line["message"] == "serving HTTP")


def ask(daemon, path, method="GET", headers=None, body=None):
    """Status, headers and body of an answer."""
    host, port = address(daemon).rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def api(daemon, path, **query):
    status, _, body = ask(daemon, f"/api/{path}?{urllib.parse.urlencode(query)}")
    return status, json.loads(body)


def samples(text):
    """Name with labels -> value."""
    return {name: float(value) for name, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


def metrics(daemon):
    return samples(ask(daemon, "/metrics")[2])


def attend_runs(daemon):
    """How often it has attended: of a long batch, turns that are over."""
    return metrics(daemon)['qkvd_stage_seconds_count{stage="attend"}']


def tenant_metadata(tenant):
    return [("qkv-tenant", tenant)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """A daemon with sessions of two tenants, one of them on the SSD alone, and some calls that failed."""
    folder = tmp_path_factory.mktemp("data")
    with Daemon(*ADMIN, "--data-dir", str(folder), "--limit-metric-labels", "2",
                "--storage-read-ahead", "0") as running:
        stub = running.stub()
        cache = Cache(stub, "alpha", layers=2, shared=True)
        for layer in range(2):
            cache.append(0, *cache.rows(300), layer=layer)
        cache.attend(299, cache.queries(1))
        sunk = Cache(stub, "beta", layers=2, durability=kv.DURABILITY_ASYNC)
        for layer in range(2):
            sunk.append(0, *sunk.rows(128), layer=layer)
        stub.CloseSession(kv.CloseSessionRequest(session="beta", keep=True), timeout=TIMEOUT)
        stub.Fork(kv.ForkRequest(session="alpha", fork="gamma"), timeout=TIMEOUT)
        for tenant in ("red", "green", "blue"):
            opening = kv.OpenSessionRequest(session="alpha", model=cache.model.name)
            stub.OpenSession(opening, timeout=TIMEOUT, metadata=tenant_metadata(tenant))
        for _ in range(3):
            with pytest.raises(grpc.RpcError):
                stub.GetSession(kv.GetSessionRequest(session="none"), timeout=TIMEOUT)
        sunk.attend(127, sunk.queries(1))  # which brings pages back
        yield running


# ---- Metrics ----


def test_promtool_accepts_the_metrics(loaded):
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: deploy/packages.sh lists prometheus"
    result = subprocess.run([promtool, "check", "metrics"], input=ask(loaded, "/metrics")[2], capture_output=True,
                            text=True, timeout=PATIENCE)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_metrics_have_every_row_of_the_table(loaded):
    listed = subprocess.run([binary("qkvd"), "--print-metrics"], capture_output=True, text=True, timeout=PATIENCE,
                            env=clean_environment(), check=True).stdout
    status, headers, text = ask(loaded, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line in listed.splitlines():
        name, kind = line.split()[:2]
        assert f"# TYPE {name} {kind}\n" in text and f"# HELP {name} " in text and f"\n{name} " in text
    assert samples(text)["qkvd_sessions"] == 6


def test_histograms_add_up(loaded):
    text = ask(loaded, "/metrics")[2]
    values = samples(text)
    families = {}
    for name, labels, bound, value in re.findall(r'^(qkvd_\w+)_bucket\{(.*),le="(\S+)"\} (\d+)$', text, re.MULTILINE):
        families.setdefault((name, labels), []).append((float(bound), int(value)))
    assert len(families) > 20
    for (name, labels), buckets in families.items():
        assert buckets == sorted(buckets) and [count for _, count in buckets] == sorted(count for _, count in buckets)
        assert buckets[-1] == (float("inf"), values[f"{name}_count{{{labels}}}"])
        assert (values[f"{name}_sum{{{labels}}}"] > 0) == (buckets[-1][1] > 0)
    call = 'qkvd_call_seconds_count{service="qkv.v1.KvCache",method="%s"}'
    assert values[call % "Fork"] == 1 and values[call % "OpenSession"] == 5 and values[call % "Watch"] == 0
    assert values['qkvd_method_calls_total{service="qkv.v1.KvCache",method="GetSession",code="NOT_FOUND"}'] == 3
    for stage in ("queue", "encode", "attend", "restore"):
        assert values[f'qkvd_stage_seconds_count{{stage="{stage}"}}'] > 0, stage


def test_labels_are_bounded(loaded):
    """Of four tenants two are named, in the order they came; what the others do is not lost."""
    values = metrics(loaded)
    tenants = {name for name in values if name.startswith("qkvd_tenant_calls_total")}
    assert tenants == {f'qkvd_tenant_calls_total{{tenant="{name}"}}' for name in ("default", "red", "other")}
    assert values['qkvd_tenant_sessions{tenant="default"}'] == 3
    assert values['qkvd_tenant_sessions{tenant="other"}'] == 2
    assert values['qkvd_tenant_calls_total{tenant="other"}'] == 2
    seconds = {key: value for key, value in values.items() if key.startswith('qkvd_tenant_call_seconds_bucket{tenant="other"')}
    assert len(seconds) == 20 and seconds['qkvd_tenant_call_seconds_bucket{tenant="other",le="+Inf"}'] == 2
    assert values['qkvd_tenant_failed_calls_total{tenant="default"}'] == 3
    assert values['qkvd_tenant_memory_bytes{tenant="default"}'] > 0
    with pytest.raises(grpc.RpcError):  # who only fails gets no row
        loaded.stub().GetSession(kv.GetSessionRequest(session="x"), timeout=TIMEOUT, metadata=tenant_metadata("new"))
    assert metrics(loaded)['qkvd_tenant_failed_calls_total{tenant="other"}'] == 1


# ---- Health ----


def check_health(target=None, **environment):
    if target:
        environment["QKVD_ADMIN_LISTEN"] = target
    result = subprocess.run([binary("qkvd"), "--check-health"], capture_output=True, text=True, timeout=PATIENCE,
                            env=clean_environment(**environment))
    return result.returncode, result.stderr


def test_health():
    with Daemon(*ADMIN, "--drain-grace", "60s") as daemon:
        assert [ask(daemon, path)[0] for path in ("/health/live", "/health/ready")] == [200, 200]
        target = address(daemon)
        assert check_health(target) == (0, "")
        cache = Cache(daemon.stub(), "s", layers=1)
        release = threading.Event()

        def requests():
            yield kv.AppendRequest(items=[cache.item(0, *cache.rows(1))])
            release.wait(PATIENCE)

        call = cache.stub.Append.future(requests(), timeout=TIMEOUT)
        wait_for(lambda: cache.info().lengths[0] == 1, "the stream")
        daemon.terminate()
        wait_for(lambda: ask(daemon, "/health/ready")[0] == 503, "not ready")
        assert ask(daemon, "/health/ready")[2] == "draining\n" and ask(daemon, "/health/live")[0] == 200
        code, text = check_health(target)
        assert code == 1 and "is not ready: draining" in text
        for listener in (daemon.tcp, daemon.target):
            assert check_health(QKVD_LISTEN=listener)[0] == 1
        release.set()
        call.result()
        assert daemon.wait() == 0
        code, text = check_health(target)
        assert code == 1 and "Connection refused" in text


def test_health_at_the_address_of_calls(tmp_path):
    """Without an address for HTTP; where calls need a token, too."""
    tokens = tmp_path / "tokens"
    tokens.write_text("")
    with Daemon("--auth-file", str(tokens)) as daemon:
        assert check_health(QKVD_LISTEN=daemon.tcp) == (0, "")
        assert check_health(QKVD_LISTEN=daemon.target) == (0, "")
        assert check_health(QKVD_LISTEN=daemon.tcp, http_proxy="http://127.0.0.1:9") == (0, "")
        encrypted = {"QKVD_TLS_CERT": "none", "QKVD_TLS_KEY": "none"}
        both = tmp_path / "qkvd.yaml"
        both.write_text(f"listen: [\"{daemon.tcp}\", \"{daemon.target}\"]\n")
        assert check_health(QKVD_CONFIG=str(both), **encrypted) == (0, "")
        assert "--check-health cannot ask by TLS" in check_health(QKVD_LISTEN=daemon.tcp, **encrypted)[1]
    code, text = check_health(QKVD_LISTEN=daemon.tcp)
    assert code == 1 and "onnect" in text


def test_unix_socket(tmp_path):
    path = tmp_path / "admin.sock"
    with Daemon("--admin-listen", f"unix:{path}"):
        assert check_health(f"unix:{path}") == (0, "")
    assert not path.exists()


def test_it_answers_while_calls_are_refused():
    """All calls that there may be are held by clients that send nothing."""
    with Daemon(*ADMIN, "--limit-calls", "8", "--threads", "1") as daemon:
        channel = daemon.channel()
        hold = threading.Event()

        def silent():
            hold.wait(PATIENCE)
            yield from ()

        append = channel.stream_unary("/qkv.v1.KvCache/Append")
        calls = [append.future(silent(), timeout=TIMEOUT) for _ in range(12)]
        wait_for(lambda: metrics(daemon)["qkvd_calls_exhausted_total"] >= 1, "calls that are refused")
        assert ask(daemon, "/health/ready")[0] == 200 and api(daemon, "status")[1]["state"] == "serving"
        hold.set()
        for call in calls:
            with pytest.raises(grpc.RpcError):
                call.result()


# ---- JSON ----


def test_status(loaded):
    status, value = api(loaded, "status")
    assert status == 200 and value["ready"] is True and value["listen"] == loaded.addresses
    assert value["metrics"]["qkvd_sessions"] == 6
    fork = next(call for call in value["calls"] if call["method"] == "Fork")
    assert (fork["count"], fork["failed"], sum(fork["buckets"])) == (1, 0, 1)
    assert len(fork["buckets"]) == len(value["bounds_seconds"]) + 1
    assert next(call for call in value["calls"] if call["method"] == "GetSession")["failed"] >= 3


@pytest.mark.parametrize("limit", [1, 2, 5, 1000])
def test_sessions_are_paged(loaded, limit):
    found, query = [], {}
    while True:
        status, value = api(loaded, "sessions", limit=limit, **query)
        assert status == 200 and len(value["sessions"]) <= limit
        found += [(row["session"], row["tenant"]) for row in value["sessions"]]
        if "next" not in value:
            break
        query = {"after": value["next"]}
    assert found == [("alpha", name) for name in ("blue", "default", "green", "red")] + [
        ("beta", "default"), ("gamma", "default")]


def test_sessions_are_searched(loaded):
    def names(**query):
        return [row["session"] for row in api(loaded, "sessions", **query)[1]["sessions"]]

    assert names(search="MM") == ["gamma"] and names(tenant="red") == ["alpha"] and names(search="none") == []
    row = api(loaded, "sessions", tenant="default", search="alpha")[1]["sessions"][0]
    assert row["model_tenant"] == "default"
    assert (row["tokens_coded"] + row["tokens_exact"], row["length"], row["layers"]) == (600, 300, 2)
    assert row["memory_bytes"] > 0 and row["shared_bytes"] > 0


@pytest.mark.parametrize("limit", [1, 3, 100])
def test_tenants(loaded, limit):
    rows, query = [], {}
    while True:
        value = api(loaded, "tenants", limit=limit, **query)[1]
        rows += value["tenants"]
        if "next" not in value:
            break
        query = {"after": value["next"]}
    assert [(row["tenant"], row["sessions"]) for row in rows] == [("blue", 1), ("default", 3), ("green", 1), ("red", 1)]
    assert rows[1]["tokens"] == 300 + 128 + 300 and rows[1]["memory_bytes"] > 0 and rows[1]["storage_bytes"] > 0


def test_session_and_map(loaded):
    status, value = api(loaded, "session", session="alpha")
    assert status == 200 and value["lengths"] == [300, 300] and value["kv_heads"] == 2
    assert value["first_position"] == 0
    status, value = api(loaded, "map", session="alpha", layer=0, buckets=300)
    assert status == 200 and (value["tokens"], value["tokens_per_bucket"]) == (300, 1)
    assert len(value["bits"]) == len(value["attention"]) == value["kv_heads"]
    exact, memory, shared, ssd, gpu = value["places"]
    assert value["place_names"] == ["exact", "memory", "shared", "ssd", "gpu"]
    assert all(sum(parts) == 1 for parts in zip(exact, memory, shared, ssd)) and sum(gpu) == 0
    coded = int(300 - sum(exact))
    assert 0 < coded < 300 and sum(shared) == coded  # its fork has these pages, too
    assert all(0 < bits < 9 for bits in value["bits"][0][:coded]) and min(value["bits"][0][coded:]) >= 16
    cold = api(loaded, "map", session="beta", layer=1, buckets=2)[1]
    assert cold["places"] == [[0, 0], [0, 0], [0, 0], [1, 1], [0, 0]] and cold["bits"][0] == [0, 0]
    assert api(loaded, "map", session="beta", layer=0, buckets=2)[1]["places"][1] == [1, 1]


def test_storage(loaded):
    status, value = api(loaded, "storage")
    assert status == 200 and value["enabled"] and value["degraded"] is False and value["records"] >= 4
    assert value["segments"][0]["file_bytes"] > 0


@pytest.mark.parametrize("path,status,text", [
    ("/api/nothing", 404, "no such path"),
    ("/../../etc/passwd", 404, "no such path"),
    ("/api/session", 400, "session is empty"),
    ("/api/session?session=none", 404, "no session none"),
    ("/api/session?session=alpha&tenant=none", 404, "no session alpha of tenant none"),
    ("/api/session?session=%3Cscript%3E", 400, "session has byte 0x3c at 0"),
    ("/api/session?session=" + "x" * 129, 400, "session is 129 bytes"),
    ("/api/session?session=a%00b", 400, "without NUL"),
    ("/api/sessions?limit=1001", 400, "limit is not a number from 1 to 1000"),
    ("/api/sessions?limit=-1", 400, "limit is not a number"),
    ("/api/sessions?after=x", 400, "after is not the next"),
    ("/api/map?session=alpha&layer=2", 400, "layer is 2, the model"),
    ("/api/map?session=alpha&buckets=4097", 400, "buckets is not a number from 1 to 4096"),
])
def test_wrong_requests(loaded, path, status, text):
    answer = ask(loaded, path)
    assert (answer[0], answer[1]["Content-Type"]) == (status, "application/json")
    assert text in json.loads(answer[2])["error"]


# ---- Who may ask, and how much ----


def test_methods_hosts_and_headers(loaded):
    assert ask(loaded, "/metrics", "POST", body=b"x" * 100000)[0] == 405
    assert ask(loaded, "/metrics", "DELETE")[1]["Allow"] == "GET, HEAD"
    status, headers, body = ask(loaded, "/health/live", "HEAD")
    assert (status, headers["Content-Length"], body) == (200, "5", "")
    for host, expected in (("localhost:7581", 200), ("127.0.0.1", 200), ("[::1]:1", 200), ("evil.example", 403),
                           ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403)):
        assert ask(loaded, "/health/live", headers={"Host": host})[0] == expected, host
    status, headers, body = ask(loaded, "/")
    nonce = re.search(r"script-src 'nonce-(\w{32})'", headers["Content-Security-Policy"]).group(1)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert f'nonce="{nonce}"' in body and "0" * 32 not in body
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-store")


def test_the_page_is_one_file_that_writes_text_alone(loaded):
    """Names are put into it as text, nothing comes from elsewhere, and all that it runs has the nonce."""
    page = ask(loaded, "/")[2]
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "http:", "https:",
                   " src=", " style="):
        assert banned not in page, banned
    assert not re.search(r"<[^>]*\son\w+=", page)
    assert re.findall(r"<(script|style)(?! nonce)", page) == [] and page.count("<script") == page.count("<style") == 1
    paths = set(re.findall(r"get\('(/[^']*)'", page))
    assert paths == {"/api/status", "/api/tenants", "/api/storage", "/api/sessions", "/api/session", "/api/map"}


def refusal(*arguments):
    result = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", *arguments], capture_output=True, text=True,
                            env=clean_environment(), timeout=PATIENCE)
    assert result.returncode == 1
    return result.stderr


def test_addresses_that_others_reach_are_refused(loaded):
    text = refusal("--admin-listen", "0.0.0.0:0")
    assert "--admin-listen is 0.0.0.0:0" in text and "--admin-anonymous serves it nevertheless" in text
    assert "--admin-listen: listen is \"nonsense\"" in refusal("--admin-listen", "nonsense")
    assert "--admin-listen: cannot listen on" in refusal("--admin-listen", address(loaded))
    with Daemon("--admin-listen", "0.0.0.0:0", "--admin-anonymous") as daemon:
        port = address(daemon).rsplit(":", 1)[1]
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=PATIENCE)
        connection.request("GET", "/health/live", headers={"Host": "node-7"})
        assert connection.getresponse().status == 200


def test_many_connections_at_once(loaded):
    """Connections beyond the bound are closed, and those that end make room."""
    host, port = address(loaded).rsplit(":", 1)
    idle = [socket.create_connection((host, int(port)), timeout=PATIENCE) for _ in range(100)]
    for connection in idle:
        connection.close()
    wait_for(lambda: is_served(loaded), "an answer")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda path: ask(loaded, path)[0], ["/metrics", "/api/status", "/health/live"] * 16))
    assert answers == [200] * 48


def test_slow_senders_keep_nobody_out():
    """More of them than there are places: who asks is served all the same, and the longest waiting ones go."""
    with Daemon(*ADMIN) as daemon:
        host, port = address(daemon).rsplit(":", 1)
        held = []
        for _ in range(100):
            held.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
            held[-1].sendall(b"GET /health/live HTTP/1.1\r\nHost: loc")
        for _ in range(20):
            assert ask(daemon, "/health/live")[0] == 200
        assert metrics(daemon)["qkvd_http_connections_ended_total"] >= 52
        assert held[0].recv(1) == b""
        held[-1].sendall(b"alhost\r\n\r\n")  # one that came late may go on
        assert held[-1].recv(12) == b"HTTP/1.1 200"
        for connection in held:
            connection.close()


def test_requests_that_wait_for_workers_keep_nobody_out():
    """More requests that take long than there are places: those beyond what may wait are refused, and health is served."""
    with Daemon(*ADMIN) as daemon:
        stub = daemon.stub()
        model = Cache(stub, "first").model.name
        for i in range(2000):
            stub.OpenSession(kv.OpenSessionRequest(session=f"s{i}", model=model), timeout=TIMEOUT)
        host, port = address(daemon).rsplit(":", 1)

        def burst():
            """Whether any of so many requests is refused."""
            held = []
            for _ in range(80):
                held.append(socket.create_connection((host, int(port)), timeout=PATIENCE))
                held[-1].sendall(b"GET /api/sessions?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert ask(daemon, "/health/live")[0] == 200
            statuses = set()
            for connection in held:
                try:
                    statuses.add(connection.recv(12))
                except OSError:
                    pass  # it has left its place to another one
                connection.close()
            return b"HTTP/1.1 503" in statuses

        assert any(burst() for _ in range(20))
        assert is_served(daemon)


def is_served(daemon):
    try:
        return ask(daemon, "/health/live")[0] == 200
    except OSError:
        return False


def test_garbage(loaded):
    host, port = address(loaded).rsplit(":", 1)
    for data in (b"\0" * 1000, b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 100000 + b" HTTP/1.1\r\n\r\n",
                 b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20000):
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as connection:
            try:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError:
                pass  # it was cut off
    assert is_served(loaded)


# ---- What deploy/ has for them ----

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
OF_PROMETHEUS = {"up", "ALERTS"}


def metric_names(query):
    """Names in a query: no functions, labels, keywords or strings."""
    bare = re.sub(r'"[^"]*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\bby \([^)]*\)|\[[^]]*\]", "", bare)
    return {word for word in re.findall(r"[a-zA-Z_]\w*(?!\w*\s*\()", bare)
            if word not in ("sum", "by", "for", "rate", "and", "or", "unless")}


def assert_queries_exist(daemon, queries):
    text = ask(daemon, "/metrics")[2]
    there = {re.sub(r"\{.*", "", name) for name in samples(text)} | set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    for query in queries:
        names = metric_names(query)
        assert names and names - OF_PROMETHEUS <= there, (query, names)
        for label in re.findall(r'(\w+)(?:=~|!=|=)"', query):
            if label not in ("job", "instance"):
                assert f'{label}="' in text, (query, label)


def test_dashboard_asks_for_what_exists(loaded):
    dashboard = json.loads((DEPLOY / "grafana" / "qkvd.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 20 and len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert_queries_exist(loaded, queries)
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert label == "instance" or f'{label}="' in ask(loaded, "/metrics")[2], label


def test_rules(loaded):
    folder = DEPLOY / "prometheus"
    for arguments in (("check", "rules", "rules.yml"), ("test", "rules", "rules_test.yml"),
                      ("check", "config", "prometheus.yml")):
        result = subprocess.run(["promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
        assert result.returncode == 0, result.stdout + result.stderr
    assert_queries_exist(loaded, re.findall(r"expr: (.*)", (folder / "rules.yml").read_text()))


def test_tokens(tmp_path):
    """With --admin-auth: only for tokens that may read for all tenants; health and the bare page are for everybody."""
    path, tokens = tmp_path / "auth", {"all": ("*", "read"), "one": ("team-a", "read,admin"), "writer": ("*", "write")}
    path.write_text("".join(f"token sha256:{hashlib.sha256(name.encode()).hexdigest()} {tenant} {roles}\n"
                            for name, (tenant, roles) in tokens.items()))
    audit = tmp_path / "audit"
    with Daemon(*ADMIN, "--admin-auth", "--auth-file", str(path), "--allow-anonymous", "unix", "--audit-log",
                str(audit)) as daemon:
        for free in ("/health/live", "/health/ready", "/"):
            assert ask(daemon, free)[0] == 200
        for closed in ("/metrics", "/api/status", "/api/tenants", "/nothing"):
            status, headers, body = ask(daemon, closed)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer") and "bearer token" in body
            for token, expected in (("nobody", 401), ("one", 403), ("writer", 403),
                                    ("all", 404 if closed == "/nothing" else 200)):
                assert ask(daemon, closed, headers={"Authorization": f"Bearer {token}"})[0] == expected
        assert ask(daemon, "/", headers={"Host": "elsewhere.example"})[0] == 403
        assert ask(daemon, "/" + "%ff" * 500, "DELETE")[0] == 401
        told = [json.loads(line) for line in audit.read_text().splitlines()]
        assert len(told) == 4 * 4 + 2 and all(line["event"] == "refused" and "call" not in line for line in told)
        assert (told[0]["method"], told[0]["status"]) == ("GET /metrics", "UNAUTHENTICATED")
        assert told[0]["peer"].startswith("127.0.0.1:") and "bearer token" in told[0]["reason"]
        assert (told[2]["status"], told[2]["reason"]) == ("PERMISSION_DENIED",
                                                          "the request needs a token with the role read for all tenants")
        assert "Host" in told[-2]["reason"] and "nobody" not in audit.read_text()
    for arguments in ((*ADMIN, "--admin-auth"), ("--admin-auth", "--auth-file", str(path), "--allow-anonymous", "unix")):
        with pytest.raises(AssertionError, match="--admin-auth needs --admin-listen and --auth-file"):
            Daemon(*arguments)
