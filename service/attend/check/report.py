"""What a comparison found, and how it is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import fill

from attend.check.adapter import NO_PARAMETER, NO_POSITIONS
from attend.check.calls import RAISED, CaseResult
from attend.check.divergence import FirstWrongStep
from attend.check.explanation import Explanation
from attend.check.groups import IN_GROUPS
from attend.check.low_precision import HALF
from attend.spec import LayerSpec

MOST_WIDTHS = 4  # of heads that are listed
AXES = {
    "output": ("item", "query", "number"),
    **dict.fromkeys(("dQ", "dK", "dV", "dX"), ("item", "row", "number")),
    **dict.fromkeys(("attention_weights", "dropout"), ("item", "head", "query", "key")),
    "log_sum_exp": ("item", "head", "query"),
}


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first wrong number of a case; without an index, a wrong shape or an exception."""

    case: str
    output: str
    expected: str
    got: str
    index: tuple[int, ...] | None = None
    hint: str | None = None
    explanation: Explanation = field(default_factory=Explanation)
    step: FirstWrongStep | None = None  # where the candidate leaves the reference, if it makes arrays that can be recorded
    weights: tuple[str, ...] = ()  # what the weights that it applies show, if no mistake explains it

    @property
    def mistakes(self) -> tuple[str, ...]:
        return self.explanation.mistakes

    def __str__(self) -> str:
        """The first wrong step, the mistake with its arithmetic, and then the first wrong number."""
        place = "" if self.index is None else f"[{', '.join(map(str, self.index))}]"
        axes = AXES.get(self.output, ())
        words = ""
        if self.index is not None and len(self.index) == len(axes):
            words = f" ({', '.join(f'{axis} {i}' for axis, i in zip(axes, self.index, strict=True))})"
        lines = [str(self.step)] if self.step else []
        lines += [f"hint: {self.hint}"] if self.hint else []
        for computed, expected in self.explanation.arithmetic:
            lines += [f"  you compute: {computed}", f"  expected:    {expected}"]
        return "\n".join([*lines, f"disagreement: {self.case}, {self.output}{place}{words}: expected {self.expected}, got {self.got}"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The results of `compare`; its string is the report, which a notebook shows too.

    `disagreements`: the first, and later ones that show other mistakes. `rounding`: which steps a half-precision candidate that agrees
    rounds, if its numbers show it. `parameters`: those of the candidate that no call passed a value that changes the result; `tried`: the
    others. `keys`: the number of keys of the longest call. `widths`: those of heads, from the narrowest to the widest. `causality`: where
    queries are in causal calls with q != k. `found`: what calls told about conventions that no option gives.
    """

    results: tuple[CaseResult, ...]
    disagreements: tuple[Disagreement, ...]
    rounding: str = ""
    parameters: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    keys: int = 0
    widths: tuple[int, ...] = ()
    dtype: str = ""
    causality: str = ""
    spec: LayerSpec | None = None  # that of the reference
    found: tuple[str, ...] = ()
    layer: str = ""  # of a family, with its sizes

    @property
    def first(self) -> Disagreement | None:
        return next(iter(self.disagreements), None)

    @property
    def agrees(self) -> bool:
        return self.first is None

    @property
    def is_undecided(self) -> bool:
        """Whether it neither agrees nor disagrees, since no case says anything."""
        return self.agrees and not any(result.agrees for result in self.results) and bool(self.untried or self.vague)

    @property
    def untried(self) -> tuple[str, ...]:
        """The cases that would show more, and were not run because an option or a known parameter is missing."""
        return tuple(result.case for result in self.results if result.untried)

    @property
    def vague(self) -> tuple[str, ...]:
        """The cases whose agreement says nothing, since rounding alone may change their numbers as much."""
        return tuple(result.case for result in self.results if result.vague and result.agrees is None)

    def __str__(self) -> str:
        about = [] if self.agrees else [self.verdict, self.omissions]
        cases = [str(result) for result in self.results if not result.untried]
        lines = (*about[:1], *self.conclusion.splitlines(), *self.conventions.splitlines(), *about[1:], *cases)
        return "\n".join(_wrapped(line) for line in lines if line)

    @property
    def conventions(self) -> str:
        """The lines that say what the sizes of a family are, if it disagrees, and what calls told about conventions; empty without both."""
        layer = f"compared with {self.layer}" if self.layer and not self.agrees else ""
        return "\n".join(filter(None, (layer, f"found by calls: {'; '.join(self.found)}" if self.found else "")))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def is_empty(self) -> bool:
        """Whether the candidate raised in every call, so that nothing was compared."""
        return self.has_raised and all(x.raised or x.skipped for x in self.results)

    @property
    def has_raised(self) -> bool:
        """Whether the candidate raised in a case that it has to compute."""
        return any(x.raised for x in self.results)

    @property
    def verdict(self) -> str:
        """In how many of the cases that say something it disagrees."""
        if self.is_empty:
            return "raised in every call, so nothing was compared"
        agree = [result.agrees for result in self.results if result.agrees is not None]
        return f"disagrees with the reference in {agree.count(False)} of {len(agree)} cases"

    @property
    def is_complete(self) -> bool:
        """Whether all cases and parameters were tried that can be, and some say something."""
        untried = any(result.untried and not result.impossible for result in self.results)
        return not untried and not self.parameters and any(result.agrees is not None for result in self.results)

    @property
    def conclusion(self) -> str:
        """The disagreements; or in how many cases it agrees, with up to how many keys, what was not tried, and what says nothing.

        After it, on a line of its own, which steps a half-precision candidate rounds.
        """
        if not self.agrees:
            shown = [str(x) for x in self.disagreements]
            return "\n".join(x.replace("disagreement: ", f"{'also' if i else 'first'} disagreement: ", 1) for i, x in enumerate(shown))
        about_vague = f"nothing is shown by {', '.join(self.vague)}, whose numbers rounding alone may change as much" if self.vague else ""
        agreement = "; ".join(x for x in (self._agreement, self.omissions, about_vague) if x)
        more = {"causality": self.causality, "rounding": self.rounding}
        return "\n".join([agreement, *(f"{name}: {words}" for name, words in more.items() if words)])

    @property
    def _agreement(self) -> str:
        """That it agrees, in how many cases if not all were tried or some show nothing, and up to which length."""
        agreeing = sum(result.agrees is True for result in self.results)
        if self.is_undecided:
            return "neither agrees nor disagrees with the reference"
        cases = ""
        if self.untried or self.vague:
            is_one = agreeing == 1
            verb = f"{'shows' if is_one else 'show'} anything" if self.vague else f"{'was' if is_one else 'were'} tried"
            cases = f" in {'the only case' if is_one else f'all {agreeing} cases'} that {verb}"
        return f"agrees with the reference{cases}{self.scope}"

    @property
    def scope(self) -> str:
        """Up to which length, in which dtype, in which widths and with which parameters it was looked at, as a clause."""
        if not self.keys:
            return ""
        between = f"{self.widths[0]} to {self.widths[-1]}" if len(self.widths) > MOST_WIDTHS else _listed([*map(str, self.widths)])
        widths = f", heads of {between} numbers" if len(self.widths) > 1 else ""
        widths += ", groups of heads" if any(x.case == IN_GROUPS and x.agrees for x in self.results) else ""
        sides = {"log-sum-exps": "", "gradients": " in float32" if self.dtype in HALF else ""}
        given = "".join(f", {x.case}{sides[x.case]} too" for x in self.results if x.case in sides and x.agrees)
        given += f", and with {_listed(self.tried)}" if self.tried else ""
        return f", with up to {self.keys:,} keys{widths}{f', in {self.dtype}' if self.dtype else ''}{given}"

    @property
    def omissions(self) -> str:
        """Which cases were not tried that would show more, and why, and which parameters; then those for which it has no parameter."""
        reasons: dict[str, list[CaseResult]] = {}
        for result in (x for x in self.results if x.untried and not x.impossible):
            kind = (result.skipped or "").partition(":")[0]  # of exceptions of one type, the first is shown
            reasons.setdefault(kind if kind.startswith(RAISED) else _short_reason(result), []).append(result)
        words = [f"{', '.join(x.case for x in results)}, {_short_reason(results[0])}" for results in reasons.values()]
        if self.parameters:
            is_one = len(self.parameters) == 1
            words.append(f"the parameter{'' if is_one else 's'} {', '.join(self.parameters)}")
        not_tried = f"not tried: {'; '.join(words)}" if words else ""
        impossible = ", ".join(x.case for x in self.results if x.impossible)
        return "; ".join(filter(None, (not_tried, f"no parameter takes: {impossible}" if impossible else "")))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _short_reason(result: CaseResult) -> str:
    """Why cases were not tried, as one clause for all of them."""
    reason = result.skipped or ""
    if reason.startswith(NO_PARAMETER):
        return "since no parameter is known for them"
    if reason == NO_POSITIONS:
        return "since query_offset is not given"
    if reason.startswith("since "):
        return reason
    return f"since {reason.partition('; called with')[0]}"


def _wrapped(text: str) -> str:
    """The text in lines of at most 80 columns, with the indentation of the first."""
    indent = " " * (len(text) - len(text.lstrip()))
    return fill(text, 80, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
