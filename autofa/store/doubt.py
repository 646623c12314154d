"""Which measurements other work disturbed so much that their times are only a rough guide."""

from __future__ import annotations

import json

from autofa.store.rows import Row

# Half-width of a median's interval, over the median, from which it counts as disturbed. Quiet
# machines: below 0.05, and 0.1 where a candidate left the screening after a few samples.
TOO_WIDE = 0.2
# Share of its rounds for which the measuring threads had no core.
MOST_WAITED = 0.1


def detail(row: Row, name: str) -> float:
    """A number among the details of a row's provenance; 0 where there is none."""
    return number(json.loads(row.provenance.details), name)


def number(details: object, name: str) -> float:
    found = details.get(name) if isinstance(details, dict) else None
    return float(found) if isinstance(found, (int, float)) else 0.0


def doubt(row: Row, mode: str) -> str:
    """Why the times of an ok row are only a rough guide in `mode`; empty if they are not."""
    spread = row.spread(mode) or 0.0
    base = detail(row, f"baseline_{'call' if mode == 'eager' else 'time'}_spread")
    waited = detail(row, "waited")
    reasons = (
        (waited > MOST_WAITED, "its threads had to wait for cores"),
        (spread > TOO_WIDE, f"known to {spread:.0%} only"),
        (base > TOO_WIDE, f"plain SDPA beside it known to {base:.0%} only"),
    )
    said = [text for applies, text in reasons if applies and row.status == "ok"]
    return f"disturbed: {', '.join(said)}" if said else ""
