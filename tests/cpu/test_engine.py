"""What the engine computes on a tiny random model, against the torch oracle."""

import numpy as np
import pytest
from engine_checks import check_all_returned
from tiny_model import CONFIG, greedy, model, prompt, reference, tiny_engine


@pytest.fixture(scope="module")
def engine():
    with tiny_engine() as engine:
        yield engine


@pytest.mark.parametrize("length", [1, 2, 15, 16, 63, 64, 65, 127, 128, 200, 300])
def test_greedy_tokens_equal_the_oracle(engine, length):
    ids = prompt(length)
    got, logprobs = greedy(engine, ids, 70)
    want, gaps = reference().greedy(ids, 70, ())
    first = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
    assert first is None or gaps[first] < 1e-4, (first, gaps[first])
    assert len(got) == 70
    logits, _ = reference().forward(ids + got[:-1])
    rows = logits[length - 1 :].log_softmax(-1).numpy()
    np.testing.assert_allclose(logprobs, rows[np.arange(70), got], atol=2e-5)


def test_decoded_rows_equal_prefilled_rows_bit_for_bit(engine):
    """The next token after a text does not depend on who wrote the text: prompt or engine."""
    ids = prompt(50)
    tokens, logprobs = greedy(engine, ids, 100)
    for k in (1, 12, 13, 14, 15, 29, 78, 79, 99):
        again, logprob = greedy(engine, ids + tokens[:k], 1)
        assert again == [tokens[k]]
        assert logprob[0].view(np.int32) == logprobs[k].view(np.int32), k


def test_follow_up_turn_covers_the_stop_token(engine):
    """A second turn's prompt holds the first turn's stop token, and all of it is prefilled."""
    ids = prompt(21)
    first, _ = greedy(engine, ids, 12)
    turn = ids + first + prompt(7, seed=5)
    got, _ = greedy(engine, turn, 10)
    want, gaps = reference().greedy(turn, 10, ())
    assert got == want or min(gaps) < 1e-4


def test_last_page_of_the_context_and_no_further():
    """64 pages of 64 positions, 4,090 prompt tokens, 6 new ones: no page beyond the table."""
    with tiny_engine(ctx=4096, slots=1) as engine:
        ids = prompt(4090)
        got, _ = greedy(engine, ids, 100)
        want, gaps = reference().greedy(ids, 6, ())
        assert len(got) == 6
        assert got == want or min(gaps) < 1e-4
        check_all_returned(engine)


@pytest.mark.slow
def test_no_hole_at_a_power_of_two():
    with tiny_engine(ctx=16500, slots=1) as engine:
        ids = prompt(16380)
        got, _ = greedy(engine, ids, 12)
        want, gaps = reference().greedy(ids, 12, ())
        assert got == want or min(gaps) < 1e-4


def test_counters_near_their_wrap():
    for start in (2**31 - 40, 2**32 - 40, 2**62):
        with tiny_engine(first_sequence=start, completion_entries=64) as engine:
            want, _ = greedy(engine, prompt(10), 100)
            assert [greedy(engine, prompt(10), 100)[0] for _ in range(3)] == [want] * 3
            engine.park()
            assert greedy(engine, prompt(10), 100)[0] == want
            check_all_returned(engine)


def test_sizes_and_counts_are_reported(engine):
    stats = engine.stats()
    assert stats.pages == -(-(512 + 255 + 3 * 512 + 1) // 64)
    assert stats.launches >= 1
    assert model().config is CONFIG


def test_without_a_fitting_drafter_it_says_so_once_and_decodes_plainly(caplog):
    for _ in range(2):
        with tiny_engine(draft="auto") as engine:
            assert engine.drafter is None
            assert len(greedy(engine, prompt(5), 3)[0]) == 3
    said = [record.message for record in caplog.records]
    assert said == ["no drafter belongs to tiny: decoding plainly"]
