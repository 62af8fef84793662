"""Every metric that a rule or a panel under deploy/ names exists."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from attend import errors
from attend.web.errors import row_of

DEPLOY = Path(__file__).parents[2] / "deploy"


def rules() -> list[str]:
    """The expressions of the alert rules."""
    return [rule["expr"] for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[str]:
    """The expressions of the dashboard's panels."""
    return [target["expr"] for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"] for target in panel["targets"]]


def alert(name: str) -> str:
    """The expression of one rule."""
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return str(next(rule["expr"] for group in groups for rule in group["rules"] if rule.get("alert") == name))


def matched(expression: str, label: str) -> set[str]:
    """The values that its matchers of one label name."""
    return {value for found in re.findall(rf'{label}=~?"([^"]*)"', expression) for value in found.split("|")}


def test_the_rules_match_faults_of_both_protocols() -> None:
    """AttendFaults matches exactly the errors that are faults of the server, over HTTP and gRPC; AttendOverloaded matches a full queue."""
    statuses, reasons = matched(alert("AttendFaults"), "status"), matched(alert("AttendFaults"), "reason")
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AttendError)]
    for kind in kinds:
        status, code = str(row_of(kind).status), row_of(kind).code
        ours = status in ("500", "507")
        assert (status in statuses or kind.__name__ in reasons) == ours, kind
        if not issubclass(kind, errors.CallerGone):
            assert (code in statuses or kind.__name__ in reasons) == ours, kind
    row = row_of(errors.Overloaded)
    assert matched(alert("AttendOverloaded"), "status") == {str(row.status), row.code}


@pytest.mark.parametrize("expressions", [rules(), panels()], ids=["rules", "panels"])
def test_rules_and_panels_name_existing_metrics(http: httpx.Client, expressions: list[str]) -> None:
    """With their labels."""
    http.post("/attend", json={"query": [[0.5] * 64]})
    http.post("/attend", content=b"{")
    found_labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found_labels.setdefault(sample.name, set()).update(sample.labels)
    assert len(expressions) >= 7
    for expression in expressions:
        named = re.findall(r"(attend_\w+)(?:\{([^}]*)\})?", expression)
        assert named, expression
        for name, labels in named:
            assert name in found_labels, expression
            assert set(re.findall(r"(\w+)=", labels)) <= found_labels[name] | {"instance"}, expression
