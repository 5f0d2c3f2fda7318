{{- define "diloco.labels" -}}
app.kubernetes.io/name: decoupled-diloco
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "diloco.meta" -}}
{{- /* (list root role name) */ -}}
{{- $root := index . 0 -}}
name: {{ index . 2 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "diloco.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "diloco.secret" -}}
{{ .Values.secretName | default (printf "%s-secret" .Release.Name) }}
{{- end }}

{{- define "diloco.addresses" -}}
{{- $name := printf "%s-syncer" .Release.Name -}}
{{- $found := .Values.addresses -}}
{{- if not $found -}}
{{- range $shard := until (int .Values.syncer.shards) -}}
{{- $found = append $found (printf "%s://%s-%d.%s.%s.svc:%d" (ternary "https" "http" (not (empty $.Values.tls.secret))) $name $shard $name $.Release.Namespace (int $.Values.port)) -}}
{{- end -}}
{{- end -}}
{{- range $found }}
{{- if and $.Values.tls.secret (contains "http://" .) }}
{{- fail (printf "%s in addresses is not encrypted, but tls.secret is set: write https://" .) }}
{{- end }}
{{- end -}}
{{ join "," $found }}
{{- end }}

{{- define "diloco.dialled" -}}
- --syncer
- {{ include "diloco.addresses" . }}
- --token-file
- /etc/decoupled-diloco/secret/token
- --set
- run.folder=/var/lib/decoupled-diloco/run
- --set
- run.learners={{ .Values.learner.count }}
{{- if .Values.tls.secret }}
- --set
- tls.authority=/etc/decoupled-diloco/tls/ca.crt
{{- end }}
{{- if .Values.tls.clients }}
- --set
- tls.clients=/etc/decoupled-diloco/tls
{{- end }}
{{- end }}

{{- define "diloco.shardTls" -}}
{{- if .Values.tls.secret -}}
{{- $at := "/etc/decoupled-diloco/tls" }} --set tls.certificate={{ $at }}/tls.crt --set tls.key={{ $at }}/tls.key --set tls.authority={{ $at }}/ca.crt
{{- if .Values.tls.clients }} --set tls.client_authority={{ $at }}/client-ca.crt{{ end }}
{{- end }}
{{- end }}

{{- define "diloco.probe" -}}
{{- /* The kubelet shows no certificate, and verifies none: /healthz answers it all the same. */ -}}
httpGet: {path: /healthz, port: syncer{{ if .Values.tls.secret }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- define "diloco.container" -}}
{{- /* (list root gets gpus) */ -}}
{{- $root := index . 0 }}{{ $gets := index . 1 }}{{ $gpus := int (index . 2) -}}
image: {{ $root.Values.image }}
resources:
  requests:
    cpu: {{ $gets.cpus | quote }}
    {{- with $gets.memory }}
    memory: {{ . }}
    {{- end }}
  {{- if or $gets.memory $gpus }}
  limits:
    {{- with $gets.memory }}
    memory: {{ . }}
    {{- end }}
    {{- if $gpus }}
    nvidia.com/gpu: {{ $gpus | quote }}
    {{- end }}
  {{- end }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - {name: settings, mountPath: /etc/decoupled-diloco/settings}
  - {name: secret, mountPath: /etc/decoupled-diloco/secret}
  - {name: data, mountPath: /var/lib/decoupled-diloco}
  - {name: tmp, mountPath: /tmp}
  {{- if $root.Values.tls.secret }}
  - {name: tls, mountPath: /etc/decoupled-diloco/tls}
  {{- end }}
{{- end }}

{{- define "diloco.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "diloco.volumes" -}}
- name: settings
  configMap:
    name: {{ .Release.Name }}-settings
- name: secret
  secret:
    secretName: {{ include "diloco.secret" . }}
    defaultMode: 288  # 0440
{{- end }}

{{- define "diloco.tlsVolume" -}}
{{- /* Of what dials: (list root alone), the id that it dials with, if it is one */ -}}
{{- $tls := (index . 0).Values.tls }}{{ $alone := index . 1 -}}
{{- if $tls.secret -}}
- name: tls
  projected:
    defaultMode: 288  # 0440
    sources:
      - secret:
          name: {{ $tls.secret }}
          items: [{key: ca.crt, path: ca.crt}]
      {{- if $tls.clients }}
      - secret:
          name: {{ $tls.clients }}
          {{- if $alone }}
          items:
            - {key: {{ $alone }}.pem, path: {{ $alone }}.pem}
            - {key: {{ $alone }}.key, path: {{ $alone }}.key}
          {{- end }}
      {{- end }}
{{- end }}
{{- end }}

{{- define "diloco.failurePolicy" -}}
rules:
  # 2: the settings are wrong. 130: it was told to go, and is to come back.
  - action: {{ . }}
    onExitCodes: {operator: In, values: [2]}
  - action: Ignore
    onPodConditions: [{type: DisruptionTarget, status: "True"}]
  - action: Ignore
    onExitCodes: {operator: In, values: [130]}
{{- end }}

{{- define "diloco.learner" -}}
{{- /* The pods of learners, or of the one that they are alone of: (list root container command alone) */ -}}
{{- $root := index . 0 }}{{ $learner := $root.Values.learner -}}
metadata:
  labels:
    {{- include "diloco.labels" $root | nindent 4 }}
    app.kubernetes.io/component: learner
spec:
  {{- include "diloco.pod" $root | nindent 2 }}
  restartPolicy: Never
  terminationGracePeriodSeconds: {{ add (int $learner.handInSeconds) 30 }}
  {{- with $learner.nodes }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $learner.tolerated }}
  tolerations:
    {{- range . }}
    {{- $words := splitn "=" 2 . }}
    {{- if contains "=" . }}
    - {key: {{ $words._0 | quote }}, operator: Equal, value: {{ $words._1 | quote }}}
    {{- else }}
    - {key: {{ . | quote }}, operator: Exists}
    {{- end }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ index . 1 }}
      command:
        {{- index . 2 | nindent 8 }}
        {{- include "diloco.dialled" $root | nindent 8 }}
      env:
        - {name: HOME, value: /tmp}
      {{- include "diloco.container" (list $root $learner $learner.gpus) | nindent 6 }}
        - {name: shm, mountPath: /dev/shm}
  volumes:
    {{- include "diloco.volumes" $root | nindent 4 }}
    - {name: data, emptyDir: {}}
    - {name: tmp, emptyDir: {}}
    {{- with include "diloco.tlsVolume" (list $root (index . 3)) }}
    {{- . | nindent 4 }}
    {{- end }}
    - {name: shm, emptyDir: {medium: Memory}}
{{- end }}

{{- define "diloco.jobset" -}}
{{- /* (list root template labels) */ -}}
{{- $root := index . 0 -}}
network:
  enableDNSHostnames: true
  publishNotReadyAddresses: true
failurePolicy:
  maxRestarts: 1000
replicatedJobs:
  - name: node
    replicas: 1
    template:
      {{- with index . 2 }}
      metadata:
        labels:
          {{- toYaml . | nindent 10 }}
      {{- end }}
      spec:
        completionMode: Indexed
        completions: {{ $root.Values.learner.hosts }}
        parallelism: {{ $root.Values.learner.hosts }}
        backoffLimit: 0
        template:
          {{- index . 1 | nindent 10 }}
{{- end }}
