"""engine.yaml, the directory and the secrets: strict, located, relative to the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.files import fingerprint, read_secret
from gpuwarden.ruleengine.directories import Directory
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import load_settings
from gpuwarden.yaml_files import load_file

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "deploy" / "examples"
MINIMAL = "version: 1\nprometheus: {url: http://127.0.0.1:9090}\nrules: [r.yaml]\n"
RULES = """
version: 1
rules:
- id: busy
  target: job
  cold_start: 60s
  when: {signal: gpu_utilization, agg: avg, window: 5m, at_most: 5%, gpus: all}
  for: 5m
  stages: [{level: light, after: 0s, do: log}]
"""


def write(folder: Path, text: str = MINIMAL) -> Path:
    """Write engine.yaml beside a rule file."""
    (folder / "r.yaml").write_text(RULES)
    path = folder / "engine.yaml"
    path.write_text(text)
    return path


def test_the_examples_are_valid(tmp_path: Path) -> None:
    """What we ship as an example loads, field by field."""
    shutil.copytree(EXAMPLES, tmp_path / "e")
    (tmp_path / "e" / "rules").mkdir()
    (tmp_path / "e" / "rules" / "r.yaml").write_text(RULES)
    settings = load_settings(tmp_path / "e" / "engine.yaml")
    assert settings.values.smtp is not None
    book = RuleBook(settings)
    assert book.directory.user("lin").team == "vision"


def test_three_lines_are_enough(tmp_path: Path) -> None:
    """Everything else has a default, and none of them can lead to a kill."""
    values = load_settings(write(tmp_path)).values
    assert values.web.listen == "127.0.0.1:9837"
    assert values.agents is None
    assert values.web.token_file is None
    assert values.settle_after == 30.0


NODES = (
    "nodes: {registration: {token_file: t, allow: [10.1.0.0/16, '*.gpu.lan']}, names: [n1:9835]}"
)


def test_nodes_are_named(tmp_path: Path) -> None:
    """By what they say themselves, by a list, and by an expression, in any union."""
    nodes = load_settings(write(tmp_path, MINIMAL + NODES)).values.nodes
    assert nodes is not None
    assert nodes.names == ("n1:9835",)
    assert nodes.registration is not None
    assert (nodes.registration.heartbeat, nodes.registration.limit) == (60.0, 10_000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: {}", "names none"),
        ("nodes: {names: [n1]}", "HOST:PORT"),
        ("nodes: {names: ['169.254.169.254:80']}", "not an address that a node can have"),
        ("nodes: {registration: {}}", "token_file"),
        ("nodes: {registration: {token_file: t, heartbeat: 500ms}}", "1"),
        ("nodes: {registration: {token_file: t, allow: [10.1.2.3/16]}}", "neither a network"),
        ("nodes: {names: [n1:9835]}\nexpected_nodes: 3", "exclude each other"),
    ],
)
def test_nodes_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    """What is wrong of them is said with what to write instead."""
    with pytest.raises(InvalidInput, match=message):
        load_settings(write(tmp_path, f"{MINIMAL}{text}\n"))


def test_all_mistakes_are_found_at_their_places_in_one_pass(tmp_path: Path) -> None:
    """Line, column, caret, and what was probably meant."""
    path = write(
        tmp_path,
        "version: 1\n"
        "prometheus: {url: 127.0.0.1:9090}\n"
        "rules: [r.yaml]\n"
        "tick: 15\n"
        "alertmanager: [http://127.0.0.1:9093]\n"
        "agents: {url: 'http://node:9836', key_file: k}\n"
        "web: {listen: 9837}\n",
    )
    with pytest.raises(InvalidInput) as wrong:
        load_settings(path)
    places = [(d.span.line, d.span.column) for d in wrong.value.diagnostics]
    assert sorted(places) == [(2, 19), (4, 7), (5, 1), (6, 15), (7, 15)]
    text = str(wrong.value)
    assert "alertmanagers" in text
    assert "^" in text
    assert "http://{host}:9836" in text


def test_an_outage_is_always_followed_by_a_wait(tmp_path: Path) -> None:
    """`settle: 0s` would let the first tick after a start act."""
    with pytest.raises(InvalidInput, match=r"engine\.yaml:4:9"):
        load_settings(write(tmp_path, MINIMAL + "settle: 0s\n"))


def test_rules_are_found_by_pattern_and_missing_ones_are_told(tmp_path: Path) -> None:
    """A pattern may match none at first, but not at the start; a plain name must exist."""
    path = write(tmp_path, MINIMAL.replace("r.yaml", '"*.rules"'))
    with pytest.raises(InvalidInput, match="no file matches"):
        load_settings(path)
    for name in ("b.rules", "a.rules"):
        (tmp_path / name).write_text(RULES.replace("busy", f"busy-{name[0]}"))
    names = [file.name for file in load_settings(path).rule_files()]
    assert names == ["a.rules", "b.rules"]
    plain = load_settings(write(tmp_path, MINIMAL.replace("r.yaml", "gone.yaml")))
    with pytest.raises(InvalidInput, match=r"gone\.yaml"):
        RuleBook(plain)


@pytest.mark.parametrize(
    "text",
    [
        "version: 1\nusers: {alice: {email: not-an-address}}\n",
        "version: 1\nusers: {alice: {email: 'a@b, c@d'}}\n",
        "version: 1\nusers: {alice: {email: 'ал@example.org'}}\n",
        "version: 1\nusers: {alice: {slack: '@alice'}}\n",
        "version: 1\nusers: {alice: {timezone: CEST}}\n",
        "version: 1\nusers: {'a b': {}}\n",
        "version: 1\nusers: {alice: {mail: a@example.org}}\n",
    ],
)
def test_a_directory_is_strict(tmp_path: Path, text: str) -> None:
    """A wrong address would be found out when a notice is due: too late."""
    path = tmp_path / "directory.yaml"
    path.write_text(text)
    with pytest.raises(InvalidInput) as wrong:
        load_file(Directory, path)
    assert {item.span.line for item in wrong.value.diagnostics} == {2}


def test_secrets_are_read_without_their_line_break_and_never_empty(tmp_path: Path) -> None:
    """An empty token would open to an empty password."""
    (tmp_path / "t").write_text("secret\n")
    assert read_secret(tmp_path / "t", "web.token_file") == "secret"
    (tmp_path / "t").write_text("\n")
    with pytest.raises(InvalidInput, match="empty"):
        read_secret(tmp_path / "t", "web.token_file")
    with pytest.raises(InvalidInput, match=r"web\.token_file"):
        read_secret(tmp_path / "none", "web.token_file")


def test_a_change_of_content_is_seen_whatever_the_time_of_the_file(tmp_path: Path) -> None:
    """Contents are compared, not times: a copy that keeps the old time is a change too."""
    path = tmp_path / "f"
    path.write_text("a")
    first = fingerprint([path])
    assert fingerprint([path]) == first
    path.write_text("b")
    assert fingerprint([path]) != first
    path.unlink()
    assert fingerprint([path]) != first


def test_a_reload_is_all_or_nothing(tmp_path: Path) -> None:
    """A bad directory keeps good new rules out as well, and is said until it is mended."""
    path = write(tmp_path, MINIMAL + "directory: d.yaml\n")
    (tmp_path / "d.yaml").write_text("version: 1\n")
    book = RuleBook(load_settings(path))
    before = book.hash
    (tmp_path / "r.yaml").write_text(RULES.replace("5%", "6%"))
    (tmp_path / "d.yaml").write_text("version: 2\n")
    assert not book.refresh()
    assert book.hash == before
    assert "d.yaml:1:10" in book.problem
    assert not book.refresh()
    assert book.problem
    (tmp_path / "d.yaml").write_text("version: 1\n")
    assert book.refresh()
    assert book.hash != before
    assert book.problem == ""
    assert not book.refresh()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("url: http://a/prometheus/", (("http://a/prometheus",),)),
        ("replicas: [http://a, http://b]", (("http://a", "http://b"),)),
        ("shards: [http://a, [http://b1, http://b2]]", (("http://a",), ("http://b1", "http://b2"))),
    ],
)
def test_servers_are_one_replicas_or_shards(
    tmp_path: Path, text: str, groups: tuple[tuple[str, ...], ...]
) -> None:
    """However they are written, they are shards of replicas."""
    path = write(
        tmp_path,
        f"version: 1\nprometheus: {{{text}}}\nexpected_nodes: 2\nrules: [r.yaml]\n",
    )
    assert load_settings(path).values.prometheus.groups == groups


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{timeout: 5s}", "exactly one of url, replicas and shards"),
        ("{url: http://a, replicas: [http://b]}", "exactly one of url, replicas and shards"),
        ("{replicas: [http://a, http://a/]}", "a server is named twice"),
        ("{shards: [http://a, []]}", "shards"),
        ("{shards: [http://a, http://b]}", "say which nodes there should be"),
        ("{url: http://a, username: u}", "together or not at all"),
        ("{url: 'http://u:p@a'}", "not a base address"),
        ("{url: http://a, tenant: 'a b'}", "tenant"),
        ("{url: http://a, bearer_token_file: t, username: u, password_file: p}", "exclude"),
    ],
)
def test_servers_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, why: str) -> None:
    """Before anything is asked of a server."""
    path = write(tmp_path, f"version: 1\nprometheus: {text}\nrules: [r.yaml]\n")
    with pytest.raises(InvalidInput, match=why):
        load_settings(path)
