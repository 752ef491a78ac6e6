"""Where a click leads: from a row of a table to the board, the engine's page or the logs of it.

An address is written in Grafana's variables, which it fills in per row: a field is named by the
heading of its column. Between boards the data source, the cluster and the shown time are kept.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from urllib.parse import quote

from grafana import sites

_KEPT = "${datasource:queryparam}&${cluster:queryparam}&${__url_time_range}"


@dataclass(frozen=True, slots=True)
class Link:
    """An entry of the menu behind a cell or a series.

    Attributes:
        title: what the reader sees.
        url: address, in Grafana's variables.
        elsewhere: whether it leaves Grafana, and opens beside it.
    """

    title: str
    url: str
    elsewhere: bool = False


def to_node(heading: str = "Node") -> Link:
    """To the board of the node that the column `heading` names."""
    return Link("Node", f"/d/gpuwarden-node?var-node={_field(heading)}&{_KEPT}")


def to_card(node: str = "Node", gpu: str = "GPU") -> Link:
    """To the board of one card."""
    return Link("GPU", f"/d/gpuwarden-node?var-node={_field(node)}&var-gpu={_field(gpu)}&{_KEPT}")


def to_job(heading: str = "Job") -> Link:
    """To the board of the job that the column `heading` names."""
    return Link("Job", f"/d/gpuwarden-job?var-job_id={_field(heading)}&{_KEPT}")


def to_job_of_series() -> Link:
    """To the board of the job whose series it is: a click on a line of a graph."""
    return Link("Job", f"/d/gpuwarden-job?var-job_id=${{__field.labels.job_id}}&{_KEPT}")


def to_engine_job(heading: str = "Job") -> Link:
    """To the engine's page of a job: what was seen, what comes next, and why."""
    return Link("Why (engine)", f"${{engine}}/jobs/{_field(heading)}", elsewhere=True)


def to_engine(page: str, title: str) -> Link:
    """To a page of the engine that is not of one job: `rules`, `decisions`, `protections`."""
    return Link(title, f"${{engine}}/{page}", elsewhere=True)


def to_logs(heading: str = "Job") -> tuple[Link, ...]:
    """To the job's output in Loki; nothing where the site has none (`sites.LOKI`)."""
    return _logs(_field(heading))


def job_links(heading: str = "Job") -> tuple[Link, ...]:
    """Everything that a row of a job leads to, the board first."""
    return (to_job(heading), to_engine_job(heading), *to_logs(heading))


def logs_of_variable() -> tuple[Link, ...]:
    """To the output of the job that the board shows; nothing where the site has no Loki."""
    return _logs("${job_id}")


def _logs(job: str) -> tuple[Link, ...]:
    if not sites.LOKI:
        return ()
    state = {
        "datasource": sites.LOKI,
        "queries": [{"refId": "A", "expr": f'{{{sites.LOG_LABEL}="<job>"}}'}],
        "range": {"from": "<from>", "to": "<to>"},
    }
    # Explore takes its state as JSON in the address; Grafana's variables stay legible in it.
    address = quote(json.dumps(state, separators=(",", ":")), safe="<>")
    for place, variable in (("<job>", job), ("<from>", "${__from}"), ("<to>", "${__to}")):
        address = address.replace(place, variable)
    return (Link("Logs", f"/explore?left={address}"),)


def _field(heading: str) -> str:
    return f'${{__data.fields["{heading}"]}}'
