"""`python -m deploy.chart_schema`: writes `helm/warmroute/values.schema.json`, by which Helm refuses wrong values.

Theory: a misspelt value that is ignored is found at 3 a.m., so every object is closed. The settings in `config` come
from the router's own types, limits included. The suite fails while the file differs from the output of this module.
Only two kinds of objects are open: labels and annotations, with keys of the user, and objects of Kubernetes, which
its API server checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from router.cli.config_loader import TEXTS_OR_NUMBERS
from router.config.schema import field_keys
from router.core.placement.policies import POLICIES
from router.core.types.disagg_types import KvConnector
from router.former_names import REMOVED, REMOVED_VALUES, SETTINGS, UNTIL

TARGET = Path(__file__).resolve().parents[1] / "helm" / "warmroute" / "values.schema.json"
ENGINES_TARGET = TARGET.parent / "charts" / "engines" / TARGET.name
FORMER_TARGET = TARGET.parent / "files" / "former-settings.json"
REMOVED_TARGET = FORMER_TARGET.with_name("removed-settings.json")

Schema = dict[str, Any]

# Settings that are one of a few words; their types do not have these words.
WORDS = {
    "discovery.source": ("static", "kubernetes", "dns"),
    "discovery.scheme": ("http", "https"),
    "log.level": ("debug", "info", "warning", "error"),
    "log.format": ("auto", "json", "text"),
    "routing.policy": tuple(POLICIES),
    "disagg.kv_connector": ("", *KvConnector),
}
# Values of engines' pods that have the same schema as those of routers' pods.
ENGINE_POD_KEYS = ("nodeSelector", "tolerations", "affinity", "podLabels", "podAnnotations", "resources")
TEXT: Schema = {"type": "string"}
YES: Schema = {"type": "boolean"}
PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65_535}
# RFC 1123: names of objects, and of Secrets with dots.
NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?)?$"}
SECRET_KEY: Schema = {"type": "string", "pattern": "^[-._a-zA-Z0-9]*$"}
OF_USER: Schema = {"type": "object", "additionalProperties": TEXT}  # labels and annotations: only text is allowed
OF_KUBERNETES: Schema = {"type": "object"}  # a type of the API, closed there
AMOUNTS: Schema = {"oneOf": [{"type": "null"}, OF_KUBERNETES]}  # of resources; null removes the computed values
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+)?([KMGT]i?)?$"}


def whole(minimum: int, maximum: int | None = None) -> Schema:
    """Return the schema of a whole number."""
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def words(*allowed: str) -> Schema:
    """Return the schema of one of these words."""
    return {"type": "string", "enum": list(allowed)}


def many(item: Schema) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": item}


def closed(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    """Return the schema of an object with only these keys."""
    need = {"required": list(required)} if required else {}
    return {"type": "object", "additionalProperties": False, "properties": properties} | need


def setting(key: str, type_: Any) -> Schema:  # noqa: ANN401 - a type with its limits
    """Return the schema of one setting, from its type."""
    if key in WORDS:
        return words(*WORDS[key])
    if key in TEXTS_OR_NUMBERS:
        return {"oneOf": [PORT, TEXT]}  # a port by its number or name; `--set` makes a number of one
    schema: Schema = msgspec.json.schema(type_)
    if key in REMOVED_VALUES:  # a template refuses these with their replacement
        schema["enum"] = [*schema["enum"], *REMOVED_VALUES[key]]
    return schema


def config() -> Schema:
    """Return the schema of the whole settings file."""
    sections: dict[str, dict[str, Schema]] = {}
    top: dict[str, Schema] = {}
    types = field_keys()
    for key, type_ in types.items():
        section, _, name = key.partition(".")
        if name:
            sections.setdefault(section, {})[name] = setting(key, type_)
        else:
            top[key] = setting(key, type_)
    for former, key in SETTINGS.items():
        section, _, name = former.partition(".")
        described = {"description": f"Former name of `{key}`, read until version {UNTIL}."}
        sections.setdefault(section, {})[name] = setting(key, types[key]) | described
    for key in REMOVED:  # any value: a template refuses the key with its replacement
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = {"description": "Removed."}
    return closed(("discovery",), **top, **{name: closed(**fields) for name, fields in sections.items()})


def secret(**keys: Schema) -> Schema:
    """Return the schema of an existing Secret, and keys in it."""
    return closed(("existingSecret",), existingSecret=NAME, **keys)


def image() -> Schema:
    """Return the schema of an image that is not the router's."""
    return closed(
        ("repository",),
        repository={"type": "string", "pattern": "^[^:@ ]+(:[0-9]+/[^:@ ]+)?$"},
        tag=TEXT,
        digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    )


def valkey() -> Schema:
    """Return the values of the release's own store."""
    return closed(
        enabled=YES,
        image=image(),
        existingSecret=NAME,
        key=SECRET_KEY,
        maxMemory={"type": "string", "pattern": "^[1-9][0-9]*(mb|gb)$"},
        resources=closed(requests=OF_KUBERNETES, limits=OF_KUBERNETES, claims=many(OF_KUBERNETES)),
    )


def pod() -> dict[str, Schema]:
    """Return the values of the pods."""
    toleration = closed(
        key=TEXT,
        operator=words("Exists", "Equal", "Gt", "Lt"),
        value=TEXT,
        effect=words("NoSchedule", "PreferNoSchedule", "NoExecute"),
        tolerationSeconds=whole(0),
    )
    spread = closed(
        ("topologyKey", "maxSkew", "whenUnsatisfiable"),
        topologyKey=TEXT,
        maxSkew=whole(1),
        minDomains=whole(1),
        whenUnsatisfiable=words("DoNotSchedule", "ScheduleAnyway"),
        labelSelector=OF_KUBERNETES,
        matchLabelKeys=many(TEXT),
        nodeAffinityPolicy=words("Honor", "Ignore"),
        nodeTaintsPolicy=words("Honor", "Ignore"),
    )
    return {
        "replicaCount": whole(1),
        "image": closed(
            repository={"type": "string", "pattern": "^([^:@ ]+(:[0-9]+/[^:@ ]+)?)?$"},
            tag=TEXT,
            digest={"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
            pullPolicy=words("Always", "IfNotPresent", "Never"),
        ),
        "imagePullSecrets": many(closed(("name",), name=NAME)),
        "resources": closed(requests=AMOUNTS, limits=AMOUNTS, claims=many(OF_KUBERNETES)),
        "tokenizers": many(closed(model=TEXT, path=TEXT, repo=TEXT, revision=TEXT)),
        "huggingFace": secret(key=SECRET_KEY, cacheSizeLimit=QUANTITY),
        "runAsUser": {"oneOf": [{"type": "null"}, whole(1)]},
        "deploymentAnnotations": OF_USER,
        "podLabels": OF_USER,
        "podAnnotations": OF_USER,
        "extraEnv": many(closed(("name",), name=TEXT, value=TEXT, valueFrom=OF_KUBERNETES)),
        "extraEnvFrom": many(closed(prefix=TEXT, configMapRef=OF_KUBERNETES, secretRef=OF_KUBERNETES)),
        "extraArgs": many(TEXT),
        "extraVolumes": many(OF_KUBERNETES),
        "extraVolumeMounts": many(OF_KUBERNETES),
        "extraContainers": many(OF_KUBERNETES),
        "initContainers": many(OF_KUBERNETES),
        "tmpSizeLimit": QUANTITY,
        "stateSizeLimit": QUANTITY,
        "hostAliases": many(closed(("ip", "hostnames"), ip=TEXT, hostnames=many(TEXT))),
        "dnsPolicy": words("", "ClusterFirst", "Default", "None"),
        "dnsConfig": closed(nameservers=many(TEXT), searches=many(TEXT), options=many(closed(name=TEXT, value=TEXT))),
        "runtimeClassName": NAME,
        "maxSurge": {"oneOf": [whole(1), {"type": "string", "pattern": "^[1-9][0-9]?%$|^100%$"}]},
        "minReadySeconds": whole(0),
        "progressDeadlineSeconds": whole(1),
        "terminationGracePeriodSeconds": {"oneOf": [{"type": "null"}, whole(1)]},
        "preStopSleepSeconds": whole(0),
        "probes": closed(startupSeconds=whole(1), livenessSeconds=whole(10)),
        "topologySpreadConstraints": many(spread),
        "nodeSelector": OF_USER,
        "tolerations": many(toleration),
        "affinity": closed(nodeAffinity=OF_KUBERNETES, podAffinity=OF_KUBERNETES, podAntiAffinity=OF_KUBERNETES),
        "priorityClassName": NAME,
    }


def objects() -> dict[str, Schema]:
    """Return the values of objects beside the pods."""
    peer = closed(
        ipBlock=closed(("cidr",), cidr=TEXT, **{"except": many(TEXT)}),
        namespaceSelector=OF_KUBERNETES,
        podSelector=OF_KUBERNETES,
    )
    policy_port = closed(port={"oneOf": [PORT, TEXT]}, endPort=PORT, protocol=words("TCP", "UDP", "SCTP"))
    parent = closed(("name",), name=NAME, namespace=NAME, sectionName=TEXT, port=PORT, group=TEXT, kind=TEXT)
    return {
        "service": closed(
            type=words("ClusterIP", "NodePort", "LoadBalancer"),
            port=PORT,
            annotations=OF_USER,
            labels=OF_USER,
            nodePort={"oneOf": [{"type": "null"}, PORT]},
            externalTrafficPolicy=words("", "Cluster", "Local"),
            loadBalancerClass=TEXT,
            loadBalancerSourceRanges=many(TEXT),
            trafficDistribution=words("", "PreferClose", "PreferSameZone", "PreferSameNode"),
            ipFamilyPolicy=words("", "SingleStack", "PreferDualStack", "RequireDualStack"),
            ipFamilies=many(words("IPv4", "IPv6")),
        ),
        "metricsService": closed(enabled=YES),
        "serviceAccount": closed(create=YES, name=NAME, annotations=OF_USER),
        "rbac": closed(create=YES),
        "podDisruptionBudget": closed(
            enabled=YES, maxUnavailable={"oneOf": [whole(1), {"type": "string", "pattern": "^[1-9][0-9]?%$"}]}
        ),
        "autoscaling": closed(
            enabled=YES,
            minReplicas=whole(1),
            maxReplicas=whole(1),
            cpuPercent=whole(0),
            inFlightRequests=whole(0),
            scaleDownSeconds=whole(1, 1800),
        ),
        "networkPolicy": closed(
            enabled=YES,
            clients=many(peer),
            prometheus=many(peer),
            engines=many(peer),
            enginePorts=many(policy_port),
            apiServerCidrs=many({"type": "string", "pattern": "^[0-9a-fA-F.:]+/[0-9]+$"}),
            apiServerPorts=many(PORT) | {"minItems": 1},
            dns=many(peer),
            dnsPorts=many(PORT) | {"minItems": 1},
            store=many(peer),
            storePorts=many(PORT) | {"minItems": 1},
            extraIngress=many(closed(ports=many(policy_port), **{"from": many(peer)})),
            extraEgress=many(closed(ports=many(policy_port), to=many(peer))),
        ),
        "monitor": closed(
            enabled=YES,
            kind=words("PodMonitor", "ServiceMonitor"),
            interval={"type": "string", "pattern": "^[1-9][0-9]*(ms|s|m)$"},
            labels=OF_USER,
        ),
        "prometheusRule": closed(
            enabled=YES, labels=OF_USER, runbookUrl=TEXT, ttftSeconds={"type": "number", "exclusiveMinimum": 0}
        ),
        "pool": closed(
            create=YES,
            name=NAME,
            matchLabels=OF_USER,
            targetPorts=many(PORT) | {"minItems": 1, "maxItems": 8, "uniqueItems": True},
            failureMode=words("", "FailOpen", "FailClose"),
            failOpenWithoutKeys=YES,
            annotations=OF_USER,
        ),
        "envoy": closed(
            enabled=YES,
            replicaCount=whole(1),
            image=image(),
            concurrency=whole(1, 64),
            connectionsMax=whole(1),
            pickerTimeout={"type": "string", "pattern": "^(([0-9]+\\.)?[0-9]+s)?$"},
            drainSeconds=whole(1, 3600),
            bindAddress=words("0.0.0.0", "::"),  # noqa: S104 - of a pod, whose network policy says who reaches it
            service=closed(type=words("ClusterIP", "NodePort", "LoadBalancer"), port=PORT, annotations=OF_USER),
            resources=closed(requests=OF_KUBERNETES, limits=OF_KUBERNETES, claims=many(OF_KUBERNETES)),
        ),
        "extraObjects": many({"oneOf": [OF_KUBERNETES, TEXT]}),
        "grafanaDashboards": closed(enabled=YES, labels=OF_USER, annotations=OF_USER),
        "httpRoute": closed(enabled=YES, parentRefs=many(parent), hostnames=many(TEXT), annotations=OF_USER),
        "ingress": closed(
            enabled=YES,
            className=NAME,
            hosts=many(TEXT),
            tls=many(closed(("secretName",), secretName=NAME, hosts=many(TEXT))),
            annotations=OF_USER,
        ),
        "test": closed(
            enabled=YES,
            timeoutSeconds=whole(1),
            resources=closed(requests=AMOUNTS, limits=AMOUNTS, claims=many(OF_KUBERNETES)),
        ),
    }


def schema() -> Schema:
    """Return the schema of all values. Draft 7, which every Helm with schema support accepts."""
    store = secret(urlKey=SECRET_KEY, passwordKey=SECRET_KEY, caKey=SECRET_KEY, certificateKey=SECRET_KEY)
    values = closed(
        ("config",),
        nameOverride=NAME,
        fullnameOverride=NAME,
        commonLabels=OF_USER,
        commonAnnotations=OF_USER,
        config=config(),
        mode=words("proxy", "extproc", "both"),
        face=words("edge", "picker", "both") | {"description": f"Former name of `mode`, read until version {UNTIL}."},
        engines=OF_KUBERNETES,  # closed by the schema of that chart
        apiKeys=secret(key=SECRET_KEY),
        authSecret=secret(key=SECRET_KEY),
        adminToken=secret(key=SECRET_KEY),
        upstreamKey=secret(key=SECRET_KEY),
        tls=secret(clientCaKey=SECRET_KEY),
        peering=store,
        valkey=valkey(),
        shared=store | {"description": f"Former name of `peering`, read until version {UNTIL}."},
        upstreamTls=secret(caKey=SECRET_KEY, certificateKey=SECRET_KEY),
        # Of charts that contain this one: Helm's own, and the usual condition of a dependency.
        **{"global": OF_KUBERNETES, "enabled": YES},
        **pod(),
        **objects(),
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of warmroute"} | values


def engine_model() -> Schema:
    """Return the schema of one model of the chart of engines."""
    shared = pod()
    scaling = closed(
        minReplicas=whole(0), maxReplicas=whole(1), waiting=whole(1), prefillSeconds={"type": "number", "minimum": 0.1}
    )
    return closed(
        ("name", "engine"),
        name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$"},
        servedName=TEXT,
        model=TEXT,
        engine=words("vllm", "sglang", "simulated"),
        image=TEXT,
        replicas=whole(1),
        kind=words("Deployment", "LeaderWorkerSet"),
        role=words("prefill", "decode", "both"),
        nodesPerGroup=whole(2),
        gpus=whole(1),
        args=many(TEXT),
        env=shared["extraEnv"],
        volumes=many(OF_KUBERNETES),
        volumeMounts=many(OF_KUBERNETES),
        claim=NAME,
        cache=closed(claim=NAME, size=QUANTITY, storageClass=NAME),
        hubToken=closed(("secret",), secret=NAME, key=SECRET_KEY),
        tokenizer=TEXT,
        pulls=closed(("memoryGiB",), memoryGiB=whole(1), port=PORT),
        shmSize=shared["tmpSizeLimit"],
        shutdownSeconds=whole(1),
        startupSeconds=whole(5),
        securityContext=OF_KUBERNETES,
        autoscaling=scaling,
        **{key: shared[key] for key in ENGINE_POD_KEYS},
    )


def engines_schema() -> Schema:
    """Return the schema of all values of the chart of engines."""
    values = closed(
        enabled=YES,
        models=many(engine_model()),
        images=closed(vllm=TEXT, sglang=TEXT),
        imagePullSecrets=pod()["imagePullSecrets"],
        networkPolicy=closed(
            enabled=YES, splitPorts=many(PORT), gateways=many(OF_KUBERNETES), prometheus=many(OF_KUBERNETES)
        ),
        podDisruptionBudget=closed(enabled=YES),
        monitor=closed(enabled=YES, interval=objects()["monitor"]["properties"]["interval"], labels=OF_USER),
        keda=closed(prometheus={"type": "string", "pattern": "^https?://[^/]"}),
        **{"global": OF_KUBERNETES},
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the engines"} | values


def engines_text() -> str:
    """Return the file of the chart of engines."""
    return json.dumps(engines_schema(), indent=2, ensure_ascii=False) + "\n"


def former_text() -> str:
    """Return the file of former names that templates read: former section -> former key -> current dotted key."""
    return json.dumps(_by_section(SETTINGS), indent=2) + "\n"


def removed_text() -> str:
    """Return the file of removed settings that templates read: `keys` has section -> key -> replacement, and `values`
    has section -> key -> removed value -> replacement."""
    return json.dumps({"keys": _by_section(REMOVED), "values": _by_section(REMOVED_VALUES)}, indent=2) + "\n"


def _by_section(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a table by dotted keys as section -> key -> entry."""
    sections: dict[str, dict[str, Any]] = {}
    for dotted, entry in names.items():
        section, _, name = dotted.partition(".")
        sections.setdefault(section, {})[name] = entry
    return sections


def text() -> str:
    """Return the file."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    """Write the file."""
    TARGET.write_text(text(), encoding="utf-8")
    ENGINES_TARGET.write_text(engines_text(), encoding="utf-8")
    FORMER_TARGET.write_text(former_text(), encoding="utf-8")
    REMOVED_TARGET.write_text(removed_text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
