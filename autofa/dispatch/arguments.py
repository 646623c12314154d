"""Arguments of the wrong kind, in the words of our errors. Asked once something has failed only."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from autofa.errors import DTypeError, UsageError, explain_bad


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")


def _is_number(value: object) -> bool:
    """What torch takes for a float: Python's and NumPy's numbers and bools, tensors of no dims."""
    if isinstance(value, Tensor):
        return value.dim() == 0
    if isinstance(value, (numbers.Real, torch.SymInt, torch.SymFloat)):
        return True
    # NumPy's bool is no Real; its arrays, which can be set, are no numbers.
    return hasattr(value, "dtype") and not hasattr(value, "__setitem__")


def _wrong(name: str, value: object, supported: str, do: str) -> DTypeError:
    kind = type(value)
    where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return DTypeError(explain_bad(name, f"{where}{kind.__qualname__}", supported, do))


def _float(name: str, value: object) -> float:
    if not _is_number(value):
        raise _wrong(name, value, "a number", "give a float")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:
        do = "give a smaller one"
        raise UsageError(explain_bad(name, "a huge int", "what a float holds", do)) from None


def check_kinds(
    query: object,
    key: object,
    value: object,
    attn_mask: object = None,
    dropout_p: object = 0.0,
    is_causal: object = False,
    scale: object = None,
    enable_gqa: object = False,
) -> None:
    """Raises if an argument is of a kind that scaled_dot_product_attention does not take either.

    Raises:
        DTypeError: the wrong kind of argument (a TypeError).
        UsageError: a number that cannot be one.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not _is_tensor(tensor):
            raise _wrong(name, tensor, "torch.Tensor", "give a tensor")
    if attn_mask is not None and not _is_tensor(attn_mask):
        do = "give a tensor, or none for no mask"
        raise _wrong("attn_mask", attn_mask, "torch.Tensor, None", do)
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, (bool, torch.SymBool)):
            raise _wrong(name, flag, "True, False", "give a bool")
    if scale is not None:
        _float("scale", scale)
    probability = _float("dropout_p", dropout_p)
    if math.isnan(probability) or not 0 <= probability <= 1:
        raise UsageError(explain_bad("dropout_p", probability, "0 ... 1", "give a probability"))
