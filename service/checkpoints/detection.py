"""Where in a checkpoint which layout's names stand. Names alone: no tensor is looked at, so a checkpoint of any size is cheap to search.

A name is compared without regard to how its segments are joined: `.` as torch does, `/` as Keras and Flax do; TensorFlow's `:0` is dropped.
Every name is looked up by its last few segments in an index of the table; what comes before them is the stem.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.checkpoints.layout import Layout
from service.checkpoints.table import FORMS


@dataclass(frozen=True, slots=True)
class Match:
    """A form whose names stand below a stem, all of them or some."""

    form: Layout
    stem: str  # normalised
    root: str  # what comes before the form's names, as the checkpoint spells it
    names: dict[str, str]  # part -> name in the checkpoint
    told: bool  # whether the names alone say that it is this layout

    @property
    def missing(self) -> list[str]:
        """Names below the stem that must be there and are not."""
        return [name for name, part in self.form.names.items() if part in self.form.required and part not in self.names]

    @property
    def share(self) -> float:
        """How much of what must be there is there."""
        return 1 - len(self.missing) / len(self.form.required)

    @property
    def prefix(self) -> str:
        """The stem as the checkpoint spells it."""
        return self.full_name(self.form.inside) if self.form.inside else self.root

    def full_name(self, name: str) -> str:
        """A name of the form as this checkpoint would spell it."""
        joint = "/" if any("/" in spelled for spelled in self.names.values()) else "."
        return f"{self.root}{joint if self.root else ''}{name.replace('.', joint)}"

    def __str__(self) -> str:
        return f"{self.form.layout} at {self.prefix or 'its root'}"


def normalised(name: str) -> str:
    return name.removesuffix(":0").replace("/", ".")


def _index() -> dict[str, list[tuple[Layout, str]]]:
    index: dict[str, list[tuple[Layout, str]]] = {}
    for form in FORMS:
        for name, part in form.names.items():
            index.setdefault(name, []).append((form, part))
    return index


INDEX = _index()
DEPTH = max(name.count(".") for name in INDEX) + 1


def find_matches(names: Iterable[str]) -> list[Match]:
    """Every form at every stem where at least one name that it requires stands, in the natural order of stems."""
    found: dict[tuple[str, int], tuple[Layout, str, dict[str, str]]] = {}
    normal = {normalised(name): name for name in names}
    for plain, name in normal.items():
        segments = plain.split(".")
        for depth in range(1, min(DEPTH, len(segments)) + 1):
            tail = ".".join(segments[-depth:])
            for form, part in INDEX.get(tail, ()):
                stem = ".".join([*segments[:-depth], *filter(None, [form.inside])])
                root = name[: len(plain) - len(tail)].rstrip("./")
                found.setdefault((stem, id(form)), (form, root, {}))[2][part] = name
    matches = [
        Match(form, stem, root, parts, _told(form, stem, normal))
        for (stem, _), (form, root, parts) in found.items()
        if not form.required.isdisjoint(parts)
    ]
    return sorted(matches, key=lambda match: natural(match.stem))


def _told(form: Layout, stem: str, normal: dict[str, str]) -> bool:
    above, _, last = stem.rpartition(".")
    beside = f"{above}.{form.not_beside}".lstrip(".")
    return (form.told_under is None or last in form.told_under) and not (form.not_beside and beside in normal)


def natural(text: str) -> list[tuple[int, str]]:
    """Sorts layer.2 before layer.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text)]


def complete(matches: Sequence[Match]) -> list[Match]:
    """Those with all that must be there; of one layout's forms at one stem the one that explains most."""
    best: dict[tuple[str, str], Match] = {}
    for match in matches:
        key = (match.form.layout, match.stem)
        if not match.missing and (key not in best or _weight(match) > _weight(best[key])):
            best[key] = match
    return list(best.values())


def _weight(match: Match) -> tuple[int, bool, int]:
    return len(match.form.required), match.told, len(match.names)


def readable(matches: Sequence[Match]) -> list[Match]:
    """Complete ones, without those that a stem's names rule out: where they tell a layout, the untold ones there are dropped."""
    every = complete(matches)
    told = {match.stem for match in every if match.told}
    return [match for match in every if match.told or match.stem not in told]


def detect(names: Iterable[str]) -> str | None:
    """The layout that the names tell, for all layers among them; None if they tell none, or several."""
    layouts = {match.form.layout if match.told else None for match in readable(find_matches(names))}
    return layouts.pop() if len(layouts) == 1 else None


def layers_in(names: Iterable[str]) -> list[tuple[str, str]]:
    """(layout, prefix) of every layer that can be read, in natural order; takes a checkpoint or its names.

    A prefix that stands there with several layouts is one whose names do not tell it: it has to be said.
    """
    return [(match.form.layout, match.prefix) for match in readable(find_matches(names))]
