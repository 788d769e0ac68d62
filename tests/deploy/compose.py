#!/usr/bin/python3
"""deploy/compose without containers: what compose.yaml says is parsed, and its processes are run by hand.

The daemon gets the file's own arguments, with certificates of authority.sh: clients without one are cut off, each tenant
sees its own sessions, attention comes back. Prometheus, where it is installed, scrapes it with the file's configuration and
the alert rules. Needs the stubs of tests/e2e; started by tests/deploy/compose.sh.
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


def read_files():
    """What can be wrong without starting anything."""
    text = (COMPOSE / "compose.yaml").read_text()
    try:
        substituted(text)
    except AssertionError as error:
        assert "GRAFANA_PASSWORD" in str(error)
    else:
        raise AssertionError("Grafana may start without a password")
    compose = yaml.safe_load(substituted(text, GRAFANA_PASSWORD="x"))
    volumes = set(compose["volumes"])
    for name, service in compose["services"].items():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source != "./tls" and not (source in volumes or (COMPOSE / source).exists()):
                raise AssertionError(f"{name} mounts {source}, which is not there")
    seccomp = next(option for option in compose["services"]["qkvd"]["security_opt"] if option.startswith("seccomp="))
    assert (COMPOSE / seccomp.removeprefix("seccomp=")).exists()
    source = yaml.safe_load((COMPOSE / "grafana/datasources/prometheus.yaml").read_text())["datasources"][0]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    folder = yaml.safe_load((COMPOSE / "grafana/dashboards/qkvd.yaml").read_text())["providers"][0]["options"]["path"]
    assert f"../grafana:{folder}:ro" in compose["services"]["grafana"]["volumes"]
    return compose["services"]


def command_of(service, folder, port, admin):
    """The service's own arguments, with this test's places."""
    places = {"/var/lib/qkvd": f"{folder}/data", "/etc/qkvd": f"{folder}/tls", "0.0.0.0:7581": f"127.0.0.1:{admin}"}
    command = [f"--listen=127.0.0.1:{port}"]
    for word in service["command"]:
        for old, new in places.items():
            word = word.replace(old, new)
        command.append(word)
    return command


def stub(folder, port, client=None):
    tls = pathlib.Path(folder, "tls")
    mine = (tls / f"{client}.key", tls / f"{client}.pem") if client else (None, None)
    key, certificate = (one.read_bytes() if one else None for one in mine)
    credentials = grpc.ssl_channel_credentials((tls / "authority.pem").read_bytes(), key, certificate)
    return kv_cache_pb2_grpc.KvCacheStub(grpc.secure_channel(f"localhost:{port}", credentials))


def use(folder, port):
    """Two tenants by their certificates, and nobody without one."""
    for name in ("worker-a", "worker-b"):
        cache = Cache(stub(folder, port, name), "same")
        k, v = cache.rows(100)
        for layer in range(2):
            cache.append(0, k, v, layer=layer)
        out, _ = cache.attend(99, cache.queries(1))
        assert np.isfinite(out).all()
        info = cache.stub.GetSession(kv.GetSessionRequest(session="same"), timeout=PATIENCE)
        assert info.tenant == name.replace("worker", "team")
    try:
        stub(folder, port).ListSessions(kv.ListSessionsRequest(), timeout=10)
    except grpc.RpcError as error:
        assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED), error
    else:
        raise AssertionError("a client without a certificate was let in")


def query(port, expression):
    url = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(expression)}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return [one["value"][1] for one in json.load(answer)["data"]["result"]]


def scrape(folder, admin):
    """Prometheus with the file's configuration, but for the target's address and the interval."""
    text = (COMPOSE / "prometheus.yml").read_text()
    assert text.count("qkvd:7581") == 1
    pathlib.Path(folder, "prometheus.yml").write_text(text.replace("qkvd:7581", f"127.0.0.1:{admin}").replace("15s", "1s"))
    shutil.copy(ROOT / "deploy/prometheus/rules.yml", folder)
    port = free_port()
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/tsdb",
         f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def there():
        try:
            return query(port, "up{job=\"qkvd\"}") == ["1"]
        except OSError:
            return False

    try:
        wait_for(there, "Prometheus does not see the daemon")
        assert float(query(port, "qkvd_sessions")[0]) == 2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/rules", timeout=10) as answer:
            rules = [rule["name"] for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
        assert "QkvdDown" in rules, rules
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"), help="where qkvd is")
    qkvd = pathlib.Path(parser.parse_args().bin, "qkvd").resolve()
    service = read_files()["qkvd"]
    with tempfile.TemporaryDirectory(prefix="qkvd-compose-") as folder:
        made = subprocess.run([COMPOSE / "authority.sh", "--dir", f"{folder}/tls"], check=True, capture_output=True, text=True)
        assert made.stdout.count("made") == 4, made.stdout
        again = subprocess.run([COMPOSE / "authority.sh", "--dir", f"{folder}/tls"], check=True, capture_output=True, text=True)
        assert again.stdout == ""
        port, admin = free_port(), free_port()
        command = [qkvd, *command_of(service, folder, port, admin)]
        with open(f"{folder}/log", "wb") as log:
            daemon = subprocess.Popen(command, stderr=log, env=service["environment"])
        try:
            check = [qkvd, "--check-health", f"--admin-listen=127.0.0.1:{admin}"]
            wait_for(lambda: subprocess.run(check, stderr=subprocess.DEVNULL, check=False).returncode == 0,
                     "qkvd is not healthy")
            use(folder, port)
            if shutil.which("prometheus"):
                scrape(folder, admin)
            else:
                print("without Prometheus: it is not installed")
        finally:
            daemon.terminate()
            status = daemon.wait(PATIENCE)
            if status != 0:
                print(pathlib.Path(folder, "log").read_text(), file=sys.stderr)
        assert status == 0
    print("passed")


if __name__ == "__main__":
    main()
