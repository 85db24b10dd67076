"""Several routers in front of the same replicas; a test decides which of their messages arrive."""

from __future__ import annotations

from typing import Any

from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState
from router.core.peer_sync.limits import SharingLimits
from router.core.peer_sync.sync import PeerSyncCore
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.requests import ConversationRef, Prompt, RequestSpec
from tests.core.ready import ready

MODEL = "m"
TOKENS_A_BLOCK = BLOCK_BYTES // 4


def keys(group: int, blocks: int) -> list[int]:
    """Keys of a prompt's blocks: prompts of one group begin alike."""
    return [(group << 32) + n + 1 for n in range(blocks)]


class Several:
    """Routers by name, each with its PeerSyncCore."""

    def __init__(self, *names: str, replicas: int = 3, limits: SharingLimits = SharingLimits()) -> None:  # noqa: B008 - frozen
        self.ids = [f"http://r{n}" for n in range(replicas)]
        self.limits = limits
        self._routers: dict[str, Router] = {}
        self._sharing: dict[str, PeerSyncCore] = {}
        self.urgent, self.changed = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        self._group = 0
        for name in names:
            self.begin_anew(name)

    def begin_anew(self, name: str, now_s: float = 0.0) -> None:
        """The router's process is another one from now on: it reads the state of the others, and they begin with it."""
        router = Router(
            POLICIES["warm"](), index_bytes_max=1 << 24, remembered_prompts_max=1_000, default_cache_blocks=4_096
        )
        self._routers[name] = ready(router, self.ids, MODEL)

        def urgent() -> None:
            self.urgent[name] += 1

        def changed() -> None:
            self.changed[name] += 1

        self._sharing[name] = PeerSyncCore(router, name, self.limits, urgent, changed)
        for other in self._sharing.keys() - {name}:
            self._sharing[other].forget(name, now_s)
            self._sharing[other].begin(name)
            self.restore(other, name, now_s)

    def __getitem__(self, name: str) -> PeerSyncCore:
        return self._sharing[name]

    def router(self, name: str) -> Router:
        """The Router of one of them."""
        return self._routers[name]

    def member(self, name: str, id_: str) -> ReplicaState:
        """A replica as one of them sees it."""
        return self._routers[name].fleet.members[id_]

    def place(
        self,
        name: str,
        *,
        prompt_tokens: int,
        now_s: float,
        group: int | None = None,
        tokens: TokenPrompt | None = None,
        stream: bool = True,
        shared_blocks: int = 0,
        kin: ConversationRef | None = None,
        **how: Any,
    ) -> Lease:
        """Place a prompt that shares nothing, or as much as it can with those of its group, behind so many blocks that
        all such prompts begin with."""
        self._group += group is None
        chosen = group if group is not None else 1_000 + self._group
        blocks = [*keys(0, shared_blocks), *keys(chosen, prompt_tokens // TOKENS_A_BLOCK - shared_blocks)]
        chain = Chain(blocks, 7, (chosen << 32) + prompt_tokens, (), chosen)
        ask = RequestSpec(MODEL, Prompt(text=b"", first_user_end=0, skipped_bytes=4 * prompt_tokens), stream=stream)
        return self._routers[name].route(
            PlacementRequest(ask, MODEL, chain, f"{chosen}", tokens, conversation=kin), now_s, **how
        )

    def say(self, name: str, now_s: float) -> bytes:
        """What one of them says now."""
        message = self._sharing[name].say(now_s)
        assert message is not None, "it has nothing to say yet"
        return message

    def hear(self, sender: str, receiver: str, message: bytes, now_s: float) -> None:
        """One of them receives a message of another."""
        self._sharing[receiver].hear(sender, message, 0.0, now_s)

    def tell(self, sender: str, receiver: str, said_s: float, now_s: float) -> None:
        """One of them says something, and another receives it."""
        self.hear(sender, receiver, self.say(sender, said_s), now_s)

    def restore(self, sender: str, receiver: str, now_s: float) -> None:
        """One of them reads the complete state of another."""
        for _ in self._sharing[receiver].restore(sender, self._sharing[sender].state(now_s), 0.0, now_s):
            pass

    def tell_all(self, now_s: float) -> None:
        """Each says what it can, and all others receive it."""
        for name, sharing in self._sharing.items():
            message = sharing.say(now_s)
            for other in self._sharing.keys() - {name}:
                if message is not None:
                    self.hear(name, other, message, now_s)
