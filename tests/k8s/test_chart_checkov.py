"""What checkov has against the objects of all examples: nothing, but for what stands here with its reason."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
import yaml

from tests.k8s.tools import BIN, Document, run

TEST_POD = "Pod.serving.llm-warmroute-test"
SIDECAR = "Pod.*.agent"
ANY = "*"
# (check, kind.namespace.name) -> why it is no fault.
SKIPS = {
    ("CKV_K8S_11", ANY): "No limit of CPU: being throttled for 80 ms stops every stream for 80 ms. Memory is limited.",
    ("CKV_K8S_43", ANY): "Digests are known when an image is built; `image.digest` takes one, and tags never move.",
    ("CKV_K8S_15", ANY): "Tags never move, and with Always no router starts while the registry is away.",
    (
        "CKV_K8S_38",
        ANY,
    ): "Discovery asks the API server; test_tokens_are_where_they_are_needed holds the others to none.",
    (
        "CKV_K8S_35",
        "Deployment.*",
    ): "Probes take the engines' key from the environment only; everything else is a file.",
    ("CKV_K8S_8", TEST_POD): "It runs to its end within a minute.",
    ("CKV_K8S_9", TEST_POD): "It runs to its end within a minute.",
    ("CKV2_K8S_6", TEST_POD): "It listens nowhere and is gone after a minute.",
    ("CKV_K8S_8", SIDECAR): "The container is whoever's copies it.",
    ("CKV_K8S_9", SIDECAR): "Likewise.",
    ("CKV_K8S_21", "*.default.*"): "A pod to copy from has no namespace; kubectl's decides.",
    ("CKV2_K8S_6", SIDECAR): "What an agent may reach is its owner's to say.",
}


@pytest.mark.promise("The chart's pods meet the restricted Pod Security Standard with a read-only root.", "kubernetes")
@pytest.mark.timeout(300)
def test_checkov_finds_nothing(everything: dict[str, list[Document]], tmp_path: Path) -> None:
    """No check of checkov's fails that has no reason here, and every reason is still needed."""
    for name, found in everything.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(found))
    words = ("--framework", "kubernetes", "--skip-download", "--output", "json", "--compact", "--directory", tmp_path)
    report = json.loads(run([BIN / "checkov", *words]).stdout)

    used = set()
    unreasoned = []
    for failed in report["results"]["failed_checks"]:
        keys = {key for key in SKIPS if key[0] == failed["check_id"] and fnmatch.fnmatch(failed["resource"], key[1])}
        used |= keys
        if not keys:
            unreasoned.append(
                f"{failed['check_id']} {failed['check_name']}: {failed['resource']} {failed['file_path']}"
            )
    assert not unreasoned
    assert used == {*SKIPS}
    assert report["summary"]["passed"] > 500
