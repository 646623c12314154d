"""Profiles from TOML files: what they mean, and what is said of bad ones, before any work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofa.cli import _run
from autofa.errors import UsageError
from autofa.tuning.profile_files import find_profile
from autofa.tuning.request import make_request

DOCS = Path(__file__).parent.parent / "docs" / "profiles.md"
SHAPE = 'shapes = ["1,8,64,64"]'


def written(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "mine.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_a_profile_from_a_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        'trials = 5\n[[group]]\nshapes = ["1,8,100,64"]\nmasks = ["causal"]\n'
        '[[group]]\nshapes = ["2,8/2,64,64"]\ndtypes = ["bf16", "float32"]\n',
    )
    found = make_request(path, device="cpu", db="x.db")
    assert found.trials == 5
    assert [(p.shape, p.dtype, p.mask) for p in found.problems] == [
        ("1,8,100,64", "f32", "causal"),
        ("2,8/2,64,64", "bf16", "none"),
        ("2,8/2,64,64", "bf16", "causal"),
        ("2,8/2,64,64", "f32", "none"),
        ("2,8/2,64,64", "f32", "causal"),
    ]


def test_what_is_left_out_is_as_in_the_default_profile(tmp_path: Path) -> None:
    path = written(tmp_path, f"[[group]]\n{SHAPE}\n")
    for device, dtype in (("cpu", "f32"), ("cuda", "f16")):
        profile = find_profile(path, device)
        assert profile.trials == find_profile("default", device).trials
        assert [(p.dtype, p.mask) for p in profile.problems] == [(dtype, "none"), (dtype, "causal")]


def test_options_go_before_what_the_file_says(tmp_path: Path) -> None:
    path = written(tmp_path, f"trials = 5\n[[group]]\n{SHAPE}\n")
    found = make_request(
        path, device="cpu", db="x.db", trials=7, dtypes=["bf16"], causal=True, shapes=["1,8,32,64"]
    )
    assert found.trials == 7
    assert [(p.shape, p.dtype, p.mask) for p in found.problems] == [
        ("1,8,32,64", "bf16", "causal"),
        ("1,8,64,64", "bf16", "causal"),
    ]


def test_the_example_of_the_page_is_a_profile(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCS.read_text(), re.S)
    for device in ("cpu", "cuda"):
        problems = find_profile(written(tmp_path, example), device).problems
        assert [(p.shape, p.mask) for p in problems] == [
            ("1,32/8,1/4096,128", "none"),
            ("8,32/8,1/4096,128", "none"),
            ("1,32/8,2048,128", "causal"),
            ("1,32/8,8192,128", "causal"),
        ]


BAD = {
    "": "group: got nothing",
    "group = 3": "group: got 3",
    "group = [1]": "group 1: got 1",
    "[[group]]\n": "group 1: shapes: got nothing",
    "[[group]]\nshapes = []": "group 1: shapes",
    "[[group]]\nshapes = [1]": "group 1: shapes",
    '[[group]]\nshapes = "1,8,64,64"': "group 1: shapes",
    '[[group]]\nshapes = ["1,8,64"]': "group 1: shapes: shape: got 1,8,64",
    '[[group]]\nshapes = ["1,6/4,64,64"]': "group 1: shapes",
    f'[[group]]\n{SHAPE}\n[[group]]\n{SHAPE}\nmasks = ["odd"]': "group 2: masks: mask: got odd",
    f'[[group]]\n{SHAPE}\ndtypes = ["f8"]': "group 1: dtypes: dtype: got f8",
    f"[[group]]\n{SHAPE}\ndtypes = []": "group 1: dtypes",
    f'[[group]]\n{SHAPE}\ncolour = "red"': "group 1: key: got colour",
    f"budget = 3\n[[group]]\n{SHAPE}": "key: got budget",
    f"trials = 0\n[[group]]\n{SHAPE}": "trials: got 0",
    f"trials = true\n[[group]]\n{SHAPE}": "trials: got True",
    f"trials = 1.5\n[[group]]\n{SHAPE}": "trials: got 1.5",
    "trials = 1\ngroup = = 2\n": "line 2",
    f"[[group]]\n{SHAPE}\n{SHAPE}\ntrials = 2\n": "line 3",
    "trials = 1\n[[group": "end of document",
    "a = " + "[" * 5000: "got",
    "#" * (2**20 + 1): "more than 1 MiB",
}


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:40])
def test_what_is_wrong_is_told_with_its_line_or_key(tmp_path: Path, text: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match="got") as caught:
        find_profile(path, "cpu")
    said = str(caught.value).replace("'", "")
    assert BAD[text] in said
    assert path in said
    assert "supported" in said
    assert "\n" not in said
    assert len(said) < 1000


@given(st.binary(max_size=60))
def test_no_content_is_more_than_a_usage_error(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.raises(UsageError):
        find_profile(written(Path(folder), content), "cpu")


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = _run(list(arguments))
    return code, capsys.readouterr().err


@pytest.mark.parametrize("name", ["none.toml", "folder.toml", "a\0b.toml", "x" * 300 + ".toml"])
def test_a_file_that_cannot_be_read_is_exit_code_2_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.toml").mkdir()
    db = tmp_path / "autofa.db"
    path = str(tmp_path / name)
    code, told = command(capsys, "tune", "--gpu-profile", path, "--device", "cpu", "--db", str(db))
    assert code == 2
    assert "readable file" in told
    assert not db.exists()


def test_a_bad_file_is_exit_code_2_before_any_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    db = tmp_path / "autofa.db"
    path = written(tmp_path, "[[group]]\nshapes = 1")
    code, told = command(capsys, "tune", "--gpu-profile", path, "--device", "cpu", "--db", str(db))
    assert code == 2
    assert "group 1: shapes" in told
    assert not db.exists()
