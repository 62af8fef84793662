"""What the event loop sends of a reply: pieces, of which short ones are joined."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from attend.serving.request_type import ATTEND
from attend.serving.requests import Request
from attend.serving.service import open_service
from attend.spec import LayerSpec
from attend.wire.codec import MANY_PIECES, PIECE_BYTES, joined
from support.scheduler import run

SIZES = st.lists(st.sampled_from([0, 1, 7, 1000, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]), max_size=60)


@given(sizes=SIZES)
def test_short_pieces_are_joined_and_long_ones_are_not_copied(sizes: list[int]) -> None:
    pieces: list[Any] = [memoryview(bytes([i]) * size) for i, size in enumerate(sizes)]
    found = joined(pieces)
    assert b"".join(found) == b"".join(pieces)
    if len(pieces) >= MANY_PIECES:
        assert len(found) <= 2 * sum(sizes) / PIECE_BYTES + 1
        assert all(piece in found for piece in pieces if len(piece) > PIECE_BYTES)
        assert all(len(piece) <= PIECE_BYTES or any(piece is own for own in pieces) for piece in found)


def test_rule_12_a_reply_of_many_tensors_has_few_pieces() -> None:
    """The event loop sends each piece by itself."""

    async def test() -> None:
        service = open_service("cpu")
        await service.start({"default": LayerSpec(d_model=6, num_heads=2)})
        count = 700
        body = {"query": [[0.5] * 6] * count, "query_lengths": [1] * count, "outputs": ["attention_weights"]}
        _, pieces = await service.engine.answer(Request(json.dumps(body).encode()), ATTEND)
        service.close()
        text = b"".join(pieces)
        assert json.loads(text)["attention_weights"] == {str(i): [[[1.0]]] * 2 for i in range(count)}
        assert len(pieces) <= 2 * len(text) / PIECE_BYTES + 1

    run(test())
