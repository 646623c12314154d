"""Rows and their JSON lines: exact round trips, one canonical hash, nothing absurd accepted."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_samples import CPU, H200, PROBLEM, PROVENANCE, failed, make_row

from autofa.store.codec import MAX_LINE, from_json, to_json
from autofa.store.rows import MAX_MESSAGE, ROW_FIELDS, Row, row_defect

positive = st.floats(min_value=1e-9, max_value=1e9)
rows = st.builds(
    make_row,
    slug=st.sampled_from(["torch.sdpa", "torch.flash", "mma.split_q-d64-m64"]),
    ms=positive,
    status=st.sampled_from(["ok", "wrong_result"]),
    time_spread=st.none() | positive,
    baseline_call_ms=st.none() | positive,
    error=st.none() | st.floats(min_value=0, max_value=1e9) | st.just(math.nan),
    message=st.text(max_size=60),
    samples=st.integers(0, 10**6),
)


@given(rows)
def test_json_round_trip_is_exact(row: Row) -> None:
    back = from_json(to_json(row))
    assert back == row
    assert back.content_hash == row.content_hash


def test_the_hash_is_of_the_content_alone() -> None:
    row = make_row()
    # Pinned: merging by hash needs every version to agree on it.
    pinned = "524f76688f9b1fcd9c3b055df04fa6fbf8cd50631e6284de0a13e6307a1019c8"
    assert row.content_hash == make_row().content_hash == pinned
    assert make_row(ms=1).content_hash == pinned


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_every_field_is_in_the_hash(name: str) -> None:
    others = {
        "device": CPU,
        "problem": replace(PROBLEM, batch=2),
        "provenance": replace(PROVENANCE, host="other"),
        "samples": 32,
    }
    row = make_row()
    value = getattr(row, name)
    other = others.get(name, f"{value}x" if isinstance(value, str) else 3.5)
    assert replace(row, **{name: other}).content_hash != row.content_hash


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "splendid"},
        {"status": "ok", "time_ms": None},
        {"slug": ""},
        {"slug": "a\nb"},
        {"slug": "x" * 300},
        {"slug": 7},
        {"run": None},
        {"samples": -1},
        {"samples": 1.5},
        {"seconds": None},
        {"time_ms": 0.0},
        {"time_ms": -1.0},
        {"call_ms": math.inf},
        {"call_ms": math.nan},
        {"time_p10": "fast"},
        {"baseline_time_ms": 1e300},
        {"error": -1.0},
        {"device": replace(H200, kind="tpu")},
        {"device": replace(H200, units=0)},
        {"device": replace(H200, name=None)},
        {"device": CPU},
        {"call_ms": 1e-320},
        {"baseline_time_ms": 5e-324},
        {"problem": replace(PROBLEM, batch=0)},
        {"problem": replace(PROBLEM, batch=2**40)},
        {"problem": replace(PROBLEM, batch=True)},
        {"problem": replace(PROBLEM, heads_kv=3)},
        {"problem": replace(PROBLEM, dtype="half")},
        {"problem": replace(PROBLEM, mask="'; DROP TABLE autofa_measurement; --")},
        {"provenance": replace(PROVENANCE, details="{bad")},
        {"provenance": replace(PROVENANCE, details="[1]")},
        {"provenance": replace(PROVENANCE, details="[" * 15000)},
        {"provenance": replace(PROVENANCE, created_at="yesterday")},
        {"provenance": replace(PROVENANCE, host="\ud800")},
    ],
    ids=lambda fields: f"{fields}"[:60],
)
def test_impossible_rows_are_refused(fields: dict[str, object]) -> None:
    assert row_defect(make_row()) is None
    assert row_defect(make_row(**fields)) is not None


def test_messages_are_made_storable() -> None:
    row = failed("torch.flash", error=math.inf)
    assert row.error is None
    odd = replace(row, message="nul \0, surrogate \udcff, \x1b[31m" + "x" * 9999)
    assert row_defect(odd) is None
    assert len(odd.message) == MAX_MESSAGE
    assert from_json(to_json(odd)) == odd


def lines() -> list[tuple[str, str]]:
    good = json.loads(to_json(make_row()))
    no_hash = {key: value for key, value in good.items() if key != "hash"}
    return [
        ("", "Expecting value"),
        ("[]", "not an object"),
        ("{bad", "Expecting property name"),
        (json.dumps({**no_hash, "time_ms": math.nan}), "NaN is not JSON"),
        (json.dumps({**no_hash, "time_ms": True}), "not a number"),
        (json.dumps({**no_hash, "time_ms": 10**400}), "not a number"),
        (json.dumps({**no_hash, "surprise": 1}), "surprise"),
        (json.dumps({**no_hash, "device": {"name": "x"}}), "device has not exactly"),
        (json.dumps({**no_hash, "problem": 3}), "problem is not an object"),
        (json.dumps({**good, "time_ms": 0.5}), "hash does not match"),
        ("[" * 50000, "nested too deep|not an object"),
        (" " * MAX_LINE + "{}", "longer than"),
    ]


@pytest.mark.parametrize(("text", "reason"), lines(), ids=lambda value: value[:20])
def test_bad_lines_say_where_and_why(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"^line 7: .*({reason})"):
        from_json(text, 7)


def test_lines_need_no_hash() -> None:
    plain = json.loads(to_json(make_row()))
    del plain["hash"]
    assert from_json(json.dumps(plain)) == make_row()
