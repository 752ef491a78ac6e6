"""Patterns of rule files: as in a shell, and never through all of a disk."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from gpuwarden.errors import InvalidInput
from gpuwarden.ruleengine.path_patterns import Bounds, matching
from gpuwarden.ruleengine.rulebooks import RuleBook
from gpuwarden.ruleengine.settings import load_settings


def lay(folder: Path, *names: str) -> None:
    """Write empty files below a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("rules/*.yaml", ["rules/a.yaml", "rules/b.yaml"]),
        ("rules/[ab].y?ml", ["rules/a.yaml", "rules/b.yaml"]),
        ("*/a.yaml", ["other/a.yaml", "rules/a.yaml"]),
        ("rules/**/*.yaml", ["rules/a.yaml", "rules/b.yaml", "rules/x/c.yaml", "rules/x/y/d.yaml"]),
        ("**/**/d.yaml", ["rules/x/y/d.yaml"]),
        ("rules/x/**", ["rules/x/c.yaml", "rules/x/y/d.yaml"]),
        ("rules/../other/*.yaml", ["rules/../other/a.yaml"]),
        ("none/*.yaml", []),
        ("rules/a.yaml/*.yaml", []),
        ("rules/.*.yaml", ["rules/.#a.yaml"]),
    ],
)
def test_a_pattern_finds_what_a_shell_would(tmp_path: Path, pattern: str, found: list[str]) -> None:
    """Sorted, without folders and names that begin with a dot."""
    lay(tmp_path, "rules/a.yaml", "rules/b.yaml", "rules/.#a.yaml", "rules/b.yml.bak")
    lay(tmp_path, "rules/x/c.yaml", "rules/x/y/d.yaml", "rules/dir.yaml/inner", "other/a.yaml")
    assert matching(tmp_path / pattern) == tuple(tmp_path / name for name in found)


def test_a_mounted_config_map_is_read_once(tmp_path: Path) -> None:
    """Kubernetes lays each file's link over a hidden folder, which `**` does not enter."""
    lay(tmp_path, "..2026_11_30/a.yaml")
    (tmp_path / "..data").symlink_to("..2026_11_30")
    (tmp_path / "a.yaml").symlink_to("..data/a.yaml")
    assert matching(tmp_path / "**" / "*.yaml") == (tmp_path / "a.yaml",)


def test_links_to_folders_lead_two_stars_nowhere(tmp_path: Path) -> None:
    """A link to the folder itself would have no end; by its name it is followed."""
    lay(tmp_path, "a.yaml")
    (tmp_path / "loop").symlink_to(".")
    assert matching(tmp_path / "**" / "*.yaml") == (tmp_path / "a.yaml",)
    assert matching(tmp_path / "loop" / "*.yaml") == (tmp_path / "loop/a.yaml",)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("many/*.yaml", "finds more than 4 files"),
        ("wide/**/*.yaml", "looks at more than 9 names"),
        ("deep/**/*.yaml", "leads more than 2 folders deep"),
    ],
)
def test_names_files_and_depth_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, why: str
) -> None:
    """Each refusal says which pattern it is, and what to write instead."""
    monkeypatch.chdir(tmp_path)
    lay(tmp_path, *(f"many/{number}.yaml" for number in range(5)))
    lay(tmp_path, *(f"wide/{number}/other" for number in range(5)), "deep/a/b/c/a.yaml")
    with pytest.raises(InvalidInput, match=why) as caught:
        matching(Path(pattern), bounds=Bounds(names=9, files=4, depth=2))
    assert str(caught.value).startswith(f"{pattern}: ")
    assert "such as rules/*.yaml" in str(caught.value)


def test_its_time_is_bounded(tmp_path: Path) -> None:
    """A disk may be slow."""
    lay(tmp_path, "a.yaml", "b.yaml")
    ticks = itertools.count(0, 3)
    with pytest.raises(InvalidInput, match="takes longer than 2 s"):
        matching(tmp_path / "*.yaml", now=lambda: float(next(ticks)))


def test_a_pattern_that_leads_everywhere_is_refused(tmp_path: Path) -> None:
    """All of a machine's disks are not walked."""
    path = tmp_path / "engine.yaml"
    path.write_text("version: 1\nprometheus: {url: http://h:1}\nrules: ['/**/*.yaml']\n")
    with pytest.raises(InvalidInput, match=r"^/\*\*/\*\.yaml: "):
        load_settings(path)


def test_a_pattern_that_comes_to_lead_too_far_leaves_the_old_rules_in_force(
    tmp_path: Path,
) -> None:
    """And the engine says why, until it is mended."""
    path = tmp_path / "engine.yaml"
    path.write_text("version: 1\nprometheus: {url: http://h:1}\nrules: ['rules/**/*.yaml']\n")
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules/a.yaml").write_text("version: 1\nrules: []\n")
    book = RuleBook(load_settings(path))
    deep = tmp_path / "/".join(["rules", *"a" * 17])
    deep.mkdir(parents=True)
    assert not book.refresh()
    assert "leads more than 16 folders deep" in book.problem
    deep.rmdir()
    assert not book.refresh()
    assert book.problem == ""
