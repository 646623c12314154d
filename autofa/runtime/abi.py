"""ctypes mirrors of csrc/include/autofa/abi.h and of the key in csrc/runtime/api.h. No torch."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int32, c_int64, c_uint32, c_void_p

ABI_VERSION = 1

# The numbers that abi.h gives to what problem.py names.
DTYPE_CODES = {"f32": 0, "f16": 1, "bf16": 2}
CAUSAL_CODES = {"none": 0, "causal": 1, "causal_lower_right": 2}
MASK_CODES = {"none": 0, "bool": 1, "additive": 2}

OK = 0
REFUSED = -1
NO_MEMORY = -2


class Params(ctypes.Structure):
    """`autofa_params`: one call, as a variant sees it."""

    _fields_ = [
        ("struct_bytes", c_uint32),
        ("dtype", c_int32),
        ("causal", c_int32),
        ("mask", c_int32),
        ("mask_dtype", c_int32),
        ("device_index", c_int32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("attn_mask", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("workspace", c_void_p),
        ("batch", c_int64),
        ("heads_q", c_int64),
        ("heads_kv", c_int64),
        ("seqlen_q", c_int64),
        ("seqlen_k", c_int64),
        ("head_dim", c_int64),
        ("head_dim_v", c_int64),
        ("q_strides", c_int64 * 3),
        ("k_strides", c_int64 * 3),
        ("v_strides", c_int64 * 3),
        ("out_strides", c_int64 * 3),
        ("mask_strides", c_int64 * 4),
        ("scale", c_float),
        ("reserved", c_int32),
    ]


class Metadata(ctypes.Structure):
    """`autofa_metadata`: what a variant library says of itself."""

    _fields_ = [
        ("abi_version", c_uint32),
        ("params_bytes", c_uint32),
        ("slug", c_char_p),
        ("fingerprint", c_char_p),
        ("target", c_char_p),
        ("compiler", c_char_p),
        ("threads", c_int32),
        ("smem_bytes", c_int32),
    ]


class Executor(ctypes.Structure):
    """`autofa_executor`: how a CPU variant gets threads."""

    _fields_ = [
        ("parallel_for", c_void_p),
        ("num_threads", c_int32),
        ("reserved", c_int32),
    ]


class LaunchKey(ctypes.Structure):
    """`autofa_key`: what a call is looked up by. Lengths are buckets, `mask` indexes `MASKS`.

    `device_index` is the CUDA ordinal, or on CPU the number of threads torch uses.
    """

    _fields_ = [
        ("device_type", c_int32),
        ("device_index", c_int32),
        ("dtype", c_int32),
        ("mask", c_int32),
        ("head_dim", c_int32),
        ("head_dim_v", c_int32),
        ("group", c_int32),
        ("batch", c_int32),
        ("heads_kv", c_int32),
        ("seqlen_q", c_int32),
        ("seqlen_k", c_int32),
        ("aligned", c_int32),
        ("wide", c_int32),
        ("graph", c_int32),
        ("flags", c_int32),
    ]

    device_type: int
    device_index: int
    dtype: int
    mask: int
    head_dim: int
    head_dim_v: int
    group: int
    batch: int
    heads_kv: int
    seqlen_q: int
    seqlen_k: int
    aligned: int
    wide: int
    graph: int
    flags: int

    def as_tuple(self) -> tuple[int, ...]:
        """The fields in order: hashable, unlike a ctypes structure."""
        return tuple(int(getattr(self, name)) for name, *_ in self._fields_)


FLAG_DETERMINISTIC = 1
FLAG_FAST = 2
FLAG_LSE = 4

# What `autofa_sizeof` numbers, in its order.
MIRRORS: tuple[type[ctypes.Structure], ...] = (Params, Metadata, LaunchKey, Executor)
