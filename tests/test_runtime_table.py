"""Keys, the table, and the callback that fills it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_variants import require_runtime

from autofa.problem import DTYPES, MASKS, bucket_of, nearest_power_of_two
from autofa.runtime import extension
from autofa.runtime.abi import FLAG_DETERMINISTIC, FLAG_FAST, LaunchKey
from autofa.runtime.tensors import problem_of


@pytest.fixture(autouse=True)
def clean_table() -> Iterator[None]:
    require_runtime()
    extension.table_clear()
    yield
    extension.set_miss(None)
    extension.set_flags(0)
    extension.table_clear()


def fwd(*arguments: object, **options: object) -> torch.Tensor:
    return torch.ops.autofa.fwd.default(*arguments, **options)


def key_of_call(*arguments: object, **options: object) -> LaunchKey:
    """The key under which the operator looks a call up."""
    seen: list[LaunchKey] = []

    def callback(key: LaunchKey) -> int:
        seen.append(key)
        return -1

    extension.set_miss(callback)
    fwd(*arguments, **options)
    assert len(seen) == 1
    return seen[0]


@settings(deadline=None)
@given(st.one_of(st.integers(0, 1 << 20), st.integers(0, (1 << 62) - 1)))
def test_the_bucket_has_a_twin(n: int) -> None:
    assert extension.bucket(n) == nearest_power_of_two(n)


@settings(deadline=None)
@given(st.integers(0, 30), st.integers(-2, 2))
def test_the_twins_agree_where_buckets_meet(power: int, offset: int) -> None:
    edge = int(2 ** (power + 0.5)) + offset
    assert extension.bucket(edge) == nearest_power_of_two(edge)


sizes = st.sampled_from((1, 2, 3, 5, 6, 7, 11, 12, 23, 33))


@settings(deadline=None)
@given(
    batch=sizes,
    heads=st.sampled_from(((1, 1), (2, 1), (3, 3), (6, 2), (12, 3))),
    lengths=st.tuples(sizes, sizes),
    head_dims=st.tuples(st.sampled_from((1, 8, 40)), st.sampled_from((1, 8, 24))),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
    mask=st.sampled_from(MASKS),
)
def test_a_key_is_the_bucket_of_the_problem(
    batch: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    mask: str,
) -> None:
    extension.table_clear()
    q = torch.zeros(batch, heads[0], lengths[0], head_dims[0], dtype=dtype)
    k = torch.zeros(batch, heads[1], lengths[1], head_dims[0], dtype=dtype)
    v = torch.zeros(batch, heads[1], lengths[1], head_dims[1], dtype=dtype)
    explicit = {
        "bool": torch.ones(lengths, dtype=torch.bool),
        "additive": torch.zeros(lengths, dtype=dtype),
    }.get(mask)
    causal, lower_right = mask.startswith("causal"), mask == "causal_lower_right"
    key = key_of_call(q, k, v, explicit, causal, None, True, lower_right)
    bucket = bucket_of(problem_of(q, k, v, explicit, causal, True, lower_right=lower_right))
    assert (DTYPES[key.dtype], MASKS[key.mask]) == (bucket.dtype, bucket.mask)
    assert (key.batch, key.heads_kv) == (bucket.batch, bucket.heads_kv)
    assert key.heads_kv * key.group == bucket.heads_q
    assert (key.seqlen_q, key.seqlen_k) == (bucket.seqlen_q, bucket.seqlen_k)
    assert (key.head_dim, key.head_dim_v) == (bucket.head_dim, bucket.head_dim_v)


def test_the_rest_of_a_key() -> None:
    q = torch.zeros(2, 4, 6, 16)
    key = key_of_call(q, q, q)
    assert (key.device_type, key.device_index) == (0, torch.get_num_threads())
    assert (key.aligned, key.wide, key.graph, key.flags) == (1, 0, 0, 0)
    # Keys whose rows or base are off the 16 bytes, in any of the three.
    odd_row = torch.zeros(2, 4, 6, 17)[..., :16]
    odd_base = torch.zeros(2 * 4 * 6 * 16 + 1)[1:].view(2, 4, 6, 16)
    for odd in (odd_row, odd_base):
        for at in range(3):
            tensors = [q, q, q]
            tensors[at] = odd
            assert key_of_call(*tensors).aligned == 0
    # The stride of a dim of size 1 is never used.
    assert key_of_call(*[torch.zeros(17).as_strided((1, 1, 1, 16), (3, 5, 7, 1))] * 3).aligned == 1
    extension.set_flags(FLAG_DETERMINISTIC | FLAG_FAST)
    assert key_of_call(q, q, q).flags == 3
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert key_of_call(q, q, q).device_index == 1
    finally:
        torch.set_num_threads(threads)


def test_offsets_beyond_32_bits_are_told() -> None:
    # Pages that are never touched cost no memory; one row lies 2^31 elements away.
    storage = torch.empty((1 << 31) + 32, dtype=torch.float16)
    far = storage.as_strided((1, 1, 2, 16), (1, 1, 1 << 31, 1))
    far.zero_()
    near = torch.zeros(1, 1, 2, 16, dtype=torch.float16)
    assert key_of_call(near, far, near).wide == 1


def test_the_table_keeps_what_it_is_told() -> None:
    key = LaunchKey(dtype=1, seqlen_q=64)
    other = LaunchKey(dtype=1, seqlen_q=128)
    flash = extension.add_vendor("torch.flash")
    assert extension.table_get(key) == -1
    extension.table_set(key, flash)
    assert extension.table_get(key) == flash
    assert extension.table_get(other) == -1
    extension.table_set(key, 0)
    assert extension.table_get(key) == 0
    extension.table_set(key, -5)
    assert extension.table_get(key) == -1
    extension.table_set(key, 12345)  # no such kernel: not believed
    assert extension.table_get(key) == -1
    extension.table_set(key, flash)
    extension.table_clear()
    assert extension.table_get(key) == -1


def test_many_keys() -> None:
    keys = [LaunchKey(head_dim=i % 100, seqlen_q=i) for i in range(20_000)]
    flash = extension.add_vendor("torch.flash")
    for i, key in enumerate(keys):
        extension.table_set(key, flash * (i % 2))
    assert [extension.table_get(key) for key in keys] == [flash * (i % 2) for i in range(20_000)]


def test_a_miss_is_asked_once_per_key_and_remembered() -> None:
    asked: list[tuple[int, ...]] = []
    flash = extension.add_vendor("torch.flash")

    def callback(key: LaunchKey) -> int:
        asked.append(key.as_tuple())
        return flash

    extension.set_miss(callback)
    q = torch.randn(1, 2, 5, 8)
    for _ in range(3):
        fwd(q, q, q)
    fwd(q, q, q, None, True)
    assert len(asked) == len(set(asked)) == 2
    assert extension.table_get(LaunchKey(*asked[0])) == flash


@pytest.mark.parametrize("answer", [-1, 54321])
def test_an_answer_that_is_none_is_not_stored(answer: int) -> None:
    asked = []

    def callback(key: LaunchKey) -> int:
        asked.append(key)
        return answer

    extension.set_miss(callback)
    q = torch.randn(1, 2, 5, 8)
    for _ in range(2):
        torch.testing.assert_close(
            fwd(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q)
        )
    assert len(asked) == 2


def test_a_callback_that_raises_costs_nothing_but_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def callback(key: LaunchKey) -> int:
        raise ValueError("broken")

    extension.set_miss(callback)
    q = torch.randn(1, 2, 5, 8)
    with caplog.at_level(logging.ERROR, "autofa"):
        torch.testing.assert_close(
            fwd(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q)
        )
    assert "broken" in caplog.text


def test_an_entry_set_while_the_callback_runs_wins() -> None:
    flash = extension.add_vendor("torch.flash")

    def callback(key: LaunchKey) -> int:
        extension.table_set(key, flash)  # what a background build does
        return 0

    extension.set_miss(callback)
    q = torch.randn(1, 2, 5, 8)
    fwd(q, q, q)
    seen = []
    extension.set_miss(lambda key: seen.append(key) or -1)
    fwd(q, q, q)
    assert not seen


def test_callbacks_outlive_their_replacement() -> None:
    q = torch.randn(1, 2, 5, 8)
    extension.set_miss(lambda key: -1)
    extension.set_miss(None)
    gc.collect()
    fwd(q, q, q)


def test_threads_that_miss_together() -> None:
    flash = extension.add_vendor("torch.flash")
    barrier = threading.Barrier(8)
    inside = threading.Barrier(8, timeout=30)
    failures: list[str] = []

    def callback(key: LaunchKey) -> int:
        if key.head_dim == 16:
            inside.wait()  # all eight are in the callback at once: no lock is held around it
        return flash

    extension.set_miss(callback)
    inputs = [torch.randn(1, 2, 8, 16) for _ in range(8)]

    def work(i: int) -> None:
        barrier.wait()
        for n in range(200):
            q = inputs[i] if n == 0 else torch.randn(1, 1 + n % 5, 3 + (i * n) % 40, 8)
            expected = torch.nn.functional.scaled_dot_product_attention(q, q, q)
            if not torch.allclose(fwd(q, q, q), expected, atol=1e-5):
                failures.append(f"thread {i}, call {n}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
