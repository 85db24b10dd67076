{{/* A dedicated Envoy, for clusters with a gateway that does not support InferencePools. */}}

{{- define "warmroute.envoyName" -}}
{{- include "warmroute.fullname" . }}-envoy
{{- end -}}

{{- define "warmroute.envoyLabels" -}}
app.kubernetes.io/name: {{ include "warmroute.name" . }}-envoy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Failure mode of a gateway while no picker answers: FailOpen, or FailClose, as required if clients need keys. */}}
{{- define "warmroute.failureMode" -}}
{{- if .Values.pool.failureMode -}}
{{- .Values.pool.failureMode -}}
{{- else if include "warmroute.asksForKeys" . -}}
FailClose
{{- else -}}
FailOpen
{{- end -}}
{{- end -}}

{{/* "yes" if requests without a key are refused or prompts are salted, otherwise empty. */}}
{{- define "warmroute.asksForKeys" -}}
{{- with .Values -}}
{{- if or .apiKeys.existingSecret (dig "auth" "keys_file" "" .config) (dig "auth" "isolate" false .config) }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* Envoy's cluster type for a Service's pods, resolved by DNS. */}}
{{- define "warmroute.envoyNames" -}}
name: envoy.clusters.dns
typed_config:
  "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
  dns_refresh_rate: 2s
  all_addresses_in_single_endpoint: false
{{- end -}}

{{/* Envoy's own configuration. */}}
{{- define "warmroute.envoyConfig" -}}
{{- $rules := .Files.Get "files/gateway.yaml" | fromYaml -}}
{{- $open := eq (include "warmroute.failureMode" .) "FailOpen" -}}
{{- $ports := .Values.pool.targetPorts -}}
{{- $engines := printf "%s-engines.%s.svc" (include "warmroute.fullname" .) .Release.Namespace -}}
{{- $pickers := printf "%s-pickers.%s.svc" (include "warmroute.fullname" .) .Release.Namespace -}}
{{- $body := int64 (dig "limits" "body_bytes_max" 33554432 (include "warmroute.config" . | fromJson)) -}}
{{- $firstByte := dig "upstream" "first_byte_timeout_s" 600 (include "warmroute.config" . | fromJson) | int -}}
admin:
  # A client of the admin page can stop Envoy, so it listens on loopback only.
  address:
    socket_address: {address: 127.0.0.1, port_value: 9901}
overload_manager:
  resource_monitors:
    - name: envoy.resource_monitors.global_downstream_max_connections
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
        max_active_downstream_connections: {{ int64 .Values.envoy.connectionsMax }}
static_resources:
  listeners:
    - name: clients
      address:
        socket_address: {address: {{ .Values.envoy.bindAddress | quote }}, port_value: 8080, ipv4_compat: {{ contains ":" .Values.envoy.bindAddress }}}
      # A request is sent to the picker with its whole body. This is therefore the maximum size of a body, and of an
      # answer that waits for a slow client: `limits.body_bytes_max` of the router. Larger bodies are answered with 413.
      per_connection_buffer_limit_bytes: {{ $body }}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                codec_type: AUTO
                use_remote_address: true
                # x-envoy-* headers of clients are ignored, for every address.
                internal_address_config: {unix_sockets: false}
                normalize_path: true
                path_with_escaped_slashes_action: REJECT_REQUEST
                request_headers_timeout: 10s
                # The maximum time of a prefill, during which no byte is sent.
                stream_idle_timeout: {{ add $firstByte 60 }}s
                common_http_protocol_options:
                  idle_timeout: 75s
                  # A terminating pod receives no new connections, and existing ones end after a minute and their last
                  # answer. At the end of `drainSeconds` only streams that are longer than that are cut.
                  max_connection_duration: 60s
                http2_protocol_options:
                  max_concurrent_streams: 1000
                # Removed before routing, because the headers would remain if no picker is available.
                early_header_mutation_extensions:
                  - name: envoy.http.early_header_mutation.header_mutation
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
                      mutations:
                        {{- range $rules.forgeable }}
                        - remove: {{ . }}
                        {{- end }}
                route_config:
                  name: engines
                  virtual_hosts:
                    - name: engines
                      domains: ["*"]
                      routes:
                        # Requests placed by a picker. The picker itself answers requests that go to no engine.
                        - match: {prefix: /, headers: [{name: x-gateway-destination-endpoint, present_match: true}]}
                          route: &engines
                            cluster: engines
                            # No timeout, because the duration of an answer is not limited.
                            timeout: 0s
                            # Only requests that no engine has received are retried, on the next of the picker's list.
                            retry_policy:
                              retry_on: connect-failure,refused-stream
                              num_retries: 2
                        {{- if $open }}
                        # Requests that no picker has received: only prompts, and without credentials.
                        {{- range concat $rules.prompts (dig "api" "passthrough" $rules.passthrough (include "warmroute.config" . | fromJson)) }}
                        - match: {path: {{ . | quote }}, headers: [{name: ":method", string_match: {exact: POST}}]}
                          route: *engines
                          request_headers_to_remove: {{ $rules.secrets | toJson }}
                        {{- end }}
                        {{- end }}
                http_filters:
                  - name: envoy.filters.http.ext_proc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      grpc_service:
                        envoy_grpc:
                          cluster_name: pickers
                        # Another picker is tried if one is unavailable, or ended before it sent a response.
                        retry_policy:
                          retry_on: connect-failure,refused-stream,reset,unavailable
                          num_retries: 2
                      processing_mode:
                        request_header_mode: SEND
                        request_body_mode: BUFFERED
                        response_header_mode: SEND
                        response_body_mode: NONE
                        request_trailer_mode: SKIP
                        response_trailer_mode: SKIP
                      # Longer than the maximum time of a request in the router's queue (`admission.queue_timeout_s`). A picker
                      # that hangs is detected sooner, by its health checks and the keepalive of its connections.
                      message_timeout: {{ default (printf "%ds" (dig "admission" "queue_timeout_s" 30 (include "warmroute.config" . | fromJson) | float64 | ceil | int | add 10)) .Values.envoy.pickerTimeout }}
                      failure_mode_allow: {{ $open }}
                      # Routes are matched again after the picker has set its header.
                      route_cache_action: CLEAR
                      status_on_error: {code: ServiceUnavailable}
                      allow_mode_override: true
                      response_attributes: [upstream.address]
                      metadata_options:
                        # Without this namespace the picker's choice is not read from its metadata.
                        receiving_namespaces: {untyped: [envoy.lb]}
                        forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                      suppress_envoy_headers: true
    - name: status
      address:
        socket_address: {address: {{ .Values.envoy.bindAddress | quote }}, port_value: 8081, ipv4_compat: {{ contains ":" .Values.envoy.bindAddress }}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: status
                route_config:
                  name: status
                  virtual_hosts:
                    - name: status
                      domains: ["*"]
                      # Two pages of the admin interface, read-only.
                      routes:
                        - match: {path: /ready, headers: [{name: ":method", string_match: {exact: GET}}]}
                          route: {cluster: admin}
                        - match: {path: /stats/prometheus, headers: [{name: ":method", string_match: {exact: GET}}]}
                          route: {cluster: admin}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
    - name: engines
      # Ready pods, found by a headless Service.
      cluster_type:
        {{- include "warmroute.envoyNames" . | nindent 8 }}
      connect_timeout: 2s
      per_connection_buffer_limit_bytes: {{ $body }}
      load_assignment:
        cluster_name: engines
        endpoints:
          - lb_endpoints:
              {{- range $ports }}
              - endpoint:
                  address:
                    socket_address: {address: {{ $engines }}, port_value: {{ int . }}}
              {{- end }}
      # Engines in the order of the picker's list. Addresses that are not in the cluster are skipped. Without a list, as
      # while no picker answers, engines are chosen by round robin.
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                override_host_sources:
                  - metadata:
                      key: envoy.lb
                      path: [{key: x-gateway-destination-endpoint}]
                  - header: x-gateway-destination-endpoint
                # The address of the actual connection, for the picker's accounting.
                selected_host_key:
                  key: envoy.lb
                  path: [{key: x-gateway-destination-endpoint-served}]
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.round_robin
                        typed_config:
                          "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin
      circuit_breakers:
        thresholds:
          - {max_connections: 65536, max_pending_requests: 65536, max_requests: 65536, max_retries: 1000}
    - name: pickers
      cluster_type:
        {{- include "warmroute.envoyNames" . | nindent 8 }}
      connect_timeout: 1s
      lb_policy: ROUND_ROBIN
      # With FailOpen no unhealthy picker is tried if all are unhealthy, because an engine is chosen without them. With
      # FailClose one is tried, because its refusal states the reason.
      common_lb_config:
        healthy_panic_threshold: {value: {{ ternary 0 1 $open }}}
      load_assignment:
        cluster_name: pickers
        endpoints:
          - lb_endpoints:
              - endpoint:
                  health_check_config: {port_value: {{ include "warmroute.pickerHealthPort" . }}}
                  address:
                    socket_address: {address: {{ $pickers }}, port_value: {{ include "warmroute.pickerPort" . }}}
      health_checks:
        - timeout: 1s
          interval: 2s
          no_traffic_interval: 2s
          unhealthy_threshold: 2
          healthy_threshold: 1
          grpc_health_check: {service_name: readiness}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            http2_protocol_options:
              connection_keepalive: {interval: 10s, timeout: 3s}
      circuit_breakers:
        thresholds:
          - {max_connections: 1024, max_pending_requests: 65536, max_requests: 65536}
    - name: admin
      type: STATIC
      load_assignment:
        cluster_name: admin
        endpoints:
          - lb_endpoints:
              - endpoint:
                  address:
                    socket_address: {address: 127.0.0.1, port_value: 9901}
{{- end -}}
