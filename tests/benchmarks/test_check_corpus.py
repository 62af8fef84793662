"""benchmarks/check: what its bugs and their fixes compute, by the plain loops of its oracle, and what its command prints."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks" / "check"


@pytest.fixture(autouse=True)
def modules_of_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)


def function_of(source, name):
    namespace = {"__name__": "candidate"}
    exec(compile(source, name, "exec"), namespace)
    return namespace[name]


def heads(n, width=5):
    random = np.random.default_rng(n)
    return [random.normal(size=(2, 3, n, width)) for _ in range(3)]


def takes_heads_alone(bug, function):
    required = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    return inspect.isfunction(function) and len(required) == 3 and "layout" not in bug.options


def largest_error(function, n, width):
    from oracle import attention

    q, k, v = heads(n, width)
    right = attention(q, k, v, lambda b, i, j: True)[0]
    for framework in (np.asarray, torch.tensor):
        try:
            return float(np.abs(np.asarray(function(*(framework(x) for x in (q, k, v)))) - right).max())
        except (TypeError, AttributeError, ValueError):  # of the other framework
            continue
    raise AssertionError("neither NumPy nor torch")


def test_each_bug_has_a_fix_and_functions_of_heads_show_it():
    from bugs import BUGS
    from judging import source_of

    shown = 0
    for bug in BUGS:
        name = bug.target.partition(":")[2]
        wrong, fixed = (function_of(source_of(bug, fixed), name) for fixed in (False, True))
        if takes_heads_alone(bug, fixed) and not bug.spec:
            sizes = [(n, 5) for n in (7, 67)] + [(7, 70)]
            assert max(largest_error(fixed, *size) for size in sizes) < 1e-2 if bug.always else 1e-6, bug.target
            by_arguments = any(
                p.default is not inspect.Parameter.empty and p.name != "scale" for p in inspect.signature(wrong).parameters.values()
            )
            if not bug.target.startswith("backward.py:") and "splits" not in str(inspect.signature(wrong)) and not by_arguments:
                assert max(largest_error(wrong, *size) for size in sizes) > 1e-3, bug.target
                shown += 1
    assert shown >= 8
    assert len(BUGS) >= 40 and len({bug.group for bug in BUGS}) >= 30


def test_the_oracle_and_not_the_check_tells_equal_mutants_from_others():
    from forms import FORMS, is_right

    form = next(form for form in FORMS if form.file == "packed.py")
    source = (FOLDER / "implementations" / form.file).read_text()
    assert is_right(form, source.replace("scores.masked_fill(~same[:, None]", "scores.masked_fill(same[:, None].logical_not()"), up_to=65)
    assert not is_right(form, source.replace("~same[:, None]", "same[:, None]"), up_to=65)


def test_names_are_judged_by_words():
    from bugs import BUGS
    from judging import Verdict, judge_name

    bug = next(bug for bug in BUGS if bug.target == "modules.py:PooledAttention")
    for names, judgement in (
        ((("blocked scores are set to about 0 and not to -inf",),), "right"),
        ((("blocked scores are set to 0", "the scale is halved"),), "wrong"),  # of two mistakes together, one is not there
        ((), ""),
    ):
        assert judge_name(bug, Verdict("disagrees", "", names)) == judgement


def test_the_command_prints_a_row_for_each_candidate():
    command = [sys.executable, FOLDER / "measure.py", "--part", "wrong", "--only", "BarkAttention", "--processes", "1"]
    environment = {**os.environ, "PYTHONSAFEPATH": ""}  # the files of the benchmark import each other
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    printed = done.stdout
    assert done.returncode == 0, done.stderr
    assert "1 found\n" in printed and "0 false greens" in printed, printed
    row = next(line for line in printed.splitlines() if line.startswith("| `modules.py:BarkAttention` | suno-ai/bark#662 |"))
    assert "agrees" in row and "| found | right |" in row, row
