import sys

import grpc
import numpy as np
from qkv.v1 import kv_cache_pb2 as kv, kv_cache_pb2_grpc, model_pb2, tensor_pb2


def tensor(array):
    return tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FP32, dims=array.shape, data=array.astype("<f4").tobytes())


cache = kv_cache_pb2_grpc.KvCacheStub(grpc.insecure_channel(sys.argv[1]))
model = model_pb2.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64, dtype=2)
cache.RegisterModel(model_pb2.RegisterModelRequest(model=model))
cache.OpenSession(kv.OpenSessionRequest(session="python", model="small"))
k, v, q = (np.random.standard_normal((n, heads, 64)) for n, heads in ((100, 2), (100, 2), (1, 8)))
rows = kv.Item(session="python", layer=0, position=0, k=tensor(k), v=tensor(v))
cache.Append(iter([kv.AppendRequest(items=[rows])]))
query = kv.Item(session="python", layer=0, position=99, q=tensor(q))
result = cache.Attend(kv.AttendRequest(items=[query])).results[0]
print(list(result.out.dims), "length", result.length)
cache.CloseSession(kv.CloseSessionRequest(session="python"))
