"""Many sequences at once, from one event loop."""

import asyncio
import sys

import numpy as np

import qkvd

random = np.random.default_rng()


async def serve(client, name):
    k, v, q = (random.standard_normal((n, heads, 64), np.float32) for n, heads in ((300, 2), (300, 2), (1, 8)))
    async with await client.open(name, model="small") as session:
        await session.append(0, k, v)
        out, _ = await session.attend(0, q)
        keys, _ = await session.fetch(0, dtype="fp32")
        return out.shape, keys.shape


async def main(target):
    async with qkvd.AsyncClient(target) as client:
        model = qkvd.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64)
        await client.register_model(model)
        shapes = await asyncio.gather(*(serve(client, f"async-{i}") for i in range(10)))
        print(len(shapes), "sessions:", *shapes[0])


asyncio.run(main(sys.argv[1]))
