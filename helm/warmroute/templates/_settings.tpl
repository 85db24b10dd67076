{{/*
The settings file: `config` and the settings that only the chart knows. Values are written as JSON, which is valid YAML,
because Helm's YAML output converts 268435456 to 2.68435456e+08.
*/}}
{{- define "warmroute.settings" -}}
{{- range $name, $value := include "warmroute.settingsTree" . | fromJson -}}
{{- if kindIs "map" $value -}}
{{ $name }}:
{{- range $key, $setting := $value }}
  {{ $key }}: {{ toRawJson $setting }}
{{- end }}
{{ else -}}
{{ $name }}: {{ toRawJson $value }}
{{ end -}}
{{- end -}}
{{- end -}}

{{/*
`config` as JSON, with the current names of settings. A chart of version 0.3 or later reads no former names
(files/former-settings.json).
*/}}
{{- define "warmroute.config" -}}
{{- $former := .Files.Get "files/former-settings.json" | fromJson -}}
{{- $tree := dict -}}
{{- range $section, $fields := .Values.config -}}
{{- if kindIs "map" $fields -}}
{{- if not (or (hasKey $former $section) (hasKey $tree $section)) }}{{ $_ := set $tree $section dict }}{{ end -}}
{{- range $key, $value := $fields -}}
{{- $name := splitList "." (dig $section $key (printf "%s.%s" $section $key) $former) -}}
{{- if not (hasKey $tree (first $name)) }}{{ $_ := set $tree (first $name) dict }}{{ end -}}
{{- $_ := set (get $tree (first $name)) (last $name) $value -}}
{{- end -}}
{{- else -}}
{{- $_ := set $tree $section $fields -}}
{{- end -}}
{{- end -}}
{{- $tree | toJson -}}
{{- end -}}

{{/* JSON list of the former names in `config`, each with the current name. */}}
{{- define "warmroute.formerNames" -}}
{{- $former := .Files.Get "files/former-settings.json" | fromJson -}}
{{- $names := list -}}
{{- range $section, $fields := .Values.config -}}
{{- range $key, $_ := kindIs "map" $fields | ternary $fields dict -}}
{{- with dig $section $key "" $former }}{{ $names = append $names (list (printf "config.%s.%s" $section $key) (printf "config.%s" .)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- with .Values.face }}{{ $names = append $names (list "face" "mode") }}{{ end -}}
{{- with .Values.shared }}{{ $names = append $names (list "shared" "peering") }}{{ end -}}
{{- $names | toJson -}}
{{- end -}}

{{/* What is in front of the routers: proxy, extproc or both. `face` and its values are former names of `mode`. */}}
{{- define "warmroute.mode" -}}
{{- $given := default .Values.mode .Values.face -}}
{{- get (dict "edge" "proxy" "picker" "extproc") $given | default $given -}}
{{- end -}}

{{/* Secret of the store, as JSON: `peering`, with the keys of its former name `shared`. */}}
{{- define "warmroute.storeSecret" -}}
{{- $secret := deepCopy .Values.peering -}}
{{- range $key, $value := .Values.shared }}{{ $_ := set $secret $key $value }}{{ end -}}
{{- $secret | toJson -}}
{{- end -}}

{{- define "warmroute.settingsTree" -}}
{{- $tree := include "warmroute.config" . | fromJson -}}
{{- $listen := merge (dict) (dig "listen" dict $tree) (dict "host" "0.0.0.0") -}}
{{- $admin := dig "admin" dict $tree -}}
{{- $auth := dig "auth" dict $tree -}}
{{- $upstream := dig "upstream" dict $tree -}}
{{- if and (include "warmroute.scalesFromZero" .) (not (hasKey $tree.discovery "scale_from_zero")) -}}
{{- $_ := set $tree.discovery "scale_from_zero" true -}}
{{- end -}}
{{- if not (hasKey $tree.discovery "models") -}}
{{- with include "warmroute.fromZero" . | fromJsonArray }}{{ $_ := set $tree.discovery "models" . }}{{ end -}}
{{- end -}}
{{- $pools := include "warmroute.pools" . | fromJsonArray -}}
{{- if $pools -}}
{{- $_ := set $tree.discovery "pools" $pools -}}
{{- $_ := set $tree.discovery "namespaces" (list (include "warmroute.plainNamespace" .)) -}}
{{- $_ := unset $tree.discovery "selector" -}}
{{- else if eq $tree.discovery.source "kubernetes" -}}
{{- $_ := set $tree.discovery "selector" (include "warmroute.selectorText" .) -}}
{{- $_ := set $tree.discovery "namespaces" (include "warmroute.namespaces" . | fromJsonArray) -}}
{{- if and (include "warmroute.poolSelector" .) (not $tree.discovery.port) -}}
{{- $_ := set $tree.discovery "port" (first .Values.pool.targetPorts | int | toString) -}}
{{- end -}}
{{- end -}}
{{- if include "warmroute.picks" . -}}
{{- $listen = merge (dict "mode" (include "warmroute.mode" .)) $listen -}}
{{- $_ := set $tree "extproc" (include "warmroute.pickerSettings" . | fromJson) -}}
{{- end -}}
{{- if .Values.adminToken.existingSecret -}}
{{- $listen = merge (dict "admin_host" $listen.host) $listen -}}
{{- $admin = merge (dict "token_file" "/etc/warmroute/secrets/admin-token") $admin -}}
{{- end -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $auth = merge (dict "keys_file" "/etc/warmroute/secrets/keys.yaml") $auth -}}
{{- end -}}
{{- if .Values.authSecret.existingSecret -}}
{{- $auth = merge (dict "secret_file" "/etc/warmroute/secrets/auth-secret") $auth -}}
{{- end -}}
{{- if .Values.upstreamKey.existingSecret -}}
{{- $upstream = merge (dict "api_key_file" "/etc/warmroute/secrets/upstream-key") $upstream -}}
{{- end -}}
{{- with .Values.tls -}}
{{- if .existingSecret -}}
{{- $files := dict "tls_certificate" "/etc/warmroute/secrets/tls.crt" "tls_key" "/etc/warmroute/secrets/tls.key" -}}
{{- if .clientCaKey -}}
{{- $_ := set $files "tls_client_ca" "/etc/warmroute/secrets/tls-client-ca.crt" -}}
{{- end -}}
{{- $listen = merge $files $listen -}}
{{- end -}}
{{- end -}}
{{- with .Values.upstreamTls -}}
{{- if .existingSecret -}}
{{- $files := dict -}}
{{- if .caKey -}}
{{- $_ := set $files "tls_ca" "/etc/warmroute/secrets/upstream-ca.crt" -}}
{{- end -}}
{{- if .certificateKey -}}
{{- $_ := set $files "tls_certificate" "/etc/warmroute/secrets/upstream.pem" -}}
{{- end -}}
{{- $upstream = merge $files $upstream -}}
{{- end -}}
{{- end -}}
{{- $peering := dig "peering" dict $tree -}}
{{- if include "warmroute.hasValkey" . -}}
{{- $peering = merge (dict "redis_url" (printf "redis://%s:6379" (include "warmroute.valkeyName" .))) $peering -}}
{{- if .Values.valkey.existingSecret -}}
{{- $peering = merge (dict "password_file" "/etc/warmroute/secrets/peering-password_file") $peering -}}
{{- end -}}
{{- end -}}
{{- if include "warmroute.namesStore" . -}}
{{- with include "warmroute.storeSecret" . | fromJson -}}
{{- if .existingSecret -}}
{{- $files := dict -}}
{{- range $key, $name := dict "redis_url_file" .urlKey "password_file" .passwordKey "tls_ca" .caKey "tls_certificate" .certificateKey -}}
{{- if $name }}{{ $_ := set $files $key (printf "/etc/warmroute/secrets/peering-%s" $key) }}{{ end -}}
{{- end -}}
{{- $peering = merge $files $peering -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- /* The number of routers is a setting only if it has an effect, because a changed setting is a rollout: for a store of
the user's, for rates of tenants, and for the warning of routers that share nothing. */}}
{{- $counted := or (include "warmroute.namesStore" .) .Values.apiKeys.existingSecret (not (include "warmroute.hasValkey" .)) -}}
{{- if and $counted (or (include "warmroute.severalRouters" .) (include "warmroute.namesStore" .)) -}}
{{- $routers := ternary .Values.autoscaling.minReplicas .Values.replicaCount .Values.autoscaling.enabled -}}
{{- $peering = merge $peering (dict "expected_routers" (int $routers)) -}}
{{- end -}}
{{- $sources := dig "tokens" "sources" list $tree -}}
{{- range .Values.tokenizers -}}
{{- $source := default "" (default .repo .path) -}}
{{- if .revision }}{{ $source = printf "%s@%s" $source .revision }}{{ end -}}
{{- if .model }}{{ $source = printf "%s=%s" .model $source }}{{ end -}}
{{- $sources = append $sources $source -}}
{{- end -}}
{{- range include "warmroute.engineTokenizers" . | fromJsonArray -}}
{{- $model := . -}}
{{- $known := false -}}
{{- range $sources -}}
{{- if or (not (contains "=" .)) (hasPrefix (printf "%s=" $model.name) .) }}{{ $known = true }}{{ end -}}
{{- end -}}
{{- if not $known }}{{ $sources = append $sources (printf "%s=%s" .name .source) }}{{ end -}}
{{- end -}}
{{- if $sources -}}
{{- $_ := set $tree "tokens" (merge (dict "sources" $sources) (dig "tokens" dict $tree)) -}}
{{- end -}}
{{- $snapshot := dig "snapshot" dict $tree -}}
{{- if not (hasKey $snapshot "path") -}}
{{- $_ := set $tree "snapshot" (set $snapshot "path" "/var/lib/warmroute/state") -}}
{{- end -}}
{{- $_ := set $tree "listen" $listen -}}
{{- range $name, $section := dict "admin" $admin "auth" $auth "peering" $peering "upstream" $upstream -}}
{{- if $section }}{{ $_ := set $tree $name $section }}{{ end -}}
{{- end -}}
{{- $tree | toJson -}}
{{- end -}}

{{/* "yes" if an engine of this release may have no replica until a request starts the first one, otherwise empty. */}}
{{- define "warmroute.scalesFromZero" -}}
{{- if include "warmroute.fromZero" . | fromJsonArray }}yes{{ end -}}
{{- end -}}

{{/* JSON list of the engines of this release that may have no replica, by the model name that clients use. */}}
{{- define "warmroute.fromZero" -}}
{{- $names := list -}}
{{- range .Values.engines.enabled | ternary .Values.engines.models list -}}
{{- $served := default .name .servedName -}}
{{- with .autoscaling -}}
{{- if and (hasKey . "minReplicas") (not (int .minReplicas)) }}{{ $names = append $names $served }}{{ end -}}
{{- end -}}
{{- end -}}
{{- uniq $names | toJson -}}
{{- end -}}

{{/* "yes" if the router saves its state in a volume of the pod, otherwise empty. */}}
{{- define "warmroute.keepsState" -}}
{{- if hasPrefix "/var/lib/warmroute/" (dig "snapshot" "path" "/var/lib/warmroute/state" (include "warmroute.config" . | fromJson)) }}yes{{ end -}}
{{- end -}}

{{/*
JSON list of the tokenizers of this release's engines: the model name that clients use, the tokenizer's location, and
the Secret for it. The location is `tokenizer`, or the model itself if that is a name on the hub.
*/}}
{{- define "warmroute.engineTokenizers" -}}
{{- $found := list -}}
{{- range .Values.engines.enabled | ternary .Values.engines.models list -}}
{{- $source := default "" .tokenizer -}}
{{- if and (not (hasKey . "tokenizer")) (ne .engine "simulated") (not (hasPrefix "/" (default "" .model))) }}{{ $source = .model }}{{ end -}}
{{- if $source -}}
{{- $token := default dict .hubToken -}}
{{- $found = append $found (dict "name" (default .name .servedName) "source" $source "secret" (default "" $token.secret) "key" (default "token" $token.key)) -}}
{{- end -}}
{{- end -}}
{{- $found | toJson -}}
{{- end -}}

{{/* Secret with the hub's token, as JSON: the given one, otherwise the first one of this release's engines. */}}
{{- define "warmroute.hubToken" -}}
{{- $token := dict -}}
{{- with .Values.huggingFace.existingSecret -}}
{{- $token = dict "name" . "key" $.Values.huggingFace.key -}}
{{- else -}}
{{- range include "warmroute.engineTokenizers" . | fromJsonArray -}}
{{- if and .secret (not $token) }}{{ $token = dict "name" .secret "key" .key }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $token | toJson -}}
{{- end -}}

{{/* "yes" if tokenizers may come from Hugging Face's hub, otherwise empty. */}}
{{- define "warmroute.hub" -}}
{{- $all := dig "tokens" "sources" list (include "warmroute.settingsTree" . | fromJson) -}}
{{- range $all -}}
{{- if not (hasPrefix "/" (regexReplaceAll "^[^=]*=" . "")) }}yes{{ break }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Sources of one projected volume, one for each file. */}}
{{- define "warmroute.secretSources" -}}
{{- $v := .Values -}}
{{- $store := include "warmroute.storeSecret" . | fromJson -}}
{{- $files := list
  (list $v.adminToken.existingSecret $v.adminToken.key "admin-token")
  (list $v.apiKeys.existingSecret $v.apiKeys.key "keys.yaml")
  (list $v.authSecret.existingSecret $v.authSecret.key "auth-secret")
  (list $v.upstreamKey.existingSecret $v.upstreamKey.key "upstream-key")
  (list $v.tls.existingSecret "tls.crt" "tls.crt")
  (list $v.tls.existingSecret "tls.key" "tls.key")
  (list $v.tls.existingSecret $v.tls.clientCaKey "tls-client-ca.crt")
  (list $v.upstreamTls.existingSecret $v.upstreamTls.caKey "upstream-ca.crt")
  (list $v.upstreamTls.existingSecret $v.upstreamTls.certificateKey "upstream.pem")
  (list $store.existingSecret $store.urlKey "peering-redis_url_file")
  (list $store.existingSecret $store.passwordKey "peering-password_file")
  (list $store.existingSecret $store.caKey "peering-tls_ca")
  (list $store.existingSecret $store.certificateKey "peering-tls_certificate")
-}}
{{- if include "warmroute.hasValkey" . }}{{ $files = append $files (list $v.valkey.existingSecret $v.valkey.key "peering-password_file") }}{{ end -}}
{{- range $files }}
{{- if and (index . 0) (index . 1) }}
- secret:
    name: {{ index . 0 }}
    items:
      - key: {{ index . 1 }}
        path: {{ index . 2 }}
{{- end }}
{{- end }}
{{- end -}}
