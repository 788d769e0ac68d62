"""Bearer tokens that are JWTs: keys, claims, subjects, and what is not taken."""

import base64
import hashlib
import json
import signal
import subprocess
import time

import grpc
import pytest

from daemon import PATIENCE, Daemon, binary, clean_environment, wait_for
from kv import TIMEOUT, refused
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import kv_cache_pb2_grpc

ISSUER, AUDIENCE = "https://cluster.example", "qkvd"
WORKER = "system:serviceaccount:team-a:worker"
UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


def openssl(*command, data=None):
    return subprocess.run(["openssl", *map(str, command)], input=data, check=True, capture_output=True, timeout=PATIENCE).stdout


def text(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def coded(value):
    return text(json.dumps(value).encode())


def der_integers(data):
    """Both numbers of a DER signature of less than 128 bytes, in 32 bytes each."""
    assert data[0] == 0x30 and data[1] == len(data) - 2
    both, at = b"", 2
    for _ in range(2):
        length = data[at + 1]
        both += data[at + 2:at + 2 + length].lstrip(b"\0").rjust(32, b"\0")
        at += 2 + length
    return both


class Key:
    """One of openssl's making."""

    def __init__(self, folder, kid, alg):
        self.kid, self.alg, self.path = kid, alg, folder / f"{kid}.key"
        options = {"RS256": ("RSA", "-pkeyopt", "rsa_keygen_bits:2048"), "EdDSA": ("ED25519",),
                   "ES256": ("EC", "-pkeyopt", "ec_paramgen_curve:P-256")}[alg]
        openssl("genpkey", "-algorithm", *options, "-out", self.path)
        self.public = openssl("pkey", "-in", self.path, "-pubout", "-outform", "DER")

    def jwk(self, **more):
        if self.alg == "RS256":
            modulus = openssl("rsa", "-in", self.path, "-noout", "-modulus").strip().split(b"=")[1]
            fields = {"kty": "RSA", "n": text(bytes.fromhex(modulus.decode())), "e": "AQAB"}
        elif self.alg == "ES256":
            fields = {"kty": "EC", "crv": "P-256", "x": text(self.public[-64:-32]), "y": text(self.public[-32:])}
        else:
            fields = {"kty": "OKP", "crv": "Ed25519", "x": text(self.public[-32:])}
        return {**fields, "kid": self.kid, "use": "sig", "alg": self.alg, **more}

    def sign(self, signed):
        data = self.path.with_suffix(".data")
        data.write_bytes(signed)
        if self.alg == "EdDSA":
            return openssl("pkeyutl", "-sign", "-rawin", "-inkey", self.path, "-in", data)
        signature = openssl("dgst", "-sha256", "-sign", self.path, data)
        return der_integers(signature) if self.alg == "ES256" else signature

    def token(self, header=(), sign=None, **claims):
        """`header` and `claims` over what is usual; None leaves one out."""
        now = int(time.time())
        said = {"iss": ISSUER, "aud": [AUDIENCE, "other"], "sub": WORKER, "exp": now + 600, "nbf": now - 10, "iat": now, **claims}
        head = {"alg": self.alg, "kid": self.kid, "typ": "JWT", **dict(header)}
        signed = ".".join(coded({name: value for name, value in part.items() if value is not None}) for part in (head, said))
        return f"{signed}.{text((sign or self.sign)(signed.encode()))}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jwt")


@pytest.fixture(scope="module")
def keys(folder):
    return {alg: Key(folder, f"key-{alg}", alg) for alg in ("RS256", "ES256", "EdDSA")}


def options(folder, **more):
    files = {"auth-file": folder / "auth", "jwks": folder / "jwks", "jwt-issuer": ISSUER, "jwt-audience": AUDIENCE, **more}
    return [part for name, value in files.items() if value is not None for part in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def daemon(folder, keys):
    secret = {"kty": "oct", "kid": "shared", "alg": "HS256", "k": text(b"secret")}
    weak = {**keys["RS256"].jwk(kid="weak"), "n": text(b"\xff" * 128)}
    crooked = {**keys["ES256"].jwk(kid="crooked"), "y": text(b"\1" * 32)}  # not on the curve
    (folder / "jwks").write_text(json.dumps({"keys": [secret, weak, crooked, *(key.jwk() for key in keys.values())]}))
    opaque = hashlib.sha256(b"opa.que.token").hexdigest()
    (folder / "auth").write_text(f"jwt sub={WORKER} team-a read,write\n"
                                 "jwt sub=system:serviceaccount:team-b:* team-b read\n"
                                 "jwt sub=system:serviceaccount:team-b:old team-b read expires=2020-01-01\n"
                                 "jwt sub=operator * read,write,admin\n"
                                 f"token sha256:{opaque} team-o read\n")
    with Daemon(*options(folder), "--allow-anonymous", "unix") as running:
        yield running


def call(daemon, token, **fields):
    stub = kv_cache_pb2_grpc.KvCacheStub(daemon.channel(daemon.tcp))
    return stub.ListSessions(kv.ListSessionsRequest(**fields), metadata=[("authorization", f"Bearer {token}")], timeout=TIMEOUT)


def may(daemon, token, **fields):
    try:
        call(daemon, token, **fields)
    except grpc.RpcError:
        return False
    return True


# ---- What is taken ----

@pytest.mark.parametrize("alg", ["RS256", "ES256", "EdDSA"])
def test_each_algorithm(daemon, keys, alg):
    for _ in range(2):  # the second is remembered
        call(daemon, token := keys[alg].token(), tenant="team-a")
        call(daemon, token)
    with refused(grpc.StatusCode.NOT_FOUND, "no tenant team-b"):
        call(daemon, token, tenant="team-b")


def test_subjects(daemon, keys):
    key, account = keys["ES256"], "system:serviceaccount:"
    call(daemon, key.token(sub=account + "team-b:any"), tenant="team-b")
    assert not may(daemon, key.token(sub=account + "team-b:any"), tenant="team-a")
    call(daemon, key.token(sub="operator"), tenant="team-b")
    for stranger in (account + "team-c:worker", account + "team-b", WORKER + "2", "operator:x", WORKER.upper(), "CN=x"):
        with refused(UNKNOWN, "the JWT's sub is not known"):
            call(daemon, key.token(sub=stranger))
    with refused(UNKNOWN, "the JWT's sub has expired"):  # its own line goes before that of all
        call(daemon, key.token(sub=account + "team-b:old"))
    with refused(grpc.StatusCode.PERMISSION_DENIED, "needs the role write"):
        kv_cache_pb2_grpc.KvCacheStub(daemon.channel(daemon.tcp)).OpenSession(
            kv.OpenSessionRequest(session="s", model="m"), timeout=TIMEOUT,
            metadata=[("authorization", f"Bearer {key.token(sub=account + 'team-b:any')}")])
    call(daemon, "opa.que.token", tenant="team-o")  # has three parts and is none


def test_claims_of_other_forms(daemon, keys):
    key, now = keys["EdDSA"], time.time()
    for claims in ({"aud": AUDIENCE}, {"nbf": None}, {"exp": now + 60.5}, {"exp": int(now) - 20}, {"nbf": int(now) + 20},
                   {"extra": {"deep": [None, "ü"]}}):
        call(daemon, key.token(**claims))


# ---- What is not ----

@pytest.mark.parametrize("claims,reason", [
    ({"exp": 1}, "has expired"), ({"exp": None}, "'s exp is missing"), ({"exp": "9999999999"}, "'s exp is missing or no time"),
    ({"exp": 1e300}, "'s exp is missing or no time"), ({"exp": -1}, "'s exp is missing or no time"),
    ({"nbf": 9999999999}, "is not valid yet"), ({"nbf": "now"}, "'s nbf is no time"),
    ({"iss": "https://elsewhere.example"}, "'s iss is not the issuer"), ({"iss": None}, "'s iss is not"),
    ({"iss": [ISSUER]}, "'s iss is not"), ({"iss": ISSUER + "/"}, "'s iss is not"),
    ({"aud": "other"}, "'s aud does not"), ({"aud": None}, "'s aud does not"), ({"aud": [[AUDIENCE]]}, "'s aud does not"),
    ({"aud": {AUDIENCE: 1}}, "'s aud does not"), ({"sub": None}, "'s sub is missing"), ({"sub": 7}, "'s sub is missing"),
    ({"sub": ""}, "'s sub is missing"), ({"sub": "x" * 257}, "'s sub is missing or has more"),
    ({"fill": "x" * 6200}, "8192")])
def test_claims(daemon, keys, claims, reason):
    with pytest.raises(grpc.RpcError) as refusal:
        call(daemon, keys["ES256"].token(**claims))
    assert refusal.value.code() == UNKNOWN and reason in refusal.value.details()
    assert ISSUER not in refusal.value.details()  # what would have been right is not told


def hmac_of(key):
    """What a checker that goes by the token's alg alone would take: the public key as a secret."""
    pem = openssl("pkey", "-in", key.path, "-pubout")
    secret = key.path.with_suffix(".pem")
    secret.write_bytes(pem)
    return lambda signed: openssl("dgst", "-sha256", "-mac", "HMAC", "-macopt", f"hexkey:{pem.hex()}", "-binary", data=signed)


def test_algorithms(daemon, keys):
    rsa, ec, ed = (keys[alg] for alg in ("RS256", "ES256", "EdDSA"))
    nothing = "'s alg is not RS256, ES256 or EdDSA"
    cases = [
        (rsa.token({"alg": "none"}, sign=lambda _: b""), nothing),
        (rsa.token({"alg": "none"}), nothing), (rsa.token({"alg": "None", "kid": None}), nothing),
        (rsa.token({"alg": None}), nothing), (rsa.token({"alg": ["RS256"]}), nothing),
        (rsa.token({"alg": "HS256"}, sign=hmac_of(rsa)), nothing), (rsa.token({"alg": "RS512"}), nothing),
        (rsa.token({"alg": "HS256", "kid": "shared"}, sign=lambda signed: openssl(
            "dgst", "-sha256", "-mac", "HMAC", "-macopt", "hexkey:" + b"secret".hex(), "-binary", data=signed)), nothing),
        (rsa.token({"alg": "ES256"}), "'s alg is not that of its key"), (ec.token({"alg": "EdDSA"}), "not that of its key"),
        (ec.token({"kid": rsa.kid}), "not that of its key"), (ed.token({"alg": "RS256", "kid": ec.kid}), "not that of its key"),
        (ec.token({"kid": "unknown"}), "'s kid is of no key"), (ec.token({"kid": None}), "'s kid is of no key"),
        (rsa.token({"kid": "weak"}), "'s kid is of no key"), (ec.token({"kid": "crooked"}), "'s kid is of no key"),
        (ec.token({"crit": ["exp"]}), "'s header has crit"),
        (ec.token({"jwk": ec.jwk(), "kid": None}), "'s kid is of no key"),
    ]
    for token, reason in cases:
        with refused(UNKNOWN, reason):
            call(daemon, token)


def test_signatures(daemon, keys, folder):
    for alg, key in keys.items():
        good, stranger = key.token(), Key(folder, f"stranger-{alg}", alg)
        assert may(daemon, good)
        head, claims, signature = good.split(".")
        raw = base64.urlsafe_b64decode(signature + "==")
        forged = [text(raw[:-1]), text(raw + b"\0"), text(bytes(len(raw))), text(b"\xff" * len(raw)), "", signature + "=",
                  signature[:-1] + "*", text(raw[:10] + bytes([raw[10] ^ 1]) + raw[11:])]
        tokens = [f"{head}.{claims}.{each}" for each in forged]
        tokens.append(stranger.token({"kid": key.kid}))
        tokens.append(f"{head}.{key.token(sub='operator').split('.')[1]}.{signature}")
        for token in tokens:
            with refused(UNKNOWN, "the JWT's signature is wrong"):
                call(daemon, token)
    ec = keys["ES256"]  # OpenSSL's own form, which is not a JWT's
    with refused(UNKNOWN, "the JWT's signature is wrong"):
        call(daemon, ec.token(sign=lambda signed: openssl("dgst", "-sha256", "-sign", ec.path, data=signed)))


def test_forms(daemon, keys):
    good = keys["ES256"].token()
    head, claims, signature = good.split(".")
    for token, reason in [
            (f".{claims}.{signature}", "'s header is no JSON object"), (f"{coded([1])}.{claims}.{signature}", "'s header is no"),
            (f"{text(b'{')}.{claims}.{signature}", "'s header is no"), (f"{head}=.{claims}.{signature}", "'s header is no"),
            (text(b'{"alg":"ES256","alg":"none"}') + f".{claims}.{signature}", "'s header is no"),
            (text(b"[" * 3000) + f".{claims}.{signature}", "'s header is no"),
            ("..", "'s header is no JSON object"), (good + ".", "the token is not known"),
            (f"{head}.{claims}", "the token is not known"),
            (good + "A" * 9000, "allowed are 1 to 8192")]:
        with refused(UNKNOWN, reason):
            call(daemon, token)
    signed = f"{head}.{text(b'[]')}"
    with refused(UNKNOWN, "'s claims are no JSON object"):
        call(daemon, f"{signed}.{text(keys['ES256'].sign(signed.encode()))}")


def test_metrics(daemon, keys):
    before = [daemon.metric(f"qkvd_jwt_{what}_total") for what in ("accepted", "refused")]
    call(daemon, keys["ES256"].token())
    assert not may(daemon, keys["ES256"].token(exp=1)) and not may(daemon, "no-jwt")
    assert [daemon.metric(f"qkvd_jwt_{what}_total") for what in ("accepted", "refused")] == [before[0] + 1, before[1] + 1]


# ---- Keys ----

def test_keys_are_read_anew(tmp_path, keys):
    first, second = keys["ES256"], keys["EdDSA"]

    def install(content):
        (tmp_path / "new").write_text(content)
        (tmp_path / "new").rename(tmp_path / "jwks")

    (tmp_path / "auth").write_text(f"jwt sub={WORKER} team-a read\n")
    install(json.dumps({"keys": [first.jwk()]}))
    with Daemon(*options(tmp_path)) as daemon:
        old, new = first.token(), second.token()
        assert may(daemon, old) and not may(daemon, new)
        install(json.dumps({"keys": [second.jwk()]}))
        wait_for(lambda: may(daemon, new), "the new key is not taken")
        assert not may(daemon, old)  # though its signature was good a moment ago
        install("nonsense")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(lambda: "jwks: line 1" in daemon.log_text(), "the log does not say what is wrong")
        assert may(daemon, new)


@pytest.mark.parametrize("content,reason", [
    ("", "has nothing"), ("{}", "no JSON Web Key Set"), ("[1]", "no JSON Web Key Set"), ('{"keys": 1}', "no JSON Web Key Set"),
    ('{"keys": []}', "has no key for RS256"), ('{"keys": [1, {"kty": "oct", "kid": "x", "k": "AAAA"}]}', "has no key for RS256"),
    ("twice", "two keys of one kid"), ("large", "has more"), ('{"keys": [], "keys": []}', "line 1")])
def test_wrong_keys(tmp_path, keys, content, reason):
    jwk = keys["ES256"].jwk()
    special = {"twice": json.dumps({"keys": [jwk, jwk]}), "large": " " * (1 << 20) + "{}"}
    (tmp_path / "jwks").write_text(special.get(content, content))
    (tmp_path / "auth").write_text("")
    refused_start(reason, *options(tmp_path))


def refused_start(reason, *arguments):
    result = subprocess.run([binary("qkvd"), "--listen", "127.0.0.1:0", *arguments], capture_output=True, text=True,
                            timeout=PATIENCE, env=clean_environment())
    assert result.returncode == 1 and reason in result.stderr, result.stderr


def test_wrong_options(tmp_path):
    (tmp_path / "auth").write_text("jwt sub=a*b team-a read\n")
    refused_start("need each other", *options(tmp_path, **{"jwt-issuer": None}))
    refused_start("need each other", *options(tmp_path, **{"jwt-audience": None}))
    refused_start("need each other", *options(tmp_path, jwks=None))
    refused_start("and --auth-file", *options(tmp_path, **{"auth-file": None}))
    refused_start("cannot read", *options(tmp_path))
    (tmp_path / "jwks").write_text("{}")
    for wrong in ("sub=a*b", "sub=*", "sub=a*", "sub=a:*:b", "iss=x", "sub="):
        (tmp_path / "auth").write_text(f"jwt {wrong} team-a read\n")
        refused_start("must be sub=SUBJECT", "--auth-file", str(tmp_path / "auth"))
