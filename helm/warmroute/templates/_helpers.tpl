{{- define "warmroute.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough for every suffix, because names of Services have at most 63 characters. */}}
{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "warmroute.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "warmroute.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "warmroute.selectorLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "warmroute.selectorLabels" . }}
{{ include "warmroute.aboutLabels" . }}
{{- end -}}

{{/* Labels of the test pod, which no Service of the chart may select. */}}
{{- define "warmroute.testLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "warmroute.aboutLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Annotations of an object. Its own ones (second argument) override the common ones. */}}
{{- define "warmroute.annotations" -}}
{{- with merge (dict) (index . 1) (index . 0).Values.commonAnnotations -}}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end -}}
{{- end -}}

{{- define "warmroute.serviceAccount" -}}
{{- if .Values.serviceAccount.name -}}
{{- .Values.serviceAccount.name -}}
{{- else if .Values.serviceAccount.create -}}
{{- include "warmroute.fullname" . -}}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default .Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Minimal permissions of a container: the restricted Pod Security Standard, and a read-only root file system. */}}
{{- define "warmroute.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- with .Values.runAsUser }}
runAsGroup: {{ int . }}
runAsUser: {{ int . }}
{{- end }}
{{- end -}}

{{- define "warmroute.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser }}
fsGroup: {{ int . }}
runAsGroup: {{ int . }}
runAsUser: {{ int . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Resources, as JSON. Given ones (second argument) override computed ones (first), and null removes an amount. */}}
{{- define "warmroute.merged" -}}
{{- $all := deepCopy (index . 0) -}}
{{- range $kind, $given := index . 1 -}}
{{- if kindIs "map" $given -}}
{{- $part := get $all $kind | default dict -}}
{{- range $name, $amount := $given -}}
{{- if kindIs "invalid" $amount }}{{ $_ := unset $part $name }}{{ else }}{{ $_ := set $part $name $amount }}{{ end -}}
{{- end -}}
{{- if $part }}{{ $_ := set $all $kind $part }}{{ else }}{{ $_ := unset $all $kind }}{{ end -}}
{{- else if kindIs "invalid" $given -}}
{{- $_ := unset $all $kind -}}
{{- else -}}
{{- $_ := set $all $kind $given -}}
{{- end -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* Resources of a router, as JSON. */}}
{{- define "warmroute.resources" -}}
{{- $config := include "warmroute.config" . | fromJson -}}
{{- $index := dig "routing" "index_bytes_max" 268435456 $config | float64 -}}
{{- $tokens := dig "tokens" "cache_bytes_max" 134217728 $config | float64 -}}
{{- $events := dig "events" "index_bytes_max" 1073741824 $config | float64 -}}
{{- if not (dig "events" "enabled" true $config) }}{{ $events = 0.0 }}{{ end -}}
{{- $queue := dig "admission" "queue_bytes_max" 268435456 $config | float64 -}}
{{- $bodies := dig "limits" "total_body_bytes_max" 1073741824 $config | float64 -}}
{{- $bytes := addf (mulf $index 1.25) $tokens -}}
{{- $request := add 192 (divf $bytes 1048576 | ceil | int) -}}
{{- $limit := add $request (divf (addf (maxf (mulf $queue 1.5) $bodies) $events) 1048576 | ceil | int) -}}
{{- $requests := dict "cpu" "500m" "memory" (printf "%dMi" $request) -}}
{{- $computed := dict "requests" $requests "limits" (dict "memory" (printf "%dMi" $limit)) -}}
{{- include "warmroute.merged" (list $computed .Values.resources) -}}
{{- end -}}

{{/* Resources of the pod of `helm test`, as JSON. */}}
{{- define "warmroute.testResources" -}}
{{- $computed := dict "requests" (dict "cpu" "50m" "memory" "64Mi") "limits" (dict "memory" "128Mi") -}}
{{- include "warmroute.merged" (list $computed .Values.test.resources) -}}
{{- end -}}

{{/* A quantity of Kubernetes (`500m`, `1.5Gi`, 2) as a number. */}}
{{- define "warmroute.amount" -}}
{{- $text := toString . -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 -}}
{{- mulf (regexFind "^[0-9.]+(e[0-9]+)?" $text | float64) (get $units (regexFind "[a-zA-Z]+$" $text) | default 1.0) -}}
{{- end -}}

{{/* "yes" if an IPv4 network (`10.96.0.0/16`) has no bits set after its mask, otherwise empty. */}}
{{- define "warmroute.isNetwork" -}}
{{- $parts := splitList "/" . -}}
{{- $number := 0 -}}
{{- range splitList "." (first $parts) }}{{ $number = add (mul $number 256) (int .) }}{{ end -}}
{{- $size := 1 -}}
{{- range until (int (sub 32 (int (last $parts)))) }}{{ $size = mul $size 2 }}{{ end -}}
{{- if eq (int (mod $number $size)) 0 }}yes{{ end -}}
{{- end -}}

{{/* Seconds that a pod needs for an orderly termination. */}}
{{- define "warmroute.graceNeeded" -}}
{{- $duck := dig "listen" "lame_duck_s" 5 (include "warmroute.config" . | fromJson) | float64 -}}
{{- $drain := dig "listen" "drain_s" 180 (include "warmroute.config" . | fromJson) | float64 -}}
{{- addf $duck $drain 15 (float64 .Values.preStopSleepSeconds) | ceil | int -}}
{{- end -}}

{{- define "warmroute.grace" -}}
{{- $needed := int (include "warmroute.graceNeeded" .) -}}
{{- if kindIs "invalid" .Values.terminationGracePeriodSeconds -}}
{{- $needed -}}
{{- else -}}
{{- int .Values.terminationGracePeriodSeconds -}}
{{- end -}}
{{- end -}}

{{/*
Probes use the main port, unless it requires client certificates, which kubelets do not have. A picker without clients
has no main port. Its probes use the port for health checks, which never has TLS.
*/}}
{{- define "warmroute.probe" -}}
{{- $root := index . 0 -}}
{{- if not (include "warmroute.serves" $root) -}}
grpc:
  port: {{ include "warmroute.pickerHealthPort" $root }}
  service: {{ ternary "readiness" "liveness" (eq (index . 1) "/readyz") }}
{{- else -}}
httpGet:
  path: {{ index . 1 }}
  port: {{ if $root.Values.tls.clientCaKey }}admin{{ else }}http{{ end }}
  {{- if and $root.Values.tls.existingSecret (not $root.Values.tls.clientCaKey) }}
  scheme: HTTPS
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "warmroute.port" -}}
{{- dig "listen" "port" 8000 (include "warmroute.config" . | fromJson) | int -}}
{{- end -}}

{{- define "warmroute.adminPort" -}}
{{- dig "listen" "admin_port" 8001 (include "warmroute.config" . | fromJson) | int -}}
{{- end -}}

{{/* Port of `events.bind`, to which engines connect. Empty if no engine connects to the router. */}}
{{- define "warmroute.eventsPort" -}}
{{- dig "events" "bind" "" (include "warmroute.config" . | fromJson) | regexFind "[0-9]+$" -}}
{{- end -}}

{{- define "warmroute.metricsPort" -}}
{{- if or .Values.adminToken.existingSecret (not (include "warmroute.serves" .)) }}admin{{ else }}http{{ end -}}
{{- end -}}

{{/* Endpoint that a monitor scrapes, the same for both kinds. */}}
{{- define "warmroute.endpoint" -}}
- port: {{ include "warmroute.metricsPort" . }}
  path: /metrics
  interval: {{ .Values.monitor.interval }}
  {{- if .Values.adminToken.existingSecret }}
  authorization:
    type: Bearer
    credentials:
      name: {{ .Values.adminToken.existingSecret }}
      key: {{ .Values.adminToken.key }}
  {{- else if .Values.tls.existingSecret }}
  scheme: https
  tlsConfig:
    # The pod is scraped by its address, which is in no certificate.
    insecureSkipVerify: true
  {{- end }}
{{- end -}}

{{/* Namespaces of the engines' pods, as JSON. */}}
{{- define "warmroute.namespaces" -}}
{{- $namespaces := dig "discovery" "namespaces" list (include "warmroute.config" . | fromJson) | default (list .Release.Namespace) -}}
{{- with include "warmroute.pools" . | fromJsonArray -}}
{{- $namespaces = list -}}
{{- range . -}}
{{- $parts := splitList "/" . -}}
{{- $namespaces = append $namespaces (ternary (first $parts) (include "warmroute.plainNamespace" $) (eq (len $parts) 2)) -}}
{{- end -}}
{{- end -}}
{{- $namespaces | uniq | toJson -}}
{{- end -}}

{{/* Name of Role and binding, in a namespace that other releases may also use. */}}
{{- define "warmroute.roleName" -}}
{{- $root := index . 0 -}}
{{- $name := include "warmroute.fullname" $root -}}
{{- if eq (index . 1) $root.Release.Namespace -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" $name $root.Release.Namespace | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
