{{- define "gpuwarden.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels that select: they never change between versions. Takes (dict "root" $ "component" "engine"). */}}
{{- define "gpuwarden.selector" -}}
app.kubernetes.io/name: gpuwarden
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "gpuwarden.labels" -}}
{{ include "gpuwarden.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* An image with its registry and tag. Takes (dict "root" $ "image" "gpuwarden/node"). */}}
{{- define "gpuwarden.image" -}}
{{- $image := printf "%s:%s" .image (default .root.Chart.AppVersion .root.Values.image.tag) -}}
{{- with .root.Values.image.registry }}{{ printf "%s/%s" (trimSuffix "/" .) $image }}{{ else }}{{ $image }}{{ end -}}
{{- end -}}

{{/* engine.yaml: what the chart knows, and over it what the values say. */}}
{{- define "gpuwarden.engineConfig" -}}
{{- $scheme := ternary "https" "http" (ne .Values.agent.tlsSecret "") -}}
{{- $own := dict
  "version" 1
  "scrape_interval" .Values.monitoring.interval
  "rules" (list "rules/*.yaml")
  "directory" "directory/directory.yaml"
  "ledger" "/var/lib/gpuwarden/ledger.sqlite"
  "kill_switch" "/var/lib/gpuwarden/halt"
  "web" (dict
    "listen" (printf "0.0.0.0:%d" (int .Values.engine.service.port))
    "token_file" "/secrets/notify_token"
    "operator_token_file" "/secrets/operator_token")
-}}
{{- if .Values.agent.enabled -}}
{{- $url := printf "%s://{host}:%d" $scheme (int .Values.agent.port) -}}
{{- $_ := set $own "agents" (dict "url" $url "key_file" "/secrets/engine.key") -}}
{{- end -}}
{{- if .Values.engine.endPods.enabled -}}
{{- $_ := set $own "kubernetes" (dict "namespaces" .Values.engine.endPods.namespaces) -}}
{{- end -}}
{{- if .Values.scheduler.enabled -}}
{{- $address := printf "%s-scheduler.%s:%d" (include "gpuwarden.fullname" .) .Release.Namespace (int .Values.scheduler.service.port) -}}
{{- $_ := set $own "scheduler" (dict "url" (printf "http://%s" $address)) -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $own (deepCopy .Values.engine.config)) -}}
{{- end -}}

{{/* What exporter and agent are told of their node and its driver. */}}
{{- define "gpuwarden.nodeEnv" -}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
# Every card, for reading; none is allocated, so that none is taken from trainings.
- {name: NVIDIA_VISIBLE_DEVICES, value: all}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: utility}
{{- end -}}

{{/* Less than the interval, as Prometheus demands. */}}
{{- define "gpuwarden.scrapeTimeout" -}}
{{- $seconds := trimSuffix "s" .Values.monitoring.interval | int -}}
{{- printf "%ds" (max 1 (sub $seconds 1)) -}}
{{- end -}}

{{/* Ports that the engine connects to: those of networkPolicy.egressPorts, and of whatever values name. */}}
{{- define "gpuwarden.egressPorts" -}}
{{- $config := .Values.engine.config -}}
{{- $ports := .Values.networkPolicy.egressPorts | default list -}}
{{- if .Values.agent.enabled }}{{ $ports = append $ports .Values.agent.port }}{{ end -}}
{{- with $config.smtp }}{{ $ports = append $ports (get . "port" | default 587) }}{{ end -}}
{{- if .Values.scheduler.enabled }}{{ $ports = append $ports .Values.scheduler.service.port }}{{ end -}}
{{- $named := toJson (list $config.alertmanagers $config.prometheus $config.agents $config.scheduler) -}}
{{- $whole := list -}}
{{- range concat $ports (include "gpuwarden.portsOf" $named | fromJsonArray) }}{{ $whole = append $whole (int .) }}{{ end -}}
{{- $whole | uniq | toJson -}}
{{- end -}}

{{/* Ports of every address in a text of JSON. */}}
{{- define "gpuwarden.portsOf" -}}
{{- $ports := list -}}
{{- range regexFindAll "https?://[^\"\\s]+" . -1 -}}
{{- $port := regexReplaceAll "^https?://[^/]*?(:([0-9]+))?(/.*)?$" . "${2}" -}}
{{- $ports = append $ports (int (default (ternary 443 80 (hasPrefix "https:" .)) $port)) -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* The policy with what the chart must know of it, or the reason why this is no place for it. */}}
{{- define "gpuwarden.policy" -}}
{{- $policy := .Values.scheduler.policy | fromYaml -}}
{{- if hasKey $policy "Error" -}}
{{- fail (printf "scheduler.policy is no YAML: %s" $policy.Error) -}}
{{- end -}}
{{- if ne (toString $policy.engine) "kueue" -}}
{{- fail "scheduler.policy: give a policy with `engine: kueue`, by --set-file scheduler.policy=policy.yaml; the others' daemons run where Slurm's clients or the cards are (docs/deployment.md#the-scheduler)" -}}
{{- end -}}
{{- $kueue := default dict $policy.kueue -}}
{{- $namespace := default "gpuwarden" $kueue.namespace -}}
{{- if ne $namespace .Release.Namespace -}}
{{- fail (printf "scheduler.policy: kueue.namespace is %s and the release's is %s: `gpuwarden policy apply` makes the controller's account there, so both must be the same" $namespace .Release.Namespace) -}}
{{- end -}}
{{- if $kueue.image -}}
{{- fail "scheduler.policy: with kueue.image `gpuwarden policy apply` makes a Deployment of its own; leave it out, or scheduler.enabled" -}}
{{- end -}}
{{- if or $kueue.kubeconfig $kueue.context -}}
{{- fail "scheduler.policy: kueue.kubeconfig and kueue.context name what the pod has not; leave them out: commands go by KUBECONFIG or ~/.kube/config then, as kubectl does" -}}
{{- end -}}
{{- toYaml (dict "kueue" (dict "cohort" (default "gpuwarden" $kueue.cohort))) -}}
{{- end -}}
