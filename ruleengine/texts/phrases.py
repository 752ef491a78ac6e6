"""The shape of a language: one template for each thing that notices say.

A language that lacks one is not type-correct; that the placeholders agree is tested. Templates are
`str.format` with named fields only; what fills them may be chosen by users, and is never formatted
itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrases:
    """Templates of one language. What the fields stand for is told by the English ones."""

    # -- layout
    attention: str
    heading_seen: str
    heading_expected: str
    heading_cause: str
    heading_remedy: str
    heading_next: str
    heading_keep: str
    heading_work: str
    heading_gpus: str
    heading_owner: str
    why_link: str
    keep_button: str
    rule_tag: str
    level_tag: str
    footer: str
    test_mark: str
    cut: str
    private: str

    # -- lists, times, durations, numbers
    full_stop: str
    after_stop: str
    comma: str
    semicolon: str
    colon: str
    more: str
    clock: str
    moment: str
    weekdays: tuple[str, ...]
    months: tuple[str, ...]
    duration_units: Mapping[str, str]
    duration_joint: str
    quantity_units: Mapping[str, str]
    not_known: str
    level_names: Mapping[str, str]

    # -- conditions
    signal_names: Mapping[str, str]
    channel_names: Mapping[str, str]
    aggregates: Mapping[str, str]
    window_seconds: str
    window_samples: str
    over: str
    now: str
    comparisons: Mapping[str, str]
    share_of_samples: str
    of_all_gpus: str
    of_any_gpu: str
    of_share_of_gpus: str
    deviation_below: str
    deviation_above: str
    deviation_outside: str
    deviation_floor: str
    seen: str
    seen_against: str
    silent: str
    silent_ago: str
    silent_never: str
    no_progress: str
    no_progress_measured: str
    needs_memory: str
    needs_memory_measured: str
    expression: str
    budget_used: Mapping[str, str]
    all_of: str
    any_of: str
    negated: str

    # -- what is expected
    expected_of: str
    expected_estimate_of: str
    expected_entry: str
    estimated_band: str

    # -- causes
    cause_names: Mapping[str, str]
    cause_memory: str
    cause_wait: str
    cause_wait_workers: str
    cause_blocked: str
    cause_blocked_workers: str
    cause_idle_memory: str
    cause_idle: str
    cause_throttled: str
    cause_busy: str
    cause_throughput: str
    cause_throughput_expected: str
    cause_cores: str
    remedy_memory: str
    remedy_wait: str
    remedy_wait_no_workers: str
    remedy_wait_workers: str
    remedy_idle: str
    remedy_throttled: str
    remedy_busy: str

    # -- a notice
    on_node: str
    notice_summary: str
    notice_description: str
    next_nothing: str
    next_if: str
    next_if_far: str
    next_if_waiting: str
    next_asked: str
    next_ended: str
    next_checkpoint: str
    next_yield: str
    next_requeue: str
    next_terminate: str
    next_save_yourself: str
    next_on_trial: str
    keep_used_up: str
    keep_terms: str
    keep_open: str
    keep_run: str
    keep_only_run: str
    work_since_saved: str
    work_since_start: str
    work_gpu_hours: str
    work_cost: str
    card: str
    card_named: str

    # -- a job that is being ended, was ended, or is not
    ending_summary: str
    ending_description: str
    ending_asked: str
    ended_summary: str
    ended_description: str
    ended_freed: str
    ended_saved: str
    ended_unsaved: str
    left_summary: str
    left_description: str
    requeued_summary: str
    requeued_description: str
    unproven_summary: str
    unproven_description: str
    came_back_summary: str
    came_back_description: str
    came_back_next: str
    leaving_summary: str
    leaving_description: str
    leaving_where: Mapping[str, str]
    """By `step` and `epoch`."""
    leaving_next: Mapping[str, str]
    """By `requeue` and `hold`."""
    withdrawn_summary: str
    withdrawn_description: str
    withdrawn_next: str
    withdrawn_observes: str
    withdrawn_rule_gone: str

    # -- for operators
    undeliverable_summary: str
    undeliverable_description: str
    undeliverable_unheard: str
    unknown_user: str
    halted_summary: str
    halted_part_summary: str
    halted_share: str
    halted_of_file: str
    budget_periods: Mapping[str, str]
    budget_summary: str
    budget_description: str
    budget_forecast: str
    outcome_names: Mapping[str, str]
    pager_summary: str
    pager_description: str
    no_reason: str
    record: str
    """What a record means, and the record, where it is in another language."""

    # -- a test message
    test_summary: str
    test_description: str
    test_next: str
