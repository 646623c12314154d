"""The key of a variant's library: everything that decides its machine code, and nothing else.

Stub, flags, target and the contents of all files that the stub includes, however indirectly. Not
the place of the sources, torch, Python or the compiler, so that a cache can be carried about.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from autofa.compiler.render import include_roots, stub
from autofa.compiler.targets import flags_of
from autofa.kernels.family import Variant

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)
# Raised when the meaning of a key changes: old libraries are then left alone and never loaded.
_FORMAT = "autofa library 1"


@dataclass(frozen=True)
class _Source:
    stamp: tuple[int, int]
    digest: str
    includes: tuple[str, ...]


# Memos of this process. A race between threads costs a repeated computation, never a wrong one:
# every entry is checked against the file's time and size before it is used.
_sources: dict[Path, _Source] = {}
_closures: dict[tuple[str, tuple[str, ...]], tuple[tuple[tuple[str, tuple[int, int]], ...], str]]
_closures = {}
_keys: dict[tuple[Variant, str, str], str] = {}


def _stamp(path: Path | str) -> tuple[int, int]:
    stat = os.stat(path)  # noqa: PTH116 (of a text it takes half as long)
    return stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> _Source:
    stamp = _stamp(path)
    known = _sources.get(path)
    if known is None or known.stamp != stamp:
        data = path.read_bytes()
        includes = tuple(_INCLUDE.findall(data.decode("utf-8", errors="replace")))
        known = _sources[path] = _Source(stamp, hashlib.sha256(data).hexdigest(), includes)
    return known


def _scan(text: str, roots: tuple[str, ...]) -> dict[Path, _Source]:
    """All files of the source tree that `text` includes. Conditional includes count as taken."""
    folders = [Path(root) for root in roots]
    found: dict[Path, _Source] = {}
    pending = [(folders[0], name) for name in _INCLUDE.findall(text)]
    while pending:
        base, name = pending.pop()
        for folder in (base, *folders):
            path = Path(folder, name)
            if path.is_file():
                path = path.resolve()
                if path not in found:
                    source = found[path] = _read(path)
                    pending += [(path.parent, included) for included in source.includes]
                break
    return found


def _closure(text: str, roots: tuple[str, ...]) -> str:
    """A digest of the include closure of `text`."""
    key = (text, roots)
    known = _closures.get(key)
    if known is not None:
        try:
            if all(_stamp(path) == stamp for path, stamp in known[0]):
                return known[1]
        except OSError:
            pass  # a file has gone: scan again
    sources = _scan(text, roots)
    root = Path(roots[0]).resolve()
    lines = sorted(
        f"{path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name} "
        f"{source.digest}"
        for path, source in sources.items()
    )
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    stamps = tuple((str(path), source.stamp) for path, source in sources.items())
    _closures[key] = (stamps, digest)
    return digest


def fingerprint(variant: Variant, target: str) -> str:
    """The key (32 hex digits) of `variant`'s library for `target`. Needs no compiler.

    Thread-safe. Reads each source file once per process and looks at its time and size after that,
    so an edit is seen. A source that is missing is left out: the compiler will say so.

    Raises:
        UsageError: an unknown target.
    """
    roots = include_roots(variant)
    headers = (
        f'#include "autofa/export.h"\n'
        f'#include "kernels/{variant.family.folder}/{variant.family.entry}"\n'
    )
    closure = _closure(headers, roots)
    memo = (variant, target, closure)
    known = _keys.get(memo)
    if known is None:
        parts = (_FORMAT, variant.slug, target, *flags_of(target), stub(variant), closure)
        known = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        _keys[memo] = known
    return known
