"""Finds layers in a checkpoint by the names of its tensors, and selects one of them.

A name is split into segments at `.` (torch) or `/` (Keras, Flax), without TensorFlow's suffix `:0`. The last few segments are looked up in
an index of all layouts; the segments before them are the stem, the name of the layer.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from attend.checkpoints.layout import Layout
from attend.checkpoints.layouts import LAYOUTS, NAMES
from attend.errors import InvalidRequest, Problem, did_you_mean, pointer
from attend.tensors import Array

MIN_SHARE = 0.5  # of the required tensors, for a layer to count as incomplete
MAX_LISTED = 8  # items in an error


@dataclass(frozen=True, slots=True)
class Match:
    """A layout with at least one of its required names below a stem."""

    layout: Layout
    stem: str  # normalised
    root: str  # the segments before the layout's names, as in the checkpoint
    names: dict[str, str]  # role -> name in the checkpoint
    identified: bool  # whether the names alone identify the layout

    @property
    def required(self) -> list[str]:
        """Required names below the stem."""
        return [name for name, role in self.layout.roles.items() if role in self.layout.required]

    @property
    def missing(self) -> list[str]:
        """Required names below the stem that the checkpoint does not have."""
        return [name for name in self.required if self.layout.roles[name] not in self.names]

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


def detect(names: Iterable[str]) -> str | None:
    """The layout of all layers among the names; None if the names fit none or several."""
    layouts = {match.layout.name if match.identified else None for match in readable_matches(find_matches(names))}
    return layouts.pop() if len(layouts) == 1 else None


def layers_in(names: Iterable[str]) -> list[tuple[str, str]]:
    """(layout, prefix) of every layer that can be read, in natural order; takes a checkpoint or its names.

    A prefix occurs several times if its names fit several layouts; `read_layer` then needs the layout.
    """
    return [(match.layout.name, match.prefix) for match in readable_matches(find_matches(names))]


def select(tensors: Mapping[str, Array], layout: str | None, prefix: str) -> Match:
    """The only layer below the prefix, in `layout` if given. Raises InvalidRequest with the choices if there is not exactly one."""
    if layout is not None and layout not in NAMES:
        raise InvalidRequest.where("/layout", "one of " + ", ".join(sorted(NAMES)), f'"{layout[:60]}"{did_you_mean(layout, NAMES)}')
    below = _below(find_matches(tensors), prefix)
    of_layout = [match for match in below if layout in (None, match.layout.name)]
    candidates = readable_matches(below) if layout is None else complete_matches(of_layout)
    if not candidates:
        raise _no_layer(of_layout, below, layout, tensors)
    stems = {match.stem: match.prefix for match in candidates}
    if len(stems) > 1:
        expected = "a prefix that selects one layer: " + listed(stems.values())
        raise InvalidRequest.where("/prefix", expected, f'"{prefix}"' if prefix else "none")
    if len(candidates) > 1 or not (candidates[0].identified or layout):
        raise _ambiguous(candidates)
    return candidates[0]


def _below(matches: Sequence[Match], prefix: str) -> Sequence[Match]:
    """Matches whose stem is the prefix or below it; layer.1 does not select layer.10. Raises InvalidRequest if there are none."""
    wanted = normalised(prefix).strip(".")
    if not wanted:
        return matches
    below = [match for match in matches if f"{match.stem}.".startswith(f"{wanted}.")]
    every = readable_matches(matches)
    is_inside = any(wanted.startswith(f"{match.stem}.") for match in every)
    if every and (not below or (is_inside and not readable_matches(below))):
        prefixes = [match.prefix for match in every]
        near = [match.prefix for match in every if match.stem.endswith(f".{wanted}")] + get_close_matches(prefix, prefixes, n=1, cutoff=0)
        raise InvalidRequest.where("/prefix", f"one of {listed(near + prefixes)}", f'"{prefix}"')
    return below


def _no_layer(partial: Sequence[Match], below: Sequence[Match], layout: str | None, tensors: Mapping[str, Array]) -> InvalidRequest:
    """The error if no layer is complete: the missing tensors of the nearest layout, or the layouts that the names fit."""
    nearest = max(partial, key=_closeness, default=None)
    if nearest is not None and (other := complementary_match(nearest, below)) is not None:
        return _mixed(nearest, other)
    if nearest is not None and nearest.share >= MIN_SHARE and (layout or nearest.identified):
        return refusal_of_weights([(nearest.full_name(name), f"a tensor, as {nearest} has it", "nothing") for name in nearest.missing])
    wanted = f"a layer of layout {layout}" if layout else f"the names of a known layout ({', '.join(sorted(NAMES))})"
    if others := readable_matches(below):
        return InvalidRequest.where("/layout", wanted, listed(map(str, others)))
    if below:
        nearest = max(below, key=_closeness)
        missing = listed(nearest.full_name(name) for name in nearest.missing)
        return InvalidRequest.where("/layout", wanted, f"nearest {nearest}, without {missing}")
    return InvalidRequest.where("/layout", wanted, f"tensors {listed(sorted(tensors, key=natural))}")


def _closeness(match: Match) -> tuple[float, bool, int]:
    """A sort key: how close an incomplete match is to a complete one."""
    return match.share, match.identified, len(match.names)


def _mixed(match: Match, other: Match) -> InvalidRequest:
    """The refusal of a layer whose tensors have names of two layouts."""
    expected = " or ".join(f"{one.layout.name} ({listed(map(one.full_name, one.required))})" for one in (match, other))
    got = " and ".join(listed(sorted(one.names.values())) for one in (match, other))
    return InvalidRequest.where("/weights", f"the names of one layout: {expected}", f"{got} together")


def _ambiguous(candidates: Sequence[Match]) -> InvalidRequest:
    """The refusal of names that several layouts share."""
    choices = "; ".join(f"{name} ({NAMES[name]})" for name in sorted({match.layout.name for match in candidates}))
    at = candidates[0].prefix or "the root"
    return InvalidRequest.where("/layout", f"a layout, since the names at {at} fit several: {choices}", "none")


def find_matches(names: Iterable[str], layouts: Sequence[Layout] | None = None) -> list[Match]:
    """A match for every layout and stem with at least one of the layout's required names, in the natural order of stems.

    `layouts`: those to look for; None: all that need no config.
    """
    index = INDEX if layouts is None else _index(layouts)
    max_depth = max(name.count(".") for name in index) + 1
    found: dict[tuple[str, int], tuple[Layout, str, dict[str, str]]] = {}
    originals = {normalised(name): name for name in names}
    for plain, name in originals.items():
        segments = plain.split(".")
        for depth in range(1, min(max_depth, len(segments)) + 1):
            tail = ".".join(segments[-depth:])
            for layout, role in index.get(tail, ()):
                stem = ".".join([*segments[:-depth], *filter(None, [layout.parent])])
                root = name[: len(plain) - len(tail)].rstrip("./")
                found.setdefault((stem, id(layout)), (layout, root, {}))[2][role] = name
                if layout.shared_table and (shared := layout.shared_table(stem)) in originals:
                    found[stem, id(layout)][2]["shared_table"] = originals[shared]
    matches = [
        Match(layout, stem, root, roles, _is_identified(layout, stem, originals))
        for (stem, _), (layout, root, roles) in found.items()
        if not layout.required.isdisjoint(roles)
    ]
    return sorted(matches, key=lambda match: natural(match.stem))


def _is_identified(layout: Layout, stem: str, originals: Mapping[str, str]) -> bool:
    """Whether the names identify the layout. `originals`: normalised name -> name in the checkpoint, of all tensors."""
    above, _, last = stem.rpartition(".")
    sibling = f"{above}.{layout.excluded_by}".lstrip(".")
    return (layout.identified_under is None or last in layout.identified_under) and not (layout.excluded_by and sibling in originals)


def _index(layouts: Iterable[Layout]) -> dict[str, list[tuple[Layout, str]]]:
    index: dict[str, list[tuple[Layout, str]]] = {}
    for layout in layouts:
        for name, role in layout.roles.items():
            index.setdefault(name, []).append((layout, role))
    return index


INDEX = _index(layout for layout in LAYOUTS if layout.name in NAMES)


def readable_matches(matches: Sequence[Match]) -> list[Match]:
    """Complete matches; if the names identify a layout at a stem, without the other layouts at that stem."""
    complete = complete_matches(matches)
    identified = {match.stem for match in complete if match.identified}
    return [match for match in complete if match.identified or match.stem not in identified]


def complete_matches(matches: Sequence[Match]) -> list[Match]:
    """Matches with all required names; if several spellings of a layout match at one stem, the one with most names."""
    best: dict[tuple[str, str], Match] = {}
    for match in matches:
        key = (match.layout.name, match.stem)
        if not match.missing and (key not in best or _specificity(match) > _specificity(best[key])):
            best[key] = match
    return list(best.values())


def _specificity(match: Match) -> tuple[int, bool, int]:
    """A sort key: how much of a layer the match explains."""
    return len(match.layout.required), match.identified, len(match.names)


def complementary_match(match: Match, matches: Iterable[Match]) -> Match | None:
    """Another layout's match at the same stem with the roles that an incomplete match lacks: the names of two layouts are mixed."""
    missing = match.layout.required - match.names.keys()
    return next((other for other in matches if missing and other.stem == match.stem and missing <= other.names.keys()), None)


def normalised(name: str) -> str:
    """A tensor's name with `.` between its segments, without TensorFlow's suffix."""
    return name.removesuffix(":0").replace("/", ".")


def natural(text: str) -> list[tuple[int, str]]:
    """A sort key that puts layer.2 before layer.10."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text)]


def listed(items: Iterable[str]) -> str:
    """The first MAX_LISTED items and the number of the others, for an error: "a, b, c and 9 more"."""
    every = list(dict.fromkeys(items))
    more = f" and {len(every) - MAX_LISTED} more" if len(every) > MAX_LISTED else ""
    return ", ".join(every[:MAX_LISTED]) + more or "none"


def refusal_of_weights(problems: Sequence[tuple[str, str, str]]) -> InvalidRequest:
    """One error for several tensors, (name, expected, got) each: the first MAX_LISTED and the number of the others."""
    shown = [Problem(pointer(["weights", name]), expected, got) for name, expected, got in problems[:MAX_LISTED]]
    if (more := len(problems) - MAX_LISTED) > 0:
        shown.append(Problem("/weights", "no more such tensors", f"{more} more"))
    return InvalidRequest(problems=shown)
