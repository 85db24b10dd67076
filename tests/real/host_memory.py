"""Lets Mooncake's connectors of vLLM and SGLang serve KV blocks that lie in host memory: laid into `.venv-engines` and
loaded at every start of its Python and of `.venv-sglang`'s.

Theory: Mooncake's transfer engine moves host memory by TCP as it moves a GPU's, and the connectors' HTTP and ZeroMQ
protocols know nothing of devices. Two lines of theirs need a GPU all the same, so that each is stood in for when its
module has been imported, and nothing else is touched:

- vLLM 0.32 (mooncake_connector.py) binds its threads to the accelerator that is current, and torch raises where there
  is none: it is told number 0, which vLLM's platform for CPUs ignores.
- SGLang 0.5.23 (disaggregation/prefill.py, `send_kv_chunk`) copies the numbers of a prompt's pages into pinned memory
  and waits for a CUDA event before it reads them, where the sender `supports_host_tensor_indices`. Mooncake's sender is
  made to say no, as NIXL's does: the same numbers are then copied at once.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence


def _vllm(_: types.ModuleType) -> None:
    import torch

    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0


def _sglang(module: types.ModuleType) -> None:
    import torch

    if not torch.cuda.is_available():
        module.MooncakeKVSender.supports_host_tensor_indices = False


STAND_INS: dict[str, Callable[[types.ModuleType], None]] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector": _vllm,
    "sglang.srt.disaggregation.mooncake.conn": _sglang,
}


class Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, and then stands in."""

    def __init__(self, inner: importlib.abc.Loader, stand_in: Callable[[types.ModuleType], None]) -> None:
        self._inner = inner
        self._stand_in = stand_in

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """The module that its own loader makes."""
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Run it, and then what stands in."""
        self._inner.exec_module(module)
        self._stand_in(module)


class Finder(importlib.abc.MetaPathFinder):
    """Asked first, and silent about all modules but those two."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that stands in."""
        stand_in = STAND_INS.get(fullname)
        spec = stand_in and importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if not stand_in or not spec or not spec.loader:
            return None
        spec.loader = Loader(spec.loader, stand_in)
        return spec


sys.meta_path.insert(0, Finder())
