"""One process of a data-parallel training step with SDPA patched, held against a whole batch.

Arguments: rank, file to meet at, device type. The current CUDA device stays the first in all.
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autofa
from autofa.runtime import extension

RANKS = 2
HEADS, HEAD_DIM = 2, 64
WIDTH = HEADS * HEAD_DIM


class Block(nn.Module):
    """Attention with its projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, 3 * WIDTH)
        self.outward = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        parts = self.inward(x).view(batch, rows, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return self.outward(out.transpose(1, 2).reshape(batch, rows, WIDTH))


def train(model: nn.Module, batch: Tensor) -> list[Tensor]:
    """One step; the gradients."""
    model(batch).float().square().mean().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return gradients


def main() -> None:
    rank, meeting, kind = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    cuda = kind == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        device_id=device if cuda else None,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if cuda else torch.float32
    model = Block().to(device, dtype)
    batch = torch.randn(2 * RANKS, 33, WIDTH).to(device, dtype)
    alone = copy.deepcopy(model)
    want = train(alone, batch)
    parallel = DistributedDataParallel(model, device_ids=[rank] if cuda else None)
    before = extension.counters()
    with autofa.patch_sdpa():
        got = train(parallel, batch[2 * rank : 2 * rank + 2])
    own = extension.counters()["own"] - before["own"]
    assert own == 1, f"{own} calls were served by a kernel of ours"
    assert len(got) == len(want) == 4
    tolerance = 2e-2 if cuda else 1e-5
    pairs = [*zip(got, want, strict=True)]
    pairs += zip(model.parameters(), alone.parameters(), strict=True)
    for ours, theirs in pairs:
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale)
    if cuda:
        assert torch.cuda.current_device() == 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
