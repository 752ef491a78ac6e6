"""What holds for every policy: it can be written back, compared, and rendered for every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.scheduling.policy_files import NOW
from tests.scheduling.random_policies import documents, policies

from gpuwarden.scheduling.engines import FoundObject, adapter_of, plan, undoing
from gpuwarden.scheduling.policies import Engine, Policy, policy_hash
from gpuwarden.scheduling.policy_checks import check_document
from gpuwarden.scheduling.policy_differences import differences
from gpuwarden.scheduling.policy_schemas import policy_document
from gpuwarden.scheduling.policy_texts import policy_yaml
from gpuwarden.yaml_files import load_located

ENGINES = get_args(Engine)
SHUFFLED = ("teams", "priorities", "budgets", "windows")
"""Lists in which order means nothing."""
SCHEMA = jsonschema.Draft202012Validator(policy_document())


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20, deadline=None
)
@given(policies())
def test_what_is_written_reads_back(tmp_path: Path, policy: Policy) -> None:
    """Every value with its unit; the schema of editors takes it, and no check refuses it."""
    document = load_located(policy_yaml(policy), name="policy.yaml")
    assert document.root is not None
    SCHEMA.validate(document.root.data())
    for engine in ENGINES:
        checked = check_document(tmp_path, document, now=NOW, engine=engine)
        assert {item.code for item in checked.errors} <= {"GW610"}
        assert engine == "slurm" or checked.errors == ()
        if checked.errors:
            continue
        assert checked.content == policy
        assert policy_hash(checked.usable()) == policy_hash(policy)


@settings(max_examples=25, deadline=None)
@given(documents(), st.randoms())
def test_the_order_of_entries_is_no_difference(document: dict[str, Any], random: Any) -> None:
    """Teams, priorities, budgets and windows may stand in any order."""
    assert differences(*map(Policy.model_validate, (document, shuffled(document, random)))) == ()


@settings(max_examples=25, deadline=None)
@given(policies(), policies())
def test_two_policies_differ_if_and_only_if_a_difference_is_told(one: Policy, two: Policy) -> None:
    """Both ways, with opposite effects."""
    there, back = differences(one, two), differences(two, one)
    assert len(there) == len(back)
    assert {each.path for each in there} == {each.path for each in back}
    if policy_hash(one) == policy_hash(two):
        assert there == ()
    elif sorted_hash(one) != sorted_hash(two):
        assert there
    by_path = {each.path: each for each in back}
    opposite = {"gains": "loses", "loses": "gains", "stricter": "laxer", "laxer": "stricter"}
    for each in there:
        other = by_path[each.path]
        assert (each.old, each.new, each.whom) == (other.new, other.old, other.whom)
        assert other.effect == opposite.get(each.effect, each.effect)


def shuffled(document: dict[str, Any], random: Any) -> dict[str, Any]:
    """The same policy with its lists in another order."""
    found = dict(document)
    for key in SHUFFLED:
        found[key] = list(found[key])
        random.shuffle(found[key])
    return found


def sorted_hash(policy: Policy) -> str:
    """The hash of a policy whose lists are in one order."""
    document = policy.model_dump(by_alias=True)
    for key in SHUFFLED:
        document[key] = sorted(document[key], key=repr)
    for window in document["windows"]:
        window["days"] = sorted(window["days"])
    for priority in document["priorities"]:
        priority["preempts"] = sorted(priority["preempts"])
    return repr(document)


@pytest.mark.parametrize("engine", ENGINES)
@given(documents(), st.randoms())
@settings(max_examples=20, deadline=None)
def test_every_policy_renders_and_always_the_same(
    engine: Engine, document: dict[str, Any], random: Any
) -> None:
    """Whatever the order of its lists; applied, nothing more is to be done, and undone, nothing."""
    one, other = (Policy.model_validate(each) for each in (document, shuffled(document, random)))
    document_of = load_located(policy_yaml(one), name="policy.yaml")
    assume(not check_document(Path("policy.yaml"), document_of, now=NOW, engine=engine).errors)
    rendering = adapter_of(engine, one).render(one, version=None)
    assert rendering == adapter_of(engine, one).render(one, version=None)
    again = adapter_of(engine, other).render(other, version=None)
    assert {each.key: dict(each.values) for each in rendering.objects} == {
        each.key: dict(each.values) for each in again.objects
    }
    assert len({each.key for each in rendering.objects}) == len(rendering.objects)
    there = [FoundObject(e.kind, e.name, e.values, marked=True) for e in rendering.objects]
    assert plan(rendering, there).nothing
    assert len(undoing(there).steps) == len(there)
