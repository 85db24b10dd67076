"""Headers and metadata of gateways and their clients, in addition to the request. The names are those of the Endpoint
Picker Protocol (version 1.0.0 of kubernetes-sigs/gateway-api-inference-extension) and of llm-d, present and past.

Each of these headers has an equivalent of the router's own (auth.py), and is copied to it: an objective is a
priority, a fairness id a tenant. If API keys are required, the key determines both, as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.config.api_keys import is_valid_name
from router.extproc import extproc_pb2 as pb
from router.http.request import Refusal, Request
from router.ingress.gateway_rules import DESTINATION, SERVED, SUBSET
from router.ingress.upstream_headers import PRIORITY, TENANT
from router.telemetry.request_record import session_key

__all__ = ["DESTINATION", "SERVED", "SUBSET"]  # keys of metadata; the first is also a header

LB, SUBSET_HINT = "envoy.lb", "envoy.lb.subset_hint"  # namespaces of metadata
ATTRIBUTES, UPSTREAM_ADDRESS = "envoy.filters.http.ext_proc", "upstream.address"
DROPPED = "x-llm-d-request-dropped-reason"  # header of the router's own answers
# header in which the upstream suite lists the endpoints that it wants
CONFORMANCE_ASKED = b"test-epp-endpoint-selection"
CONFORMANCE_SERVED = "x-conformance-test-served-endpoint"  # header that returns the serving endpoint to the suite

# Headers of llm-d, the current name first.
FAIRNESS = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
OBJECTIVE = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
MODEL = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")

SUBSET_MAX = 4_096  # endpoints of a subset hint that are examined
MODEL_CHARS_MAX = 256


def apply(request: Request, objectives: Mapping[str, str]) -> None:
    """Copy an objective and a fairness id to the router's own headers, unless the request has these. `objectives` maps
    the name of an objective to the name of a priority; an unknown objective has the default priority."""
    fields = request.fields
    if TENANT not in fields and (fairness := _find_header(request, FAIRNESS)):
        name = fairness.decode("latin-1")
        fields[TENANT] = name.encode() if is_valid_name(name) else session_key(fairness).encode()
    if PRIORITY not in fields and (objective := _find_header(request, OBJECTIVE)):
        priority = objectives.get(objective.decode("latin-1"))
        if priority is not None:
            fields[PRIORITY] = priority.encode()


def model_of(request: Request) -> str:
    """Return the model that the gateway wants in place of the body's; "" if it names no model. Raises Refusal."""
    said = _find_header(request, MODEL)
    if not said:
        return ""
    name = said.decode("utf-8", "replace")
    if len(name) > MODEL_CHARS_MAX or not name.isprintable():
        raise Refusal(
            400, "invalid_model", f"{MODEL[0].decode()} must be a model name of at most {MODEL_CHARS_MAX} characters."
        )
    return name


def subset_of(message: pb.ProcessingRequest, request: Request, *, conformance: bool) -> frozenset[str] | None:
    """Return the addresses (`ip:port`, or `ip` for all its ports) of the only replicas that may take the request. None:
    all may. With `conformance` a client's header has precedence over the gateway, as the upstream suite requires."""
    if conformance and CONFORMANCE_ASKED in request.fields:
        return _split(request.header(CONFORMANCE_ASKED))
    if SUBSET_HINT in message.metadata_context.filter_metadata:
        fields = message.metadata_context.filter_metadata[SUBSET_HINT].fields
        if SUBSET in fields:
            return _addresses(fields[SUBSET])
    return None


def served_by(message: pb.ProcessingRequest) -> str:
    """Return the endpoint that gave this answer, by its metadata, or by Envoy's attribute; "" if it is unknown."""
    metadata = message.metadata_context.filter_metadata
    if LB in metadata and SERVED in metadata[LB].fields:
        return str(metadata[LB].fields[SERVED].string_value)
    if ATTRIBUTES in message.attributes:
        attributes = message.attributes[ATTRIBUTES].fields
        if UPSTREAM_ADDRESS in attributes:
            return str(attributes[UPSTREAM_ADDRESS].string_value)
    return ""


def reports_served(message: pb.ProcessingRequest) -> bool:
    """True if this gateway is configured to report the serving endpoint. A missing report is then meaningful."""
    return LB in message.metadata_context.filter_metadata or ATTRIBUTES in message.attributes


def _find_header(request: Request, names: tuple[bytes, ...]) -> bytes:
    for name in names:
        if name in request.fields:
            return request.fields[name].strip()
    return b""


def _addresses(value: Any) -> frozenset[str]:  # noqa: ANN401 - google.protobuf.Value, which has no types
    """Return the addresses of a list, or of a comma-separated text."""
    if value.WhichOneof("kind") == "list_value":
        return _split(",".join(each.string_value for each in value.list_value.values[:SUBSET_MAX]))
    return _split(value.string_value)


def _split(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",", SUBSET_MAX)[:SUBSET_MAX] if part.strip())
