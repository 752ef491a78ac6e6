"""What is made from the types of policy files: schema, reference, and files to begin with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from pydantic import BaseModel
from tests.scheduling.policy_files import TEXT, a_policy, findings

from gpuwarden.scheduling.policies import Policy
from gpuwarden.scheduling.policy_references import described, policy_reference
from gpuwarden.scheduling.policy_schemas import policy_document, policy_schema
from gpuwarden.scheduling.policy_templates import policy_template
from gpuwarden.yaml_files import load_located

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Engine

ROOT = Path(__file__).parents[2]


def data(text: str) -> Any:
    """What a file says, as the product reads it."""
    root = load_located(text).root
    assert root is not None
    return root.data()


def test_the_reference_page_is_that_of_the_types() -> None:
    """`gpuwarden policy reference > docs/policy-reference.md` brings it up to date."""
    assert (ROOT / "docs" / "policy-reference.md").read_text() == policy_reference()


def test_the_schema_is_that_of_the_types() -> None:
    """`gpuwarden policy schema > scheduling/policy.schema.json` brings it up to date."""
    assert (ROOT / "scheduling" / "policy.schema.json").read_text() == policy_schema()


def test_every_part_of_a_policy_has_its_section_in_the_reference() -> None:
    """A part that somebody adds is missed here, and not by the reader."""
    wanted = {Policy}
    for _ in range(4):
        for kind in tuple(wanted):
            names = policy_document()["$defs"].keys() | {"Policy"}
            wanted |= {each for each in _parts(kind) if each.__name__ in names}
    assert wanted == described()


def _parts(kind: type[BaseModel]) -> set[Any]:
    found = set()
    for info in kind.model_fields.values():
        left: list[Any] = [info.annotation]
        while left:
            each = left.pop()
            if isinstance(each, type) and issubclass(each, BaseModel):
                found.add(each)
            left += getattr(each, "__args__", ())
    return found


def test_every_field_of_a_policy_says_what_it_is() -> None:
    """In the reference no cell is empty."""
    rows = [line for line in policy_reference().splitlines() if line.startswith("| `")]
    assert rows
    assert not [row for row in rows if row.endswith("|  |")]


def test_the_schema_takes_what_the_product_takes_and_refuses_what_it_refuses() -> None:
    """Editors say the same of form; of meaning they know nothing."""
    checker = jsonschema.Draft202012Validator(policy_document())
    assert list(checker.iter_errors(data(TEXT))) == []
    for old, new in (
        ("deadline: 20m", "deadline: 20"),
        ("share: 3", "shares: 3"),
        ("notice: epoch", "notice: batch"),
        ('to: "07:00"', 'to: "7:00"'),
        ("limit: 300 GPU-hours", "limit: 300"),
        ("count: 8", "count: 0"),
    ):
        assert list(checker.iter_errors(data(TEXT.replace(old, new, 1)))), new


@pytest.mark.parametrize("engine", ["slurm", "kueue", "local"])
def test_a_policy_to_begin_with_has_nothing_wrong(tmp_path: Path, engine: Engine) -> None:
    """Neither for its engine nor as a file of the schema."""
    text = policy_template(engine, "Asia/Shanghai")
    assert findings(tmp_path, text) == ()
    jsonschema.Draft202012Validator(policy_document()).validate(data(text))
    assert yaml.safe_load(text)["engine"] == engine


def test_the_example_is_the_policy_to_begin_with() -> None:
    """`gpuwarden policy init --engine slurm --timezone Europe/Berlin` writes it."""
    example = (ROOT / "deploy" / "examples" / "policy.yaml").read_text()
    assert example == policy_template("slurm", "Europe/Berlin")


def test_the_schema_is_json_that_names_its_draft() -> None:
    """As catalogues of schemas ask for."""
    document = json.loads(policy_schema())
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(document)
    assert a_policy().version == 1
