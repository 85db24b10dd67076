"""One version everywhere: a release that is half another one cannot be made."""

from __future__ import annotations

import re

import yaml

from router import __version__
from tests.supply.install import REPO


def test_chart_is_in_step() -> None:
    """The chart's version, and that of the image it runs, are the router's."""
    chart = yaml.safe_load((REPO / "helm" / "warmroute" / "Chart.yaml").read_text(encoding="utf-8"))
    assert str(chart["version"]) == __version__
    assert str(chart["appVersion"]) == __version__


def test_images_are_in_step() -> None:
    """Every tag of our image, in manifests and snippets, is the router's version."""
    named: dict[str, list[str]] = {}
    for path in [*(REPO / "deploy").rglob("*.y*ml"), *(REPO / "deploy").rglob("Dockerfile")]:
        text = path.read_text(encoding="utf-8")
        tags = re.findall(r"ghcr\.io/warmroute/warmroute:([\w.-]+)", text) + re.findall(r"ARG VERSION=(\S+)", text)
        if tags:
            named[path.name] = [tag.removesuffix("-demo") for tag in tags]
    assert "Dockerfile" in named
    assert {tag for tags in named.values() for tag in tags} == {__version__}


def test_changelog_is_in_step() -> None:
    """The newest version that the changelog tells of is the router's."""
    sections = re.findall(r"^## \[([^\]]+)\]", (REPO / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [name for name in sections if name != "Unreleased"]
    assert released[:1] == [__version__]


def test_the_release_can_write_the_images_digest() -> None:
    """The chart's values have the one empty digest that the release workflow fills in."""
    values = (REPO / "helm" / "warmroute" / "values.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(values)["image"]["digest"] == ""
    assert values.splitlines().count('  digest: ""') == 1
