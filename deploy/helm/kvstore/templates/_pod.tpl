{{- /* Parts of a pod that storage and near nodes share. */ -}}

{{- define "kvstore.security" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
# gives access to the volume and the secrets
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "kvstore.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "kvstore.ports" -}}
- {name: grpc, containerPort: 7440}
- {name: bulk, containerPort: 7441}
- {name: metrics, containerPort: 7442}
{{- end }}

{{- /* Variables of a member on etcd. A pod knows its zone where Kubernetes labels pods with it (1.35, or
the feature gate PodTopologyLabelsAdmission). Argument: root. */ -}}
{{- define "kvstore.of_etcd" -}}
{{- if not (get .Values.settings "KVSTORE_NODE_ZONE") }}
- name: KVSTORE_NODE_ZONE
  valueFrom:
    fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}
{{- end }}
- name: KVSTORE_NODE_ETCD_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.secrets.etcd | default (printf "%s-etcd" (include "kvstore.name" .)) }}
      key: password
      optional: true
{{- end }}

{{- /* A kubelet has no client certificate; health.py shows the node's own. It asks /health at the
metrics port. Not gRPC: a gateway that crashes is back within a second, and must not cost the node its
RAM. Touching the RAM takes 1 s for 2 GiB, on some virtual machines 20 times that. Argument: RAM. */ -}}
{{- define "kvstore.probes" -}}
startupProbe:
  exec: {command: [/opt/kvstore/bin/python, /opt/kvstore/health.py]}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ max 90 (div (include "kvstore.mib" . | int64) 1024) }}
readinessProbe:
  exec: {command: [/opt/kvstore/bin/python, /opt/kvstore/health.py]}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
livenessProbe: # a restart loses the pages that are only in RAM
  exec: {command: [/opt/kvstore/bin/python, /opt/kvstore/health.py]}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{- /* The files in /etc/kvstore. fsGroup gives the group the owner's (root's) rights, so 0400 becomes
0440; a node refuses files that others can read. Arguments: root, storage. */ -}}
{{- define "kvstore.files" -}}
{{- $root := index . 0 -}}
{{- $name := include "kvstore.name" $root -}}
name: known
projected:
  defaultMode: 0400
  sources:
    - secret:
        name: {{ $root.Values.secrets.tls | default (printf "%s-tls" $name) }}
        items:
          - {key: tls.crt, path: tls.crt}
          - {key: tls.key, path: tls.key}
          - {key: ca.crt, path: ca.crt}
          {{- if $root.Values.cluster.etcdTLS }}
          - {key: etcd.crt, path: etcd.crt}
          {{- end }}
    - secret:
        name: {{ $root.Values.secrets.identities | default (printf "%s-identities" $name) }}
        items:
          - {key: identities, path: identities}
    {{- if and (index . 1) $root.Values.secrets.encryption }}
    - secret:
        name: {{ $root.Values.secrets.encryption }}
        items:
          - {key: key, path: disk.key}
    {{- end }}
    - secret:
        name: {{ $root.Values.secrets.tokens | default (printf "%s-tokens" $name) }}
        {{- if index . 1 }}
        optional: true # tokens of the operator (`kubectl exec`) and of members
        items:
          - {key: operator, path: operator.token}
        {{- else }}
        items: # not the operator's: other workloads run on these hosts
        {{- end }}
          - {key: member, path: member.token}
{{- end }}
