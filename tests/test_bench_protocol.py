"""Messages in pieces, broken messages, and the shared scoreboard."""

from __future__ import annotations

import os
import pickle
import struct

import pytest

from autofa.bench.protocol import Decoder, Hello, Outcome, Plan, Scoreboard, encode


def test_a_message_arrives_in_any_pieces() -> None:
    message = Hello("cpu", 2, 1 << 30)
    data = encode(message)
    decoder = Decoder()
    assert [decoder.feed(data[i : i + 1]) for i in range(len(data))] == [None] * (len(data) - 1) + [
        message
    ]
    assert decoder.feed(data[:5]) is None
    assert decoder.feed(data[5:]) == message


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 4) + b"abcd",
        struct.pack("<Q", 5) + pickle.dumps(7)[:5],
        (lambda body: struct.pack("<Q", len(body)) + body)(pickle.dumps("text")),
    ],
    ids=["length", "bytes", "truncated", "type"],
)
def test_what_a_corrupted_worker_writes_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="message"):
        Decoder().feed(data)


def test_the_scoreboard_is_shared() -> None:
    board = Scoreboard()
    other = Scoreboard(os.dup(board.descriptor))
    other.start(3)
    assert board.read() == (1, 3)
    other.stop()
    assert board.read() == (2, -1)
    board.close()
    other.close()


def test_defaults_of_results() -> None:
    assert not Outcome("x", "timeout").ok
    assert Plan().mode == "eager"
