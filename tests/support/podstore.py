"""What stands behind the fake API server: pods with versions, and every change in order, as etcd keeps them.

One revision counts all changes of all pods, so that resource versions of one pod have gaps. A list is of one revision,
all its pages too. A watch is of the changes behind a revision; those of before `compacted` are forgotten, and whoever
asks for them is told 410. A change that makes a pod match a selector is ADDED to its watchers, one that makes it match
no longer DELETED, as kube-apiserver does it (staging/src/k8s.io/apiserver/pkg/storage/cacher).
"""

from __future__ import annotations

import base64
import copy
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Pod = dict[str, Any]
FIRST_REVISION = 1_000
_TERM = re.compile(r"\s*([^\s!=,()]+)\s+(in|notin)\s+\(([^)]*)\)\s*(?:,|$)|([^,(]+)(?:,|$)")


class Gone(Exception):
    """410: what was asked for is compacted."""


def pod(
    name: str,
    *,
    namespace: str = "default",
    ip: str | None = "10.0.0.1",
    ready: bool = True,
    phase: str = "Running",
    port: int | None = 8000,
    port_name: str = "http",
    node: str = "node-1",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    started: str = "2026-01-01T00:00:00Z",
) -> Pod:
    """An engine's pod as the API server shows it; what it does not say is there is left out of it, as there."""
    ports = [] if port is None else [{"name": port_name, "containerPort": port, "protocol": "TCP"}]
    status = {
        "phase": phase,
        "startTime": started,
        "conditions": [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": "True" if ready else "False"},
        ],
        "containerStatuses": [
            {"name": "engine", "ready": ready, "restartCount": 0, "containerID": f"containerd://{name}-0"}
        ],
    }
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": dict(labels if labels is not None else {"app": "vllm"}),
            "annotations": dict(annotations or {}),
            "creationTimestamp": started,
        },
        "spec": {"nodeName": node, "containers": [{"name": "engine", "image": "vllm", "ports": ports}]},
        "status": status,
    }


def pool(
    name: str,
    *ports: int,
    namespace: str = "default",
    labels: Mapping[str, str] | None = None,
    failure_mode: str = "FailOpen",
) -> Pod:
    """An InferencePool as the API server shows it; on port 8000 unless told otherwise."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "selector": {"matchLabels": dict(labels if labels is not None else {"app": "vllm"})},
            "targetPorts": [{"number": port} for port in ports or (8000,)],
            "endpointPickerRef": {
                "group": "",
                "kind": "Service",
                "name": "picker",
                "port": {"number": 9002},
                "failureMode": failure_mode,
            },
        },
    }


def matches(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether labels match a selector: `a=b`, `a==b`, `a!=b`, `a in (b, c)`, `a notin (b)`, `a`, `!a`, all of them."""
    for term in _TERM.finditer(selector):
        key, operator, values, plain = term.groups()
        if key:
            found = labels.get(key) in [value.strip() for value in values.split(",")]
            fits = found == (operator == "in")
        elif "!=" in plain:
            key, _, value = plain.partition("!=")
            fits = labels.get(key.strip()) != value.strip()
        elif "=" in plain:
            key, _, value = plain.replace("==", "=").partition("=")
            fits = labels.get(key.strip()) == value.strip()
        else:
            fits = (plain.strip().lstrip("!") in labels) != plain.strip().startswith("!")
        if not fits:
            return False
    return True


def merged(old: Any, changes: Any) -> Any:
    """A JSON merge patch (RFC 7396): objects are merged, None takes away, the rest is replaced."""
    if not isinstance(changes, dict):
        return copy.deepcopy(changes)
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = merged(new.get(key), value)
    return new


@dataclass(frozen=True)
class Change:
    """One revision: a pod before and after; `after` is None where it is gone, `last` is what a watcher is shown."""

    revision: int
    key: tuple[str, str]
    before: Pod | None
    after: Pod | None
    last: Pod

    def event(self, namespace: str, selector: str, name: str = "") -> dict[str, Any] | None:
        """What somebody who watches this namespace by this selector, or one name of it, is told."""
        if self.key[0] != namespace or name not in ("", self.key[1]):
            return None
        was = self.before is not None and matches(selector, self.before["metadata"].get("labels", {}))
        is_ = self.after is not None and matches(selector, self.after["metadata"].get("labels", {}))
        if not was and not is_:
            return None
        return {"type": "MODIFIED" if was and is_ else "ADDED" if is_ else "DELETED", "object": self.last}


@dataclass
class PodStore:
    """Pods, or pools, are never changed in place: every version is an object of its own."""

    revision: int = FIRST_REVISION
    compacted: int = 0  # changes up to this revision are forgotten
    pods: dict[tuple[str, str], Pod] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    made: int = 0  # pods, ever: their uids

    def create(self, pod: Pod) -> Pod:
        """ADDED; a uid and a version are given to it."""
        self.made += 1
        key = (pod["metadata"]["namespace"], pod["metadata"]["name"])
        assert key not in self.pods, f"AlreadyExists: {key}"
        return self._put(key, merged(pod, {"metadata": {"uid": f"00000000-0000-4000-8000-{self.made:012}"}}))

    def patch(self, name: str, changes: Pod, namespace: str = "default") -> Pod:
        """MODIFIED by a JSON merge patch."""
        return self._put((namespace, name), merged(self.pods[namespace, name], changes))

    def set_ready(self, name: str, ready: bool, namespace: str = "default") -> Pod:
        """The kubelet found the readiness probe to pass, or to fail."""
        conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
        return self.patch(name, {"status": {"conditions": conditions}}, namespace)

    def restart(self, name: str, namespace: str = "default") -> Pod:
        """Its container died and came back, in the same pod at the same address."""
        statuses = copy.deepcopy(self.pods[namespace, name]["status"]["containerStatuses"])
        for status in statuses:
            status["restartCount"] += 1
            status["containerID"] = status["containerID"].rpartition("-")[0] + f"-{status['restartCount']}"
        return self.patch(name, {"status": {"containerStatuses": statuses}}, namespace)

    def terminate(self, name: str, namespace: str = "default") -> Pod:
        """`kubectl delete` with grace: the pod is still there, and runs."""
        stamp = {"deletionTimestamp": "2026-01-01T01:00:00Z", "deletionGracePeriodSeconds": 30}
        return self.patch(name, {"metadata": stamp}, namespace)

    def evict(self, name: str, namespace: str = "default") -> Pod:
        """The node ran short of something: the pod stays, as Failed, and keeps its address in its status."""
        conditions = [{"type": "Ready", "status": "False"}]
        return self.patch(
            name, {"status": {"phase": "Failed", "reason": "Evicted", "conditions": conditions}}, namespace
        )

    def delete(self, name: str, namespace: str = "default") -> None:
        """DELETED: it is gone."""
        key = (namespace, name)
        before = self.pods.pop(key)
        self.revision += 1
        last = merged(before, {"metadata": {"resourceVersion": str(self.revision)}})
        self.changes.append(Change(self.revision, key, before, None, last))

    def compact(self) -> None:
        """Forget all changes up to now."""
        self.compacted = self.revision

    def _put(self, key: tuple[str, str], pod: Pod) -> Pod:
        self.revision += 1
        after = merged(pod, {"metadata": {"resourceVersion": str(self.revision)}})
        self.changes.append(Change(self.revision, key, self.pods.get(key), after, after))
        self.pods[key] = after
        return after

    # -- what can be asked -----------------------------------------------------------------------------------------

    def list(
        self, namespace: str, selector: str = "", limit: int = 0, token: str = "", name: str = ""
    ) -> dict[str, Any]:
        """A list of them, or one page of it; raises Gone when the revision of a page's first one is compacted."""
        revision, after = json.loads(base64.urlsafe_b64decode(token)) if token else (self.revision, "")
        if token and revision < self.compacted:
            raise Gone
        pods = self._at(revision)
        found = [
            pods[key]
            for key in sorted(pods)
            if key[0] == namespace
            and key[1] > after
            and name in ("", key[1])
            and matches(selector, pods[key]["metadata"].get("labels", {}))
        ]
        metadata: dict[str, Any] = {"resourceVersion": str(revision)}
        if limit and len(found) > limit:
            last = found[limit - 1]["metadata"]["name"]
            metadata["continue"] = base64.urlsafe_b64encode(json.dumps([revision, last]).encode()).decode()
            metadata["remainingItemCount"] = len(found) - limit
            found = found[:limit]
        kind = found[0]["kind"] if found else "Pod"
        return {"kind": f"{kind}List", "apiVersion": "v1", "metadata": metadata, "items": found}

    def _at(self, revision: int) -> dict[tuple[str, str], Pod]:
        """All pods as they were."""
        if revision == self.revision:
            return self.pods
        pods: dict[tuple[str, str], Pod] = {}
        for change in self.changes[: bisect_right(self.changes, revision, key=lambda change: change.revision)]:
            if change.after is None:
                pods.pop(change.key, None)
            else:
                pods[change.key] = change.after
        return pods

    def events(self, namespace: str, selector: str, behind: int, name: str = "") -> Iterator[dict[str, Any]]:
        """Watch events of the changes behind a revision; raises Gone when they are compacted."""
        if behind < self.compacted:
            raise Gone
        for change in self.changes[bisect_right(self.changes, behind, key=lambda change: change.revision) :]:
            if event := change.event(namespace, selector, name):
                yield event

    def bookmark(self) -> dict[str, Any]:
        """A watch event that says only how far the watch has come."""
        metadata = {"resourceVersion": str(self.revision)}
        return {"type": "BOOKMARK", "object": {"kind": "Pod", "apiVersion": "v1", "metadata": metadata}}


def failure(code: int, reason: str, message: str) -> dict[str, Any]:
    """A Status object, as every failed answer's body, and as the object of an ERROR event."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def expired(revision: str) -> dict[str, Any]:
    """Of 410."""
    return failure(410, "Expired", f"too old resource version: {revision}")
