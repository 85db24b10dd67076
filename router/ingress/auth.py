"""Authentication: the caller of a request, determined before its body is read.

With a keys file, every path needs a key, with two exceptions. `/healthz`, `/readyz` and its aliases are open, because
load balancers probe them. `/metrics` needs the admin's token. A key comes as `Authorization: Bearer` (OpenAI's clients)
or `x-api-key` (Anthropic's). Two different keys of this router are refused: another program before the router may have
checked only one of them. A key of another service next to a key of this router is ignored.

If a body does not arrive with its head, it is not read before its key is known. The caller is then kept until the body
is complete, unless the keys are replaced in the meantime.

Without a keys file a request may name its tenant and its priority, and these are not verified.
"""

from __future__ import annotations

from router.config.api_keys import (
    ANONYMOUS,
    PREFIX,
    UNAUTHENTICATED_PATHS,
    Caller,
    Keys,
    Tenant,
    is_admin,
    is_valid_name,
    priority_of,
)
from router.core.types.requests import Priority
from router.http.request import Refusal, Request
from router.ingress.gateway_rules import CREDENTIALS
from router.ingress.rate_reservation import AuthResult
from router.ingress.upstream_headers import PRIORITY, TENANT

METRICS = "/metrics"


class Authenticator:
    """Identifies callers by their keys. Keys and the admin's token may be replaced at any time, each as one object."""

    def __init__(self, keys: Keys | None, admin_token: str) -> None:
        """With `keys` None, no caller needs a key. With neither keys nor a token the metrics are open to all."""
        self.keys = keys
        self.admin_token = admin_token

    def authenticate(self, request: Request) -> Caller:
        """Return the caller of a request. Raises Refusal."""
        met = request.met
        if met is not None and isinstance(met, AuthResult) and met.keys is self.keys:
            return met.caller
        if request.path in UNAUTHENTICATED_PATHS:
            return ANONYMOUS
        if request.path == METRICS and (self.keys is not None or self.admin_token):
            if not is_admin(request.fields.get(b"authorization", b""), self.admin_token):
                raise Refusal(401, "invalid_api_key", "Metrics require the router's admin token.")
            return ANONYMOUS
        fields = request.fields
        if self.keys is None:
            if TENANT in fields or PRIORITY in fields:
                return _parse_caller(request)
            return ANONYMOUS
        tenant = self._tenant(self.keys, request)
        wished = _parse_priority(request) if PRIORITY in fields else tenant.priority
        return Caller(tenant.name, max(tenant.priority, wished), tenant)  # the higher number is the lower priority

    def _tenant(self, keys: Keys, request: Request) -> Tenant:
        """Return the tenant of a request's key. Raises Refusal."""
        shown = {key for low, _, value in request.lines if low in CREDENTIALS and (key := _extract_key(low, value))}
        if len(shown) > 1:  # a key of another service may be present, such as that of a client's own account
            shown = {key for key in shown if key.startswith(PREFIX.encode()) or keys.find(key) is not None}
        if len(shown) > 1:
            message = "The request has different API keys in Authorization and x-api-key; send only one."
            raise Refusal(401, "invalid_api_key", message)
        tenant = keys.find(shown.pop()) if shown else None
        if tenant is None:
            raise Refusal(401, "invalid_api_key", "The API key is missing or unknown.")
        return tenant

    def authenticate_head(self, request: Request) -> Caller:
        """Return the result of `who`, cached for the same request."""
        caller = self.authenticate(request)
        if self.keys is not None and caller.tenant is not None and not isinstance(request.met, AuthResult):
            request.met = AuthResult(self.keys, caller)
        return caller


def _extract_key(low: bytes, value: bytes) -> bytes:
    """Return the key in a header; b"" for other schemes than Bearer."""
    if low == b"x-api-key":
        return value.strip()
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def _parse_caller(request: Request) -> Caller:
    name = request.header(TENANT)
    if name and not is_valid_name(name):
        raise Refusal(400, "bad_tenant", "x-warmroute-tenant must have up to 64 letters, digits and . _ @ : -")
    return Caller(name, _parse_priority(request))


def _parse_priority(request: Request) -> Priority:
    name = request.header(PRIORITY)
    priority = priority_of(name.lower()) if name else Priority.NORMAL
    if priority is None:
        raise Refusal(400, "bad_priority", "x-warmroute-priority must be high, normal or low.")
    return priority
