"""Threads, forks and processes on a cold cache: every answer right, every winner built once."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from copying_compiler import CopyingCompiler
from fault_world import SHAPES, World, tuned_world
from runtime_variants import require_runtime

ROOT = Path(__file__).parent.parent

# What every program below begins with. `attend` makes a call of some kind and checks it.
_PRELUDE = """
import os, pathlib, sys, threading
import torch, autofa
from torch.nn.functional import scaled_dot_product_attention as sdpa
from autofa.compiler import cache
from autofa.dispatch import state
from autofa.kernels import REGISTRY
from autofa.runtime import extension
cache.native_dir = lambda: pathlib.Path("/nonexistent")
for family in REGISTRY.families:
    object.__setattr__(family, "unmeasured", lambda problem, limits: False)
DTYPES = {"f32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 3e-2)}

def inputs(n, dtype="f32"):
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, 2, n, 16, generator=generator).to(DTYPES[dtype][0]) for _ in range(3)]

def attend(n, dtype="f32"):
    q, k, v = inputs(n, dtype)
    with torch.no_grad():
        got = autofa.attention(q, k, v)
    want = sdpa(q.float(), k.float(), v.float())
    assert torch.allclose(got.float(), want, atol=DTYPES[dtype][1]), (n, dtype)

def own():
    return extension.counters()["own"]

def together(work, count=8):
    barrier, wrong = threading.Barrier(count), []
    def run(number):
        barrier.wait(60)
        try:
            work(number)
        except BaseException as error:
            wrong.append(f"{number}: {error!r}")
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong

def built():
    assert state.STATE.table.wait(60)
    return state.STATE.table.counts
"""


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[World]:
    with tuned_world(tmp_path, monkeypatch, caplog) as found:
        yield found


@pytest.fixture
def compiler(world: World) -> CopyingCompiler:
    """Takes a moment, so that all who want a library want it at once."""
    return world.compile_with("sleep 0.3")


def start(world: World, text: str) -> subprocess.Popen[str]:
    home = world.root / "home"
    home.mkdir(exist_ok=True)
    program = world.root / "program.py"
    if not program.exists():  # of several processes the first one may be reading it
        program.write_text(_PRELUDE + text)
    return subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)},
        cwd=world.root,
    )


def end(*processes: subprocess.Popen[str]) -> list[str]:
    """What each printed. Nothing is warned of."""
    try:
        said = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            with process:
                process.kill()
    assert [(p.returncode, err) for p, (_, err) in zip(processes, said, strict=True)] == [
        (0, "") for _ in processes
    ]
    return [out.strip() for out, _ in said]


_THREADS = """
import shutil
class Attention(torch.autograd.Function):
    # Calls attention again in the backward pass, as checkpointing does.
    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return autofa.attention(q, k, v)
    @staticmethod
    def backward(ctx, grad):
        q, k, v = ctx.saved_tensors
        attend(q.shape[-2])
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(autofa.attention(*leaves), leaves, grad)

def backward(n):
    leaves = [t.requires_grad_() for t in inputs(n)]
    Attention.apply(*leaves).sum().backward()
    got = [t.grad for t in leaves]
    want = torch.autograd.grad(sdpa(*leaves).sum(), leaves)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, want, strict=True))

def unsettled(number):
    for turn in range(5):
        if number == 0:
            autofa.reload()
        elif number == 1:
            with autofa.force_kernel("torch.sdpa"):
                attend(33)
        elif number == 2:
            with autofa.force_kernel(SLUG):
                attend(33 + turn)
        else:
            attend((33, 130)[turn % 2], ("f32", "bf16")[number % 2])

def cold(kind, work, wanted):
    shutil.rmtree(os.environ["AUTOFA_CACHE_DIR"], ignore_errors=True)
    CALLS.unlink(missing_ok=True)
    autofa.reload()
    try:
        together(work)
        # Who came while another read the database was answered at once, and asks again.
        [work(number) for number in range(8)]
        counts, runs = built(), len(CALLS.read_text().split())
        assert runs == wanted, runs
        if work is not unsettled:
            assert counts.reads == 1 and counts.swaps >= wanted, counts
            before = own()
            together(work)
            assert own() - before >= 8, own() - before
    except BaseException as error:
        raise SystemExit(f"{kind}: {error!r}")

cold("the same call", lambda number: attend(33), 1)
cold("calls of one kind", lambda number: attend(29 + number), 1)
cold("other kinds", lambda i: attend((33, 130)[i % 2], ("f32", "bf16")[i // 2 % 2]), 2)
cold("backward passes", lambda number: backward((33, 130)[number % 2]), 1)
cold("while others reload and force", unsettled, 2)
"""


def test_eight_threads_on_a_cold_cache(world: World, compiler: CopyingCompiler) -> None:
    slug = world.libraries[0].stem.rpartition("-")[0]
    names = f"SLUG = {slug!r}\nCALLS = pathlib.Path({str(compiler.calls)!r})\n"
    end(start(world, names + _THREADS))


CHILDREN = {
    "after use": "attend(33); built(); attend(33)",
    "while a winner is being built": "attend(33)",
}


@pytest.mark.parametrize("when", list(CHILDREN))
def test_forked_children(when: str, world: World, compiler: CopyingCompiler) -> None:
    """OpenMP's own threads do not survive a fork, so that torch wants one thread on both sides."""
    text = f"""
torch.set_num_threads(1)
import signal, warnings
warnings.simplefilter("ignore", DeprecationWarning)
{CHILDREN[when]}
children = []
for number in range(2):
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)  # one that hangs ends by itself
        code = 1
        try:
            attend(33)
            attend(130, "bf16")
            built()
            before = own()
            attend(33)
            attend(130, "bf16")
            code = 0 if own() == before + 2 else 2
        finally:
            os._exit(code)
    children.append(pid)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
attend(33)
built()
before = own()
attend(33)
assert own() == before + 1
"""
    measured_with_one_thread()
    end(start(world, text))
    assert compiler.runs == 2


def measured_with_one_thread() -> None:
    with closing(sqlite3.connect(os.environ["AUTOFA_DB"])) as connection, connection:
        connection.execute("UPDATE autofa_device SET units = 1")


def test_four_processes_share_a_database_and_a_cold_cache(
    world: World, compiler: CopyingCompiler
) -> None:
    text = f"""
kinds = {[(shape.seqlen_q, shape.dtype) for shape in SHAPES]!r}
for n, dtype in kinds:
    attend(n, dtype)
built()
before = own()
for n, dtype in kinds:
    attend(n, dtype)
print(own() - before)
"""
    running = [start(world, text) for _ in range(4)]
    assert end(*running) == [str(len(SHAPES))] * 4
    assert compiler.runs == 2
