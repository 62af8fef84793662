"""Trains the small model that `attend demo`, the page and /words begin with, and writes its weights: minutes on two cores.

    python docs/train_small_model.py [FILE]

It is a decoder of two layers without feed-forward parts: x + attention(norm(x)), twice, then the logits norm(x) Uᵀ of the next token. It
learns from three kinds of sequences, which are made on the spot. All numbers are drawn from one seed.

    repeated    words in random order, over and over: only an induction head predicts them, with a previous-token head before it
    marked      words, each followed by `new` or `again`: only a head that finds duplicates tells the two apart
    sentences   simple ones about people, animals and things, so that typed words are known

Prints the loss of each kind on sequences that it was not trained on, beside that of the best guess without attention, and what the heads do
by the service's own metrics.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  # the name everyone knows
from safetensors.torch import save_file
from torch import Tensor, nn

from attend.cli.clients import in_process
from attend.cli.head_roles import ROLES, SEVERAL
from attend.settings import Settings

SEED = 5
LENGTH, BATCH = 64, 32
WIDTH, HEADS, HEAD_DIM, LAYERS = 64, 4, 32, 2
STAND_INS = 128  # tokens for words that the model does not know
EPSILON = 1e-5  # of the norms
THETA = 10000.0  # of the rotary embedding
FILE = Path(__file__).parent.parent / "service" / "attend" / "serving" / "words" / "small.safetensors"
LEAST_SHARE = 0.4  # of a head's weight, for a role


def words(text: str) -> list[str]:
    return text.split()


PEOPLE = words("anna ben clara david emma john maria mary max peter sara tom")
PERSONS = words("baby boy child doctor farmer friend girl king man mother queen teacher woman")
ANIMALS = words("bear bird cat cow dog fish fox frog horse lion mouse rabbit sheep wolf")
THINGS = words("apple ball book box bread cake car chair coat cup door flower hat key letter picture shoe stone suitcase table trophy")
PLACES = words("bed bridge city field forest garden house kitchen lake market mat park river road room school sea street tree window")
ADJECTIVES = words("angry big clean cold green happy heavy hungry kind lazy little old quick quiet red sad small tall tired white young")
TAKING = words("broke brought carried dropped found gave lost opened sold threw took wanted")
SEEING = words("chased heard helped liked loved met saw watched")
GOING = words("came jumped ran sat slept stood walked went")
PREPOSITIONS = words("at behind by from in into near on over to under with")
OTHERS = words("""
    a again and because but does did fit he her his i is it its new not of said she so that the their then they this too was were when
    you
""")
MARKS = [".", ",", "!", "?", "'", '"']
WORDS = sorted({*PEOPLE, *PERSONS, *ANIMALS, *THINGS, *PLACES, *ADJECTIVES, *TAKING, *SEEING, *GOING, *PREPOSITIONS, *OTHERS}) + MARKS
VOCABULARY = ["<s>", *WORDS]  # then the stand-ins
TOKENS = {word: i for i, word in enumerate(VOCABULARY)}
SIZE = len(VOCABULARY) + STAND_INS


def rotated(x: Tensor) -> Tensor:
    """RoPE on halves of the heads [b, h, n, HEAD_DIM]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(x.shape[2])[:, None] * frequencies
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


class Layer(nn.Module):
    """x + attention(norm(x)), causal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.query, self.key, self.value = (nn.Linear(WIDTH, HEADS * HEAD_DIM) for _ in range(3))
        self.output = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        for part in (self.query, self.key):  # so that heads begin with preferences for distances, of which training keeps useful ones
            nn.init.normal_(part.bias)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.norm(x)
        query, key, value = (m(inputs).unflatten(2, (HEADS, HEAD_DIM)).transpose(1, 2) for m in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        return x + self.output(heads.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SIZE, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH, EPSILON)
        self.unembed = nn.Linear(WIDTH, SIZE, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.5)

    def forward(self, tokens: Tensor, depth: int = LAYERS) -> Tensor:
        """Logits [b, n, SIZE] of the tokens after each of [b, n], with the first `depth` layers."""
        x = self.tokens(tokens)
        for layer in self.layers[:depth]:
            x = layer(x)
        logits: Tensor = self.unembed(self.norm(x))
        return logits


class Sequences:
    """Makes sequences of LENGTH tokens, and says which of them can be predicted: those that count in the loss."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def batch(self, kinds: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokens [b, LENGTH] and whether each counts, one sequence of each kind."""
        return self._joined([getattr(self, kind)() for kind in kinds])

    def long_repeats(self, count: int) -> Tensor:
        """Repeated sequences [count, LENGTH] whose words return after many others."""
        return self._joined([self.repeated(shortest=12) for _ in range(count)])[0]

    def _joined(self, made: list[tuple[list[int], list[bool]]]) -> tuple[Tensor, Tensor]:
        tokens, counts = (np.array([each[i][: LENGTH - 1] for each in made]) for i in (0, 1))
        start = ((0, 0), (1, 0))
        return torch.from_numpy(np.pad(tokens, start)), torch.from_numpy(np.pad(counts, start))

    def repeated(self, shortest: int = 2) -> tuple[list[int], list[bool]]:
        period = round(
            math.exp(self.rng.uniform(math.log(shortest), math.log(28)))
        )  # from short ones, heads learn to look back by a distance
        words = self.rng.integers(1, SIZE, period).tolist()
        return (words * LENGTH)[:LENGTH], [i >= period for i in range(LENGTH)]

    def marked(self) -> tuple[list[int], list[bool]]:
        pool = self.rng.integers(1, SIZE, int(self.rng.integers(6, 24)))
        tokens: list[int] = []
        seen: set[int] = set()
        while len(tokens) < LENGTH:
            word = int(self.rng.choice(pool))
            tokens += [word, TOKENS["again" if word in seen else "new"]]
            seen.add(word)
        return tokens, [i % 2 == 1 for i in range(len(tokens))]

    def sentences(self) -> tuple[list[int], list[bool]]:
        words: list[str] = []
        cast = [self._someone() for _ in range(2)] + [f"the {self._one(ANIMALS)}", f"the {self._one(THINGS)}"]
        while len(words) < LENGTH:
            words += self._sentence(cast).split()
        return [TOKENS[word] for word in words[:LENGTH]], [True] * LENGTH

    def _sentence(self, cast: list[str]) -> str:
        who, whom = self.rng.permutation(np.array(cast[:3], object))[:2]
        thing, place = cast[3], f"the {self._one(PLACES)}"
        how, at = self._one(ADJECTIVES), self._one(PREPOSITIONS)
        forms = (
            f"{who} {self._one(SEEING)} {whom} {at} {place} .",
            f"{who} {self._one(GOING)} {at} {place} because {self._pronoun(who)} was {how} .",
            f"{who} and {whom} {self._one(GOING)} {at} {place} , and {whom} {self._one(TAKING)} {thing} to {who} .",
            f"{who} {self._one(TAKING)} {thing} , but {thing} was too {how} .",
            f"{who} was {how} , so {who} {self._one(SEEING)} {whom} again .",
            f"{thing} does not fit into {place} because it is too {how} .",
            f"when {who} {self._one(SEEING)} {whom} , {whom} {self._one(GOING)} {at} {place} .",
        )
        return self._one(forms)

    def _pronoun(self, who: str) -> str:
        return "it" if who.partition(" ")[2] in ANIMALS else self._one(("he", "she"))

    def _someone(self) -> str:
        return self._one(PEOPLE) if self.rng.random() < 0.5 else f"the {self._one(PERSONS)}"

    def _one(self, options: list[str] | tuple[str, ...]) -> str:
        return str(options[self.rng.integers(len(options))])


KINDS = ("repeated", "marked", "sentences")
STAGES = (  # steps, layers, kinds. The first layer alone must find duplicates; of both, the second could do that too
    (1000, 1, ["marked", "marked", "marked", "sentences"]),
    (2500, 2, ["repeated", "repeated", "marked", "sentences"]),
)


def loss_of(model: Model, tokens: Tensor, counts: Tensor, depth: int = LAYERS) -> Tensor:
    """Mean cross-entropy, in nats, of the tokens that count."""
    logits = model(tokens[:, :-1], depth)
    return F.cross_entropy(logits[counts[:, 1:]], tokens[:, 1:][counts[:, 1:]])


def train() -> Model:
    torch.manual_seed(SEED)
    model, sequences = Model(), Sequences(SEED)
    for steps, depth, kinds in STAGES:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 3e-3 * min((step + 1) / 100, 0.02 + math.cos(math.pi / 2 * step / steps))
            loss = loss_of(model, *sequences.batch(kinds * (BATCH // len(kinds))), depth)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 250 == 0 or step == steps - 1:
                print(f"{depth} layers, step {step:5}: {loss.item():.3f}", flush=True)
    return model.eval()


@torch.no_grad()
def report(model: Model) -> dict[str, float]:
    """The loss of each kind."""
    found = {}
    for kind in KINDS:
        found[kind] = round(loss_of(model, *Sequences(SEED + 1).batch([kind] * 256)).item(), 3)
        print(f"{kind}: {found[kind]:.3f} nats a token")
    return found


@torch.no_grad()
def roles(model: Model) -> list[list[str]]:
    """What each head of each layer does with repeated words, by the metrics of POST /attend/analysis."""
    tokens = Sequences(SEED + 2).long_repeats(64)
    x = model.tokens(tokens)
    found = []
    spec = {"d_model": WIDTH, "num_heads": HEADS, "head_dim": HEAD_DIM, "rope": {"theta": THETA}}
    with in_process(Settings()) as client:
        for i, layer in enumerate(model.layers):
            weights = {name: tensor.numpy() for name, tensor in layer.state_dict().items() if not name.startswith("norm")}
            client.put_layer("small", spec, weights)
            words = {"query": [[str(token) for token in row] for row in tokens.tolist()]}
            metrics = client.analysis(layer.norm(x).numpy(), layer="small", causal=True, tokens=words, metrics=list(ROLES))
            shares = {name: np.nanmean(metrics[name], axis=0) for name in ROLES}
            print(f"layer {i}:", {name: share.round(2).tolist() for name, share in shares.items()})
            best = [max(ROLES, key=lambda name: float(shares[name][head])) for head in range(HEADS)]
            found.append([ROLES[name] if shares[name][head] >= LEAST_SHARE else SEVERAL for head, name in enumerate(best)])
            x = layer(x)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    given = parser.parse_args()
    model = train()
    losses = report(model)
    weights = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, given.file, {"words": json.dumps(VOCABULARY), "heads": json.dumps(roles(model)), "losses": json.dumps(losses)})
    print(f"{given.file}: {given.file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
