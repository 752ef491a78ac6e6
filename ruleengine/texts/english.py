"""What notices say, in English."""

from __future__ import annotations

from types import MappingProxyType

from gpuwarden.ruleengine.texts.phrases import Phrases

ENGLISH = Phrases(
    attention="a job needs your attention",
    heading_seen="Seen",
    heading_expected="Expected",
    heading_cause="Probable cause",
    heading_remedy="What helps",
    heading_next="What happens next",
    heading_keep="To keep it",
    heading_work="Work that would be lost",
    heading_gpus="Cards",
    heading_owner="Owner",
    why_link="Why, in full",
    keep_button="Keep this job",
    rule_tag="rule {rule}",
    level_tag="level {level}",
    footer="gpuwarden keeps shared GPUs fair. This address does not read answers.",
    test_mark="TEST",
    cut="... the rest is on the job's page",
    private="Only the owner has the link and the command; operators may keep it as well.",
    full_stop=".",
    after_stop=" ",
    comma=", ",
    semicolon="; ",
    colon=": ",
    more="and {count} more",
    clock="{weekday} {day:02d} {month} {time}",
    moment="{clock} ({zone})",
    weekdays=("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
    months=(
        *("Jan", "Feb", "Mar", "Apr", "May", "Jun"),
        *("Jul", "Aug", "Sep", "Oct", "Nov", "Dec"),
    ),
    duration_units=MappingProxyType(
        {"y": "y", "w": "w", "d": "d", "h": "h", "m": "m", "s": "s", "ms": "ms"}
    ),
    duration_joint="",
    quantity_units=MappingProxyType({"img/s": "img/s", "steps/s": "steps/s", "cores": "cores"}),
    not_known="not known",
    level_names=MappingProxyType(
        {
            "light": "light",
            "moderate": "moderate",
            "severe": "severe",
            "ended": "ended",
            "page": "page",
        }
    ),
    signal_names=MappingProxyType(
        {
            "gpu_utilization": "GPU utilization",
            "gpu_memory": "GPU memory held",
            "gpu_memory_share": "share of the GPU memory held",
            "card_utilization": "utilization of the card",
            "card_memory_share": "memory used on the card",
            "card_memory_activity": "memory activity of the card",
            "card_power": "power draw of the card",
            "card_power_share": "power draw as a share of its limit",
            "card_temperature": "temperature of the card",
            "card_throttled": "time with clocks lowered by heat or power supply",
            "card_unattributed_memory": "memory of the card that no known process holds",
            "job_cpu_cores": "CPU cores used",
            "job_read_rate": "read from storage",
            "job_io_wait": "processes blocked on I/O",
            "job_loader_workers": "data loader workers",
            "job_cpu_pressure": "time spent waiting for a CPU",
            "job_io_pressure": "time spent waiting for I/O",
            "job_zombie_processes": "defunct processes",
            "job_resident_memory": "main memory held",
            "throughput": "throughput",
            "step_rate": "steps per second",
            "data_wait_share": "training time spent waiting for data",
        }
    ),
    channel_names=MappingProxyType({"log": "log", "heartbeat": "heartbeat", "cpu": "CPU"}),
    aggregates=MappingProxyType(
        {
            "min": "lowest of the last {window}",
            "max": "highest of the last {window}",
            "avg": "mean of the last {window}",
        }
    ),
    window_seconds="{length}",
    window_samples="{count} samples",
    over="last {window}",
    now="now",
    comparisons=MappingProxyType(
        {
            "above": "above {limit}",
            "at_least": "at least {limit}",
            "below": "below {limit}",
            "at_most": "at most {limit}",
        }
    ),
    share_of_samples="{comparison} in at least {share} of the time",
    of_all_gpus="on all GPUs",
    of_any_gpu="on any GPU",
    of_share_of_gpus="on at least {share} of the GPUs",
    deviation_below="more than {tolerance} below what is expected",
    deviation_above="more than {tolerance} above what is expected",
    deviation_outside="more than {tolerance} away from what is expected",
    deviation_floor="{deviation} and by more than {floor}",
    seen="{what}{colon}{measured} (the rule: {limit})",
    seen_against="{what}{colon}{measured}, where {expected} is expected (the rule: {limit})",
    silent="no sign of life for {length} or longer{colon}{channels}",
    silent_ago="{channel} {age} ago",
    silent_never="{channel} never",
    no_progress="no training step in {length}",
    no_progress_measured="no training step in the last {length}, although it says that it trains",
    needs_memory="what it declares needs over {share} of a card's memory",
    needs_memory_measured="what it declares needs an estimated {low} to {high} of a card's {size} "
    "(the rule: over {share})",
    expression="the rule's own figure",
    budget_used={
        "day": "used share of the team's budget of today",
        "week": "used share of the team's budget of this week",
        "month": "used share of the team's budget of this month",
    },
    all_of="all of ({parts})",
    any_of="any of ({parts})",
    negated="not ({part})",
    expected_of="{entries} ({basis})",
    expected_estimate_of="{entries} (estimate by formula: {basis})",
    expected_entry="{what}{colon}{amount}",
    estimated_band="an estimated {low} to {high}",
    cause_names=MappingProxyType(
        {
            "data-loading": "data loading",
            "hyperparameters": "hyperparameters",
            "model": "the model",
            "hardware": "hardware",
            "idle": "idle",
            "unknown": "not known; the figures above speak for themselves",
        }
    ),
    cause_memory="{memory} of GPU memory are held, where {expected_memory} are expected of {basis}",
    cause_wait="the training loop waits for data in {wait} of its time",
    cause_wait_workers="{workers} workers, and the training loop waits for data in {wait} of its "
    "time",
    cause_blocked="{blocked} processes are blocked on I/O on average",
    cause_blocked_workers="{workers} workers, and {blocked} processes are blocked on I/O on "
    "average",
    cause_idle_memory="{memory} of GPU memory are held and the GPU is used {utilization}",
    cause_idle="the GPU is held and the GPU is used {utilization}",
    cause_throttled="the GPU's clocks are lowered ({reasons})",
    cause_busy="the GPU is busy {utilization} of the time",
    cause_throughput="; {throughput}",
    cause_throughput_expected="; {throughput} of {expected} expected",
    cause_cores="; it uses {cores}",
    remedy_memory="declare what really runs, or set batch={batch} and imgsz={imgsz}; look for "
    "tensors that are kept from step to step",
    remedy_wait="raise workers=, use cache=ram or cache=disk, or move the data set to local "
    "storage",
    remedy_wait_no_workers="the loader runs in the training's own process: set workers= to at "
    "least 4, use cache=ram or cache=disk, or move the data set to local storage",
    remedy_wait_workers="raise workers= above {workers}, use cache=ram or cache=disk, or move the "
    "data set to local storage",
    remedy_idle="end the process or shut the notebook's kernel down to free the GPU",
    remedy_throttled="nothing in the training needs to change: the operators should look at "
    "cooling and power",
    remedy_busy="compare the model with its profile: changed layers, amp=False or debugging hooks "
    "cost this much",
    on_node=" on {node}",
    notice_summary="Job {job}{where}: {what}",
    notice_description="Your job {job}{where} has broken the rule {rule} since {time}.",
    next_nothing="Nothing is done to the job; the rule {rule} only tells you.",
    next_if="If this does not change",
    next_if_far=", and has gone so far as {condition}",
    next_if_waiting=", and while somebody waits for a GPU",
    next_asked="{condition}, the job is asked to save and leave, and is ended, not before {time}: "
    "SIGTERM, and SIGKILL {grace} later.",
    next_ended="{condition}, the job is ended, not before {time}: SIGTERM, and SIGKILL {grace} "
    "later.",
    next_checkpoint="from {time} on it is asked to save its state",
    next_yield="from {time} on it is asked to finish its epoch, save, leave within {grace} and be "
    "queued again",
    next_requeue="not before {time} its platform ends it and queues it again",
    next_terminate="not before {time} it is ended: SIGTERM, and SIGKILL {grace} later",
    next_save_yourself="No trainer is known in it that could be asked to save: save what you need "
    "before.",
    next_on_trial="This rule is on trial: if the end would be wrong, object on the job's page; "
    "with enough objections it only warns.",
    keep_used_up="It has been kept {used} times, which is all this rule allows.",
    keep_terms="Each time moves the end by up to {length}; {left} of {times} left.",
    keep_open="Open this page and say why",
    keep_run="Or run",
    keep_only_run="Run",
    work_since_saved="{length} since its last saved state",
    work_since_start="{length} (everything since its start: no saved state is known)",
    work_gpu_hours="; {hours} GPU-hours",
    work_cost=", about {amount}",
    card="GPU {index}",
    card_named="GPU {index} ({name})",
    ending_summary="Job {job} is being ended: {what}",
    ending_description="Your job {job} is being ended by the rule {rule}, as announced. {asked}"
    "SIGTERM at {time}, and SIGKILL {grace} later for what is then left of it.",
    ending_asked="It is asked to save and leave: ",
    ended_summary="Job {job} was ended by the rule {rule}",
    ended_description="Your job {job} was ended by the rule {rule} at {time}.",
    ended_freed=" {memory} of GPU memory were freed.",
    ended_saved="It was asked to save and leave: `gpuwarden train ... resume=auto` goes on from "
    "its last saved state.",
    ended_unsaved="It was not asked to save: what it had not saved by itself is gone.",
    left_summary="Job {job} has left its cards and is queued again",
    left_description="Your job {job} was asked by the rule {rule} to save and leave, and had left "
    "at {time}. It is queued again and goes on from its last saved state.",
    requeued_summary="Job {job} was ended by the rule {rule} and is queued again",
    requeued_description="Your job {job} was ended by the rule {rule} at {time}, and its platform "
    "has queued it again.",
    unproven_summary="Job {job}: its end could not be proven",
    unproven_description="The rule {rule} ended your job {job} at {time}, but not all of it is "
    "proven gone ({reason}). The operators look into it.",
    came_back_summary="Job {job} has come back after it was ended",
    came_back_description="The work of job {job} ({work}) was ended by the rule {rule} {times} "
    "times within a day, at {last} for the last time, was started again, and breaks the rule "
    "again.",
    came_back_next="It is not ended again before {until}. If a controller, a queue or a script "
    "starts it again, stop that, or mend what the rule is about.",
    leaving_summary="Job {job} is asked to make room",
    leaving_description="At {asked} {by} asked your job {job} to save and leave at {where}, by "
    "{until}: {reason}. Nobody ends it.",
    leaving_where={"step": "its next step", "epoch": "the end of its epoch"},
    leaving_next={
        "requeue": "It is queued again and goes on where it was; there is nothing that you have to "
        "do.",
        "hold": "It is saved, and does not come back by itself: start it again to go on.",
    },
    withdrawn_summary="Job {job} is not ended after all",
    withdrawn_description="The rule {rule} had announced the end of your job {job}. That is called "
    "off: {why}.",
    withdrawn_next="Nothing is done to the job, and there is nothing that you have to do.",
    withdrawn_observes="the rule only observes now",
    withdrawn_rule_gone="the rule is no longer in force",
    undeliverable_summary="The owner of job {job} cannot be told",
    undeliverable_description="User {user} has no proof of the notice of rule {rule} {waited} "
    "after it was due: {why}. The job is not ended without it. Mend the address in the directory, "
    "or the mail or Slack settings.",
    undeliverable_unheard="Alertmanager has not brought it to the engine by a channel that proves "
    "anything",
    unknown_user="unknown",
    halted_summary="gpuwarden ends no job",
    halted_part_summary="gpuwarden ends no job by the rules of a file",
    halted_share="Jobs of {owners} owners are due at once{of} among {running} running jobs; more "
    "than {limit} is taken for a fault of the data until a person says otherwise.",
    halted_of_file=" for the rules of {file}",
    budget_periods={"day": "today", "week": "this week", "month": "this month"},
    budget_summary="{team} has used {share} of its budget ({period})",
    budget_description="{used} of {limit}; it ends {end}.{forecast} This note ends no job.",
    budget_forecast=" At the pace of late it will be {expected} by then ({low} to {high}).",
    outcome_names=MappingProxyType({"incomplete": "incomplete", "failed": "failed"}),
    pager_summary="Reclaim of job {job} is {state}",
    pager_description="{reason}. No other job on its cards is ended until it has let go of them; "
    "look at the node's processes and at the agent's journal.",
    no_reason="No reason given",
    record="{meaning} (`{record}`)",
    test_summary="A test message of gpuwarden for {user}",
    test_description="An operator tries whether {user} can be reached here. No job is meant.",
    test_next="There is nothing that you have to do.",
)
