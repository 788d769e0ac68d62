"""A cache for Hugging Face transformers whose keys and values lie in qkvd.

    from qkvd.transformers import QkvdCache

    with QkvdCache("unix:/run/qkvd.sock", model) as cache:
        model.generate(**inputs, past_key_values=cache)

mode="attend": a layer's new rows and its queries go to the daemon, in one call, and attention comes back. The cache sets
the model's attention to "qkvd", which is torch's SDPA wherever another cache is used. mode="fetch": the rows come back at
each step and the model attends as it always does; slower, and for any attention.

How attend works: `update` gives the model its new keys back, with a note of the cache on them. The attention function finds
the note, and the mask's, which says where padding ends; what the daemon cannot attend to is refused, never ignored. Each
sequence of a batch is a session of its own, without its padding.

Hybrid models: layers of attention are the daemon's, in their order. What other layers hold (states of convolutions, Mamba
and linear attention) stays here, in transformers' own layers of a cache.

transformers 4.57 to 5.23; what differs between them is at the end of this file.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qkvd import configs
from qkvd.client import Client
from qkvd.errors import Error, FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from qkvd.items import Item
from qkvd.model import AttendOptions, Model, Policy
from qkvd.session import STEP_BYTES, Session

NAME = "qkvd"  # of the attention
NAMELESS_TTL = 24 * 3600.0  # seconds; TTL of sessions without a name, where they are not closed
MASK_ELEMENTS = 1 << 24  # of a mask that are compared at once
DTYPES: dict[torch.dtype, Literal["fp32", "fp16", "bf16"]] = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


class Row:
    """One sequence of the batch: a session, whose positions begin where its padding ends."""

    def __init__(self, session: Session, padding: int = 0):
        self.session = session
        self.padding = padding


class QkvdCache(Cache):  # type: ignore[misc]
    """Keys and values of a causal language model, in qkvd: give it to `generate` or to the model as `past_key_values`.

    client: a `qkvd.Client`, or the target of one, whose tenant is "default". TLS and tokens are a client's.
    model: the transformers model; its geometry and RoPE are registered under `model_name` (the model's own by default).
    mode: "attend" or "fetch".
    session: a name for the sequence, which then outlives this cache: another one of that name, in this process or another,
        goes on where it stands (`generate` skips the tokens that are held). Without it a name is made up, and the session
        is closed with the cache. Further sequences of a batch add "/1", "/2", ... to the name. Not for beams: which session
        a sequence is in changes with them.
    bits, policy, durability: as of `Client.open`; `policy=qkvd.EXACT` keeps rows as they come.

    Batches may be padded on the left. Beams and other changes of the batch fork sessions: what two have in common is held
    once. `crop` and assisted decoding truncate.

    Layers of a hybrid model that hold states (convolutions, Mamba, linear attention) keep them in this process: such a
    cache has no `session`, and `crop` raises Unimplemented where states cannot go back, which recurrent ones never can.

    Unimplemented: an attention of another form than causal (with a sliding window, a soft cap, or neither), or a mask of
    the caller's own, in mode "attend"; hybrid models with transformers 4. AlreadyExists: another model has the name.
    """

    def __init__(
        self,
        client: Client | str,
        model: Any,
        *,
        mode: Literal["attend", "fetch"] = "attend",
        session: str | None = None,
        bits: float | tuple[float, float] | None = None,
        policy: Policy | None = None,
        model_name: str | None = None,
        durability: str | None = None,
    ):
        if mode not in ("attend", "fetch"):
            raise InvalidArgument(f'mode is {mode!r}, allowed are "attend" and "fetch"')
        config = model.config.get_text_config(decoder=True)
        self.client = Client(client) if isinstance(client, str) else client
        self.mode = mode
        self.name = session or f"transformers-{os.getpid()}-{secrets.token_hex(8)}"
        self.model_name = model_name or configs.name_of(config)
        self._named = session is not None
        self._config = config
        self._opening = {"bits": bits, "policy": policy, "durability": durability, "purpose": mode}
        self._rows: list[Row] = []
        # The layer whose rows wait for their queries, or to be fetched.
        self._unattended: int | None = None
        self._made = 0
        super().__init__(layers=self._make_layers(config))
        self._attention = [layer for layer in self.layers if isinstance(layer, QkvdLayer)]
        self._states = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        if session and self._states:
            raise Unimplemented(
                f"session is {session!r}, which is for models of attention alone: {config.model_type} has states, too, "
                "which are not in the session, so that no other cache could go on with it"
            )
        # What is to be closed in the end must not hold the cache itself.
        self._end = weakref.finalize(
            self, _close, self.client, self._rows, isinstance(client, str), self._named, os.getpid()
        )
        if mode == "attend":
            register()
            if config._attn_implementation != NAME:
                model.set_attn_implementation(NAME)
        if self._named:
            self._resume()

    def __enter__(self) -> QkvdCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the sessions, unless they were given a name; and the client, if this cache has made it. In a child of
        fork() sessions stay, as they are the parent's."""
        self._end()

    @property
    def sessions(self) -> list[Session]:
        """The session of each sequence of the batch; empty before the first use."""
        return [row.session for row in self._rows]

    # ---- what transformers asks for ----

    def crop(self, tokens: int) -> None:
        """Removes -`tokens` tokens from the end; a `tokens` above 0 is the length that is left, as it was before 5.0."""
        held = self.get_seq_length()
        length = min(_length_after_crop(held, tokens), held)
        self._crop_states(held - length, length)
        for row in self._rows:
            row.session.truncate(max(length - row.padding, 0))
        self._unattended = None
        for layer in self._attention:
            layer.length = min(layer.length, length)

    def reset(self) -> None:
        """Drops all rows; the batch may be another one afterwards."""
        _close_all(self._rows)
        self._rows.clear()
        self._made = 0  # the names are free again: a named sequence begins anew under its own
        self._unattended = None
        for layer in self._attention:
            layer.length = 0
        self._drop_states()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence beam_idx[i]."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times."""
        self._rearrange([index for index in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """The sequences of these indices, in their order."""
        self._rearrange(torch.arange(len(self._rows))[indices.cpu()].tolist())

    # ---- layers that hold states ----

    def _make_layers(self, config: Any) -> list[Any]:
        """For each of the model's layers one of the cache's: ours for attention, transformers' own for others."""
        if not _has_states(config):
            return [QkvdLayer(self, index, index) for index in range(config.num_hidden_layers)]
        layers: list[Any] = []
        place = 0
        for index, layer in enumerate(DynamicCache(config=config).layers):
            if isinstance(layer, CacheLayerMixin):
                both = isinstance(layer, LinearAttentionLayer)
                layer = _BothLayer(self, index, place, layer.number_of_states) if both else QkvdLayer(self, index, place)
                place += 1
            layers.append(layer)
        return layers

    def _drop_states(self) -> None:
        for layer in self._states:
            recording = layer.record_past
            LinearAttentionLayer.__init__(layer, number_of_states=layer.number_of_states)
            layer.record_past = recording

    def _crop_states(self, removed: int, length: int) -> None:
        """Before rows are cropped. States go back as far as transformers has recorded them, recurrent ones not at all."""
        if not length:
            self._drop_states()
            return
        held = [layer for layer in self._states if any(layer.is_conv_states_initialized.values()) or _is_recurrent(layer)]
        for layer in held if removed else ():
            if _is_recurrent(layer):
                raise Unimplemented("recurrent states cannot be cropped, except to a length of 0")
            for i, states in layer.conv_states.items():
                if not layer.record_past or states.shape[-1] - removed < min(layer.conv_kernel_size[i], length):
                    raise Unimplemented(
                        f"{removed} tokens cannot be cropped: states of convolutions do not go back so far, and only with "
                        "activate_past_recording() before"
                    )
        for layer in held:
            if layer.record_past:
                LinearAttentionLayer.crop(layer, -removed)

    # ---- sessions ----

    def _resume(self) -> None:
        """Takes up the session of this name, if there is one."""
        try:
            session = self.client.session(self.name)
        except NotFound:
            return
        if session.model != self.model_name:
            raise FailedPrecondition(f"session {self.name} is of the model {session.model}, not of {self.model_name}")
        if session.first_position:
            raise FailedPrecondition(f"session {self.name} begins at position {session.first_position}, not at 0")
        # A process that died in the middle of a step leaves layers of different lengths.
        length = min(session.lengths)
        if max(session.lengths) > length:
            session.truncate(length)
        self._rows.append(Row(session))
        self._made = 1
        for layer in self._attention:
            layer.length = length

    def _open(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Registers the model and opens a session for each sequence."""
        if key.dtype not in DTYPES:
            raise Unimplemented(f"keys of {key.dtype}: qkvd holds float32, float16 and bfloat16")
        self.client.register_model(
            Model(
                name=self.model_name,
                layers=len(self._attention),
                kv_heads=key.shape[1],
                q_heads=self._config.num_attention_heads,
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                dtype=DTYPES[key.dtype],
                rope=configs.rope_of(self._config),
            )
        )
        try:
            for _ in range(key.shape[0]):
                self._rows.append(Row(self._open_session()))
        except BaseException:  # all of them or none: the next try begins anew
            with contextlib.suppress(Error):
                _close_all(self._rows, timeout=5)
                if not self._named:  # the last one may be open, though its answer has not come
                    with contextlib.suppress(NotFound):
                        self.client.close_session(self._name(), timeout=5)
                self._made = 0
            self._rows.clear()
            raise

    def _name(self) -> str:
        return self.name if self._made == 1 else f"{self.name}/{self._made - 1}"

    def _next_name(self) -> str:
        self._made += 1
        return self._name()

    def _open_session(self) -> Session:
        ttl = 0 if self._named else NAMELESS_TTL
        return self.client.open(self._next_name(), model=self.model_name, ttl=ttl, **self._opening)  # type: ignore[arg-type]

    def _rearrange(self, indices: list[int]) -> None:
        """Sequence i becomes what sequence indices[i] was. The first to want a session gets it, others a fork."""
        if self._unattended is not None:
            raise self._astray()
        old = self._rows[:]
        taken: set[int] = set()
        rows: list[Row] = []
        forks: list[Row] = []
        try:
            for index in indices:
                if index in taken:
                    forks.append(self._copy(old[index]))
                rows.append(forks[-1] if index in taken else old[index])
                taken.add(index)
        except BaseException:  # the batch stays as it was
            with contextlib.suppress(Error):
                _close_all(forks)
            raise
        self._rows[:] = rows
        for layer in self._states:
            LinearAttentionLayer.reorder_cache(layer, torch.tensor(indices))
        _close_all([row for index, row in enumerate(old) if index not in taken])

    def _copy(self, source: Row) -> Row:
        """A sequence of the same rows, which the daemon holds once until the two differ."""
        return Row(source.session.fork(self._next_name()), source.padding)

    def _begin(self, layer: QkvdLayer, key: torch.Tensor, value: torch.Tensor) -> None:
        """Before rows of a layer are taken."""
        if self._unattended is not None:
            raise self._astray()
        if not self._rows:
            self._open(key, value)
        if key.shape[0] != len(self._rows):
            raise InvalidArgument(f"a batch of {key.shape[0]} meets a cache of {len(self._rows)} sequences")

    def _astray(self) -> Error:
        """Why the last step has not ended, and what to do."""
        what_to_do = (
            "Of this step the cache has the rows of some layers alone: call its reset(), or crop() to what it had before"
        )
        if self.mode == "fetch":
            return FailedPrecondition(f"an exception has ended the last step at layer {self._unattended}. {what_to_do}")
        now = self._config._attn_implementation
        why = (
            f'the model\'s attention is now "{now}"; call model.set_attn_implementation("{NAME}")'
            if now != NAME
            else "an exception has ended its step, or the model attends by code of its own, or with other keys than "
            '`update` has given back, which needs mode="fetch"'
        )
        return Unimplemented(
            f'layer {self._unattended} gave its keys to the cache, and attention "{NAME}" was not called with them: {why}. '
            f"{what_to_do}"
        )


def _close_all(rows: Sequence[Row], timeout: float | None = None) -> None:
    """Closes their sessions. One that the daemon does not have any more is closed."""
    for row in rows:
        with contextlib.suppress(NotFound):
            row.session.close(timeout=timeout)


def _close(client: Client, rows: list[Row], own: bool, named: bool, process: int) -> None:
    """In a child of fork() sessions are the parent's, who may go on with them."""
    try:
        _close_all(rows if not named and process == os.getpid() else (), timeout=5)
    except Error:
        pass  # a daemon that is gone has nothing to be closed
    finally:
        rows.clear()
        if own:
            client.close()


class QkvdLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache, as transformers sees it: `index` among the model's layers, `place` among the daemon's.

    `length` counts padding, too.
    """

    is_compileable = False
    is_sliding = False  # the whole layer is held; windows are the mask's
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: QkvdCache, index: int, place: int):
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index = index
        self.place = place
        self.length = 0
        self.is_initialized = True

    @property
    def cache(self) -> QkvdCache:
        cache = self._cache()
        assert cache is not None, "a layer without its cache"
        return cache

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        """Nothing: sessions are opened by the first rows."""

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes [batch, kv_heads, tokens, dim]. Gives the new rows back, to be attended; or all of them, fetched."""
        cache = self.cache
        cache._begin(self, key, value)
        cache._unattended = self.index
        if cache.mode == "fetch":
            fetched = self._append_and_fetch(key, value)
            cache._unattended = None
            return fetched
        key._qkvd = self
        return key, value

    def _append_and_fetch(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.cache._rows
        k, v = (states.detach().cpu().transpose(1, 2) for states in (key, value))
        self.cache.client.append(
            [
                Item(session=r.session.name, layer=self.place, position=self.length, k=k[i], v=v[i])
                for i, r in enumerate(rows)
            ]
        )
        self.length += key.shape[2]
        fetched = [torch.empty(*s.shape[:2], self.length, s.shape[3], dtype=s.dtype) for s in (key, value)]
        for i, row in enumerate(rows):
            row.session._took(self.place, self.length)
            held = row.session.fetch(self.place, end=self.length, heads_first=True, out=(fetched[0][i], fetched[1][i]))
            if held[0].shape[1] != self.length:
                raise FailedPrecondition(
                    f"of the {self.length} tokens of layer {self.index} session {row.session.name} has {held[0].shape[1]}: "
                    "somebody else has truncated it"
                )
        return fetched[0].to(key.device), fetched[1].to(value.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: list[int] | None, options: AttendOptions
    ) -> torch.Tensor:
        """Appends the rows and attends the queries, [batch, heads, tokens, dim]; gives [batch, tokens, heads, dim]."""
        cache = self.cache
        if cache._unattended != self.index:
            raise Unimplemented(f'layer {self.index} attends with keys that it has attended with before; use mode="fetch"')
        begin, count = self.length, query.shape[2]
        self._pad(padding)
        q, k, v = (states.detach().cpu().transpose(1, 2) for states in (query, key, value))
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float32)
        wide = 4 * sum(math.prod(states.shape[2:]) for states in (q, k, v, out)) * len(cache._rows)
        step = max(STEP_BYTES // wide, 1)
        for at in range(0, count, step):
            self._attend_step(q, k, v, out, at, min(at + step, count), options)
        self.length = begin + count
        cache._unattended = None
        return out.to(query.device, query.dtype)

    def _attend_step(self, q: Any, k: Any, v: Any, out: torch.Tensor, at: int, end: int, options: AttendOptions) -> None:
        items, outs, rows = [], [], []
        for i, row in enumerate(self.cache._rows):
            first = max(at, row.padding - self.length)
            if first >= end:
                continue  # padding alone: it sees nothing and is not kept
            part = slice(first, end)
            position = self.length + first - row.padding
            parts = {"k": k[i, part], "v": v[i, part], "q": q[i, part]}
            items.append(Item(session=row.session.name, layer=self.place, position=position, options=options, **parts))
            outs.append(out[i, part])
            rows.append(row)
        if not items:
            return
        for row, result in zip(rows, self.cache.client.attend(items, out=outs), strict=True):
            if result.error is not None:
                raise result.error
            row.session._took(self.place, result.length)

    def _pad(self, padding: list[int] | None) -> None:
        """Padding stands before the first row of a sequence and stays what it was."""
        rows = self.cache._rows
        for index, row in enumerate(rows):
            wanted = 0 if padding is None else padding[index]
            if row.padding == wanted:
                continue
            if padding is None and self.length >= row.padding:
                continue  # a step without a mask: every token is one
            if any(row.session.lengths):
                raise Unimplemented(f"sequence {index} had {row.padding} tokens of padding and now has {wanted}")
            row.padding = wanted

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(keys, offset) that a mask is made for."""
        return self.length + (query if isinstance(query, int) else query.shape[0]), 0

    def get_seq_length(self, *_: Any) -> int:
        """Tokens, with padding."""
        return self.length

    def get_max_length(self) -> int:
        """No end."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens: int) -> None:
        """As `QkvdCache.crop`, of this layer."""
        length = _length_after_crop(self.length, tokens)
        for row in self.cache._rows:
            row.session.truncate(max(length - row.padding, 0), layers=[self.place])
        self.length = min(self.length, length)

    def reset(self) -> None:
        """Drops the layer's rows."""
        self.crop(-self.length)

    def offload(self) -> None:
        """Nothing: no rows are here."""

    prefetch = offload

    def reorder_cache(self, *_: Any) -> None:
        """Refused: sequences are rearranged in all layers at once."""
        raise Unimplemented("one layer cannot be reordered: call the cache's method")

    batch_repeat_interleave = batch_select_indices = reorder_cache


# ---- attention ----


class Mask(NamedTuple):
    """What the attention function must know of a mask."""

    padding: torch.Tensor | None  # [batch, keys], true where there is a token
    sees: Callable[..., torch.Tensor] | None  # (batch, head, query, key) -> bool
    checked: set[tuple[int, int]]


def register() -> None:
    """Makes attention "qkvd" known to transformers; `QkvdCache` does it by itself in mode "attend"."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def mask(*arguments: Any, **fields: Any) -> torch.Tensor | None:
    """transformers' mask for SDPA, with a note of what it is made of."""
    made: torch.Tensor | None = sdpa_mask(*arguments, **fields)
    if made is not None:
        made._qkvd = Mask(fields.get("attention_mask"), fields.get("mask_function"), set())
    return made


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the daemon where the keys come from a QkvdCache, else torch's SDPA."""
    if s_aux is not None or position_bias is not None:
        raise Unimplemented('attention "qkvd" has neither sinks (s_aux) nor position biases; use mode="fetch" with "eager"')
    layer = getattr(key, "_qkvd", None)
    if layer is None:
        if softcap is not None:
            raise Unimplemented('attention "qkvd" has soft caps in mode="attend" alone; use "eager" elsewhere')
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out, None
    if dropout:
        raise Unimplemented(f"dropout is {dropout}: qkvd attends without; call model.eval()")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise Unimplemented("this attention is not causal")
    padding = _padding(attention_mask, layer.length, query.shape[2], sliding_window or 0)
    options = AttendOptions(scale=scaling or 0, sliding_window=sliding_window or 0, soft_cap=softcap or 0)
    return layer.attend(query, key, value, padding, options), None


def _padding(made: torch.Tensor | None, held: int, count: int, window: int) -> list[int] | None:
    """Tokens of padding before each sequence; None where the mask does not say. Unimplemented for other masks."""
    if made is None:
        return None
    note: Mask | None = getattr(made, "_qkvd", None)
    if note is None:
        raise Unimplemented('qkvd attends to causal masks of transformers\' own; use mode="fetch" for others')
    if note.sees is not None and (window, held) not in note.checked:
        _check_mask(note.sees, made.shape[0], held, count, window)
        note.checked.add((window, held))
    if note.padding is None:
        return None
    tokens = note.padding.bool()
    padding = (tokens.cumsum(1) == 0).sum(1)
    if tokens.shape[1] != held + count or not torch.equal(tokens.sum(1) + padding, torch.full_like(padding, held + count)):
        raise Unimplemented("qkvd takes batches that are padded on the left")
    return [int(number) for number in padding.tolist()]


def _check_mask(sees: Callable[..., torch.Tensor], batch: int, held: int, count: int, window: int) -> None:
    """The mask must be what the daemon does, for every query: those of an image's tokens, for one, see more than causal
    ones, and stand anywhere."""
    keys = torch.arange(held + count)[None, None, :]
    sequences, head = torch.arange(batch)[:, None, None], torch.tensor(0)
    at_once = max(MASK_ELEMENTS // (batch * (held + count)), 1)
    for begin in range(0, count, at_once):
        queries = (held + torch.arange(begin, min(begin + at_once, count)))[None, :, None]
        expected = (keys <= queries) & ((keys > queries - window) if window else True)
        seen = sees(sequences, head, queries, keys)
        if not torch.equal(*torch.broadcast_tensors(seen.cpu(), expected)):
            what = f"a sliding window of {window}" if window else "no sliding window"
            raise Unimplemented(f'the model\'s mask is not the causal one with {what}; use mode="fetch"')


# ---- what a config says ----

_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
# Layers that hold states, alone or with attention; of "moe" and "mlp" that have nothing to hold.
_STATES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}


def _has_states(config: Any) -> bool:
    """Whether layers hold something else than keys and values. Unimplemented: what no cache here can hold."""
    types = set(getattr(config, "layer_types", None) or ())
    others = sorted(types - _ATTENTION - _STATES)
    if others:
        raise Unimplemented(f"{config.model_type} has layers of {', '.join(others)}: qkvd holds keys and values alone")
    states = types & _STATES
    if _BEFORE_STATES and (states or hasattr(config, "mamba_d_conv")):
        raise Unimplemented(
            f"{config.model_type} has layers that hold states, which transformers {transformers.__version__} keeps in "
            "caches of each model's own; a later one (5.19) is needed"
        )
    if states and not types & (_ATTENTION | {"hybrid", "hybrid_sliding"}):
        raise Unimplemented(f"{config.model_type} has no layer of attention: there is nothing that qkvd could hold")
    return bool(states)


def _is_recurrent(layer: Any) -> bool:
    return any(layer.is_recurrent_states_initialized.values())


# ---- what differs between the generations of transformers ----

_BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5

try:
    from transformers.cache_utils import LinearAttentionLayer

    _BEFORE_STATES = False
except ImportError:  # hybrid models are refused

    class LinearAttentionLayer:  # type: ignore[no-redef]
        """Of no cache."""

    _BEFORE_STATES = True


class _BothLayer(LinearAttentionLayer, QkvdLayer):  # type: ignore[misc]
    """States and attention in one layer."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, cache: QkvdCache, index: int, place: int, states: int):
        QkvdLayer.__init__(self, cache, index, place)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def crop(self, *_: Any) -> None:
        """Refused: states and rows go back in all layers at once."""
        raise Unimplemented("one layer cannot be changed alone: call the cache's method")

    reset = reorder_cache = crop


def _length_after_crop(length: int, tokens: int) -> int:
    """`crop` was given the final length before 5.0, or the tokens to remove below 0; 0 removes nothing since."""
    if tokens < 0 or (tokens == 0 and not _BEFORE_5):
        return max(length + tokens, 0)
    return min(tokens, length)
