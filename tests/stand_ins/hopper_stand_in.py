"""Stands in for FlashAttention-3's operator, with the schema that its extension registers."""

from __future__ import annotations

import math
from typing import Any

import torch
from attention_stand_in import attend, check
from torch import Tensor

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
    "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
    "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
    "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
    "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
    "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
    "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)


def register(namespace: str) -> torch.library.Library:
    """Defines `<namespace>::fwd` for the CPU."""

    def fwd(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, ...]:
        assert not arguments or set(arguments[:3]) == {None}
        out = named["out"] if "out" in named else arguments[3]
        scale = named.get("softmax_scale", arguments[20] if len(arguments) > 20 else None)
        causal = named.get("is_causal", len(arguments) > 21 and arguments[21])
        check(q, k, v, out)
        lse = attend(q, k, v, out, scale, causal, -math.inf)
        return out, lse, q.new_empty(0), q.new_empty(0)

    library = torch.library.Library(namespace, "DEF")  # type: ignore[no-untyped-call]
    library.define(SCHEMA)  # type: ignore[no-untyped-call]
    library.impl("fwd", fwd, "CPU")  # type: ignore[no-untyped-call]
    return library
