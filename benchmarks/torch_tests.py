"""PyTorch's own tests of SDPA as an outside judge of autofa.

Runs a test file of a PyTorch checkout twice, as it is and with SDPA routed through autofa by
`patch_sdpa`, and prints each test whose outcome differs. The file has to be of the version of the
torch that is installed; it imports more than autofa needs (pytest, expecttest, numpy ...).

    python benchmarks/torch_tests.py PYTORCH/test/test_transformers.py [-- -k 'CPU and sdpa']

Most of those tests switch backends of SDPA off, and then `patch_sdpa` leaves the call to SDPA.
`--route fused` takes those calls too, but for those that leave only the math backend on, which is
the tests' reference; `--route all` takes these as well. With `--own`, an own kernel serves every
call that one can serve, whatever was measured.

The tests of a GPU are tens of thousands. `--seconds S` takes all in a random order, the same in
both runs, for S seconds each, and compares those that both got to:

    python benchmarks/torch_tests.py --seconds 25 test_transformers.py -- -k cuda
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROUTES = ("free", "fused", "all")
Outcomes = dict[str, tuple[str, str]]


def patch(route: str, own: bool) -> Counter[str]:
    """In the process of the tests, before they take anything from torch.nn.functional.

    Returns:
        Who served how many calls of eager code, with `own`.
    """
    import torch

    import autofa
    from autofa.errors import AutofaError
    from autofa.integrations import sdpa_patch
    from autofa.kernels import REGISTRY
    from autofa.runtime import devices
    from autofa.runtime.tensors import problem_of

    served: Counter[str] = Counter()

    def own_first(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return autofa.attention(query, key, value, *rest, **options)
        for family in REGISTRY.families:
            try:
                mask = rest[0] if type(rest[0]) is torch.Tensor else None
                problem = problem_of(query, key, value, mask, rest[2], options["enable_gqa"])
                variant = family.default_variant(problem, devices.limits(query.device))
                if variant is not None:
                    with autofa.force_kernel(variant.slug):
                        out = autofa.attention(query, key, value, *rest, **options)
                    served[family.name] += 1
                    return out
            except (AutofaError, RuntimeError, ValueError):  # not a call for this family
                continue
        served["as dispatched"] += 1
        return autofa.attention(query, key, value, *rest, **options)

    if route != "free":
        fused = torch._C._get_flash_sdp_enabled
        sdpa_patch._free_choice = fused if route == "fused" else lambda: True
    if own:
        sdpa_patch.attention = own_first
    autofa.patch_sdpa()
    return served


class Sample:
    """A plugin of pytest: tests in one random order, none begun after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = float("inf")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        random.Random(0).shuffle(items)
        self.end = time.monotonic() + self.seconds

    def pytest_runtest_logfinish(self) -> None:
        if time.monotonic() > self.end:
            self.session.shouldstop = "its time is over"

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session


def child(mode: str, xml: str, seconds: str, *options: str) -> int:
    import pytest

    served = Counter() if mode == "plain" else patch(mode.partition("+")[0], "+own" in mode)
    # Not the settings of whatever project the file lies in.
    quiet = ["-q", "-c", os.devnull, "--rootdir=.", "--tb=short"]
    quiet += ["-p", "no:cacheprovider", "-p", "no:warnings"]
    sample = [Sample(float(seconds))] if float(seconds) else []
    code = pytest.main([*quiet, f"--junitxml={xml}", *options], plugins=sample)
    if served:
        print(f"served: {dict(served)}", file=sys.stderr)
    return int(code)


def outcomes(mode: str, test: Path, seconds: float, options: list[str]) -> Outcomes:
    """Test -> (passed, skipped, failed or error; the first line of why)."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "outcomes.xml"
        command = [sys.executable, __file__, "child", mode, str(xml), str(seconds), *options]
        if not any("::" in option for option in options):
            command.append(test.name)
        subprocess.run(command, cwd=test.parent, check=False, stdout=subprocess.DEVNULL)
        if not xml.exists():
            raise SystemExit(f"pytest did not end: {' '.join(command)}")
        found = {}
        for case in ElementTree.parse(xml).iter("testcase"):
            kinds = {"failure": "failed", "error": "error", "skipped": "skipped"}
            bad = next((part for part in case if part.tag in kinds), None)
            kind = "passed" if bad is None else kinds[bad.tag]
            why = "" if bad is None else (bad.get("message") or "").partition("\n")[0]
            found[f"{case.get('classname')}::{case.get('name')}"] = (kind, why)
        return found


def summary(found: Outcomes) -> str:
    kinds = Counter(kind for kind, _ in found.values())
    return f"{len(found)} tests: " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("test", type=Path, help="test_transformers.py of a PyTorch checkout")
    parser.add_argument("--route", choices=ROUTES, default="free", help="calls that are routed")
    parser.add_argument("--own", action="store_true", help="an own kernel wherever one serves")
    parser.add_argument("--seconds", type=float, default=0, help="of tests, in each run; 0: all")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    test = given.test.resolve()
    plain = outcomes("plain", test, given.seconds, given.options)
    print(f"plain:   {summary(plain)}", flush=True)
    patched = outcomes(given.route + "+own" * given.own, test, given.seconds, given.options)
    print(f"patched: {summary(patched)}")
    if given.seconds:
        both = plain.keys() & patched.keys()
        plain, patched = ({name: ran[name] for name in both} for ran in (plain, patched))
        print(f"both:    {summary(patched)}")
    different = 0
    for name in sorted(plain.keys() | patched.keys()):
        before, after = plain.get(name, ("absent", "")), patched.get(name, ("absent", ""))
        if before[0] != after[0]:
            different += 1
            print(f"{name}: {before[0]} -> {after[0]} {after[1] or before[1]}")
    print(f"{different} outcomes differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(child(*sys.argv[2:]) if sys.argv[1:2] == ["child"] else main())
