"""Finds layers in a checkpoint by the names of its tensors.

A name is split into segments at `.` (torch) or `/` (Keras, Flax), without TensorFlow's suffix `:0`. The last few segments are looked up in
an index of all layouts; the segments before them are the stem, the name of the layer.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from service.checkpoints.layout import Layout
from service.checkpoints.layouts import ALL_LAYOUTS


@dataclass(frozen=True, slots=True)
class Match:
    """A layout with at least one of its required names below a stem."""

    layout: Layout
    stem: str  # normalised
    root: str  # the segments before the layout's names, as in the checkpoint
    names: dict[str, str]  # part -> name in the checkpoint
    identified: bool  # whether the names alone identify the layout

    @property
    def required(self) -> dict[str, str]:
        """Required names below the stem -> their parts."""
        return {name: part for name, part in self.layout.names.items() if part in self.layout.required}

    @property
    def missing(self) -> list[str]:
        """Required names below the stem that the checkpoint does not have."""
        return [name for name, part in self.required.items() if part not in self.names]

    @property
    def share(self) -> float:
        """The share of the required names that the checkpoint has."""
        return 1 - len(self.missing) / len(self.layout.required)

    @property
    def prefix(self) -> str:
        """The stem as written in the checkpoint."""
        return self.full_name(self.layout.parent) if self.layout.parent else self.root

    def full_name(self, name: str) -> str:
        """A name of the layout with this checkpoint's separator."""
        joint = "/" if any("/" in spelled for spelled in self.names.values()) else "."
        return f"{self.root}{joint if self.root else ''}{name.replace('.', joint)}"

    def __str__(self) -> str:
        return f"{self.layout.name} at {self.prefix or 'its root'}"


def normalised(name: str) -> str:
    return name.removesuffix(":0").replace("/", ".")


def _index(layouts: Iterable[Layout]) -> dict[str, list[tuple[Layout, str]]]:
    index: dict[str, list[tuple[Layout, str]]] = {}
    for layout in layouts:
        for name, part in layout.names.items():
            index.setdefault(name, []).append((layout, part))
    return index


INDEX = _index(ALL_LAYOUTS)


def find_matches(names: Iterable[str], layouts: Sequence[Layout] | None = None) -> list[Match]:
    """A match for every layout and stem with at least one of the layout's required names, in the natural order of stems.

    `layouts`: those to look for; None: all.
    """
    index = INDEX if layouts is None else _index(layouts)
    depths = max(name.count(".") for name in index) + 1
    found: dict[tuple[str, int], tuple[Layout, str, dict[str, str]]] = {}
    normal = {normalised(name): name for name in names}
    for plain, name in normal.items():
        segments = plain.split(".")
        for depth in range(1, min(depths, len(segments)) + 1):
            tail = ".".join(segments[-depth:])
            for layout, part in index.get(tail, ()):
                stem = ".".join([*segments[:-depth], *filter(None, [layout.parent])])
                root = name[: len(plain) - len(tail)].rstrip("./")
                found.setdefault((stem, id(layout)), (layout, root, {}))[2][part] = name
    matches = [
        Match(layout, stem, root, parts, _is_identified(layout, stem, normal))
        for (stem, _), (layout, root, parts) in found.items()
        if not layout.required.isdisjoint(parts)
    ]
    return sorted(matches, key=lambda match: natural(match.stem))


def _is_identified(layout: Layout, stem: str, normal: dict[str, str]) -> bool:
    above, _, last = stem.rpartition(".")
    sibling = f"{above}.{layout.excluded_by}".lstrip(".")
    return (layout.identified_under is None or last in layout.identified_under) and not (layout.excluded_by and sibling in normal)


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts layer.2 before layer.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text)]


def complete_matches(matches: Sequence[Match]) -> list[Match]:
    """Matches with all required names; if several spellings of a layout match at one stem, the one with most names."""
    best: dict[tuple[str, str], Match] = {}
    for match in matches:
        key = (match.layout.name, match.stem)
        if not match.missing and (key not in best or _weight(match) > _weight(best[key])):
            best[key] = match
    return list(best.values())


def complementary_match(match: Match, matches: Iterable[Match]) -> Match | None:
    """Another layout's match at the same stem with the parts that an incomplete match lacks: the names of two layouts are mixed."""
    missing = match.layout.required - match.names.keys()
    return next((other for other in matches if missing and other.stem == match.stem and missing <= other.names.keys()), None)


def _weight(match: Match) -> tuple[int, bool, int]:
    return len(match.layout.required), match.identified, len(match.names)


def readable_matches(matches: Sequence[Match]) -> list[Match]:
    """Complete matches; if the names identify a layout at a stem, without the other layouts at that stem."""
    every = complete_matches(matches)
    identified = {match.stem for match in every if match.identified}
    return [match for match in every if match.identified or match.stem not in identified]


def detect(names: Iterable[str]) -> str | None:
    """The layout of all layers among the names; None if the names fit none or several."""
    layouts = {match.layout.name if match.identified else None for match in readable_matches(find_matches(names))}
    return layouts.pop() if len(layouts) == 1 else None


def layers_in(names: Iterable[str]) -> list[tuple[str, str]]:
    """(layout, prefix) of every layer that can be read, in natural order; takes a checkpoint or its names.

    A prefix occurs several times if its names fit several layouts; `read_layer` then needs the layout.
    """
    return [(match.layout.name, match.prefix) for match in readable_matches(find_matches(names))]
