"""The Helm chart without a cluster: lint, values that the schema or the templates refuse, and what is rendered of many values
against the API's schemas of two Kubernetes versions. Each set's daemon runs as its pod would: with the image's environment
and files, the pod's arguments and environment, and its config maps and secrets; it is ready, its probes and metrics answer,
and it refuses whom it should. Files of auth and quotas are changed as kubelet does it, and taken without a restart.

Started by tests/deploy/chart.sh, which installs what it needs.
"""

import argparse
import base64
import contextlib
import json
import os
import pathlib
import re
import runpy
import shutil
import socket
import ssl
import stat
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import helm_python as helm
import kubernetes_validate
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHART, KUSTOMIZE = ROOT / "deploy/helm/qkvd", ROOT / "deploy/kustomize"
VERSIONS = ("1.28", "1.32")
PATIENCE = 60
TOKENS = {"reader": ("*", "read"), "worker": ("team-a", "read,write")}
SUBJECT = "system:serviceaccount:team-a:worker"
RFC_8037_KEY = {"kty": "OKP", "crv": "Ed25519", "kid": "example", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}
TLS = {"tls": {"secretName": "certificate"}}
AUTH = {"auth": {"secretName": "tokens"}, **TLS}
SCRAPED = {"enabled": True, "tokenSecret": {"name": "reader"}}
CALLER = [{"podSelector": {"matchLabels": {"app": "worker"}}}]
GOOD = {
    "defaults": {"anonymous": True},
    "daemonset": {"kind": "DaemonSet", "anonymous": True, "installSeccompProfile": True, "socket": {"enabled": True}},
    "memory alone": {"storage": {"enabled": False}, "anonymous": True},
    "daemonset in memory alone": {"kind": "DaemonSet", "storage": {"enabled": False}, "auth": {"secretName": "tokens"},
                                  "tls": {"elsewhere": True}},
    "daemonset with a socket": {"kind": "DaemonSet", **AUTH, "socket": {"enabled": True}, "storage": {"size": "900Mi"}},
    "three replicas": {"replicas": 3, "podDisruptionBudget": {"maxUnavailable": "34%"}, "anonymous": True},
    "no policies": {"networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False}, "anonymous": True},
    "storage class": {"storage": {"storageClassName": "fast", "size": "1Ti"}, "anonymous": True, "appArmorProfile": {}},
    # Numbers that Helm, which reads them as floats, would write with an exponent.
    "much": {"resources": {"ephemeral-storage": "64Mi"}, "memoryBudgetMiB": 4000000, "anonymous": True, "storage": {"size": "1000Ti"},
             "options": {"limit-sessions": 16777216, "limit-objects": 1000000, "bits": 2.5}},
    "options": {"options": {"bits": 3, "limit-sessions": 1000, "low-rank": "auto", "keep-full": True,
                            "calibrate-skip": ["a", "b"]}, "drainGraceSeconds": 30, "port": 9000, "anonymous": True,
                "fullnameOverride": "cache", "image": {"digest": "sha256:" + 64 * "0"}},
    "placed": {"nodeSelector": {"pool": "kv"}, "tolerations": [{"key": "kv", "operator": "Exists"}],
               "podAnnotations": {"a": "b"}, "podLabels": {"c": "d"}, "imagePullSecrets": [{"name": "s"}],
               "priorityClassName": "high", "anonymous": True, "topologySpreadConstraints": [
                   {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"},
                   {"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"a": "b"}}}],
               "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                   {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"a": "b"}}}]}},
               "seccompProfile": {"type": "Localhost", "localhostProfile": "qkvd.json"},
               "appArmorProfile": {"type": "Localhost", "localhostProfile": "qkvd"},
               "networkPolicy": {"from": CALLER, "metricsFrom": CALLER}},
    "tokens": {**AUTH, "serviceMonitor": SCRAPED, "networkPolicy": {"metricsFrom": CALLER}},
    "metrics by HTTPS": {**AUTH, "admin": {"tls": True}, "serviceMonitor": {**SCRAPED, "tlsConfig": {"insecureSkipVerify": True}},
                         "networkPolicy": {"metricsFrom": CALLER}},
    "metrics without a token": {**AUTH, "admin": {"auth": False}, "serviceMonitor": {"enabled": True},
                                "networkPolicy": {"enabled": False}},
    "mutual TLS": {"tls": {"secretName": "certificate", "clientCA": True}, "replicas": 2,
                   "auth": {"lines": "cert CN=worker-a team-a read,write\n"}, "admin": {"auth": False},
                   "quotas": {"lines": "team-a sessions=7\n*  calls=64\n"}},
    "cert-manager": {"tls": {"certManager": {"enabled": True, "issuer": {"name": "ours", "kind": "ClusterIssuer"},
                                             "dnsNames": ["kv.example"]}}, "auth": {"secretName": "tokens"},
                     "networkPolicy": {"metricsFrom": [{"podSelector": {}}]},
                     "quotas": {"configMapName": "quotas"}, "prometheusRule": {"enabled": True, "labels": {"x": "y"}, "runbookBase": "https://git.example/"},
                     "serviceMonitor": SCRAPED},
    "service accounts": {**TLS, "auth": {"lines": f"jwt sub={SUBJECT} team-a read,write\n"}, "admin": {"auth": False},
                         "jwt": {"configMapName": "cluster-keys"}},
    "service accounts of another issuer": {**AUTH, "jwt": {"keys": json.dumps({"keys": [RFC_8037_KEY]}),
                                                           "issuer": "https://elsewhere.example", "audience": "kv"}},
    "extra": {"extraEnv": [{"name": "QKVD_LOG_LEVEL", "value": "debug"}], "anonymous": True,
              "extraVolumes": [{"name": "more", "configMap": {"name": "quotas"}}],
              "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}]},
}
BAD = {
    "a kind that is none": {"kind": "Deployment"},
    "a value that is none": {"memoryBudget": 4},
    "a budget of nothing": {"memoryBudgetMiB": 0},
    "a size without a unit": {"storage": {"size": "100"}},
    "an option that has a value of its own": {"options": {"memory-budget": "1GiB"}},
    "an option of access": {"options": {"auth-file": "/etc/tokens"}},
    "an option that is none": {"options": {"limit-session": 5}},
    "a label that selects": {"podLabels": {"app.kubernetes.io/name": "other"}},
    "resources as a pod has them": {"resources": {"limits": {"memory": "1Gi"}}},
    "a resource without an amount": {"resources": {"ephemeral-storage": "much"}},
    "a profile that is not named": {"seccompProfile": {"type": "Localhost"}},
    "a profile that is not of the node": {"appArmorProfile": {"type": "RuntimeDefault", "localhostProfile": "a"}},
    "a digest that is none": {"image": {"digest": "latest"}},
    "a port beyond all": {"port": 65536},
    "no replica": {"replicas": 0},
    "a kind of AppArmor that is none": {"appArmorProfile": {"type": "None"}},
}
# What the templates refuse, and a word of why.
CONTRADICTIONS = {
    "nobody could call": {},
    "contradicts auth": {"anonymous": True, **AUTH},
    "needs tls.secretName": {"tls": {"clientCA": True}},
    "needs tls.certManager.issuer": {**AUTH, "tls": {"certManager": {"enabled": True}}},
    "either lines or the name": {"auth": {"secretName": "a", "lines": "b"}},
    "auth without TLS": {"auth": {"secretName": "a"}},
    "tls.elsewhere contradicts": {**AUTH, "tls": {"secretName": "a", "elsewhere": True}},
    "metricsFrom has to select": {**AUTH, "serviceMonitor": SCRAPED},
    "is for kind=DaemonSet": {**AUTH, "socket": {"enabled": True}},
    "certificates are not asked for there": {"kind": "DaemonSet", "tls": {"secretName": "a", "clientCA": True},
                                             "socket": {"enabled": True}},
    "jwt takes either keys": {**AUTH, "jwt": {"keys": "{}", "configMapName": "a"}},
    "jwt needs auth": {"anonymous": True, "jwt": {"keys": "{}"}},
    "admin.auth needs auth": {"admin": {"auth": True}, "anonymous": True},
    "admin.tls needs": {"admin": {"tls": True}, "anonymous": True},
    "tlsConfig": {**AUTH, "admin": {"tls": True}, "serviceMonitor": SCRAPED, "networkPolicy": {"metricsFrom": CALLER}},
    "tokenSecret": {**AUTH, "serviceMonitor": {"enabled": True}, "networkPolicy": {"metricsFrom": CALLER}},
    "are the same": {"port": 7581, "anonymous": True},
}
# Options of qkvd that are not among the value options, as other values set them, or as they make qkvd end.
SET_BY_VALUES = {
    "listen", "listen-mode", "admin-listen", "admin-auth", "admin-tls", "admin-anonymous", "allow-anonymous", "config", "auth-file", "quota-file",
    "jwks", "jwt-issuer", "jwt-audience", "tls-cert", "tls-key", "tls-client-ca", "memory-budget", "data-dir", "storage-budget",
    "drain-grace", "drain-notice", "check-health", "print-options", "print-metrics", "help", "version"}
OPERATORS = {"Certificate", "ServiceMonitor", "PrometheusRule"}  # kinds that Kubernetes itself does not know


def wait_for(condition, what):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


def documents(rendered):
    for path, text in rendered.items():
        if not path.endswith(".txt"):
            yield from (each for each in yaml.safe_load_all(text) if each)


def check_manifests(name, found, version):
    for document in found:
        if document["kind"] in OPERATORS:
            continue
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            raise SystemExit(f"{name}: {document['kind']} for {version}: {error.message}") from None


def of_kind(found, kind, name=None):
    return next((each for each in found if each["kind"] == kind and name in (None, each["metadata"]["name"])), None)


def workload(found):
    return of_kind(found, "StatefulSet") or of_kind(found, "DaemonSet")


def megabytes(quantity):
    return int(quantity.removesuffix("Mi"))


def check_pod(name, found, values):
    pod = workload(found)["spec"]["template"]["spec"]
    container = pod["containers"][0]
    budget = values["memoryBudgetMiB"]
    assert megabytes(container["resources"]["limits"]["memory"]) >= budget * 1.1 + 200, f"{name}: the limit is too low"
    assert pod["terminationGracePeriodSeconds"] > values["drainGraceSeconds"] + 50, f"{name}: killed while it drains"
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["securityContext"]["runAsNonRoot"]
    selector = workload(found)["spec"]["selector"]["matchLabels"]
    assert selector == {"app.kubernetes.io/name": "qkvd", "app.kubernetes.io/instance": "kv"}, f"{name}: {selector}"
    assert selector.items() <= workload(found)["spec"]["template"]["metadata"]["labels"].items(), f"{name}: selects no pod"
    for each in found:
        called = values["fullnameOverride"] or "kv"
        assert each["metadata"]["name"].startswith(called), f"{name}: {each['kind']} {each['metadata']['name']}"
    spread = pod.get("topologySpreadConstraints", [])
    assert [each["labelSelector"]["matchLabels"] for each in spread] in ([], [selector, {"a": "b"}]), f"{name}: {spread}"
    image = container["image"]
    assert image.endswith(values["image"]["digest"] or f":{values['image']['tag']}"), f"{name}: {image}"
    # No two releases share a folder of the node.
    for volume in pod["volumes"]:
        path = volume.get("hostPath", {}).get("path", "/kubelet/")
        assert "/kubelet/" in path or path.endswith("/test-kv"), f"{name}: {path}"
    for service in (each for each in found if each["kind"] == "Service"):
        headless = service["spec"].get("clusterIP") == "None"
        assert service["spec"].get("publishNotReadyAddresses", False) == headless, f"{name}: names of pods that drain"
    config = yaml.safe_load(next(each["data"]["qkvd.yaml"] for each in found if "qkvd.yaml" in each.get("data", {})))
    for key, value in values["options"].items():
        assert config[key] == value and type(config[key]) is type(value), f"{name}: {key} is {config[key]}"
    if values["storage"]["enabled"]:
        number, unit = re.fullmatch(r"(\d+)(\wi)", values["storage"]["size"]).groups()
        size = int(number) << {"Mi": 0, "Gi": 10, "Ti": 20}[unit]
        assert config["storage-budget"] == f"{size * 9 // 10}MiB", f"{name}: {config['storage-budget']}"
    kinds = sorted(each["kind"] for each in found)
    assert kinds.count("Service") == (2 if values["kind"] == "StatefulSet" else 1), f"{name}: {kinds}"
    ports = {each["name"] for each in container["ports"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports, f"{name}: {probe}"
    volumes = {each["name"] for each in pod["volumes"]} | {
        each["metadata"]["name"] for each in workload(found)["spec"].get("volumeClaimTemplates", [])}
    for each in pod["containers"] + pod.get("initContainers", []):
        missing = [mount["name"] for mount in each["volumeMounts"] if mount["name"] not in volumes]
        assert not missing, f"{name}: {each['name']} mounts {missing}, which are no volumes"


def check_prepare(found, folder):
    """What the init container of a DaemonSet does, at other places: the folders' owner, and the profile."""
    pod = workload(found)["spec"]["template"]["spec"]
    script = pod["initContainers"][0]["command"][-1]
    for place in ("data", "socket", "seccomp", "config"):
        pathlib.Path(folder, place).mkdir()
        script = re.sub(rf"(?<!\w)/{place}(?=[/\s])", f"{folder}/{place}", script)
    pathlib.Path(folder, "config/seccomp.json").write_text(of_kind(found, "ConfigMap")["data"]["seccomp.json"])
    subprocess.run(["sh", "-ec", script], check=True)
    assert os.stat(f"{folder}/data").st_uid == os.stat(f"{folder}/socket").st_uid == 7580
    profile = pod["containers"][0]["securityContext"]["seccompProfile"]["localhostProfile"]
    copied = json.loads(pathlib.Path(folder, "seccomp", profile).read_text())
    assert copied == json.loads((ROOT / "deploy/seccomp/qkvd.json").read_text())


def check_operators(name, found):
    """Of kinds whose schemas are not at hand, what can be said: the labels that select, the ports, the rules."""
    monitor, rule, certificate = (of_kind(found, kind) for kind in ("ServiceMonitor", "PrometheusRule", "Certificate"))
    if monitor:
        selector = monitor["spec"]["selector"]["matchLabels"].items()
        port = monitor["spec"]["endpoints"][0]["port"]
        scraped = [each for each in found if each["kind"] == "Service" and selector <= each["metadata"]["labels"].items()
                   and port in [one["name"] for one in each["spec"]["ports"]]]
        assert len(scraped) == 1, f"{name}: {len(scraped)} services are scraped"
        assert scraped[0]["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "qkvd"
    if rule:
        text = (ROOT / "deploy/prometheus/rules.yml").read_text()
        shipped = yaml.safe_load(text.replace("runbook_url: ", "runbook_url: https://git.example/"))
        assert rule["spec"] == shipped, f"{name}: other rules than deploy/prometheus has"
    if certificate:
        secret = certificate["spec"]["secretName"]
        volumes = workload(found)["spec"]["template"]["spec"]["volumes"]
        assert secret in [each.get("secret", {}).get("secretName") for each in volumes], f"{name}: {secret} is not mounted"


# ---- The pod's daemon ----


def image():
    """The environment and the files of deploy/Containerfile's images."""
    text = (ROOT / "deploy/Containerfile").read_text()
    lines = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    assert len(lines) == 2 and lines[0] == lines[1]
    assert re.search(r"install .*deploy/container\.yaml /image/etc/qkvd/qkvd\.yaml", text)
    return dict(pair.split("=", 1) for pair in lines[0].split())


def base64_url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def service_account(folder):
    """A key as a cluster has one, and a token of it for SUBJECT."""
    key, public, signed = (f"{folder}/{name}" for name in ("account.key", "account.der", "account.signed"))
    subprocess.run(["openssl", "genpkey", "-algorithm", "ED25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-outform", "DER", "-out", public], check=True)
    jwk = {"kty": "OKP", "crv": "Ed25519", "kid": "cluster", "x": base64_url(pathlib.Path(public).read_bytes()[-32:])}
    claims = {"iss": "https://kubernetes.default.svc.cluster.local", "aud": ["qkvd"], "sub": SUBJECT, "exp": int(time.time()) + 3600}
    text = ".".join(base64_url(json.dumps(part).encode()) for part in ({"alg": "EdDSA", "kid": "cluster"}, claims))
    pathlib.Path(signed).write_text(text)
    made = subprocess.run(["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", signed], check=True, capture_output=True)
    return jwk, f"{text}.{base64_url(made.stdout)}"


def objects(folder, qkvctl):
    """Secrets and config maps that values name, and the tokens' texts."""
    subprocess.run([ROOT / "deploy/compose/authority.sh", "--dir", f"{folder}/tls"], check=True, stdout=subprocess.DEVNULL)
    tls = {key: pathlib.Path(folder, "tls", file).read_text()
           for key, file in (("tls.crt", "daemon/daemon.pem"), ("tls.key", "daemon/daemon.key"), ("ca.crt", "authority.pem"))}
    lines, texts = [], {}
    for name, (tenant, roles) in TOKENS.items():
        made = subprocess.run([qkvctl, "token", "new", tenant, "--roles", roles, "--json"], check=True,
                              capture_output=True, text=True)
        answer = json.loads(made.stdout)
        texts[name] = answer["token"]
        lines.append(answer["line"])
    key, texts["account"] = service_account(folder)
    return {"certificate": tls, "kv-tls": tls, "tokens": {"auth-file": "\n".join(lines) + "\n"},
            "quotas": {"quotas": "team-a sessions=5\n"}, "cluster-keys": {"jwks.json": json.dumps({"keys": [key]})}}, texts


def project(folder, data):
    """A volume of a config map or secret as kubelet writes it: a link to a folder that is exchanged as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    place = pathlib.Path(tempfile.mkdtemp(prefix="..", dir=folder))
    for key, text in data.items():
        (place / key).write_text(text)
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")
    (folder / "..new").symlink_to(place.name)
    (folder / "..new").rename(folder / "..data")


def content(volume, found, known):
    if "secret" in volume:
        name = volume["secret"]["secretName"]
        made = of_kind(found, "Secret", name)
        return made["stringData"] if made else known[name]
    name = volume["configMap"]["name"]
    made = of_kind(found, "ConfigMap", name)
    return made["data"] if made else known[name]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class Pod:
    """A pod's daemon, with its files below `folder` and ports that are free."""

    def __init__(self, found, values, known, folder, qkvd):
        spec = workload(found)["spec"]["template"]["spec"]
        container = spec["containers"][0]
        self.folder, self.ports = folder, {values["port"]: free_port(), values["admin"]["port"]: free_port()}
        self.admin, self.port = self.ports[values["admin"]["port"]], self.ports[values["port"]]
        volumes = {each["name"]: each for each in spec["volumes"]}
        self.places = {each["mountPath"]: folder / each["mountPath"].lstrip("/") for each in container["volumeMounts"]}
        for mount in container["volumeMounts"]:
            place = self.places[mount["mountPath"]]
            place.mkdir(parents=True)
            volume = volumes.get(mount["name"], {})
            if "secret" in volume or "configMap" in volume:
                project(place, {key: self.here(text) for key, text in content(volume, found, known).items()})
        environment = {**image(), **{each["name"]: each["value"] for each in container.get("env", [])}}
        self.environment = {key: self.here(value) for key, value in environment.items()}
        self.log = folder / "log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([qkvd, *map(self.here, container["args"])], env=self.environment, stderr=log)
        probes = {name: container[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
        self.probes = {name: probe["path"] for name, probe in probes.items()}
        self.scheme, = {probe.get("scheme", "HTTP").lower() for probe in probes.values()}

    def here(self, text):
        """The pod's paths and ports as they are here; longer paths first, as one begins like another."""
        for path in sorted(self.places, key=len, reverse=True):
            text = re.sub(rf"(?<![\w/]){re.escape(path)}(?=/|$|\s)", str(self.places[path]), text, flags=re.MULTILINE)
        for port, free in self.ports.items():
            text = text.replace(f"0.0.0.0:{port}", f"0.0.0.0:{free}")
        return text

    def get(self, path, token=None):
        # Not by 127.0.0.1: kubelet and Prometheus come by the pod's address.
        request = urllib.request.Request(f"{self.scheme}://{socket.gethostbyname(socket.gethostname())}:{self.admin}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        try:
            # As kubelet does, which checks no certificate.
            context = ssl._create_unverified_context() if self.scheme == "https" else None
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def ready(self):
        assert self.process.poll() is None, f"qkvd has ended: {self.log.read_text()}"
        try:
            return self.get(self.probes["startupProbe"])[0] == 200
        except OSError:
            return False

    def stop(self):
        self.process.terminate()
        assert self.process.wait(PATIENCE) == 0, self.log.read_text()


@contextlib.contextmanager
def pod(*arguments):
    with tempfile.TemporaryDirectory(prefix="qkvd-pod-") as folder:
        made = Pod(*arguments[:3], pathlib.Path(folder), arguments[3])
        try:
            wait_for(made.ready, "a pod's daemon is not ready")
            yield made
            made.stop()
        finally:
            if made.process.poll() is None:
                made.process.kill()
                made.process.wait()


def call(qkvctl, running, *words, tls=None, token=None):
    """qkvctl against the pod's port of calls; its exit status and what it says."""
    command = [qkvctl, *words, "--target", f"localhost:{running.port}"]
    if tls:
        command += ["--tls-ca", f"{tls}/authority.pem", "--tls-cert", f"{tls}/worker-a.pem", "--tls-key", f"{tls}/worker-a.key"]
    environment = {"QKVD_TOKEN": token} if token else {}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def check_daemon(name, running, values, tokens, tls, qkvctl):
    for path in running.probes.values():
        assert running.get(path)[0] == 200, f"{name}: the probe of {path} fails"
    if values["admin"].get("auth", bool(values["auth"]["secretName"] or values["auth"]["lines"])):
        assert running.get("/metrics")[0] in (401, 403), f"{name}: metrics without a token"
    status, text = running.get("/metrics", tokens["reader"])
    assert status == 200 and "qkvd_ready 1" in text, f"{name}: no metrics"
    secured = values["tls"]["secretName"] or values["tls"]["certManager"]["enabled"]
    if secured:
        context = ssl.create_default_context(cafile=f"{tls}/authority.pem")
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if values["tls"]["clientCA"]:
            context.load_cert_chain(f"{tls}/worker-a.pem", f"{tls}/worker-a.key")
        with socket.create_connection(("127.0.0.1", running.port)) as plain:
            context.wrap_socket(plain, server_hostname="localhost").close()
    worker = {"tls": tls} if secured else {}
    if values["auth"]["secretName"]:
        assert call(qkvctl, running, "sessions", **worker)[0] != 0, f"{name}: a call without a token is served"
        worker["token"] = tokens["worker"]
    if values["jwt"]["configMapName"]:
        assert call(qkvctl, running, "sessions", **worker)[0] != 0, f"{name}: a call without a JWT is served"
        worker["token"] = tokens["account"]
    status, said = call(qkvctl, running, "sessions", **worker)
    assert status == 0, f"{name}: {said}"
    if values["socket"]["enabled"]:
        socket_file = running.places["/run/qkvd"] / "qkvd.sock"
        assert stat.S_IMODE(socket_file.stat().st_mode) == int(values["socket"]["mode"], 8), f"{name}: the socket's mode"
        done = subprocess.run([qkvctl, "sessions", "--target", f"unix:{socket_file}"], capture_output=True, text=True,
                              env={"QKVD_TOKEN": worker["token"]} if "token" in worker else {})
        assert done.returncode == 0, f"{name}: {done.stderr}"


def check_reload(found, values, known, tokens, qkvd, qkvctl):
    """A token that its secret gets later is let in, one that has gone is not, and a changed quota is in force."""
    with pod(found, values, known, qkvd) as running:
        reader, worker = known["tokens"]["auth-file"].splitlines()
        place = running.places["/etc/qkvd-auth"]
        tls = f"{known['folder']}/tls"

        def served():
            return call(qkvctl, running, "sessions", tls=tls, token=tokens["worker"])[0] == 0

        assert served()
        project(place, {"auth-file": reader + "\n"})
        wait_for(lambda: not served(), "a token whose line has gone is let in")
        project(place, {"auth-file": f"{reader}\n{worker}\n"})
        wait_for(served, "a token that was added is not let in")
        project(running.places["/etc/qkvd-quotas"], {"quotas": "team-a sessions=9\n"})
        wait_for(lambda: 'qkvd_tenant_quota_limit{tenant="team-a",resource="sessions"} 9' in running.get("/metrics", tokens["reader"])[1],
                 "a changed quota is not in force")


def check_options(qkvd):
    """The schema knows each option of qkvd, but for those that other values set."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    known = set(schema["properties"]["options"]["propertyNames"]["enum"])
    told = subprocess.run([qkvd, "--help"], check=True, capture_output=True, text=True).stdout
    there = set(re.findall(r"^ *--([a-z][a-z-]*)", told, re.MULTILINE))
    assert known | SET_BY_VALUES == there and not known & SET_BY_VALUES, (
        f"values.schema.json: options {sorted(there - known - SET_BY_VALUES)} are missing, {sorted(known - there)} are none")


def check_kustomize():
    """The base is what render.py makes of the chart; and what kubectl, where there is one, makes of it is valid."""
    made = runpy.run_path(str(KUSTOMIZE / "render.py"))["files"]()
    there = {path.name: path.read_text() for path in (KUSTOMIZE / "base").iterdir()}
    assert made == there, "deploy/kustomize/base differs from the chart: run deploy/kustomize/render.py"
    found = [yaml.safe_load(text) for name, text in made.items() if name != "kustomization.yaml"]
    if shutil.which("kubectl"):
        built = subprocess.run(["kubectl", "kustomize", KUSTOMIZE / "base"], check=True, capture_output=True, text=True)
        found = list(yaml.safe_load_all(built.stdout))
        assert len(found) == len(made) - 1
    check_manifests("kustomize", found, "1.32")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--qkvd", required=True, help="the daemon's program; qkvctl is next to it")
    qkvd = pathlib.Path(parser.parse_args().qkvd).resolve()
    qkvctl = qkvd.with_name("qkvctl")
    report = helm.lint(str(CHART), strict=True, quiet=True)
    assert not report["errors"] and not [each for each in report["messages"] if each["severity"] > 1], report
    with helm.Chart.load(str(CHART)) as chart, tempfile.TemporaryDirectory(prefix="qkvd-chart-") as folder:
        known, tokens = objects(folder, qkvctl)
        known["folder"] = folder

        def render(values, version):
            return list(documents(chart.render({**values, "kubeVersion": version}, name="kv", namespace="test")))

        for name, given in GOOD.items():
            values = chart.merge_values(given)
            chart.validate_schema(values)
            for version in VERSIONS:
                found = render(given, version)
                check_manifests(name, found, version)
            check_pod(name, found, values)
            check_operators(name, found)
            with pod(found, values, known, qkvd) as running:
                check_daemon(name, running, values, tokens, f"{folder}/tls", qkvctl)
        check_options(qkvd)
        check_kustomize()
        check_prepare(render(GOOD["daemonset"], "1.32"), folder)
        given = GOOD["cert-manager"]
        check_reload(render(given, "1.32"), chart.merge_values(given), known, tokens, qkvd, qkvctl)
        for name, given in BAD.items():
            try:
                chart.validate_schema(chart.merge_values(given))
            except helm.HelmValuesError:
                continue
            raise SystemExit(f"the schema takes {name}")
        for why, given in CONTRADICTIONS.items():
            try:
                render(given, "1.32")
            except helm.HelmRenderError as error:
                assert why in str(error), error
                continue
            raise SystemExit(f"the templates take what they should refuse: {why}")
    print(f"chart: {len(GOOD)} sets of values for Kubernetes {' and '.join(VERSIONS)}, each with its daemon; "
          f"{len(BAD) + len(CONTRADICTIONS)} refused")


if __name__ == "__main__":
    main()
