"""How often is `attend check` right? One row for each candidate, also the bad ones.

    python benchmarks/check/measure.py [--only tiles] [--part wrong,right] [--processes 2]

The wrong ones are public bug reports, re-created by somebody who had not read the check (`bugs.py`); with its fix, each of them is right.
The other right ones are implementations of other libraries (`right.py`), those whose package is installed.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bugs import BUGS, Bug
from judging import Verdict, check, check_source, judge_name, judge_step, names_untried
from right import RIGHT, Right


@dataclass(frozen=True, slots=True)
class Row:
    """A candidate, what was said, and what is true."""

    candidate: str
    link: str
    kind: str
    outcome: str
    name: str = ""
    step: str = ""
    shown_step: str = ""
    seconds: float = 0.0
    said: str = ""
    true: str = ""


def of_bug(bug: Bug, options: dict[str, Any]) -> Iterator[Row]:
    """A row of the fixed candidate and one of the bug. Both get the author's conventions only if the fixed one does not agree without."""
    fixed = check_source(bug, fixed=True, options=options)
    outcome = right_outcome(fixed)
    if fixed.outcome != "agrees" and bug.options:
        options = {**bug.options, **options}
        again = check_source(bug, fixed=True, options=options)
        outcome = f"{outcome}; {right_outcome(again)} with options"
        fixed = again
    yield Row(f"{bug.target} (fixed)", bug.link, bug.kind, outcome, seconds=fixed.seconds, said=said(fixed), true="right")
    verdict = check_source(bug, fixed=False, options=options)
    outcome = wrong_outcome(bug, verdict, fixed)
    if (
        outcome == "FALSE GREEN" and fixed.outcome == "agrees" and bug.options
    ):  # is it a convention, which no call can tell from the right one?
        again = check_source(bug, fixed=False, options={**bug.options, **options})
        outcome = f"{outcome}; {wrong_outcome(bug, again, fixed)} with options"
    yield Row(
        bug.target,
        bug.link,
        bug.kind,
        outcome,
        judge_name(bug, verdict),
        judge_step(bug, verdict),
        verdict.step,
        verdict.seconds,
        said(verdict),
        bug.truth,
    )


def wrong_outcome(bug: Bug, verdict: Verdict, fixed: Verdict) -> str:
    if verdict.outcome == "disagrees":
        return "found" if fixed.outcome == "agrees" else "accused like the fixed one"
    if verdict.outcome == "agrees":
        return "untried named" if names_untried(bug, verdict) else "FALSE GREEN"
    return verdict.outcome


def right_outcome(verdict: Verdict) -> str:
    return "ACCUSED" if verdict.outcome == "disagrees" else verdict.outcome


def of_right(right: Right, options: dict[str, Any]) -> Iterator[Row]:
    verdict = check(right.target, right.spec, options)
    outcome = right_outcome(verdict)
    if verdict.outcome != "agrees" and right.options:
        verdict = check(right.target, right.spec, {**right.options, **options})
        outcome = f"{outcome}; {right_outcome(verdict)} with options"
    yield Row(right.shown, right.package, "right", outcome, seconds=verdict.seconds, said=said(verdict), true="right")


def said(verdict: Verdict) -> str:
    """The names, or what it asks for, or how the report of an agreement begins."""
    if verdict.outcome == "disagrees":
        return " | ".join(" and ".join(names) for names in verdict.names) or "no name: " + verdict.text[:200]
    return verdict.text[:400] if verdict.outcome != "failed" else verdict.text[-200:]


def table(rows: list[Row]) -> str:
    """The counts, and the rows in Markdown: a bug beside its fixed form, then the right ones of others."""
    fixed = {row.candidate.removesuffix(" (fixed)"): row.outcome for row in rows if row.candidate.endswith(" (fixed)")}
    lines = ["", "| bug | report | fixed | outcome | name | step | s | it says |", "|---|---|---|---|---|---|---|---|"]
    for row in (row for row in rows if row.candidate in fixed):
        cells = (
            row.link,
            fixed[row.candidate],
            row.outcome,
            row.name,
            f"{row.shown_step} {row.step}".strip(),
            f"{row.seconds:.0f}",
            short(row),
        )
        lines.append(f"| `{row.candidate}` | " + " | ".join(cells) + " |")
    right = [row for row in rows if row.candidate not in fixed and not row.candidate.endswith(" (fixed)")]
    if right:
        lines += ["", "| right | outcome | s | it says |", "|---|---|---|---|"]
        lines += [f"| `{row.candidate}` | {row.outcome} | {row.seconds:.0f} | {short(row)} |" for row in right]
    return "\n".join([*counts(rows), *lines])


def short(row: Row) -> str:
    """What is said, in one cell; nothing of those that agree as they should."""
    text = " ".join(row.said.replace("|", "/").split())
    if row.outcome in ("agrees", "untried named") or row.outcome.endswith("agrees with options"):
        return ""
    return text.partition(" hint:")[0][:150]


def counts(rows: list[Row]) -> Iterator[str]:
    wrong = [row for row in rows if row.true != "right"]
    if wrong:
        found = [row for row in wrong if row.outcome == "found"]
        for label, number in (
            ("bugs", len(wrong)),
            ("found", len(found)),
            ("not found, but what was not tried is named", sum(row.outcome == "untried named" for row in wrong)),
            ("false greens", sum(row.outcome.startswith("FALSE GREEN") for row in wrong)),
            ("of these found with the conventions that its author knows", sum("; found" in row.outcome for row in wrong)),
            ("no verdict (refused, failed or slow)", sum(row.outcome in ("refused", "failed", "slow") for row in wrong)),
            ("accused, but so is the fixed one", sum(row.outcome.startswith("accused") for row in wrong)),
            ("named rightly, of those found", sum(row.name == "right" for row in found)),
            ("named by their effect", sum(row.name == "effect" for row in found)),
            ("named wrongly", sum(row.name == "wrong" for row in found)),
            ("step right", sum(row.step == "right" for row in found)),
            ("step wrong", sum(row.step == "wrong" for row in found)),
        ):
            yield f"{number:4} {label}"
    for label, chosen in (
        ("fixed bugs", [row for row in rows if row.true == "right" and row.candidate.endswith("(fixed)")]),
        ("implementations of others", [row for row in rows if row.true == "right" and not row.candidate.endswith("(fixed)")]),
    ):
        if chosen:
            without = sum(row.outcome == "agrees" for row in chosen)
            with_options = sum("agrees with options" in row.outcome for row in chosen)
            accused = sum(row.outcome.startswith("ACCUSED") for row in chosen)
            still = sum(row.outcome == "ACCUSED" or "ACCUSED with options" in row.outcome for row in chosen)
            yield f"{len(chosen):4} right ({label}): {without} agree without options, {with_options} with them"
            yield f"     {accused} accused without options, {still} also with all that its author knows"


def run(jobs: list[Callable[[], list[Row]]], processes: int, record: Path | None) -> list[Row]:
    """The rows of all jobs in their order; the record has those that are finished."""
    with ThreadPoolExecutor(processes) as pool:
        running = [pool.submit(job) for job in jobs]
        for finished in as_completed(running):
            if record:
                with record.open("a") as file:
                    file.writelines(json.dumps(asdict(row)) + "\n" for row in finished.result())
        return [row for job in running for row in job.result()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of a candidate's name")
    parser.add_argument("--part", default="wrong,right")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", type=Path, help="a file for the rows in JSON, with all that was said")
    parser.add_argument("--longest", type=int, help="bounds the lengths of calls, as that of attend check")
    arguments = parser.parse_args()
    options = {} if arguments.longest is None else {"longest": arguments.longest}
    for name, value in (("OMP_NUM_THREADS", "1"), ("TRITON_INTERPRET", "1"), ("KERAS_BACKEND", "torch")):
        os.environ.setdefault(name, value)
    import torch  # once, before the forks

    import attend.check  # noqa: F401

    torch.set_num_threads(1)
    if "right" in arguments.part and find_spec("transformers"):
        from transformers.models.llama import modeling_llama  # noqa: F401  takes seconds
    jobs: list[Callable[[], list[Row]]] = []
    if "wrong" in arguments.part:
        jobs += [lambda bug=bug: list(of_bug(bug, options)) for bug in BUGS if arguments.only in bug.target]
    if "right" in arguments.part:
        jobs += [lambda one=one: list(of_right(one, options)) for one in RIGHT if arguments.only in one.shown and one.installed]
    print(table(run(jobs, arguments.processes, arguments.record)))


if __name__ == "__main__":
    main()
