"""The examples of docs/heads.md on what heads do to an answer: trains three models of transformers, half a minute each, and studies them.

    python docs/head_effects.py [FOLDER]        prints the numbers of the page, and draws its pictures into FOLDER

    repeats       a Llama of two layers on words in random order, over and over: induction
    givers        a Llama of two layers on "Anna and Ben went to the park . Anna gave the book to", which Ben follows
    translation   a T5 of one layer from English to French, where adjectives follow nouns

All sequences are made on the spot, all numbers are drawn from one seed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf

import attend
from attend.cli.clients import in_process
from attend.client import Client, Run
from attend.settings import Settings
from attend.tensors import Array

SEED, BATCH = 11, 64
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Finn", "Grace", "Hugo", "Ida", "Jack", "Kate", "Leo", "Mary", "Noah", "Olga", "Paul"]
PLACES, THINGS = ["park", "school", "market", "lake"], ["book", "ball", "cup", "key"]
FRENCH = {"the": "le", "a": "un", "sees": "voit", "likes": "aime", "hears": "entend"}
NOUNS = {"cat": "chat", "dog": "chien", "bird": "oiseau", "horse": "cheval", "wolf": "loup", "fish": "poisson"}
ADJECTIVES = {"red": "rouge", "black": "noir", "green": "vert", "young": "jeune", "quick": "rapide", "sad": "triste"}
FRENCH |= NOUNS | ADJECTIVES
PAD, START = 0, 1
Batch = dict[str, torch.Tensor]


class Words:
    """The numbers of words; 0 is padding, 1 a start."""

    def __init__(self, *lists: Any) -> None:
        self.words = ["<pad>", "<s>", *dict.fromkeys(word for words in lists for word in words)]
        self.numbers = {word: number for number, word in enumerate(self.words)}

    def ids(self, texts: list[str]) -> torch.Tensor:
        return torch.tensor([[self.numbers[word] for word in text.split()] for text in texts])


def llama(words: Words) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 4, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = hf.LlamaConfig(vocab_size=len(words.words), **sizes, max_position_embeddings=128, bos_token_id=START, pad_token_id=PAD)
    return hf.LlamaForCausalLM(config)


def train(model: Any, batch: Callable[[np.random.Generator], Batch], steps: int) -> float:
    """The loss of the last batch."""
    rng, optimiser = np.random.default_rng(SEED), torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 3e-3, total_steps=steps)
    model.train()
    for _ in range(steps):
        loss = model(**batch(rng)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval().requires_grad_(False)
    return float(loss.detach())


def table(title: str, numbers: Array) -> None:
    """Prints [layers, heads]."""
    print(title)
    for layer, row in enumerate(numbers):
        print(f"  layer {layer}", *(f"{number:7.2f}" for number in row))


def draw(client: Client, path: Path, weights: Array, rows: list[str], columns: list[str], title: str) -> None:
    """A picture of weights [heads, q, k] that a model had: the `pattern` of a layer without projections."""
    heads = len(weights)
    client.put_layer("drawn", {"d_model": 2 * heads, "num_heads": heads, "projections": False})
    query, key = (np.zeros((len(words), 2 * heads)) for words in (rows, columns))
    figure = {"title": title, "width": 720, "values": False}
    path.write_bytes(client.figure(query, key, layer="drawn", pattern=weights, tokens={"query": rows, "key": columns}, figure=figure))


def repeats(client: Client, folder: Path) -> dict[str, Array]:
    """Induction: what each head does to the log-probability of the word that followed the same word before."""
    words = Words([f"w{i}" for i in range(62)])

    def batch(rng: np.random.Generator, period: int | None = None) -> Batch:
        period = int(rng.integers(5, 20)) if period is None else period
        ids = torch.from_numpy(np.tile(rng.integers(2, 64, (BATCH, period)), 10)[:, :48])
        return {"input_ids": ids, "labels": ids}

    torch.manual_seed(SEED)
    model = llama(words)
    print(f"repeats: loss {train(model, batch, 700):.2f}")
    inputs = batch(np.random.default_rng(SEED + 1), 20)
    inputs = {"input_ids": inputs["input_ids"][:8, :40]}

    def of_repeats(run: Run) -> float:
        """The mean log-probability of the second half."""
        shifted = torch.log_softmax(torch.from_numpy(run.logits[:, 19:-1]), -1)
        return float(shifted.gather(-1, inputs["input_ids"][:, 20:, None]).mean())

    with attend.interventions(model, client) as study:
        effects = study.effects(inputs, of_repeats)
        table("log-probability of a repeated word without each head, less that with it", effects)
        weights = study.run(inputs).attention_weights
        rows = np.arange(20, 40)
        before, after = (np.stack([layer[:, :, rows, rows - n].mean((0, 2)) for layer in weights]) for n in (1, 19))
        table("its weight on the word before", before)
        table("its weight on the word that came next before", after)
        shown = words.ids([" ".join(["w3 w1 w4 w15 w9 w2 w6"] * 2)])
        pattern = study.run({"input_ids": shown}).attention_weights[1][0]
    tokens = [words.words[i] for i in shown[0]]
    draw(client, folder / "effects-repeats.png", pattern, tokens, tokens, "Layer 1: the word that came next before")
    return {"effects": effects, "previous": before, "induction": after}


def givers(client: Client, folder: Path) -> dict[str, Array]:
    """Indirect objects: what each head adds to the difference of the logits of the receiver and the giver."""
    words = Words(NAMES, PLACES, THINGS, ["and", "went", "to", "the", ".", "gave"])

    def sentence(first: str, second: str, giver: str, place: str = "park", thing: str = "book") -> str:
        return f"<s> {first} and {second} went to the {place} . {giver} gave the {thing} to"

    def batch(rng: np.random.Generator) -> Batch:
        texts = []
        for _ in range(BATCH):
            pair = rng.choice(NAMES, 2, replace=False)
            order = rng.permutation(pair)
            texts.append(f"{sentence(order[0], order[1], pair[0], rng.choice(PLACES), rng.choice(THINGS))} {pair[1]}")
        ids = words.ids(texts)
        labels = torch.full_like(ids, -100)
        labels[:, -1] = ids[:, -1]
        return {"input_ids": ids, "labels": labels}

    torch.manual_seed(SEED)
    model = llama(words)
    print(f"givers: loss {train(model, batch, 500):.2f}")
    inputs = {"input_ids": words.ids([sentence("Anna", "Ben", "Anna")])}
    swapped = {"input_ids": words.ids([sentence("Anna", "Ben", "Ben")])}
    anna, ben = (words.numbers[name] for name in ("Anna", "Ben"))

    def difference(run: Run) -> float:
        return float(run.logits[0, -1, ben] - run.logits[0, -1, anna])

    with attend.interventions(model, client) as study:
        plain, donor = study.run(inputs), study.run(swapped)
        print(f"  Ben {plain.probability(ben):.3f}, Anna {plain.probability(anna):.3f}; if Ben gives: Anna {donor.probability(anna):.3f}")
        direct = study.attribution(inputs, ben, anna)
        patched = study.effects(inputs, difference, outputs=donor, queries=[-1])
        table("direct part of each head in logit(Ben) - logit(Anna)", direct)
        table("change of it with the last row of the head from the sentence in which Ben gives", patched)
    tokens = [words.words[i] for i in inputs["input_ids"][0]]
    title = "Layer 0, on the sentence in which Anna gives"
    draw(client, folder / "effects-givers.png", plain.attention_weights[0][0], tokens, tokens, title)
    return {"direct": direct, "patched": patched, "logits": plain.logits[0, -1], "weights": plain.attention_weights[0][0]}


def translation(client: Client, folder: Path) -> dict[str, Any]:
    """Cross-attention: what each of its heads does to a translation, and what follows if all look straight ahead."""
    words = Words(FRENCH, FRENCH.values())

    def phrase(rng: np.random.Generator) -> tuple[list[str], list[str]]:
        article, noun, adjective = (str(rng.choice(list(choices))) for choices in (["the", "a"], NOUNS, ADJECTIVES))
        return [article, adjective, noun], [FRENCH[article], NOUNS[noun], ADJECTIVES[adjective]]

    def pair(rng: np.random.Generator) -> tuple[str, str]:
        (one, un), (two, deux), verb = phrase(rng), phrase(rng), str(rng.choice(["sees", "likes", "hears"]))
        return " ".join([*one, verb, *two]), " ".join([*un, FRENCH[verb], *deux])

    def batch(rng: np.random.Generator) -> Batch:
        english, french = zip(*(pair(rng) for _ in range(BATCH)), strict=True)
        return {"input_ids": words.ids(list(english)), "labels": words.ids(list(french))}

    torch.manual_seed(SEED)
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    config = hf.T5Config(vocab_size=len(words.words), **sizes, decoder_start_token_id=START, pad_token_id=PAD, eos_token_id=PAD)
    model = hf.T5ForConditionalGeneration(config)
    print(f"translation: loss {train(model, batch, 600):.2f}")
    english, french = "the red cat sees a young horse", "le chat rouge voit un cheval jeune"
    inputs = {"input_ids": words.ids([english]), "labels": words.ids([french])}
    with attend.interventions(model, client) as study:
        plain = study.run(inputs)
        cross = [number for number, name in enumerate(study.layers) if "EncDec" in name]
        effects = study.effects(inputs, lambda run: -run.loss)[cross]
        table("log-probability of the translation without each head of cross-attention, less that with it", effects)
        straight = study.run(inputs, *(attend.Change(layer, pattern="diagonal") for layer in cross))
        translated, ahead = (" ".join(words.words[i] for i in run.logits[0].argmax(-1)) for run in (plain, straight))
        print(f"  translated:             {translated}")
        print(f"  looking straight ahead: {ahead}")
    rows = ["<s>", *french.split()[:-1]]
    draw(client, folder / "effects-translation.png", plain.attention_weights[cross[0]][0], rows, english.split(), "Cross-attention")
    return {"effects": effects, "translated": translated, "ahead": ahead}


def main(folder: Path) -> dict[str, Any]:
    with in_process(Settings()) as client:
        return {study.__name__: study(client, folder) for study in (repeats, givers, translation)}


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "heads")
