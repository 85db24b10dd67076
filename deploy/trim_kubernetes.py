"""Takes out of an environment what the router never imports of the Kubernetes client: `python -m deploy.trim_kubernetes
SITE`.

The client is generated: 123 of its 126 MB are a class for each kind of object and each group of the API, twice, for
blocking code and for asyncio. Discovery needs its configuration (service account, kubeconfig) and its HTTP alone, and
decodes pods itself (router/engines/discovery/pods.py). Since version 36 the packages load these classes lazily, so
that taking them away breaks nothing that does not ask for them.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

GENERATED = ("client/api", "client/models", "aio/client/api", "aio/client/models")


def trim(site: Path) -> int:
    """Delete the generated classes below `site` (a site-packages folder) and return how many files went; their packages
    stay, empty but for `__init__.py`. Raises FileNotFoundError where the client is not as this knows it."""
    gone = 0
    for part in GENERATED:
        folder = site / "kubernetes" / part
        if not (folder / "__init__.py").is_file():
            raise FileNotFoundError(f"{folder}/__init__.py: the Kubernetes client is not laid out as it was")
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "__init__.py":
                path.unlink()
                gone += 1
    return gone


if __name__ == "__main__":
    print(f"{trim(Path(sys.argv[1]))} generated files of the Kubernetes client taken out")
