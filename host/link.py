"""The host's end of the wire: what an engine does between launch and shutdown.

Users' threads push requests, aborts and commands under one lock. One poller thread takes
completions and hands them to each request's *sink*; it never waits for a reader, and while nothing
is in flight it does not poll at all. It is also the watchdog: a device that reports a fault, or
whose heartbeat stands still, ends every request with an exception that says where.

Nothing here decides anything about a request: lengths, stops and pages are the device's business.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from host.errors import DeviceError, DeviceHung, QueueFull
from host.inflight import InFlight
from host.pool import blocks_needed, write_blocks
from host.ring import (
    FULL,
    make_staging,
    push_abort,
    push_request,
    read_word,
    wait_take,
    write_word,
)
from host.sink import Device, Sink
from host.watch import Watch, describe_fault, describe_silence
from host.wire import BLOCK_BYTES, Command, CompletionKind, RequestKind, State, Wire, Word

_POLL_US = 20_000


class Link:
    """One device's requests in, completions out. Thread-safe."""

    def __init__(
        self, wire: Wire, device: Device, *, first_sequence: int = 0, deadline_s: float = 30.0
    ) -> None:
        self.wire = wire
        self.device = device
        self.deadline_s = deadline_s
        self.launches = 0
        self._inflight = InFlight(len(wire.abort) // 2, len(wire.params))
        self._pings: dict[int, threading.Event] = {}
        self._next_ping = -1
        self._request_tail = self._abort_tail = self._head = first_sequence
        self._holds = 0  # bodies of `parked()`
        self._parks = 0  # calls of `park` that wait for the device
        self._pushed_while_parking = False
        self._lost: DeviceError | None = None
        self._closing = self._closed = False
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # room appeared, or the poller has work
        write_word(wire.control, Word.STATE, State.PARKED)
        self._poller = threading.Thread(target=self._poll, name="megadecode-poll", daemon=True)
        self._poller.start()

    # -- requests ---------------------------------------------------------------------------------

    def submit(
        self,
        prompt: np.ndarray,
        max_new_tokens: int,
        params: np.void,
        sink: Sink,
        *,
        bias: tuple[np.ndarray, np.ndarray] | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Put a request on the wire; its id. `prompt` is int32, at least one token; `params` is one
        record of `wire.PARAMS`; `bias` are token ids (int32) and what to add to their logits
        (float32), as many as `params["bias_count"]` says.

        Waits while the engine holds as many requests as it can, up to `timeout_s` (None: for ever;
        0: not at all), then raises QueueFull. Raises DeviceError when the device is gone.
        """
        self._check_process()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        blocks = blocks_needed(len(prompt), int(params["bias_count"]))
        with self._changed:
            while True:
                self._check_usable()
                opened = self._inflight.open(sink, blocks)
                if opened is not None:
                    break
                self._wait_for_room(end, blocks)
            request_id, first = opened
            write_blocks(self.wire, first, params, prompt, bias)
            tail = self._request_tail
            try:
                self._push(
                    request_id, RequestKind.SUBMIT, len(prompt), max_new_tokens, first, blocks, end
                )
            except BaseException:
                if self._is_pushed(tail, request_id):  # an interrupt came right behind the push
                    self.abort(request_id)
                else:
                    self._inflight.withdraw(request_id)
                raise
            return request_id

    def abort(self, request_id: int) -> None:
        """Ask the device to end a request; its terminal entry comes all the same. Idempotent."""
        self._check_process()
        with self._changed:
            book = self._inflight
            if request_id not in book or request_id in book.aborted or self._lost:
                return
            book.aborted.add(request_id)
            push_abort(self.wire, self._abort_tail, request_id)
            self._abort_tail += 1
            self._wake_device()

    def ping(self, timeout_s: float = 5.0) -> float:
        """Seconds from pushing a no-op request to its answer; DeviceError when none comes."""
        self._check_process()
        answered = threading.Event()
        start = time.monotonic()
        with self._changed:
            self._check_usable()
            if self._holds:
                raise DeviceError("the engine is parked; leave `parked()` before a ping")
            ping_id, self._next_ping = self._next_ping, self._next_ping - 1
            self._pings[ping_id] = answered
            try:
                self._push(ping_id, RequestKind.PING, 0, 0, 0, 0, start + timeout_s)
            except BaseException:
                self._pings.pop(ping_id, None)
                raise
        if not answered.wait(timeout_s):
            self._check_usable()
            raise DeviceError(f"no answer to a ping within {timeout_s:g} s")
        if self._lost is not None:  # that is what has ended the wait
            raise self._lost
        return time.monotonic() - start

    @property
    def lost(self) -> DeviceError | None:
        """Why the device cannot be used any more; None while it can."""
        return self._lost

    @property
    def inflight(self) -> int:
        """Requests that have been pushed and have not ended."""
        return len(self._inflight)

    @property
    def free_blocks(self) -> int:
        """Pool blocks not in use."""
        with self._lock:
            return self._inflight.pool.free

    # -- park and shutdown ------------------------------------------------------------------------

    def state(self) -> State:
        """What the device says it is doing."""
        self._check_process()  # pinned memory is not there in a forked child
        return State(read_word(self.wire.control, Word.STATE))

    def park(self, timeout_s: float | None = None) -> None:
        """Make the device leave the loop at the next step boundary, and wait until it has.

        Requests in flight keep their place and go on at the next launch: at the next `submit`,
        `abort` or `unpark`.
        """
        self._check_process()
        with self._changed:
            self._check_usable()
            self._parks += 1
            write_word(self.wire.control, Word.COMMAND, Command.PARK)
            try:
                self._wait_state(State.PARKED, timeout_s or self.deadline_s)
            finally:
                self._parks -= 1
                if not self._parks:
                    write_word(self.wire.control, Word.COMMAND, Command.RUN)
            if not self._parks and self._pushed_while_parking:
                self._pushed_while_parking = False
                self._wake_device()

    def unpark(self) -> None:
        """Relaunch a parked device."""
        self._check_process()
        with self._changed:
            self._check_usable()
            self._wake_device()

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Keep the device parked for the body; requests submitted meanwhile wait in the ring."""
        self._check_process()
        with self._changed:
            self._holds += 1
            try:
                self.park()
            except BaseException:
                self._holds -= 1
                raise
        try:
            yield
        finally:
            with self._changed:
                self._holds -= 1
                if self._lost is None and not self._closed:
                    self._wake_device()

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what is in flight, shut the device down, end all threads. Idempotent.

        In a forked child, where the device's threads do not exist, it does nothing. On the poller's
        own thread, which a garbage collection may choose, another thread does the work.
        """
        if os.getpid() != self._pid:
            return
        if threading.current_thread() is self._poller:
            threading.Thread(target=self.close, name="megadecode-close", daemon=True).start()
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True  # no further request gets in
            self._holds = 0
        try:
            self._end_all(timeout_s)
        finally:  # also of a device that does not leave
            self.device.close()
            self._poller.join(timeout_s)

    def _end_all(self, timeout_s: float) -> None:
        """Abort, wait until every request has ended, shut down."""
        with self._changed:
            try:
                for request_id in self._inflight.ids():
                    self.abort(request_id)
                end = time.monotonic() + timeout_s
                while self._inflight and self._lost is None and time.monotonic() < end:
                    self._changed.wait(0.1)
                if self.state() in (State.RUNNING, State.PARKING):
                    # also to a device that was given up: should it only be late, it leaves at once
                    write_word(self.wire.control, Word.COMMAND, Command.SHUTDOWN)
                    if self._lost is None:
                        self._wait_state(None, timeout_s)
            finally:
                self._closed = True
                self._lose(DeviceError("the engine is closed"))

    # -- inside -----------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Before any lock is taken: in a forked child a lock may be held by a thread that the child
        does not have."""
        if os.getpid() != self._pid:
            raise DeviceError("the engine was made in another process; make one in this process")

    def _check_usable(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._closing:
            raise DeviceError("the engine is closed")

    def _wait_for_room(self, end: float | None, blocks: int) -> None:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            why = (
                f"all {self._inflight.most} places for requests in flight are taken"
                if not self._inflight.handles
                else f"the request pool has no room for {blocks * BLOCK_BYTES} bytes of prompt"
            )
            raise QueueFull(f"{why}; try again when a request has finished")
        self._changed.wait(left)

    def _push(
        self,
        request_id: int,
        kind: RequestKind,
        prompt_tokens: int,
        max_new_tokens: int,
        block: int,
        blocks: int,
        end: float | None,
    ) -> None:
        """Push one entry, waiting for a free one; launch the device if it has parked."""
        while True:
            state = push_request(
                self.wire, self._request_tail, request_id, int(kind), prompt_tokens,
                max_new_tokens, block, blocks,
            )  # fmt: skip
            if state != FULL:
                break
            if end is not None and time.monotonic() >= end:
                raise QueueFull(
                    f"the request ring holds {len(self.wire.request)} entries the device has not "
                    "taken yet; try again later"
                )
            self._wake_device()
            self._changed.wait(0.001)
            self._check_usable()
        self._request_tail += 1
        if state != State.RUNNING or self._parks:
            self._wake_device()
        self._changed.notify_all()

    def _wake_device(self) -> None:
        """The host's other half of the parking handshake; the lock is held."""
        if self._parks:
            self._pushed_while_parking = True
        if self._holds or self._parks:
            return
        end = time.monotonic() + self.deadline_s
        while (state := self.state()) == State.PARKING:
            if time.monotonic() > end:
                self._lose(DeviceHung(f"the device did not park within {self.deadline_s:g} s"))
                self._check_usable()
            time.sleep(0)
        if state == State.PARKED:
            write_word(self.wire.control, Word.STATE, State.RUNNING)
            self.launches += 1
            self.device.launch()
            self._changed.notify_all()

    def _wait_state(self, wanted: State | None, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while (state := self.state()) != wanted:
            if state == State.FAULT:
                raise self._fault() or DeviceError("the device reports a fault")
            if state == State.STOPPED or (wanted is None and state == State.PARKED):
                return
            if time.monotonic() > end:
                raise DeviceHung(f"the device did not leave its loop within {timeout_s:g} s")
            self._changed.wait(0.0005)

    def _is_pushed(self, tail: int, request_id: int) -> bool:
        """Whether an entry from counter value `tail` on is this request's; puts the producer's
        counter right if an interrupt left it behind."""
        for counter in range(tail, self._request_tail + 1):
            entry = self.wire.request[counter % len(self.wire.request)]
            if int(entry["sequence"]) == counter + 1 and int(entry["request_id"]) == request_id:
                self._request_tail = max(self._request_tail, counter + 1)
                return True
        return False

    def _poll(self) -> None:
        try:
            self._poll_until_closed()
        except BaseException as error:  # nobody may wait for a poller that is gone
            with self._changed:
                self._lose(DeviceError(f"the engine's poller ended with {error!r}"))
            raise

    def _poll_until_closed(self) -> None:
        staging = make_staging(256)
        watch, control = Watch(self.deadline_s), self.wire.control
        silence = partial(describe_silence, control, self.device)
        while True:
            with self._changed:
                while not self._closed and (
                    self._lost is not None or not (self._inflight or self._pings)
                ):
                    self._changed.wait()
                if self._closed:
                    return
                head = self._head
            taken = wait_take(self.wire, head, staging, _POLL_US)
            with self._changed:
                self._head = head + taken
                for entry in staging[:taken]:
                    self._dispatch(entry)
                if taken:
                    self._changed.notify_all()
                error = self._fault() or watch.look(control, silence)
                if error is not None and self._lost is None:
                    self._lose(error)

    def _dispatch(self, entry: np.void) -> None:
        if int(entry["kind"]) == CompletionKind.PONG:
            answered = self._pings.pop(int(entry["request_id"]), None)
            if answered is not None:  # else the engine was closed or lost meanwhile
                answered.set()
        elif self._lost is None:
            failed = self._inflight.take(entry)
            if failed is not None:
                self.abort(failed)

    def _fault(self) -> DeviceError | None:
        if self.state() != State.FAULT:
            return None
        return describe_fault(self.wire.control, self.device)

    def _lose(self, error: DeviceError) -> None:
        self._lost = error
        self._inflight.lose(error)
        for answered in self._pings.values():
            answered.set()
        self._pings.clear()
        self._changed.notify_all()
