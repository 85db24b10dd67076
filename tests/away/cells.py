"""The table of what is open while a part is away: its words, and the shape of one cell."""

from __future__ import annotations

from dataclasses import dataclass

STATES = {
    "killed": "its process has ended, or its file is gone",
    "frozen": "it is there, takes connections, and gives no answer",
    "slow": "it answers after a second or more",
    "lying": "it returns wrong data",
    "emptied": "it returns no data, or has lost all data",
    "old": "it returns yesterday's data, or data of an earlier release",
}
DOORS = {
    "no key": "a request without a key",
    "wrong key": "a request with a key that the keys file never had",
    "revoked key": "a request with a key that was taken out of the keys file",
    "rate": "a request of a tenant that has used up its tokens",
    "other model": "a request for a model that the key does not allow",
    "engine paths": "`/sleep`, `/wake_up`, `/v1/load_lora_adapter`, `/admin/replicas` of the main listener",
    "admin pages": "the admin listener, without its token and with a client's key",
    "others' responses": "a stored response of another tenant, to read and to continue",
    "handed on": "a client's key at an engine, or an isolated tenant's prompt without a salt",
    "sent elsewhere": "a request of the router itself to an engine that the component named",
}
REQUESTS, RESPONSES = "requests", "stored responses"
SERVED = {
    REQUESTS: "requests with a key",
    RESPONSES: "stored responses, for the tenant that made them",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """What holds while one part is in one state."""

    how: str  # What is done to the part.
    opens: tuple[str, ...] = ()  # names of DOORS
    serves: tuple[str, ...] = (*SERVED,)
    why: str = ""  # reason of what is open or is not served
    elsewhere: str = ""  # path of the test that keeps the cell, where that is not the test beside it
    tested: bool = True
