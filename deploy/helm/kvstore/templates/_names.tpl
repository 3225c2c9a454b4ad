{{- /* Names, labels, sizes and settings that several objects share. */ -}}

{{- define "kvstore.name" -}}
{{ .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "kvstore.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* Labels that select pods; they never change in a release. Arguments: root, component. */ -}}
{{- define "kvstore.selector" -}}
app.kubernetes.io/name: kvstore
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
{{- with index . 1 }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end }}

{{- define "kvstore.meta" -}}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "kvstore.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
  helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end }}

{{- /* A size such as 16GiB in MiB. */ -}}
{{- define "kvstore.mib" -}}
{{- $units := dict "MiB" 1 "GiB" 1024 "TiB" 1048576 -}}
{{- mul (regexFind "^[0-9]+" . | int64) (get $units (regexFind "[MGT]iB$" .)) -}}
{{- end }}

{{- /* A pod's memory (docs/operations.md, "Memory"), in whole Gi. Arguments: root, RAM, override. */ -}}
{{- define "kvstore.memory" -}}
{{- $settings := (index . 0).Values.settings -}}
{{- $gateways := get $settings "KVSTORE_NODE_GRPC_PROCESSES" | default 1 | int64 -}}
{{- $each := include "kvstore.mib" (get $settings "KVSTORE_NODE_GRPC_MEMORY_BYTES" | default "384MiB") -}}
{{- $ram := include "kvstore.mib" (index . 1) | int64 -}}
{{- $mib := add $ram (div (add $ram 63) 64) 512 (mul $gateways ($each | int64)) -}}
{{- index . 2 | default (printf "%dGi" (div (add $mib 1023) 1024)) -}}
{{- end }}

{{- /* The claim of a disk tier: 10 % more, for rows, their log and the file system. */ -}}
{{- define "kvstore.volume" -}}
{{- $mib := include "kvstore.mib" .Values.disk | int64 -}}
{{- .Values.volume.size | default (printf "%dGi" (div (add (div (mul $mib 11) 10) 1023) 1024)) -}}
{{- end }}

{{- define "kvstore.member" -}}
{{ include "kvstore.name" . }}-nodes.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* KVSTORE_NODE_CLUSTER: on etcd, a fixed list, or nothing for a single node. */ -}}
{{- define "kvstore.cluster" -}}
{{- if .Values.cluster.etcd -}}
etcd://{{ join "," .Values.cluster.etcd }}/{{ .Values.cluster.name }}
{{- else if gt (int .Values.replicas) 1 -}}
{{- $members := list -}}
{{- range $number := until (int .Values.replicas) -}}
{{- $id := printf "%s-%d" (include "kvstore.name" $) $number -}}
{{- $members = append $members (printf "%s=%s.%s:7440" $id $id (include "kvstore.member" $)) -}}
{{- end -}}
static:{{ .Values.cluster.name }}/{{ join "," $members }}
{{- end -}}
{{- end }}

{{- /* Variables of all nodes. `settings` wins, but not over what other values decide. */ -}}
{{- define "kvstore.settings" -}}
KVSTORE_NODE_HOST: 0.0.0.0
KVSTORE_NODE_TLS_CERT: /etc/kvstore/tls.crt
KVSTORE_NODE_TLS_KEY: /etc/kvstore/tls.key
{{- if .Values.clientCertificates }}
KVSTORE_NODE_TLS_CLIENT_CA: /etc/kvstore/ca.crt
{{- end }}
KVSTORE_NODE_IDENTITIES: /etc/kvstore/identities
KVSTORE_NODE_LOG_LEVEL: INFO
{{- with include "kvstore.cluster" . }}
KVSTORE_NODE_CLUSTER: {{ . }}
KVSTORE_NODE_REPLICAS: {{ $.Values.cluster.owners | quote }}
KVSTORE_NODE_TLS_CA: /etc/kvstore/ca.crt
KVSTORE_NODE_TLS_NAME: {{ $.Values.tlsName }}
KVSTORE_NODE_TOKEN_FILE: /etc/kvstore/member.token
{{- end }}
{{- if .Values.cluster.etcdTLS }}
KVSTORE_NODE_ETCD_CA: /etc/kvstore/etcd.crt
{{- end }}
{{- with .Values.cluster.etcdUser }}
KVSTORE_NODE_ETCD_USER: {{ . }}
{{- end }}
# address and credentials of `kubectl exec POD -- kvstore status`
KVSTORE_ADDRESS: localhost:7440
KVSTORE_TLS_CA: /etc/kvstore/ca.crt
KVSTORE_TLS_CERT: /etc/kvstore/tls.crt
KVSTORE_TLS_KEY: /etc/kvstore/tls.key
KVSTORE_TLS_NAME: {{ .Values.tlsName }}
KVSTORE_TOKEN_FILE: /etc/kvstore/operator.token
{{- end }}

{{- /* The settings as a map, with `settings` merged in. */ -}}
{{- define "kvstore.data" -}}
{{- $data := include "kvstore.settings" . | fromYaml -}}
{{- range $name, $value := .Values.settings -}}
{{- /* Helm reads numbers as floats, and 5000000 would be 5e+06. */ -}}
{{- if and (kindIs "float64" $value) (eq $value (floor $value)) }}{{ $value = int64 $value }}{{ end -}}
{{- $_ := set $data $name ($value | toString) -}}
{{- end -}}
{{- toYaml $data -}}
{{- end }}

{{- /* Values that a schema can not check. */ -}}
{{- define "kvstore.check" -}}
{{- $etcd := .Values.cluster.etcd -}}
{{- if and .Values.near.enabled (not $etcd) }}{{ fail "near.enabled needs cluster.etcd: a fixed list has no near nodes" }}{{ end -}}
{{- if and .Values.preStopDrain (not $etcd) }}{{ fail "preStopDrain needs cluster.etcd: members of a fixed list can not be drained" }}{{ end -}}
{{- if and (gt (int .Values.replicas) 1) (not $etcd) (gt (int .Values.cluster.owners) (int .Values.replicas)) }}
{{- fail (printf "cluster.owners is %d, and there are %d nodes; set it to at most replicas" (int .Values.cluster.owners) (int .Values.replicas)) }}{{ end -}}
{{- if and (or .Values.cluster.etcdTLS .Values.cluster.etcdUser) (not $etcd) }}{{ fail "cluster.etcdTLS and cluster.etcdUser need cluster.etcd" }}{{ end -}}
{{- if and .Values.secrets.encryption (not .Values.disk) }}{{ fail "secrets.encryption needs a disk tier: set disk" }}{{ end -}}
{{- range $name := list "KVSTORE_NODE_TOKEN" "KVSTORE_NODE_ETCD_PASSWORD" "KVSTORE_TOKEN" "KVSTORE_PAGE_KEY" }}
{{- if hasKey $.Values.settings $name }}{{ fail (printf "settings.%s is a secret, and settings become a ConfigMap; use secrets.tokens or secrets.etcd" $name) }}{{ end -}}
{{- end -}}
{{- $pod := "is the pod's" }}{{ $fixed := "is fixed, because services name it" -}}
{{- $decided := dict "RAM_BYTES" "is set by ram" "DISK_BYTES" "is set by disk" "DATA_DIR" "is set by disk"
  "CLUSTER" "is set by cluster" "REPLICAS" "is set by cluster.owners" "MEMBER" $pod "ADVERTISE" $pod
  "SHM_SOCKET" "is set by near.enabled" "SHM_TRUST" "is set by near.trust" "TLS_NAME" "is set by tlsName"
  "ENCRYPT_KEY_FILE" "is set by secrets.encryption" "PORT" $fixed "BULK_PORT" $fixed "METRICS_PORT" $fixed -}}
{{- range $name, $_ := .Values.settings }}
{{- with get $decided (trimPrefix "KVSTORE_NODE_" $name) }}{{ fail (printf "settings.%s %s; remove it from settings" $name .) }}{{ end -}}
{{- end -}}
{{- end }}
