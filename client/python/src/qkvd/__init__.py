"""Client of qkvd, the KV-cache server for LLM inference.

    with qkvd.Client("unix:/run/qkvd.sock") as client:
        client.register_model(qkvd.Model(name="small", layers=1, kv_heads=2, q_heads=8, key_dim=64, value_dim=64))
        with client.open("chat-42", model="small") as session:
            session.append(0, k, v)
            out, lse = session.attend(0, q)

Messages of the wire are in `qkvd.v1`; `qkvd.transformers` has a cache for Hugging Face transformers.
"""

from qkvd.aio import AsyncClient, AsyncDecodeStream
from qkvd.aio_session import AsyncSession
from qkvd.arrays import bf16_to_fp32, fp32_to_bf16
from qkvd.calls import Match, Presence
from qkvd.client import Client
from qkvd.connection import Tls
from qkvd.decode import DecodeStream
from qkvd.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unknown,
)
from qkvd.items import Item, Result
from qkvd.merge import merge
from qkvd.model import EXACT, AttendOptions, LayerOverride, Model, Policy, Rope
from qkvd.session import Session
from qkvd.wire import Rows

__version__ = "0.1.0"
__all__ = [
    "EXACT",
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "AsyncDecodeStream",
    "AsyncSession",
    "AttendOptions",
    "Cancelled",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "DecodeStream",
    "Error",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Item",
    "LayerOverride",
    "Match",
    "Model",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "Policy",
    "Presence",
    "ResourceExhausted",
    "Result",
    "Rope",
    "Rows",
    "Session",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "bf16_to_fp32",
    "fp32_to_bf16",
    "merge",
]
