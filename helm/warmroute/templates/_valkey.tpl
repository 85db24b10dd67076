{{/* "yes" if there may be several routers, otherwise empty. */}}
{{- define "warmroute.severalRouters" -}}
{{- if gt (int (ternary .Values.autoscaling.maxReplicas .Values.replicaCount .Values.autoscaling.enabled)) 1 }}yes{{ end -}}
{{- end -}}

{{/* "yes" if the values name a store, otherwise empty. */}}
{{- define "warmroute.namesStore" -}}
{{- $peering := dig "peering" dict (include "warmroute.config" . | fromJson) -}}
{{- $secret := include "warmroute.storeSecret" . | fromJson -}}
{{- if or $peering.redis_url $peering.redis_url_file (and $secret.existingSecret $secret.urlKey) }}yes{{ end -}}
{{- end -}}

{{/* "yes" if the release has a Valkey of its own: several routers and no other store. Otherwise empty. */}}
{{- define "warmroute.hasValkey" -}}
{{- if and .Values.valkey.enabled (include "warmroute.severalRouters" .) (not (include "warmroute.namesStore" .)) }}yes{{ end -}}
{{- end -}}

{{/* "yes" if routers share a store, otherwise empty. */}}
{{- define "warmroute.shares" -}}
{{- if or (include "warmroute.namesStore" .) (include "warmroute.hasValkey" .) }}yes{{ end -}}
{{- end -}}

{{- define "warmroute.valkeyName" -}}
{{- include "warmroute.fullname" . }}-valkey
{{- end -}}

{{- define "warmroute.valkeyLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}-valkey
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Labels of the Valkey's objects: as all others, with the component. */}}
{{- define "warmroute.valkeyMeta" -}}
name: {{ include "warmroute.valkeyName" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "warmroute.labels" . | nindent 2 }}
  app.kubernetes.io/component: store
{{- with include "warmroute.annotations" (list . dict) }}
{{- . | nindent 0 }}
{{- end }}
{{- end -}}

{{/* Probe of the Valkey. With a password `ping` is answered only after the password, which is no argument. */}}
{{- define "warmroute.valkeyProbe" -}}
exec:
  command:
    - sh
    - -ec
    - {{ with .Values.valkey.existingSecret }}REDISCLI_AUTH="$(cat /etc/valkey/password)" {{ end }}valkey-cli ping | grep -q PONG
{{- end -}}
