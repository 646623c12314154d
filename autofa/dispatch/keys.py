"""Calls as the runtime's table keys them, and back."""

from __future__ import annotations

import torch

from autofa.problem import MASKS, Problem, bucket_of
from autofa.runtime.abi import DTYPE_CODES, LaunchKey

DEVICE_TYPES = ("cpu", "cuda")
_DTYPES = {code: name for name, code in DTYPE_CODES.items()}


def problem_of_key(key: LaunchKey) -> Problem:
    """The representative of the bucket that a key names."""
    return Problem(
        _DTYPES[key.dtype],
        key.batch,
        key.heads_kv * key.group,
        key.heads_kv,
        key.seqlen_q,
        key.seqlen_k,
        key.head_dim,
        key.head_dim_v,
        MASKS[key.mask],
        DEVICE_TYPES[key.device_type],
    )


def device_index(device: torch.device) -> int:
    """What a LaunchKey holds: the CUDA ordinal; on CPU the number of threads torch uses here."""
    if device.type == "cpu":
        return torch.get_num_threads()
    return torch.cuda.current_device() if device.index is None else device.index


def key_of(problem: Problem, index: int, *, graph: bool, flags: int) -> LaunchKey:
    """The key of a call of `problem` with aligned tensors and offsets that fit 32 bits.

    Args:
        index: as `device_index` gives it.
    """
    bucket = bucket_of(problem)
    return LaunchKey(
        device_type=DEVICE_TYPES.index(problem.device),
        device_index=index,
        dtype=DTYPE_CODES[problem.dtype],
        mask=MASKS.index(problem.mask),
        head_dim=problem.head_dim,
        head_dim_v=problem.head_dim_v,
        group=bucket.heads_q // bucket.heads_kv if bucket.heads_kv else 1,
        batch=bucket.batch,
        heads_kv=bucket.heads_kv,
        seqlen_q=bucket.seqlen_q,
        seqlen_k=bucket.seqlen_k,
        aligned=1,
        wide=0,
        graph=int(graph),
        flags=flags,
    )
