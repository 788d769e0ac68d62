{{- define "qkvd.name" -}}
{{ .Values.fullnameOverride | default .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "qkvd.selector" -}}
app.kubernetes.io/name: qkvd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "qkvd.labels" -}}
{{ include "qkvd.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* The whole process keeps to memory-budget and a tenth; 256 MiB are for code, stacks and messages. */}}
{{- define "qkvd.memory" -}}
{{ add (div (mul (int64 .Values.memoryBudgetMiB) 11) 10) 256 }}Mi
{{- end }}

{{- define "qkvd.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag }}{{ end }}
{{- end }}

{{/* storage-budget in MiB: nine tenths of storage.size, as the file system's own tables and the journal take some. */}}
{{- define "qkvd.storageBudgetMiB" -}}
{{- $size := .Values.storage.size }}
{{- $number := regexFind "^[0-9]+" $size | int64 }}
{{- $unit := index (dict "Mi" 1 "Gi" 1024 "Ti" 1048576) (regexFind "[MGT]i$" $size) | int64 }}
{{- div (mul $number $unit 9) 10 }}
{{- end }}

{{/* Folders of the node, one of each release. */}}
{{- define "qkvd.dataPath" -}}
{{ .Values.storage.hostPath | default (printf "/var/lib/qkvd/%s-%s" .Release.Namespace (include "qkvd.name" .)) }}
{{- end }}
{{- define "qkvd.socketPath" -}}
{{ .Values.socket.hostPath | default (printf "/run/qkvd/%s-%s" .Release.Namespace (include "qkvd.name" .)) }}
{{- end }}

{{/* Whether metrics need a token: empty where they do not. */}}
{{- define "qkvd.adminAuth" -}}
{{- if kindIs "bool" .Values.admin.auth }}{{ if .Values.admin.auth }}true{{ end }}{{ else if include "qkvd.auth" . }}true{{ end }}
{{- end }}

{{/* Names of what holds certificates, the auth-file, keys of JWTs and the quotas; empty where there is none. */}}
{{- define "qkvd.tls" -}}
{{- if .Values.tls.certManager.enabled }}{{ include "qkvd.name" . }}-tls{{ else }}{{ .Values.tls.secretName }}{{ end }}
{{- end }}
{{- define "qkvd.auth" -}}
{{- if .Values.auth.lines }}{{ include "qkvd.name" . }}-auth{{ else }}{{ .Values.auth.secretName }}{{ end }}
{{- end }}
{{- define "qkvd.jwks" -}}
{{- if .Values.jwt.keys }}{{ include "qkvd.name" . }}-jwks{{ else }}{{ .Values.jwt.configMapName }}{{ end }}
{{- end }}
{{- define "qkvd.quotas" -}}
{{- if .Values.quotas.lines }}{{ include "qkvd.name" . }}-quotas{{ else }}{{ .Values.quotas.configMapName }}{{ end }}
{{- end }}

{{/* Where the node keeps the profile that is shipped, below kubelet's folder. */}}
{{- define "qkvd.seccomp" -}}
qkvd/{{ .Files.Get "files/seccomp.json" | sha256sum | trunc 12 }}.json
{{- end }}

{{/* Values that contradict each other, which a schema cannot say. */}}
{{- define "qkvd.check" -}}
{{- $auth := include "qkvd.auth" . }}
{{- $tls := include "qkvd.tls" . }}
{{- if not (or $auth .Values.tls.clientCA .Values.anonymous) }}
{{- fail "nobody could call: set auth.secretName or auth.lines, tls.clientCA, or anonymous=true, with which every caller may do everything" }}
{{- end }}
{{- if and .Values.anonymous (or $auth .Values.tls.clientCA) }}
{{- fail "anonymous=true contradicts auth and tls.clientCA: leave it out" }}
{{- end }}
{{- if and .Values.tls.clientCA (not $tls) }}
{{- fail "tls.clientCA needs tls.secretName or tls.certManager.enabled" }}
{{- end }}
{{- if and .Values.tls.certManager.enabled (or .Values.tls.secretName (not .Values.tls.certManager.issuer.name)) }}
{{- fail "tls.certManager.enabled needs tls.certManager.issuer.name, and no tls.secretName" }}
{{- end }}
{{- if or (and .Values.auth.lines .Values.auth.secretName) (and .Values.quotas.lines .Values.quotas.configMapName) }}
{{- fail "auth and quotas take either lines or the name of an object that has them" }}
{{- end }}
{{- if and .Values.jwt.keys .Values.jwt.configMapName }}
{{- fail "jwt takes either keys or the name of the config map that has them" }}
{{- end }}
{{- if and (include "qkvd.jwks" .) (not $auth) }}
{{- fail "jwt needs auth.secretName or auth.lines, whose lines say which subjects may do what" }}
{{- end }}
{{- if and $auth (not $tls) (not .Values.tls.elsewhere) }}
{{- fail "auth without TLS: everybody on the way can read and use the tokens; set tls.secretName or tls.certManager, or tls.elsewhere=true where a service mesh encrypts" }}
{{- end }}
{{- if and .Values.tls.elsewhere $tls }}
{{- fail "tls.elsewhere contradicts tls.secretName and tls.certManager" }}
{{- end }}
{{- $adminAuth := include "qkvd.adminAuth" . }}
{{- if and $adminAuth (not $auth) }}
{{- fail "admin.auth needs auth.secretName or auth.lines" }}
{{- end }}
{{- if and .Values.admin.tls (not $tls) }}
{{- fail "admin.tls needs tls.secretName or tls.certManager" }}
{{- end }}
{{- if and .Values.admin.tls .Values.serviceMonitor.enabled (not .Values.serviceMonitor.tlsConfig) }}
{{- fail "admin.tls: serviceMonitor.tlsConfig has to say how Prometheus checks the certificate" }}
{{- end }}
{{- if and $adminAuth .Values.serviceMonitor.enabled (not .Values.serviceMonitor.tokenSecret.name) }}
{{- fail "admin.auth: serviceMonitor.tokenSecret.name has to name the secret with Prometheus' token" }}
{{- end }}
{{- if and .Values.serviceMonitor.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.metricsFrom) }}
{{- fail "serviceMonitor.enabled: networkPolicy.metricsFrom has to select Prometheus, as only pods of this namespace may read metrics; [{podSelector: {}}] where it is one of them" }}
{{- end }}
{{- if and .Values.socket.enabled (ne .Values.kind "DaemonSet") }}
{{- fail "socket.enabled is for kind=DaemonSet" }}
{{- end }}
{{- if and .Values.socket.enabled (not (or $auth .Values.anonymous)) }}
{{- fail "socket.enabled: certificates are not asked for there; set auth.secretName or auth.lines" }}
{{- end }}
{{- if eq (int64 .Values.port) (int64 .Values.admin.port) }}
{{- fail "port and admin.port are the same" }}
{{- end }}
{{- end }}

{{- define "qkvd.pod" -}}
{{- $version := .Values.kubeVersion | default .Capabilities.KubeVersion.Version }}
{{- $fields := semverCompare ">=1.30.0-0" $version }}
{{- $owner := and .Values.storage.enabled .Values.storage.hostPathOwner (eq .Values.kind "DaemonSet") }}
{{- $prepare := or $owner .Values.socket.enabled .Values.installSeccompProfile }}
metadata:
  labels:
    {{- include "qkvd.labels" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    # Changed options start the pods anew; certificates, auth, keys of JWTs and quotas are read again by qkvd itself.
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- if and .Values.appArmorProfile (not $fields) }}
    container.apparmor.security.beta.kubernetes.io/qkvd: {{ include "qkvd.appArmor" . }}
    {{- end }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  # The drain, what sessions take to reach the disk, and slack.
  terminationGracePeriodSeconds: {{ add (int64 .Values.drainNoticeSeconds) (int64 .Values.drainGraceSeconds) 60 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 7580
    runAsGroup: 7580
    fsGroup: 7580
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      {{- toYaml .Values.seccompProfile | nindent 6 }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "qkvd.selector" $ | fromYaml)) }}
    - {{- merge (deepCopy .) (ternary dict $own (hasKey . "labelSelector")) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- if $prepare }}
  initContainers:
    - name: prepare
      image: {{ .Values.prepareImage }}
      command:
        - sh
        - -ec
        - |
          {{- if $owner }}
          chown 7580:7580 /data
          chmod 700 /data
          {{- end }}
          {{- if .Values.socket.enabled }}
          chown 7580:7580 /socket
          chmod 755 /socket
          {{- end }}
          {{- if .Values.installSeccompProfile }}
          mkdir -p "/seccomp/$(dirname {{ include "qkvd.seccomp" . }})"
          cp /config/seccomp.json /seccomp/{{ include "qkvd.seccomp" . }}
          {{- end }}
      securityContext:
        runAsNonRoot: false
        runAsUser: 0
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        seccompProfile:
          type: RuntimeDefault
        capabilities:
          drop: [ALL]
          add: [CHOWN, FOWNER, DAC_OVERRIDE]
      resources:
        requests: {cpu: 10m, memory: 16Mi}
        limits: {memory: 64Mi}
      volumeMounts:
        {{- if $owner }}
        - name: data
          mountPath: /data
        {{- end }}
        {{- if .Values.socket.enabled }}
        - name: socket
          mountPath: /socket
        {{- end }}
        {{- if .Values.installSeccompProfile }}
        - name: config
          mountPath: /config
          readOnly: true
        - name: seccomp
          mountPath: /seccomp
        {{- end }}
  {{- end }}
  containers:
    - name: qkvd
      image: {{ include "qkvd.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["--config", "/etc/qkvd/qkvd.yaml"]
      {{- with .Values.extraEnv }}
      env:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: {{ int64 .Values.port }}
        - name: admin
          containerPort: {{ int64 .Values.admin.port }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
        {{- if .Values.installSeccompProfile }}
        seccompProfile:
          type: Localhost
          localhostProfile: {{ include "qkvd.seccomp" . }}
        {{- end }}
        {{- if and .Values.appArmorProfile $fields }}
        appArmorProfile:
          {{- toYaml .Values.appArmorProfile | nindent 10 }}
        {{- end }}
      # By HTTP: probes of gRPC cannot do TLS. Reading the SSD tier's files may take long.
      startupProbe:
        httpGet:
          path: /health/ready
          port: admin
          {{- if .Values.admin.tls }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 2
        failureThreshold: 450
      readinessProbe:
        httpGet:
          path: /health/ready
          port: admin
          {{- if .Values.admin.tls }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 5
      # That it answers; a pod that drains is not ready, and is left to end by itself.
      livenessProbe:
        httpGet:
          path: /health/live
          port: admin
          {{- if .Values.admin.tls }}
          scheme: HTTPS
          {{- end }}
        periodSeconds: 10
        failureThreshold: 6
      resources:
        requests:
          cpu: {{ .Values.cpu | quote }}
          memory: {{ include "qkvd.memory" . }}
          {{- with .Values.resources }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
        limits:
          memory: {{ include "qkvd.memory" . }}
          {{- with .Values.resources }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
      volumeMounts:
        - name: config
          mountPath: /etc/qkvd
          readOnly: true
        {{- if include "qkvd.tls" . }}
        - name: tls
          mountPath: /etc/qkvd-tls
          readOnly: true
        {{- end }}
        {{- if include "qkvd.auth" . }}
        - name: auth
          mountPath: /etc/qkvd-auth
          readOnly: true
        {{- end }}
        {{- if include "qkvd.jwks" . }}
        - name: jwks
          mountPath: /etc/qkvd-jwks
          readOnly: true
        {{- end }}
        {{- if include "qkvd.quotas" . }}
        - name: quotas
          mountPath: /etc/qkvd-quotas
          readOnly: true
        {{- end }}
        {{- if .Values.storage.enabled }}
        - name: data
          mountPath: /var/lib/qkvd
        {{- end }}
        {{- if .Values.socket.enabled }}
        - name: socket
          mountPath: /run/qkvd
        {{- end }}
        {{- with .Values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "qkvd.name" . }}
    {{- with include "qkvd.tls" . }}
    - name: tls
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with include "qkvd.auth" . }}
    - name: auth
      secret:
        secretName: {{ . }}
        defaultMode: 0440
    {{- end }}
    {{- with include "qkvd.jwks" . }}
    - name: jwks
      configMap:
        name: {{ . }}
    {{- end }}
    {{- with include "qkvd.quotas" . }}
    - name: quotas
      configMap:
        name: {{ . }}
    {{- end }}
    {{- if .Values.installSeccompProfile }}
    - name: seccomp
      hostPath:
        path: /var/lib/kubelet/seccomp
        type: DirectoryOrCreate
    {{- end }}
    {{- if and .Values.storage.enabled (eq .Values.kind "DaemonSet") }}
    - name: data
      hostPath:
        path: {{ include "qkvd.dataPath" . }}
        type: DirectoryOrCreate
    {{- end }}
    {{- if .Values.socket.enabled }}
    - name: socket
      hostPath:
        path: {{ include "qkvd.socketPath" . }}
        type: DirectoryOrCreate
    {{- end }}
    {{- with .Values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}

{{/* The annotation's value, for Kubernetes before 1.30. */}}
{{- define "qkvd.appArmor" -}}
{{- if eq .Values.appArmorProfile.type "Localhost" -}}
localhost/{{ .Values.appArmorProfile.localhostProfile }}
{{- else if eq .Values.appArmorProfile.type "Unconfined" -}}
unconfined
{{- else -}}
runtime/default
{{- end }}
{{- end }}
