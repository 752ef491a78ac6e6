"""Jobs over HTTP: submit, cancel, hold, release; for an engine whose queue is the daemon's own."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse, Response

from gpuwarden.errors import RefusedAction
from gpuwarden.refusals import Refusal
from gpuwarden.scheduling.bodies import read_fields, text
from gpuwarden.scheduling.drivers import Commanded, Holdable, Logged
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from starlette.requests import Request

    from gpuwarden.scheduling.callers import Caller
    from gpuwarden.scheduling.schedulers import Scheduler
    from gpuwarden.scheduling.workers import Worker

    Handler = Callable[[Request], Awaitable[Response]]

_ELSEWHERE = {
    "slurm": "Slurm has its own queue: gpuwarden submit hands jobs to sbatch, and scancel, "
    "scontrol hold and scontrol release command them",
    "kueue": "Kueue has its own queue: gpuwarden submit makes a Job, and kubectl delete job NAME "
    "ends it",
}
_OUTPUT = {
    "slurm": "Slurm writes its jobs' output itself: NAME-ID.log where it was submitted, else see "
    "StdOut of scontrol show job ID",
    "kueue": "Kubernetes keeps its pods' output itself: kubectl logs -n NAMESPACE job/NAME",
}


class JobRoutes:
    """Handlers of jobs.

    Args:
        scheduler: whose queue it is.
        worker: the driver's thread.
        caller: says who asks.
    """

    def __init__(
        self, scheduler: Scheduler, worker: Worker, caller: Callable[[Request], Caller]
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._caller = caller
        self._busy = asyncio.Semaphore(2)

    def routes(self) -> Iterator[tuple[str, str, Handler]]:
        """Method, path and handler of each."""
        yield "POST", "/v1/jobs", self._submit
        yield "GET", "/v1/jobs/{entry:path}/log", self._log
        for verb in ("cancel", "hold", "release"):
            yield "POST", f"/v1/jobs/{{entry:path}}/{verb}", self._commanding(verb)

    def _queue(self) -> Commanded:
        driver = self._scheduler.driver
        if not isinstance(driver, Commanded):
            raise self._not_here()
        return driver

    def _holding(self) -> Holdable:
        driver = self._scheduler.driver
        if not isinstance(driver, Holdable):
            raise self._not_here()
        return driver

    def _not_here(self) -> RefusedAction:
        words = _ELSEWHERE.get(self._scheduler.driver.engine, "it has its own queue")
        return RefusedAction("no_queue", words)

    async def _submit(self, request: Request) -> Response:
        caller, queue = self._caller(request), self._queue()
        if caller.uid is None or caller.gid is None:
            raise Refusal(
                403, "closed", "jobs run as who submits them: use the socket of this machine"
            )
        uid, gid = caller.uid, caller.gid
        body = await read_fields(request, "task", "token")
        token = text(body, "token", default="")
        said = Task.from_document(body.get("task"))
        team = await asyncio.to_thread(caller.team, self._scheduler.policy, said.team)
        # Whoever the document says it is: it is who the socket says.
        task = dataclasses.replace(said, user=caller.name, team=team)
        now = self._scheduler.clock.wall()
        async with self._busy:
            entry = await asyncio.to_thread(
                self._worker.call,
                lambda: queue.submit(task, uid=uid, gid=gid, now=now, token=token),
            )
        return JSONResponse({"id": entry, "engine": self._scheduler.driver.engine}, status_code=201)

    async def _log(self, request: Request) -> Response:
        """Where a job's output goes: whoever asks opens it themselves, with their own rights."""
        caller, driver = self._caller(request), self._scheduler.driver
        name = request.path_params["entry"]
        if not isinstance(driver, Logged):
            raise RefusedAction("no_logs", _OUTPUT.get(driver.engine, "its engine has its output"))
        if caller.uid is None:
            raise Refusal(403, "closed", "the file is on that machine: ask on its socket")
        path = await asyncio.to_thread(self._worker.call, lambda: driver.log_path(name))
        return JSONResponse({"id": name, "path": str(path)})

    def _commanding(self, verb: str) -> Handler:
        async def command(request: Request) -> Response:
            caller = self._caller(request)
            queue = self._queue() if verb == "cancel" else self._holding()
            caller.must_change()
            name = request.path_params["entry"]
            now = self._scheduler.clock.wall()

            def act() -> None:
                entry = next(
                    (item for item in self._scheduler.driver.entries() if item.id == name), None
                )
                if entry is None:
                    raise RefusedAction("unknown", f"there is no job {name}: see gpuwarden queue")
                if not (caller.operates or caller.name == entry.user):
                    raise RefusedAction(
                        "others", f"job {name} is of {entry.user}: they or an operator can"
                    )
                getattr(queue, verb)(name, by=caller.name, now=now)

            async with self._busy:
                await asyncio.to_thread(self._worker.call, act)
            return JSONResponse({"id": name, "done": verb})

        return command
