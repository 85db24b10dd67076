"""Every setting: nested frozen dataclasses, one docstring a field (unit, default, reason).

Where values come from, and whether they make sense, is in commands/loading.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

# Settings that are never shown.
SECRETS = (
    "admin.token",
    "auth.secret",
    "auth.secret_before",
    "probe.api_key",
    "shared.password",
    "shared.url",
    "upstream.api_key",
)

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
HistoryBytes = Annotated[int, Meta(ge=16 << 20)]
Days = Annotated[int, Meta(ge=1, le=366)]
Workers = Annotated[int, Meta(ge=1, le=64)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, Meta(ge=0, le=1e6)]
WebAddress = Annotated[str, Meta(pattern=r"^(https?://\S+)?$")]


class SettingsError(ValueError):
    """The settings have problems, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Where replicas come from, besides `replicas`."""

    source: str = "static"
    """`static`: `replicas` alone; `kubernetes`: pods, from the API server (needs the extra `kubernetes`); `dns`:
    addresses of a headless Service."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of the pods; empty: the one that the router runs in."""
    selector: str = ""
    """Label selector of the pods, such as `app=vllm`. Empty: pods that bear the labels of a known serving stack, and
    no others, so that no pod is taken by accident."""
    pools: tuple[str, ...] = ()
    """InferencePools (`inference.networking.k8s.io/v1`) whose members the pods are, as `name` or `namespace/name`;
    their selectors and target ports go before `discovery.selector` and `discovery.port`. Only with `kubernetes`."""
    port: str = ""
    """Port of the engines, by number or by the container port's name; a pod's annotation `warmroute/port` goes before.
    Empty: the container port named `http`, else the only one. With `dns` a number."""
    scheme: str = "http"
    """`http`, or `https` where engines have certificates."""
    kubeconfig: str = ""
    """File that says where the API server is and who we are; empty: the pod's own service account."""
    dns_name: str = ""
    """Name of a headless Service, such as `vllm.default.svc.cluster.local`. Needed with `dns`."""
    dns_interval_s: Seconds = 2.0
    """Seconds between two questions to DNS. Answers say neither when they change nor who is about to go."""
    loopback: bool = False
    """Whether a pod or a record of DNS may have an address of this machine's own (`127.0.0.1`), as in tests. Addresses
    of clouds' metadata services, link-local and multicast ones are never taken."""
    resync_s: Seconds = 300.0
    """Seconds after which pods are listed anew though the watch seems well: what a watch lost is found then."""
    replicas_max: Positive = 1_024
    """Replicas that discovery may bring; beyond it none is added, and the log says so."""
    scale_from_zero: bool = False
    """Whether `/readyz`, and a picker's `readiness`, stay as they are with a replica while there is none: for engines
    whose autoscaler starts the first one by the requests that are refused here. They wait for the first list of
    replicas all the same, and until each of these was probed once. A model whose last replica has left is then kept
    for as long as the router runs: requests for it get 503, not 404, and count for its autoscaler."""
    models: tuple[str, ...] = ()
    """Names of models that may have no replica yet, as clients ask for them: requests get 503 `no_replica_ready`, not
    404, beside other models too, and are counted by model from 0 (`warmroute_requests_total`). At most 256."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """What is on the page of metrics, and who is sent it."""

    otel_names: bool = False
    """Whether OpenTelemetry's metrics of generative AI (`gen_ai_server_*`, `gen_ai_client_*`) are on the page beside
    ours. Off: they are what others of ours say already, and about 200 series a model."""
    aliases: tuple[Literal["llm_d_epp", "inference"], ...] = ()
    """Names of endpoint pickers under which metrics are on the page besides, for dashboards made for one: `llm_d_epp`
    (`llm_d_epp_*`), `inference` (`inference_objective_*`, `inference_pool_*`, `inference_extension_*`, its names
    before). Off: about 170 series a model for each."""
    otlp_endpoint: str = ""
    """Where all metrics are sent besides, by OTLP over HTTP: `http://collector:4318`, and `/v1/metrics` unless it names
    a path. Empty: nowhere. Needs the extra `tracing`; the service has the name `tracing.service_name`."""
    otlp_interval_s: Annotated[float, Meta(ge=1)] = 60.0
    """Seconds between two pushes of metrics. As OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry traces. Needs the extra `tracing`."""

    endpoint: str = ""
    """Where spans are sent, by OTLP over HTTP: `http://collector:4318`, and `/v1/traces` unless it names a path. Empty:
    no tracing, and none of its cost; `traceparent` of clients is passed on all the same. Needs the extra `tracing`."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Part of the requests without a `traceparent` of their own that are traced; with one, the client decides."""
    service_name: str = "warmroute"
    """Name of this service in traces, and in metrics that are pushed."""
    queue_spans_max: Positive = 8_192
    """Spans that wait to be sent; beyond it the newest are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Where the router listens."""

    face: Literal["edge", "picker", "both"] = "edge"
    """Who stands before the replicas: `edge`, this router, which carries the bytes; `picker`, a gateway that asks here
    where each request goes (settings `gateway`; there is no main listener then); or `both`. All but `edge` need the
    extra `gateway`."""
    host: str = "127.0.0.1"
    """Address of the main listener. Loopback unless told otherwise: nobody is served by accident."""
    port: Port = 8000
    """Port of the main listener; 0 takes a free one."""
    admin_host: str = "127.0.0.1"
    """Address of the admin listener: metrics, replicas, decisions. Anywhere but on loopback it needs `admin.token`."""
    admin_port: Port = 8001
    """Port of the admin listener; 0 takes a free one."""
    metrics_on_main: bool = True
    """Whether `/metrics` is on the main listener too. On: a scrape works before any thought of ports."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the main listener from a browser, such as `https://chat.example.com`; `*`: all
    pages, without cookies. Empty: engines decide, unless the router asks for keys or shows engines its own."""
    keepalive_s: Seconds = 75.0
    """Seconds an idle client connection is kept. As nginx."""
    workers: Workers = 1
    """Processes that serve clients. One does some ten thousand short requests a second; with more, one more process
    places for all of them, so that they decide as one."""
    hub_timeout_s: Seconds = 0.25
    """Seconds that placing for a worker may take; then the worker places that request itself, by the ring."""
    lame_duck_s: NotNegative = 5.0
    """Seconds that the listener stays open after SIGTERM while `/readyz` says 503: load balancers need that long to
    look elsewhere. Ctrl-C (SIGINT) does not wait."""
    drain_s: NotNegative = 180.0
    """Seconds that running answers may take to finish after `listen.lame_duck_s`. A pod's grace must be longer than
    both."""
    files_interval_s: NotNegative = 10.0
    """Seconds between two looks whether a file that settings name (certificates, keys, tokens) has changed; it is then
    read again as on SIGHUP, once it stays the same for one interval. 0: on SIGHUP only."""
    tls_certificate: str = ""
    """PEM file of the main listener's certificate chain; empty: no TLS. Read again on SIGHUP, or when it changes."""
    tls_key: str = ""
    """PEM file of that certificate's private key; empty: it is in `listen.tls_certificate`."""
    tls_client_ca: str = ""
    """PEM file of authorities; clients must then show a certificate of theirs."""
    connections_max: Positive = 16_384
    """Client connections open at once; whoever comes then is closed again. Fewer where the process may not open enough
    files, which is said at the start."""
    connections_per_client_max: Positive = 4_096
    """Client connections open at once from one address. High, since a load balancer is one address."""
    head_timeout_s: Seconds = 10.0
    """Seconds from the first byte of a request to the end of its head."""
    body_bytes_per_s_min: Count = 1_024
    """Bytes a second at which a request's body must come, on average and after a grace of `head_timeout_s`; 0: any."""
    body_timeout_s: Seconds = 300.0
    """Seconds from the end of a request's head to the end of its body, however fast that comes: 32 MiB at a megabit a
    second."""
    send_timeout_s: Seconds = 60.0
    """Seconds that a client may leave what is written to it unread; then its connection is closed. Only time in which
    it is the client that does not read counts."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """The endpoint picker: what a gateway asks by Envoy's external processing. Needs the extra `gateway`."""

    host: str = "127.0.0.1"
    """Address of the picker's two listeners. Loopback unless told otherwise: nobody is served by accident."""
    port: Port = 9002
    """Port of the picker, gRPC over HTTP/2; 0 takes a free one. As in the Gateway API's Inference Extension."""
    health_port: Port = 9003
    """Port of gRPC health checks alone, never with TLS: `liveness`, `readiness`; 0 takes a free one. They are answered
    on `gateway.port` too."""
    tls_certificate: str = ""
    """PEM file of the picker's certificate chain; empty: no TLS. Read again on SIGHUP, or when it changes."""
    tls_key: str = ""
    """PEM file of that certificate's private key; empty: it is in `gateway.tls_certificate`."""
    tls_client_ca: str = ""
    """PEM file of authorities; gateways must then show a certificate of theirs."""
    fallbacks_max: Annotated[int, Meta(ge=0, le=4)] = 2
    """Further endpoints that a request is given, in order of price, to be tried where the first cannot be reached.
    0 for gateways that take one endpoint only, such as those with Envoy's cluster type ORIGINAL_DST."""
    objectives: tuple[str, ...] = ()
    """Priorities of objectives that clients name in `x-llm-d-inference-objective`: `batch=low`, `chat=high`. Others are
    `normal`."""
    sampled_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """Part of the answers that the gateway is asked to send here as well, where it sends none, after the first 64:
    speeds and lengths are learned from them. It needs `allow_mode_override` there, and costs those answers some 0.2 ms
    of CPU a chunk. 0: none."""
    streams_max: Positive = 16_384
    """Requests that may be under way at once; whoever comes then is told to come again (503)."""
    stream_s_max: Seconds = 3_600.0
    """Seconds after which a request's lease is given back, whatever its gateway says."""
    keepalive_s: Seconds = 30.0
    """Seconds between two questions whether a silent gateway is still there; it has as long to answer."""
    conformance: bool = False
    """Whether requests on all paths are placed, and the header `test-epp-endpoint-selection` names who may take one, as
    the upstream conformance suite wants. Off: a client must not choose."""


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Who may see and change what on the admin listener."""

    token: str = ""
    """Bearer token for every admin page but `/healthz` and `/readyz`. Without one the admin listener starts on loopback
    only. At least 16 characters."""
    token_file: str = ""
    """File that holds the token, such as a mounted secret; read again on SIGHUP."""
    connections_max: Positive = 64
    """Connections to the admin listener that are open at once; whoever comes then is closed again. A dashboard takes
    two, a scraper one. How long they may take is as on the main listener (`listen.head_timeout_s` and its kin)."""
    connections_per_client_max: Positive = 32
    """Connections to the admin listener that are open at once from one address."""
    replicas_allowed: tuple[str, ...] = ()
    """Where replicas added at run time (`POST /admin/replicas`) may be: `http://10.0.0.0/8:8000`, an address or a
    network, never a name, with its port. Empty: none can be added."""
    history_path: str = ""
    """File in which past decisions and the page's figures are kept over restarts, made if it is not there; of this
    router alone. Empty: memory only, `limits.decisions_max` decisions and an hour of figures."""
    history_bytes_max: HistoryBytes = 256 << 20
    """Bytes of the file `admin.history_path` with its journal; the oldest decisions go first. 256 MiB holds some
    200,000."""
    history_days_max: Days = 14
    """Days that decisions and figures are kept in that file."""


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Who may use the router."""

    keys_file: str = ""
    """YAML file of API keys, each as a hash with its tenant, models, rates and priority; empty: no key is asked for.
    `warmroute make-key TENANT` writes an entry. Read again on SIGHUP."""
    isolate: bool = False
    """Whether every tenant's cached prefixes are its own: prompts are salted, so that nobody finds out by time what
    others have asked. A key may say otherwise for its tenant."""
    secret: str = ""
    """From which tenants' salts are derived, and by which routers with `shared.url` prove their messages to each other;
    the same for all routers before one fleet. At least 32 characters. Empty: messages are proved by a secret made of
    all API keys, and without keys by none."""
    secret_file: str = ""
    """File that holds the secret."""
    secret_before: str = ""
    """The secret of before, while a new one goes from router to router: messages are proved by both, and one is
    enough. No salt is derived from it."""
    secret_before_file: str = ""
    """File that holds the secret of before."""
    receipts: bool = False
    """Whether tenants' answers carry `x-warmroute-*` receipts. Off: where a prompt was found tells who asked before."""
    tenants_max: Positive = 1_000
    """Tenants told apart for fair shares and metrics; the rest are one more."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Who waits, and who is turned away, when the fleet is full."""

    in_flight_max: Positive = 1_024
    """Requests open at once on one replica, whatever it says of itself. As vLLM's own default for large GPUs."""
    waiting_max: Positive = 32
    """Requests waiting in an engine, by its own recent count, above which it gets no more: they wait here, where they
    can be put in order."""
    queue_requests_max: Count = 1_024
    """Requests that wait in the router; beyond it the one that matters least is turned away (429)."""
    queue_bytes_max: Positive = 256 << 20
    """Bytes of bodies that wait in the router."""
    wait_s: Seconds = 30.0
    """Seconds a request may wait in the router, from its arrival, whatever for. One that would wait longer is turned
    away when it comes (429)."""
    hold_s: NotNegative = 30.0
    """Seconds for which a long prompt may be held back while the fleet is busy and it would evict so much that all were
    slower for it; then it goes all the same, or waits for a place until `wait_s` is over. 0: none is held. More than
    `wait_s` raises the output above saturation, where clients and proxies in front are willing to wait as long."""
    tenant_share_max: Annotated[float, Meta(gt=0, le=1)] = 0.75
    """Part of the fleet's places that one tenant may hold while it is full, so that others need not wait for it."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """How requests are placed."""

    policy: str = "warm"
    """Name of the placement policy; all but `warm` are for comparison."""
    index_bytes_max: Positive = 256 << 20
    """Bytes the prefix index may take, all replicas together. 256 MiB holds some 800,000 blocks of 512 bytes."""
    blocks_max_default: Positive = 4_096
    """Blocks of 512 bytes believed held by a replica whose capacity is unknown: half a million tokens."""
    kv_tokens_max: Count = 0
    """KV capacity of a replica in tokens where its metrics report none; 0 leaves `blocks_max_default`."""
    memory_max: Positive = 65_536
    """Past prompts remembered, to learn how soon they are asked for again and who answered them."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """How replicas are asked for health and load."""

    interval_s: Seconds = 1.0
    """Seconds between two rounds of probes. A silent replica is out after two of them, one that refuses at once."""
    timeout_s: Seconds = 5.0
    """Seconds a probe may take. A busy engine answers late and is not dead: long, and two failures in a row."""
    models_interval_s: Seconds = 10.0
    """Seconds between two looks at `/v1/models`. Adapters are loaded at run time, so it is also read when a replica
    comes back, and when a model is asked for that no replica lists."""
    models_max: Positive = 4_096
    """Models that are read of a replica's `/v1/models`. Those beyond it are not known here; a warning says how many."""
    metrics: bool = True
    """Whether replicas' `/metrics` are read. Off: no load, capacity or restart is known by them."""
    metrics_interval_s: NotNegative = 0.0
    """Seconds between two looks at `/metrics`, for engines that suffer from them; 0: with every round of probes. After
    one that was late there is a pause of up to a minute in any case."""
    api_key: str = ""
    """Bearer token sent with probes, for engines started with `--api-key`; clients' own keys are passed on."""
    page_bytes_max: Positive = 8 << 20
    """Bytes of a metrics or models page that are read; a longer one of models is a failed probe, one of metrics says
    nothing."""


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How replicas' KV events are followed."""

    enabled: bool = True
    """Whether the KV events that a replica advertises are used. On: what a replica holds is then known, not guessed."""
    endpoints: tuple[str, ...] = ()
    """Where events are published, for engines that do not say: `http://10.0.0.1:8000=tcp://10.0.0.1:5557`, and behind
    another `=` the replay endpoint if there is one. A rank of a data-parallel server is `http://...#dp1`."""
    bind: str = ""
    """ZeroMQ address to bind, such as tcp://0.0.0.0:5557, where engines connect to the router; empty: none does."""
    topics: tuple[str, ...] = ()
    """Who publishes under which topic on the bound address: `topic=http://10.0.0.1:8000`. The topic
    `kv@HOST:PORT@MODEL` of a replica at HOST:PORT needs no entry; whoever is not known is not listened to."""
    poll_s: Seconds = 10.0
    """Seconds between two looks at what a replica says of its event endpoints. It may come back with other flags."""
    replay_timeout_s: Seconds = 1.0
    """Seconds a replay may be silent before it is asked for again; twice as long each time, three times in all. vLLM
    answers between two batches, every 0.1 s."""
    suspend_s: Seconds = 2.0
    """Seconds nothing is credited to a replica whose stream broke; then the router's own estimate counts again."""
    wait_s: NotNegative = 0.02
    """Seconds a request may wait for events that are known to be on their way: an answer that ended a moment ago must
    have stored blocks that were not heard of yet. On idle machines none waits."""
    queue_bytes_max: Positive = 64 << 20
    """Bytes of batches that wait for a replay to end, per replica; beyond it they are asked for again."""
    blocks_max: Positive = 1 << 20
    """Blocks of one replica in the index; one that holds more is never graded exact. 16 million tokens of 16."""
    index_bytes_max: Positive = 1 << 30
    """Bytes that what replicas hold by their events may take, all replicas together, at 320 a block: 3.3 million
    blocks. Beyond it the replica that takes most gives up blocks, and is not exact until its cache is cleared."""
    announce: bool = False
    """Whether to have a vLLM replica that was joined late tell what it holds of prompts that are asked for: by a
    request of one token with `kv_cache_report_mode: full` (vLLM 0.30 and later), at most one a second. Its answer looks
    like second copies to every router that listens: on in all routers of a replica, or in none."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """What engines keep in memory and files behind their GPUs, by their KV events, and how soon it is loaded."""

    enabled: bool = True
    """Whether blocks in memory or files behind a GPU count as held. Off: only what GPUs hold counts."""
    kv_bytes_per_token: Annotated[float, Meta(ge=1, le=1e9)] = 262_144.0
    """KV bytes of a token that one replica's links move: 2 x layers x KV heads x head size x bytes of a number, divided
    by the GPUs whose links work side by side. 256 KiB: Qwen3-32B in bf16. With the speeds below it makes the first
    guess of a load's time, which a few answers correct."""
    cpu_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 54.0
    """Gigabytes (10^9 bytes) a second from CPU memory to the GPU, as a first guess: PCIe 5 as measured on an H20 and on
    an H100."""
    storage_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 6.0
    """Gigabytes a second from local files, and from what engines call EXTERNAL: one NVMe drive."""
    shared_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """Gigabytes a second from a remote store that replicas share: an object store, for each replica."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """Blocks that one engine brings from the CPU memory of another, where the router orders that: vLLM's p2p tier."""

    port: Port = 0
    """Port at which every engine takes orders of its peers (`VLLM_P2P_SIDE_CHANNEL_PORT`, 5710 unless told otherwise),
    counted up by its data-parallel rank. 0: only engines that `pulls.endpoints` or a pod's annotation
    `warmroute/p2p-port` names."""
    endpoints: tuple[str, ...] = ()
    """Where single engines take orders of their peers: `http://10.0.0.1:8000=10.0.0.1:5710`."""
    gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 30.0
    """Gigabytes (10^9 bytes) a second from one engine's CPU memory to another's GPU, as a first guess, which a few
    answers correct: two NICs of 200 Gbit/s."""
    probe_interval_s: Seconds = 5.0
    """Seconds between two looks whether an engine still takes orders of its peers. Nothing is pulled from where none
    listens."""
    stall_s: Seconds = 10.0
    """Seconds beyond the predicted time to the first token (the one that one in ten exceeds) after which a request that
    pulls is sent again without, as is a stream whose prompt was prefilled elsewhere (`split`): an engine waits for a
    wrong address without end."""
    rest_s: Seconds = 60.0
    """Seconds for which nothing is pulled from the source of a request that stalled."""


@dataclass(frozen=True, slots=True)
class SplitSettings:
    """Requests whose prompt one replica prefills and another one decodes."""

    handshake: Literal["", "nixl", "mooncake", "offloading", "sglang"] = ""
    """How engines hand over what they have prefilled: `nixl`, `mooncake` or `offloading` for vLLM's connectors of these
    names (`offloading`: with a p2p tier), `sglang` for SGLang. Empty: no request is split, and roles mean nothing."""
    prefill: tuple[str, ...] = ()
    """Base URLs of replicas that prefill for others. Pods say so by label, `warmroute.io/role` or `llm-d.ai/role`."""
    decode: tuple[str, ...] = ()
    """Base URLs of replicas that decode what others have prefilled. Those in neither list and without a label do both,
    but for SGLang's, which do either."""
    port: Port = 0
    """Port at which decoding engines ask prefilling ones: the bootstrap server's of Mooncake and SGLang, 8998 unless
    told otherwise; the p2p tier's of `offloading`, 5710 unless told otherwise, counted up by the data-parallel rank. 0:
    the engine's own number. NIXL needs none."""
    endpoints: tuple[str, ...] = ()
    """Where decoding engines ask single prefilling ones: `http://10.0.0.1:8000=10.0.0.1:8998`."""
    probe_interval_s: Seconds = 5.0
    """Seconds between two looks whether a prefilling engine still answers where decoding ones ask it. One that does not
    prefills for nobody."""
    linger_s: Seconds = 2.0
    """Seconds that a prefilling engine has left when the answer that came of its work has ended."""
    hosts: tuple[str, ...] = ()
    """Hosts that prefilling engines may name in their answers besides their own, as addresses, CIDRs or names:
    `10.0.0.0/8`. Decoding engines connect there. Needed where an engine is not reached at the address that it names, as
    behind a proxy."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """How prompts become token ids, for replicas whose KV events are followed."""

    sources: tuple[str, ...] = ()
    """Tokenizers: `MODEL=PATH`, or `PATH` for every model. A folder with tokenizer.json and the chat template, or a
    name on the hub, with its revision if you like (`NAME@REVISION`). Needs the extra `tokenizers`."""
    template_kwargs: tuple[str, ...] = ()
    """What engines were started with as `--default-chat-template-kwargs`: `MODEL={"enable_thinking": false}`."""
    ask_replicas: bool = True
    """Whether a model without a tokenizer here is tokenized by its replicas (`/tokenize`), a round trip a prompt."""
    verify: bool = True
    """Whether our tokens are compared with a replica's on a set of probing prompts, first and every so often."""
    verify_interval_s: Seconds = 600.0
    """Seconds between two comparisons of tokens by `tokens.verify`."""
    deadline_s: Seconds = 0.1
    """Seconds a prompt may take to become tokens; then it is placed by estimate."""
    cache_bytes_max: Positive = 128 << 20
    """Bytes of token ids, and of the messages they are made of, that are remembered: of the next turn only what is new
    is read and encoded."""


@dataclass(frozen=True, slots=True)
class ObservatorySettings:
    """Why prompts miss the cache: reasons, first differences, advice."""

    enabled: bool = True
    """Whether every miss gets a reason. On: what a low hit rate comes from is otherwise nowhere to be seen."""
    excerpts: bool = False
    """Whether pages and logs may quote prompts where they differ. Off: a class, a shape and a hash are shown."""
    memory_bytes_max: Positive = 64 << 20
    """Bytes of prompts' texts kept to compare the next ones with, in each process that serves clients. Never shown."""
    prompt_bytes_max: Positive = 1 << 20
    """Bytes of one prompt that are kept; what lies behind is not compared."""
    blocks_max: Positive = 1 << 19
    """Blocks of 512 bytes of which it is remembered that they were computed once, and where: 67 million tokens."""
    compare_ms_per_s_max: Positive = 10
    """Milliseconds a second that may be spent on finding where prompts differ, 1 % of a core. When half of it is used,
    a difference that was found twice at one place is assumed of the next; beyond it the last one found is."""
    looks_per_s_max: Positive = 200
    """Prompts a second, in each process that serves clients, whose texts are looked at: half a percent of a core. Each
    32 KB of one count as one more. Beyond it only a part of all conversations is watched, and reasons of the others are
    told by their blocks alone."""
    replay_window_s: Seconds = 3_600.0
    """Seconds within which an identical prompt counts as a replay, not as reuse of a prefix."""
    templates_max: Positive = 256
    """Templates (prefixes that conversations share) told apart; the least used make room."""
    groups_max: Positive = 200
    """Combinations of route, tenant, tools, agent step and kind of agent told apart in metrics; the rest are one
    more."""
    steps_max: Positive = 32
    """Names of agent steps told apart; the rest are one more."""
    step_header: str = "x-warmroute-step"
    """Request header that names an agent's step; not passed on to replicas."""
    step_field: str = "agent_step"
    """Field of a body's `metadata` that names it where the header does not."""
    grafana_url: WebAddress = ""
    """Address of Grafana, linked from the page: `https://grafana.example/d/warmroute-overview`. Empty: no link."""
    repairs: tuple[str, ...] = ()
    """What is put right in requests before they are sent, where a key does not say for its tenant: `sort_tools`,
    `canonical_tools` (keys of tools' JSON schemas in one order)."""
    append_only: str = "off"
    """What becomes of a conversation whose earlier messages have changed, where a key does not say for its tenant:
    `off`, `warn` (a header and a log line) or `reject` (409)."""


@dataclass(frozen=True, slots=True)
class PrewarmSettings:
    """Filling the cache of a replica that is new or was restarted, before it takes traffic."""

    prefixes_file: str = ""
    """JSONL file of requests, `{"path": "/v1/chat/completions", "body": {...}}` each, whose prompts a replica is warmed
    with."""
    templates: Count = 0
    """How many of the most used learned templates a replica is warmed with; 0: none."""
    tokens_max: Positive = 200_000
    """Prompt tokens that a replica is warmed with at most."""
    hold_ready: bool = False
    """Whether a replica gets no traffic until it is warm. Off: it takes traffic meanwhile."""
    timeout_s: Seconds = 60.0
    """Seconds that warming may take; then the replica takes traffic as it is."""


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """What routers of one fleet tell each other, through Redis (6.2 and newer) or Valkey. Needs the extra `shared`."""

    url: str = ""
    """Where the store is: `redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`, `rediss://` for TLS,
    `redis+sentinel://HOST,HOST/SERVICE` or `redis+cluster://HOST,HOST`. Empty: nothing is shared, and nothing of it
    costs anything. Needs the extra `shared`."""
    url_file: str = ""
    """File that holds the URL, such as a mounted secret; read again on SIGHUP."""
    password: str = ""
    """Password for the store, in place of one in the URL."""
    password_file: str = ""
    """File that holds the password for the store; read again on SIGHUP."""
    name: str = "fleet"
    """Name of the fleet: routers with the same name share, and several fleets may have one store."""
    router: str = ""
    """Name of this router, which no other of the fleet has. Empty: the machine's name, in Kubernetes the pod's, and the
    port of the admin listener."""
    timeout_s: Annotated[float, Meta(gt=0, le=0.5)] = 0.5
    """Seconds that the store may take for an answer, 0.5 at most. No request waits for it; beyond it the store counts
    as gone, and what is longer would keep a router from noticing within a second."""
    routers_assumed: Positive = 2
    """Routers that there are as long as this one has not heard the store: until then it gives out one part of so many
    of each tenant's rate."""
    replicas_in_common: bool = True
    """Whether a router is of this one's fleet only if both have a replica in common, with one base model: another one
    with the same store and name is not believed. False: the name alone decides, as for routers of several zones that
    keep one rate for each tenant."""
    tls_ca: str = ""
    """PEM file of authorities that the store's certificate is checked against; empty: the machine's."""
    tls_certificate: str = ""
    """PEM file of the certificate that is shown to the store, and its key unless `tls_key` names it."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""


@dataclass(frozen=True, slots=True)
class StateSettings:
    """What a router that starts knows from before: which blocks replicas hold, who answered whom, and what was learned.
    Hashes and numbers, never a prompt, an answer or a key of a client."""

    file: str = ""
    """File in which the router leaves what it knows, and from which it begins; empty: none. One router has it, for all
    of its workers. It is replaced as a whole, and readable by nobody else."""
    every_s: Seconds = 30.0
    """Seconds between two writes of the state file; another one is at an orderly end."""
    bytes_max: Positive = 256 << 20
    """Bytes that the file may have, or what a sibling hands over: replicas that do not fit are left out. Of a replica's
    20,000 blocks it has some 500 KB."""
    age_max_s: Seconds = 900.0
    """Seconds after which what was left is of no use any more: caches hold something else by then."""
    ready_within_s: NotNegative = 5.0
    """Seconds that `/readyz` may wait, from the start on, until what is known from before is taken over. 0: it does not
    wait."""
    siblings: bool = True
    """Whether a router with `shared.url` that starts asks another one for what it knows, and tells others."""


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """How replicas are called."""

    api_key: str = ""
    """Bearer token sent to replicas instead of the client's own; empty: the client's is passed on unless keys are the
    router's (`auth.keys_file`)."""
    api_key_file: str = ""
    """File that holds the bearer token sent to replicas; read again on SIGHUP."""
    tls_ca: str = ""
    """PEM file of authorities that replicas' certificates are checked against; empty: the machine's."""
    tls_certificate: str = ""
    """PEM file of the certificate that is shown to replicas, and its key unless `tls_key` names it."""
    tls_key: str = ""
    """PEM file of that certificate's private key."""
    connect_timeout_s: Seconds = 2.0
    """Seconds to connect. In one cluster that takes a millisecond."""
    first_byte_timeout_s: Seconds = 600.0
    """Seconds from sending a request to the first byte of its answer, without pings. A long prompt behind a queue
    takes minutes."""
    idle_timeout_s: Seconds = 600.0
    """Seconds between two pieces of an answer, pings left out. While its replica works a stream may be silent for an
    hour, since it may hide what it makes; at an engine without metrics that is well, for
    `upstream.first_byte_timeout_s`."""
    stuck_after_s: Seconds = 3.0
    """Seconds beyond the time in which a replica should have given a first token; then it counts as stuck, gets no
    more, and what is silent there is tried elsewhere."""
    slow_start_s: NotNegative = 10.0
    """Seconds in which a replica that came back is given more and more: its cache is empty, and so is its queue."""
    keepalive_s: Seconds = 3.0
    """Seconds an idle connection to a replica is kept. Less than uvicorn's 5, so that we close first."""
    retries_max: Count = 1
    """Further replicas tried when one fails before the client got a byte."""
    retry_on_timeout: bool = False
    """Whether a request that timed out is tried elsewhere. Off: it has cost minutes of GPU time already."""
    retry_ratio: NotNegative = 0.2
    """Retries per request allowed on average, as Envoy's and linkerd's budgets: a dead fleet is not hammered."""
    retry_floor_per_s: NotNegative = 10.0
    """Retries per second that are allowed whatever the ratio."""
    continue_streams: Literal["off", "asked", "exact", "approximate"] = "asked"
    """Whether a stream that breaks goes on on another replica, where neither a key nor `upstream.continue_models` says:
    `asked`, if the request asks for it (`x-warmroute-continue`); `exact`, if the whole is what one replica would have
    sent; `approximate`, also if it may differ; `off`, never. Engines are then asked for token ids, and each event of
    such streams is read."""
    continue_models: tuple[str, ...] = ()
    """What becomes of broken streams of single models, in words of `upstream.continue_streams`: `MODEL=exact`."""
    hand_over_s: NotNegative = 5.0
    """Seconds after discovery says that a replica is leaving or not ready, or it was told to drain; then its streams
    that can be continued are handed on to others. Shorter than the grace that engines have to end."""


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """What may come in, and what is kept of it."""

    body_bytes_max: Positive = 32 << 20
    """Bytes of a request body. A million tokens with some images; more is 413."""
    bodies_bytes_max: Positive = 1 << 30
    """Bytes of all request bodies that are arriving, waiting, or with a replica that has not begun to answer. A tenant,
    or without keys an address, may hold four times as much as is left free; beyond that it is not read any further.
    Workers have a part each."""
    bodies_wait_s: Seconds = 10.0
    """Seconds that a body may wait for room within `limits.bodies_bytes_max`; then 503."""
    held_answer_bytes_max: Count = 1 << 20
    """Bytes of an answer with a Content-Length held until it is whole, so that a cut one can be retried. A longer one,
    one without a length, and every stream of events pass as they come."""
    offload_bytes_min: Count = 256 << 10
    """Bytes of a body from which it is parsed off the event loop. Larger ones take over a millisecond."""
    response_ids_max: Positive = 65_536
    """Response ids remembered, so that follow-ups reach the replica that stored them."""
    decisions_max: Positive = 512
    """Last decisions kept for `/admin/decisions`."""
    json_depth_max: Positive = 256
    """Objects and arrays within one another in a request body; deeper is 400."""
    json_parts_max: Positive = 65_536
    """Objects and arrays in a request body (messages, their parts, tools, and what is in them); more is 400. Each takes
    up to 850 bytes while it is read, whatever it takes in the body."""
    json_values_max: Positive = 1 << 20
    """Values in a request body, such as the token ids of a prompt; more is 400, before anything is decoded."""
    reading_bytes_max: Positive = 128 << 20
    """Bytes of long bodies that wait to be parsed, which one thread does; beyond it one is turned away (429), of the
    tenant that has most of them waiting."""
    reading_wait_s: Seconds = 10.0
    """Seconds that a long body may wait to be parsed; then its request is turned away (429)."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """What clients may ask for."""

    passthrough: tuple[str, ...] = (
        "/tokenize",
        "/detokenize",
        "/v1/tokenize",
        "/v1/detokenize",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/score",
        "/v1/score",
        "/classify",
        "/v1/classify",
        "/pooling",
        "/encode",
        "/v2/embed",
        "/generative_scoring",
        "/v1/decisions",
        "/v1/systemone",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/messages/count_tokens",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/render",
        "/v1/chat/completions/derender",
        "/v1/completions/render",
        "/v1/completions/derender",
        "/v1/messages/render",
        "/inference/v1/generate",
        "/invocations",
        "/cohere/v2/chat",
        "/cohere/v2/chat/render",
        "/api/chat",
        "/api/generate",
        "/parse_function_call",
        "/separate_reasoning",
    )
    """Further paths, passed to the least costly replica: what vLLM 0.32 and SGLang 0.5.23 have for clients. Everything
    else is 404: engines have paths that flush
    caches, load adapters or put them to sleep, and those are not for clients."""
    unknown_models: Literal["refuse", "pass"] = "refuse"
    """Treatment of a model's name that no replica lists, after all were asked again. `pass`: it goes on to the engine
    as it is, where one base model is served: vLLM's resolvers load an adapter only when it is asked for."""
    ask_usage: bool | Literal["auto"] = "auto"
    """Ask engines for usage at the end of streams whose clients did not, and take it out again, once a stream of the
    replica has shown that usage does not come unasked. `auto`: where all engines of the model are vLLM or SGLang, which
    are known to send it. `false`: the bodies of healthy requests stay as they are, except those of tenants with a rate
    of tokens on such engines."""
    receipts: bool = True
    """Whether answers carry `x-warmroute-*` headers that say where a request went and why."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to standard error."""

    level: str = "info"
    """One of debug, info, warning, error."""
    requests: bool = True
    """Whether each request leaves a line. Lines hold no prompt and no answer."""
    format: str = "json"
    """`json`, or `text` for people."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set."""

    replicas: tuple[str, ...] = ()
    """Base URLs of the engines, without `/v1`; `10.0.0.1:8000` is short for `http://10.0.0.1:8000`."""
    allow_empty: bool = False
    """Whether a reload may take away all `replicas` or `auth.keys_file`. Off: such a reload is refused, since an empty
    or half-written file looks the same."""
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    """Where replicas come from, besides `replicas`."""
    listen: ListenSettings = field(default_factory=ListenSettings)
    """Where the router listens."""
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    """What a gateway asks."""
    admin: AdminSettings = field(default_factory=AdminSettings)
    """Who may see and change what on the admin listener."""
    auth: AuthSettings = field(default_factory=AuthSettings)
    """Who may use the router."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    """Who waits when the fleet is full."""
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    """How requests are placed."""
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    """How replicas are asked for health and load."""
    events: EventSettings = field(default_factory=EventSettings)
    """How replicas' KV events are followed."""
    tiers: TierSettings = field(default_factory=TierSettings)
    """What engines keep behind their GPUs."""
    pulls: PullSettings = field(default_factory=PullSettings)
    """What engines bring from each other."""
    split: SplitSettings = field(default_factory=SplitSettings)
    """Prefill apart from decode."""
    tokens: TokenSettings = field(default_factory=TokenSettings)
    """How prompts become token ids."""
    shared: SharedSettings = field(default_factory=SharedSettings)
    """What routers tell each other."""
    state: StateSettings = field(default_factory=StateSettings)
    """What a router that starts knows from before."""
    upstream: UpstreamSettings = field(default_factory=UpstreamSettings)
    """How replicas are called."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """What may come in."""
    api: ApiSettings = field(default_factory=ApiSettings)
    """What clients may ask for."""
    log: LogSettings = field(default_factory=LogSettings)
    """What is logged."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    """What is on the page of metrics."""
    tracing: TracingSettings = field(default_factory=TracingSettings)
    """OpenTelemetry traces."""
    observatory: ObservatorySettings = field(default_factory=ObservatorySettings)
    """Why prompts miss the cache."""
    prewarm: PrewarmSettings = field(default_factory=PrewarmSettings)
    """Filling the caches of new replicas."""


def field_keys() -> dict[str, Any]:
    """Dotted key of every setting -> its type, limits included."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            keys |= {f"{name}.{inner}": h for inner, h in get_type_hints(hint, include_extras=True).items()}
        else:
            keys[name] = hint
    return keys
