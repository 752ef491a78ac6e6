"""What the images install: pinned, with sums, as pyproject.toml and constraints.txt have it."""

from __future__ import annotations

import datetime as dt
import json
import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tools import bills, requirements

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
IMAGES = {image.name: image for image in requirements.IMAGES}
MOMENT = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)


def constraints() -> dict[str, str]:
    """Names -> the versions that the tests run with."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def wishes(extra: str) -> list[Requirement]:
    """What an extra asks for, and the extras that it names."""
    found = []
    for text in PROJECT["optional-dependencies"][extra]:
        wish = Requirement(text)
        if wish.name == "gpuwarden":
            found += [item for other in sorted(wish.extras) for item in wishes(other)]
        else:
            found.append(wish)
    return found


@pytest.mark.parametrize("path", bills.lists().values(), ids=bills.lists())
def test_every_package_has_a_version_and_sums(path: Path) -> None:
    """Then pip takes nothing else (--require-hashes), and no line is passed over in reading."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    packages = bills.pinned(path)
    assert len(packages) == sum(line[:1] not in ("", " ") for line in lines) > 0
    assert all(item.sums for item in packages)
    assert sum(len(item.sums) for item in packages) == sum("--hash=" in line for line in lines)


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_an_image_installs_what_its_programs_ask_for(image: requirements.Image) -> None:
    """In versions that fit, with which the tests ran; run `make requirements` where this fails."""
    locked = {item.name: item.version for item in bills.pinned(image.file)}
    asked = [wish for extra in image.extras for wish in wishes(extra)]
    asked += [Requirement(name) for name in image.packages]
    for wish in asked:
        name = canonicalize_name(wish.name)
        assert name in locked, f"{wish} is not in {image.file.name}"
        assert wish.specifier.contains(locked[name]), f"{wish}: {locked[name]}"
    known = constraints()
    assert {name: known.get(name, version) for name, version in locked.items()} == locked


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_an_image_installs_nothing_that_nobody_asks_for(image: requirements.Image) -> None:
    """Each package is asked for, or needed by one that is: what was dropped is dropped here too."""
    names = frozenset(item.name for item in bills.pinned(image.file))
    asked = {canonicalize_name(w.name) for extra in image.extras for w in wishes(extra)}
    asked |= {canonicalize_name(name) for name in image.packages}
    reached: set[str] = set()
    while asked:
        name = asked.pop()
        reached.add(name)
        asked |= set(bills.needs(name, names)) - reached
    # Needed by an extra of a package, which its metadata name only under that extra.
    by_extras = {"h2", "hpack", "hyperframe", "wsproto", "truststore"}
    assert names - reached <= by_extras


def test_agpl_is_where_somebody_trains_and_nowhere_else() -> None:
    """A node and an engine hold no package under it, by what each package says of itself."""
    found = {
        image: {item.name for item in bills.pinned(path) if "AGPL" in bills.licence(item.name)}
        for image, path in bills.lists().items()
    }
    assert {image for image, names in found.items() if names} == {
        image for image in found if image.startswith("yolo-")
    }
    for image in IMAGES.values():
        for item in bills.pinned(image.file):
            assert bills.licence(item.name) != bills.UNKNOWN, item.name


def test_licences_that_were_read_by_hand_are_still_silent() -> None:
    """As soon as a package names its licence itself, its own word is taken."""
    for name in bills.READ_BY_HAND:
        try:
            said = metadata.metadata(name).get("License-Expression")
        except metadata.PackageNotFoundError:
            continue
        assert not said, f"{name} says {said}: drop it from READ_BY_HAND"


def test_the_page_of_licences_is_up_to_date() -> None:
    """Run `make sbom` where this fails. What is not installed everywhere is compared by name."""

    def rows(text: str) -> set[str]:
        found = set()
        for line in text.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) == 4 and not any(name in cells[3] for name in IMAGES):
                cells[2] = ""
            found.add("|".join(cells))
        return found

    assert rows(bills.PAGE.read_text("utf-8")) == rows(bills.page())


@pytest.mark.parametrize("image", bills.lists())
def test_a_bill_of_materials_is_one(image: str) -> None:
    """Valid CycloneDX; every package with its sums; the same again when it is made again."""
    packages = bills.pinned(bills.lists()[image])
    made = [bills.bill(image, packages, version="1.2.3", moment=MOMENT) for _ in range(2)]
    assert made[0] == made[1]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(made[0]) is None
    document = json.loads(made[0])
    assert [(item["name"], item["version"]) for item in document["components"]] == sorted(
        (item.name, item.version) for item in packages
    )
    assert all(item["hashes"] for item in document["components"])
    below = {item["ref"]: item.get("dependsOn", []) for item in document["dependencies"]}
    assert len(below[f"gpuwarden-{image}"]) == len(packages)
    assert re.fullmatch(r"urn:uuid:[0-9a-f-]{36}", document["serialNumber"])
