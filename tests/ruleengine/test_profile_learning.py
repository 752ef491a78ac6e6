"""`gpuwarden profiles` on a real Prometheus, whose history holds healthy runs and sick ones."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from tests.servers import free_port

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.histories import history
from gpuwarden.ruleengine.loading import check_rule_files
from gpuwarden.ruleengine.profile_cli import profiles
from gpuwarden.ruleengine.rule_tests import RuleTest
from gpuwarden.ruleengine.temporary_servers import temporary_prometheus

if TYPE_CHECKING:
    from pathlib import Path

START = dt.datetime(2026, 11, 1, 8, 0, tzinfo=dt.UTC)
END = START + dt.timedelta(minutes=75)
HISTORY = (
    *("--from", START.isoformat(), "--to", END.isoformat()),
    *("--scrape-interval", "60s"),
)
A100 = "NVIDIA A100-SXM4-40GB"


def a_run(name: str, **changes: Any) -> dict[str, Any]:
    """What a trainer declares."""
    return {"id": name, "model": "yolov8m", "batch": 64, "imgsz": 640, "amp": True, **changes}


def a_job(name: str, rate: float = 100.0, **changes: Any) -> dict[str, Any]:
    """A healthy training on a node of its own."""
    return {
        "job": f"proc-{name}",
        "user": "ana",
        "node": f"{name}:9835",
        "throughput": f"{rate} img/s",
        "utilization": "85%",
        "memory": "10GiB",
        "run": a_run(name),
        **changes,
    }


SHARED = {"node": "shared:9835", "uuids": ["GPU-shared"]}
RESUMED = {"run": a_run("resumed"), "node": "resumed:9835"}
GONE = {"gone": True}
JOBS = [
    a_job("one"),
    a_job("two", rate=102.0, user="bo"),
    # Its node is dark for a quarter of an hour.
    a_job("gap", rate=99.0),
    # A run in two attempts, of which none trains for long enough alone.
    a_job("first", rate=101.0, **RESUMED, then=[{"at": "25m", **GONE}]),
    a_job("second", rate=101.0, **RESUMED, begins="27m", then=[{"at": "52m", **GONE}]),
    a_job("sick", rate=40.0, utilization="35%"),
    a_job("hung", rate=0.0, utilization="0%"),
    a_job("small", rate=0.0, run=a_run("small", model="yolov8n", batch=8)),
    a_job("crash", then=[{"at": "9m", **GONE}]),
    a_job("host", rate=55.0, **SHARED),
    a_job("guest", rate=55.0, **SHARED, run=None),
    a_job("guessed", source="cmdline"),
    a_job("broke", rate=101.0),
    a_job("allowed", rate=100.5),
    a_job("twin", rate=100.0, run=a_run("twins")),
    a_job("other-twin", rate=100.0, run=a_run("twins")),
    *(
        a_job(f"slice-{n}", rate=20.0, mig="3g.20gb", run=a_run(f"slice-{n}", model="yolov8n"))
        for n in range(3)
    ),
    # Of four cards that it was given it uses one: what it shows is no measure for four.
    a_job("one-of-four", gpus=4, cards=[{}, *[{"utilization": "0%", "memory": "0GiB"}] * 3]),
    a_job("exact", rate=60.0, run=a_run("exact", amp=False)),
    a_job("exact-too", rate=61.0, run=a_run("exact-too", amp=False)),
]
SERIES = [
    (
        "gpuwarden_violation_active",
        "job_id='proc-broke',rule='idle-held',level='light'",
        "_x20 1x10",
    ),
    (
        "gpuwarden_violation_active",
        "job_id='proc-allowed',rule='off-profile',level='light'",
        "_x20 1x10",
    ),
    ("yolo_devices", "job_id='proc-one-of-four',run_id='one-of-four'", "1x75"),
    ("yolo_devices", "job_id='proc-one',run_id='one'", "1x75"),
]


def the_history() -> RuleTest:
    """An hour and a quarter of 22 jobs."""
    return RuleTest.model_validate(
        {
            "name": "a history",
            "start": START.isoformat(),
            "interval": "60s",
            "jobs": JOBS,
            "series": [
                {"series": f"{name}{{{labels}}}".replace("'", '"'), "values": values}
                for name, labels, values in SERIES
            ],
            "outages": [{"node": "gap:9835", "from": "20m", "until": "35m"}],
            "expect": [{"at": "75m", "rule": "x", "job": "proc-one", "verdict": "no"}],
        }
    )


OLD_FILE = """\
version: 1

# Ours: what the vision team measured by hand.
profiles:

  # Before the new driver.
  - {model: yolov8m, batch: 64, imgsz: 640, amp: true, hardware: "NVIDIA A100-SXM4-40GB",
     throughput: 80 img/s}   # too slow
  # Nobody has run this since.
  - model: yolov8n
    batch: 16
    imgsz: 640
    hardware: "Tesla T4"
    throughput: 60 img/s
    tolerance: 20%
  - {model: yolov8n, batch: 8, imgsz: 640, hardware: "NVIDIA A100-SXM4-40GB",
     throughput: 60 img/s}

# And nobody is whitelisted.
"""


def engine(folder: Path, url: str) -> Path:
    """An engine.yaml with two replicas, of which the first is down."""
    (folder / "token").write_text("secret")
    path = folder / "engine.yaml"
    path.write_text(
        f"version: 1\nprometheus: {{replicas: ['http://127.0.0.1:{free_port()}', '{url}'], "
        "bearer_token_file: token}\nrules: [rules.yaml]\n"
    )
    return path


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the commands said, all of the same server."""
    folder = tmp_path_factory.mktemp("profiles")
    file = folder / "rules.yaml"
    file.write_text(OLD_FILE)

    async def story() -> dict[str, Any]:
        async with temporary_prometheus(history(the_history())) as url:

            async def call(*arguments: str) -> Result:
                server = ("--prometheus", url, *HISTORY)
                if arguments[0] == "learn":
                    server += ("--min-trained", "20m")
                return await asyncio.to_thread(
                    CliRunner().invoke, profiles, [arguments[0], *server, *arguments[1:]]
                )

            found: dict[str, Any] = {
                "yaml": await call("learn"),
                "json": await call("learn", "-o", "json", "--min-users", "2"),
                "little": await call("learn", "--min-runs", "9", "-o", "table"),
                "diff": await call("learn", "--merge", str(file), "--diff"),
            }
            found["unchanged"] = file.read_text()
            found["merge"] = await call("learn", "--merge", str(file))
            found["merged"] = file.read_text()
            found["again"] = await call("learn", "--merge", str(file))
            found["twice"] = file.read_text()
            found["config"] = await asyncio.to_thread(
                CliRunner().invoke,
                profiles,
                ["learn", "--config", str(engine(folder, url)), *HISTORY, "--min-trained", "20m"],
            )
            found["shown"] = await call("show", str(file), "-o", "json")
            found["table"] = await call("show", str(file))
            return found

    return asyncio.run(story())


def left_out(result: Result) -> dict[str, str]:
    """Run -> why it was left out."""
    document = json.loads(result.stdout)
    rows = [row for part in ("profiles", "too_little") for row in document[part]]
    return {item["run_id"]: item["why"] for row in rows for item in row["left_out"]}


def test_what_was_learnt_is_a_rule_file(asked: dict[str, Any], tmp_path: Path) -> None:
    """With the median of healthy runs, their spread, and where it comes from."""
    result = asked["yaml"]
    assert result.exit_code == 0, result.output
    path = tmp_path / "learnt.yaml"
    path.write_text(result.stdout)
    checked = check_rule_files([path])
    assert checked.rules is not None, checked.render()
    part, profile = sorted(checked.rules.profiles, key=lambda found: len(found.model_fields_set))
    # A MIG instance is a card of its own; before Hopper its utilization is not measured.
    assert (part.model, part.hardware) == ("yolov8n", f"{A100} MIG 3g.20gb")
    assert (part.throughput, part.gpu_utilization) == (pytest.approx(20.0), None)
    assert (profile.model, profile.batch, profile.imgsz, profile.amp) == ("yolov8m", 64, 640, True)
    assert (profile.hardware, profile.gpus) == (A100, 1)
    assert profile.throughput == pytest.approx(100.5, rel=0.01)
    assert profile.gpu_memory == pytest.approx(10 * 2**30, rel=0.01)
    assert profile.gpu_utilization == pytest.approx(0.85)
    assert profile.tolerance is not None
    assert 0.05 <= profile.tolerance <= 0.08
    assert "# Learnt from 5 runs of 2 people, 2026-11-01 to 2026-11-01, " in result.stdout
    assert "# throughput 99 img/s to 102 img/s; gpu_memory 10 GiB to 10 GiB" in result.stdout


def test_each_run_that_was_not_learnt_from_is_named_with_its_reason(
    asked: dict[str, Any],
) -> None:
    """Sick, shared, crashed, guessed, in breach, or claimed by two."""
    why = left_out(asked["json"])
    assert why.pop("sick") == "outlier: throughput 40 img/s, where 100 img/s is usual"
    assert "another job held one of its cards" in why.pop("host")
    for hung in ("hung", "small"):
        assert "not one image was trained" in why.pop(hung)
    assert why.pop("crash").startswith("it trained for 0 min that count; 20 min are needed")
    assert "guessed from its command line" in why.pop("guessed")
    assert why.pop("broke") == "it broke idle-held"
    assert why.pop("twins") == "two jobs claimed the run at the same time"
    assert why == {}
    assert "  left out: run sick (proc-sick): outlier: " in asked["yaml"].stderr


def test_attempts_of_a_run_count_once_and_a_dark_node_does_no_harm(asked: dict[str, Any]) -> None:
    """The resumed run has both of its jobs; the gap only costs windows."""
    (row,) = json.loads(asked["json"].stdout)["profiles"]  # of two people
    assert set(row["jobs"]) == {
        *("proc-one", "proc-two", "proc-gap", "proc-allowed"),
        *("proc-first", "proc-second"),
    }
    assert row["signals"]["throughput"]["runs"] == 5
    assert row["signals"]["throughput"]["low"] == pytest.approx(99, rel=0.01)


def test_another_precision_is_another_kind(asked: dict[str, Any]) -> None:
    """Two runs of it are too few, and are not mixed with the others."""
    document = json.loads(asked["json"].stdout)
    rows = document["too_little"]
    row, part = (row for row in rows if row["left_out"] == [])
    assert part["why"] == "1 of 2 people"
    assert row["kind"] == f"yolov8m, batch 64, 640 px, no AMP on {A100}"
    assert row["why"] == "2 of 3 healthy runs, 1 of 2 people"


def test_the_engines_own_servers_can_be_asked(asked: dict[str, Any]) -> None:
    """With its credentials; a replica that is down is told, and the next one answers the same."""
    result = asked["config"]
    assert result.exit_code == 0, result.output
    assert "the next replica is asked" in result.stderr
    assert result.stdout == asked["yaml"].stdout


def test_a_training_on_some_of_the_cards_that_it_holds_is_of_no_kind(
    asked: dict[str, Any],
) -> None:
    """Its batch is not spread over all of them; the others' figures would be taken for its own."""
    known = json.loads(asked["json"].stdout)["not_known"]
    assert known == {"proc-one-of-four": "it trains on more or fewer cards than it holds"}


def test_too_little_is_no_profile(asked: dict[str, Any]) -> None:
    """Exit status 1, and what was lacking of each kind."""
    result = asked["little"]
    assert result.exit_code == 1
    assert f"No profile of yolov8m, batch 64, 640 px, AMP on {A100}: 5 of 9 healthy runs" in (
        result.stderr
    )
    assert "No profile was learnt from 2026-11-01 to 2026-11-01: " in result.stderr


def test_a_file_is_merged_into_without_losing_a_comment(asked: dict[str, Any]) -> None:
    """Only the lines of the same kind are other ones; once more changes nothing."""
    assert asked["diff"].exit_code == 0
    assert asked["unchanged"] == OLD_FILE
    assert "-     throughput: 80 img/s}   # too slow" in asked["diff"].stdout
    assert asked["merge"].stdout == asked["diff"].stdout
    old, new = OLD_FILE.split("\n"), asked["merged"].split("\n")
    learnt = [text.split()[0] for text in new if text not in old]
    assert learnt == ["#", "#", "#", "-", "#", "#", "-"]
    assert [text for text in old if text not in new] == old[6:8]
    assert asked["twice"] == asked["merged"]
    assert asked["again"].stdout == ""


def test_profiles_are_shown_beside_estimate_and_measurement(asked: dict[str, Any]) -> None:
    """One that fits, one that nobody ran, and a kind that has no profile."""
    rows = json.loads(asked["shown"].stdout)["comparisons"]
    known = {row["kind"]: row for row in rows if row["signal"] == "throughput"}
    fitting = known[f"yolov8m, batch 64, 640 px, AMP on {A100}"]
    assert fitting["remark"] == "fits"
    assert abs(fitting["deviation"]) < 0.02
    assert fitting["estimate"][0] < fitting["estimate"][1]
    assert known["yolov8n, batch 16, 640 px, AMP on Tesla T4"]["remark"] == "never seen"
    hung = known[f"yolov8n, batch 8, 640 px, AMP on {A100}"]
    assert hung["remark"] == "seen, but nothing of it counts"
    assert known[f"yolov8m, batch 64, 640 px, no AMP on {A100}"]["remark"] == "no profile"
    head = asked["table"].stdout.splitlines()[0].split()
    assert head == ["TRAINING", "SIGNAL", "PROFILE", "ESTIMATE", "MEASURED", "RUNS", "OFF"]


def test_a_server_that_is_away_is_named() -> None:
    """Exit status 3, and which address it was."""
    url = f"http://127.0.0.1:{free_port()}"
    result = CliRunner().invoke(profiles, ["learn", "--prometheus", url])
    assert isinstance(result.exception, ServiceUnavailable)
    assert f"Prometheus at {url}: " in str(result.exception)


def test_shipped_profiles_are_shown_without_a_server() -> None:
    """What gpuwarden brings, beside its own formula."""
    result = CliRunner().invoke(profiles, ["show"])
    assert result.exit_code == 0, result.output
    assert "yolov5s, batch 64, 640 px, AMP on Tesla V100-SXM2-16GB" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("learn", "--diff"), "--diff goes with --merge"),
        (("learn", "--from", "yesterday"), "is no moment"),
        (("learn", "--from", "now", "--to", "now"), "at least one --window"),
        (("learn", "--window", "5"), "lacks a unit"),
        (("learn", "--from", "1970-01-02"), "windows are too many"),
        (("show", "/nowhere/rules.yaml", "--window", "0s"), "more than 0s"),
    ],
)
def test_wrong_usage_is_told(arguments: tuple[str, ...], text: str) -> None:
    """Exit status 2, before any server is asked."""
    result = CliRunner().invoke(profiles, list(arguments))
    assert result.exit_code == 2
    assert text in result.stderr
