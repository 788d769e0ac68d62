"""What a Hugging Face configuration says of a model: its name as the daemon allows it, and its RoPE."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

from qkvd.model import Rope

_INTERLEAVED = {"gptj", "codegen", "glm", "glm4", "cohere", "cohere2"}
_SCALINGS: dict[str, Literal["none", "linear", "dynamic", "yarn", "llama3"]] = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "llama3": "llama3",
}


def name_of(config: Any) -> str:
    """The model's name as the daemon allows it."""
    name = os.path.basename(str(config._name_or_path).rstrip("/")) or config.model_type
    return re.sub(r"[^A-Za-z0-9._:/@-]", "-", name)[:128]


def rope_of(config: Any) -> Rope | None:
    """The model's RoPE, which makes its codes better. None where it has none, one that the daemon does not know, or a
    configuration that does not say enough."""
    rope = _rope_parameters(config)
    theta, scaling = rope.get("rope_theta"), _SCALINGS.get(rope.get("rope_type", "default"))
    apart = hasattr(config, "qk_rope_head_dim") or 0 in (getattr(config, "no_rope_layers", None) or ())
    trained = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None) or 0
    part = rope.get("partial_rotary_factor") or 1.0
    if not theta or not isinstance(theta, int | float) or scaling is None or apart:
        return None
    head_dim = 0 if part == 1.0 else _head_dim_of(config)
    if (scaling not in ("none", "linear") and not trained) or (part != 1.0 and not head_dim):
        return None
    return Rope(
        theta=float(theta),
        width=0 if part == 1.0 else int(head_dim * part) // 2 * 2,
        interleaved=config.model_type in _INTERLEAVED,
        scaling=scaling,
        factor=0 if scaling == "none" else float(rope.get("factor") or 1.0),
        original_max_position=int(trained),
        low_freq_factor=float(rope.get("low_freq_factor") or 0),
        high_freq_factor=float(rope.get("high_freq_factor") or 0),
        beta_fast=float(rope.get("beta_fast") or 0),
        beta_slow=float(rope.get("beta_slow") or 0),
        attention_factor=float(rope.get("attention_factor") or 0),
    )


def _head_dim_of(config: Any) -> int:
    """0 where the configuration does not say."""
    hidden, heads = getattr(config, "hidden_size", None) or 0, getattr(config, "num_attention_heads", None) or 1
    return int(getattr(config, "head_dim", None) or hidden // heads)


def _rope_parameters(config: Any) -> dict[str, Any]:
    """5.x: one dictionary, or one for each kind of layer (then {}: their thetas differ); 4.57: fields of their own."""
    rope: dict[str, Any] = dict(getattr(config, "rope_parameters", None) or {})
    if any(isinstance(value, dict) for value in rope.values()):
        return {}
    if not rope and getattr(config, "rope_theta", None):
        rope = {
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": getattr(config, "partial_rotary_factor", None),
            **(getattr(config, "rope_scaling", None) or {}),
        }
        rope.setdefault("rope_type", rope.get("type", "default"))
        if getattr(config, "rope_local_base_freq", None):
            return {}
    return rope
