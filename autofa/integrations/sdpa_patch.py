"""`patch_sdpa`: what `torch.nn.functional` holds as SDPA is `autofa.attention`, process-wide.

Only that one attribute is exchanged. Whoever took the function from there before, by
`from torch.nn.functional import scaled_dot_product_attention`, keeps the one they took; so do calls
that never leave C++, as the fast path of `torch.nn.TransformerEncoderLayer`.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._C import (
    _get_cudnn_sdp_enabled,
    _get_flash_sdp_enabled,
    _get_math_sdp_enabled,
    _get_mem_efficient_sdp_enabled,
    _get_overrideable_sdp_enabled,
)
from torch._C._nn import scaled_dot_product_attention as sdpa
from torch.jit import _builtins

from autofa.dispatch.face import attention
from autofa.dispatch.routes import untouched
from autofa.errors import DTypeError, SdpaDTypeError, SdpaUsageError, UsageError

log = logging.getLogger("autofa")


def _free_choice() -> bool:
    """Whether no backend of SDPA is switched off; 0.1 us.

    Whoever has switched one off (`torch.nn.attention.sdpa_kernel`) means SDPA among the others.
    """
    return bool(
        _get_flash_sdp_enabled()
        and _get_math_sdp_enabled()
        and _get_mem_efficient_sdp_enabled()
        and _get_cudnn_sdp_enabled()
        and _get_overrideable_sdp_enabled()
    )


# What `torch.compiler.assume_constant_result` does, without the second that importing TorchDynamo
# takes: the answer becomes part of a compiled graph, as SDPA's own choice does, not the questions.
_free_choice._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _routed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if _on and _free_choice():
        try:
            return attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        except UsageError as error:
            # Whoever tries SDPA and expects it to fail expects a RuntimeError.
            kind = SdpaDTypeError if isinstance(error, DTypeError) else SdpaUsageError
            raise kind(str(error)) from error
    return untouched(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _as_torchs_own() -> Callable[..., Tensor]:
    """`_routed` under the name that it is found by, so that it pickles as what it stands for."""
    routed: Any = _routed
    # Without a signature of its own, inspect would follow __wrapped__ to a builtin that has none.
    routed.__signature__ = inspect.signature(_routed)
    routed.__wrapped__ = sdpa
    routed.__doc__ = sdpa.__doc__
    routed.__module__ = F.__name__
    routed.__name__ = routed.__qualname__ = "scaled_dot_product_attention"
    # TorchScript compiles what it does not know; it knows the builtin by the object.
    _builtins._register_builtin(_routed, "aten::scaled_dot_product_attention")
    return _routed


_ours = _as_torchs_own()
_on = False
_lock = threading.RLock()


class SdpaPatch:
    """What `patch_sdpa` returns: in effect already; as a context manager its effect also ends.

    Attributes:
        displaced: what stood in SDPA's place when this patch took it; None if it never did.
        previous: what was said before outside of this block; None once there is no way back to it.
        open: its block has been entered and not left.
    """

    def __init__(self, enable: bool) -> None:
        self.enable = bool(enable)
        self.displaced: Callable[..., Tensor] | None = None
        self.previous: SdpaPatch | None = None
        self.open = False

    def say(self) -> SdpaPatch:
        """Takes the place of what was said last in the innermost open block, or outside of all."""
        with _lock:
            if not _said[-1].open:
                self.previous = _said.pop()
                if self.previous.previous is not None:
                    self.previous.displaced = self.previous.ever_displaced()
                    self.previous.previous = None
            _said.append(self)
            _apply()
        return self

    def ever_displaced(self) -> Callable[..., Tensor] | None:
        if self.displaced is None and self.previous is not None:
            return self.previous.displaced
        return self.displaced

    def __enter__(self) -> SdpaPatch:
        with _lock:
            if self.open:
                raise RuntimeError("patch_sdpa: got a block that is open already; call it anew")
            if _said[-1] is self:
                _said.pop()
                if self.previous is not None:
                    _said.append(self.previous)
                    self.previous = None
            self.open = True
            _said.append(self)
            _apply()
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            place = _said.index(self)
            ended = [_said.pop(place)]
            if place < len(_said) and not _said[place].open:
                ended.append(_said.pop(place))  # said inside the block
            self.open = False
            displaced = ended[0].displaced or ended[-1].displaced
            if place < len(_said):  # blocks of other threads, opened later
                _said[place].displaced = _said[place].displaced or displaced
            elif displaced is not None and F.scaled_dot_product_attention is _ours:
                F.scaled_dot_product_attention = displaced
                if _said[-1].enable:
                    return
            _apply()


_said = [SdpaPatch(False)]


def _apply() -> None:
    """Makes true what the last of `_said` asks for."""
    global _on
    asked = _said[-1]
    held = F.scaled_dot_product_attention
    if asked.enable and held is not _ours:
        if held is not sdpa:
            log.info("%r stood in SDPA's place; autofa takes it until it is restored", held)
        asked.displaced = held
        F.scaled_dot_product_attention = _ours
    elif not asked.enable and held is _ours:
        displaced = (said.ever_displaced() for said in reversed(_said))
        F.scaled_dot_product_attention = next((d for d in displaced if d is not None), sdpa)
    elif _on and not asked.enable and held is not sdpa:
        log.info("%r took the place of autofa's SDPA meanwhile; it stays there", held)
    _on = asked.enable


def patch_sdpa(enable: bool = True) -> SdpaPatch:
    """Routes `torch.nn.functional.scaled_dot_product_attention` through autofa, or back.

    For the whole process, at once. Used as a context manager, the effect ends with the block, in
    which `patch_sdpa` says what holds until its end:

        autofa.patch_sdpa()             # from here on
        with autofa.patch_sdpa(): ...   # in this block
        with autofa.patch_sdpa(False): ...

    Plain SDPA answers wherever one of its backends is switched off, as inside
    `torch.nn.attention.sdpa_kernel`. What took the function from `torch.nn.functional` before keeps
    torch's own; what took it meanwhile gets torch's own through it once the patch has ended. A
    function that someone else has put there is restored with the end of the patch; one that was put
    there meanwhile stays. What `torch.compile` has compiled is compiled anew when next called.
    Thread-safe.
    """
    return SdpaPatch(enable).say()
