"""The manifests under deploy/ follow Kubernetes' schemas and agree with the server."""

import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from attend.settings import PREFIX, Settings, read_settings

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCUMENTS = {path.relative_to(DEPLOY).as_posix(): yaml.safe_load(path.read_text()) for path in sorted(DEPLOY.rglob("*.yaml"))}
FOREIGN = {"ServiceMonitor", "InferenceService"}  # kinds of operators, which Kubernetes' schemas do not know
CORE = [name for name, document in DOCUMENTS.items() if document["kind"] not in FOREIGN]


def pods():
    deployment = DOCUMENTS["kubernetes/deployment.yaml"]["spec"]["template"]["spec"]
    return {"Deployment": deployment, "InferenceService": DOCUMENTS["kserve/inferenceservice.yaml"]["spec"]["predictor"]}


@pytest.mark.parametrize("name", CORE)
def test_manifests_follow_the_schemas_of_kubernetes(name):
    kubernetes_validate.validate(DOCUMENTS[name], kubernetes_validate.latest_version(), strict=True)


def test_the_schema_check_finds_an_error():
    wrong = {**DOCUMENTS["kubernetes/service.yaml"], "spec": {"ports": [{"port": "http"}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_every_expected_kind_has_a_manifest():
    kinds = {"ConfigMap", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget", "Service"}
    assert {document["kind"] for document in DOCUMENTS.values()} == kinds | FOREIGN


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_pods_have_minimal_privileges(kind):
    pod = pods()[kind]
    container = pod["containers"][0]
    context = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert pod["enableServiceLinks"] is False and pod["automountServiceAccountToken"] is False
    assert context["runAsNonRoot"] and context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
    assert context["runAsUser"] == 10001, "the image's own user"
    assert container["resources"].keys() == {"requests", "limits"}


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_environment_variables_are_settings(kind, monkeypatch):
    for variable in pods()[kind]["containers"][0]["env"]:
        assert variable["name"].startswith(PREFIX)
        monkeypatch.setenv(variable["name"], variable["value"])
    settings = read_settings({})
    assert settings.log_format == "json"


def test_only_the_autoscaler_sets_the_number_of_replicas():
    assert DOCUMENTS["kubernetes/autoscaler.yaml"]["spec"]["scaleTargetRef"]["name"] == "attend"
    assert "replicas" not in DOCUMENTS["kubernetes/deployment.yaml"]["spec"], "each apply would reset what the autoscaler has chosen"


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_the_grpc_port_is_the_one_that_is_served(kind):
    container = pods()[kind]["containers"][0]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["ATTEND_GRPC_PORT"] == "8001"
    if kind == "Deployment":
        assert {"name": "grpc", "containerPort": 8001} in container["ports"]


def test_a_client_reaches_both_ports_through_service_and_policy():
    ports = {port["name"] for port in pods()["Deployment"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in DOCUMENTS["kubernetes/service.yaml"]["spec"]["ports"]} == ports == {"http", "grpc"}
    clients, scrapers = DOCUMENTS["kubernetes/network.yaml"]["spec"]["ingress"]
    assert {port["port"] for port in clients["ports"]} == ports and "podSelector" in clients["from"][0]
    assert [port["port"] for port in scrapers["ports"]] == ["http"] and "namespaceSelector" in scrapers["from"][0]


def test_the_grace_period_exceeds_the_time_of_a_shutdown():
    pod = pods()["Deployment"]
    drain = float(next(v["value"] for v in pod["containers"][0]["env"] if v["name"] == "ATTEND_DRAIN_SECONDS"))
    assert pod["terminationGracePeriodSeconds"] > drain + Settings.model_fields["shutdown_seconds"].default


def test_the_config_map_has_valid_layers(tmp_path):
    text = DOCUMENTS["kubernetes/settings.yaml"]["data"]["attend.toml"]
    assert set(tomllib.loads(text)) <= set(Settings.model_fields)
    (tmp_path / "attend.toml").write_text(text)
    assert list(read_settings({}, tmp_path / "attend.toml").all_layers()) == ["default", "encoder"]


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_probed_paths_are_served(kind, http):
    container = pods()[kind]["containers"][0]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            assert http.get(container[probe]["httpGet"]["path"]).status_code == 200, probe


def test_the_autoscaler_and_the_monitor_read_existing_metrics(http):
    scaled = DOCUMENTS["kubernetes/autoscaler.yaml"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    path = DOCUMENTS["kubernetes/monitor.yaml"]["spec"]["endpoints"][0]["path"]
    assert f"\n{scaled} " in http.get(path).text


def test_all_manifests_select_the_same_pods():
    labels = DOCUMENTS["kubernetes/deployment.yaml"]["spec"]["template"]["metadata"]["labels"]
    for name, field in (("deployment", "selector"), ("disruption", "selector"), ("monitor", "selector"), ("network", "podSelector")):
        assert DOCUMENTS[f"kubernetes/{name}.yaml"]["spec"][field]["matchLabels"] == labels
    assert DOCUMENTS["kubernetes/service.yaml"]["spec"]["selector"] == labels


@pytest.mark.parametrize("kind", ["Deployment", "InferenceService"])
def test_the_memory_of_a_pod_suffices_for_what_the_settings_allow(kind):
    """Beside a call and all bodies and replies, half a GiB for the process and its layers, below the limit at which it ends itself."""
    limit = pods()[kind]["containers"][0]["resources"]["limits"]["memory"]
    settings = Settings()
    assert limit.endswith("Gi")
    assert 0.9 * int(limit[:-2]) * 2**30 >= settings.max_memory_bytes + (settings.max_buffered_bytes or settings.max_queue_bytes) + 2**29


def test_the_keys_file_and_the_key_of_prometheus_are_in_the_secrets_of_the_documentation():
    made = {
        line.split()[4]: line.split()[5]
        for line in (DEPLOY.parent / "docs" / "deployment.md").read_text().splitlines()
        if "create secret" in line
    }
    assert made == {"attend-keys": "--from-file=keys.txt", "attend-metrics": "--from-literal=key=THE_KEY_OF_PROMETHEUS"}
    pod = pods()["Deployment"]
    (volume,) = (volume["name"] for volume in pod["volumes"] if volume.get("secret") == {"secretName": "attend-keys"})
    (mount,) = (mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume)
    assert {"name": "ATTEND_KEYS_FILE", "value": f"{mount}/keys.txt"} in pod["containers"][0]["env"]
    endpoint = DOCUMENTS["kubernetes/monitor.yaml"]["spec"]["endpoints"][0]
    assert endpoint["authorization"]["credentials"] == {"name": "attend-metrics", "key": "key"}
