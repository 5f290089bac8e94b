"""The end of a context of 131,072 positions, on a GPU, with SmolLM2's real weights.

SmolLM2 was trained on 8,192 positions; equality with plain decoding does not mind. Environment: as
test_speculation.py. A prompt takes 18 s on an H200, and every test has one.
"""

import json
import os
import pathlib

import pytest

from tests.gpu.needs import need

need("MEGADECODE_KERNELS", "MEGADECODE_MODEL", "MEGADECODE_TAU")

import torch  # noqa: E402

from cute_kernels.gpu.kv_layout import PAGE  # noqa: E402
from megadecode.acceptance import propose  # noqa: E402
from tests.gpu.speculating import close_all, exact, make, one, play, set_policy, tau  # noqa: E402
from tests.gpu.table import note  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*was trained for")
CTX = 131_072
LEFT = 150  # positions behind the prompt: two ends of pages, and the context's own
ANYHOW = dict(temperature=1.5, seed=5, top_k=2000)  # so that the text hardly repeats itself
POLICIES = {"N16": (15, False), "chain": (7, True)}


def prompt() -> list[int]:
    """Chats, one behind the other, until `LEFT` positions are left."""
    chats = json.loads(pathlib.Path(os.environ["MEGADECODE_TAU"]).read_text())["prompts"]
    ids = [token for chat in chats for token in chat]
    return (ids * (CTX // len(ids) + 1))[: CTX - LEFT]


def answer(engine, policy, budget, chain=False):
    """What stands behind the prompt, to the end of the context."""
    set_policy(engine, budget, chain)
    engine.park()
    before = engine.stats().split
    found = one(engine, prompt(), max_new_tokens=1000, **ANYHOW)
    engine.park()
    split = engine.stats().split - before
    note(
        f"ctx {CTX}, {policy}",
        f"prompt {found.stats.ttft_s:.1f} s, tau {tau([found]):.2f}, step {split.step_us:.0f} us",
        prompt_s=found.stats.ttft_s, tau=tau([found]), step_us=split.step_us, stages=split.us(),
    )  # fmt: skip
    return found


@pytest.fixture(scope="module")
def engine():
    blank = propose([0], 0, vocab=4096)
    yield make(
        os.environ["MEGADECODE_MODEL"], CTX, draft="auto", budget=15, script=blank,
        kernels=os.environ["MEGADECODE_KERNELS"],
    )  # fmt: skip
    close_all()


@pytest.fixture(scope="module")
def text(engine):
    """Decoded plainly."""
    found = answer(engine, "plain", 0)
    assert (len(found.token_ids), found.finish_reason) == (LEFT, "length")
    assert found.stats.accepted == (0, LEFT)
    assert len(set(found.token_ids)) > 20, "a text that repeats itself tests little"
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_speculation_at_the_end_of_the_context(engine, text, policy):
    """Bit for bit plain decoding's, no further than the context, and tau what the script is worth;
    keys and values are in all of the pages up to the last one that has a position."""
    said = propose(text.token_ids, CTX - LEFT, vocab=engine.config.vocab, acceptance=0.75)
    play(engine, said)
    result = answer(engine, policy, *POLICIES[policy])
    assert exact(result) == exact(text)
    assert sum(k * n for k, n in enumerate(result.stats.accepted)) == LEFT
    assert tau([result]) > 2
    stats = engine.stats()
    assert (stats.free_slots, stats.free_pages) == (1, stats.pages)
    with engine.parked():  # all bits were set where nothing has been written: NaN
        for name in ("KV_POOL", "DRAFT_KV"):
            pages = engine._parts.memory[name].view(torch.bfloat16).view(engine.pages, -1)
            whole = pages[: CTX // PAGE - 1]
            bad = [part.isnan().any(1) for part in whole.split(256)]
            assert not bool(torch.cat(bad).any()), name
