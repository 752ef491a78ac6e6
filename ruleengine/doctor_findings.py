"""What `gpuwarden doctor engine` looks for. docs/doctor.md is made from this."""

from __future__ import annotations

from gpuwarden.findings import Known

CONFIG = Known(
    "engine.config",
    "engine.yaml and every file that it names can be used",
    "The engine does not start, or goes on with what it read last.",
    "Mend what is named; `gpuwarden engine --config FILE --check` says it with line and column.",
    "docs/runbooks/rules-reload-failed.md",
)
SECRET_FILES = Known(
    "engine.secret_files",
    "secrets are read by the engine's user alone",
    "Whoever reads the engine's key can command every agent; with a token, act as its owner.",
    "chmod 0400 (0440 with a group of the engine's own), and chown to the engine's user.",
    "docs/operations.md#secrets",
)
ANSWER = Known(
    "engine.answer",
    "the engine answers and is ready",
    "While it is down nothing is judged, nobody is told, and nothing is ended.",
    "Look at its log; /-/ready says what it lacks.",
    "docs/runbooks/engine-down.md",
)
TICKS = Known(
    "engine.ticks",
    "ticks complete in time",
    "Rules are judged late or not at all; nothing is ended on old data.",
    "See why the last tick was discarded: the engine's log and its page of health.",
    "docs/runbooks/engine-stalled.md",
)
RULE_HASH = Known(
    "engine.rule_hash",
    "the rules in force are those on disk",
    "What people read in the files is not what jobs are judged by.",
    "Mend the files, or tell the engine to read them (SIGHUP); look at its log.",
    "docs/runbooks/rules-reload-failed.md",
)
ENFORCEMENT = Known(
    "engine.enforcement",
    "nothing holds every end back",
    "Rules in enforce only tell; memory that is held in vain is not given back.",
    "If it is not wanted: `gpuwarden enforcement`, the kill switch, or what the reason names.",
    "docs/runbooks/enforcement-halted.md",
)
ZONES = Known(
    "engine.zones",
    "every time zone of rules and directory is known here",
    "Times in notices are wrong, and hours of rules are not kept.",
    "Install the system's time zone data (tzdata), or correct the name.",
)
CLOCKS = Known(
    "engine.clocks",
    "engine, Prometheus and nodes have the same time",
    "Beyond 5 s nothing is ended: data of another time proves nothing.",
    "Run chrony or systemd-timesyncd on the machine that is named.",
    "docs/runbooks/engine-clock-skew.md",
)
PROMETHEUS = Known(
    "prometheus.answer",
    "every Prometheus answers",
    "Without it no tick completes.",
    "Is it running, and are address and credentials in engine.yaml right?",
    "docs/runbooks/prometheus-replica-down.md",
)
NODES = Known(
    "prometheus.nodes",
    "every expected node is scraped and has a current snapshot",
    "Nothing is known of a dark node's jobs; with over a tenth dark nothing is ended anywhere.",
    "On the node: `gpuwarden doctor node`. Gone for good: `gpuwarden nodes forget`.",
    "docs/runbooks/exporter-down.md",
)
INTERVAL = Known(
    "prometheus.interval",
    "nodes are scraped as often as engine.yaml says",
    "Windows count samples: scraped less often, every verdict is UNKNOWN.",
    "Make scrape_interval of the job `gpuwarden` in prometheus.yml and in engine.yaml the same.",
    "docs/runbooks/verdicts-unknown.md",
)
TARGETS = Known(
    "prometheus.targets",
    "each node is one target",
    "Jobs of a node that is scraped twice are not judged; recorded sums count its cards double.",
    "Remove the second target; replicas are named under `prometheus.replicas`, not scraped twice.",
    "docs/runbooks/scraped-twice.md",
)
LABELS = Known(
    "prometheus.labels",
    "labels arrive as the exporters give them",
    "Joins fail without a word: job_id, user or uuid were renamed or overwritten.",
    "Remove honor_labels, target labels and relabelling that use a name of gpuwarden's labels.",
    "docs/runbooks/verdicts-unknown.md",
)
METRICS = Known(
    "prometheus.metrics",
    "every lit node tells of its cards, and no collector fails",
    "Rules that need what is missing are UNKNOWN for the jobs of that node.",
    "On the node: `gpuwarden doctor node`; look for metric_relabel_configs that drop series.",
    "docs/runbooks/collector-failing.md",
)
RECORDED = Known(
    "prometheus.rules",
    "recording and health rules are loaded, of this version",
    "Dashboards and reports are empty or wrong; nobody is told when gpuwarden itself fails.",
    "Copy alerting/rules of this version to Prometheus' rule_files and reload it.",
    "alerting/README.md",
)
WATCHED = Known(
    "prometheus.engine",
    "Prometheus scrapes the engine",
    "Nobody is told when the engine is down, and boards show no decisions.",
    "Add the scrape job gpuwarden-engine (alerting/prometheus.yml); check web.metrics_token_file.",
    "docs/runbooks/engine-down.md",
)
ALERTMANAGER = Known(
    "alertmanager.answer",
    "every Alertmanager answers, and they know each other",
    "Owners are not told, and without a proven notice nothing severe follows.",
    "Is it running, is the address right, and do all replicas have each other as peers?",
    "docs/runbooks/no-alertmanager.md",
)
ROUTES = Known(
    "alertmanager.routes",
    "the routes in force let every notice through",
    "A notice that is muted, grouped too long or not proven ends nothing, and nobody knows why.",
    "`gpuwarden alerting check alertmanager.yml` shows each place.",
    "alerting/README.md",
)
PAGED = Known(
    "alertmanager.prometheus",
    "Prometheus sends its alerts to the same Alertmanagers",
    "The health rules fire, and nobody hears of it.",
    "Name every replica under alerting.alertmanagers in prometheus.yml.",
    "docs/runbooks/alertmanager-send-fails.md",
)
AGENTS = Known(
    "agents.answer",
    "every node's agent answers",
    "Jobs on that node can be judged but not ended.",
    "On the node: `gpuwarden doctor node`; check agents.url, firewall and TLS.",
    "docs/runbooks/agent-unreachable.md",
)
KEYS = Known(
    "agents.keys",
    "every agent accepts the engine's key",
    "It refuses every request of this engine.",
    "Put the engine's public key (engine.pub) into the agent's folder --keys.",
    "docs/runbooks/agent-unreachable.md",
)
DIRECTORY = Known(
    "directory.people",
    "everybody who uses a card has a team and can be told",
    "No job of theirs is ended, since no notice reaches them; budgets and reports miss them.",
    "Add them to directory.yaml; `gpuwarden directory check` says what is incomplete.",
    "docs/people.md",
)
MAIL = Known(
    "channels.email",
    "the mail server takes the engine's login",
    "Notices by mail are not delivered.",
    "Check smtp in engine.yaml: host, port, tls, user and password.",
    "docs/runbooks/notices-failing.md",
)
SLACK = Known(
    "channels.slack",
    "Slack accepts the token, with the right to write",
    "Notices by Slack are not delivered.",
    "Make a new bot token with the scope chat:write.",
    "docs/runbooks/notices-failing.md",
)
BOTS = Known(
    "channels.bots",
    "bots in groups can be reached",
    "Groups do not read along.",
    "`gpuwarden notices send-test` sends them a message: it cannot be known without one.",
    "docs/runbooks/notices-failing.md",
)
LEDGER = Known(
    "ledger.whole",
    "the ledger is whole and of this version",
    "A damaged ledger stops the engine: nothing is ended on what is not certain.",
    "`gpuwarden ledger check`, then restore the newest backup.",
    "docs/operations.md#back-up",
)
DISK = Known(
    "ledger.disk",
    "there is room for the ledger",
    "What cannot be written down is not done: nothing is told or ended.",
    "Free some space, or move the ledger to a larger disk.",
    "docs/operations.md#back-up",
)
GRAFANA = Known(
    "grafana.answer",
    "Grafana answers and has the boards",
    "People see no boards, or those of another version.",
    "Provision grafana/dashboards of this version.",
    "grafana/README.md",
)
SCHEDULER = Known(
    "scheduler.answer",
    "the scheduler tells its queue, and may ask jobs to leave",
    "The pages of queue and calendar are old or empty; nobody is asked to leave politely.",
    "Start it, or give it the token that engine.yaml names; give it one with the role scheduler.",
    "docs/runbooks/scheduler-down.md",
)

KNOWN: tuple[Known, ...] = (
    *(CONFIG, SECRET_FILES, ANSWER, TICKS, RULE_HASH, ENFORCEMENT, ZONES, CLOCKS),
    *(PROMETHEUS, NODES, INTERVAL, TARGETS, LABELS, METRICS, RECORDED, WATCHED),
    *(ALERTMANAGER, ROUTES, PAGED, AGENTS, KEYS, DIRECTORY, MAIL, SLACK, BOTS, LEDGER, DISK),
    *(GRAFANA, SCHEDULER),
)
"""Every check at the centre, in the order in which they are told."""
