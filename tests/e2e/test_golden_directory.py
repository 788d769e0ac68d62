"""Data directories of earlier releases, which every later one must read: tests/golden/data-directory_VERSION.tar.xz.

QKV_GOLDEN=FOLDER writes one of this build there, instead of testing.
"""

import os
import pathlib
import tarfile

import numpy as np
import pytest

from daemon import Daemon
from kv import FP16, TIMEOUT, Cache, array_of
from qkv.v1 import kv_cache_pb2 as kv
from qkv.v1 import objects_pb2, objects_pb2_grpc

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
LAYERS, TOKENS = 2, 150
IDS = list(range(1000, 1000 + TOKENS))
SESSIONS = {"async-4": (4, kv.DURABILITY_ASYNC, TOKENS), "sync-2.5": (2.5, kv.DURABILITY_SYNC, TOKENS),
            "cut": (8, kv.DURABILITY_ASYNC, 70), "fork": (4, kv.DURABILITY_ASYNC, 100)}


def fetch(daemon, session):
    """[layer, part, tokens, heads, width] of a session, as far as the shortest layer goes."""
    parts = {}
    for answer in daemon.stub().Fetch(kv.FetchRequest(session=session, dtype=FP16), timeout=TIMEOUT):
        parts.setdefault(answer.layer, []).append(np.stack([array_of(answer.k), array_of(answer.v)]))
    return np.stack([np.concatenate(parts[layer], axis=1) for layer in range(LAYERS)])


def objects(daemon):
    return objects_pb2_grpc.ObjectsStub(daemon.channel())


def write(folder):
    directory = folder / "data"
    with Daemon("--data-dir", str(directory), "--storage-segment", "16MiB", "--calibrate-tokens", "0") as daemon:
        for name, (bits, durability, length) in SESSIONS.items():
            if name == "fork":
                daemon.stub().Fork(kv.ForkRequest(session="async-4", fork=name, position=length), timeout=TIMEOUT)
                continue
            cache = Cache(daemon.stub(), name, layers=LAYERS, dtype=FP16, bits_k=bits, bits_v=bits, durability=durability,
                          seed=len(name))
            k, v = cache.rows(TOKENS)
            for layer in range(LAYERS):
                cache.append(0, k + layer, v - layer, layer=layer, dtype=FP16, token_ids=IDS if layer == 0 else None)
            if length < TOKENS:
                daemon.stub().Truncate(kv.TruncateRequest(session=name, position=length), timeout=TIMEOUT)
        info = objects_pb2.ObjectInfo(object="object", bytes=5, durability=kv.DURABILITY_SYNC)
        objects(daemon).PutObjects(iter([objects_pb2.PutObjectsRequest(pieces=[
            objects_pb2.PutPiece(begin=info, data=b"bytes")])]), timeout=TIMEOUT)
        version = daemon.status().version
    with Daemon("--data-dir", str(directory)) as daemon:
        np.savez_compressed(folder / "rows.npz", **{name: fetch(daemon, name).astype(np.float16) for name in SESSIONS})
    with tarfile.open(folder / f"data-directory_{version}.tar.xz", "w:xz") as tar:
        tar.add(directory, "data")
        tar.add(folder / "rows.npz", "rows.npz")


@pytest.mark.skipif("QKV_GOLDEN" not in os.environ, reason="QKV_GOLDEN=FOLDER writes a directory of this build")
def test_write():
    write(pathlib.Path(os.environ["QKV_GOLDEN"]))


@pytest.mark.parametrize("archive", sorted(path.name for path in GOLDEN.glob("data-directory_*.tar.xz")))
def test_directory_of_an_earlier_release(tmp_path, archive):
    """All is there with its rows, and it goes on: what this build writes there, it reads again."""
    with tarfile.open(GOLDEN / archive) as tar:
        tar.extractall(tmp_path)
    rows = np.load(tmp_path / "rows.npz")
    assert set(rows.files) == set(SESSIONS)
    for _ in range(2):
        with Daemon("--data-dir", str(tmp_path / "data")) as daemon:
            for name, (_, durability, length) in SESSIONS.items():
                info = daemon.stub().GetSession(kv.GetSessionRequest(session=name), timeout=TIMEOUT)
                assert list(info.lengths) == [length] * LAYERS and info.durability == durability
                assert np.allclose(fetch(daemon, name), rows[name].astype(np.float32), atol=1e-3)
            match = daemon.stub().Match(kv.MatchRequest(model="model-async-4", token_ids=IDS), timeout=TIMEOUT)
            assert match.tokens == 128 and match.session == "async-4"
            answers = objects(daemon).GetObjects(objects_pb2.GetObjectsRequest(objects=["object"]), timeout=TIMEOUT)
            assert b"".join(piece.data for answer in answers for piece in answer.pieces) == b"bytes"
            assert daemon.metric("qkvd_storage_bad_records_total") == 0
            # What it writes is read by the next start.
            daemon.stub().Truncate(kv.TruncateRequest(session="cut", position=70), timeout=TIMEOUT)


def test_there_is_one():
    assert list(GOLDEN.glob("data-directory_*.tar.xz"))
