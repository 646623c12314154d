"""flash-attn 2: its extension's forward, which takes (B, N, H, D) and writes to a given output."""

from __future__ import annotations

import math
import re
from importlib import import_module, metadata
from typing import TYPE_CHECKING

from autofa.runtime.vendors import Kernel

if TYPE_CHECKING:
    from torch import Tensor


def load(name: str) -> Kernel:
    """The forward.

    Raises:
        ImportError: absent, of another torch, or older than 2.6, whose arguments are others.
    """
    version = metadata.version("flash-attn")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) < (2, 6):
        raise ImportError(f"flash-attn {version} is older than 2.6; upgrade it")
    forward = import_module("flash_attn_2_cuda").fwd

    def attend(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, scale: float, causal: bool
    ) -> None:
        # ALiBi, dropout, window, softcap, the drop mask and a generator: none of them.
        result = forward(q, k, v, out, None, 0.0, scale, causal, -1, -1, 0.0, False, None)
        if lse is not None:
            found = result[1] if len(result) == 4 else result[5]
            lse.copy_(found)
            if causal and q.shape[1] > k.shape[1]:
                lse.masked_fill_(lse == math.inf, -math.inf)  # its mark of an empty row

    return Kernel(attend)
