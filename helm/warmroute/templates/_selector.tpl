{{/* Text of the engines' label selector: the given one, the pool's, that of this release's engines, or empty. */}}
{{- define "warmroute.selectorText" -}}
{{- $own := ternary (printf "warmroute/engine-of=%s" .Release.Name) "" .Values.engines.enabled -}}
{{- (include "warmroute.config" . | fromJson).discovery.selector | default (include "warmroute.poolSelector" .) | default $own -}}
{{- end -}}

{{/*
YAML list of the labels by which discovery finds serving stacks without a selector. A test checks that they are equal to
those of router/engines/discovery/known_stacks.py. A value of "" matches any value.
*/}}
{{- define "warmroute.stacks" -}}
- {app.kubernetes.io/component: serving-engine, model: ""}
- {app.kubernetes.io/part-of: llminferenceservice, kserve.io/component: workload}
- {llm-d.ai/inference-serving: "true"}
- {llm-d.ai/inferenceServing: "true"}
- {leaderworkerset.sigs.k8s.io/name: "", leaderworkerset.sigs.k8s.io/worker-index: "0"}
{{- end -}}

{{/* LabelSelectors of the pods that discovery takes, as JSON: the given selector, or one per known stack. */}}
{{- define "warmroute.podSelectors" -}}
{{- $selectors := list -}}
{{- with include "warmroute.selectorText" . -}}
{{- $selectors = list (include "warmroute.podSelector" . | fromYaml) -}}
{{- else -}}
{{- range include "warmroute.stacks" . | fromYamlArray -}}
{{- $terms := list (dict "key" "llm-d.ai/role" "operator" "NotIn" "values" (list "prefill")) -}}
{{- range $key, $value := . -}}
{{- if $value }}{{ $terms = append $terms (dict "key" $key "operator" "In" "values" (list $value)) }}{{ else }}{{ $terms = append $terms (dict "key" $key "operator" "Exists") }}{{ end -}}
{{- end -}}
{{- $selectors = append $selectors (dict "matchExpressions" $terms) -}}
{{- end -}}
{{- end -}}
{{- $selectors | toJson -}}
{{- end -}}

{{/*
Discovery's label selector, as a LabelSelector: `app=vllm,tier!=test,gpu in (a100, h100),!draining,ready`.
Syntax: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors
*/}}
{{- define "warmroute.podSelector" -}}
{{- $key := "[-A-Za-z0-9_./]+" -}}
{{- $value := "([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?" -}}
matchExpressions:
{{- range regexFindAll "[^,(]+(\\([^)]*\\)[^,]*)?" . -1 }}
{{- $part := trim . }}
{{- if regexMatch (printf "^%s$" $key) $part }}
  - key: {{ $part }}
    operator: Exists
{{- else if regexMatch (printf "^!\\s*%s$" $key) $part }}
  - key: {{ trimPrefix "!" $part | trim }}
    operator: DoesNotExist
{{- else if regexMatch (printf "^%s\\s*!=\\s*%s$" $key $value) $part }}
  - key: {{ regexReplaceAll "\\s*!=.*" $part "" }}
    operator: NotIn
    values: [{{ regexReplaceAll ".*!=\\s*" $part "" | quote }}]
{{- else if regexMatch (printf "^%s\\s*==?\\s*%s$" $key $value) $part }}
  - key: {{ regexReplaceAll "\\s*==?.*" $part "" }}
    operator: In
    values: [{{ regexReplaceAll ".*=\\s*" $part "" | quote }}]
{{- else if regexMatch (printf "^%s\\s+(in|notin)\\s*\\(\\s*%s(\\s*,\\s*%s)*\\s*\\)$" $key $value $value) $part }}
  - key: {{ regexFind (printf "^%s" $key) $part }}
    operator: {{ if regexMatch "\\s+notin\\s*\\(" $part }}NotIn{{ else }}In{{ end }}
    values:
      {{- range splitList "," (regexReplaceAll ".*\\(|\\).*" $part "") }}
      - {{ trim . | quote }}
      {{- end }}
{{- else }}
{{- fail (printf "config.discovery.selector: '%s' must be KEY=VALUE, KEY!=VALUE, KEY in (A, B), KEY notin (A, B), KEY, !KEY" $part) }}
{{- end }}
{{- end }}
{{- end -}}
