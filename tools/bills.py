"""Write a bill of materials (CycloneDX 1.6, JSON) for each image: `make sbom`.

What is in an image is what its list pins (deploy/docker/requirements-*.txt); licences and who needs
whom are read from the installed packages, which `.venv` has in the same versions. A package that is
not installed here (CUDA's, in the training image) has no licence in the bill: it is not known, and
not made up. The licences of all of them are written to docs/licences.md, which a test compares.
"""

from __future__ import annotations

import datetime as dt
import os
import re
import sys
import tomllib
import uuid
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from license_expression import get_spdx_licensing
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "deploy" / "docker"
OUT = ROOT / "dist" / "sbom"
PAGE = ROOT / "docs" / "licences.md"
UNKNOWN = "not known here"

# Licences that the packages' own metadata do not name by SPDX's names; read in the file that each
# of them ships.
READ_BY_HAND = {
    "aiosmtpd": "Apache-2.0",
    "promql-parser": "MIT",
    "python-dateutil": "Apache-2.0 OR BSD-3-Clause",
}
_CLASSIFIED = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "GNU Affero General Public License v3 or later (AGPLv3+)": "AGPL-3.0-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
_ENTRY = re.compile(
    r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)[^\n]*(?P<rest>(?:\n .*)*)", re.MULTILINE
)
_SPDX = get_spdx_licensing()
_SUM = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Pinned:
    """One package of a list."""

    name: str
    version: str
    sums: tuple[str, ...]


def lists() -> dict[str, Path]:
    """The list of each image, by the image's name."""
    return {
        path.stem.removeprefix("requirements-"): path
        for path in sorted(LISTS.glob("requirements-*.txt"))
    }


def pinned(path: Path) -> list[Pinned]:
    """The packages of a list."""
    return [
        Pinned(canonicalize_name(m["name"]), m["version"], tuple(_SUM.findall(m["rest"])))
        for m in _ENTRY.finditer(path.read_text("utf-8"))
    ]


def licence(name: str) -> str:
    """A package's licence as an SPDX expression, or UNKNOWN."""
    if name in READ_BY_HAND:
        return READ_BY_HAND[name]
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    said = str(about.get("License") or "").strip()
    if said and len(said) < 80 and not _SPDX.validate(said).errors:
        return said
    classified = [
        _CLASSIFIED[last]
        for item in about.get_all("Classifier", [])
        if item.startswith("License") and (last := item.rsplit(" :: ", 1)[-1]) in _CLASSIFIED
    ]
    return " OR ".join(sorted(set(classified))) or UNKNOWN


def needs(name: str, among: frozenset[str]) -> list[str]:
    """Which of some packages a package needs, without extras, on Linux."""
    try:
        asked = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []
    found = set()
    environment = {key: str(value) for key, value in default_environment().items()} | {"extra": ""}
    for text in asked:
        wish = Requirement(text)
        other = canonicalize_name(wish.name)
        if other in among and (wish.marker is None or wish.marker.evaluate(environment)):
            found.add(other)
    return sorted(found)


def bill(image: str, packages: list[Pinned], *, version: str, moment: dt.datetime) -> str:
    """The bill of an image as JSON; equal lists and moments give equal bills.

    Args:
        image: its name.
        packages: what is in it.
        version: of gpuwarden.
        moment: at which it is made.
    """
    licences = LicenseFactory()
    root = Component(
        name=f"gpuwarden-{image}",
        version=version,
        type=ComponentType.CONTAINER,
        bom_ref=f"gpuwarden-{image}",
        licenses=[licences.make_from_string("Apache-2.0")],
    )
    names = frozenset(item.name for item in packages)
    parts = {}
    for item in packages:
        known = licence(item.name)
        url = PackageURL("pypi", name=item.name, version=item.version)
        parts[item.name] = Component(
            name=item.name,
            version=item.version,
            type=ComponentType.LIBRARY,
            purl=url,
            bom_ref=url.to_string(),
            licenses=[] if known == UNKNOWN else [licences.make_from_string(known)],
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in item.sums],
        )
    document = Bom(
        components=parts.values(),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{image} {version} {packages}"),
    )
    document.metadata.timestamp = moment
    document.metadata.component = root
    whole = [Dependency(part.bom_ref) for part in parts.values()]
    document.dependencies.add(Dependency(root.bom_ref, whole))
    for name, part in parts.items():
        below = [Dependency(parts[other].bom_ref) for other in needs(name, names)]
        document.dependencies.add(Dependency(part.bom_ref, below))
    return JsonV1Dot6(document).output_as_string(indent=2) + "\n"


def page() -> str:
    """docs/licences.md: every package of every image, with its licence."""
    images = {image: pinned(path) for image, path in lists().items()}
    places: dict[tuple[str, str], list[str]] = {}
    for image, packages in images.items():
        for item in packages:
            places.setdefault((item.name, item.version), []).append(image)
    rows = [
        f"| {name} | {version} | {licence(name)} | {', '.join(found)} |"
        for (name, version), found in sorted(places.items())
    ]
    return "\n".join(
        [
            "# Licences of what the images contain",
            "",
            "Written by `make sbom` from the lists that the images install from: what a package",
            f'says of itself, as an SPDX expression. "{UNKNOWN}": it says nothing usable, or is',
            "not installed where this is written (CUDA's own). AGPL is in the training images",
            "only, which hold ultralytics; a test says so:",
            "[decision 0011](decisions/0011-ultralytics-stays-outside.md).",
            "",
            "| package | version | licence | in the images |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Write every bill and the page."""
    # Reproducible where the caller says when: https://reproducible-builds.org/specs/source-date-epoch
    seconds = int(os.environ.get("SOURCE_DATE_EPOCH", dt.datetime.now(tz=dt.UTC).timestamp()))
    moment = dt.datetime.fromtimestamp(seconds, tz=dt.UTC)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    OUT.mkdir(parents=True, exist_ok=True)
    for image, path in lists().items():
        target = OUT / f"gpuwarden-{image}.cdx.json"
        target.write_text(bill(image, pinned(path), version=version, moment=moment), "utf-8")
        sys.stdout.write(f"{target.relative_to(ROOT)}\n")
    PAGE.write_text(page(), "utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
