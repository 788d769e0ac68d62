"""A worker keeps the newest tokens itself: the daemon attends to the rest, and the two partials merge exactly."""

import sys

import numpy as np

import qkvd

HELD, OWN, HEADS, DIM = 1000, 16, 4, 64
random = np.random.default_rng(0)
k, v = (random.standard_normal((HELD + OWN, HEADS, DIM), np.float32) for _ in range(2))
q = random.standard_normal((1, HEADS, DIM), np.float32)


def attend(k, v):
    """Of the one query to all of k: (out, lse)."""
    scores = np.einsum("qhd,thd->qht", q, k) / np.sqrt(DIM)
    lse = np.logaddexp.reduce(scores, axis=2)
    return np.einsum("qht,thd->qhd", np.exp(scores - lse[..., None]), v), lse


with qkvd.Client(sys.argv[1]) as client:
    client.register_model(
        qkvd.Model(name="ungrouped", layers=1, kv_heads=HEADS, q_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype="fp32")
    )
    with client.open("merge", model="ungrouped", policy=qkvd.EXACT) as session:
        session.append(0, k[:HELD], v[:HELD])
        options = qkvd.AttendOptions(precision="fp32")
        held = session.attend(0, q, position=HELD + OWN - 1, options=options)
        out, _ = qkvd.merge(*held, *attend(k[HELD:], v[HELD:]))
        print("largest difference below 1e-5:", bool(np.abs(out - attend(k, v)[0]).max() < 1e-5))
