"""Who may ask the daemon for what, on the socket of the machine and over the network."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.scheduling.daemon_scenes import BOOKING, LOCAL, ME, POLICY, WAITS
from tests.scheduling.daemons import PlayedHolds, PlayedQueue, free_port, running
from tests.scheduling.policy_files import NOW

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.scheduling.daemon_clients import DaemonClient
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.scheduling.daemons import Running


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Running]:
    """A daemon of a cluster."""
    with running(tmp_path, POLICY, now=NOW) as found:
        yield found


def task(**parts: object) -> dict[str, object]:
    """A task as `gpuwarden submit` sends it, of somebody who says to be root."""
    made = Task(
        name="night",
        run_id="night",
        words=("model=yolov8m", "data=coco.yaml"),
        user="somebody-else",
        team="vision",
        priority="high",
        gpus=2,
        directory="/home",
    )
    return {**made.as_document(), **parts}


def test_a_job_is_of_whom_the_kernel_names(tmp_path: Path) -> None:
    """Whatever its document says; uid and gid come from the socket, the token goes along."""
    with running(tmp_path, LOCAL, now=NOW, driver=PlayedQueue) as here:
        found = here.client.ask("POST", "/v1/jobs", body={"task": task(), "token": "t1"})
        assert found == {"id": "1", "engine": "local"}
        ((taken, uid, gid, token),) = here.driver.taken
        assert (taken.user, taken.team, uid, gid, token) == (
            ME,
            "vision",
            os.geteuid(),
            os.getegid(),
            "t1",
        )
        with pytest.raises(RefusedAction, match="there are 4 cards"):
            here.client.ask("POST", "/v1/jobs", body={"task": task(gpus=5)})
        with pytest.raises(InvalidInput, match="no document"):
            here.client.ask("POST", "/v1/jobs", body={"task": {"schema": "x"}})


def test_a_queue_whose_jobs_are_only_held(tmp_path: Path) -> None:
    """Ids may have slashes in them; what it cannot do is said with what can."""
    with running(tmp_path, LOCAL, now=NOW, driver=PlayedHolds) as here:
        here.driver.rows = (dataclasses.replace(WAITS, id="vision/cats-1", user=ME),)
        for verb in ("hold", "release"):
            here.client.ask("POST", f"/v1/jobs/vision%2Fcats-1/{verb}")
        assert here.driver.commands == [(v, "vision/cats-1", ME) for v in ("hold", "release")]
        with pytest.raises(RefusedAction, match="kubectl delete job"):
            here.client.ask("POST", "/v1/jobs/vision%2Fcats-1/cancel")


def test_jobs_of_others_are_others(tmp_path: Path) -> None:
    """One's own can be commanded, others' only by operators; what is not there is not."""
    with running(tmp_path, LOCAL, now=NOW, driver=PlayedQueue) as here:
        mine = dataclasses.replace(WAITS, id="1", user=ME)
        here.driver.rows = (mine, dataclasses.replace(WAITS, id="2", user="cy"))
        for verb in ("hold", "release", "cancel"):
            here.client.ask("POST", f"/v1/jobs/1/{verb}")
        assert here.driver.commands == [(v, "1", ME) for v in ("hold", "release", "cancel")]
        with pytest.raises(RefusedAction, match="no job 3"):
            here.client.ask("POST", "/v1/jobs/3/cancel")
        if os.geteuid() != 0:
            with pytest.raises(RefusedAction, match="job 2 is of cy"):
                here.client.ask("POST", "/v1/jobs/2/cancel")


def test_who_only_looks_commands_nothing_whatever_its_name(tmp_path: Path) -> None:
    """A reader's token may have the name of a user: that user's jobs and bookings stay."""
    (tmp_path / "board").write_text("b" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(f"version: 1\ntokens:\n- {{name: {ME}, role: reader, file: board}}\n")
    port = free_port()
    with running(
        tmp_path, LOCAL, now=NOW, driver=PlayedQueue, listen=("127.0.0.1", port), tokens=tokens
    ) as here:
        here.driver.rows = (dataclasses.replace(WAITS, id="1", user=ME),)
        booked = here.client.ask("POST", "/v1/bookings", body=BOOKING)
        board = DaemonClient(url=f"http://127.0.0.1:{port}", token_file=tmp_path / "board")
        for method, path in (
            *(("POST", f"/v1/jobs/1/{verb}") for verb in ("hold", "release", "cancel")),
            ("DELETE", f"/v1/bookings/{booked['booking']}"),
        ):
            with pytest.raises(RefusedAction, match="may look, and change nothing"):
                board.ask(method, path)
        with pytest.raises(RefusedAction, match="may look, and change nothing"):
            board.ask("POST", f"/v1/bookings/{booked['booking']}/end", body={"by": "1h"})
        assert here.driver.commands == []
        assert len(here.driver.slots) == 1


def test_an_engine_with_a_queue_of_its_own_keeps_it(here: Running) -> None:
    """Whoever asks is told which command does it there."""
    with pytest.raises(RefusedAction, match="sbatch, and scancel"):
        here.client.ask("POST", "/v1/jobs", body={"task": task()})


def test_nobody_submits_over_the_network(tmp_path: Path) -> None:
    """A token names a user, and no uid: jobs run as who the kernel names."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: operator, file: cy}\n")
    port = free_port()
    with running(
        tmp_path, LOCAL, now=NOW, driver=PlayedQueue, listen=("127.0.0.1", port), tokens=tokens
    ):
        cy = DaemonClient(url=f"http://127.0.0.1:{port}", token_file=tmp_path / "cy")
        with pytest.raises(RefusedAction, match="use the socket"):
            cy.ask("POST", "/v1/jobs", body={"task": task()})


def test_the_network_is_closed_to_who_shows_no_token(tmp_path: Path) -> None:
    """But for health and metrics, which name no users; a header makes nobody a local user."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n")
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        url = f"http://127.0.0.1:{port}"
        here.driver.rows = (WAITS,)
        here.tick(5)
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"gpuwarden.peer": "0"}):
            for path in ("/v1/schedule", "/v1/policy"):
                answer = httpx.get(f"{url}{path}", headers=headers)
                assert answer.status_code == 401, (path, headers)
        assert httpx.get(f"{url}/-/healthy").text == "healthy\n"
        assert httpx.get(f"{url}/-/ready").status_code == 200
        assert "ana" not in httpx.get(f"{url}/metrics").text
        good = {"Authorization": "Bearer " + "c" * 32}
        assert httpx.get(f"{url}/v1/schedule", headers=good).status_code == 200


def test_without_tokens_the_loopback_may_look_and_no_more(tmp_path: Path) -> None:
    """A board of the same machine needs no token; nobody changes anything without one."""
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port)):
        anybody = DaemonClient(url=f"http://127.0.0.1:{port}")
        assert anybody.schedule().cluster == "ci"
        with pytest.raises(RefusedAction, match="may look"):
            anybody.ask("POST", "/v1/bookings", body=BOOKING)


def test_an_address_of_the_calendar_is_its_own_secret(tmp_path: Path) -> None:
    """It opens the calendar of its team, and nothing else; another letter opens nothing."""
    (tmp_path / "cy").write_text("c" * 32)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("version: 1\ntokens:\n- {name: cy, role: user, file: cy}\n")
    port = free_port()
    with running(tmp_path, POLICY, now=NOW, listen=("127.0.0.1", port), tokens=tokens) as here:
        here.client.ask("POST", "/v1/bookings", body=BOOKING)
        path = here.client.ask("GET", "/v1/calendar-address", parameters={"team": "vision"})["path"]
        url = f"http://127.0.0.1:{port}"
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert "SUMMARY:vision: 4 x a100-40" in answer.text
        assert httpx.get(url + path.replace("team=vision", "team=speech")).status_code == 403
        assert httpx.get(url + path[:-1] + "x").status_code == 403
        assert httpx.get(url + "/v1/calendar.ics").status_code == 401
