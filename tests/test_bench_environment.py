"""Provenance and conditions on whatever machine this is."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
import torch

from autofa import __version__
from autofa.bench.environment import conditions, provenance


def test_provenance_of_a_cpu() -> None:
    found = provenance(torch.device("cpu"), "g++ 12.2", '{"load": 1}')
    assert found.autofa == __version__
    assert found.torch == torch.__version__
    assert (found.driver, found.compiler, found.details) == ("", "g++ 12.2", '{"load": 1}')
    made = datetime.fromisoformat(found.created_at)
    assert abs(datetime.now(timezone.utc) - made) < timedelta(minutes=1)


def test_conditions_are_a_json_object() -> None:
    state = json.loads(conditions(torch.device("cpu")))
    assert state["threads"] == torch.get_num_threads()
    assert state["load"] >= 0


@pytest.mark.gpu
def test_conditions_of_a_gpu() -> None:
    torch.zeros(1, device="cuda")
    state = json.loads(conditions(torch.device("cuda", 0)))
    assert state["sm_mhz"] > 0
    assert 0 < state["temperature_c"] < 120
    assert provenance(torch.device("cuda", 0), "").driver
