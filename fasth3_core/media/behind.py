"""Work in a second thread, a bounded number of items behind: encoding while the next clip is decoded."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

DEPTH = 2
"""Items that may wait. One hides the jitter of either side; more would only take memory."""


@contextmanager
def behind(work: Callable[[Any], None], depth: int = DEPTH) -> Iterator[Callable[[Any], None]]:
    """Yield put(item), which has work(item) done in one other thread, in order.

    put() waits while `depth` items are unfinished, and raises what an earlier work() raised, as does every put() after
    it. All items are done when the block ends. If the block or work() raises, those that had not been begun never are.
    """
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fasth3-encode")
    pending: deque = deque()
    broken: BaseException | None = None

    def step(item: Any) -> None:
        nonlocal broken
        if broken is not None:
            raise broken
        try:
            work(item)
        except BaseException as error:
            broken = error
            raise

    def put(item: Any) -> None:
        while pending and (len(pending) >= depth or pending[0].done()):
            pending.popleft().result()
        pending.append(thread.submit(step, item))

    try:
        yield put
        while pending:
            pending.popleft().result()
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
