{{/* Checks that the schema cannot express: wrong combinations of valid values. All problems are reported at once. */}}
{{- define "warmroute.check" -}}
{{- $problems := concat
  (include "warmroute.checkNames" . | fromJsonArray)
  (include "warmroute.checkRemoved" . | fromJsonArray)
  (include "warmroute.checkDiscovery" . | fromJsonArray)
  (include "warmroute.checkSecrets" . | fromJsonArray)
  (include "warmroute.checkPod" . | fromJsonArray)
  (include "warmroute.checkTracing" . | fromJsonArray)
  (include "warmroute.checkObjects" . | fromJsonArray)
  (include "warmroute.checkPicker" . | fromJsonArray)
-}}
{{- if $problems -}}
{{- fail (printf "\n\nThese values of warmroute are invalid:\n- %s\n" (join "\n- " $problems)) -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.checkNames" -}}
{{- $p := list -}}
{{- $config := .Values.config -}}
{{- range include "warmroute.formerNames" . | fromJsonArray -}}
  {{- $name := splitList "." (last .) -}}
  {{- if and (eq (len $name) 3) (hasKey (dig (index $name 1) dict $config) (last $name)) -}}
    {{- $p = append $p (printf "%s is the former name of %s, which is given too: remove %s" (first .) (last .) (first .)) -}}
  {{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{/* Removed settings and values (files/removed-settings.json), each with its replacement. */}}
{{- define "warmroute.checkRemoved" -}}
{{- $p := list -}}
{{- $removed := .Files.Get "files/removed-settings.json" | fromJson -}}
{{- $config := include "warmroute.config" . | fromJson -}}
{{- range $section, $keys := $removed.keys -}}
  {{- range $key, $replacement := $keys -}}
    {{- if hasKey (dig $section dict $config) $key -}}
      {{- $p = append $p (printf "config.%s.%s was removed: %s" $section $key $replacement) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- range $section, $keys := $removed.values -}}
  {{- range $key, $values := $keys -}}
    {{- $value := dig $section $key "" $config | toString -}}
    {{- with get $values $value -}}
      {{- $p = append $p (printf "config.%s.%s: the value '%s' was removed: %s" $section $key $value .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{- define "warmroute.checkDiscovery" -}}
{{- $p := list -}}
{{- $d := (include "warmroute.config" . | fromJson).discovery -}}
{{- $engines := .Values.networkPolicy.engines -}}
{{- if eq $d.source "dns" -}}
  {{- if not $d.dns_name -}}
    {{- $p = append $p "config.discovery.dns_name is required with source dns: a headless Service, such as vllm.default.svc.cluster.local" -}}
  {{- else if and .Values.networkPolicy.enabled (not $engines) (not (regexMatch "^[^.]+\\.[^.]+\\.svc(\\.|$)" $d.dns_name)) -}}
    {{- $p = append $p "networkPolicy.engines is required: config.discovery.dns_name does not contain the namespace (SERVICE.NAMESPACE.svc...)" -}}
  {{- end -}}
  {{- if not (regexMatch "^[0-9]+$" (default "" $d.port | toString)) -}}
    {{- $p = append $p "config.discovery.port must be a number with source dns: addresses have no named ports" -}}
  {{- end -}}
{{- else if eq $d.source "static" -}}
  {{- if not (include "warmroute.config" . | fromJson).replicas -}}
    {{- $p = append $p "config.replicas is required with source static: base URLs, such as http://vllm-0.vllm:8000" -}}
  {{- end -}}
  {{- if and .Values.networkPolicy.enabled (not $engines) -}}
    {{- $p = append $p "networkPolicy.engines is required with source static: peers, such as [{podSelector: {matchLabels: {app: vllm}}}]" -}}
  {{- end -}}
{{- end -}}
{{- if .Values.engines.enabled -}}
  {{- if ne $d.source "kubernetes" -}}
    {{- $p = append $p (printf "config.discovery.source: engines.models require source kubernetes, not %s" $d.source) -}}
  {{- else if not (has .Release.Namespace (include "warmroute.namespaces" . | fromJsonArray)) -}}
    {{- $p = append $p (printf "config.discovery.namespaces must include %s, the namespace of engines.models" .Release.Namespace) -}}
  {{- end -}}
  {{- $connector := dig "disagg" "kv_connector" "" (include "warmroute.config" . | fromJson) -}}
  {{- $roles := false -}}
  {{- range .Values.engines.models -}}
    {{- if .role }}{{ $roles = true }}{{ end -}}
    {{- if and (has .role (list "prefill" "decode")) (or (not $connector) (and (eq .engine "vllm") (eq $connector "sglang"))) (ne .engine "sglang") -}}
      {{- $p = append $p (printf "config.disagg.kv_connector: a value for engine %s is required for the role of '%s'" .engine .name) -}}
    {{- end -}}
    {{- if and (eq .engine "sglang") (has .role (list "prefill" "decode")) (ne $connector "sglang") -}}
      {{- $p = append $p (printf "config.disagg.kv_connector: sglang is required for the role of '%s', because its servers accept no other requests" .name) -}}
    {{- end -}}
  {{- end -}}
  {{- with include "warmroute.splitPort" . -}}
    {{- $open := list -}}
    {{- range $.Values.engines.networkPolicy.splitPorts }}{{ $open = append $open (int .) }}{{ end -}}
    {{- if and $roles $.Values.engines.networkPolicy.enabled (not (has (int .) $open)) -}}
      {{- $p = append $p (printf "engines.networkPolicy.splitPorts must include %s, the port of config.disagg.port" .) -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- if and (ne $d.source "static") (include "warmroute.config" . | fromJson).replicas .Values.networkPolicy.enabled (not $engines) (not .Values.networkPolicy.extraEgress) -}}
  {{- $p = append $p "networkPolicy.extraEgress is required: discovery does not find config.replicas, so no rule allows routers to connect to them" -}}
{{- end -}}
{{- if and (dig "admin" "replicas_allowed" list (include "warmroute.config" . | fromJson)) .Values.networkPolicy.enabled (not .Values.networkPolicy.extraEgress) -}}
  {{- $p = append $p "networkPolicy.extraEgress is required: discovery does not find replicas of config.admin.replicas_allowed, so no rule allows routers to connect to them" -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{- define "warmroute.checkTracing" -}}
{{- $p := list -}}
{{- $config := include "warmroute.config" . | fromJson -}}
{{- with dig "tracing" "endpoint" "" $config -}}
  {{- if not (regexMatch "^https?://[^/]" .) -}}
    {{- $p = append $p "config.tracing.endpoint must be a URL of OTLP over HTTP, such as http://collector.monitoring:4318" -}}
  {{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{- define "warmroute.checkSecrets" -}}
{{- $p := list -}}
{{- $config := include "warmroute.config" . | fromJson -}}
{{- $values := .Values -}}
{{- $store := include "warmroute.storeSecret" . | fromJson -}}
{{- range $secret := list
  (list "admin" "token" "adminToken")
  (list "auth" "secret" "authSecret")
  (list "upstream" "api_key" "upstreamKey")
  (list "probe" "api_key" "upstreamKey")
-}}
  {{- if dig (index $secret 0) (index $secret 1) "" $config -}}
    {{- $p = append $p (printf "config.%s.%s would be readable in the pods' annotations: store it in a Secret and set %s.existingSecret" (index $secret 0) (index $secret 1) (index $secret 2)) -}}
  {{- end -}}
{{- end -}}
{{- range $file := list
  (list "admin" "token_file" "adminToken")
  (list "auth" "keys_file" "apiKeys")
  (list "auth" "secret_file" "authSecret")
  (list "upstream" "api_key_file" "upstreamKey")
  (list "listen" "tls_certificate" "tls")
-}}
  {{- if and (dig (index $file 0) (index $file 1) "" $config) (get (get $values (index $file 2)) "existingSecret") -}}
    {{- $p = append $p (printf "config.%s.%s and %s.existingSecret conflict: set only one of them" (index $file 0) (index $file 1) (index $file 2)) -}}
  {{- end -}}
{{- end -}}
{{- with dig "peering" dict $config -}}
  {{- if or .password (contains "@" (default "" .redis_url)) -}}
    {{- $p = append $p "config.peering has a password, which would be readable in the pods' annotations: store the URL in a Secret and set peering.existingSecret" -}}
  {{- end -}}
  {{- if and (or .redis_url .redis_url_file) $store.existingSecret $store.urlKey -}}
    {{- $p = append $p "config.peering.redis_url and peering.urlKey conflict: set only one of them, and `peering.urlKey: \"\"` if the Secret has no URL" -}}
  {{- end -}}
{{- end -}}
{{- if and $store.existingSecret (include "warmroute.hasValkey" .) -}}
  {{- $p = append $p "peering.existingSecret is for a store of your own, and no URL names one: set config.peering.redis_url or peering.urlKey; the password of the chart's Valkey is valkey.existingSecret" -}}
{{- end -}}
{{- if dig "auth" "isolate" false $config -}}
  {{- if not (or .Values.authSecret.existingSecret (dig "auth" "secret_file" "" $config)) -}}
    {{- $p = append $p "authSecret.existingSecret is required: the salts of isolated tenants are derived from it" -}}
  {{- end -}}
  {{- if not (or .Values.apiKeys.existingSecret (dig "auth" "keys_file" "" $config)) -}}
    {{- $p = append $p "apiKeys.existingSecret is required: config.auth.isolate needs API keys, which identify tenants" -}}
  {{- end -}}
{{- end -}}
{{- $token := or .Values.adminToken.existingSecret (dig "admin" "token_file" "" $config) -}}
{{- if and (not (has (dig "listen" "admin_host" "127.0.0.1" $config) (list "127.0.0.1" "::1" "localhost"))) (not $token) -}}
  {{- $p = append $p "adminToken.existingSecret is required: config.listen.admin_host is not a loopback address" -}}
{{- end -}}
{{- if .Values.tls.clientCaKey -}}
  {{- if not .Values.tls.existingSecret -}}
    {{- $p = append $p "tls.existingSecret is required: tls.clientCaKey is a key in it" -}}
  {{- end -}}
  {{- if not .Values.adminToken.existingSecret -}}
    {{- $p = append $p "adminToken.existingSecret is required with tls.clientCaKey: kubelets have no client certificate and probe the admin port" -}}
  {{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{- define "warmroute.checkPod" -}}
{{- $p := list -}}
{{- if not .Values.image.repository -}}
  {{- $p = append $p "image.repository is required: no public image exists yet; build it (docker build -f deploy/Dockerfile), push it, and set its location, such as --set image.repository=registry.example.com/warmroute" -}}
{{- end -}}
{{- $listen := dig "listen" dict (include "warmroute.config" . | fromJson) -}}
{{- if has (default "0.0.0.0" $listen.host) (list "127.0.0.1" "::1" "localhost") -}}
  {{- $p = append $p (printf "config.listen.host: '%s' cannot be reached from outside the pod; remove it to use 0.0.0.0" $listen.host) -}}
{{- end -}}
{{- $ports := list (int (include "warmroute.port" .)) (int (include "warmroute.adminPort" .)) -}}
{{- if has 0 $ports -}}
  {{- $p = append $p "config.listen.port and config.listen.admin_port must be fixed numbers, because Services and probes use them" -}}
{{- else if eq (index $ports 0) (index $ports 1) -}}
  {{- $p = append $p "config.listen.port and config.listen.admin_port must differ" -}}
{{- end -}}
{{- range $key := list "port" "admin_port" -}}
  {{- $port := int (get $listen $key) -}}
  {{- if and (gt $port 0) (lt $port 1024) -}}
    {{- $p = append $p (printf "config.listen.%s: %d is below 1024, which the pod's user may not open; set service.port for the port of clients" $key $port) -}}
  {{- end -}}
{{- end -}}
{{- if ge (int .Values.minReadySeconds) (int .Values.progressDeadlineSeconds) -}}
  {{- $p = append $p (printf "progressDeadlineSeconds: %d must be greater than minReadySeconds, %d" (int .Values.progressDeadlineSeconds) (int .Values.minReadySeconds)) -}}
{{- end -}}
{{- /* The API server accepts 262144 bytes of annotations; the rest is for those of kubectl and admission webhooks. */}}
{{- $annotations := add (len (include "warmroute.settings" .)) (len (toJson .Values.podAnnotations)) (len (toJson .Values.commonAnnotations)) -}}
{{- if gt $annotations 229376 -}}
  {{- $p = append $p (printf "config and podAnnotations: %d bytes; they become annotations of pods, which are limited to 229376 bytes in total" $annotations) -}}
{{- end -}}
{{- if hasKey .Values.podAnnotations "warmroute/settings" -}}
  {{- $p = append $p "podAnnotations: warmroute/settings is reserved for the chart, which derives it from config" -}}
{{- end -}}
{{- $grace := int (include "warmroute.grace" .) -}}
{{- $needed := int (include "warmroute.graceNeeded" .) -}}
{{- if lt $grace $needed -}}
  {{- $p = append $p (printf "terminationGracePeriodSeconds: %d s would cut streams; lame duck, drain, 15 s for the exit and preStopSleepSeconds need %d s" $grace $needed) -}}
{{- end -}}
{{- if and (dig "events" "bind" "" (include "warmroute.config" . | fromJson)) (or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1)) -}}
  {{- $p = append $p "config.events.bind needs replicaCount 1 and no autoscaling: an engine that connects to a Service reaches one router only" -}}
{{- end -}}
{{- if and (dig "events" "bind" "" (include "warmroute.config" . | fromJson)) (not (include "warmroute.eventsPort" .)) -}}
  {{- $p = append $p "config.events.bind must end in a port, such as tcp://0.0.0.0:5557" -}}
{{- end -}}
{{- $lower := dict "memory" "reduce config.routing.index_bytes_max and config.limits.total_body_bytes_max, or increase the limit" "cpu" "set resources.requests.cpu too" -}}
{{- $resources := include "warmroute.resources" . | fromJson -}}
{{- range $name, $limit := dig "limits" dict $resources -}}
  {{- $asked := dig "requests" $name "" $resources -}}
  {{- if and $asked (lt (include "warmroute.amount" $limit | float64) (include "warmroute.amount" $asked | float64)) -}}
    {{- $p = append $p (printf "resources.limits.%s: %v is less than the request of a router with these settings, %v: %s" $name $limit $asked (get $lower $name | default "set both")) -}}
  {{- end -}}
{{- end -}}
{{- range .Values.extraEnv -}}
  {{- if regexMatch "^WARMROUTE_(LISTEN|GATEWAY|EXTPROC|DISCOVERY|ADMIN|EVENTS_BIND|AUTH_KEYS)" .name -}}
    {{- $p = append $p (printf "extraEnv: %s would bypass the chart, which derives ports, permissions and monitors from config, adminToken and apiKeys: set it there" .name) -}}
  {{- end -}}
{{- end -}}
{{- range .Values.extraArgs -}}
  {{- if regexMatch "^(--(config|face|mode|host|port|admin-port)(=|$)|(--set=)?(listen|gateway|extproc|discovery|admin|events.bind|auth.keys)[._])" . -}}
    {{- $p = append $p (printf "extraArgs: '%s' would bypass the chart, which derives ports, permissions and monitors from config, adminToken and apiKeys: set it there" .) -}}
  {{- end -}}
{{- end -}}
{{- range .Values.tokenizers -}}
  {{- if eq (empty .path) (empty .repo) -}}
    {{- $p = append $p (printf "tokenizers: '%s' needs either a path or a repo" (.model | default "")) -}}
  {{- else if and .path (or .revision (not (hasPrefix "/" .path))) -}}
    {{- $p = append $p (printf "tokenizers: '%s' must be an absolute path of a folder in the pod, without a revision" .path) -}}
  {{- end -}}
{{- end -}}
{{- range list "helm.sh/chart" "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "warmroute/router-of" -}}
  {{- if or (hasKey $.Values.podLabels .) (hasKey $.Values.commonLabels .) -}}
    {{- $p = append $p (printf "podLabels, commonLabels: %s is reserved for the chart, because Services and Helm use it" .) -}}
  {{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}

{{- define "warmroute.checkObjects" -}}
{{- $p := list -}}
{{- $name := include "warmroute.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
  {{- $p = append $p (printf "fullnameOverride is required: '%s' is not a valid name of a Service: a lower-case letter, then lower-case letters, digits and -" $name) -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if .enabled -}}
  {{- if lt (int .maxReplicas) (int .minReplicas) -}}
    {{- $p = append $p (printf "autoscaling.maxReplicas: %d is less than minReplicas, %d" (int .maxReplicas) (int .minReplicas)) -}}
  {{- end -}}
  {{- if not (or .cpuPercent .inFlightRequests) -}}
    {{- $p = append $p "autoscaling: cpuPercent and inFlightRequests are both 0, so there is no target for scaling" -}}
  {{- end -}}
  {{- if and .cpuPercent (not (dig "requests" "cpu" "" (include "warmroute.resources" $ | fromJson))) -}}
    {{- $p = append $p "resources.requests.cpu is required: autoscaling.cpuPercent is a percentage of it" -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.networkPolicy.apiServerCidrs -}}
  {{- if and (contains "." .) (not (include "warmroute.isNetwork" .)) -}}
    {{- $p = append $p (printf "networkPolicy.apiServerCidrs: %s has bits after its mask, which the API server refuses: the address of a network must end in zeros; use /32 for a host" .) -}}
  {{- end -}}
{{- end -}}
{{- with .Values.service -}}
{{- if and (eq .type "ClusterIP") (or .nodePort .externalTrafficPolicy) -}}
  {{- $p = append $p "service.nodePort, service.externalTrafficPolicy: they are invalid for type ClusterIP; set service.type" -}}
{{- end -}}
{{- if and (ne .type "LoadBalancer") (or .loadBalancerClass .loadBalancerSourceRanges) -}}
  {{- $p = append $p "service.loadBalancerClass, service.loadBalancerSourceRanges require service.type LoadBalancer" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
  {{- $p = append $p "httpRoute.parentRefs is required: the Gateways of the route, such as [{name: my-gateway}]" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
  {{- $p = append $p "ingress.hosts is required: host names for clients, such as [llm.example.com]" -}}
{{- end -}}
{{- $onMain := dig "listen" "metrics_on_main" true (include "warmroute.config" . | fromJson) -}}
{{- if and (or .Values.monitor.enabled .Values.metricsService.enabled) (not $onMain) (not .Values.adminToken.existingSecret) -}}
  {{- $p = append $p "adminToken.existingSecret is required: without config.listen.metrics_on_main metrics cannot be scraped from outside the pod" -}}
{{- end -}}
{{- $keys := or .Values.apiKeys.existingSecret (dig "auth" "keys_file" "" (include "warmroute.config" . | fromJson)) (dig "admin" "token_file" "" (include "warmroute.config" . | fromJson)) -}}
{{- if and (or .Values.monitor.enabled .Values.metricsService.enabled) $keys (not .Values.adminToken.existingSecret) -}}
  {{- $p = append $p "adminToken.existingSecret is required: with API keys or config.admin.token_file, metrics require the admin token, and Prometheus would get 401" -}}
{{- end -}}
{{- if and (or .Values.monitor.enabled .Values.metricsService.enabled) .Values.networkPolicy.enabled .Values.networkPolicy.clients (not .Values.networkPolicy.prometheus) (not .Values.adminToken.existingSecret) -}}
  {{- $p = append $p "networkPolicy.prometheus is required: metrics are on the main port, which networkPolicy.clients restricts; set the peers that scrape, or move metrics to a separate port with adminToken.existingSecret" -}}
{{- end -}}
{{- if and .Values.prometheusRule.enabled (not (.Files.Get "files/rules.yaml")) -}}
  {{- $p = append $p "prometheusRule.enabled: this copy of the chart has no files/rules.yaml" -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}
