"""What does `attend check` say of right implementations in which one place is changed?

    python benchmarks/check/mutants.py [--sample 100] [--seed 1] [--only llama] [--record FILE]

`mutations.py` changes one place of an implementation in `implementations/`. Whether that changes a number is decided by `oracle.py`, in
plain loops, for up to 513 keys and all modes of `forms.py`; nothing of the check takes part. Verdicts:

    raises       the mutant raises in its first calls, and is left out
    equal        no number changes: the check should agree
    found        a number changes, and the check disagrees, with a name or without
    refused      a number changes, and the check asks or cannot call it
    missed       a number changes, and the check agrees (what it says it has not tried is printed)
"""

import argparse
import json
import os
import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

from forms import FORMS, Form, is_right
from judging import FOLDER, check
from mutations import Mutation, mutations

SECONDS = 240  # for one comparison with the oracle; mutants may loop for ever


def sources() -> list[tuple[Form, Mutation]]:
    found = []
    for form in FORMS:
        if find_spec(form.needs) is not None:
            found += [(form, mutation) for mutation in mutations((FOLDER / "implementations" / form.file).read_text())]
    return found


def decided(form: Form, source: str) -> str:
    """equal, different, raises or slow, by the oracle, in a fork."""
    here, there = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=_decide, args=(there, form, source))
    child.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(SECONDS) else "slow"
    except EOFError:
        return "raises"
    finally:
        child.kill()
        child.join()


def _decide(connection: Connection, form: Form, source: str) -> None:
    try:
        connection.send("equal" if is_right(form, source) else "different")
    except Exception:  # what is planted may raise anything
        connection.send("raises")


def judged(form: Form, mutation: Mutation) -> dict[str, str]:
    """The row of a mutant: what the oracle decides and what the check says."""
    truth = decided(form, mutation.source)
    row = {"file": form.file, "planted": str(mutation), "truth": truth, "said": "", "name": "", "text": ""}
    if truth in ("raises", "slow"):
        return row
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / form.file
        file.write_text(mutation.source)
        verdict = check(f"{file}:{form.name}", form.spec, form.options)
    names = " | ".join(" and ".join(names) for names in verdict.names)
    return row | {"said": verdict.outcome, "name": names, "text": verdict.text.partition(" error ")[0][:400]}


def outcome(row: dict[str, str]) -> str:
    if row["truth"] in ("raises", "slow"):
        return row["truth"]
    if row["truth"] == "equal":
        return {"agrees": "equal, agrees", "disagrees": "equal, ACCUSED"}.get(row["said"], "equal, refused")
    if row["said"] == "disagrees":
        return "found with a name" if row["name"] else "found without a name"
    return "MISSED" if row["said"] == "agrees" else "refused"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=100, help="so many mutants, drawn by the seed")
    parser.add_argument("--only", default="", help="part of the name of an implementation")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="a file for the rows in JSON")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch  # once, before the forks

    import attend.check  # noqa: F401

    torch.set_num_threads(1)
    chosen = [one for one in sources() if arguments.only in one[0].file]
    drawn = random.Random(arguments.seed).sample(chosen, min(arguments.sample, len(chosen)))
    with ThreadPoolExecutor(arguments.processes) as pool:
        rows = []
        for row in pool.map(lambda one: judged(*one), drawn):
            rows.append(row)
            if arguments.record:
                arguments.record.write_text("\n".join(map(json.dumps, rows)))
            if outcome(row) in ("MISSED", "equal, ACCUSED"):
                print(outcome(row), row["file"], row["planted"], row["name"] or row["text"], sep=" | ", flush=True)
    for name, number in sorted(Counter(map(outcome, rows)).items()):
        print(f"{number:5} {name}")
    print(f"{len(rows):5} of {len(chosen)} mutants")


if __name__ == "__main__":
    main()
