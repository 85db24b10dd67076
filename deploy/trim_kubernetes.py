"""Removes unused parts of the Kubernetes client from an environment: `python -m deploy.trim_kubernetes SITE`.

The client is generated: 123 of its 126 MB are a class for each kind of object and each group of the API, twice, for
blocking code and for asyncio. Discovery needs only its configuration (service account, kubeconfig) and its HTTP, and
decodes pods itself (router/engines/discovery/pods.py). Since version 36 the packages load these classes lazily, so
their removal breaks only code that uses them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

GENERATED = ("client/api", "client/models", "aio/client/api", "aio/client/models")


def trim(site: Path) -> int:
    """Delete the generated classes below `site` (a site-packages folder) and return the number of deleted files.

    Their packages stay, empty except for `__init__.py`. Raises FileNotFoundError if the client has an unknown layout.
    """
    gone = 0
    for part in GENERATED:
        folder = site / "kubernetes" / part
        if not (folder / "__init__.py").is_file():
            raise FileNotFoundError(f"{folder}/__init__.py: the Kubernetes client has an unknown layout")
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "__init__.py":
                path.unlink()
                gone += 1
    return gone


if __name__ == "__main__":
    print(f"{trim(Path(sys.argv[1]))} generated files of the Kubernetes client removed")
