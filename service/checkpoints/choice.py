"""The one layer that is meant, out of all that match; or a refusal that says what there is to choose from.

Never guesses: of two layers, or two layouts whose names are the same, none is taken until the caller says which.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from service.checkpoints.detection import Match, complete, find_matches, natural, normalised, readable
from service.checkpoints.problems import listed, refuse_weights
from service.checkpoints.table import LAYOUTS
from service.errors import InvalidRequest
from service.tensors import Array

HALF = 0.5  # of a layer's tensors there: then the others are missing; with less it is no layer


def choose(tensors: Mapping[str, Array], layout: str | None, prefix: str) -> Match:
    """The layer below the prefix, of that layout if one is said. Raises InvalidRequest, naming what there is."""
    if layout is not None and layout not in LAYOUTS:
        raise InvalidRequest.where("/layout", "one of " + ", ".join(LAYOUTS), f'"{layout[:60]}"')
    below = _below(find_matches(tensors), prefix)
    of_layout = [match for match in below if match.form.layout == layout]
    candidates = readable(below) if layout is None else complete(of_layout)
    if not candidates:
        raise _nothing(below if layout is None else of_layout, below, layout, tensors)
    stems = {match.stem: match.prefix for match in candidates}
    if len(stems) > 1:
        expected = "a prefix that selects one layer: " + listed(stems.values())
        raise InvalidRequest.where("/prefix", expected, f'"{prefix}"' if prefix else "none")
    if len(candidates) > 1 or not (candidates[0].told or layout):
        raise _untold(candidates)
    return candidates[0]


def _normal(prefix: str) -> str:
    return normalised(prefix).rstrip(".")


def _below(matches: Sequence[Match], prefix: str) -> list[Match]:
    """Matches whose stem is the prefix or below it: layer.1 does not select layer.10. Raises InvalidRequest where that leaves none."""
    wanted = f"{_normal(prefix)}.".lstrip(".")
    below = [match for match in matches if f"{match.stem}.".startswith(wanted)]
    every = readable(matches)
    inside = any(wanted.startswith(f"{match.stem}.") and match.stem != _normal(prefix) for match in every)
    if wanted and every and (not below or (inside and not readable(below))):
        prefixes = [match.prefix for match in every]
        near = [p for p in prefixes if _normal(p).endswith(f".{_normal(prefix)}")] + get_close_matches(prefix, prefixes, n=1, cutoff=0)
        raise InvalidRequest.where("/prefix", f"one of {listed(near + prefixes)}", f'"{prefix}"')
    return below


def _nothing(partial: Sequence[Match], below: Sequence[Match], layout: str | None, tensors: Mapping[str, Array]) -> InvalidRequest:
    """Why no layer is complete: tensors that are missing of the nearest, or what the names look like instead."""
    nearest = max(partial, key=lambda match: (match.share, match.told, len(match.names)), default=None)
    if nearest is not None and nearest.share >= HALF and (layout or nearest.told):
        return refuse_weights([(nearest.full_name(name), f"a tensor, as {nearest} has it", "nothing") for name in nearest.missing])
    wanted = f"a layer of layout {layout}" if layout else f"the names of a known layout ({', '.join(LAYOUTS)})"
    if others := readable(below):
        return InvalidRequest.where("/layout", wanted, listed(map(str, others)))
    if below:
        nearest = max(below, key=lambda match: (match.share, match.told, len(match.names)))
        missing = listed(nearest.full_name(name) for name in nearest.missing)
        return InvalidRequest.where("/layout", wanted, f"nearest {nearest}, without {missing}")
    return InvalidRequest.where("/layout", wanted, f"tensors {listed(sorted(tensors, key=natural))}")


def _untold(candidates: Sequence[Match]) -> InvalidRequest:
    """Names that several layouts share."""
    choices = "; ".join(f"{name} ({LAYOUTS[name]})" for name in dict.fromkeys(match.form.layout for match in candidates))
    at = candidates[0].prefix or "the root"
    return InvalidRequest.where("/layout", f"a layout, since the names at {at} do not tell: {choices}", "none")
