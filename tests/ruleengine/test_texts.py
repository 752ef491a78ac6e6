"""Both languages say everything, with the same figures in it, and each in its own words."""

from __future__ import annotations

import dataclasses
import re
import string
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.ruleengine.fleets import A100, GIB, NOW_FACTS, a_job, a_profile, a_rule, a_run, fleet_of
from tests.ruleengine.test_cases import fresh

from gpuwarden.exporter.agent.proofs import DOUBTS
from gpuwarden.ruleengine import causes, messages, signals
from gpuwarden.ruleengine.case_records import Case
from gpuwarden.ruleengine.causes import diagnose
from gpuwarden.ruleengine.described import Described, described
from gpuwarden.ruleengine.evaluation import evaluate
from gpuwarden.ruleengine.guards import Blocked
from gpuwarden.ruleengine.layouts import Message
from gpuwarden.ruleengine.messages import Outlook, UpcomingAct
from gpuwarden.ruleengine.model import OwnerMay
from gpuwarden.ruleengine.needs import condition_keys
from gpuwarden.ruleengine.profiles import expectation
from gpuwarden.ruleengine.recipients import NO_ADDRESS
from gpuwarden.ruleengine.records import Decision
from gpuwarden.ruleengine.texts import causes as cause_texts
from gpuwarden.ruleengine.texts import records
from gpuwarden.ruleengine.texts.conditions import seen, words
from gpuwarden.ruleengine.texts.phrases import Phrases
from gpuwarden.ruleengine.texts.speeches import LANGUAGES, PHRASES, speech
from gpuwarden.ruleengine.verdicts import GpuFacts, SignalKey, Truth

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.ruleengine.texts.speeches import Language
    from gpuwarden.ruleengine.verdicts import Verdict

NAMES = [field.name for field in dataclasses.fields(Phrases)]
CHINESE = re.compile("[\u4e00-\u9fff]")
# Names of things, that have no other in Chinese.
BORROWED = {
    "GPU",
    "CPU",
    "SIGTERM",
    "SIGKILL",
    "Alertmanager",
    "I",
    "O",
    "gpuwarden",
    "Slack",
    "agent",
    "notebook",
    "epoch",
    "batch",
    "imgsz",
    "workers",
    "cache",
    "ram",
    "disk",
    "amp",
    "False",
    "train",
    "resume",
    "auto",
    "img",
    "s",
    "GiB",
    "MiB",
}


def _templates(language: Language) -> Iterator[tuple[str, str]]:
    """Every template, those of tables one by one."""
    for name in NAMES:
        found: Any = getattr(PHRASES[language], name)
        if isinstance(found, str):
            yield name, found
        elif isinstance(found, tuple):
            yield from ((f"{name}.{index}", text) for index, text in enumerate(found))
        else:
            yield from ((f"{name}.{key}", text) for key, text in found.items())


def _fields(template: str) -> set[str]:
    joints = {"comma", "semicolon", "colon"}
    return {name for _, name, _, _ in string.Formatter().parse(template) if name} - joints


def test_every_template_has_the_same_placeholders_in_both_languages() -> None:
    """A figure that one language tells, the other tells too."""
    english, chinese = dict(_templates("en")), dict(_templates("zh"))
    assert english.keys() == chinese.keys()
    assert {name: _fields(text) for name, text in english.items()} == {
        name: _fields(text) for name, text in chinese.items()
    }


def test_every_signal_has_a_name_in_both_languages() -> None:
    """A rule about any of them can be told."""
    for language in LANGUAGES:
        assert PHRASES[language].signal_names.keys() == signals.SIGNALS.keys()


def _foreign(text: str) -> set[str]:
    """English words that a Chinese text has beside the names of things."""
    plain = re.sub(r"\{[a-z_]+\}|`[^`]*`", " ", text)
    return {word for word in re.findall(r"[A-Za-z]+", plain) if word not in BORROWED}


def test_no_english_is_left_in_the_chinese_templates() -> None:
    """Only names of programs, signals and options are borrowed."""
    assert {name: _foreign(text) for name, text in _templates("zh") if _foreign(text)} == {}


def test_nothing_is_left_out_in_the_chinese_templates() -> None:
    """A sentence in English is one in Chinese."""
    english = dict(_templates("en"))
    silent = [
        name
        for name, text in _templates("zh")
        if re.search("[A-Za-z]{3}", re.sub(r"\{[a-z_]+\}", "", english[name]))
        and not CHINESE.search(text)
        and name not in ("channel_names.cpu", "card", "card_named")
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("language", "seconds", "text"),
    [
        ("en", 5400, "1h30m"),
        ("zh", 5400, "1 小时 30 分钟"),
        ("en", 0, "0s"),
        ("zh", 0, "0 秒"),
        ("zh", 90061, "1 天 1 小时 1 分钟"),
    ],
)
def test_durations_are_told_in_the_language(language: Language, seconds: float, text: str) -> None:
    """Hours and minutes, not letters, in Chinese."""
    assert speech(language).about(seconds) == text


def test_times_are_told_in_the_zone_and_the_language() -> None:
    """With the day of the week, since weekends are when nobody looks."""
    moment = 1_800_000_000.0
    assert speech("en").time(moment, "Asia/Shanghai") == "Fri 15 Jan 16:00:00 (Asia/Shanghai)"
    assert speech("zh").time(moment, "Asia/Shanghai") == "1月15日（周五）16:00:00（Asia/Shanghai）"


# -- evidence, told again


FIGURES = {
    "gpu_utilization": 0.0,
    "gpu_memory_share": 0.96,
    "gpu_memory": 38 * GIB,
    "throughput": 20.0,
    "data_wait_share": 0.71,
}
CONDITIONS: list[tuple[dict[str, Any], str, str]] = [
    (
        {"signal": "gpu_utilization", "agg": "max", "window": "5m", "at_most": "5%", "gpus": "all"},
        "GPU utilization, highest of the last 5m: GPU 0: 0 % (the rule: at most 5 %, on all GPUs)",
        "GPU 利用率，最近 5 分钟最高值：GPU 0：0 %（规则：不高于 5 %，所有 GPU）",
    ),
    (
        {
            "not": {
                "signal": "gpu_utilization",
                "agg": "max",
                "window": "5m",
                "above": "5%",
                "gpus": "any",
            }
        },
        "GPU utilization, highest of the last 5m: GPU 0: 0 % (the rule: at most 5 %, on all GPUs)",
        "GPU 利用率，最近 5 分钟最高值：GPU 0：0 %（规则：不高于 5 %，所有 GPU）",
    ),
    (
        {
            "signal": "gpu_memory_share",
            "above": "90%",
            "share": "80%",
            "window": "5m",
            "gpus": "any",
        },
        (
            "Share of the GPU memory held, last 5m: GPU 0: 96 % "
            "(the rule: above 90 % in at least 80 % of the time, on any GPU)"
        ),
        "占用的显存比例，最近 5 分钟：GPU 0：96 %（规则：至少 80 %的时间里高于 90 %，任一 GPU）",
    ),
    (
        {"profile": {"throughput": "below 15%"}, "window": "5m"},
        (
            "Throughput, mean of the last 5m: 20 img/s, where 100 img/s is expected "
            "(the rule: more than 15 % below what is expected)"
        ),
        "吞吐量，最近 5 分钟平均值：20 张/秒，预期为100 张/秒（规则：比预期低 15 % 以上）",
    ),
    (
        {"silent_for": "5m", "signals": ["log", "cpu"]},
        "No sign of life for 5m or longer: log never, CPU 2h ago",
        "至少 5 分钟没有任何活动迹象：日志 从未出现，CPU 2 小时前",
    ),
    (
        {"promql": "max by (job_id) (x)", "above": 3},
        "The rule's own figure: 7 (the rule: above 3)",
        "规则自定义的数值：7（规则：高于 3）",
    ),
]


def _judged(condition: dict[str, Any]) -> tuple[Any, Any, Verdict]:
    rule = a_rule(condition)
    keys = {key for each in rule.conditions for key in condition_keys(each)}
    values: dict[SignalKey, Mapping[str, float]] = {}
    for key in keys:
        per_card = key.signal in signals.SIGNALS and signals.SIGNALS[key.signal].per_gpu
        values[key] = {"g0" if per_card else "": FIGURES.get(key.signal, 7.0)}
    job = a_job(
        values,
        gpus=(GpuFacts("g0", "0", A100, 40 * GIB),),
        run=a_run(),
        activity={"cpu": NOW_FACTS - 7200},
        start_time=NOW_FACTS - 90_000,
        first_gpu_use=NOW_FACTS - 86_400,
    )
    verdict = evaluate(
        rule, job, fleet_of(job), profiles=[a_profile()], whitelist=(), now=NOW_FACTS
    )
    return rule, job, verdict


@pytest.mark.parametrize(("condition", "english", "chinese"), CONDITIONS)
def test_evidence_is_told_with_its_figures_and_what_the_rule_asks(
    condition: dict[str, Any], english: str, chinese: str
) -> None:
    """In the words of the reader, never in those of the rule's file."""
    rule, job, verdict = _judged(condition)
    assert verdict.truth is Truth.YES
    expected = expectation(job, [a_profile()]).values
    for language, text in zip(LANGUAGES, (english, chinese), strict=True):
        lines = seen(rule, verdict.evidence, speech(language), gpus={"g0": "0"}, expected=expected)
        assert lines == [text]
        assert words(rule.when, speech(language))


def test_evidence_that_does_not_fit_the_rule_is_told_as_it_was_written() -> None:
    """After a reload the verdict may be of the rule as it was."""
    rule, _, _ = _judged(CONDITIONS[0][0])
    _, _, other = _judged({"all": [CONDITIONS[0][0], CONDITIONS[2][0]]})
    lines = seen(rule, other.evidence, speech("en"), gpus={"g0": "0"}, expected={})
    assert len(lines) == 2
    assert "gpu_utilization" in lines[0]


# -- causes


def test_a_starved_training_is_told_its_workers_and_what_to_raise() -> None:
    """`8 workers, 71 % of the time waiting for data`: the remedy starts from what is set now."""
    job = a_job(
        {
            SignalKey(name, "avg", 300): {"": value}
            for name, value in (
                ("throughput", 20.0),
                ("data_wait_share", 0.71),
                ("job_cpu_cores", 3.2),
                ("job_loader_workers", 8.0),
            )
        },
        run=a_run(),
    )
    _, _, verdict = _judged(CONDITIONS[0][0])
    found = diagnose(job, verdict, [a_profile()])
    assert found.name == causes.DATA_LOADING
    for part in ("8 workers", "71 % of its time", "20 img/s of 100 img/s expected", "3.2 cores"):
        assert part in found.because
    assert found.remedy.startswith("raise workers= above 8")
    chinese = cause_texts.because(found.name, found.figures, speech("zh"))
    for part in ("8 个", "71 %", "20 张/秒", "预期100 张/秒", "3.2 核"):
        assert part in chinese
    assert "8 以上" in cause_texts.remedy(found.name, found.figures, speech("zh"))


def test_a_loader_without_workers_is_told_to_have_some() -> None:
    """`raise workers= above 0` would help nobody."""
    figures = (("wait", 0.9), ("workers", 0.0))
    assert "at least 4" in cause_texts.remedy("data-loading", figures, speech("en"))


# -- a whole notice


ACTS = (
    UpcomingAct("checkpoint", 1_800_000_300.0),
    UpcomingAct("yield", 1_800_000_900.0, 600.0),
    UpcomingAct("terminate", 1_800_001_800.0, 60.0),
)


def _notice(language: Language, **changes: Any) -> Message:
    rule, job, verdict = _judged({"all": [CONDITIONS[0][0], CONDITIONS[4][0]]})
    rule = rule.model_copy(
        update={"description": Described.of({"en": "Held for nothing", "zh": "占而不用"})}
    )
    case = msgspec.structs.replace(
        fresh(),
        user="alice",
        instance="n1:9835",
        detected_at=NOW_FACTS,
        cause="idle",
        because="x",
        remedy="y",
        figures=(("memory", 10 * GIB), ("utilization", 0.0)),
    )
    outlook = Outlook(
        remaining=1800.0,
        grace=60.0,
        owner_may=OwnerMay.model_validate({"keep": "2h", "times": 2}),
        ticket="TICKET",
        link="http://engine:9837/keep/abc",
        work_lost=5400.0,
        saved=True,
        cards=tuple((gpu.uuid, gpu.index, gpu.name) for gpu in job.gpus),
        expected=expectation(job, [a_profile()]).values,
        acts=ACTS,
        cost="5.70 EUR",
    )
    outlook = dataclasses.replace(outlook, **changes)
    texts = messages.in_languages(
        ("en", "zh"),
        lambda speech: messages.notice(
            case,
            rule,
            verdict.evidence,
            outlook,
            speech=speech,
            now=NOW_FACTS,
            zone="Asia/Shanghai",
            engine_url="http://engine:9837",
        ),
    )
    return Message.of(texts, "http://engine:9837/jobs/proc-1", language=language)


def test_a_whole_notice_is_in_the_readers_language() -> None:
    """Subject, headings, figures, steps and times; what is left of English are names."""
    text = f"{_notice('zh').subject}\n{_notice('zh').plain()}"
    assert "占而不用" in text
    assert "Held for nothing" not in text
    for part in ("请求其保存状态", "重新排队", "1月15日（周五）16:05:00", "约 5.70 EUR"):
        assert part in text
    kept = re.sub(r"gpuwarden keep [^\n]*|https?://\S+|yolov8m[^）]*", "", text)
    names = {
        "proc",
        "r",
        "idle",
        "n",
        "Asia",
        "Shanghai",
        "NVIDIA",
        "A",
        "SXM",
        "GB",
        "EUR",
        "a",
        "rule",
    }
    assert _foreign(kept) - names == set()


def test_a_whole_notice_in_english_tells_each_step_with_its_time() -> None:
    """What is done, when at the earliest, and how long the job then has."""
    text = _notice("en").plain()
    for part in (
        "Held for nothing",
        "- from Fri 15 Jan 16:05:00 (Asia/Shanghai) on it is asked to save its state",
        "leave within 10m and be queued again",
        "not before Fri 15 Jan 16:30:00 (Asia/Shanghai) it is ended: SIGTERM, and SIGKILL 1m later",
        "1h30m since its last saved state; 1.5 GPU-hours, about 5.70 EUR",
        "say why: http://engine:9837/keep/abc",
        "--ticket TICKET",
    ):
        assert part in text


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_links_by_which_a_job_is_kept_are_for_its_owner_only(language: Language) -> None:
    """A channel that reads along is told that there are such, and gets none."""
    message = _notice(language)
    assert message.keep_url
    texts = {
        "summary": "s",
        "keep": "k",
        messages.KEEP_LINK: "http://engine/keep/abc",
        messages.KEEP_COMMAND: "gpuwarden keep --ticket TICKET",
    }
    shared = Message.of(texts, "", private=False)
    assert (shared.keep_url, shared.keep_command) == ("", "")
    assert "TICKET" not in shared.plain() + shared.html()
    assert "/keep/" not in shared.plain() + shared.html()


def test_a_language_that_an_alert_does_not_have_is_not_half_spoken() -> None:
    """Headings and texts are of one language, that of the alert."""
    message = Message.of({"summary": "s", "seen": "x", "language": "en"}, "", language="zh")
    assert message.language == "en"
    assert message.parts[0].heading == "Seen"


def test_a_description_may_be_written_in_each_language() -> None:
    """And stays what it was where it is written in one."""
    rule = a_rule(CONDITIONS[0][0], description={"en": "Idle", "zh": "空闲"})
    assert described(rule.description, "zh") == "空闲"
    assert (described(rule.description, "en"), rule.description) == ("Idle", "Idle")
    plain = a_rule(CONDITIONS[0][0], description="Idle")
    assert described(plain.description, "zh") == "Idle"
    assert rule.model_dump(mode="json")["description"] == {"en": "Idle", "zh": "空闲"}


# -- records, which are in English


CHINESE_TELLS = speech("zh")
DECISION = Decision(
    id="1-1-a",
    epoch=1,
    case_id=1,
    rule_id="idle",
    job_id="proc-1",
    user="ana",
    action="terminate",
    state="incomplete",
    host="n1",
    body=b"",
    signature="",
    gpus=("GPU-1",),
    evidence="[]",
    grace=60.0,
    expires=0.0,
    created_at=0.0,
    finished_at=60.0,
)


def test_every_word_that_an_end_can_be_recorded_with_has_a_meaning_in_each_language() -> None:
    """Those of the proof, of the agent's way there, of the platforms and of the engine."""
    words = {
        *("survivors", "processes", "rebooted", "restarted", "unproven", "platform_silent"),
        *("still_running", "still_ending", "returned", "not_returned", "node_lost", "overdue"),
        *("blocked_by_finalizer", "disruption_budget", "incomplete", "failed", *DOUBTS),
    }
    for language in LANGUAGES:
        known = records.MEANINGS.get(language)
        assert language == records.RECORDS or known is not None
        assert known is None or words <= known.keys()


RECORDED = (
    "node-1: survivors: pid 4711 did not end in the time given",
    "still_listed",
    "returned: slurm says PENDING, and it has come back as slurm-c1-4711-1",
    "platform_silent: kubernetes does not say what became of it",
    "something that nobody has foreseen",
)


@pytest.mark.parametrize("reason", RECORDED)
def test_a_record_is_told_in_the_readers_language_and_quoted(reason: str) -> None:
    """Owner and operators: outside of the quotation nothing is in English."""
    decision = dataclasses.replace(DECISION, state="incomplete", reason=reason)
    for texts in (
        messages.ended(decision, None, speech=CHINESE_TELLS, zone="UTC"),
        messages.unproven(decision, speech=CHINESE_TELLS),
    ):
        assert f"`{reason}`" in texts["description"]
        for text in texts.values():
            assert _foreign(text.replace(decision.job_id, "").replace("idle", "")) <= {"UTC"}
    assert reason in messages.unproven(decision, speech=speech("en"))["description"]


@pytest.mark.parametrize(
    "error",
    [
        "Slack: HTTP 429",
        "Slack does not answer: timed out",
        NO_ADDRESS,
        "the mail server refused the recipient: 550 no such user",
        "they have left (by the directory, on 2026-11-30)",
        "wecom: 45009 api freq out of limit",
    ],
)
def test_why_no_server_took_a_notice_is_told_in_the_readers_language(error: str) -> None:
    """What the server itself has said is quoted."""
    case = Case("idle", "proc-1", 0.0, user="ana")
    texts = messages.undeliverable(case, 3600.0, [error], speech=CHINESE_TELLS)
    assert f"`{error}`" in texts["description"]
    plain = re.sub(r"idle|proc-1|ana", "", texts["description"])
    assert _foreign(plain) == set()


def test_what_stops_every_end_is_told_in_the_readers_language() -> None:
    """With its figures, and the file whose rules would end too many."""
    figures = (("owners", 7), ("running", 40), ("limit", 0.1), ("file", "/etc/rules/team.yaml"))
    block = Blocked("share_of_running", "", figures)
    text = messages.halted([block], whole=False, speech=CHINESE_TELLS)["description"]
    assert all(word in text for word in ("7", "40", "10 %", "team.yaml"))
    assert _foreign(text.replace("/etc/rules/team.yaml", "")) == set()
    plain = dataclasses.replace(block, figures=(*figures[:3], ("file", "")))
    english = messages.halted([plain], whole=True, speech=speech("en"))["description"]
    assert english == (
        "Jobs of 7 owners are due at once among 40 running jobs; more than 10 % is taken for a "
        "fault of the data until a person says otherwise."
    )
