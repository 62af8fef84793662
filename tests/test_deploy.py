"""What deploy/ watches exists: every metric that a rule or a panel names is one that a server tells."""

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).parent.parent / "deploy"


def rules() -> list[str]:
    """The expressions of the alert rules."""
    return [rule["expr"] for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]


def panels() -> list[str]:
    """The expressions of the dashboard's panels."""
    return [target["expr"] for panel in json.loads((DEPLOY / "grafana.json").read_text())["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expressions", [rules(), panels()], ids=["rules", "panels"])
def test_every_metric_that_is_watched_exists(http: httpx.Client, expressions: list[str]) -> None:
    """Its labels too."""
    http.post("/attend", json={"query": [[0.5] * 64]})
    http.post("/attend", content=b"{")
    told: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            told.setdefault(sample.name, set()).update(sample.labels)
    assert len(expressions) >= 7
    for expression in expressions:
        named = re.findall(r"(attend_\w+)(?:\{([^}]*)\})?", expression)
        assert named, expression
        for name, labels in named:
            assert name in told, expression
            assert set(re.findall(r"(\w+)=", labels)) <= told[name] | {"instance"}, expression
