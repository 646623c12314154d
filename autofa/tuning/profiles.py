"""Which problems a tune measures: the built-in profiles as data. profile_files.py reads others.

Within a profile, problems stand in order of importance: a tune with a budget starts at the top.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from autofa.errors import UsageError, explain_bad
from autofa.problem import EXPLICIT_MASKS, Problem, nearest_power_of_two, parse_shape

DENSE = ("none",)
CAUSAL = ("causal",)
BOTH = ("none", "causal")


@dataclass(frozen=True)
class Group:
    """Every combination of some shapes, dtypes and masks; shapes as `--shape` takes them."""

    shapes: tuple[str, ...]
    dtypes: tuple[str, ...]
    masks: tuple[str, ...] = BOTH

    def problems(self, device: str) -> Iterable[Problem]:
        for shape in self.shapes:
            for dtype in self.dtypes:
                for mask in self.masks:
                    yield parse_shape(shape, dtype=dtype, mask=mask, device=device)


@dataclass(frozen=True)
class Profile:
    """A named list of problems for one kind of device, and how long to search in each bucket.

    Attributes:
        trials: candidates of our own measured per bucket, where the request does not say.
    """

    name: str
    device: str
    trials: int
    groups: tuple[Group, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """In order of importance, each once."""
        found = (p for group in self.groups for p in group.problems(self.device))
        return tuple(dict.fromkeys(found))


def _filled(head_dim: int, lengths: Iterable[int], tokens: int, width: int) -> tuple[str, ...]:
    """The field's way to plot over N: a fixed number of tokens, and heads that fill the width."""
    heads = nearest_power_of_two(max(width // head_dim, 1))
    return tuple(f"{max(tokens // n, 1)},{heads},{n},{head_dim}" for n in lengths)


_HALF = ("bf16", "f16")

_CUDA_QUICK = Profile(
    "quick",
    "cuda",
    24,
    (
        Group(("2,16,8192,128", "2,16,8192,64"), ("bf16",), BOTH),
        Group(("1,8,8192,64", "1,32,512,128", "1,8,1024,64"), ("f16",), DENSE),
        Group(("4,32,2048,128",), _HALF, CAUSAL),
        Group(("1,32,512,128", "1,8,1024,64"), ("bf16",), CAUSAL),
        Group(("2,16,8192,64", "2,16,8192,128"), ("f16",), DENSE),
    ),
)
_CUDA_DEFAULT = Profile(
    "default",
    "cuda",
    24,
    (
        *_CUDA_QUICK.groups,
        Group(_filled(128, (512, 2048, 4096, 16384), 16384, 2048), ("bf16",)),
        Group(_filled(64, (512, 1024, 4096, 16384), 16384, 2048), ("bf16",)),
        # f16 once in a while: its kernels are bf16's with other instructions of the same rates.
        Group(("1,32,128,128", "1,32,2048,128", "1,32,4096,128"), ("bf16",)),
        Group(("1,16,256,64", "1,16,2048,64"), ("f16",)),
        # Decoding: a few query rows against a long cache, with grouped heads as served models have.
        Group(("1,32/8,1/4096,128", "16,32/8,1/4096,128", "64,32/8,1/1024,128"), ("bf16",), DENSE),
        Group(("4,32/8,1/8192,64", "4,64/8,4/8192,256"), ("bf16",), DENSE),
        Group(("1,8,1/8192,512", "8,32/8,1/2048,320"), ("bf16",), DENSE),
        Group(("2,16,1024,96", "2,16,4096,96", "1,8,1024,256", "1,8,4096,256"), ("bf16",)),
        Group(("4,16,2048,32", "2,16,2048,192"), ("bf16",), CAUSAL),
        Group(("1,8,2048,512", "1,8,8192,512", "1,32,4096,320", "1,8,8192,1024"), ("bf16",), DENSE),
        Group(("1,16,2048,384", "1,8,2048,768"), ("bf16",), CAUSAL),
        # Padded batches and biases: an explicit mask is a bucket of its own.
        Group(("4,16,1024,64", "4,16,2048,128"), ("bf16",), EXPLICIT_MASKS),
        # Queries of an image against a prompt.
        Group(("2,16,4096/64,64",), ("bf16",), DENSE),
    ),
)
_CUDA_FULL = Profile(
    "full",
    "cuda",
    64,
    (
        *_CUDA_DEFAULT.groups,
        *(
            Group(_filled(d, (128, 256, 512, 1024, 2048, 4096, 8192, 16384), 16384, 2048), _HALF)
            for d in (64, 128, 96, 256, 32, 80, 160, 192, 512, 320, 1024)
        ),
        *(
            Group(tuple(f"1,{h},{n},{d}" for n in (128, 512, 1024, 4096, 16384)), _HALF)
            for h, d in ((8, 64), (16, 128), (32, 64), (32, 128), (8, 256), (8, 512))
        ),
        Group(
            tuple(f"{b},32/8,1/{n},128" for b in (1, 8, 32, 128) for n in (512, 2048, 8192)),
            _HALF,
            DENSE,
        ),
        Group(("4,32/8,2048,128", "1,32/8,8192,128", "1,64/8,8192,128"), _HALF),
        Group(("2,16,8192,64", "2,16,1024,64", "2,16,1024,128"), ("f32",)),
    ),
)
_CPU_QUICK = Profile(
    "quick",
    "cpu",
    9,
    (
        Group(("1,8,512,64", "1,8,1024,128"), ("f32",), BOTH),
        Group(("4,8,128,64",), ("f32",), DENSE),
        Group(("1,8,256,128",), ("f32",), CAUSAL),
    ),
)
_CPU_DEFAULT = Profile(
    "default",
    "cpu",
    16,
    (
        *_CPU_QUICK.groups,
        Group(("1,8,128,64", "1,8,1024,64", "1,8,2048,64"), ("f32",)),
        Group(("1,8,128,128", "1,8,512,128", "1,8,2048,128"), ("f32",)),
        Group(("1,8,512,64", "1,8,1024,128"), ("bf16",)),
        Group(("1,8,512,32", "1,8,512,256", "1,4,512,512"), ("f32",), DENSE),
        # Decoding: one query row against a long cache, and a few that were guessed ahead.
        Group(("1,8,1/4096,64", "1,32/8,1/4096,128", "1,32/8,4/1024,128"), ("f32",), DENSE),
        Group(("1,32/8,1/1024,128",), ("f32", "bf16"), DENSE),
        Group(("1,8,512,64",), ("f32", "bf16"), EXPLICIT_MASKS),
        Group(("1,32/8,1/1024,128",), ("f32",), ("bool",)),
    ),
)
_CPU_FULL = Profile(
    "full",
    "cpu",
    48,
    (
        *_CPU_DEFAULT.groups,
        *(
            Group(tuple(f"{b},8,{n},{d}" for b in (1, 4) for n in (128, 256, 512, 1024)), (dtype,))
            for d in (64, 128, 32, 96, 256)
            for dtype in ("f32", "bf16")
        ),
        Group(("1,8,4096,64", "1,8,4096,128", "1,4,1024,512"), ("f32",)),
        Group(("1,32/8,1/128,128", "8,32/8,1/1024,128"), ("f32", "bf16"), DENSE),
        Group(("1,8,1/1024,64", "1,8,4/4096,128", "1,8,8/1024,64"), ("f32", "bf16"), DENSE),
        Group(("1,8,128,64", "1,8,1024,128"), ("f32", "bf16"), EXPLICIT_MASKS),
    ),
)

_BUILT_IN = {
    (p.device, p.name): p
    for p in (_CUDA_QUICK, _CUDA_DEFAULT, _CUDA_FULL, _CPU_QUICK, _CPU_DEFAULT, _CPU_FULL)
}
PROFILE_NAMES = ("quick", "default", "full")


def built_in(name: str, device: str) -> Profile:
    """The profile of that name for `cuda` or `cpu`.

    Raises:
        UsageError: there is none.
    """
    if name in PROFILE_NAMES:
        return _BUILT_IN[device, name]
    near = get_close_matches(name, PROFILE_NAMES, n=1)
    do = f"did you mean {near[0]}?" if near else "choose one of these"
    raise UsageError(explain_bad("profile", name, ", ".join(PROFILE_NAMES) + ", FILE.toml", do))
