{{/* Name of one model's objects; called with (list $ $model). */}}
{{- define "engines.name" -}}
{{- $root := index . 0 -}}
{{- printf "%s-%s" ($root.Release.Name | trunc 30 | trimSuffix "-") (index . 1).name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{- define "engines.selectorLabels" -}}
app.kubernetes.io/name: {{ (index . 1).engine }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
warmroute/model: {{ (index . 1).name }}
{{- end -}}

{{- define "engines.labels" -}}
{{ include "engines.selectorLabels" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
{{- end -}}

{{- define "engines.port" -}}
{{- if eq .engine "sglang" }}30000{{ else }}8000{{ end -}}
{{- end -}}

{{/* Port for P2P KV transfers between replicas of a model; empty without them. */}}
{{- define "engines.pullPort" -}}
{{- with .pulls }}{{ default 5710 .port | int }}{{ end -}}
{{- end -}}

{{/* Names of the models with a role, as a JSON list. */}}
{{- define "engines.withRole" -}}
{{- $names := list -}}
{{- range .Values.models }}{{ if .role }}{{ $names = append $names .name }}{{ end }}{{ end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* Grace period of a pod in seconds: 10 s of preStop pause, the longest answer, and 20 s for the exit. */}}
{{- define "engines.grace" -}}
{{- add 30 (int (default 270 .shutdownSeconds)) -}}
{{- end -}}

{{/* Arguments of a serving container, as a JSON list. */}}
{{- define "engines.args" -}}
{{- $args := list -}}
{{- $gpus := int (default 1 .gpus) -}}
{{- $nodes := 1 -}}
{{- if eq (default "Deployment" .kind) "LeaderWorkerSet" }}{{ $nodes = int (default 2 .nodesPerGroup) }}{{ end -}}
{{- if eq .engine "vllm" -}}
{{- $args = list (printf "--model=%s" .model) (printf "--served-model-name=%s" (default .name .servedName)) "--port=8000" "--enable-prefix-caching" (printf "--shutdown-timeout=%d" (int (default 270 .shutdownSeconds))) "--enable-prompt-tokens-details" `--kv-events-config={"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "buffer_steps": 50000}` -}}
{{- if gt $gpus 1 }}{{ $args = append $args (printf "--tensor-parallel-size=%d" $gpus) }}{{ end -}}
{{- with .pulls -}}
{{- $tier := dict "spec_name" "TieringOffloadingSpec" "cpu_bytes_to_use" (mul (int64 .memoryGiB) 1073741824) "self_describing_kv_events" true "offload_prompt_only" false "secondary_tiers" (list (dict "type" "p2p")) -}}
{{- $connector := dict "kv_connector" "OffloadingConnector" "kv_role" "kv_both" "kv_connector_extra_config" $tier -}}
{{- $args = append $args (printf "--kv-transfer-config=%s" (toRawJson $connector)) -}}
{{- end -}}
{{- if gt $nodes 1 }}{{ $args = concat $args (list (printf "--pipeline-parallel-size=%d" $nodes) "--nnodes=$(LWS_GROUP_SIZE)" "--node-rank=$(LWS_WORKER_INDEX)" "--master-addr=$(LWS_LEADER_ADDRESS)") }}{{ end -}}
{{- else if eq .engine "sglang" -}}
{{- $args = list (printf "--model-path=%s" .model) (printf "--served-model-name=%s" (default .name .servedName)) "--host=0.0.0.0" "--port=30000" "--page-size=16" "--enable-cache-report" "--enable-metrics" `--kv-events-config={"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}` -}}
{{- if gt (mul $gpus $nodes) 1 }}{{ $args = append $args (printf "--tp=%d" (mul $gpus $nodes)) }}{{ end -}}
{{- if has .role (list "prefill" "decode") }}{{ $args = append $args (printf "--disaggregation-mode=%s" .role) }}{{ end -}}
{{- if gt $nodes 1 }}{{ $args = concat $args (list "--dist-init-addr=$(LWS_LEADER_ADDRESS):20000" "--nnodes=$(LWS_GROUP_SIZE)" "--node-rank=$(LWS_WORKER_INDEX)") }}{{ end -}}
{{- else -}}
{{- $args = list "--replicas" "1" "--host" "0.0.0.0" "--port" "8000" "--model" (default .name .servedName) "--kv-events" "--kv-events-port" "5557" "--kv-replay-port" "5558" -}}
{{- end -}}
{{- concat $args (default list .args) | toJson -}}
{{- end -}}

{{/*
Command and arguments of a container; called with (list $model $worker). Nodes of a vLLM group communicate without Ray,
which is no longer in its image.
*/}}
{{- define "engines.command" -}}
{{- $model := index . 0 -}}
{{- $args := include "engines.args" $model | fromJsonArray -}}
{{- if eq $model.engine "sglang" }}
command: [python3, -m, sglang.launch_server]
{{- else if eq $model.engine "simulated" }}
command: [python, -m, loadtest, engine]
{{- else if index . 1 }}{{ $args = append $args "--headless" }}
{{- end }}
args: {{ toRawJson $args }}
{{- end -}}

{{/* A pod's template; called with (list $ $model $worker). */}}
{{- define "engines.pod" -}}
{{- $root := index . 0 -}}
{{- $model := index . 1 -}}
{{- $worker := index . 2 -}}
{{- $simulated := eq $model.engine "simulated" -}}
metadata:
  labels:
    {{- include "engines.selectorLabels" (list $root $model) | nindent 4 }}
    {{- if not $worker }}
    # Discovery selects pods that serve. Workers of a group do not serve.
    warmroute/engine-of: {{ $root.Release.Name }}
    {{- with $model.role }}
    warmroute.io/role: {{ . }}
    {{- end }}
    {{- end }}
    {{- with $model.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- $annotations := deepCopy (default dict $model.podAnnotations) }}
  {{- with include "engines.pullPort" $model }}{{ $_ := set $annotations "warmroute/p2p-port" . }}{{ end }}
  {{- with $annotations }}
  annotations: {{ toRawJson . }}
  {{- end }}
spec:
  terminationGracePeriodSeconds: {{ include "engines.grace" $model }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toRawJson . }}
  {{- end }}
  {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
  {{- with get $model $key }}
  {{ $key }}: {{ toRawJson . }}
  {{- end }}
  {{- end }}
  containers:
    - name: {{ $model.engine }}
      image: {{ default (get $root.Values.images $model.engine) $model.image }}
      {{- include "engines.command" (list $model $worker) | nindent 6 }}
      env:
        # Gives every process the same prefix hashes.
        - {name: PYTHONHASHSEED, value: "0"}
        {{- if $model.cache }}
        - {name: HF_HOME, value: /var/cache/engine/huggingface}
        {{- if eq $model.engine "vllm" }}
        # Compiled graphs.
        - {name: VLLM_CACHE_ROOT, value: /var/cache/engine/vllm}
        {{- end }}
        {{- end }}
        {{- with $model.hubToken }}
        - name: HF_TOKEN
          valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ default "token" .key }}}}
        {{- end }}
        {{- with include "engines.pullPort" $model }}
        - name: VLLM_P2P_SIDE_CHANNEL_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - {name: VLLM_P2P_SIDE_CHANNEL_PORT, value: {{ . | quote }}}
        {{- end }}
        {{- with $model.env }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- if not $worker }}
      {{- $probe := "httpGet: {path: /health, port: http}" }}
      ports:
        - {name: http, containerPort: {{ include "engines.port" $model }}}
        - {name: kv-events, containerPort: 5557}
        - {name: kv-replay, containerPort: 5558}
        {{- with include "engines.pullPort" $model }}
        - {name: p2p, containerPort: {{ . }}}
        {{- end }}
      startupProbe:
        {{ $probe }}
        periodSeconds: 5
        failureThreshold: {{ div (add 4 (int (default 1800 $model.startupSeconds))) 5 }}
      readinessProbe:
        {{ $probe }}
        periodSeconds: 5
        failureThreshold: 2
      livenessProbe:
        {{ $probe }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      {{- end }}
      lifecycle:
        # warmroute stops using a Terminating pod at once; the pause is for components that watch readiness.
        preStop: {sleep: {seconds: 10}}
      {{- $own := dict "requests" (dict "cpu" "4" "memory" "32Gi") "limits" (dict "memory" "64Gi" "nvidia.com/gpu" (toString (default 1 $model.gpus))) }}
      {{- $kept := 0 }}
      {{- with $model.pulls }}
      {{- $kept = int .memoryGiB }}
      {{- $_ := set $own.requests "memory" (printf "%dGi" (add 32 $kept)) }}{{ $_ := set $own.limits "memory" (printf "%dGi" (add 64 $kept)) }}
      {{- end }}
      {{- if $simulated }}{{ $own = dict "requests" (dict "cpu" "100m" "memory" "128Mi") "limits" (dict "memory" "512Mi") }}{{ end }}
      resources: {{ mergeOverwrite $own (deepCopy (default dict $model.resources)) | toRawJson }}
      {{- $security := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) "seccompProfile" (dict "type" "RuntimeDefault") }}
      {{- if $simulated }}{{ $_ := set $security "runAsNonRoot" true }}{{ $_ := set $security "runAsUser" 65532 }}{{ end }}
      securityContext: {{ mergeOverwrite $security (deepCopy (default dict $model.securityContext)) | toRawJson }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- if $model.claim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
        {{- if $model.cache }}
        - {name: cache, mountPath: /var/cache/engine}
        {{- end }}
        {{- with $model.volumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ default (printf "%dGi" (add 8 $kept)) $model.shmSize }}}
    {{- with $model.claim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ . }}, readOnly: true}
    {{- end }}
    {{- with $model.cache }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ default (printf "%s-cache" (include "engines.name" (list $root $model))) .claim }}}
    {{- end }}
    {{- with $model.volumes }}{{ toYaml . | nindent 4 }}{{ end }}
{{- end -}}

{{/* Checks that the schema cannot express. All problems are reported at once. */}}
{{- define "engines.check" -}}
{{- $p := list -}}
{{- if not .Values.models -}}
{{- $p = append $p "engines.models is required with engines.enabled, such as [{name: llama, model: /models/llama, engine: vllm, claim: models}]" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- if has .name $names }}{{ $p = append $p (printf "engines.models: the name '%s' is duplicated" .name) }}{{ end -}}
{{- $names = append $names .name -}}
{{- $name := .name -}}
{{- $group := eq (default "Deployment" .kind) "LeaderWorkerSet" -}}
{{- if and (eq .engine "simulated") (not .image) -}}
{{- $p = append $p (printf "engines.models: '%s' is simulated and requires an image: the demo target of deploy/Dockerfile, from your registry" .name) -}}
{{- else if and (ne .engine "simulated") (not .model) -}}
{{- $p = append $p (printf "engines.models: '%s' requires model: its name on the hub or a folder such as /models/llama" .name) -}}
{{- end -}}
{{- if and .pulls (or (ne .engine "vllm") $group) }}{{ $p = append $p (printf "engines.models: pulls of '%s' require engine vllm on one node per replica" .name) }}{{ end -}}
{{- with .cache }}{{ if eq (empty .claim) (empty .size) }}
{{- $p = append $p (printf "engines.models: cache of '%s' requires either claim or size" $name) }}
{{- end }}{{ end }}
{{- if and .nodesPerGroup (not $group) }}{{ $p = append $p (printf "engines.models: nodesPerGroup of '%s' requires kind LeaderWorkerSet" .name) }}{{ end -}}
{{- if and $group (eq .engine "simulated") }}{{ $p = append $p (printf "engines.models: '%s' is simulated and needs only one node: remove kind" .name) }}{{ end -}}
{{- if and (hasPrefix "/models/" (default "" .model)) (not .claim) (not .volumeMounts) -}}
{{- $p = append $p (printf "engines.models: no volume is mounted at %s for '%s': set claim, or volumes and volumeMounts" .model .name) -}}
{{- end -}}
{{- with .autoscaling }}{{ if lt (int (default 8 .maxReplicas)) (int (default 1 .minReplicas)) }}{{ $p = append $p "engines.models: autoscaling.maxReplicas is less than minReplicas" }}{{ end }}{{ end -}}
{{- end -}}
{{- if $p }}{{ fail (printf "\n\nThese values of the engines are invalid:\n- %s\n" (join "\n- " $p)) }}{{ end -}}
{{- end -}}
