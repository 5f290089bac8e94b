"""What goes wrong: hangs, NaN, forgotten engines, processes that end or stand still."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from engine_checks import CHILD, check_all_returned
from tiny_model import greedy, prompt, tiny_engine

from megadecode import (
    DeviceHung,
    SamplingParams,
)


def test_a_hang_names_the_phase_and_who_is_missing():
    with tiny_engine(deadline_s=0.3) as engine:
        greedy(engine, prompt(5), 2)
        engine._parts.sched.plant[:] = 9, 1  # operation 9 is layer 1's attend... on worker 1
        request = engine.submit(prompt(100), SamplingParams(max_new_tokens=5))
        name = engine._link.device.operations[9]
        start = time.monotonic()
        with pytest.raises(DeviceHung) as error:
            request.result(10)
        assert time.monotonic() - start < 5
        assert str(error.value) == (
            f"the device hung in phase {name}: worker 1 of 2 did not arrive within the deadline"
        )
        with pytest.raises(DeviceHung):
            engine.submit(prompt(5))


def test_a_leader_that_hangs_is_noticed_too():
    with tiny_engine(deadline_s=0.3) as engine:
        engine._parts.sched.plant[:] = 3, 0
        name = engine._link.device.operations[3]
        with pytest.raises(DeviceHung) as error:
            engine.submit(prompt(100)).result(10)
        assert name in str(error.value)
        assert "worker 0 of 2" in str(error.value)


def test_nan_in_the_logits_ends_one_request_with_an_error():
    """Poison one page: its request ends with an error, the neighbours do not notice."""
    with tiny_engine() as engine:
        want, _ = greedy(engine, prompt(10), 80)
        good = engine.submit(prompt(10), SamplingParams(max_new_tokens=80, ignore_eos=True))
        bad = engine.submit(prompt(70), SamplingParams(max_new_tokens=400, ignore_eos=True))
        while not bad._ids:
            time.sleep(0.0001)
        with engine.parked():
            sched, batch = engine._parts.sched, engine._parts.target.batch
            kv = engine._parts.target.kv
            slot = int(np.flatnonzero(sched.slot["request_id"] == bad.request_id)[0])
            kv.v[:, batch.pages[slot, 0], :, 0, :] = np.nan
        result = bad.result(10)
        assert result.finish_reason == "error"
        position = 70 + len(result.token_ids) - 1
        assert result.error == f"the target's logits hold NaN or +inf at position {position}"
        assert good.result(10).token_ids == want
        check_all_returned(engine)


def test_a_forgotten_engine_ends_its_threads():
    before = threading.active_count()
    engine = tiny_engine()
    greedy(engine, prompt(5), 3)
    del engine
    gc.collect()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_process_may_end_with_a_running_engine():
    code = """
        from tiny_model import tiny_engine, prompt
        from megadecode import SamplingParams
        engine = tiny_engine(park_after_s=-1)
        engine.submit(prompt(5), SamplingParams(max_new_tokens=500, ignore_eos=True))
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        timeout=800,
        **CHILD,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs job control")
def test_a_stopped_process_is_not_a_hang():
    code = """
        from tiny_model import tiny_engine, prompt, greedy
        with tiny_engine(deadline_s=0.5) as engine:
            want, _ = greedy(engine, prompt(5), 500)
            print("ready", flush=True)
            for _ in range(60):
                assert greedy(engine, prompt(5), 500)[0] == want
        print("done")
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        **CHILD,
    )
    try:
        assert child.stdout.readline() == "ready\n"
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(2)
        os.kill(child.pid, signal.SIGCONT)
        out, _ = child.communicate(timeout=800)
    finally:
        child.kill()
    assert (child.returncode, out) == (0, "done\n")
