{{- define "qkvd.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
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
{{ add (div (mul (int .Values.memoryBudgetMiB) 11) 10) 256 }}Mi
{{- end }}

{{- define "qkvd.pod" -}}
metadata:
  labels:
    {{- include "qkvd.labels" . | nindent 4 }}
  annotations:
    # A changed configuration starts the pods anew.
    checksum/config: {{ include (print $.Template.BasePath "/configmap.yaml") . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  automountServiceAccountToken: false
  # The drain, what sessions take to reach the disk, and slack.
  terminationGracePeriodSeconds: {{ add (int .Values.drainNoticeSeconds) (int .Values.drainGraceSeconds) 60 }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 7580
    runAsGroup: 7580
    fsGroup: 7580
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile:
      {{- toYaml .Values.seccompProfile | nindent 6 }}
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
  containers:
    - name: qkvd
      image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: ["--config", "/etc/qkvd/qkvd.yaml"]
      env:
        # The image's own, which would go before the file.
        - name: QKVD_LISTEN
          value: "0.0.0.0:{{ .Values.port }}"
      ports:
        - name: grpc
          containerPort: {{ .Values.port }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities:
          drop: [ALL]
      # Reading the SSD tier's files may take long.
      startupProbe:
        grpc:
          port: {{ .Values.port }}
        periodSeconds: 2
        failureThreshold: 450
      readinessProbe:
        grpc:
          port: {{ .Values.port }}
        periodSeconds: 5
      # That it answers; a pod that drains is NOT_SERVING, and is let go on.
      livenessProbe:
        tcpSocket:
          port: grpc
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
        {{- if .Values.storage.enabled }}
        - name: data
          mountPath: /var/lib/qkvd
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "qkvd.name" . }}
    {{- if and .Values.storage.enabled (eq .Values.kind "DaemonSet") }}
    - name: data
      hostPath:
        path: {{ .Values.storage.hostPath }}
        type: DirectoryOrCreate
    {{- end }}
{{- end }}
