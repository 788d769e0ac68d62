"""Usage: tenant.py TARGET FOLDER CLIENT: appends rows and attends as the tenant of the certificate FOLDER/CLIENT.pem."""

import sys

import numpy as np

import qkvd

target, folder, name = sys.argv[1:]
tls = qkvd.Tls(ca=f"{folder}/authority.pem", certificate=f"{folder}/{name}.pem", key=f"{folder}/{name}.key")
k, v, q = (np.random.standard_normal((n, heads, 64)).astype(np.float16) for n, heads in ((100, 2), (100, 2), (1, 8)))
with qkvd.Client(target, tls=tls) as client:
    client.register_model(qkvd.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64))
    session = client.open("chat", model="small")
    session.append(0, k, v)
    out, lse = session.attend(0, q)
    print(name, out.shape, "length", session.lengths[0])
