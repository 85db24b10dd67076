"""What the chart renders to: the same under two Helms, and taken by the API servers of three Kubernetes versions."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import router
from deploy import manifests
from tests.k8s.tools import (
    CHART,
    CRDS,
    EXAMPLES,
    KUBECTL,
    LIBRARY,
    NAMESPACE,
    NEEDED,
    NEEDED_OPTIONS,
    RELEASE,
    REPO,
    STRUCTURES,
    VERSIONS,
    Document,
    by_name,
    containers,
    documents,
    example,
    helm,
    in_tools,
    invalid,
    only,
    pod_specs,
    run,
    template,
)

CUSTOM = {"monitoring.coreos.com/v1", "gateway.networking.k8s.io/v1"}
OF_PICKERS = {"inference.networking.k8s.io/v1", "gateway.envoyproxy.io/v1alpha1", "networking.istio.io/v1alpha3"}
RULES = {
    "groups": [{"name": "warmroute", "rules": [{"alert": "Down", "expr": "up == 0", "labels": {"a": "{{ $x }}"}}]}]
}


@pytest.fixture(scope="module")
def with_all(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """Every object that the chart can make, with rules and a dashboard that look like templates."""
    chart = tmp_path_factory.mktemp("chart") / "warmroute"
    shutil.copytree(CHART, chart)
    (chart / "files" / "rules.yaml").write_text(yaml.safe_dump(RULES))
    (chart / "files" / "dashboards").mkdir(exist_ok=True)
    (chart / "files" / "dashboards" / "odd.json").write_text('{"title": "{{ not a template }}"}')
    on = ("prometheusRule", "grafanaDashboards", "ingress", "autoscaling", "metricsService")
    return template(
        *("--values", example("secured"), "--set-json", 'ingress.hosts=["llm.example.com"]'),
        *(word for name in on for word in ("--set", f"{name}.enabled=true")),
        chart=chart,
    )


def test_both_engines_render_the_same(rendered: dict[str, list[Document]]) -> None:
    """Helm 4.2 as a library and Helm 4.3 as a program make equal objects of every example; only order may differ."""
    names = [*EXAMPLES, "default"]
    values = [NEEDED if name == "default" else yaml.safe_load(example(name).read_text()) for name in names]
    texts = in_tools(LIBRARY, CHART, RELEASE, NAMESPACE, text=json.dumps(values))

    for name, files in zip(names, texts, strict=True):
        texts_of_objects = (text for path, text in files.items() if path.endswith(".yaml"))
        found = [document for text in texts_of_objects for document in documents(text)]
        assert by_name(found) == by_name(rendered[name]), name
    assert len(names) >= 6


def test_objects_are_valid(everything: dict[str, list[Document]], with_all: list[Document]) -> None:
    """Every object of every example is valid, strictly, against the schemas of three Kubernetes versions."""
    found = [document for documents_ in [*everything.values(), with_all] for document in documents_]
    known = [document for document in found if document["apiVersion"] not in CUSTOM | OF_PICKERS]

    assert invalid(known) == []
    assert {"HorizontalPodAutoscaler", "Ingress", "NetworkPolicy"} <= {document["kind"] for document in known}


def test_validation_can_fail(rendered: dict[str, list[Document]]) -> None:
    """A key that Kubernetes does not have is seen, so the test above says something."""
    pod = only(rendered["default"], "Pod")
    wrong = pod | {"spec": pod["spec"] | {"restartpolicy": "Never"}}
    assert len(invalid([wrong], VERSIONS[:1])) == 1


def test_custom_resources_have_their_structure(with_all: list[Document]) -> None:
    """Objects of custom resources have the fields that their definitions have, and no others."""
    monitors = template("--values", example("vllm"), "--set", "monitor.enabled=true,monitor.kind=ServiceMonitor")
    found = [document for document in [*with_all, *monitors] if document["apiVersion"] in CUSTOM]

    assert in_tools(STRUCTURES, CRDS, text=json.dumps(found)) == []
    assert {document["kind"] for document in found} == {"HTTPRoute", "PodMonitor", "ServiceMonitor", "PrometheusRule"}
    assert only(with_all, "PrometheusRule")["spec"] == RULES


def test_rules_of_the_chart_are_the_rules(rendered: dict[str, list[Document]]) -> None:
    """The operator gets every rule as Prometheus gets it from the file, the templates of its annotations included;
    links go to the runbook that the values name, each to its alert's section, and nowhere without one."""
    rules = yaml.safe_load((CHART / "files" / "rules.yaml").read_text(encoding="utf-8"))
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    for rule in alerts:
        rule["annotations"]["runbook_url"] = f"https://wiki.example.com/llm#{rule['alert'].lower()}"
    own = ("--set", "prometheusRule.runbookUrl=https://wiki.example.com/llm")
    assert only(template("--values", example("secured"), *own), "PrometheusRule")["spec"] == rules

    for rule in alerts:
        del rule["annotations"]["runbook_url"]
    spec = only(rendered["secured"], "PrometheusRule")["spec"]
    assert spec == rules
    assert "{{ $labels.instance }}" in json.dumps(spec)


@pytest.mark.parametrize("limit", ["10", "2.5"])
def test_the_limit_of_the_time_to_first_token_is_a_value(limit: str) -> None:
    """It is the expression of one recorded series, which alerts read."""
    set_ = ("--set-json", f"prometheusRule.ttftSeconds={limit}")
    spec = only(template("--values", example("secured"), *set_), "PrometheusRule")["spec"]
    rules = {rule.get("record") or rule["alert"]: rule["expr"] for group in spec["groups"] for rule in group["rules"]}
    assert rules["warmroute:ttft_seconds:limit"] == f"vector({limit})"
    assert "scalar(warmroute:ttft_seconds:limit)" in rules["WarmrouteTtftHigh"]


def test_dashboards_are_left_as_they_are(with_all: list[Document]) -> None:
    """A dashboard comes to Grafana's sidecar as its file says, templates of its own included."""
    (odd,) = (document for document in with_all if document["metadata"]["name"].endswith("-dashboard-odd"))
    assert odd["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(odd["data"]["warmroute-odd.json"]) == {"title": "{{ not a template }}"}


def test_every_dashboard_of_the_chart_is_there(rendered: dict[str, list[Document]]) -> None:
    """Each file of `files/dashboards` is a ConfigMap of its own, equal to the file."""
    files = {path.name: json.loads(path.read_text()) for path in (CHART / "files" / "dashboards").glob("*.json")}
    found = [d["data"] for d in rendered["secured"] if "grafana_dashboard" in d["metadata"]["labels"]]
    shown = {name: json.loads(text) for data in found for name, text in data.items()}
    assert shown == {f"warmroute-{name}": content for name, content in files.items()}


def test_nothing_of_custom_resources_by_default(rendered: dict[str, list[Document]]) -> None:
    """A cluster without any operator takes the chart; it makes no Secret, and what it makes is a known few."""
    kinds = sorted(document["kind"] for document in rendered["default"])
    rights = ["Role", "RoleBinding", "ServiceAccount"]
    store = ["Deployment", "NetworkPolicy", "Service"]
    assert kinds == sorted([*store, "Deployment", "NetworkPolicy", "Pod", "PodDisruptionBudget", "Service", *rights])


@pytest.mark.promise("The chart puts no secret into a settings file and makes none.", "kubernetes")
def test_no_secret_is_ever_made(everything: dict[str, list[Document]], with_all: list[Document]) -> None:
    """The chart names Secrets and never makes one; no object is for the whole cluster."""
    for document in [document for found in [*everything.values(), with_all] for document in found]:
        assert document["kind"] not in {"Secret", "ClusterRole", "ClusterRoleBinding"}


def test_lint() -> None:
    """`helm lint --strict` has nothing to say of the chart and of each example."""
    for options in [NEEDED_OPTIONS, *(("--values", example(name)) for name in EXAMPLES)]:
        done = helm("lint", "--strict", CHART, *options)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stdout


def test_the_package_is_the_chart(rendered: dict[str, list[Document]], tmp_path: Path) -> None:
    """What `helm package` makes, as a release does, renders what the folder renders."""
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob(f"warmroute-{router.__version__}.tgz")
    assert by_name(template("--values", example("vllm"), chart=package)) == by_name(rendered["vllm"])


def test_kubectl_reads_it(rendered: dict[str, list[Document]]) -> None:
    """kubectl, of a version newer than the schemas, builds all of it as one kustomization would."""
    text = yaml.safe_dump_all(rendered["default"])
    done = run([KUBECTL, "label", "--local", "--filename", "-", "--output", "name", "seen=yes"], text)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(rendered["default"])


@pytest.mark.parametrize("release", ["x", "a-release-name-that-is-as-long-as-helm-allows-it-53c"])
def test_names_and_labels(release: str) -> None:
    """Names are DNS labels whatever the release is called, labels are values that Kubernetes takes."""
    namespaces = "config.discovery.namespaces={team-a," + "n" * 63 + "}"
    found = template(
        *("--values", example("secured"), "--set", namespaces, "--set", "autoscaling.enabled=true"), release=release
    )
    by_name(found)
    for document in found:
        meta = document["metadata"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", meta["name"]), meta["name"]
        assert meta["labels"]["app.kubernetes.io/instance"] == release
        assert meta["labels"]["app.kubernetes.io/version"] == router.__version__
        for value in meta["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", value)


def test_two_releases_share_a_namespace_of_engines() -> None:
    """Releases of one name in two namespaces, before engines in a third, do not make one another's Role."""
    options = (*NEEDED_OPTIONS, "--set", "config.discovery.namespaces={engines}")
    one, two = (
        {d["metadata"]["name"] for d in template(*options, "--namespace", namespace) if d["kind"] == "Role"}
        for namespace in ("team-a", "team-b")
    )
    assert not one & two


def test_every_image_has_a_version(everything: dict[str, list[Document]]) -> None:
    """Images have a tag that is no `latest`, or a digest; the router's is the chart's version."""
    for name, found in everything.items():
        for container in [container for spec in pod_specs(found) for container in containers(spec)]:
            assert re.search(r":(distroless-v)?[0-9][\w.-]*$|@sha256:[0-9a-f]{64}$", container["image"]), (
                name,
                container["image"],
            )
            if container["name"] not in ("agent", "envoy", "valkey"):
                assert container["image"] == f"registry.example.com/warmroute:{router.__version__}"
    digest = "sha256:" + "0" * 64
    found = template("--values", example("vllm"), "--set", f"image.digest={digest},replicaCount=1")
    for spec in pod_specs(found):
        assert spec["containers"][0]["image"] == f"registry.example.com/warmroute@{digest}"


def test_versions_are_in_step() -> None:
    """The chart's version and its application's are the router's."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == router.__version__


def test_manifests_are_up_to_date() -> None:
    """`deploy/manifests` holds what `make manifests` makes now, and no more."""
    assert {path.stem for path in manifests.TARGET.glob("*.yaml")} == {*manifests.EXAMPLES}
    for name in manifests.EXAMPLES:
        assert (manifests.TARGET / f"{name}.yaml").read_text() == manifests.render(name), "run make manifests"


def test_manifests_move_to_another_namespace() -> None:
    """Replacing the one word, as their head says, makes what Helm makes for that namespace."""
    for name in manifests.EXAMPLES:
        moved = documents(re.sub(r"\bdefault\b", "serving", (manifests.TARGET / f"{name}.yaml").read_text()))
        made = template("--values", example(name), "--skip-tests", release=manifests.release(name))
        assert by_name(list(without_helm(moved))) == by_name(list(without_helm(made)))


def without_helm(found: list[Document]) -> Iterator[Document]:
    """Without labels that say Helm manages it."""
    for document in found:
        metas = [document["metadata"]]
        if document["kind"] == "Deployment":
            metas.append(document["spec"]["template"]["metadata"])
        for meta in metas:
            for key in ("helm.sh/chart", "app.kubernetes.io/managed-by"):
                meta["labels"].pop(key, None)
        yield document


def test_the_charts_page_shows_commands_that_render() -> None:
    """Every `helm template|install` in the chart's README names files that are there, and renders."""
    page = (CHART / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"^helm install (\S+) helm/warmroute (.*)$", page, re.MULTILINE)
    for release, options in commands:
        words = [str(REPO / word) if word.startswith("helm/") else word.strip("'") for word in options.split()]
        assert template(*words, release=release)
    assert len(commands) >= 3
