"""Slurm's answers in text, and what users may have it repeat in them."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms import hostlists
from gpuwarden.platforms.slurm import SlurmJob
from gpuwarden.platforms.slurm_texts import (
    LIST_FIELDS,
    GresCard,
    decode_config,
    decode_details,
    decode_gres,
    decode_list,
    decode_settings,
    decode_version,
    list_format,
    node_names,
    step_job,
)

MARK = "|0123456789abcdef"
JOB = SlurmJob(1, name="a b=c")
DETAILS = (Path(__file__).parent / "answers/scontrol-24.11-job.txt").read_text()


def _row(**changes: str) -> str:
    values = dict.fromkeys(LIST_FIELDS, "N/A") | {
        "JobID": "12",
        "ArrayJobID": "12",
        "UserID": "1000",
        "State": "RUNNING",
        "RestartCnt": "0",
        "SubmitTime": "1795985617",
        "StartTime": "1795985618",
        "Partition": "gpu",
        "tres-alloc": "cpu=4,gres/gpu=2",
        "NodeList": "gpu[01-02]",
        "Account": "(null)",
    }
    return "".join(f"{value}{MARK}" for value in (values | changes).values()) + "\n"


class TestList:
    """squeue, by a form with a mark that nobody can foresee."""

    def test_rows(self) -> None:
        """A plain job, an array's task and a component."""
        changes = [
            {},
            {"JobID": "14", "ArrayJobID": "12", "ArrayTaskID": "3", "RestartCnt": "2"},
            {"JobID": "16", "HetJobID": "15", "HetJobOffset": "1", "State": "COMPLETING"},
        ]
        jobs = decode_list("".join(_row(**item) for item in changes), MARK)
        assert [job.number for job in jobs] == ["12", "12_3", "15+1"]
        assert [job.restarts for job in jobs] == [0, 2, 0]
        assert (jobs[0].submit_time, jobs[0].end_time, jobs[0].account) == (1795985617.0, None, "")
        assert jobs[0].nodes == ("gpu01", "gpu02")
        assert jobs[0].tres["gres/gpu"] == "2"
        assert all(job.holds for job in jobs)

    def test_nobody(self) -> None:
        """No rows, no jobs."""
        assert decode_list("", MARK) == decode_list("\n", MARK) == ()

    @given(words=st.text(max_size=60).filter(lambda text: MARK not in text))
    def test_any_words(self, words: str) -> None:
        """Whatever a job and its account are called, the rows stay what they are."""
        jobs = decode_list(_row(Account=words, Name=words) + _row(JobID="13"), MARK)
        assert [(job.job_id, job.restarts) for job in jobs] == [(12, 0), (13, 0)]
        assert jobs[0].name == words

    @pytest.mark.parametrize(
        "text",
        [
            "12|RUNNING\n",
            _row() + "12",
            _row()[: -len(MARK) - 1],
            _row(JobID="x"),
            _row(JobID="0"),
            _row(NodeList="a[1"),
            "squeue: error: Invalid job format specification",
        ],
    )
    def test_another_form(self, text: str) -> None:
        """An answer of another form is none."""
        with pytest.raises(ServiceUnavailable):
            decode_list(text, MARK)

    @pytest.mark.parametrize("mark", ["", "|", "|short", "0123456789", "|0123 4567", "|ABCDEFGHIJ"])
    def test_a_mark_that_is_none(self, mark: str) -> None:
        """A mark that could be foreseen, or that Slurm would take for a width, is refused."""
        with pytest.raises(ValueError, match="is no mark"):
            list_format(mark)


class TestDetails:
    """scontrol show job: the cards of one job."""

    def test_recorded(self) -> None:
        """The answer of a real 24.11."""
        assert decode_details(DETAILS, JOB) == {"node1": (0,)}

    def test_several_nodes(self) -> None:
        """Nodes with the same cards share a line."""
        lines = (
            "     Nodes=gpu[01-02] CPU_IDs=0-1 Mem=0 GRES=gpu:a100:2(IDX:0-1)\n"
            "     Nodes=gpu03 CPU_IDs=0 Mem=100 GRES=gpu:a100:1(IDX:3)\n"
            "     Nodes=gpu04 CPU_IDs=0 Mem=0 GRES=\n"
        )
        text = DETAILS.replace("     Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:0)\n", lines)
        assert text != DETAILS
        cards = {"gpu01": (0, 1), "gpu02": (0, 1), "gpu03": (3,), "gpu04": ()}
        assert decode_details(text, JOB) == cards

    @pytest.mark.parametrize(
        "words",
        [
            "a\n   UserId=root(0)",
            "a\n     Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu:a100:1(IDX:3)\n   MinCPUsNode=1",
            "a\nJobId=1 JobName=b",
            "a\n   NodeList=x\n",
            "a\n   Command=x",
            DETAILS.partition("JobName=")[2],
            "a\n" + DETAILS,
        ],
    )
    def test_words_that_look_like_an_answer(self, words: str) -> None:
        """A name or a comment is never taken for what Slurm says."""
        text = DETAILS.replace("JobName=a b=c", f"JobName={words}")
        cards = {"node1": (0,)}
        assert decode_details(text, SlurmJob(1, name=words)) == cards
        assert decode_details(text, SlurmJob(1, name="b")) is None
        text = DETAILS.replace("Command=/opt", f"Command={words}\n   Comment={words}\n/opt")
        assert text != DETAILS
        assert decode_details(text, JOB) == cards

    @pytest.mark.parametrize("place", ["Account=(null)", "Dependency=(null)", "MCS_label=N/A"])
    def test_words_in_other_places(self, place: str) -> None:
        """Where nobody can tell who wrote a line, rather nothing is known of the job's cards."""
        words = "x\n   JobState=x\n   NodeList=x\n     Nodes=node1 CPU_IDs=0 Mem=0 GRES=gpu(IDX:3)"
        text = DETAILS.replace(place, f"{place}{words}\n   MinCPUsNode=1")
        assert text != DETAILS
        assert decode_details(text, JOB) is None
        job = dataclasses.replace(JOB, account="x\n   Command=")
        assert decode_details(DETAILS, job) is None

    @pytest.mark.parametrize("text", ["", "JobId=1", f"\n{DETAILS}", DETAILS.upper()])
    def test_no_answer(self, text: str) -> None:
        """An answer that is not about this one job tells nothing."""
        assert decode_details(text, JOB) is None

    def test_of_another_job(self) -> None:
        """An answer about another job tells nothing."""
        assert decode_details(DETAILS, SlurmJob(2, name="a b=c")) is None


class TestCluster:
    """The cluster, its nodes, and a node's own list of cards."""

    def test_settings(self) -> None:
        """The cluster's name, and whether it accounts for cards."""
        text = "ClusterName             = main\nAccountingStorageTRES   = cpu,mem,gres/gpu\n"
        config = decode_config(text)
        assert (config.name, config.accounts_for_gpus) == ("main", True)
        assert not decode_config("ClusterName=x\n").accounts_for_gpus

    def test_a_setting_without_a_value_takes_none_of_the_next(self) -> None:
        """What follows it in the list stays a setting of its own."""
        text = "ClusterName = x\nPriorityFlags     = \nKillWait = 45 sec\nRequeueExit = (null)\n"
        assert decode_settings(text) == {
            "ClusterName": "x",
            "PriorityFlags": "",
            "KillWait": "45 sec",
            "RequeueExit": "",
        }
        config = decode_config(text)
        assert (config.kill_wait, config.requeues_by_exit) == (45.0, False)

    @pytest.mark.parametrize("text", ["", "ClusterName = a b\n", "ClusterName = \n", "x"])
    def test_no_name(self, text: str) -> None:
        """Without a name that can be part of another there is no answer."""
        with pytest.raises(ServiceUnavailable):
            decode_config(text)

    @pytest.mark.parametrize(
        ("text", "version"),
        [
            ("slurm-wlm 22.05.8", (22, 5)),
            ("slurm 24.11.5", (24, 11)),
            ("slurm 26.05.0-0rc1", (26, 5)),
            ("", (0, 0)),
        ],
    )
    def test_versions(self, text: str, version: tuple[int, int]) -> None:
        """Debian and SchedMD name their packages differently."""
        assert decode_version(text) == version

    def test_nodes_of_a_host(self) -> None:
        """A node need not be called as its host, and a host may have several."""
        text = (
            "NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=vm Version=22.05.8\n"
            "NodeName=n2 Arch=x86_64 NodeHostName=vm Reason=was NodeHostName=x\n"
            "NodeName=n3 NodeHostName=other\n"
            "NodeName=vm\n"
        )
        assert node_names(text, {"vm", "vm.lab"}) == ("n1", "n2", "vm")
        assert node_names("NodeName=n1 NodeHostName=vm.lab\n", {"vm"}) == ("n1",)
        assert node_names("NodeName=n1 NodeHostName=vm2.lab\n", {"vm"}) == ()

    @pytest.mark.parametrize(
        ("title", "job"),
        [
            ("slurmstepd: [211.batch]", 211),
            ("slurmstepd: [211.extern]", 211),
            ("slurmstepd: [211.0]", 211),
            ("slurmstepd: [211.0+1]", 211),
            ("slurmstepd: [211.interactive] ", 211),
            ("slurmstepd infinity", None),
            ("slurmstepd: [x.batch]", None),
            ("", None),
        ],
    )
    def test_steps(self, title: str, job: int | None) -> None:
        """The step's manager tells its job in its title."""
        assert step_job(title) == job

    def test_cards(self) -> None:
        """The node's order of cards, with one line for one or for several."""
        text = (
            "slurmd: Gres Name=gpu Type=a100 Count=2 Index=4 ID=7696487 File=/dev/nvidia[4-5] "
            "Cores=0-3 CoreCnt=8 Links=(null) Flags=HAS_FILE,HAS_TYPE\n"
            "slurmd-n1: Gres Name=mps Count=100 ID=1 File=/dev/nvidia0\n"
            "slurmd-n1: Gres Name=gpu Count=1 Index=0 ID=7696487 File=/dev/nvidia0 (null)\n"
            "slurmd-n1: Gres Name=gpu Type=1g Count=1 Index=1 ID=7 "
            "File=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap21 UniqueId=MIG-1\n"
            "slurmd: Gres Name=gpu Count=1 Index=0 ID=7 File=/dev/tty0\n"
        )
        assert decode_gres(text) == (
            GresCard(4),
            GresCard(5),
            GresCard(0),
            GresCard(1, "MIG-1"),
            GresCard(None),
        )

    def test_cards_without_files(self) -> None:
        """A count of cards is no list of them."""
        with pytest.raises(ServiceUnavailable):
            decode_gres("slurmd: Gres Name=gpu Type=a100 Count=2 ID=7696487\n")
        assert decode_gres("slurmd: error: no gres.conf\n") == ()


class TestHostlists:
    """gpu[01-03,07],login1."""

    @pytest.mark.parametrize(
        ("text", "hosts"),
        [
            ("gpu[01-03,07],login1", ("gpu01", "gpu02", "gpu03", "gpu07", "login1")),
            ("a[1-2]b[3,4]", ("a1b3", "a1b4", "a2b3", "a2b4")),
            ("n[9-11]", ("n9", "n10", "n11")),
            ("n[008-010]x", ("n008x", "n009x", "n010x")),
            ("node1", ("node1",)),
            ("", ()),
            ("(null)", ()),
            ("None assigned", ()),
        ],
    )
    def test_lists(self, text: str, hosts: tuple[str, ...]) -> None:
        """Ranges keep the zeros that they are written with."""
        assert hostlists.expand(text) == hosts

    @pytest.mark.parametrize(
        "text",
        [
            *("a[1", "a]1[", "a[[1]]", "a[2-1]", "a[x]", "a,,b", "a b", "a[0-999999999]", "a[]"),
            *("[0-999][0-999]", "/etc/passwd", "a" * (2**20 + 1)),
        ],
    )
    def test_what_is_none(self, text: str) -> None:
        """What is no list, or names more hosts than there are, is refused."""
        with pytest.raises(ValueError, match=r"."):
            hostlists.expand(text)

    @given(st.text("ab[]0-9,. ", max_size=30))
    def test_any_text(self, text: str) -> None:
        """Whatever it is, it is expanded or refused."""
        with contextlib.suppress(ValueError):
            assert len(hostlists.expand(text)) <= hostlists.MAX_HOSTS
