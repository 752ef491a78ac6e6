"""The one thread from which a driver is called."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

ANSWER_SECONDS = 20.0
"""How long whoever asks waits for the engine; a tick may take longer."""

Result = TypeVar("Result")


class Worker:
    """Calls one after the other, in a thread of its own."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="driver")

    def call(self, function: Callable[[], Result], *, seconds: float = ANSWER_SECONDS) -> Result:
        """Call a function in the thread, and wait for what it gives.

        Args:
            function: what is called; errors of its own come through.
            seconds: to wait; a call that has not begun by then is not made any more.

        Raises:
            TimeoutError: it has not ended by then.
        """
        future = self._pool.submit(function)
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            if future.done():
                raise  # its own
            future.cancel()
            raise TimeoutError("the engine is busy: try again in a minute") from None

    def begin(self, function: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Have a function called in the thread."""
        return self._pool.submit(function)

    def close(self) -> None:
        """Let what has begun end, and drop what has not."""
        self._pool.shutdown(wait=True, cancel_futures=True)
