"""A decode loop over two sequences: each step appends one token of each, in one request over one open call."""

import sys

import numpy as np

import qkvd

STEPS = 50
random = np.random.default_rng()


def rows(heads):
    return random.standard_normal((1, heads, 64)).astype(np.float16)


with qkvd.Client(sys.argv[1]) as client:
    client.register_model(qkvd.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64))
    sessions = [client.open(f"decode-{i}", model="small", ttl=60) for i in range(2)]
    with client.decode() as stream:
        for position in range(STEPS):
            items = [qkvd.Item(session=s.name, position=position, k=rows(2), v=rows(2), q=rows(8)) for s in sessions]
            for result in stream.attend(items):
                if result.error:
                    raise result.error
    print(result.out.shape, "length", result.length)
    for session in sessions:
        session.close()
