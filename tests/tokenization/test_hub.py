"""Tokenizers from the hub, which is a server of our own here."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

pytest.importorskip("huggingface_hub")

NEWEST, TAGGED = "1" * 40, "2" * 40
FETCH = """
import sys
from router.tokenization.tokenizers import download
print((download(sys.argv[1]) / "tokenizer.json").read_text())
"""


class Hub:
    """One model with two revisions; each file says which commit it is of."""

    async def model(self, request: web.Request) -> web.Response:
        """What the model has."""
        commit = {"main": NEWEST, "v1.0": TAGGED}.get(request.match_info.get("revision", "main"))
        if commit is None:
            headers = {"X-Error-Code": "RevisionNotFound"}
            return web.json_response({"error": "Invalid rev id"}, status=404, headers=headers)
        return web.json_response({"id": "team/model", "sha": commit, "siblings": [{"rfilename": "tokenizer.json"}]})

    async def tree(self, request: web.Request) -> web.Response:
        """The list of files of a commit."""
        commit = request.match_info["commit"]
        return web.json_response([{"type": "file", "path": "tokenizer.json", "size": len(commit), "oid": commit}])

    async def file(self, request: web.Request) -> web.Response:
        """One file."""
        commit = request.match_info["commit"]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{commit}"'}
        return web.Response(body=commit.encode(), headers=headers)

    async def serve(self) -> web.AppRunner:
        """Start at a free port."""
        app = web.Application()
        app.router.add_get("/api/models/team/model/revision/{revision}", self.model)
        app.router.add_get("/api/models/team/model", self.model)
        app.router.add_get("/api/models/team/model/tree/{commit}", self.tree)
        app.router.add_get("/team/model/resolve/{commit}/{name}", self.file)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner


@pytest.mark.parametrize(
    ("source", "found"), [("team/model", NEWEST), ("team/model@v1.0", TAGGED), ("team/model@v9", "")]
)
async def test_a_revision_of_the_hub(source: str, found: str, tmp_path: Path) -> None:
    """`NAME@REVISION` is that revision, `NAME` the newest, and one that is not there is no other instead."""
    runner = await Hub().serve()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    env = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}

    def fetch() -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-c", FETCH, source]
        return subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)

    try:
        done = await asyncio.to_thread(fetch)
    finally:
        await runner.cleanup()
    assert done.stdout.strip() == found, done.stderr
    assert ("CannotLoad" in done.stderr) is not bool(found)
