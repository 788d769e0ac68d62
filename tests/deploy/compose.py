#!/usr/bin/python3
"""deploy/compose without containers: what compose.yaml says is parsed, and its processes are run by hand.

The daemon gets the image's environment and file and compose.yaml's arguments, with what up.sh has made: clients without a
certificate are cut off, each tenant sees its own sessions, an operator sets a quota. Prometheus scrapes it with the file's
configuration while it is used: every expression of the dashboard gives figures, and so does what every alert compares.
Needs the stubs of tests/e2e; started by tests/deploy/compose.sh.
"""

import argparse
import json
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy/compose"
sys.path.insert(0, str(ROOT / "tests/e2e"))

import grpc  # noqa: E402
import numpy as np  # noqa: E402
import yaml  # noqa: E402
from kv import Cache  # noqa: E402
from qkv.v1 import kv_cache_pb2 as kv  # noqa: E402
from qkv.v1 import kv_cache_pb2_grpc  # noqa: E402

PATIENCE = 120


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_for(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def substituted(text, **values):
    """As compose does it: ${NAME:-default}, and ${NAME:?why}, which must be there."""
    def value(match):
        name, kind, rest = match.groups()
        assert kind == "-" or name in values, f"{name}: {rest}"
        return values.get(name, rest)

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def read_files(settings):
    """What can be wrong without starting anything."""
    text = (COMPOSE / "compose.yaml").read_text()
    try:
        substituted(text)
    except AssertionError as error:
        assert "GRAFANA_PASSWORD" in str(error)
    else:
        raise AssertionError("Grafana may start without a password")
    compose = yaml.safe_load(substituted(text, **settings))
    volumes = set(compose["volumes"])
    build = compose["services"]["qkvd"]["build"]
    context = COMPOSE / build["context"]
    assert f"AS {build['target']}\n" in (context / build["dockerfile"]).read_text()
    for name, service in compose["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source != "./tls/daemon" and not (source in volumes or (COMPOSE / source).exists()):
                raise AssertionError(f"{name} mounts {source}, which is not there")
    # Keys of the authority and of clients are the operator's alone, and no file of deploy/compose that git ignores is built in.
    assert [volume for each in compose["services"].values() for volume in each["volumes"] if "tls" in volume] == [
        "./tls/daemon:/etc/qkvd-tls:ro"]
    kept_out = (context / f"{build['dockerfile']}.dockerignore").read_text().splitlines()
    for path in ("deploy/compose/tls", "deploy/compose/.env"):
        assert f"/{path}" in (context / ".gitignore").read_text()
        assert path in kept_out or f"**/{path.rsplit('/')[-1]}" in kept_out, f"{path} comes into the image's build"
    seccomp = next(option for option in compose["services"]["qkvd"]["security_opt"] if option.startswith("seccomp="))
    assert (COMPOSE / seccomp.removeprefix("seccomp=")).exists()
    source = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((COMPOSE / "grafana/dashboards/qkvd.yaml").read_text())["providers"][0]["options"]["path"]
    assert f"../grafana:{folder}:ro" in compose["services"]["grafana"]["volumes"]
    return compose["services"]


def make(folder):
    """What up.sh makes, twice, in a copy of deploy/; the settings."""
    deploy = pathlib.Path(folder, "deploy")
    shutil.copytree(COMPOSE, deploy / "compose", ignore=shutil.ignore_patterns("tls", ".env"))
    up = [deploy / "compose/up.sh", "--dry-run"]
    first = subprocess.run([*up, "--memory-budget-mib", "512", "--operator", "root"], check=True, capture_output=True, text=True)
    assert first.stdout.count("made") == 5 and "Grafana's password" in first.stdout, first.stdout
    assert first.stdout.endswith(f"docker compose -f {deploy}/compose/compose.yaml up -d --build --wait\n")
    text = (deploy / "compose/.env").read_text()
    again = subprocess.run(up, check=True, capture_output=True, text=True)
    assert "made" not in again.stdout and (deploy / "compose/.env").read_text() == text
    settings = dict(line.split("=", 1) for line in text.splitlines())
    assert settings["QKVD_MEMORY_LIMIT"] == f"{512 * 11 // 10 + 256}m"
    return deploy / "compose/tls", settings


def check_authority(folder):
    """What a later run changes: names of the daemon, tenants, and certificates that are about to end."""
    tls = pathlib.Path(folder, "authority")

    def run(*arguments):
        done = subprocess.run([COMPOSE / "authority.sh", "--dir", tls, *arguments], check=True, capture_output=True, text=True)
        return done.stdout.splitlines()

    def shown(name, *what):
        return subprocess.run(["openssl", "x509", "-in", tls / f"{name}.pem", "-noout", *what], check=True, capture_output=True,
                              text=True).stdout

    assert run("--days", "30", "--operator", "root") == [f"made {name}.pem" for name in (
        "authority", "daemon/daemon", "worker-a", "worker-b", "root")]
    assert {path.name for path in (tls / "daemon").iterdir()} == {"daemon.pem", "daemon.key", "authority.pem", "clients"}
    assert run("--days", "30") == []
    before = {path.name: path.read_bytes() for path in tls.rglob("*.key")}
    assert run("--days", "30", "--host", "kv.example", "--host", "192.0.2.1") == ["renewed daemon/daemon.pem"]
    names = shown("daemon/daemon", "-ext", "subjectAltName")
    assert all(name in names for name in ("DNS:kv.example", "IP Address:192.0.2.1", "DNS:localhost"))
    assert run("--days", "30", "--client", "worker-a=team-c") == ["changed worker-a: team-c read,write"]
    assert (tls / "daemon/clients").read_text().splitlines() == [
        "cert CN=worker-b team-b read,write", "cert CN=root * read,write,admin", "cert CN=worker-a team-c read,write"]
    ends = shown("worker-b", "-enddate")
    # 30 days are less than a third of 365.
    assert run() == [f"renewed {name}.pem" for name in ("daemon/daemon", "worker-b", "root", "worker-a")]
    assert shown("worker-b", "-enddate") != ends and "DNS:kv.example" in shown("daemon/daemon", "-ext", "subjectAltName")
    assert run() == [] and len(run("--renew")) == 4
    assert {path.name: path.read_bytes() for path in tls.rglob("*.key")} == before
    subprocess.run(["openssl", "verify", "-CAfile", tls / "authority.pem", *tls.rglob("*.pem")], check=True, stdout=subprocess.DEVNULL)


class Service:
    """The daemon of compose.yaml, with the image's environment and file, at this test's places."""

    def __init__(self, service, folder, tls, qkvd):
        self.qkvd, self.folder, self.tls = qkvd, folder, tls
        self.port, self.admin = free_port(), free_port()
        text = (ROOT / "deploy/Containerfile").read_text()
        environment = dict(pair.split("=", 1) for pair in re.search(r"^ENV (.*)$", text, re.MULTILINE)[1].split())
        place = pathlib.Path(folder, "image.yaml")
        place.write_text(self.here((ROOT / "deploy/container.yaml").read_text()))
        self.environment = {key: value.replace("/etc/qkvd/qkvd.yaml", str(place)) for key, value in environment.items()}
        with open(f"{folder}/log", "wb") as log:
            self.process = subprocess.Popen([qkvd, *map(self.here, service["command"])], stderr=log, env=self.environment)

    def here(self, text):
        places = {"/var/lib/qkvd": f"{self.folder}/data", "/etc/qkvd-tls": f"{self.tls}/daemon", "0.0.0.0": "127.0.0.1",
                  ":7580": f":{self.port}", ":7581": f":{self.admin}"}
        for old, new in places.items():
            text = text.replace(old, new)
        return text

    def healthy(self, check):
        command = check[1:]
        assert check[0] == "CMD" and command[0] == "/usr/bin/qkvd"
        return subprocess.run([self.qkvd, *command[1:]], stderr=subprocess.DEVNULL, env=self.environment).returncode == 0

    def qkvctl(self, client, *words):
        subprocess.run([self.qkvd.with_name("qkvctl"), *words, "--target", f"localhost:{self.port}", "--tls-ca",
                        self.tls / "authority.pem", "--tls-cert", self.tls / f"{client}.pem", "--tls-key",
                        self.tls / f"{client}.key"], check=True, stdout=subprocess.DEVNULL)

    def stub(self, client=None):
        names = (f"{client}.key", f"{client}.pem") if client else ()
        mine = [(self.tls / name).read_bytes() for name in names] or [None, None]
        credentials = grpc.ssl_channel_credentials((self.tls / "authority.pem").read_bytes(), *mine)
        return kv_cache_pb2_grpc.KvCacheStub(grpc.secure_channel(f"localhost:{self.port}", credentials))


def use(service):
    """Two tenants by their certificates, and nobody without one; their sessions."""
    service.qkvctl("root", "quota", "set", "team-a", "sessions=100", "host_bytes=64MiB", "ssd_bytes=1GiB", "calls=64")
    caches = []
    for name in ("worker-a", "worker-b"):
        cache = Cache(service.stub(name), "same")
        k, v = cache.rows(300)
        for layer in range(2):
            cache.append(0, k, v, layer=layer)
        out, _ = cache.attend(299, cache.queries(1))
        assert np.isfinite(out).all()
        info = cache.stub.GetSession(kv.GetSessionRequest(session="same"), timeout=PATIENCE)
        assert info.tenant == name.replace("worker", "team")
        caches.append(cache)
    try:
        service.stub().ListSessions(kv.ListSessionsRequest(), timeout=10)
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED), error
    else:
        raise AssertionError("a client without a certificate was let in")
    return caches


class Load(threading.Thread):
    """Calls of every kind that the dashboard shows, until it is told to end."""

    def __init__(self, cache):
        super().__init__()
        self.cache, self.end = cache, threading.Event()

    def run(self):
        k, v = self.cache.rows(64)
        while not self.end.wait(0.1):
            length = self.cache.info().lengths[0]
            for layer in range(2):
                self.cache.append(length, k, v, layer=layer)
            self.cache.attend(length, self.cache.queries(1))
            self.cache.fetch()
            self.cache.stub.Match(kv.MatchRequest(model=self.cache.model.name, token_ids=range(64)), timeout=PATIENCE)
            for missing in ("a", "b"):
                try:
                    self.cache.stub.GetSession(kv.GetSessionRequest(session=missing), timeout=PATIENCE)
                except grpc.RpcError as error:
                    assert error.code() == grpc.StatusCode.NOT_FOUND


def ask(port, path, **parameters):
    url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]


def has_data(port, expression):
    return any(one["value"][1] != "NaN" for one in ask(port, "query", query=expression)["result"])


def questions():
    """Every expression of the dashboard, and what each alert compares: with bool a comparison gives 0 or 1."""
    found = []
    for panel in json.loads((ROOT / "deploy/grafana/qkvd.json").read_text())["panels"]:
        for target in panel["targets"]:
            expression = re.sub(r"\$(instance|tenant|model)\b", ".*", target["expr"]).replace("$__rate_interval", "10s")
            assert "$" not in expression, f"{panel['title']}: {expression}"
            found.append((panel["title"], expression))
    for rule in yaml.safe_load((ROOT / "deploy/prometheus/rules.yml").read_text())["groups"][0]["rules"]:
        found.append((rule["alert"], re.sub(r"(?<=[\s)}])(==|>|<)(?=\s)", r"\1 bool", rule["expr"])))
    return found


def scrape(service, caches):
    """Prometheus with the file's configuration, but for the target's address and the interval."""
    folder, text = service.folder, (COMPOSE / "prometheus.yml").read_text()
    assert text.count("qkvd:7581") == 1
    pathlib.Path(folder, "prometheus.yml").write_text(
        text.replace("qkvd:7581", f"127.0.0.1:{service.admin}").replace("15s", "1s"))
    shutil.copy(ROOT / "deploy/prometheus/rules.yml", folder)
    port = free_port()
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def there():
        try:
            return has_data(port, 'up{job="qkvd"} == 1')
        except OSError:
            return False

    load = Load(caches[0])
    load.start()
    try:
        wait_for(there, "Prometheus does not see the daemon")
        left = questions()
        until = time.monotonic() + PATIENCE
        while left:
            left = [(title, expression) for title, expression in left if not has_data(port, expression)]
            assert time.monotonic() < until and load.is_alive(), f"without data: {left}"
            time.sleep(0.5)
        assert ask(port, "label/instance/values", **{"match[]": "qkvd_ready"}) == [f"127.0.0.1:{service.admin}"]
        rules = [rule for group in ask(port, "rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 10 and not [rule for rule in rules if rule["health"] == "err"], rules
        return len(questions())
    finally:
        load.end.set()
        load.join()
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"), help="where qkvd is")
    qkvd = pathlib.Path(parser.parse_args().bin, "qkvd").resolve()
    with tempfile.TemporaryDirectory(prefix="qkvd-compose-") as folder:
        check_authority(folder)
        tls, settings = make(folder)
        described = read_files(settings)["qkvd"]
        service = Service(described, folder, tls, qkvd)
        try:
            wait_for(lambda: service.healthy(described["healthcheck"]["test"]), "qkvd is not healthy")
            asked = scrape(service, use(service))
        finally:
            service.process.terminate()
            status = service.process.wait(PATIENCE)
            if status != 0:
                print(pathlib.Path(folder, "log").read_text(), file=sys.stderr)
        assert status == 0
    print(f"{asked} expressions have data: passed")


if __name__ == "__main__":
    main()
