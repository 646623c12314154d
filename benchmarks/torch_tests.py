"""PyTorch's own tests of SDPA as an outside judge of autofa.

Runs a test file of a PyTorch checkout twice, as it is and with SDPA routed through autofa by
`patch_sdpa`, and prints each test whose outcome differs. The file has to be of the version of the
torch that is installed; it imports more than autofa needs (pytest, expecttest, numpy ...).

    python benchmarks/torch_tests.py PYTORCH/test/test_transformers.py [-- -k 'CPU and sdpa']

Most of those tests switch backends of SDPA off, and then `patch_sdpa` leaves the call to SDPA; with
`--everywhere` it does not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

# In one process with the tests, before they import anything from torch.nn.functional.
PATCHED = "import autofa, pytest, sys; autofa.patch_sdpa(); sys.exit(pytest.main(sys.argv[1:]))"
EVERYWHERE = "from autofa.integrations import sdpa_patch as p; p._free_choice = lambda: True; "
PLAIN = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"


def outcomes(code: str, test: Path, options: list[str]) -> dict[str, tuple[str, str]]:
    """Test -> (passed, skipped, failed or error; the first line of why)."""
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "outcomes.xml"
        quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "--tb=short"]
        command = [sys.executable, "-c", code, *quiet, f"--junitxml={xml}", test.name, *options]
        subprocess.run(command, cwd=test.parent, check=False, stdout=subprocess.DEVNULL)
        if not xml.exists():
            raise SystemExit(f"pytest did not end: {' '.join(command)}")
        found = {}
        for case in ElementTree.parse(xml).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            bad = next(
                (child for child in case if child.tag in ("failure", "error", "skipped")), None
            )
            if bad is None:
                found[name] = ("passed", "")
            else:
                why = (bad.get("message") or "").partition("\n")[0]
                found[name] = (bad.tag.replace("failure", "failed"), why)
        return found


def summary(found: dict[str, tuple[str, str]]) -> str:
    kinds = [kind for kind, _ in found.values()]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("test", type=Path, help="test_transformers.py of a PyTorch checkout")
    parser.add_argument("--everywhere", action="store_true", help="restricted calls too")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    given = parser.parse_args()
    test = given.test.resolve()
    code = EVERYWHERE * given.everywhere + PATCHED
    plain, patched = (outcomes(each, test, given.options) for each in (PLAIN, code))
    print(f"plain:   {len(plain)} tests: {summary(plain)}")
    print(f"patched: {len(patched)} tests: {summary(patched)}")
    different = 0
    for name in sorted(plain.keys() | patched.keys()):
        before, after = plain.get(name, ("absent", "")), patched.get(name, ("absent", ""))
        if before[0] != after[0]:
            different += 1
            print(f"{name}: {before[0]} -> {after[0]} {after[1] or before[1]}")
    print(f"{different} outcomes differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
