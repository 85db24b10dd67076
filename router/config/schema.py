"""Settings of the router: nested frozen dataclasses, one docstring a field (unit, default, reason).

cli/config_loader.py reads the values from all sources and checks them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from msgspec import Meta

# Settings that are never shown.
SECRETS = (
    "admin.token",
    "auth.secret",
    "auth.secret_before",
    "probe.api_key",
    "peering.password",
    "peering.redis_url",
    "upstream.api_key",
)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Reload:
    """Mark of a setting that a reload applies while the router runs. A change of any other setting needs a restart."""

    is_file: bool = False  # the setting names a file that is checked for changes (`listen.file_watch_interval_s`)
    is_on_off: bool = False  # being empty or not, it decides how parts are built, so switching it needs a restart


Reloadable = Annotated[_T, Reload()]
ReloadableFile = Annotated[str, Reload(is_file=True)]
OnOffFile = Annotated[str, Reload(is_file=True, is_on_off=True)]

Port = Annotated[int, Meta(ge=0, le=65_535)]
Positive = Annotated[int, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]
HistoryBytes = Annotated[int, Meta(ge=16 << 20)]
Days = Annotated[int, Meta(ge=1, le=366)]
Seconds = Annotated[float, Meta(gt=0, le=1e6)]
NotNegative = Annotated[float, Meta(ge=0, le=1e6)]
WebAddress = Annotated[str, Meta(pattern=r"^(https?://\S+)?$")]


class SettingsError(ValueError):
    """Raised for problems of the settings, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


@dataclass(frozen=True, slots=True)
class DiscoverySettings:
    """Sources of replicas in addition to `replicas`."""

    source: str = "static"
    """Source of replicas. `static`: `replicas` alone; `kubernetes`: pods, from the API server (needs the extra
    `kubernetes`); `dns`: addresses of a headless Service."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of the pods; empty: the one that the router runs in."""
    selector: str = ""
    """Label selector of the pods, such as `app=vllm`. Empty: only pods with the labels of a known serving stack, so
    that no pod is taken by accident."""
    pools: tuple[str, ...] = ()
    """InferencePools (`inference.networking.k8s.io/v1`) that select the pods, as `name` or `namespace/name`; their
    selectors and target ports take precedence over `discovery.selector` and `discovery.port`. Only with `kubernetes`.
    """
    port: str = ""
    """Port of the engines, by number or by the container port's name; a pod's annotation `warmroute/port` takes
    precedence. Empty: the container port named `http`, else the only one. With `dns` a number."""
    scheme: str = "http"
    """Scheme of the engines' URLs: `http`, or `https` if engines have certificates."""
    kubeconfig: str = ""
    """File with the API server's address and the router's credentials; empty: the pod's own service account."""
    dns_name: str = ""
    """Name of a headless Service, such as `vllm.default.svc.cluster.local`. Needed with `dns`."""
    dns_interval_s: Seconds = 2.0
    """Seconds between two DNS queries. DNS answers announce neither a change nor a replica that is about to leave."""
    loopback: bool = False
    """If true, a pod or a DNS record may have an address of this machine's own (`127.0.0.1`), as in tests. Addresses of
    clouds' metadata services, link-local and multicast ones are never used."""
    resync_s: Seconds = 300.0
    """Seconds after which pods are listed anew even if the watch seems healthy: this finds changes that the watch
    lost."""
    replicas_max: Positive = 1_024
    """Maximum of replicas from discovery; beyond it no replica is added, and the log reports it."""
    scale_from_zero: bool = False
    """If true, `/readyz`, and a picker's `readiness`, report ready even without a replica. This is for engines with an
    autoscaler that starts the first replica because of requests that are refused here. Both still wait for the first
    list of replicas, and until each of these was probed once. A model stays known after its last replica has left,
    until the router ends: requests for it get 503, not 404, and count for its autoscaler."""
    models: tuple[str, ...] = ()
    """Names of models that may have no replica yet, as clients name them: requests get 503 `no_replica_ready`, not 404,
    even if there are other models, and are counted by model from 0 (`warmroute_requests_total`). At most 256."""


@dataclass(frozen=True, slots=True)
class MetricsSettings:
    """Content of the metrics page."""

    former_names: bool = True
    """If true, renamed metrics are also on the page under their former names, until version 0.3. On by default, so that
    dashboards and alerts continue to work after an upgrade."""


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """OpenTelemetry traces. Needs the extra `tracing`."""

    endpoint: str = ""
    """Address to which spans are sent, by OTLP over HTTP: `http://collector:4318`, and `/v1/traces` unless it names a
    path. Empty: no tracing, and none of its cost; `traceparent` of clients is still passed on. Needs the extra
    `tracing`."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.01
    """Part of the requests without their own `traceparent` that are traced; with one, the client decides."""
    service_name: str = "warmroute"
    """Name of this service in traces."""
    queue_spans_max: Positive = 8_192
    """Maximum of spans that wait to be sent; beyond it the newest are dropped, and counted."""


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """Listeners of the router."""

    mode: Literal["proxy", "extproc", "both"] = "proxy"
    """Component in front of the replicas: `proxy`, this router, which carries the bytes; `extproc`, a gateway that asks
    this router for the endpoint of each request (settings `extproc`; the router then has no main listener); or `both`.
    All but `proxy` need the extra `gateway`."""
    host: str = "127.0.0.1"
    """Address of the main listener. Loopback by default, so that no client is served by accident."""
    port: Port = 8000
    """Port of the main listener; 0 takes a free one."""
    reuse_port: bool = False
    """If true, several routers of one user may listen on the main port (SO_REUSEPORT), and the kernel spreads
    connections over them. Each needs an admin port of its own. Off by default: a second router that was started by
    mistake then ends with an error."""
    admin_host: str = "127.0.0.1"
    """Address of the admin listener: metrics, replicas, decisions. Any address except loopback needs `admin.token`."""
    admin_port: Port = 8001
    """Port of the admin listener; 0 takes a free one."""
    metrics_on_main: Reloadable[bool] = True
    """If true, `/metrics` is on the main listener too. On by default: a scrape then works without a second port."""
    cors_origins: Reloadable[tuple[str, ...]] = ()
    """Origins of web pages that may use the main listener from a browser, such as `https://chat.example.com`; `*`: all
    pages, without cookies. Empty: engines decide, unless the router requires keys or sends its own key to engines."""
    keepalive_s: Reloadable[Seconds] = 75.0
    """Seconds for which an idle client connection is kept. As nginx."""
    lame_duck_s: Reloadable[NotNegative] = 5.0
    """Seconds for which the listener stays open after SIGTERM while `/readyz` returns 503: load balancers need that
    time to choose other routers. Ctrl-C (SIGINT) does not wait."""
    drain_s: Reloadable[NotNegative] = 180.0
    """Seconds that running answers may take to finish after `listen.lame_duck_s`. A pod's grace period must be longer
    than both."""
    file_watch_interval_s: Reloadable[NotNegative] = 10.0
    """Seconds between two checks for a change of files that settings name (certificates, keys, tokens). A changed file
    is read again as on SIGHUP, once it stays the same for one interval. 0: on SIGHUP only."""
    tls_certificate: OnOffFile = ""
    """PEM file of the main listener's certificate chain; empty: no TLS. Read again on SIGHUP, or when it changes."""
    tls_key: ReloadableFile = ""
    """PEM file of that certificate's private key; empty: it is in `listen.tls_certificate`."""
    tls_client_ca: OnOffFile = ""
    """PEM file of authorities; clients must then present a certificate signed by one of them."""
    connections_max: Reloadable[Positive] = 16_384
    """Maximum of client connections open at once; a further one is closed at once. Fewer if the process may not open
    enough files, which is logged at the start."""
    connections_per_client_max: Reloadable[Positive] = 4_096
    """Maximum of client connections open at once from one address. High, because a load balancer is one address."""
    head_timeout_s: Reloadable[Seconds] = 10.0
    """Seconds from the first byte of a request to the end of its head."""
    body_bytes_per_s_min: Reloadable[Count] = 1_024
    """Bytes a second at which a request's body must arrive, on average and after a grace period of `head_timeout_s`; 0:
    any."""
    body_timeout_s: Reloadable[Seconds] = 300.0
    """Seconds from the end of a request's head to the end of its body, at any rate: 32 MiB at a megabit a second."""
    send_timeout_s: Reloadable[Seconds] = 60.0
    """Seconds for which a client may leave data sent to it unread; then its connection is closed. Only time counts in
    which the client does not read."""


@dataclass(frozen=True, slots=True)
class ExtProcSettings:
    """Endpoint picker: the router answers a gateway by Envoy's external processing. Needs the extra `gateway`."""

    host: str = "127.0.0.1"
    """Address of the picker's two listeners. Loopback by default, so that no gateway is served by accident."""
    port: Port = 9002
    """Port of the picker, gRPC over HTTP/2; 0 takes a free one. As in the Gateway API's Inference Extension."""
    health_port: Port = 9003
    """Port of gRPC health checks alone, never with TLS: `liveness`, `readiness`; 0 takes a free one. They are answered
    on `extproc.port` too."""
    tls_certificate: OnOffFile = ""
    """PEM file of the picker's certificate chain; empty: no TLS. Read again on SIGHUP, or when it changes."""
    tls_key: ReloadableFile = ""
    """PEM file of that certificate's private key; empty: it is in `extproc.tls_certificate`."""
    tls_client_ca: OnOffFile = ""
    """PEM file of authorities; gateways must then present a certificate signed by one of them."""
    fallbacks_max: Annotated[int, Meta(ge=0, le=4)] = 2
    """Number of further endpoints that a request is given, in order of price, to be tried if the first cannot be
    reached. 0 for gateways that take one endpoint only, such as those with Envoy's cluster type ORIGINAL_DST."""
    objectives: tuple[str, ...] = ()
    """Priorities of objectives that clients name in `x-llm-d-inference-objective`: `batch=low`, `chat=high`. Others are
    `normal`."""
    response_sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 0.02
    """Part of the answers that the router asks the gateway to send to it as well, after the first 64, if the gateway
    sends none: speeds and lengths are learned from them. It needs `allow_mode_override` in the gateway, and costs those
    answers about 0.2 ms of CPU a chunk. 0: none."""
    streams_max: Positive = 16_384
    """Maximum of concurrent requests; a further one gets 503, to be retried."""
    stream_s_max: Seconds = 3_600.0
    """Seconds after which a request's lease is given back, even if its gateway reports nothing."""
    keepalive_s: Seconds = 30.0
    """Seconds between two keepalive pings to a silent gateway; it has the same time to answer."""
    conformance: bool = False
    """If true, requests on all paths are placed, and the header `test-epp-endpoint-selection` names the endpoints that
    may receive one, as the upstream conformance suite requires. Off by default: a client must not choose."""


@dataclass(frozen=True, slots=True)
class AdminSettings:
    """Access to the admin listener, and the file of past decisions."""

    token: Reloadable[str] = ""
    """Bearer token for every admin page except `/healthz` and `/readyz`. Without one the admin listener starts on
    loopback only. At least 16 characters."""
    token_file: ReloadableFile = ""
    """File that contains the token, such as a mounted secret; read again on SIGHUP."""
    connections_max: Reloadable[Positive] = 64
    """Maximum of connections to the admin listener open at once; a further one is closed at once. A dashboard takes
    two, a scraper one. Their time limits are those of the main listener (`listen.head_timeout_s` and the other time
    limits of a connection)."""
    connections_per_client_max: Reloadable[Positive] = 32
    """Maximum of connections to the admin listener open at once from one address."""
    replicas_allowed: Reloadable[tuple[str, ...]] = ()
    """Permitted addresses of replicas added at run time (`POST /admin/replicas`): `http://10.0.0.0/8:8000`, an address
    or a network, never a name, with its port. Empty: no replica can be added."""
    history_path: str = ""
    """File in which past decisions and the page's figures are kept over restarts; it is created if it is missing, and
    belongs to this router alone. Empty: memory only, `limits.recent_decisions_max` decisions and an hour of figures."""
    history_bytes_max: HistoryBytes = 256 << 20
    """Bytes of the file `admin.history_path` with its journal; the oldest decisions are deleted first. 256 MiB contains
    about 200,000."""
    history_days_max: Days = 14
    """Days for which decisions and figures are kept in that file."""


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """Access to the router."""

    keys_file: OnOffFile = ""
    """YAML file of API keys, each as a hash with its tenant, models, rates and priority; empty: no key is required.
    `warmroute make-key TENANT` writes an entry. Read again on SIGHUP."""
    isolate: Reloadable[bool] = False
    """If true, no tenant shares cached prefixes with another: prompts are salted, so that no tenant can infer from
    response times what others have asked. A key may override this for its tenant."""
    secret: str = ""
    """Secret from which tenants' salts are derived, and by which routers with `peering.redis_url` authenticate their
    messages to each other. All routers in front of one fleet need the same. At least 32 characters. Empty: messages are
    authenticated by a secret made of all API keys, and without keys not at all."""
    secret_file: str = ""
    """File that contains the secret."""
    secret_before: str = ""
    """Previous secret, while a new one is rolled out from router to router: messages are authenticated by both, and one
    is enough. No salt is derived from it."""
    secret_before_file: str = ""
    """File that contains the previous secret."""
    receipts: Reloadable[bool] = False
    """If true, tenants' answers carry `x-warmroute-*` receipts. Off by default: the place at which a prompt was found
    reveals earlier requests of others."""
    tenants_max: Positive = 1_000
    """Maximum of tenants that are distinguished for fair shares and metrics; the rest share one more."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """Admission control: requests that wait and requests that are shed if the fleet is full."""

    in_flight_max: Reloadable[Positive] = 1_024
    """Maximum of requests open at once on one replica, regardless of its own report. As vLLM's own default for large
    GPUs."""
    engine_waiting_max: Reloadable[Positive] = 32
    """Number of requests waiting in an engine, by its own recent count, above which it receives no further ones: they
    wait in the router, which can order them."""
    queue_requests_max: Reloadable[Count] = 1_024
    """Maximum of requests that wait in the router; beyond it the least important one is shed (429)."""
    queue_bytes_max: Reloadable[Positive] = 256 << 20
    """Bytes of bodies that wait in the router."""
    queue_timeout_s: Reloadable[Seconds] = 30.0
    """Seconds for which a request may wait in the router, from its arrival, for any reason. A request that would wait
    longer is shed on arrival (429)."""
    defer_max_s: Reloadable[NotNegative] = 30.0
    """Seconds for which a long prompt may be deferred while the fleet is busy and the prompt would evict so many blocks
    that all requests became slower. After that it is placed in any case, or waits for a place until `queue_timeout_s`
    is over. 0: no prompt is deferred. A value above `queue_timeout_s` raises the output above saturation, if clients
    and proxies in front are willing to wait for that time."""
    tenant_share_max: Reloadable[Annotated[float, Meta(gt=0, le=1)]] = 0.75
    """Part of the fleet's places that one tenant may hold while the fleet is full, so that others need not wait for
    it."""


@dataclass(frozen=True, slots=True)
class RoutingSettings:
    """Placement of requests."""

    policy: str = "warm"
    """Name of the placement policy; all but `warm` are for comparison."""
    index_bytes_max: Positive = 256 << 20
    """Bytes that the prefix index may take, all replicas together. 256 MiB contains about 800,000 blocks of 512
    bytes."""
    default_cache_blocks: Positive = 4_096
    """Estimated blocks of 512 bytes in the cache of a replica with unknown capacity: half a million tokens."""
    kv_tokens_max: Count = 0
    """KV capacity of a replica in tokens if its metrics report none; 0 leaves `default_cache_blocks`."""
    remembered_prompts_max: Positive = 65_536
    """Number of past prompts remembered, to learn how soon they repeat and which replica answered them."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """Probes of replicas' health and load."""

    interval_s: Seconds = 1.0
    """Seconds between two rounds of probes. A silent replica is taken out after two of them, one that refuses at
    once."""
    timeout_s: Seconds = 5.0
    """Seconds that a probe may take. A busy engine answers late and is not dead, so the limit is long, and two failures
    in a row are needed."""
    models_interval_s: Seconds = 10.0
    """Seconds between two requests for `/v1/models`. Adapters are loaded at run time, so it is also read when a replica
    comes back, and when a request names a model that no replica lists."""
    models_max: Positive = 4_096
    """Maximum of models that are read of a replica's `/v1/models`. Those beyond it are unknown to the router; a warning
    gives their number."""
    metrics: bool = True
    """If true, replicas' `/metrics` are read. If false, the router knows no load, capacity or restart from them."""
    metrics_interval_s: NotNegative = 0.0
    """Seconds between two requests for `/metrics`, for engines that are slowed down by them; 0: with every round of
    probes. After a late answer there is a pause of up to a minute in any case."""
    api_key: str = ""
    """Bearer token sent with probes, for engines started with `--api-key`; clients' own keys are passed on."""
    page_bytes_max: Positive = 8 << 20
    """Bytes of a metrics or models page that are read. A longer page of models is a failed probe, a longer page of
    metrics is ignored."""


@dataclass(frozen=True, slots=True)
class EventSettings:
    """Use of replicas' KV events."""

    enabled: bool = True
    """If true, the KV events that a replica advertises are used. On by default: the contents of a replica's cache are
    then known, not estimated."""
    endpoints: tuple[str, ...] = ()
    """Endpoints of KV events, for engines that do not report them: `http://10.0.0.1:8000=tcp://10.0.0.1:5557`, and
    after another `=` the replay endpoint if there is one. A rank of a data-parallel server is `http://...#dp1`."""
    bind: str = ""
    """ZeroMQ address to bind, such as tcp://0.0.0.0:5557, if engines connect to the router; empty: no address is
    bound."""
    topics: tuple[str, ...] = ()
    """Replicas by the topic under which they publish on the bound address: `topic=http://10.0.0.1:8000`. The topic
    `kv@HOST:PORT@MODEL` of a replica at HOST:PORT needs no entry; messages of unknown topics are ignored."""
    poll_s: Seconds = 10.0
    """Seconds between two queries for a replica's event endpoints. It may come back with other flags."""
    replay_timeout_s: Seconds = 1.0
    """Seconds for which a replay may be silent before it is requested again; twice as long each time, three times in
    all. vLLM answers between two batches, every 0.1 s."""
    fallback_delay_s: Seconds = 2.0
    """Seconds for which no cached blocks are credited to a replica after its stream broke; then the router's own
    estimate counts again."""
    pending_wait_s: NotNegative = 0.02
    """Seconds for which a request may wait for events that are known to be on their way: an answer that ended a moment
    ago must have stored blocks that no event has reported yet. On idle machines no request waits."""
    queue_bytes_max: Positive = 64 << 20
    """Bytes of batches that wait for a replay to end, per replica; beyond it they are requested again."""
    blocks_max: Positive = 1 << 20
    """Maximum of blocks of one replica in the index; a replica with more is never graded exact. 16 million tokens of
    16."""
    index_bytes_max: Positive = 1 << 30
    """Bytes that the blocks reported by KV events may take, all replicas together, at 320 a block: 3.3 million blocks.
    Beyond it the replica that takes most gives up blocks, and is not exact until its cache is cleared."""
    request_full_reports: bool = False
    """If true, a vLLM replica that the router joined late is made to report its cached blocks of requested prompts.
    This takes a request of one token with `kv_cache_report_mode: full` (vLLM 0.30 and later), at most one a second. The
    report looks like second copies to every router that receives the events: use it in all routers of a replica, or in
    none."""


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Blocks that engines keep in memory and files behind their GPUs, by their KV events, and the time to load them."""

    enabled: bool = True
    """If true, blocks in memory or files behind a GPU count as cached. If false, only blocks on GPUs count."""
    kv_bytes_per_token: Annotated[float, Meta(ge=1, le=1e9)] = 262_144.0
    """KV bytes of a token that one replica's links move: 2 x layers x KV heads x head size x bytes of a number, divided
    by the GPUs with links that work side by side. 256 KiB: Qwen3-32B in bf16. With the speeds below it gives the first
    estimate of a load's time, which a few answers correct."""
    cpu_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 54.0
    """Gigabytes (10^9 bytes) a second from CPU memory to the GPU, as a first estimate: PCIe 5 as measured on an H20 and
    on an H100."""
    storage_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 6.0
    """Gigabytes a second from local files, and from the medium that engines call EXTERNAL: one NVMe drive."""
    shared_gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 2.0
    """Gigabytes a second from a remote store that replicas share: an object store, for each replica."""


@dataclass(frozen=True, slots=True)
class P2pSettings:
    """P2P KV transfer: blocks that one engine reads from the CPU memory of another, on the router's order. vLLM's p2p
    tier."""

    port: Port = 0
    """Port at which every engine takes orders of its peers (`VLLM_P2P_SIDE_CHANNEL_PORT`, 5710 by default), counted up
    by its data-parallel rank. 0: only engines that `p2p.endpoints` or a pod's annotation `warmroute/p2p-port` names.
    """
    endpoints: tuple[str, ...] = ()
    """Addresses at which single engines take orders of their peers: `http://10.0.0.1:8000=10.0.0.1:5710`."""
    gb_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 30.0
    """Gigabytes (10^9 bytes) a second from one engine's CPU memory to another's GPU, as a first estimate, which a few
    answers correct: two NICs of 200 Gbit/s."""
    probe_interval_s: Seconds = 5.0
    """Seconds between two checks if an engine still takes orders of its peers. No blocks are transferred from an engine
    that does not listen."""
    timeout_s: Seconds = 10.0
    """Seconds beyond the predicted time to the first token (its 90th percentile) after which a request with a P2P KV
    transfer is sent again without one. The same holds for a stream with a prompt that another replica prefilled
    (`disagg`). The limit is needed because an engine waits for a wrong address without end."""
    cooldown_s: Seconds = 60.0
    """Seconds of cooldown for the source of a request that stalled: no blocks are transferred from it."""


@dataclass(frozen=True, slots=True)
class DisaggSettings:
    """Disaggregated prefill: one replica prefills the prompt of a request, and another one decodes."""

    kv_connector: str = ""
    """KV connector of the engines: `nixl`, `mooncake` or `offloading` for vLLM's connectors of these names
    (`offloading`: with a p2p tier), `sglang` for SGLang. Empty: no request is split, and roles have no effect."""
    prefill: tuple[str, ...] = ()
    """Base URLs of replicas that prefill for others. Pods declare it by label, `warmroute.io/role` or
    `llm-d.ai/role`."""
    decode: tuple[str, ...] = ()
    """Base URLs of replicas that decode after others have prefilled. Those in neither list and without a label do both,
    except SGLang's, which do either."""
    port: Port = 0
    """Port at which decoding engines reach prefilling ones: of the bootstrap server of Mooncake and SGLang, 8998 by
    default; of the p2p tier of `offloading`, 5710 by default, counted up by the data-parallel rank. 0: the engine's own
    number. NIXL needs none."""
    endpoints: tuple[str, ...] = ()
    """Addresses at which decoding engines reach single prefilling ones: `http://10.0.0.1:8000=10.0.0.1:8998`."""
    probe_interval_s: Seconds = 5.0
    """Seconds between two checks if a prefilling engine still answers at the address for decoding ones. An engine that
    does not answer prefills for no other."""
    prefill_grace_s: Reloadable[Seconds] = 2.0
    """Seconds that a prefilling engine has left when the answer that uses its blocks has ended."""
    hosts: tuple[str, ...] = ()
    """Hosts that prefilling engines may name in their answers in addition to their own, as addresses, CIDRs or names:
    `10.0.0.0/8`. Decoding engines connect there. Needed if an engine cannot be reached at the address that it names, as
    behind a proxy."""


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """Conversion of prompts to token ids, for replicas with KV events."""

    sources: tuple[str, ...] = ()
    """Tokenizers: `MODEL=PATH`, or `PATH` for every model. A folder with tokenizer.json and the chat template, or a
    name on the model hub, optionally with its revision (`NAME@REVISION`). Needs the extra `tokenizers`."""
    template_kwargs: tuple[str, ...] = ()
    """Values of the engines' flag `--default-chat-template-kwargs`, by model: `MODEL={"enable_thinking": false}`."""
    ask_replicas: bool = True
    """If true, prompts of a model without a tokenizer in the router are tokenized by its replicas (`/tokenize`), a
    round trip a prompt."""
    verify: bool = True
    """If true, the router's tokens are compared with a replica's on a set of probing prompts, at first and at
    intervals."""
    verify_interval_s: Seconds = 600.0
    """Seconds between two comparisons of tokens by `tokens.verify`."""
    deadline_s: Seconds = 0.1
    """Seconds that a prompt may take to become tokens; then it is placed by estimate."""
    cache_bytes_max: Positive = 128 << 20
    """Bytes of remembered token ids, and of the messages they are made of: only the new part of the next turn is read
    and encoded."""


@dataclass(frozen=True, slots=True)
class InsightsSettings:
    """Analysis of cache misses: reasons, first differences, advice."""

    enabled: bool = True
    """If true, every miss gets a reason. On by default: the cause of a low hit rate is otherwise not visible."""
    excerpts: bool = False
    """If true, pages and logs may quote prompts at their differences. Off by default: a class, a shape and a hash are
    shown."""
    memory_bytes_max: Positive = 64 << 20
    """Bytes of prompts' texts kept to compare the next ones with, in each process that serves clients. Never shown."""
    prompt_bytes_max: Positive = 1 << 20
    """Bytes of one prompt that are kept; the rest is not compared."""
    blocks_max: Positive = 1 << 19
    """Number of blocks of 512 bytes for which it is remembered that they were computed once, and on which replica: 67
    million tokens."""
    diff_budget_ms_per_s: Positive = 10
    """Milliseconds a second for finding the differences of prompts, 1 % of a core. When half of it is used, a
    difference that was found twice at one place is assumed for the next prompt; beyond the limit, the last difference
    found is assumed."""
    inspections_per_s_max: Positive = 200
    """Prompts a second, in each process that serves clients, with texts that are examined: half a percent of a core.
    Each 32 KB of one count as one more. Beyond it only a part of all conversations is watched, and the reasons of the
    others come from their blocks alone."""
    replay_window_s: Seconds = 3_600.0
    """Seconds within which an identical prompt counts as a replay, not as reuse of a prefix."""
    templates_max: Positive = 256
    """Maximum of templates (prefixes that conversations share) that are distinguished; the least used are dropped."""
    groups_max: Positive = 200
    """Maximum of combinations of route, tenant, tools, agent step and kind of agent that metrics distinguish; the rest
    share one more."""
    steps_max: Positive = 32
    """Maximum of names of agent steps that are distinguished; the rest share one more."""
    step_header: str = "x-warmroute-step"
    """Request header that names an agent's step; not passed on to replicas."""
    step_field: str = "agent_step"
    """Field of a body's `metadata` that names the step if the header does not."""
    grafana_url: WebAddress = ""
    """Address of Grafana, linked from the page: `https://grafana.example/d/warmroute-overview`. Empty: no link."""
    normalize_tools: Reloadable[tuple[str, ...]] = ()
    """Repairs of requests before they are sent, unless a key sets them for its tenant: `sort_tools`, `canonical_tools`
    (keys of tools' JSON schemas in one order)."""
    history_policy: Reloadable[str] = "off"
    """Treatment of a conversation with changed earlier messages, unless a key sets it for its tenant: `off`, `warn` (a
    header and a log line) or `reject` (409)."""


@dataclass(frozen=True, slots=True)
class PrewarmSettings:
    """Prewarming: filling the cache of a replica that is new or was restarted, before it takes traffic."""

    prefixes_file: ReloadableFile = ""
    """JSONL file of requests, `{"path": "/v1/chat/completions", "body": {...}}` each, with the prompts that a replica
    is warmed with."""
    templates: Reloadable[Count] = 0
    """Number of the most used learned templates that a replica is warmed with; 0: none."""
    tokens_max: Reloadable[Positive] = 200_000
    """Maximum of prompt tokens that a replica is warmed with."""
    block_readiness: Reloadable[bool] = False
    """If true, a replica gets no traffic until it is warm. Off by default: it takes traffic in the meantime."""
    timeout_s: Reloadable[Seconds] = 60.0
    """Seconds that warming may take; then the replica takes traffic as it is."""


@dataclass(frozen=True, slots=True)
class PeeringSettings:
    """Messages between routers of one fleet, through Redis (6.2 and newer) or Valkey. Needs the extra `shared`."""

    redis_url: str = ""
    """Address of the store: `redis://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`, `rediss://` for TLS,
    `redis+sentinel://HOST,HOST/SERVICE` or `redis+cluster://HOST,HOST`. Empty: nothing is shared, and sharing costs
    nothing. Needs the extra `shared`."""
    redis_url_file: OnOffFile = ""
    """File that contains the URL, such as a mounted secret; read again on SIGHUP."""
    password: str = ""
    """Password for the store, in place of one in the URL."""
    password_file: ReloadableFile = ""
    """File that contains the password for the store; read again on SIGHUP."""
    fleet: str = "fleet"
    """Name of the fleet: routers with the same name share, and several fleets may have one store."""
    router_id: str = ""
    """Name of this router, unique in the fleet. Empty: the machine's name, in Kubernetes the pod's, and the port of the
    admin listener."""
    timeout_s: Annotated[float, Meta(gt=0, le=0.5)] = 0.5
    """Seconds that the store may take for an answer, 0.5 at most. No request waits for it. Beyond it the store counts
    as gone; a longer limit would keep a router from noticing within a second."""
    expected_routers: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """Number of routers in front of the same replicas. Until this one has received messages through the store, it
    grants only its part, one in this number, of each tenant's rate; 0: one in 2. More than 1 without a store is logged
    as `routers_unshared`."""
    replicas_in_common: bool = True
    """If true, a router belongs to this one's fleet only if both have a replica in common, with one base model;
    messages of another one with the same store and name are ignored. If false, the name alone decides, as for routers
    of several zones that keep one rate for each tenant."""
    tls_ca: ReloadableFile = ""
    """PEM file of authorities that the store's certificate is checked against; empty: the machine's."""
    tls_certificate: ReloadableFile = ""
    """PEM file of the certificate that is presented to the store, and its key unless `tls_key` names it."""
    tls_key: ReloadableFile = ""
    """PEM file of that certificate's private key."""


@dataclass(frozen=True, slots=True)
class SnapshotSettings:
    """State that a starting router restores: blocks that replicas hold, the replica that answered each prompt, and
    learned values. It consists of hashes and numbers, never of a prompt, an answer or a key of a client."""

    path: str = ""
    """File in which the router saves its state, and from which it restores it; empty: none. Only one
    router uses it. It is replaced atomically, and only the router's user can read it."""
    interval_s: Seconds = 30.0
    """Seconds between two writes of the state file; it is also written at an orderly end."""
    bytes_max: Positive = 256 << 20
    """Bytes that the file, or the state that a sibling sends, may have: replicas that do not fit are left out. A
    replica's 20,000 blocks take about 500 KB."""
    age_max_s: Seconds = 900.0
    """Seconds after which saved state is no longer used: caches have other contents by then."""
    readiness_wait_s: NotNegative = 5.0
    """Seconds for which `/readyz` may wait, from the start on, until saved state is restored. 0: it does not wait."""
    from_peers: bool = True
    """If true, a starting router with `peering.redis_url` requests the state of another one, and answers such requests
    of others."""


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """Connections to replicas: credentials, timeouts, retries and stream failover."""

    api_key: Reloadable[str] = ""
    """Bearer token sent to replicas instead of the client's own; empty: the client's is passed on unless keys are the
    router's (`auth.keys_file`)."""
    api_key_file: ReloadableFile = ""
    """File that contains the bearer token sent to replicas; read again on SIGHUP."""
    tls_ca: OnOffFile = ""
    """PEM file of authorities that replicas' certificates are checked against; empty: the machine's."""
    tls_certificate: OnOffFile = ""
    """PEM file of the certificate that is presented to replicas, and its key unless `tls_key` names it."""
    tls_key: ReloadableFile = ""
    """PEM file of that certificate's private key."""
    connect_timeout_s: Reloadable[Seconds] = 2.0
    """Seconds to connect. In one cluster that takes a millisecond."""
    first_byte_timeout_s: Reloadable[Seconds] = 600.0
    """Seconds from sending a request to the first byte of its answer, without pings. A long prompt behind a queue takes
    minutes."""
    idle_timeout_s: Reloadable[Seconds] = 600.0
    """Seconds between two pieces of an answer, pings left out. While its replica works a stream may be silent for an
    hour, because it may hide the tokens that it generates. At an engine without metrics such silence is accepted for
    `upstream.first_byte_timeout_s`."""
    stall_timeout_s: Reloadable[Seconds] = 3.0
    """Seconds beyond the time in which a replica should have sent a first token. After that it counts as stalled and
    receives no further requests, and silent requests are retried on other replicas."""
    slow_start_s: Reloadable[NotNegative] = 10.0
    """Seconds in which a replica that came back receives a growing share of requests: its cache is empty, and so is its
    queue."""
    keepalive_s: Reloadable[Seconds] = 3.0
    """Seconds for which an idle connection to a replica is kept. Less than uvicorn's 5, so that the router closes
    first."""
    retries_max: Reloadable[Count] = 1
    """Number of further replicas tried if one fails before the client got a byte."""
    retry_on_timeout: Reloadable[bool] = False
    """If true, a request that timed out is retried on another replica. Off by default: it has cost minutes of GPU time
    already."""
    retry_ratio: Reloadable[NotNegative] = 0.2
    """Retries per request allowed on average, as Envoy's and linkerd's budgets: a dead fleet is not flooded with
    retries."""
    retry_floor_per_s: Reloadable[NotNegative] = 10.0
    """Retries per second that are always allowed, regardless of the ratio."""
    stream_failover: Reloadable[Literal["off", "asked", "exact"]] = "asked"
    """Stream failover, unless a key or `upstream.stream_failover_models` sets it: a broken stream is continued on
    another replica, if the whole is what one replica would have sent. `asked`: if the request asks for it
    (`x-warmroute-stream-failover`); `exact`: if the request does not decline it; `off`: never. Engines are then asked
    for token ids, and each event of such streams is read."""
    stream_failover_models: Reloadable[tuple[str, ...]] = ()
    """Stream failover of single models, in the values of `upstream.stream_failover`: `MODEL=exact`."""
    drain_migrate_after_s: Reloadable[NotNegative] = 5.0
    """Seconds from the report that a replica is leaving or not ready (by discovery), or from a request to drain it,
    until its streams that can be continued are moved to other replicas. Shorter than the grace period that engines have
    to end."""


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Limits of requests, and of the data that is kept of them."""

    body_bytes_max: Reloadable[Positive] = 32 << 20
    """Bytes of a request body. A million tokens with some images; more is 413."""
    total_body_bytes_max: Reloadable[Positive] = 1 << 30
    """Bytes of all request bodies that are arriving, waiting, or with a replica that has not begun to answer. A tenant,
    or without keys an address, may hold four times the bytes that are left free; beyond that its bodies are not read
    any further."""
    body_budget_timeout_s: Reloadable[Seconds] = 10.0
    """Seconds for which a body may wait for space within `limits.total_body_bytes_max`; then 503."""
    buffered_response_bytes_max: Reloadable[Count] = 1 << 20
    """Bytes of an answer with a Content-Length that is held until it is complete, so that a truncated one can be
    retried. A longer one, one without a length, and every stream of events are forwarded as they arrive."""
    offload_bytes_min: Count = 256 << 10
    """Bytes of a body from which it is parsed off the event loop. Larger ones take over a millisecond."""
    response_ids_max: Positive = 65_536
    """Number of response ids remembered, so that follow-ups reach the replica that stored them."""
    recent_decisions_max: Positive = 512
    """Number of the last decisions kept for `/admin/decisions`."""
    json_depth_max: Positive = 256
    """Maximum depth of objects and arrays in a request body; deeper is 400."""
    json_parts_max: Reloadable[Positive] = 65_536
    """Maximum of objects and arrays in a request body (messages, their parts, tools, and their contents); more is 400.
    Each takes up to 850 bytes while it is read, regardless of its size in the body."""
    json_values_max: Reloadable[Positive] = 1 << 20
    """Maximum of values in a request body, such as the token ids of a prompt; more is 400, before the body is
    decoded."""
    parse_queue_bytes_max: Reloadable[Positive] = 128 << 20
    """Bytes of long bodies that wait to be parsed, which one thread does; beyond it one is shed (429), of the tenant
    that has most of them waiting."""
    parse_queue_timeout_s: Reloadable[Seconds] = 10.0
    """Seconds for which a long body may wait to be parsed; then its request is shed (429)."""


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """API for clients: paths, unknown models, usage and receipts."""

    passthrough: Reloadable[tuple[str, ...]] = (
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
    """Further paths, passed to the least costly replica: the paths of vLLM 0.32 and SGLang 0.5.23 that are for clients.
    All other paths are 404: engines have paths that flush caches, load adapters or put them to sleep, and those are not
    for clients."""
    unknown_models: Reloadable[Literal["refuse", "pass"]] = "refuse"
    """Treatment of a model's name that no replica lists, after all were asked again. `refuse`: the request is refused.
    `pass`: the name is passed to the engine unchanged, if one base model is served: vLLM's resolvers load an adapter
    only when a request names it."""
    ask_usage: Reloadable[bool | Literal["auto"]] = "auto"
    """Usage of streams with clients that do not ask for it. `true`: the router asks engines for usage at the end of
    such a stream, and removes it from the answer, once a stream of the replica has shown that usage does not come
    unasked. `auto`: the same, if all engines of the model are vLLM or SGLang, which are known to send it. `false`: the
    bodies of healthy requests stay as they are, except those of tenants with a rate of tokens on such engines."""
    receipts: Reloadable[bool] = True
    """If true, answers carry `x-warmroute-*` headers with the request's replica and the reason for it."""


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Log lines on standard error."""

    level: Reloadable[str] = "info"
    """Least level of log lines: one of debug, info, warning, error."""
    requests: Reloadable[bool] = True
    """If true, each request leaves a line. Lines contain no prompt and no answer."""
    format: str = "auto"
    """Format of log lines: `json`, or `text` for people. `auto` is text on a terminal and JSON elsewhere."""


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings."""

    replicas: Reloadable[tuple[str, ...]] = ()
    """Base URLs of the engines, without `/v1`; `10.0.0.1:8000` is short for `http://10.0.0.1:8000`."""
    allow_empty: Reloadable[bool] = False
    """If true, a reload may remove all `replicas` or `auth.keys_file`. Off by default: such a reload is refused,
    because an empty or half-written file looks the same."""
    discovery: DiscoverySettings = field(default_factory=DiscoverySettings)
    """Sources of replicas in addition to `replicas`."""
    listen: ListenSettings = field(default_factory=ListenSettings)
    """Listeners of the router."""
    extproc: ExtProcSettings = field(default_factory=ExtProcSettings)
    """Endpoint picker of a gateway."""
    admin: AdminSettings = field(default_factory=AdminSettings)
    """Access to the admin listener, and the file of past decisions."""
    auth: AuthSettings = field(default_factory=AuthSettings)
    """Access to the router."""
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    """Admission control if the fleet is full."""
    routing: RoutingSettings = field(default_factory=RoutingSettings)
    """Placement of requests."""
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    """Probes of replicas' health and load."""
    events: EventSettings = field(default_factory=EventSettings)
    """Use of replicas' KV events."""
    tiers: TierSettings = field(default_factory=TierSettings)
    """Blocks that engines keep behind their GPUs."""
    p2p: P2pSettings = field(default_factory=P2pSettings)
    """P2P KV transfer between engines."""
    disagg: DisaggSettings = field(default_factory=DisaggSettings)
    """Disaggregated prefill."""
    tokens: TokenSettings = field(default_factory=TokenSettings)
    """Conversion of prompts to token ids."""
    peering: PeeringSettings = field(default_factory=PeeringSettings)
    """Messages between routers."""
    snapshot: SnapshotSettings = field(default_factory=SnapshotSettings)
    """State that a starting router restores."""
    upstream: UpstreamSettings = field(default_factory=UpstreamSettings)
    """Connections to replicas."""
    limits: LimitSettings = field(default_factory=LimitSettings)
    """Limits of requests."""
    api: ApiSettings = field(default_factory=ApiSettings)
    """API for clients."""
    log: LogSettings = field(default_factory=LogSettings)
    """Log lines."""
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    """Content of the metrics page."""
    tracing: TracingSettings = field(default_factory=TracingSettings)
    """OpenTelemetry traces."""
    insights: InsightsSettings = field(default_factory=InsightsSettings)
    """Analysis of cache misses."""
    prewarm: PrewarmSettings = field(default_factory=PrewarmSettings)
    """Prewarming of new replicas."""


@cache
def _hints() -> dict[str, Any]:
    """Return the annotation of every setting, by its dotted key."""
    keys: dict[str, Any] = {}
    for name, hint in get_type_hints(Settings, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            keys |= {f"{name}.{inner}": h for inner, h in get_type_hints(hint, include_extras=True).items()}
        else:
            keys[name] = hint
    return keys


def field_keys() -> dict[str, Any]:
    """Return the type of every setting, limits included, by its dotted key."""
    keys = {}
    for key, hint in _hints().items():
        type_, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        limits = [mark for mark in marks if not isinstance(mark, Reload)]
        keys[key] = Annotated[(type_, *limits)] if limits else type_
    return keys


def reloadable_keys() -> dict[str, Reload]:
    """Return the mark of every setting that a reload applies, by its dotted key."""
    marks = {key: getattr(hint, "__metadata__", ()) for key, hint in _hints().items()}
    return {key: mark for key, each in marks.items() for mark in each if isinstance(mark, Reload)}


def get_setting(settings: Settings, key: str) -> Any:  # noqa: ANN401 - any setting
    """Return the value of a setting by its dotted key."""
    return reduce(getattr, key.split("."), settings)
