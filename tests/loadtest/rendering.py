"""A page of the documents whose block is rendered from the JSON of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from loadtest.common.report import Row, write_json
from loadtest.docgen import command as pages


class Page:
    """The page of one block, in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.root, self.file = name, folder, folder / f"{name}.json"
        self.target = folder / pages.BLOCKS[name]
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(f"a\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\nb\n")

    def render(self, command: str, rows: Sequence[Row], versions: Mapping[str, str] | None = None) -> str:
        """The page's text with these rows, which is the same when it is rendered again."""
        texts = []
        for _ in range(2):
            assert self._status(command, rows, versions) == 0
            texts.append(self.target.read_text())
        assert texts[0] == texts[1]
        assert "\nold\n" not in texts[0]
        return texts[0]

    def refuse(self, command: str, rows: Sequence[Row], versions: Mapping[str, str] | None = None) -> None:
        """Fail unless these rows are refused, and the page stays as it was."""
        before = self.target.read_text()
        assert self._status(command, rows, versions) == 1
        assert self.target.read_text() == before

    def _status(self, command: str, rows: Sequence[Row], versions: Mapping[str, str] | None) -> int:
        write_json(self.file, command, rows, versions)
        return pages.main([f"--{self.name}", str(self.file), "--root", str(self.root)])
