"""The parameters of an endpoint's path and query, as its function declares them after the request:

    async def get_rows(request: HttpRequest, name: str, first: int, causal: bool = False) -> Response: ...

Names in braces in the path, such as {name}, are parameters of the path; all others are of the query. Their values are validated before the
function is called, and unknown ones are refused.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from attend.errors import InvalidRequest, Problem, did_you_mean
from attend.wire.problems import MAX_PROBLEMS, describe_value, model_of_parameters, validate_parameters


class Parameters:
    """The parameters of an endpoint with this path and function. `names`: of the path, then of the query."""

    def __init__(self, path: str, function: Callable[..., Any]) -> None:
        _, *declared = inspect.signature(function).parameters.values()
        in_path = re.findall(r"\{(\w+)\}", path)
        self.path = [parameter.name for parameter in declared if parameter.name in in_path]
        self.query = [parameter.name for parameter in declared if parameter.name not in in_path]
        self.names = dict.fromkeys(self.path, "path") | dict.fromkeys(self.query, "query")
        is_text = all(str in (p.annotation, getattr(p.annotation, "__origin__", None)) for p in declared)
        kinds = {p.name: (p.annotation, ... if p.default is p.empty else p.default) for p in declared}
        self.model = None if is_text and not self.query else model_of_parameters(kinds)

    def values(self, in_path: Mapping[str, str], query: bytes) -> Mapping[str, Any]:
        """The values of the parameters in a request. Raises InvalidRequest without pointers: no parameter is in the body."""
        texts = {name: in_path[name] for name in self.path}
        if query:
            texts |= self._of_query(query)
        return texts if self.model is None else validate_parameters(self.model, texts, self.names)

    def _of_query(self, query: bytes) -> dict[str, str]:
        """The parameters of the query as text. Raises InvalidRequest for unknown ones, and for those that stand twice."""
        pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
        texts = dict(pairs)
        expected = f"a query parameter among {', '.join(self.query)}" if self.query else "no query parameters"
        problems = [
            Problem("", expected, describe_value(name) + did_you_mean(name, self.query)) for name in texts if name not in self.query
        ]
        if len(texts) < len(pairs):
            names = [name for name, _ in pairs]
            problems += [Problem("", f"the query parameter {name} once", "it twice") for name in self.query if names.count(name) > 1]
        if problems:
            raise InvalidRequest(problems=problems[:MAX_PROBLEMS])
        return texts
