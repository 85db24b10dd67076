"""One history: load, faults drawn from a seed, and the check of each response by the model."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

import aiohttp

from loadtest.faults.cases.overload import Tenant
from loadtest.faults.histories.engines import MODEL, StoringEngine
from loadtest.faults.histories.fleet import HistoryRouter, Stores
from loadtest.faults.histories.model import Model

OWNERS = (Tenant("acme"), Tenant("umbra"))
RATED = (Tenant("rated0"), Tenant("rated1"))
PER_MIN = 120
CHAOS_EVERY_S, FAULT_S = 0.8, (0.2, 4.0)
STORE_EVERY_S, READ_EVERY_S, CHAT_EVERY_S, RATED_EVERY_S = 0.1, 0.03, 0.1, 0.06
TIMEOUT_S, AGAIN_S = 10.0, 1.0
READ_MAX = 400  # number of stored responses that are read from every router at the end
ROUTER_FAULTS = ("stop", "kill", "cut there", "cut back", "cut", "lose")
STORE_FAULTS = ("emptied", "frozen", "full", "killed", "failed over")
ENGINE_FAULTS = ("engine away",)


class History:
    """A history of `seconds_s`; the first engine is always available."""

    def __init__(
        self,
        routers: Sequence[HistoryRouter],
        stores: Stores,
        engines: Sequence[StoringEngine],
        http: aiohttp.ClientSession,
        seed: int,
    ) -> None:
        self._routers, self._stores, self._engines, self._http = routers, stores, engines, http
        self._chance = random.Random(seed)
        self.model = Model(len(routers))
        self.faults: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.timeline: list[tuple[float, str]] = []  # (seconds since the start, start or end of a fault)
        self._began_s = time.monotonic()
        self._at_fault: set[int] = set()  # routers with a current fault
        self._changes = [0] * len(routers)  # number of times that each router was stopped, killed or restored
        self._store_at_fault = False
        self._engine_changes = 0

    async def go(self, seconds_s: float) -> None:
        """Run load and faults; no fault remains at the end."""
        end_s = time.monotonic() + seconds_s
        async with asyncio.TaskGroup() as group:
            group.create_task(self._chaos(end_s))
            for every_s, one in (
                (STORE_EVERY_S, self._store),
                (READ_EVERY_S, self._read),
                (CHAT_EVERY_S, self._chat),
                (RATED_EVERY_S, self._send_rated_chat),
            ):
                group.create_task(self._load(end_s, every_s, one))

    # -- load ----------------------------------------------------------------------------------------------------

    async def _load(self, end_s: float, every_s: float, one: Callable[[int], Coroutine[None, None, None]]) -> None:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end_s:
                there = [each for each in range(len(self._routers)) if self._changes[each] % 2 == 0]
                if there:
                    group.create_task(one(self._chance.choice(there)))
                await asyncio.sleep(self._chance.expovariate(1 / every_s))

    async def _ask(
        self, router: int, tenant: Tenant, method: str, path: str, body: object = None
    ) -> tuple[int, dict[str, object]] | None:
        """Return status and response; None if the router was stopped or killed after it was chosen, which excuses any
        failure. An odd number of changes means that it was stopped or killed between the choice and this call."""
        before, url = self._changes[router], self._routers[router].url + path
        found: tuple[int, dict[str, object]] = 0, {}
        try:
            async with self._http.request(method, url, json=body, headers=tenant.headers) as response:
                found = response.status, await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            found = 0, {"error": f"{type(error).__name__} at {path}"}
        if before % 2 or self._changes[router] != before:
            self.requests["excused"] += 1
            return None
        self.requests[str(found[0])] += 1
        return found

    async def _store(self, router: int) -> None:
        tenant, life = self._chance.choice(OWNERS), self.model.lives[router]
        answer = await self._ask(router, tenant, "POST", "/v1/responses", {"model": MODEL, "input": tenant.name})
        if answer is None:
            return
        status, said = answer
        if status == 200:
            self.model.on_stored(str(said["id"]), tenant.name, router, life, time.monotonic())
        else:
            self._report_failure("to store a response", router, answer)

    def _report_failure(self, what: str, router: int, answer: tuple[int, dict[str, object]]) -> None:
        at_s = time.monotonic() - self._began_s
        self.model.on_failed(what, f"at {at_s:.1f} s at router {router}: {answer[0]} {answer[1]}")

    async def _read(self, router: int) -> None:
        if not self.model.stored:
            return
        id_ = self._chance.choice(list(self.model.stored)[-200:])
        tenant, life, engines = self._chance.choice(OWNERS), self.model.lives[router], self._engine_changes
        answer = await self._ask(router, tenant, "GET", f"/v1/responses/{id_}")
        if answer is not None and engines == self._engine_changes and any(e.keeps(id_) for e in self._engines):
            self.model.on_read(id_, tenant.name, router, life, answer[0], _content(answer[1]))

    async def _chat(self, router: int) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"{self._chance.random()} " * 50}]}
        answer = await self._ask(router, self._chance.choice(OWNERS), "POST", "/v1/chat/completions", body)
        if answer is not None and answer[0] != 200:
            self._report_failure("a chat", router, answer)

    async def _send_rated_chat(self, router: int) -> None:
        tenant = self._chance.choice(RATED)
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        answer = await self._ask(router, tenant, "POST", "/v1/chat/completions", body)
        if answer is not None and answer[0] == 200:
            self.model.on_served(tenant.name, time.monotonic())
        elif answer is not None and answer[0] != 429:
            self._report_failure("a chat of a tenant with a rate", router, answer)

    # -- faults --------------------------------------------------------------------------------------------------

    async def _chaos(self, end_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < end_s:
                fault = self._chance.choice((*ROUTER_FAULTS, *STORE_FAULTS, *ENGINE_FAULTS))
                lasts_s = self._chance.uniform(*FAULT_S)
                if (work := self._fault(fault, lasts_s)) is not None:
                    self.faults[fault] += 1
                    group.create_task(work)
                await asyncio.sleep(self._chance.uniform(0.0, 2 * CHAOS_EVERY_S))
                self.model.settle(time.monotonic())

    def _fault(self, fault: str, lasts_s: float) -> Coroutine[None, None, None] | None:
        """Return the coroutine of a fault and its end; None if its target already has a fault."""
        if fault in ENGINE_FAULTS:
            return self._engine_away(lasts_s) if all(each.is_there for each in self._engines) else None
        if fault in STORE_FAULTS:
            if self._store_at_fault:
                return None
            self._store_at_fault = True
            return self._store_fails(fault, lasts_s)
        free = [each for each in range(len(self._routers)) if each not in self._at_fault]
        if not free:
            return None
        router = self._chance.choice(free)
        self._at_fault.add(router)
        return self._router_fails(router, fault, lasts_s)

    def _note(self, what: str) -> None:
        self.timeline.append((time.monotonic() - self._began_s, what))

    async def _router_fails(self, number: int, fault: str, lasts_s: float) -> None:
        router, model = self._routers[number], self.model
        self._note(f"router {number}: {fault}")
        if fault == "stop":
            model.on_deaf(number, time.monotonic())
            self._changes[number] += 1
            router.send(signal.SIGSTOP)
            await asyncio.sleep(lasts_s)
            router.send(signal.SIGCONT)
            self._changes[number] += 1
        elif fault == "kill":
            model.on_killed(number, time.monotonic())
            self._changes[number] += 1
            await router.kill()
            await asyncio.sleep(lasts_s)
            await router.start()
            await self._wait_until_ready(router)
            self._changes[number] += 1
        else:
            model.on_deaf(number, time.monotonic())
            router.network.cut(there=fault != "cut back", back=fault != "cut there")
            await asyncio.sleep(lasts_s)
            if fault == "lose":
                await router.network.lose()
            router.network.mend()
        self._at_fault.discard(number)
        self._note(f"router {number}: well")
        self._report_connected(number)

    async def _store_fails(self, fault: str, lasts_s: float) -> None:
        for number in range(len(self._routers)):
            self.model.on_deaf(number, time.monotonic())
        store = self._stores.leads
        self._note(f"store: {fault}")
        if fault == "failed over":
            await self._stores.fail_over([router.network for router in self._routers])
        else:
            await store.fail(fault)
            await asyncio.sleep(lasts_s)
            await store.mend(fault)
            if fault == "killed":
                await self._stores.refollow()
        self._store_at_fault = False
        self._note("store: well")
        for number in range(len(self._routers)):
            self._report_connected(number)

    def _report_connected(self, number: int) -> None:
        if not self._store_at_fault and number not in self._at_fault:
            self.model.on_hearing(number, time.monotonic())

    async def _engine_away(self, lasts_s: float) -> None:
        engine = self._engines[-1]
        self._note("engine: away")
        self._engine_changes += 1
        await engine.close()
        await asyncio.sleep(lasts_s)
        await engine.open()
        self._note("engine: well")
        self._engine_changes += 1

    async def _wait_until_ready(self, router: HistoryRouter) -> None:
        for _ in range(600):
            with suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http.get(router.admin_url + "/readyz") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)

    # -- the end -------------------------------------------------------------------------------------------------

    async def page(self, router: HistoryRouter) -> dict[str, object]:
        """Return /admin/replicas of a router; empty without a response."""
        with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError):
            async with self._http.get(router.admin_url + "/admin/replicas") as response:
                found: dict[str, object] = await response.json()
                return found
        return {}

    async def judge_stored(self, within_s: float) -> int:
        """Read the stored responses that every router must know, as both tenants. Returns the number of responses.

        A read that fails for the owner is repeated within `within_s`.
        """
        due, end_s = self.model.due_everywhere(), time.monotonic() + within_s
        asked = self._chance.sample(due, min(READ_MAX, len(due)))
        left = [(each.id, router) for each in asked for router in range(len(self._routers))]
        while left:
            statuses = [await self._read_at_end(*each) for each in left]
            over = time.monotonic() >= end_s
            for (id_, router), (tenant, status) in zip(left, statuses, strict=True):
                if status == 200 or over:
                    self.model.on_read_at_end(id_, tenant, router, status)
            left = [] if over else [each for each, (_, status) in zip(left, statuses, strict=True) if status != 200]
            await asyncio.sleep(AGAIN_S if left else 0)
        return len(asked)

    async def _read_at_end(self, id_: str, router: int) -> tuple[str, int]:
        """Return the tenant of a response and the status of its read, after a read by any other tenant."""
        found = self.model.stored[id_]
        for tenant in sorted(OWNERS, key=lambda each: each.name == found.tenant):
            answer = await self._ask(router, tenant, "GET", f"/v1/responses/{id_}")
            if tenant.name != found.tenant and answer is not None:
                self.model.on_read_at_end(id_, tenant.name, router, answer[0])
        return found.tenant, 0 if answer is None else answer[0]


def _content(answer: dict[str, object]) -> str:
    found = re.search(r"'text': '(\w+)'", str(answer))
    return found[1] if found else ""
