"""What Grafana would do with the boards' expressions, by hand: no Grafana server runs in tests.

Variables are replaced; stats and tables ask for one moment, graphs for a range.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from grafana import build, lint
from tests.grafana.scenarios import HEALTHY, Scenario

if TYPE_CHECKING:
    from tests.servers import Server

EVERYTHING = dict.fromkeys(
    ("$cluster", "$node", "$gpu", "$team", "$user", "$job_id", "$rule"), ".*"
)
CHOSEN = {"gpuwarden-job": {"$job_id": "j-cho"}, "gpuwarden-node": {"$node": "n1:9835"}}
"""What a reader must choose before a board shows anything: board -> variables."""

SECONDS = {"h": 3600, "m": 60}


@dataclass(frozen=True)
class Target:
    """A query of a panel of a board."""

    board: str
    panel: dict[str, Any]
    target: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.board}: {self.panel['title']}: {self.target['refId']}"

    @property
    def instant(self) -> bool:
        """Whether it asks for one moment."""
        return bool(self.target.get("instant", False))

    def ask(
        self,
        server: Server,
        scenario: Scenario = HEALTHY,
        *,
        over: str = "",
        **variables: str,
    ) -> list[dict[str, Any]]:
        """The series that the panel gets; the arguments are those of `ask`."""
        chosen = CHOSEN.get(self.board, {}) | {f"${name}": at for name, at in variables.items()}
        return ask(
            server, self.target["expr"], scenario, instant=self.instant, over=over, chosen=chosen
        )


def ask(
    server: Server,
    expression: str,
    scenario: Scenario = HEALTHY,
    *,
    instant: bool,
    over: str = "",
    chosen: dict[str, str] | None = None,
) -> list[dict[str, Any]]:
    """The series of an expression at the end of a scenario.

    Args:
        server: the Prometheus.
        expression: with Grafana's variables.
        scenario: whose window is shown.
        instant: whether one moment is asked for.
        over: shown time, as `50m`; all of the window if not given.
        chosen: values of variables, with their dollar; everything else is `.*`.
    """
    window = scenario.window
    whole = f"{(window.end - window.start) // 60}m"
    shown = over or whole
    seconds = int(shown[:-1]) * SECONDS[shown[-1]]
    step = max(60, seconds // 288)
    rates = f"{max(120, step)}s"
    values = EVERYTHING | {
        "$__range": shown,
        "$__range_s": str(seconds),
        "$__rate_interval": rates,
        "$__interval": f"{step}s",
    }
    values |= chosen or {}
    for name in sorted(values, key=len, reverse=True):
        expression = expression.replace(name, values[name])
    # "$1" is of label_replace: Grafana leaves alone what names no variable
    assert not re.search(r"\$[a-zA-Z_{]", expression)
    if instant:
        return server.query(expression, at=window.end)
    words = {
        "query": expression,
        "start": window.end - seconds + (600 if shown == whole else 0),
        "end": window.end,
        "step": step,
    }
    answer = server.json("/api/v1/query_range?" + urllib.parse.urlencode(words))
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def offered(server: Server, variable: dict[str, Any], scenario: Scenario = HEALTHY) -> list[str]:
    """What a variable's drop-down lists."""
    match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
    assert match is not None
    selector = match[1]
    for name, value in EVERYTHING.items():
        selector = selector.replace(name, value)
    words = {"match[]": selector, "start": scenario.window.start, "end": scenario.window.end}
    answer = server.json(f"/api/v1/label/{match[2]}/values?{urllib.parse.urlencode(words)}")
    values: list[str] = answer["data"]
    return values


def value(
    server: Server, title: str, ref: str = "A", scenario: Scenario = HEALTHY, *, over: str = ""
) -> list[float]:
    """The values of one query of the panel with this title, at the end."""
    return [
        float(row["value"][1]) for row in target_of(title, ref).ask(server, scenario, over=over)
    ]


def target_of(title: str, ref: str = "A") -> Target:
    """The one query of the panel with this title."""
    (found,) = [t for t in TARGETS if (t.panel["title"], t.target["refId"]) == (title, ref)]
    return found


BOARDS = [json.loads(path.read_text()) for path in sorted(build.FOLDER.glob("*.json"))]
PANELS = [
    (board["uid"], panel)
    for board in BOARDS
    for panel in lint.every_panel(board)
    if panel.get("targets")
]
TARGETS = [Target(board, panel, target) for board, panel in PANELS for target in panel["targets"]]
TABLES = [(board, panel) for board, panel in PANELS if panel["type"] == "table"]
