"""What the chart refuses, and in which words: somebody reads them at 3 a.m."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import chart_schema
from router.config.schema import field_keys
from router.former_names import REMOVED, SETTINGS
from tests.k8s.tools import CHART, NAMESPACE, NEEDED, NEEDED_OPTIONS, RELEASE, helm, settings_of, template

GOOD = NEEDED
# Labels and annotations: their keys are the user's.
TEXTS = {"type": "string"}

WRONG: dict[str, tuple[str, str]] = {
    "a misspelt value": ("replicas: 3", "at '': additional properties 'replicas' not allowed"),
    "a misspelt setting": (
        "config: {listen: {drain: 60}}",
        "at '/config/listen': additional properties 'drain' not allowed",
    ),
    "a misspelt section": ("config: {discover: {}}", "at '/config': additional properties 'discover' not allowed"),
    "a misspelt switch": (
        "autoscaling: {enable: true}",
        "at '/autoscaling': additional properties 'enable' not allowed",
    ),
    "a setting of another type": (
        "config: {listen: {connections_max: two}}",
        "at '/config/listen/connections_max': got string, want integer",
    ),
    "a setting beyond its limit": (
        "config: {extproc: {fallbacks_max: 5}}",
        "at '/config/extproc/fallbacks_max': maximum: got 5, want 4",
    ),
    "a time of nothing": (
        "config: {probe: {interval_s: 0}}",
        "at '/config/probe/interval_s': exclusiveMinimum: got 0, want 0",
    ),
    "a source that is none": (
        "config: {discovery: {source: k8s}}",
        "at '/config/discovery/source': value must be one of 'static', 'kubernetes', 'dns'",
    ),
    "a policy that is none": (
        "config: {routing: {policy: warmest}}",
        "at '/config/routing/policy': value must be one of",
    ),
    "an invalid host or port": ("config: {discovery: {port: 65536}}", "at '/config/discovery/port': 'oneOf' failed"),
    "a collector that is no URL": (
        "config: {discovery: {selector: app=vllm}, tracing: {endpoint: 'otel:4317'}}",
        "config.tracing.endpoint must be a URL",
    ),
    "no router": ("replicaCount: 0", "at '/replicaCount': minimum: got 0, want 1"),
    "a tag in the repository": (
        "image: {repository: 'ghcr.io/warmroute/warmroute:1'}",
        "at '/image/repository': 'ghcr.io/warmroute/warmroute:1' does not match pattern",
    ),
    "half a digest": ("image: {digest: sha256:abc}", "at '/image/digest': 'sha256:abc' does not match pattern"),
    "a Secret's contents for its name": (
        "adminToken: {existingSecret: 'Correct Horse'}",
        "at '/adminToken/existingSecret': 'Correct Horse' does not match pattern",
    ),
    "a Secret without its name": ("adminToken: aaaaaaaaaaaaaaaaaaaa", "at '/adminToken': got string, want object"),
    "a label that is no text": ("podLabels: {team: 7}", "at '/podLabels/team': got number, want string"),
    "a kind of monitor that is none": ("monitor: {kind: Monitor}", "at '/monitor/kind': value must be one of"),
    "a service of no type": ("service: {type: Clusterip}", "at '/service/type': value must be one of"),
    "a selector that is none": (
        "config: {discovery: {selector: 'app=vllm,tier>2'}}",
        "config.discovery.selector: 'tier>2' must be KEY=VALUE",
    ),
    "names without a name": (
        "config: {discovery: {source: dns, port: '8000'}}",
        "config.discovery.dns_name is required with source dns",
    ),
    "names without a port": (
        "config: {discovery: {source: dns, dns_name: vllm.a.svc, port: http}}",
        "config.discovery.port must be a number with source dns",
    ),
    "names of nowhere": (
        "config: {discovery: {source: dns, dns_name: vllm, port: '8000'}}",
        "networkPolicy.engines is required: config.discovery.dns_name does not contain the namespace",
    ),
    "nobody to send to": ("config: {discovery: {source: static}}", "config.replicas is required with source static"),
    "a list without its network": (
        "config: {discovery: {source: static}, replicas: ['http://a:8000']}",
        "networkPolicy.engines is required with source static",
    ),
    "replicas behind a closed network": (
        "config: {replicas: ['http://a:8000']}",
        "networkPolicy.extraEgress is required: discovery does not find config.replicas",
    ),
    "root": ("runAsUser: 0", "at '/runAsUser': 'oneOf' failed"),
    "a secret in the open": (
        "config: {admin: {token: aaaaaaaaaaaaaaaaaaaa}}",
        "would be readable in the pods' annotations: store it in a Secret and set adminToken",
    ),
    "an engine's key in the open": (
        "config: {probe: {api_key: aaaaaaaaaaaaaaaaaaaa}}",
        "config.probe.api_key would be readable in the pods' annotations",
    ),
    "one thing said twice": (
        "{config: {auth: {keys_file: /keys}}, apiKeys: {existingSecret: keys}}",
        "config.auth.keys_file and apiKeys.existingSecret conflict: set only one of them",
    ),
    "isolation without a secret": (
        "{config: {auth: {isolate: true}}, apiKeys: {existingSecret: keys}}",
        "authSecret.existingSecret is required: the salts of isolated tenants are derived from it",
    ),
    "isolation of nobody": (
        "{config: {auth: {isolate: true}}, authSecret: {existingSecret: s}}",
        "apiKeys.existingSecret is required: config.auth.isolate needs API keys",
    ),
    "an open admin listener": (
        "config: {listen: {admin_host: 0.0.0.0}}",
        "adminToken.existingSecret is required: config.listen.admin_host is not a loopback address",
    ),
    "certificates that kubelets lack": (
        "tls: {existingSecret: t, clientCaKey: ca.crt}",
        "adminToken.existingSecret is required with tls.clientCaKey",
    ),
    "loopback": ("config: {listen: {host: 127.0.0.1}}", "config.listen.host: '127.0.0.1' cannot be reached"),
    "any port": ("config: {listen: {port: 0}}", "config.listen.port and config.listen.admin_port must be fixed"),
    "one port for two": (
        "config: {listen: {port: 8001}}",
        "config.listen.port and config.listen.admin_port must differ",
    ),
    "a grace that cuts streams": (
        "terminationGracePeriodSeconds: 199",
        "199 s would cut streams; lame duck, drain, 15 s for the exit and preStopSleepSeconds need 200 s",
    ),
    "engines that reach one router only": (
        "config: {events: {bind: 'tcp://0.0.0.0:5557'}}",
        "config.events.bind needs replicaCount 1",
    ),
    "a port past the chart": (
        "extraEnv: [{name: WARMROUTE_LISTEN_PORT, value: '9000'}]",
        "extraEnv: WARMROUTE_LISTEN_PORT would bypass the chart",
    ),
    "a part of nothing": (
        "{autoscaling: {enabled: true}, resources: {requests: {cpu: null}}}",
        "resources.requests.cpu is required: autoscaling.cpuPercent is a percentage of it",
    ),
    "a label that Services go by": (
        "podLabels: {app.kubernetes.io/name: gateway}",
        "app.kubernetes.io/name is reserved for the chart, because Services and Helm use it",
    ),
    "a label that Helm goes by": (
        "commonLabels: {app.kubernetes.io/managed-by: us}",
        "app.kubernetes.io/managed-by is reserved for the chart",
    ),
    "a monitor that gets 401": (
        "{apiKeys: {existingSecret: keys}, monitor: {enabled: true}}",
        "adminToken.existingSecret is required: with API keys or config.admin.token_file, metrics require the",
    ),
    "a metrics Service that nobody may ask": (
        "{config: {auth: {keys_file: /keys}}, metricsService: {enabled: true}}",
        "adminToken.existingSecret is required: with API keys",
    ),
    "a token that monitors do not have": (
        "{config: {admin: {token_file: /token}}, monitor: {enabled: true}}",
        "adminToken.existingSecret is required: with API keys or config.admin.token_file",
    ),
    "a name that no Service may have": ("nameOverride: a.b", "is not a valid name of a Service"),
    "fewer at most than at least": (
        "autoscaling: {enabled: true, maxReplicas: 1}",
        "autoscaling.maxReplicas: 1 is less than minReplicas, 2",
    ),
    "no target for scaling": (
        "autoscaling: {enabled: true, cpuPercent: 0}",
        "autoscaling: cpuPercent and inFlightRequests",
    ),
    "a route to nowhere": ("httpRoute: {enabled: true}", "httpRoute.parentRefs is required"),
    "an ingress without names": ("ingress: {enabled: true}", "ingress.hosts is required"),
    "a monitor that clients shut out": (
        "{networkPolicy: {clients: [{podSelector: {}}]}, monitor: {enabled: true}}",
        "networkPolicy.prometheus is required: metrics are on the main port",
    ),
    "replicas that can be added and never reached": (
        "config: {admin: {replicas_allowed: ['http://10.0.0.0/8:8000']}}",
        "networkPolicy.extraEgress is required: discovery does not find replicas of config.admin.replicas_allowed",
    ),
    "less memory than the settings need": (
        "resources: {limits: {memory: 512Mi}}",
        "512Mi is less than the request of a router with these settings, 640Mi: reduce config.routing.index_bytes_max",
    ),
    "less CPU than is asked for": (
        "resources: {limits: {cpu: 0.25}}",
        "resources.limits.cpu: 0.25 is less than the request of a router with these settings, 500m",
    ),
    "a rollout that fails while it waits": (
        "progressDeadlineSeconds: 30",
        "progressDeadlineSeconds: 30 must be greater than minReadySeconds, 30",
    ),
    "a port for root": ("config: {listen: {port: 80}}", "config.listen.port: 80 is below 1024"),
    "a network with a host in it": (
        "networkPolicy: {apiServerCidrs: [10.96.0.1/32, 'fd00::1/128', 0.0.0.0/0, 10.96.0.1/16]}",
        "networkPolicy.apiServerCidrs: 10.96.0.1/16 has bits after its mask",
    ),
    "an argument past the chart": ("extraArgs: [--port, '9000']", "extraArgs: '--port' would bypass the chart"),
    "a setting past the chart": (
        "extraArgs: [--set, listen.port=9000]",
        "extraArgs: 'listen.port=9000' would bypass the chart",
    ),
    "settings that are the chart's": (
        "podAnnotations: {warmroute/settings: 'a: b'}",
        "podAnnotations: warmroute/settings is reserved for the chart",
    ),
    "a node's port of a Service inside": ("service: {nodePort: 30080}", "they are invalid for type ClusterIP"),
    "networks of no load balancer": (
        "service: {loadBalancerSourceRanges: [10.0.0.0/8]}",
        "service.loadBalancerClass, service.loadBalancerSourceRanges require service.type LoadBalancer",
    ),
    "a tokenizer of nowhere": ("tokenizers: [{model: a}]", "tokenizers: 'a' needs either a path or a repo"),
    "a tokenizer of two places": ("tokenizers: [{model: a, path: /a, repo: b/c}]", "tokenizers: 'a' needs either"),
    "a revision of a folder": (
        "tokenizers: [{path: /a, revision: b}]",
        "tokenizers: '/a' must be an absolute path of a folder in the pod",
    ),
    "nothing to scrape": (
        "{config: {listen: {metrics_on_main: false}}, monitor: {enabled: true}}",
        "without config.listen.metrics_on_main metrics cannot be scraped",
    ),
}


def merged(good: dict[str, Any], wrong: dict[str, Any]) -> dict[str, Any]:
    """The one over the other."""
    both = dict(good)
    for key, value in wrong.items():
        deep = isinstance(value, dict) and isinstance(good.get(key), dict)
        both[key] = merged(good[key], value) if deep else value
    return both


@pytest.mark.promise("The chart puts no secret into a settings file and makes none.", "kubernetes")
@pytest.mark.promise("The chart opens the admin listener to a cluster only with a token.", "kubernetes")
@pytest.mark.promise("The chart refuses a monitor without the admin token if API keys are on.", "kubernetes")
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused(name: str, tmp_path: Path) -> None:
    """Each wrong values file is refused, and the message names the value and what is wrong with it."""
    values, message = WRONG[name]
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(merged(GOOD, yaml.safe_load(values))))

    done = helm("template", RELEASE, CHART, "--namespace", NAMESPACE, "--values", file)

    assert done.returncode != 0
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "nil pointer" not in done.stderr


def test_a_typo_on_the_command_line_is_refused() -> None:
    """`--set` of a name that is none does not pass in silence."""
    done = helm("template", RELEASE, CHART, *NEEDED_OPTIONS, "--set", "replicaCuont=3")
    assert done.returncode != 0
    assert "additional properties 'replicaCuont' not allowed" in done.stderr


def test_rules_that_are_not_there(tmp_path: Path) -> None:
    """A copy of the chart that lost its rules says so, instead of installing none."""
    chart = tmp_path / "warmroute"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("rules.yaml"))
    done = helm("template", RELEASE, chart, *NEEDED_OPTIONS, "--set", "prometheusRule.enabled=true")
    assert done.returncode != 0
    assert "prometheusRule.enabled: this copy of the chart has no files/rules.yaml" in done.stderr


def test_every_problem_is_told_at_once() -> None:
    """Two mistakes are two lines of one message."""
    done = helm("template", RELEASE, CHART, "--set", "httpRoute.enabled=true,terminationGracePeriodSeconds=1")
    for message in ("image.repository is required", "httpRoute.parentRefs", "would cut streams"):
        assert message in done.stderr


def test_the_good_ones_are_taken(tmp_path: Path) -> None:
    """What the wrong files are made from is right."""
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    assert template("--values", file)


def test_a_port_as_a_number(secrets: Path, tmp_path: Path) -> None:
    """`--set config.discovery.port=8000` makes a number: that port, in a values file and with `dns` too."""
    of_dns = {"discovery": {"source": "dns", "dns_name": "vllm.serving.svc", "port": 8000}}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(NEEDED | {"config": of_dns}))
    selected = (*NEEDED_OPTIONS, "--set", "config.discovery.port=8000")
    for options in (selected, ("--values", file)):
        assert settings_of(template(*options), secrets).discovery.port == "8000"


def test_releases_whose_names_begin_with_a_digit() -> None:
    """Helm takes such a release, a Service does not: the chart says what to do, and then does it."""
    done = helm("template", "7b", CHART, *NEEDED_OPTIONS)
    assert "'7b-warmroute' is not a valid name of a Service" in done.stderr
    assert template(*NEEDED_OPTIONS, "--set", "fullnameOverride=llm-7b", release="7b")


def test_a_part_of_another_chart(tmp_path: Path) -> None:
    """As a dependency it takes `global`, and its usual condition: on, it is all there; off, nothing is."""
    (tmp_path / "charts").mkdir()
    shutil.copytree(CHART, tmp_path / "charts" / "warmroute")
    needs = {"name": "warmroute", "version": "0.1.0", "condition": "warmroute.enabled"}
    about = {"apiVersion": "v2", "name": "umbrella", "version": "1.0.0", "dependencies": [needs]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(about))
    file = tmp_path / "values.yaml"
    for enabled in (True, False):
        file.write_text(yaml.safe_dump({"global": {"team": "a"}, "warmroute": GOOD | {"enabled": enabled}}))
        kinds = {document["kind"] for document in template(chart=tmp_path)}
        assert ({"Deployment", "Service", "Role", "NetworkPolicy"} <= kinds) is enabled
        assert bool(kinds) is enabled


# The schema


def test_the_schema_is_up_to_date() -> None:
    """`values.schema.json` is what the router's settings make now."""
    assert chart_schema.TARGET.read_text(encoding="utf-8") == chart_schema.text(), "run make manifests"


def test_every_setting_is_in_the_schema() -> None:
    """Every setting of the router may be given in `config`, under its name or its former one. A removed setting is also
    there, because a template refuses it with its replacement."""
    config = chart_schema.schema()["properties"]["config"]["properties"]
    named = {
        f"{name}.{key}" if "properties" in part else name
        for name, part in config.items()
        for key in part.get("properties", {"": None})
    }
    assert named == {*field_keys(), *SETTINGS, *REMOVED}


def test_every_object_is_closed() -> None:
    """No object of the chart's own takes a key that it does not know; Kubernetes' own are few and counted."""
    open_ones = []

    def walk(schema: Any, path: str) -> None:
        if isinstance(schema, list):
            for number, part in enumerate(schema):
                walk(part, f"{path}[{number}]")
        elif isinstance(schema, dict):
            if schema.get("type") == "object" and schema.get("additionalProperties") not in (False, TEXTS):
                open_ones.append(path)
            for key, part in schema.items():
                walk(part, f"{path}.{key}" if key not in {"properties", "items"} else path)

    walk(chart_schema.schema(), "")
    of_kubernetes = (
        ".extra",
        ".initContainers",
        ".affinity",
        ".resources",
        ".test.resources",
        ".envoy.resources",
        ".valkey.resources",
        ".global",
    )
    outside = [path for path in open_ones if not path.startswith(of_kubernetes)]
    assert sorted({path.split(".")[-1] for path in outside}) == [
        "engines",
        "labelSelector",
        "namespaceSelector",
        "podSelector",
    ]


def test_defaults_and_schema_have_the_same_names() -> None:
    """Every value in values.yaml is in the schema and the other way round, `config` and what other charts say apart."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads(chart_schema.TARGET.read_text(encoding="utf-8"))["properties"]
    assert {*schema} - {"global", "enabled", "face", "shared"} == {*values}
    for name in {*values} - {"config", "affinity", "resources", "dnsConfig"}:
        if "properties" in schema[name]:
            assert {*schema[name]["properties"]} == {*values[name]}, name


def test_every_value_is_explained() -> None:
    """Above each value of values.yaml, or above the group that it begins or belongs to, is a comment."""
    lines = (CHART / "values.yaml").read_text(encoding="utf-8").splitlines()
    explained = False
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith("#"):
            explained = bool(text)
        elif text.endswith(":") and not line.startswith(" "):
            explained = True  # a section: its values follow
        else:
            assert explained, f"values.yaml:{number + 1}: {line}"
