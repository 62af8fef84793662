"""Small layers of each family of models, as its configs make them."""

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

Example = Mapping[str, Any]


def examples() -> dict[str, list[Example]]:
    """Model type -> for each part and type of its layers with other steps: `part`, `type`, whether it is `causal`, and a small `spec`."""
    text = files("attend.checkpoints.families").joinpath("examples.json").read_text("utf-8")
    found: dict[str, list[Example]] = json.loads(text)
    return found
