"""The names that people give to the weights of attention: `q_proj.weight`, `W_q`, `b_o`, `linears.3.bias`, `to_qkv`, …

It knows names alone, neither shapes nor objects.
"""

import re

from service.spec import PROJECTIONS

# q_proj, W_q, wq, w_qs, query, queries, to_q, q_lin, linear_q, fc_out, b_o, bias_q, qkv_proj, …
_NAME = re.compile(
    r"(?:(?P<head>w|b|weight|bias|linear|lin|fc|to)_?)?"
    r"(?P<role>qkv|query_key_value|queries|query|q|keys?|k|values?|v|output|out|o)s?"
    r"(?P<tail>(?:_?(?:projection|proj|linear|lin|layer|dense|weights?|bias|kernel|matrix|w|b))*)"
)
_OTHER_NAMES = {"in_proj": "in_proj", "c_attn": "in_proj", "c_proj": "output"} | dict.fromkeys(
    ("dense", "proj", "projection", "fc", "unify_heads", "combine_heads"), "output"
)
_ROLES = {"q": "query", "queries": "query", "k": "key", "keys": "key", "v": "value", "values": "value", "o": "output", "out": "output"}
_ANNOTATED = re.compile(r"linears\.([0-3])\.(weight|bias)")  # The Annotated Transformer: query, key, value, output in a list
BARE = frozenset([*_ROLES, *PROJECTIONS])  # names that say which, but not that it is a weight


def parse_name(path: str) -> tuple[str, str] | None:
    """What the weight at this path is, such as ("query", "bias"); None where its name does not tell.

    The first is a projection; or "qkv" for all three in one, and "in_proj" where their order in it is known.
    """
    if listed := _ANNOTATED.search(path):
        return PROJECTIONS[int(listed[1])], listed[2]
    parts = [part for part in path.lower().split(".") if not part.isdigit()]
    name = "_".join(parts[-2:]) if parts[-1] in ("weight", "bias", "kernel") else parts[-1]
    kind = "bias" if name.endswith("bias") else "weight"
    if other := _OTHER_NAMES.get(re.sub("_?(weight|bias|kernel)$", "", name)):
        return other, kind
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    if match["head"] in ("b", "bias") or "bias" in match["tail"] or match["tail"].endswith("_b"):
        kind = "bias"
    role = "qkv" if match["role"] == "query_key_value" else match["role"]
    return _ROLES.get(role, role), kind
