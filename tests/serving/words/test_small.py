"""The small model: its inputs and weights are those of the model that was trained, and its heads do what it says of them."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows

from attend.attention.reference.forward import attend
from attend.client import Client
from attend.serving.words.hashed import hash_of
from attend.serving.words.sentence import InvalidText
from attend.serving.words.small import FILE, SmallModel

SENTENCE = "The cat saw Zoltan, and Zoltan saw the cat"
TOKENS = ["<s>", "the", "cat", "saw", "zoltan", ",", "and", "zoltan", "saw", "the", "cat"]
MODEL = SmallModel()


def torch_layers(ids: list[int], without: tuple[int, int] | None = None) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """(input, attention weights) of each layer, and the log-probabilities of the next token, by torch; without a head of a layer."""
    from safetensors.torch import load_file

    tensors = load_file(str(FILE))
    x = tensors["tokens.weight"][ids]
    angles = torch.arange(len(ids))[:, None] * 10000.0 ** (-torch.arange(0, 32, 2) / 32)

    def heads(part: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        return F.linear(inputs, part[f"{name}.weight"], part[f"{name}.bias"]).unflatten(1, (4, 32)).transpose(0, 1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

    found = []
    for i in range(2):
        part = {name.removeprefix(f"layers.{i}."): tensor for name, tensor in tensors.items() if name.startswith(f"layers.{i}.")}
        inputs = F.layer_norm(x, x.shape[-1:], part["norm.weight"], part["norm.bias"])
        query, key, value = rotated(heads(part, "query")), rotated(heads(part, "key")), heads(part, "value")
        blocked = torch.ones(len(ids), len(ids)).triu(1).bool()
        weights = (query @ key.transpose(1, 2) / query.shape[-1] ** 0.5).masked_fill(blocked, -torch.inf).softmax(-1)
        outputs = weights @ value
        if without is not None and without[0] == i:
            outputs[without[1]] = 0
        x = x + F.linear(outputs.transpose(0, 1).flatten(1), part["output.weight"], part["output.bias"])
        found.append((inputs, weights))
    x = F.layer_norm(x, x.shape[-1:], tensors["norm.weight"], tensors["norm.bias"])
    return found, (x[-1] @ tensors["unembed.weight"].T).log_softmax(-1)


def known_words() -> list[str]:
    import json

    from safetensors import safe_open

    with safe_open(str(FILE), framework="numpy") as file:
        words: list[str] = json.loads(file.metadata()["words"])
        return words


def ids_of(words: list[str]) -> list[int]:
    """Of TOKENS, by hand."""
    stand_in = len(words) + hash_of("zoltan") % 128
    return [words.index(token) if token in words else stand_in for token in TOKENS]


@pytest.mark.parametrize("layer", [0, 1])
def test_inputs_and_weights_are_those_of_the_trained_model(layer: int) -> None:
    read = MODEL.read(SENTENCE, layer)
    words = known_words()
    assert [token.lower() for token in read.tokens] == TOKENS
    expected, weights = torch_layers(ids_of(words))[0][layer]
    assert '"Zoltan"' in read.note
    np.testing.assert_allclose(read.vectors, expected.numpy(), rtol=0, atol=1e-5)
    ours = attend(read.spec, read.weights, query=read.vectors, **read.options).attention_weights
    np.testing.assert_allclose(ours, weights.numpy(), rtol=0, atol=1e-5)


def test_effects_are_the_changes_of_the_answer_without_each_head() -> None:
    words = known_words()
    _, plain = torch_layers(ids_of(words))
    answer = int(plain.argmax())
    expected = [[float(torch_layers(ids_of(words), (layer, head))[1][answer] - plain[answer]) for head in range(4)] for layer in range(2)]
    found = MODEL.effects(SENTENCE)
    assert found.answer == words[answer] and found.probability == pytest.approx(plain[answer].exp().item(), rel=1e-4)
    np.testing.assert_allclose(found.change, expected, rtol=0, atol=1e-4)
    assert found.change.std() > 0.1  # so that another head's change would show


def test_its_heads_are_told_by_the_metrics_of_the_service(client: Client) -> None:
    """A previous-token head, a duplicate-token head and an induction head, over the wire, on words that it was not trained on."""
    text = "zebra quill ochre flint maple tango " * 4
    metrics = {"previous_token_score": "token before", "duplicate_token_score": "duplicate-token", "induction_score": "induction"}
    named = set()
    for layer in (0, 1):
        words = client.words(text, layer=f"small-layer-{layer}")
        assert words.meaningful and len(words.heads) == 4
        found: Any = client.analysis(**words.request, metrics=list(metrics))
        for head, learned in enumerate(words.heads):
            for metric, name in metrics.items():
                if name in learned:
                    assert found[metric][head] > 0.4, (layer, head, learned)
                    named.add(name)
    assert named == set(metrics.values())


def test_texts_that_are_empty_or_too_long_are_refused() -> None:
    with pytest.raises(InvalidText, match="at least one word"):
        MODEL.read(" ", 0)
    with pytest.raises(InvalidText, match=r"at most 63 words, so leave some out, .*\(attend capture\), got 64"):
        MODEL.read("cat " * 64, 0)
    with pytest.raises(ValueError, match="0 to 1, got 2"):
        MODEL.read("cat", 2)
