"""The CPU device object: threads that run a compiled entry point until it parks or shuts down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from host.ring import write_word
from host.wire import State, Word


class CpuDevice:
    """Runs `entry(worker, *args)` on one thread per worker, each time it is launched.

    `entry` must release the interpreter lock, and return on park, shutdown and fault. The threads
    wait between launches, so that a launch costs a wake-up and not a thread. `operations` are the
    names of the program's operations, for hang reports.
    """

    name = "cpu"
    worker_name = "worker"

    def __init__(
        self,
        entry: Callable[..., object],
        args: Sequence[object],
        *,
        workers: int,
        control: np.ndarray,
        operations: Sequence[str],
    ) -> None:
        self.workers = workers
        self.operations = tuple(operations)
        self.crash: BaseException | None = None
        self._control = control
        self._go = [threading.Semaphore(0) for _ in range(workers)]
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(entry, args, worker),
                name=f"megadecode-{worker}",
                daemon=True,
            )
            for worker in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, entry: Callable[..., object], args: Sequence[object], worker: int) -> None:
        while True:
            self._go[worker].acquire()
            if self._closing:
                return
            try:
                entry(worker, *args)
            except BaseException as error:
                self.crash = error
                write_word(self._control, Word.STATE, State.FAULT)
                return

    def launch(self) -> None:
        """Start the loop. The caller has set the state to RUNNING and launches once per park."""
        for semaphore in self._go:
            semaphore.release()

    def failure(self) -> str:
        """Nothing but its own words can tell what became of this device."""
        return ""

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the threads, which must be on their way out of `entry`; whether all of them ended."""
        self._closing = True
        self.launch()
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)
