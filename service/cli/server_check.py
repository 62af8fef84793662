"""Random cases put to the service: each a layer of its own, a request that fits it, and how far the answer is from the reference."""

import secrets
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from service.attention.random_cases import Case, random_case
from service.attention.reference.forward import attend
from service.cli.backend import Backend
from service.cli.tolerances import OUTPUTS, Finding, findings, wrong
from service.client import BadReply, calls
from service.client.result import read_result
from service.errors import InvalidRequest, LayerNotFound, MalformedBody, ServiceFault
from service.spec import fingerprint


@dataclass(frozen=True, slots=True)
class CheckCase:
    """One case, by the number that draws it again, and what was found."""

    number: int
    case: Case
    findings: list[Finding]


@dataclass(slots=True)
class Worst:
    """The worst of many trials, by output and of all."""

    count: int = 0
    by_output: dict[str, tuple[CheckCase, Finding]] = field(default_factory=dict)

    def add(self, case: CheckCase) -> None:
        """Takes a trial into account."""
        self.count += 1
        for finding in case.findings:
            held = self.by_output.get(finding.name)
            if held is None or finding.share > held[1].share:
                self.by_output[finding.name] = case, finding

    @property
    def case(self) -> CheckCase:
        return self._worst[0]

    @property
    def finding(self) -> Finding:
        return self._worst[1]

    @property
    def agrees(self) -> bool:
        return all(finding.agrees for _, finding in self.by_output.values())

    @property
    def _worst(self) -> tuple[CheckCase, Finding]:
        return max(self.by_output.values(), key=lambda held: held[1].share)


def draw(seed: int, number: int) -> Case:
    """The case of that number; it depends on nothing before it."""
    return random_case(np.random.default_rng([seed, number]))


def try_cases(backend: Backend, seed: int, numbers: Iterable[int]) -> Generator[CheckCase]:
    """Each case in turn, through a layer of a name that nobody else uses, which is removed at the end.

    Raises AttendError where the service does not answer such requests at all.
    """
    name = f"check-{secrets.token_hex(6)}"
    try:
        for number in numbers:
            case = draw(seed, number)
            yield CheckCase(number, case, _ask(backend, name, case))
    finally:
        with suppress(LayerNotFound):
            backend.delete_layer(name)


def _ask(backend: Backend, name: str, case: Case) -> list[Finding]:
    """A seeded layer is made there and drawn here: so its weights are checked too, by the fingerprint. Others are sent."""
    from service.attention.weights import draw_weights, in_dtype

    weights = draw_weights(case.spec) if case.weights is None else in_dtype(case.spec, case.weights)
    try:
        layer = backend.put_layer(name, case.spec, case.weights)
        if layer.fingerprint != fingerprint(case.spec, weights):
            return [wrong("weights", f"others than {case.spec.init} draws from seed {case.spec.seed}")]
        call = calls.attend({**case.request, "layer": name, "outputs": OUTPUTS}).in_json()
        response = backend.attend(call.body or b"")
        result = read_result(response.body, response.headers)
    except (InvalidRequest, ServiceFault, MalformedBody, BadReply) as error:
        return [wrong("reply", f"none: {error}")]
    return findings(case, attend(case.spec, weights, **case.request), result, result.fully_masked_rows)
