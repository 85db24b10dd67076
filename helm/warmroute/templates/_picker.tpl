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
  {{- $p = append $p "config.listen.mode: set `mode` instead, because ports, probes and the pool depend on it" -}}
{{- end -}}
{{- if $d.pools -}}
  {{- if ne $d.source "kubernetes" -}}
    {{- $p = append $p (printf "config.discovery.pools require config.discovery.source kubernetes, not %s" $d.source) -}}
  {{- end -}}
  {{- if or $d.selector $d.port -}}
    {{- $p = append $p "config.discovery.selector and port conflict with config.discovery.pools: remove them; the network policy allows connections to pods with pool.matchLabels" -}}
  {{- end -}}
  {{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.engines) (not $labels) -}}
    {{- $p = append $p "networkPolicy.engines is required: the chart does not know the labels of the pods in config.discovery.pools; with a picker set pool.matchLabels" -}}
  {{- end -}}
{{- end -}}
{{- if include "warmroute.picks" . -}}
  {{- $ports := list (int (include "warmroute.port" .)) (int (include "warmroute.adminPort" .)) (int (include "warmroute.pickerPort" .)) (int (include "warmroute.pickerHealthPort" .)) -}}
  {{- if or (has 0 $ports) (ne (len (uniq $ports)) 4) -}}
    {{- $p = append $p "config.listen.port, config.listen.admin_port, config.extproc.port and config.extproc.health_port must be four different fixed numbers" -}}
  {{- end -}}
  {{- if and (include "warmroute.asksForKeys" .) (eq (include "warmroute.failureMode" .) "FailOpen") (not .Values.pool.failOpenWithoutKeys) -}}
    {{- $p = append $p "pool.failureMode: while no picker answers, FailOpen serves clients without a key, and prompts of isolated tenants without their salt; set FailClose, or pool.failOpenWithoutKeys" -}}
  {{- end -}}
  {{- if .Values.pool.create -}}
    {{- if ne $d.source "kubernetes" -}}
      {{- $p = append $p (printf "pool.create: an InferencePool requires config.discovery.source kubernetes, not %s" $d.source) -}}
    {{- end -}}
    {{- if $d.pools -}}
      {{- $p = append $p "pool.create: set it to false with config.discovery.pools, which name existing pools" -}}
    {{- else if not $labels -}}
      {{- $p = append $p "pool.matchLabels is required: labels of the engines' pods, such as {app: vllm}; or set pool.create to false and list existing pools in config.discovery.pools" -}}
    {{- end -}}
    {{- if and $d.selector (not $d.pools) -}}
      {{- $p = append $p "config.discovery.selector: pool.matchLabels selects the pods; remove the selector" -}}
    {{- end -}}
    {{- if ne (include "warmroute.plainNamespace" .) .Release.Namespace -}}
      {{- $p = append $p (printf "config.discovery.namespaces: a pool selects only pods of its own namespace, which is %s" .Release.Namespace) -}}
    {{- end -}}
  {{- end -}}
  {{- if .Values.engines.enabled -}}
    {{- if and (dig "networkPolicy" "enabled" true .Values.engines) (not (dig "networkPolicy" "gateways" list .Values.engines)) (not .Values.envoy.enabled) (not (include "warmroute.serves" .)) -}}
      {{- $p = append $p "engines.networkPolicy.gateways is required: with a picker the gateway connects to engines; set its pods as peers, or enable envoy" -}}
    {{- end -}}
    {{- range .Values.engines.models -}}
      {{- $port := ternary 30000 8000 (eq .engine "sglang") -}}
      {{- $known := false -}}
      {{- range $.Values.pool.targetPorts }}{{ if eq (int .) $port }}{{ $known = true }}{{ end }}{{ end -}}
      {{- if not $known -}}
        {{- $p = append $p (printf "pool.targetPorts must have %d, the port of the engines of %s" $port .name) -}}
      {{- end -}}
    {{- end -}}
  {{- end -}}
  {{- if not (include "warmroute.serves" .) -}}
    {{- if and (or .Values.monitor.enabled .Values.metricsService.enabled) (not .Values.adminToken.existingSecret) -}}
      {{- $p = append $p "adminToken.existingSecret is required: a picker has no main port, so metrics are scraped on the admin port" -}}
    {{- end -}}
    {{- if and .Values.ingress.enabled (not .Values.envoy.enabled) -}}
      {{- $p = append $p "ingress.enabled: a picker accepts no client requests; enable envoy, or use httpRoute with a Gateway that supports InferencePools" -}}
    {{- end -}}
    {{- if and .Values.httpRoute.enabled (not .Values.envoy.enabled) (not (include "warmroute.pools" . | fromJsonArray)) -}}
      {{- $p = append $p "httpRoute.enabled: no InferencePool for the route; enable pool.create, set config.discovery.pools, or enable envoy" -}}
    {{- end -}}
  {{- end -}}
{{- end -}}
{{- with .Values.envoy -}}
{{- if .enabled -}}
  {{- if not (include "warmroute.picks" $) -}}
    {{- $p = append $p "envoy.enabled requires mode extproc or both, because Envoy needs a picker" -}}
  {{- end -}}
  {{- if not $labels -}}
    {{- $p = append $p "pool.matchLabels is required: Envoy finds the engines through a separate Service with these labels" -}}
  {{- end -}}
  {{- if $.Values.tls.existingSecret -}}
    {{- $p = append $p "tls.existingSecret: this Envoy connects to the picker in plain text, within the network policy; remove it, and terminate TLS in front of Envoy" -}}
  {{- end -}}
  {{- if ne (include "warmroute.plainNamespace" $) $.Release.Namespace -}}
    {{- $p = append $p (printf "config.discovery.namespaces: the engines of envoy must be in %s, the namespace of its Service" $.Release.Namespace) -}}
  {{- end -}}
  {{- if and (not (include "warmroute.pools" $ | fromJsonArray)) (ne (len $.Values.pool.targetPorts) 1) -}}
    {{- $p = append $p "pool.targetPorts: several ports require an InferencePool (pool.create or config.discovery.pools) for discovery" -}}
  {{- end -}}
{{- end -}}
{{- end -}}
{{- $p | toJson -}}
{{- end -}}
