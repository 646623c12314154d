"""The attention backend "autofa" for the models of Hugging Face diffusers.

`register()` adds it to those that `model.set_attention_backend` knows; docs/diffusers.md shows it,
and `patch_sdpa` for models that do not choose a backend.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from autofa.dispatch.face import attention
from autofa.errors import UsageError, explain_bad

NAME = "autofa"


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """One attention call, in the form that diffusers makes it: (batch, length, heads, head dim).

    diffusers reads the names of these arguments and passes no others.

    Raises:
        UsageError: context parallelism or the log-sum-exp is asked for, which other backends have.
    """
    if _parallel_config is not None:
        raise UsageError(
            explain_bad("context parallelism", _parallel_config, "none", 'use backend "native"')
        )
    if return_lse:
        raise UsageError(
            explain_bad("return_lse", True, "False", 'use another backend, as "flash"')
        )
    if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
        attn_mask = attn_mask[:, None, None]  # which keys are padding, for each of the batch
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask,
        dropout_p,
        is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return out.transpose(1, 2)


def register() -> None:
    """Makes `model.set_attention_backend("autofa")` known to diffusers. Idempotent.

    diffusers has no public way to add a backend: its names are the members of an enumeration, and
    the functions behind them are in a private registry. Both get one more entry.

    Raises:
        ImportError: diffusers is not installed, or keeps its backends in another way.
    """
    try:
        from diffusers.models import attention_dispatch as dispatch

        names = dispatch.AttentionBackendName
        add = dispatch._AttentionBackendRegistry.register
        checks = [dispatch._check_device, dispatch._check_shape]
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"diffusers: got {error}; supported: a version with attention backends (tested: 0.37 "
            "to 0.42); pip install 'autofa[diffusers]', or use autofa.patch_sdpa() instead"
        ) from error
    if NAME in names._value2member_map_:
        return
    member = str.__new__(names, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    names._member_names_.append(member._name_)
    names._member_map_[member._name_] = names._value2member_map_[NAME] = member
    add(member, constraints=checks)(attend)
