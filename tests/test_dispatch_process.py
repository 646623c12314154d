"""Fresh processes: switches of the environment, a missing runtime, first calls, many at once."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from dispatch_world import built, flash, problem, row, store, tuned
from runtime_variants import require_runtime

from autofa.dispatch import state
from autofa.problem import Problem

PRELUDE = """
import sys, time
start = time.process_time()
import torch
torch_seconds = time.process_time() - start
from torch.nn.functional import scaled_dot_product_attention as sdpa
torch.manual_seed(0)
torch.set_grad_enabled(False)
q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
def check():
    for causal in (False, True):
        got = autofa.attention(q, k, v, is_causal=causal)
        assert torch.allclose(got, sdpa(q, k, v, is_causal=causal), atol=1e-5)
"""
SHAPE = problem("1,2,33,16")


@pytest.fixture(scope="module", autouse=True)
def _runtime() -> None:
    require_runtime()


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result


def test_disabled() -> None:
    built(flash())
    store(tuned(SHAPE))
    code = (
        "import autofa\n"
        "check()\n"
        "try: autofa.attention(q, k, v[:, :, :5])\n"
        "except ValueError as e: assert 'length' in str(e)\n"
        "else: raise SystemExit('accepted')\n"
        "found = autofa.explain(q, k, v)\n"
        "assert (found.kernel, found.reason) == ('torch.sdpa', 'AUTOFA_DISABLE is set'), found\n"
        "assert not autofa.warmup() and autofa.warmup(q, k, v)[0].kernel == 'torch.sdpa'\n"
        "autofa.reload(); autofa.set_precision('fast')\n"
        "assert not hasattr(torch.ops.autofa, 'fwd')\n"
    )
    assert run(code, AUTOFA_DISABLE="1").stderr == ""


def test_without_the_runtime_library() -> None:
    code = (
        "import pathlib\n"
        "from autofa import resources\n"
        "resources.runtime_library = lambda: pathlib.Path('/nonexistent/autofa_runtime.so')\n"
        "import autofa\n"
        "check(); check()\n"
        "assert autofa.explain(q, k, v).kernel == 'torch.sdpa'\n"
        "try:\n"
        "    with autofa.force_kernel('torch.flash'): raise SystemExit('forced')\n"
        "except autofa.AutofaError as e: assert 'runtime' in str(e)\n"
    )
    found = run(code).stderr.strip().splitlines()
    assert len(found) == 1
    assert "every call goes to plain SDPA" in found[0]


@pytest.mark.parametrize(
    ("name", "value"), [("MAX_JOBS", "many"), ("CXX", "g++ 'open"), ("CUDA_HOME", "~nobody-here")]
)
def test_a_setting_that_is_not_understood_is_one_warning(name: str, value: str) -> None:
    found = run("import autofa\ncheck()\n", **{name: value}).stderr.strip().splitlines()
    assert len(found) == 1
    assert name in found[0]
    assert "autofa doctor" in found[0]


def test_forced_by_the_environment() -> None:
    built(flash())
    code = (
        "import autofa\n"
        "from autofa.runtime import extension\n"
        "check()\n"
        "assert extension.counters()['own'] == 2\n"
        "try: autofa.attention(q.double(), k.double(), v.double())\n"
        "except RuntimeError as e: assert 'forced kernel' in str(e)\n"
        "else: raise SystemExit('served')\n"
    )
    run(code, AUTOFA_FORCE_KERNEL=flash().slug)
    code = (
        "import autofa\n"
        "try: check()\n"
        "except ValueError as e: assert 'did you mean torch.flash' in str(e), e\n"
        "else: raise SystemExit('served')\n"
    )
    run(code, AUTOFA_FORCE_KERNEL="torch.flsh")


def test_log_level() -> None:
    found = run("import autofa\ncheck()\n", AUTOFA_LOG="info").stderr
    assert "no measurements of" in found
    assert "autofa tune" in found


def buckets() -> list[Problem]:
    shapes = [f"{b},8,{n},{d}" for b in (1, 2) for n in (64, 128, 256, 512) for d in (64, 128)]
    return [problem(shape, mask) for shape in shapes for mask in ("none", "causal")]


@pytest.mark.parametrize("rung", ["measured", "predicted"])
def test_the_first_call_with_a_tuned_database(rung: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over SDPA's first, at most 0.1 s or, on a slow machine, 1/12 of what importing torch takes.

    In CPU time, since the machine may be busy, and with the bytecode that an installed package has.
    """
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    built(flash())
    around = [problem(f"{b},2,{n},16") for b in (1, 2, 4) for n in (16, 64, 128)]
    measured = [SHAPE] if rung == "measured" else around
    rows = [made for shape in [*buckets(), *measured] for made in tuned(shape)]
    for shape in buckets():  # what a tune leaves: a dozen candidates per bucket
        rows += [row("torch.flash", shape, 0.9 + i / 100, run=f"r{i}") for i in range(10)]
    store(rows)
    code = (
        "import gc\n"
        "sdpa(q, k, v)\n"
        "gc.collect()\n"  # importing torch leaves a full collection due at any next moment
        "start = time.process_time()\n"
        "import autofa\n"
        "autofa.attention(q, k, v)\n"
        "seconds = time.process_time() - start\n"
        "from autofa.runtime import extension\n"
        "assert extension.counters()['own'] == 1\n"
        f"assert autofa.explain(q, k, v).rung == '{rung}'\n"
        "print(seconds, torch_seconds)\n"
    )
    run(code)  # writes the bytecode
    found = [[float(word) for word in run(code).stdout.split()] for _ in range(3)]
    own, torch_own = (min(seconds) for seconds in zip(*found, strict=True))
    assert own <= max(0.1, torch_own / 12), found


def test_many_processes_at_once() -> None:
    """D01 in small: first runs beside each other, and beside somebody who writes."""
    import sqlite3

    built(flash())
    path = store(tuned(SHAPE))
    with sqlite3.connect(path, isolation_level=None) as writer:
        writer.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda _: run("import autofa\ncheck()\n"), range(4)))
        writer.execute("ROLLBACK")
    writer.close()
    assert [result.stderr for result in results] == [""] * 4


def test_a_call_writes_nothing(tmp_path: Path) -> None:
    assert run("import autofa\ncheck()\n").stderr == ""
    assert list(tmp_path.iterdir()) == []


def test_spawned_children() -> None:
    built(flash())
    store(tuned(SHAPE))
    script = Path(os.environ["AUTOFA_DB"]).with_name("spawn.py")
    script.write_text(
        "import multiprocessing, torch, autofa\n"
        "def work(n):\n"
        "    q = torch.ones(1, 2, 33, 16)\n"
        "    return autofa.attention(q, q, q).sum().item()\n"
        "if __name__ == '__main__':\n"
        "    work(0)\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(work, range(2)))\n"
    )
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[1056.0, 1056.0]"
    state.reload()
