"""Kernels between shapes: what stands for what, and how alike two are."""

from __future__ import annotations

from store_samples import H200

from autofa.device import limits_of
from autofa.dispatch.likeness import Carrier, Traits, likeness
from autofa.kernels import REGISTRY
from autofa.kernels.family import Variant
from autofa.problem import Bucket, bucket_of, parse_shape

LIMITS = limits_of(H200)
CARRIER = Carrier(LIMITS)


def bucket(shape: str) -> Bucket:
    return bucket_of(parse_shape(shape, dtype="bf16", mask="none", device="cuda"))


def legal(found: object) -> bool:
    return isinstance(found, Variant) and found.refusal(NARROW.problem, LIMITS) is None


WIDE, NARROW = bucket("2,16,4096,128"), bucket("2,16,4096,64")
FAMILY = REGISTRY.family("hopper.split_q")


def traits(**others: object) -> Traits:
    """Of the default of WIDE with other values."""
    values = {**FAMILY.default(WIDE.problem, LIMITS), **others}
    return CARRIER.traits(FAMILY.variant(values, WIDE.problem), WIDE)  # type: ignore[arg-type]


def test_what_is_the_default_there_is_the_default_here() -> None:
    default = CARRIER.default(FAMILY, NARROW)
    assert default is not None
    assert default.values != traits().candidate.values  # type: ignore[union-attr]
    assert CARRIER.carried(traits(), NARROW, legal) == default


def test_a_value_of_its_own_is_kept() -> None:
    chunked = REGISTRY.family("mma.tiling_qk")
    values = {**chunked.default(WIDE.problem, LIMITS)}
    stages = next(v for v in (1, 2, 3) if v != values["stages"])
    there = CARRIER.traits(chunked.variant({**values, "stages": stages}, WIDE.problem), WIDE)
    here = CARRIER.carried(there, NARROW, lambda found: True)
    assert isinstance(here, Variant)
    assert here.params.stages == stages
    assert here.head_dim == 64


def test_what_may_not_serve_there_stands_for_nothing() -> None:
    assert CARRIER.carried(traits(), NARROW, lambda found: False) is None
    assert CARRIER.carried(traits(), bucket("2,16,4096,512"), lambda found: True) is None


def test_a_vendors_kernel_stands_for_itself() -> None:
    flash = REGISTRY.candidate("torch.flash")
    there = CARRIER.traits(flash, WIDE)
    assert CARRIER.carried(there, NARROW, lambda found: True) is flash
    assert CARRIER.carried(there, NARROW, lambda found: False) is None
    assert likeness(there, there) == 1


def test_likeness_falls_with_every_value_and_less_where_both_are_the_defaults() -> None:
    one = traits()
    turned = traits(turns=1 - FAMILY.default(WIDE.problem, LIMITS)["turns"])  # type: ignore[operator]
    twice = traits(turns=turned.values[6][0], block_n=64)
    assert 1 == likeness(one, one) > likeness(one, turned) > likeness(one, twice) > 0
    assert likeness(one, turned) == likeness(turned, one)
    default = CARRIER.default(FAMILY, NARROW)
    assert default is not None
    assert likeness(one, twice) < likeness(one, CARRIER.traits(default, NARROW)) < 1
