"""What `attend check` says of one candidate, in a process of its own, and whether that is true."""

import io
import os
import re
import resource
import signal
import tempfile
import time
import traceback
import warnings
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bugs import Bug

FOLDER = Path(__file__).parent
SECONDS = 20  # of processor time, for one check: wall time depends on what else runs
WAIT = 1200  # of wall time


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the check says. `names` are alternatives, each one mistake or several together."""

    outcome: str  # agrees, disagrees, refused (it asks, or cannot call the candidate), failed (the check raises), slow
    text: str
    names: tuple[tuple[str, ...], ...] = ()
    step: str = ""  # the first wrong one, or "FIRST to LAST" of those that one call computes
    seconds: float = 0.0

    @property
    def keys(self) -> int:
        found = re.search(r"up to ([\d,]+) keys", self.text)
        return int(found[1].replace(",", "")) if found else 0


def check(target: str, spec: dict[str, Any] | None = None, options: dict[str, Any] | None = None, seed: int = 0) -> Verdict:
    """The verdict on `target` (my_package:NAME or FILE.py:NAME), from a fork of this process. `seconds` are of processor time."""
    here, there = get_context("fork").Pipe(duplex=False)
    child = get_context("fork").Process(target=_answer, args=(there, target, spec, options or {}, seed))
    child.start()
    there.close()
    try:
        verdict = here.recv() if here.poll(WAIT) else Verdict("slow", f"no verdict after {WAIT} s", seconds=WAIT)
    except EOFError:
        child.join()
        slow = child.exitcode == -signal.SIGXCPU
        verdict = Verdict("slow", f"no verdict after {SECONDS} s", seconds=SECONDS) if slow else Verdict("failed", "the process ended")
    child.kill()
    child.join()
    return verdict


def _answer(connection: Connection, target: str, spec: dict[str, Any] | None, options: dict[str, Any], seed: int) -> None:
    warnings.simplefilter("ignore")
    os.environ.setdefault("COLUMNS", "1000")
    with redirect_stdout(io.StringIO()):
        began = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + SECONDS, -1))
        verdict = _verdict(target, spec, options, seed)
        seconds = time.process_time() - began
    connection.send(replace(verdict, seconds=round(seconds, 1)))
    connection.close()


def _verdict(target: str, spec: dict[str, Any] | None, options: dict[str, Any], seed: int) -> Verdict:
    from attend.check import compare
    from attend.spec import LayerSpec

    try:
        asked = {"spec": LayerSpec.model_validate(spec)} if spec else {}
        comparison = compare(target, seed=seed, **asked, **options)
    except (ValueError, TypeError) as refusal:
        return Verdict("refused", f"{type(refusal).__name__}: {refusal}")
    except Exception:  # what a planted bug may cause
        return Verdict("failed", traceback.format_exc())
    text = " ".join(str(comparison).split())
    if comparison.agrees:
        return Verdict("agrees", text)
    first = comparison.first
    explanation = getattr(first, "explanation", None)
    names = tuple(names for names in (getattr(explanation, "mistakes", ()), *getattr(explanation, "equals", ())) if names)
    hint = getattr(first, "hint", "")
    if not names and hint and "no known mistake" not in hint:
        names = ((hint,),)
    found = re.search(r"first wrong steps?: (\w+)(?: to (\w+))?", text)
    return Verdict("disagrees", text, names, " to ".join(filter(None, found.groups())) if found else "")


def source_of(bug: Bug, fixed: bool) -> str:
    """The file of the bug, or the same with the fix."""
    source = (FOLDER / "wrong" / bug.target.partition(":")[0]).read_text()
    for wrong, right in (bug.fix, *bug.also) if fixed else ():
        if source.count(wrong) != 1:
            raise ValueError(f"{bug.target}: the text to fix is there {source.count(wrong)} times")
        source = source.replace(wrong, right)
    return source


def check_source(bug: Bug, fixed: bool, options: dict[str, Any]) -> Verdict:
    name, _, attribute = bug.target.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(source_of(bug, fixed))
        return check(f"{file}:{attribute}", bug.spec, {**bug.always, **options})


def matches(name: str, rules: tuple[str, ...]) -> bool:
    """Whether all parts of one of the rules are found in a printed name."""
    return any(all(re.search(part.strip(), name, re.IGNORECASE) for part in rule.split(" & ")) for rule in rules)


def judge_name(bug: Bug, verdict: Verdict) -> str:
    """right: one of the alternatives consists of right names alone; effect: of what gives the same numbers; wrong; "": nothing is named."""
    for judgement, rules in (("right", bug.named_by), ("effect", (bug.effect,) if bug.effect else ())):
        if any(all(matches(name, rules) for name in names) for names in verdict.names):
            return judgement
    return "wrong" if verdict.names else ""


# The program's steps in their order.
ORDER = (
    *("project_query", "project_key", "project_value", "norm_query", "norm_key", "rotate_query", "rotate_key"),
    *("visible_causal", "visible_intervals", "visible_segments", "scaled_products", "linear_bias", "softcap", "mask"),
    *("softmax", "sum_exponentials", "weighted_values", "merge", "output"),
)


def judge_step(bug: Bug, verdict: Verdict) -> str:
    """right if the step, or one of those from the first to the last that are named together, is where the bug is."""
    first, _, last = verdict.step.partition(" to ")
    named = [first]
    if first in ORDER and last in ORDER:
        named = ORDER[ORDER.index(first) : ORDER.index(last) + 1]
    if not first:
        return ""
    return "right" if any(re.search(bug.steps, step) for step in named) else "wrong"


def names_untried(bug: Bug, verdict: Verdict) -> bool:
    """Whether a report that agrees says that it has not looked where the bug shows."""
    untried = verdict.text.partition("not tried:")[2].partition("error")[0]
    return bool(bug.untried and re.search(bug.untried, untried, re.IGNORECASE)) or 0 < verdict.keys < bug.shows_from
