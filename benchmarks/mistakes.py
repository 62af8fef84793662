"""What does `attend check` say of implementations in which one place is changed?

    python benchmarks/mistakes.py [--share learned|held-out] [--pairs 100] [--only llama] [--list unnamed,wrong,missed] [--record FILE]

Mistakes are planted in the correct implementations of `implementations/` by changing one place of their source (`mutations.py`), pairs by
changing two, and each mutant is checked as its author would check it. The verdicts:

    same      it agrees with the reference with four seeds. The check alone says so: it may have missed a change
    missed    it agrees with the first seed and disagrees with another
    raised    it raises, is refused, or returns another shape
    named     the check names one or two mistakes, and names the same with another seed, for other weights and inputs. Whether that is
              what was planted is not compared
    wrong     with another seed it names another mistake, or none
    unnamed   it is found wrong without a name

Without the package jax, `jax_function.py` is left out.

A third of the mutants, drawn by the seed, is held out: no mistake was added to the check because of them. The same program makes them. With
--record, verdicts are kept in a file, and a run that was stopped goes on where it was.
"""

import argparse
import hashlib
import io
import json
import random
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mutations import mutations

FOLDER = Path(__file__).parent / "implementations"
SECONDS = 240  # for one mutant; planted mistakes may loop for ever


@dataclass(frozen=True, slots=True)
class Implementation:
    """A correct implementation, and how it is checked."""

    file: str
    name: str
    options: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] | None = None
    needs: str = "attend"  # the package without which it is left out


IMPLEMENTATIONS = (
    Implementation("numpy_loops.py", "MultiHeadAttention"),
    Implementation("numpy_einsum.py", "EinsumAttention"),
    Implementation("torch_function.py", "attention", {"framework": "torch", "mask_means": "add"}),
    Implementation("textbook.py", "MultiHeadAttention", {"mask_means": "attend"}),
    Implementation("causal_gpt.py", "CausalSelfAttention", {"causal": True}),
    Implementation(
        "llama.py",
        "Attention",
        {"causal": True},
        {
            "d_model": 24,
            "num_heads": 6,
            "num_kv_heads": 2,
            "head_dim": 8,
            "bias": False,
            "rope": {"theta": 10000.0, "interleaved": False},
            "qk_norm": {"kind": "rms", "eps": 1e-6},
        },
    ),
    Implementation("packed.py", "PackedAttention", {"fused": "q,k,v"}),
    Implementation("half.py", "HalfAttention", {"causal": True, "dtype": "bfloat16"}),
    Implementation("cached.py", "CachedAttention", {"causal": True}),
    Implementation("jax_function.py", "attention", {"framework": "jax"}, needs="jax"),
)


OTHER_SEEDS = (101, 202, 303)


def judge(index: int, planted: tuple[str, ...], source: str) -> dict[str, Any]:
    """The verdict on one mutant, with what was planted and what was named."""
    implementation = IMPLEMENTATIONS[index]
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(SECONDS)
    try:
        verdict, found = _verdict(implementation, source)
    except TooSlow:
        verdict, found = "slow", {"named": set(), "raised": ""}
    finally:
        signal.alarm(0)
    return {
        "file": implementation.file,
        "source": _digest(source),
        "planted": list(planted),
        "verdict": verdict,
        "named": sorted(map(list, found["named"])),
        "raised": found["raised"],
    }


class TooSlow(BaseException):
    """A mutant takes longer than SECONDS."""


def _stop(*_: Any) -> None:
    raise TooSlow


def _verdict(implementation: Implementation, source: str) -> tuple[str, dict[str, Any]]:
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        found = check(implementation, source)
        verdict = "named" if found["named"] else "unnamed"
        if found["raised"]:
            verdict = "raised"
        elif found["agrees"]:
            verdict = "same" if all(check(implementation, source, seed)["agrees"] for seed in OTHER_SEEDS) else "missed"
        elif found["named"] and check(implementation, source, OTHER_SEEDS[0])["named"].isdisjoint(found["named"]):
            verdict = "wrong"
    return verdict, found


def check(implementation: Implementation, source: str, seed: int = 0) -> dict[str, Any]:
    """What `compare` says of this source. `named`: every single mistake or pair that is said to give the numbers."""
    import torch  # as the author of a torch implementation has

    from attend.check import compare
    from attend.spec import LayerSpec

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / implementation.file
        file.write_text(source)
        spec = {} if implementation.spec is None else {"spec": LayerSpec.model_validate(implementation.spec)}
        try:
            comparison = compare(f"{file}:{implementation.name}", seed=seed, **implementation.options, **spec)
        except Exception as error:  # what is planted may prevent anything
            return {"agrees": False, "raised": f"{type(error).__name__}: {error}"[:200], "named": set()}
    first = comparison.first
    raised = str(first)[:200] if first is not None and first.index is None and not first.mistakes else ""
    named = set() if first is None or not first.explanation.mistakes else {first.explanation.mistakes, *first.explanation.equals}
    return {"agrees": comparison.agrees, "raised": raised, "named": named}


def mutants(only: str, share: str, seed: int, pairs: int) -> Iterator[tuple[int, tuple[str, ...], str]]:
    """The index of an implementation, what is planted, and the source: all single mutants of the share, or so many pairs."""
    drawn = random.Random(seed)
    singles = []
    for index, implementation in enumerate(IMPLEMENTATIONS):
        chosen = only in implementation.file and find_spec(implementation.needs) is not None
        for mutation in mutations((FOLDER / implementation.file).read_text()) if chosen else ():
            if (drawn.random() < 1 / 3) == (share == "held-out"):
                singles.append((index, (str(mutation),), mutation.source))
    if not pairs:
        yield from singles
        return
    for index, planted, source in drawn.sample(singles, min(pairs, len(singles))):
        second = drawn.choice([m for m in mutations(source) if str(m) not in planted])
        yield index, (*planted, str(second)), second.source


def _read_record(record: Path | None, chosen: list[tuple[int, tuple[str, ...], str]]) -> dict[str, dict[str, Any]]:
    """Source -> verdict of those mutants that an earlier run has judged."""
    if record is None or not record.exists():
        return {}
    rows = {row["source"]: row for row in map(json.loads, record.read_text().splitlines())}
    return {source: rows[_digest(source)] for _, _, source in chosen if _digest(source) in rows}


def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", choices=["learned", "held-out"], default="learned")
    parser.add_argument("--pairs", type=int, default=0, help="plant two mistakes in so many mutants")
    parser.add_argument("--only", default="", help="part of the name of an implementation")
    parser.add_argument("--list", default="", help="verdicts whose mutants are printed")
    parser.add_argument("--sample", type=float, default=1.0, help="share of the mutants that are checked")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="a file of verdicts; mutants that are in it are not checked again")
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed)
    chosen = [m for m in mutants(arguments.only, arguments.share, arguments.seed, arguments.pairs) if drawn.random() < arguments.sample]
    drawn.shuffle(chosen)
    known = _read_record(arguments.record, chosen)
    rows = list(known.values())
    with ProcessPoolExecutor(arguments.processes) as pool:
        for done in as_completed([pool.submit(judge, *m) for m in chosen if m[2] not in known]):
            rows.append(done.result())
            if arguments.record:
                with arguments.record.open("a") as file:
                    print(json.dumps(rows[-1]), file=file)
            if rows[-1]["verdict"] in arguments.list.split(","):
                print(
                    rows[-1]["verdict"],
                    rows[-1]["file"],
                    *rows[-1]["planted"],
                    *rows[-1]["named"],
                    rows[-1]["raised"],
                    sep=" | ",
                    flush=True,
                )
    counts = Counter((name, row["verdict"]) for row in rows for name in (row["file"], "all"))
    verdicts = ("named", "unnamed", "wrong", "missed", "slow", "raised", "same")
    print(f"{'':<20}", *(f"{verdict:>8}" for verdict in verdicts), "   named of those with numbers")
    for file in dict.fromkeys(name for name, _ in sorted(counts)):
        row = [counts[file, verdict] for verdict in verdicts]
        print(f"{file:<20}", *(f"{n:>8}" for n in row), f"   {row[0] / max(1, sum(row[:5])):.0%}")


if __name__ == "__main__":
    main()
