import sys

import numpy as np

import qkvd

k, v, q = (np.random.standard_normal((n, heads, 64)).astype(np.float16) for n, heads in ((100, 2), (100, 2), (1, 8)))

with qkvd.Client(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7580") as client:
    client.register_model(qkvd.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64))
    with client.open("python", model="small") as session:
        session.append(0, k, v)
        out, lse = session.attend(0, q)
        print(out.shape, "length", session.lengths[0])
