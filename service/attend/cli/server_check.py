"""Checks the service with random cases: each is a layer and a request, whose reply is compared with the float64 reference."""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from attend.attention.reference.call import ReferenceCall
from attend.attention.reference.forward import Outputs, attend
from attend.check import tolerance
from attend.check.low_precision import HALF
from attend.check.random_cases import Case, random_case
from attend.check.rounding import RoundedLayer, half_tolerance
from attend.client import BadReply, Client, operations
from attend.errors import InvalidRequest, LayerNotFound, MalformedBody, ServiceFault
from attend.fingerprint import fingerprint
from attend.spec import DType, LayerSpec
from attend.tensors import Array

OUTPUTS = tuple(field.name for field in fields(Outputs) if field.name not in ("normalised", "fully_masked"))
LOGARITHMIC = {"scores", "log_sum_exp"}


@dataclass(frozen=True, slots=True)
class OutputError:
    """The largest error of one output of one case, and its tolerance. `problem` describes other faults, such as a wrong shape."""

    output: str
    error: float
    tolerance: float
    problem: str = ""

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance

    @property
    def ratio(self) -> float:
        """Error / tolerance."""
        return 0.0 if self.error == 0 else np.inf if self.tolerance == 0 else self.error / self.tolerance


@dataclass(slots=True)
class ServerReport:
    """`worst`: output -> the number of the case with the largest error / tolerance, the case, and the error.

    `command` repeats the check, without --seed and --case.
    """

    command: str
    seed: int
    count: int = 0
    worst: dict[str, tuple[int, Case, OutputError]] = field(default_factory=dict)

    def add(self, number: int, case: Case, errors: Iterable[OutputError]) -> None:
        self.count += 1
        for error in errors:
            before = self.worst.get(error.output)
            if before is None or error.ratio > before[2].ratio:
                self.worst[error.output] = number, case, error

    @property
    def agrees(self) -> bool:
        return all(error.agrees for _, _, error in self.worst.values())

    def document(self) -> dict[str, Any]:
        """For --json. An error that is not finite is null."""
        outputs = [
            {
                "output": name,
                "agrees": error.agrees,
                "error": error.error if np.isfinite(error.error) else None,
                "allowed": error.tolerance,
                "about": error.problem,
                "case": number,
            }
            for name, (number, _, error) in self.worst.items()
        ]
        document = {"agrees": self.agrees, "cases": self.count, "seed": self.seed, "outputs": outputs}
        return document if self.agrees else {**document, **self._disagreement()}

    def show(self, console: Console) -> None:
        table = Table("output", "largest error", "tolerance", "case", "")
        for name, (number, _, error) in self.worst.items():
            largest = error.problem or f"{error.error:.2g}"
            table.add_row(name, largest, f"{error.tolerance:.2g}", str(number), "agrees" if error.agrees else "[bold red]WRONG")
        console.print(table)
        if self.agrees:
            console.print(f"{self.count} cases agree with the reference", highlight=False)
        else:
            for title, text in self._disagreement().items():
                console.print(f"{title}: {text}", soft_wrap=True, highlight=False, markup=False)

    def _disagreement(self) -> dict[str, str]:
        number, case, error = max(self.worst.values(), key=lambda entry: entry[2].ratio)
        problem = error.problem or f"off by {error.error:.3g}, tolerance {error.tolerance:.3g}"
        layer = f"d_model {case.spec.d_model}, {case.spec.num_heads} heads, {case.spec.init}, {case.spec.dtype}"
        fields = ", ".join(f"{name} {list(x.shape) if isinstance(x, np.ndarray) else json.dumps(x)}" for name, x in case.request.items())
        return {
            "wrong": f"{error.output} {problem}, in case {number} ({layer}): {fields}",
            "again": f"{self.command} --seed {self.seed} --case {number}",
        }


def check_server(client: Client, report: ServerReport, numbers: Sequence[int]) -> None:
    """Runs the cases with these numbers and adds them to the report. Raises AttendError if the service cannot answer.

    All use one layer with a unique name, which is removed at the end.
    """
    console, name = Console(stderr=True), f"check-{secrets.token_hex(6)}"
    try:
        for number in track(numbers, "checking", console=console, transient=True, disable=not console.is_terminal):
            case = draw_case(report.seed, number)
            report.add(number, case, _check(client, name, case))
    finally:
        with suppress(LayerNotFound):
            client.delete_layer(name)


def draw_case(seed: int, number: int) -> Case:
    """The case with that number, of any dtype. It depends only on the seed and the number."""
    rng = np.random.default_rng([seed, number])
    return random_case(rng, dtype=str(rng.choice(get_args(DType))))


def _check(client: Client, name: str, case: Case) -> list[OutputError]:
    """Compares one reply with the reference. Seeded weights are drawn on both sides and compared by their fingerprint; others are sent."""
    from attend.attention.initialization import draw_weights, in_dtype

    weights = draw_weights(case.spec) if case.weights is None else in_dtype(case.spec, case.weights)
    try:
        layer = client.put_layer(name, case.spec, case.weights)
        if layer.fingerprint != fingerprint(case.spec, weights):
            return [_wrong("weights", f"differ from those that {case.spec.init} draws from seed {case.spec.seed}")]
        result = client.perform(operations.attend(**case.request, layer=name, outputs=compared_outputs(case.spec)).as_json())
    except (InvalidRequest, ServiceFault, MalformedBody, BadReply) as error:
        return [_wrong("reply", f"none: {error}")]
    return compare_reply(case, attend(case.spec, weights, **case.request), result, result.fully_masked_rows, with_roundings(case, weights))


def with_roundings(case: Case, weights: Mapping[str, Array]) -> Outputs | None:
    """What the reference computes with the roundings of a half-precision layer, with a batch axis; None for other layers."""
    return RoundedLayer(case.spec, weights).attend(ReferenceCall.from_fields(**case.request)) if case.spec.dtype in HALF else None


def compared_outputs(spec: LayerSpec) -> list[str]:
    """The outputs of the reference that the layer has."""
    return [name for name in OUTPUTS if name in spec.outputs()]


def compare_reply(
    case: Case, reference: Outputs, reply: Mapping[str, Any], fully_masked_rows: int, rounded: Outputs | None = None
) -> list[OutputError]:
    """The errors of all outputs. `rounded` is from `with_roundings`."""
    largest = largest_score(case, reference)
    errors = []
    for name in compared_outputs(case.spec):
        moved = None if rounded is None else np.asarray(getattr(rounded, name))
        errors.append(compare_output(name, np.asarray(getattr(reference, name)), reply.get(name), case.spec, largest, moved))
    if fully_masked_rows != reference.fully_masked_rows:
        errors.append(_wrong("fully_masked_rows", f"{fully_masked_rows}, expected {reference.fully_masked_rows}"))
    return errors


def largest_score(case: Case, reference: Outputs) -> float:
    """max|scores| before softcap, bias and mask: rounding errors are proportional to it."""
    scale = case.request.get("scale")
    keys = np.repeat(reference.key_projection, case.spec.num_heads // case.spec.num_kv_heads, axis=-3)
    products = np.abs(reference.query_projection @ keys.swapaxes(-1, -2))
    return abs(case.spec.scale if scale is None else float(scale)) * float(products.max(initial=0.0))


def compare_output(
    name: str, expected: Array, got: Array | None, spec: LayerSpec, largest_score: float, rounded: Array | None = None
) -> OutputError:
    """The error of one output. Where -inf is expected, only -inf agrees. `rounded`: the output with the roundings of half precision."""
    if got is None:
        return _wrong(name, "missing")
    if got.shape != expected.shape:
        return _wrong(name, f"shape {list(got.shape)}, expected {list(expected.shape)}")
    got, finite = got.astype(np.float64), np.isfinite(expected)
    if not np.array_equal(got[~finite], expected[~finite]):
        return _wrong(name, "finite where -inf is expected")
    error = float(np.abs(got[finite] - expected[finite]).max(initial=0.0))
    if not np.isfinite(error):
        return _wrong(name, "NaN or infinity")
    norm, logarithmic = spec.normalises_heads, name in LOGARITHMIC
    if rounded is None:
        allowed = tolerance(expected, spec.dtype, largest_score, norm=norm, logarithmic=logarithmic)
    else:
        allowed = half_tolerance(expected, rounded, spec.dtype, largest_score, norm=norm, logarithmic=logarithmic)
    return OutputError(name, error, allowed)


def _wrong(output: str, problem: str) -> OutputError:
    return OutputError(output, np.inf, 0.0, problem)
