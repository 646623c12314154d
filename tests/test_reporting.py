"""The leaderboard: who is shown, in which order, and every format complete and strict."""

from __future__ import annotations

import csv
import html.parser
import io
import json
import math
import time
from dataclasses import replace

import pytest
from store_samples import CPU, H200, PROBLEM, at, failed, make_row

from autofa.kernels import REGISTRY
from autofa.reporting.leaderboard import Entry, leaderboard, stale_count, winners
from autofa.reporting.tables import (
    FORMATS,
    NOTHING,
    Contender,
    document,
    fit,
    head_to_head,
    render,
    summary,
)
from autofa.store.rows import MAX_NUMBER, MIN_MS, Row, row_defect

LONG = replace(PROBLEM, seqlen_q=4096, seqlen_k=4096, mask="causal")
STALE = make_row("gone.kernel-b64", 0.1)
ROWS = [
    make_row(),
    make_row("torch.flash", 0.5, time_ms=0.45),
    make_row("torch.cudnn", 0.52, time_ms=0.40),
    make_row("torch.unfused", 3.0),
    failed("torch.efficient", "out_of_memory"),
    STALE,
    make_row(problem=LONG),
    make_row("torch.flash", 0.8, problem=LONG),
]


def validity(row: Row) -> str:
    return "the kernel's source has changed since" if row.slug.startswith("gone") else "current"


def board(rows: list[Row] = ROWS, mode: str = "eager", **options: object) -> list[Entry]:
    return leaderboard(rows, mode, REGISTRY, validity, **options)  # type: ignore[arg-type]


def kernels(entries: list[Entry]) -> list[tuple[int | None, str]]:
    return [(entry.rank, entry.kernel) for entry in entries if entry.bucket == ROWS[0].bucket]


def test_ok_rows_are_ranked_per_bucket() -> None:
    entries = board()
    assert kernels(entries) == [
        (1, "torch.flash"),
        (2, "torch.cudnn"),
        (3, "torch.sdpa"),
        (4, "torch.unfused"),
    ]
    assert [entry.rank for entry in entries] == [1, 2, 3, 4, 1, 2]
    first = entries[0]
    assert (first.time_ms, first.call_ms, first.speedup_vs_sdpa) == (0.45, 0.5, 2.0)
    assert first.tflops == pytest.approx(PROBLEM.flops / 0.5e-3 / 1e12)
    assert (first.title, first.family, first.current) == ("(sdpa flash)", "torch.flash", True)
    assert [entry.tied for entry in entries[:4]] == [True, False, False, False]


def test_a_mode_ranks_by_its_own_time() -> None:
    entries = board(mode="graph")
    assert kernels(entries)[0] == (1, "torch.cudnn")
    assert entries[0].speedup_vs_sdpa == pytest.approx(2.5)
    assert entries[0].tflops == pytest.approx(PROBLEM.flops / 0.4e-3 / 1e12)


def test_everything_shows_what_failed_and_what_no_longer_holds() -> None:
    entries = board(everything=True)
    assert kernels(entries)[4:] == [(5, "gone.kernel-b64"), (None, "torch.efficient")]
    gone, broken = entries[4:6]
    assert (gone.current, gone.usable, gone.tied) == (False, False, False)
    assert gone.note == "the kernel's source has changed since"
    assert (broken.status, broken.note) == ("out_of_memory", "it out_of_memory")
    assert all((entry.rank is None) == (entry.status != "ok") for entry in entries)
    assert stale_count(ROWS, validity) == 1


def test_rough_times_say_so_in_every_format() -> None:
    def with_details(row: Row, details: str) -> Row:
        return replace(row, provenance=replace(row.provenance, details=details))

    rough = {
        "torch.flash": make_row("torch.flash", 0.5, call_spread=0.35),
        "torch.cudnn": with_details(make_row("torch.cudnn", 0.6), '{"waited": 0.45}'),
        "torch.unfused": with_details(
            make_row("torch.unfused", 3.0), '{"baseline_call_spread": 2.5}'
        ),
    }
    notes = {
        "torch.flash": "disturbed: known to 35% only",
        "torch.cudnn": "disturbed: its threads had to wait for cores",
        "torch.unfused": "disturbed: plain SDPA beside it known to 250% only",
    }
    odd = with_details(make_row("torch.efficient", 0.7), '{"waited": "much", "x": [1]}')
    entries = board([make_row(), odd, *rough.values()])
    assert {e.kernel: e.note for e in entries if e.disturbed} == notes
    found = {d["kernel"]: (d["disturbed"], d["note"]) for d in map(document, entries)}
    assert found["torch.flash"] == (True, notes["torch.flash"])
    assert found["torch.sdpa"] == (False, "")
    for note in notes.values():
        assert note in render(entries, "simple", mode="eager")
    cells = csv.DictReader(io.StringIO(render(entries, "csv", mode="eager")))
    assert {row["kernel"] for row in cells if row["disturbed"] == "true"} == set(notes)
    # The device's own time of the first was measured well.
    graph = board([make_row(), *rough.values()], mode="graph")
    assert {e.kernel for e in graph if e.disturbed} == {"torch.cudnn"}


def test_a_kernel_whose_last_run_failed_is_shown_once() -> None:
    rows = [make_row(), make_row("torch.flash", 0.5), failed("torch.flash", provenance=at(5))]
    assert kernels(board(rows)) == [(1, "torch.sdpa")]
    assert kernels(board(rows, everything=True)) == [(1, "torch.sdpa"), (None, "torch.flash")]


def test_top_and_shape_choose() -> None:
    assert [entry.rank for entry in board(top=1)] == [1, 1]
    ragged = replace(LONG, seqlen_q=4000, seqlen_k=4000)
    assert {entry.bucket for entry in board(problems=[ragged])} == {ROWS[-1].bucket}
    assert board(problems=[replace(LONG, mask="none")]) == []
    assert winners(ROWS, "eager", REGISTRY, validity) == board(top=1)


def test_the_representative_shape_is_the_one_shown() -> None:
    ragged = replace(PROBLEM, seqlen_q=1000, seqlen_k=1000)
    (entry,) = board([make_row(ms=2.0, problem=ragged), make_row(ms=1.0)])
    assert entry.call_ms == 1.0
    assert entry.speedup_vs_sdpa == pytest.approx(0.5**0.5)


def test_json_has_the_agreed_shape() -> None:
    found = json.loads(render(board(everything=True), "json", mode="eager"))
    assert list(found[0]["bucket"]) == [
        "dtype", "batch", "heads_q", "heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
        "mask",
    ]  # fmt: skip
    agreed = {
        "device", "bucket", "rank", "kernel", "title", "family", "status", "time_ms", "call_ms",
        "tflops", "speedup_vs_sdpa", "error", "current",
    }  # fmt: skip
    assert all(agreed <= entry.keys() for entry in found)
    assert found[0]["device"] == "NVIDIA H200"
    assert found[5]["rank"] is None
    assert found[5]["time_ms"] is None
    assert found[0] == json.loads(json.dumps(document(board()[0])))


def test_the_most_extreme_rows_have_finite_ratios() -> None:
    problem = replace(PROBLEM, **dict.fromkeys(("seqlen_q", "seqlen_k", "batch"), 2**31 - 1))
    rows = [
        make_row("torch.sdpa", MAX_NUMBER, problem=problem),
        make_row("torch.flash", MIN_MS, baseline_call_ms=MAX_NUMBER, problem=problem),
        make_row("torch.cudnn", MAX_NUMBER, baseline_call_ms=MIN_MS, problem=problem),
    ]
    assert [row_defect(row) for row in rows] == [None] * 3
    found = json.loads(render(board(rows), "json", mode="eager"))
    assert len(found) == 3
    for entry in found:
        assert math.isfinite(entry["tflops"])
        assert math.isfinite(entry["speedup_vs_sdpa"])


def test_csv_is_rfc_4180() -> None:
    odd = make_row("torch.flash", 0.5, device=replace(H200, name='A "quoted", name\nof two lines'))
    text = render(board([odd]), "csv", mode="eager")
    assert text.count("\r\n") == 2
    (row,) = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    assert row["device"] == odd.device.name
    assert (row["kernel"], row["seqlen_q"], row["current"]) == ("torch.flash", "1024", "true")
    assert float(row["call_ms"]) == 0.5


def test_people_get_a_table_per_bucket() -> None:
    text = render(board(everything=True), "simple", mode="eager", stale=1)
    lines = text.splitlines()
    assert lines[0] == "NVIDIA H200 (sm_90, 132 SMs), ranked by eager"
    assert "1,8,1024,64 f16 dense" in lines
    assert "1,8,4096,64 f16 causal" in lines
    (cudnn,) = (line for line in lines if "torch.cudnn" in line)
    assert cudnn.split() == [
        "2", "(sdpa", "cudnn)", "torch.cudnn", "0.4000", "0.5200", "4.13", "1.92", "1.3e-03",
    ]  # fmt: skip
    tied = render(
        board([*ROWS, make_row("torch.math", 0.502, time_ms=0.45)]), "simple", mode="eager"
    )
    assert [line.split()[:2] for line in tied.splitlines() if " = " in line] == [["2", "="]]
    assert "stale: the kernel's source has changed since" in text
    assert "out_of_memory: it out_of_memory" in text
    assert "1 older measurements no longer hold" in text
    assert text.isascii()


def test_markdown_and_html_keep_hostile_text_harmless() -> None:
    evil = "<script>alert(1)</script>|\x1b[31m\n# heading"
    rows = [
        make_row(device=replace(H200, name=evil)),
        failed("torch.flash", message=evil, device=replace(H200, name=evil)),
    ]
    entries = board(rows, everything=True)
    page = render(entries, "html", mode="eager")
    assert "<script" not in page
    checker = html.parser.HTMLParser()
    checker.feed(page)
    for form in ("simple", "github", "html"):
        text = render(entries, form, mode="eager")
        assert "\x1b" not in text
        assert "\n# heading" not in text
    rows_of_table = [
        line
        for line in render(entries, "github", mode="eager").splitlines()
        if line.startswith("|")
    ]
    assert {line.replace("\\|", "").count("|") for line in rows_of_table} == {10}


@pytest.mark.parametrize("rows", [[], [failed("torch.flash")], [STALE]], ids=str)
def test_nothing_to_show(rows: list[Row]) -> None:
    entries = board(rows)
    assert render(entries, "simple", mode="eager") == f"{NOTHING}\n"
    assert render(entries, "github", mode="eager") == f"{NOTHING}\n"
    assert json.loads(render(entries, "json", mode="eager")) == []
    assert len(render(entries, "csv", mode="eager").splitlines()) == 1
    assert NOTHING.replace("`", "") in render(entries, "html", mode="eager").replace("`", "")
    assert "tune" in NOTHING


@pytest.mark.parametrize("form", FORMATS)
def test_five_thousand_rows_uncut(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    device = replace(H200, name="NVIDIA " + "x" * 80)
    rows = [
        make_row(
            f"test.kernel-{'long-name-' * 9}{i % 50:02}",
            1.0 + i % 50,
            problem=replace(PROBLEM, batch=1 << i // 50 % 10, head_dim=8 * (i // 500 + 1)),
            device=device,
        )
        for i in range(5000)
    ]
    start = time.process_time()
    text = render(board(rows), form, mode="eager")
    assert time.process_time() - start < 2
    for row in rows[:50]:
        assert text.count(row.slug) >= 100
    assert device.name in text
    assert "..." not in text


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8", None])
def test_any_terminal_can_print_it(encoding: str | None) -> None:
    rows = [make_row(device=replace(H200, name="グラフ ½ é 🚀"))]
    text = fit(render(board(rows), "simple", mode="eager"), encoding)
    text.encode(encoding or "ascii")
    assert "torch.sdpa" in text


def test_devices_are_apart() -> None:
    on_cpu = make_row(device=CPU, problem=replace(PROBLEM, device="cpu"))
    text = render(board([make_row(), on_cpu]), "simple", mode="eager")
    assert text.index("Test CPU (x86-64-v4, 2 threads)") < text.index("NVIDIA H200 (sm_90")


def test_summary_names_each_buckets_winner() -> None:
    lines = summary(winners(ROWS, "eager", REGISTRY, validity), mode="eager").splitlines()
    assert [line.split()[:4] for line in lines[2:]] == [
        ["1,8,1024,64", "f16", "dense", "torch.flash"],
        ["1,8,4096,64", "f16", "causal", "torch.flash"],
    ]


def test_head_to_head() -> None:
    named = {entry.kernel: entry for entry in board(everything=True)[:6]}
    order = ("torch.unfused", "torch.sdpa", "torch.efficient", "torch.flash", "torch.cudnn")
    contenders = [Contender(named[kernel], (0.5, -0.25)) for kernel in order]
    lines = head_to_head(contenders, mode="eager").splitlines()
    assert [line.split(":")[0].strip() for line in lines] == [
        "(unfused)", "(sdpa)", "(sdpa efficient)", "(sdpa flash)", "(sdpa cudnn)",
    ]  # fmt: skip
    assert "[ 0.50000000, -0.25000000], time: 3.000 ms, TFLOPS: 0.72, error" in lines[0]
    assert "(+200.00%)" in lines[1]
    assert lines[2].endswith("out_of_memory: it out_of_memory")
    assert "(+100.00%)" in lines[3]
    assert "(-3.85%)" in lines[4]
    fewer = head_to_head(contenders, mode="eager", show_all=False).splitlines()
    assert fewer == [lines[0], lines[1], lines[3]]
    assert head_to_head([], mode="eager") == ""
