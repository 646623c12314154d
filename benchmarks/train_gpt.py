"""A small GPT trained twice, with plain SDPA and with `autofa.attention`: loss curves and time.

    python benchmarks/train_gpt.py [--device cuda] [--head-dim 512] [--dtype bf16] [--steps 200]

Both models start from the same weights and see the same batches, step by step in turn, so that
drift of the machine meets both. The bucket of the model's attention is tuned first (--no-tune
leaves the database as it is). Data: text of a random grammar, which a model can learn.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import autofa
from autofa.runtime.tensors import TORCH_DTYPES

VOCABULARY = 64
Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    head_dim: int
    batch: int
    length: int


class Block(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.shape, self.attention = shape, attention
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (self.shape.heads, self.shape.head_dim)
        q, k, v = (
            t.unflatten(-1, heads).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1)
        )
        x = x + self.out(self.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        hidden: Tensor = self.down(functional.gelu(self.up(self.after(x))))
        return x + hidden


class Gpt(nn.Module):
    def __init__(self, shape: Shape, attention: Attention) -> None:
        super().__init__()
        width = shape.heads * shape.head_dim
        self.token = nn.Embedding(VOCABULARY, width)
        self.place = nn.Embedding(shape.length, width)
        self.blocks = nn.Sequential(*(Block(shape, attention) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.token(tokens) + self.place(places))
        out: Tensor = self.head(self.norm(x))
        return out


def text(shape: Shape, steps: int) -> Tensor:
    """(steps, batch, length + 1) tokens: each is one of four that may follow the one before."""
    generator = torch.Generator().manual_seed(1)
    follows = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=generator)
    tokens = torch.zeros(steps, shape.batch, shape.length + 1, dtype=torch.long)
    choices = torch.randint(4, tokens.shape, generator=generator)
    for i in range(shape.length):
        tokens[..., i + 1] = follows[tokens[..., i], choices[..., i]]
    return tokens


class Run:
    """One model in training."""

    def __init__(self, shape: Shape, attention: Attention, device: str, dtype: str) -> None:
        torch.manual_seed(0)
        self.model = Gpt(shape, attention).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.device, self.dtype = device, TORCH_DTYPES[dtype]
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, tokens: Tensor) -> None:
        start = time.perf_counter()
        self.optimizer.zero_grad()
        half = self.dtype != torch.float32
        with torch.autocast(self.device, self.dtype, enabled=half):
            logits = self.model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="f32", choices=("f32", "bf16"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--budget", help="of the tune, e.g. 20s")
    parser.add_argument("--no-tune", action="store_true")
    args = parser.parse_args()
    shape = Shape(args.layers, args.heads, args.head_dim, args.batch, args.length)
    sizes = f"{args.batch},{args.heads},{args.length},{args.head_dim}"
    if not args.no_tune:
        what = {"device": args.device, "dtypes": [args.dtype], "causal": True}
        autofa.tune(shapes=[sizes], **what, budget=args.budget)
    probe = torch.zeros(
        *(args.batch, args.heads, args.length, args.head_dim),
        dtype=TORCH_DTYPES[args.dtype],
        device=args.device,
        requires_grad=True,
    )
    answer = autofa.explain(probe, probe, probe, is_causal=True)
    print(f"{sizes} {args.dtype}: {answer.kernel}, {answer.reason}")
    data = text(shape, args.steps).to(args.device)
    plain, own = (
        Run(shape, attention, args.device, args.dtype)
        for attention in (functional.scaled_dot_product_attention, autofa.attention)
    )
    for tokens in data:
        plain.step(tokens)
        own.step(tokens)
    print("step  loss sdpa  loss autofa")
    for i in range(0, args.steps, max(1, args.steps // 10)):
        print(f"{i:4}  {plain.losses[i]:9.4f}  {own.losses[i]:11.4f}")
    apart = max(abs(a - b) for a, b in zip(plain.losses, own.losses, strict=True))
    print(f"last: {plain.losses[-1]:.4f} and {own.losses[-1]:.4f}; at most {apart:.2e} apart")
    skip = min(10, args.steps // 2)  # the first steps warm up
    ratios = [a / b for a, b in zip(plain.seconds[skip:], own.seconds[skip:], strict=True)]
    print(
        f"a step: sdpa {1e3 * statistics.median(plain.seconds[skip:]):.2f} ms, autofa "
        f"{1e3 * statistics.median(own.seconds[skip:]):.2f} ms; {statistics.median(ratios):.3f}x"
    )


if __name__ == "__main__":
    main()
