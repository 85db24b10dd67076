{{/* The picker, if `mode` is extproc or both. Its settings are the section `extproc`. */}}

{{/* "yes" if the routers are pickers, otherwise empty. */}}
{{- define "warmroute.picks" -}}
{{- if ne (include "warmroute.mode" .) "proxy" }}yes{{ end -}}
{{- end -}}

{{/* "yes" if clients send requests to the routers, otherwise empty. */}}
{{- define "warmroute.serves" -}}
{{- if ne (include "warmroute.mode" .) "extproc" }}yes{{ end -}}
{{- end -}}

{{- define "warmroute.pickerPort" -}}
{{- dig "extproc" "port" 9002 (include "warmroute.config" . | fromJson) | int -}}
{{- end -}}

{{- define "warmroute.pickerHealthPort" -}}
{{- dig "extproc" "health_port" 9003 (include "warmroute.config" . | fromJson) | int -}}
{{- end -}}

{{- define "warmroute.poolName" -}}
{{- default (include "warmroute.fullname" .) .Values.pool.name -}}
{{- end -}}

{{/* Labels of the pool's members, as JSON: the given ones, otherwise those of the engines of this release. */}}
{{- define "warmroute.poolLabels" -}}
{{- $labels := dict -}}
{{- if include "warmroute.picks" . -}}
{{- $labels = .Values.pool.matchLabels -}}
{{- if and (not $labels) .Values.engines.enabled }}{{ $labels = dict "warmroute/engine-of" .Release.Name }}{{ end -}}
{{- end -}}
{{- $labels | toJson -}}
{{- end -}}

{{/* The same labels as the text of a selector. */}}
{{- define "warmroute.poolSelector" -}}
{{- $terms := list -}}
{{- range $key, $value := include "warmroute.poolLabels" . | fromJson }}{{ $terms = append $terms (printf "%s=%s" $key $value) }}{{ end -}}
{{- join "," $terms -}}
{{- end -}}

{{/* InferencePools that discovery follows, as JSON: those of the settings, otherwise the chart's own pool, if any. */}}
{{- define "warmroute.pools" -}}
{{- $pools := default list (dig "discovery" "pools" list (include "warmroute.config" . | fromJson)) -}}
{{- if and (not $pools) (include "warmroute.picks" .) .Values.pool.create -}}
{{- $pools = list (include "warmroute.poolName" .) -}}
{{- end -}}
{{- $pools | toJson -}}
{{- end -}}

{{/* Names of the InferencePools in one namespace (second argument), as JSON. */}}
{{- define "warmroute.poolsOf" -}}
{{- $root := index . 0 -}}
{{- $names := list -}}
{{- range include "warmroute.pools" $root | fromJsonArray -}}
{{- $parts := splitList "/" . -}}
{{- $namespace := ternary (first $parts) (include "warmroute.plainNamespace" $root) (eq (len $parts) 2) -}}
{{- if eq $namespace (index $ 1) }}{{ $names = append $names (last $parts) }}{{ end -}}
{{- end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* Namespace of pools that are named without a namespace. */}}
{{- define "warmroute.plainNamespace" -}}
{{- dig "discovery" "namespaces" list (include "warmroute.config" . | fromJson) | default (list .Release.Namespace) | first -}}
{{- end -}}

{{/* Backend of HTTPRoute and Ingress, as JSON. */}}
{{- define "warmroute.backend" -}}
{{- $service := dict "name" (include "warmroute.fullname" .) "port" .Values.service.port -}}
{{- if .Values.envoy.enabled -}}
{{- dict "name" (include "warmroute.envoyName" .) "port" .Values.envoy.service.port | toJson -}}
{{- else if include "warmroute.serves" . -}}
{{- $service | toJson -}}
{{- else -}}
{{- $pool := include "warmroute.pools" . | fromJsonArray | first | default "" | splitList "/" -}}
{{- $backend := dict "group" "inference.networking.k8s.io" "kind" "InferencePool" "name" (last $pool) -}}
{{- if eq (len $pool) 2 }}{{ $_ := set $backend "namespace" (first $pool) }}{{ end -}}
{{- $backend | toJson -}}
{{- end -}}
{{- end -}}

{{/* Additional settings of a picker, as JSON. */}}
{{- define "warmroute.pickerSettings" -}}
{{- $gateway := merge (dict) (dig "extproc" dict (include "warmroute.config" . | fromJson)) (dict "host" (dig "listen" "host" "0.0.0.0" (include "warmroute.config" . | fromJson))) -}}
{{- with .Values.tls -}}
{{- if .existingSecret -}}
{{- $_ := set $gateway "tls_certificate" "/etc/warmroute/secrets/tls.crt" -}}
{{- $_ := set $gateway "tls_key" "/etc/warmroute/secrets/tls.key" -}}
{{- if .clientCaKey }}{{ $_ := set $gateway "tls_client_ca" "/etc/warmroute/secrets/tls-client-ca.crt" }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $gateway | toJson -}}
{{- end -}}

{{- define "warmroute.checkPicker" -}}
{{- $p := list -}}
{{- $d := (include "warmroute.config" . | fromJson).discovery -}}
{{- $labels := include "warmroute.poolLabels" . | fromJson -}}
{{- if hasKey (dig "listen" dict (include "warmroute.config" . | fromJson)) "mode" -}}
  {{- $p = append $p "config.listen.mode: set `mode` of the chart, which also decides ports, probes and the pool" -}}
{{- end -}}
{{- if $d.pools -}}
  {{- if ne $d.source "kubernetes" -}}
    {{- $p = append $p (printf "config.discovery.pools need config.discovery.source kubernetes, not %s" $d.source) -}}
  {{- end -}}
  {{- if or $d.selector $d.port -}}
    {{- $p = append $p "config.discovery.selector and port would not count beside config.discovery.pools: leave them out; pool.matchLabels is whom the network policy lets the routers reach" -}}
  {{- end -}}
  {{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.engines) (not $labels) -}}
    {{- $p = append $p "networkPolicy.engines is needed: the chart does not know the labels of the pods in config.discovery.pools; with a picker pool.matchLabels says them" -}}
  {{- end -}}
{{- end -}}
{{- if include "warmroute.picks" . -}}
  {{- if gt (int (dig "listen" "workers" 1 (include "warmroute.config" . | fromJson))) 1 -}}
    {{- $p = append $p (printf "config.listen.workers: a picker is one process; for more, raise replicaCount (mode: %s)" (include "warmroute.mode" .)) -}}
  {{- end -}}
  {{- $ports := list (int (include "warmroute.port" .)) (int (include "warmroute.adminPort" .)) (int (include "warmroute.pickerPort" .)) (int (include "warmroute.pickerHealthPort" .)) -}}
  {{- if or (has 0 $ports) (ne (len (uniq $ports)) 4) -}}
    {{- $p = append $p "config.listen.port, config.listen.admin_port, config.extproc.port and config.extproc.health_port must be fixed, and four" -}}
  {{- end -}}
  {{- if and (include "warmroute.asksForKeys" .) (eq (include "warmroute.failureMode" .) "FailOpen") (not .Values.pool.failOpenWithoutKeys) -}}
    {{- $p = append $p "pool.failureMode: while no picker answers, FailOpen serves clients without a key, and prompts of isolated tenants without their salt; set FailClose, or pool.failOpenWithoutKeys" -}}
  {{- end -}}
  {{- if .Values.pool.create -}}
    {{- if ne $d.source "kubernetes" -}}
      {{- $p = append $p (printf "pool.create: an InferencePool is found with config.discovery.source kubernetes, not with %s" $d.source) -}}
    {{- end -}}
    {{- if $d.pools -}}
      {{- $p = append $p "pool.create: set it to false beside config.discovery.pools, which name pools that exist" -}}
    {{- else if not $labels -}}
      {{- $p = append $p "pool.matchLabels is needed: labels of the engines' pods, such as {app: vllm}; or set pool.create to false and name pools that exist in config.discovery.pools" -}}
    {{- end -}}
    {{- if and $d.selector (not $d.pools) -}}
      {{- $p = append $p "config.discovery.selector: pool.matchLabels says which pods; leave the selector out" -}}
    {{- end -}}
    {{- if ne (include "warmroute.plainNamespace" .) .Release.Namespace -}}
      {{- $p = append $p (printf "config.discovery.namespaces: a pool selects pods of its own namespace only, and is made in %s" .Release.Namespace) -}}
    {{- end -}}
  {{- end -}}
  {{- if .Values.engines.enabled -}}
    {{- if and (dig "networkPolicy" "enabled" true .Values.engines) (not (dig "networkPolicy" "gateways" list .Values.engines)) (not .Values.envoy.enabled) (not (include "warmroute.serves" .)) -}}
      {{- $p = append $p "engines.networkPolicy.gateways is needed: behind a picker it is the gateway that connects to engines; name its pods as peers, or switch on envoy" -}}
    {{- end -}}
    {{- range .Values.engines.models -}}
      {{- $port := ternary 30000 8000 (eq .engine "sglang") -}}
      {{- $known := false -}}
      {{- range $.Values.pool.targetPorts }}{{ if eq (int .) $port }}{{ $known = true }}{{ end }}{{ end -}}
      {{- if not $known -}}
        {{- $p = append $p (printf "pool.targetPorts must have %d, where the engines of %s listen" $port .name) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
  {{- if not (include "warmroute.serves" .) -}}
    {{- if and (or .Values.monitor.enabled .Values.metricsService.enabled) (not .Values.adminToken.existingSecret) -}}
      {{- $p = append $p "adminToken.existingSecret is needed: a picker has no main port, so metrics are scraped on the admin port" -}}
    {{- end -}}
    {{- if and .Values.ingress.enabled (not .Values.envoy.enabled) -}}
      {{- $p = append $p "ingress.enabled: a picker takes no requests of clients; switch on envoy, or use httpRoute with a Gateway that knows InferencePools" -}}
    {{- end -}}
    {{- if and .Values.httpRoute.enabled (not .Values.envoy.enabled) (not (include "warmroute.pools" . | fromJsonArray)) -}}
      {{- $p = append $p "httpRoute.enabled: there is no InferencePool to lead to; switch on pool.create, name one in config.discovery.pools, or switch on envoy" -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.envoy -}}
{{- if .enabled -}}
  {{- if not (include "warmroute.picks" $) -}}
    {{- $p = append $p "envoy.enabled needs mode extproc or both: it asks a picker where each request goes" -}}
  {{- end -}}
  {{- if not $labels -}}
    {{- $p = append $p "pool.matchLabels is needed: Envoy knows the engines by a Service of its own, which selects by labels" -}}
  {{- end -}}
  {{- if $.Values.tls.existingSecret -}}
    {{- $p = append $p "tls.existingSecret: this Envoy asks the picker in plain text, within the network policy; leave it out, and end TLS in front of Envoy" -}}
  {{- end -}}
  {{- if ne (include "warmroute.plainNamespace" $) $.Release.Namespace -}}
    {{- $p = append $p (printf "config.discovery.namespaces: the engines of envoy must be in %s, where its Service selects them" $.Release.Namespace) -}}
  {{- end -}}
  {{- if and (not (include "warmroute.pools" $ | fromJsonArray)) (ne (len $.Values.pool.targetPorts) 1) -}}
    {{- $p = append $p "pool.targetPorts: several ports need an InferencePool (pool.create or config.discovery.pools), by which the picker knows them" -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}
