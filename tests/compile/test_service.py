"""The service warp builds for every target, and sees entries as the host's dtypes describe them."""

import re

import numpy as np
import pytest
from cutlass import Int32, Int64

from cute_kernels.gpu import build, mapped
from cute_kernels.gpu.echo import make_echo
from cute_kernels.gpu.service_block import SPLITS, Own, make_block
from host.wire import COMPLETION, REQUEST, Word


@pytest.mark.parametrize(("arch", "ctas"), [("sm_90a", 132), ("sm_120a", 84)])
def test_it_builds_without_spills(arch, ctas, tmp_path):
    a = build.build(f"echo {ctas}", lambda: make_echo(ctas), arch, tmp_path)
    assert a.manifest["stack"] == a.manifest["local"] == 0
    # an entry of the completion ring: seven words, then the sequence word with release
    kinds = {"st.relaxed.sys.global.v2.b64": "p", "st.relaxed.sys.global.b64": "w",
             "st.release.sys": "r", "ld.": "l", "fence.sc.sys": "f"}  # fmt: skip
    order = "".join(
        next((kind for start, kind in kinds.items() if start in line), "?")
        for line in a.ptx.splitlines()
        if ".sys" in line
    )
    assert "?" not in order
    entries = re.findall(r"(?<!p)pppw(.)", order)
    assert len(entries) >= 6 and set(entries) == {"r"}
    assert "ld.volatile" not in a.ptx and "ld.acquire.sys" in a.ptx
    assert re.search(r"rfl", order), "no full fence between the store of PARKING and the last look"


def _number(value):
    return int(np.uint64(value.value % 2**64).view(np.int64))


@pytest.mark.parametrize("seed", range(20))
def test_an_entry_is_what_the_dtype_says(seed):
    rng = np.random.default_rng(seed)
    want = np.zeros(1, COMPLETION)
    want["request_id"], want["stamp_ns"] = rng.integers(-(2**62), 2**62, 2)
    want["step"] = rng.integers(-(2**31), 2**31)
    for name in ("kind", "reason", "pairs", "accepted"):
        want[name] = rng.integers(0, 128)
    want["token"] = rng.integers(-(2**31), 2**31, 4)
    want["logprob"] = -rng.random(4)
    e = want[0]
    words = mapped.entry_words(
        COMPLETION,
        request_id=Int64(int(e["request_id"])), stamp_ns=Int64(int(e["stamp_ns"])),
        **{n: Int32(int(e[n])) for n in ("step", "kind", "reason", "pairs", "accepted")},
        token=[Int32(int(t)) for t in e["token"]],
        logprob=[Int32(int(b)) for b in e["logprob"].view(np.int32)],
    )  # fmt: skip
    assert [_number(w) for w in words] == want.view(np.int64).tolist()


def test_fields_of_a_request_are_found():
    names = ("request_id", "kind", "prompt_tokens", "max_new_tokens", "block", "blocks", "stamp_ns")
    entry = np.zeros(1, REQUEST)
    for i, name in enumerate(names):
        entry[name] = -(2**30) + i
    words = [Int64(int(w)) for w in entry.view(np.int64)]
    for i, name in enumerate(names):
        assert mapped.field(words, REQUEST, name).value == -(2**30) + i


def test_the_gauges_are_pairs_of_words():
    assert Word.PENDING - Word.HEARTBEAT == 7
    assert Word.HEARTBEAT % 8 == 0


def test_the_block_refuses_odd_sizes():
    constants = dict.fromkeys(Own, 0)
    with pytest.raises(ValueError, match="a power of two"):
        make_block(constants | {Own.INFLIGHT: 48})
    assert make_block({Own.INFLIGHT: 64}, first_sequence=9)[Own.REQUEST_HEAD] == 9
    for sizes in ({Own.DRAFT_BLOCK: 17}, {Own.BUDGET: 128}):
        with pytest.raises(ValueError, match="at most 16 and 128 rows"):
            make_block({Own.INFLIGHT: 64} | sizes)


def test_nothing_is_drafted_without_a_block_or_a_budget():
    whole = {Own.INFLIGHT: 64, Own.DRAFT_BLOCK: 8, Own.DRAFTED: 7, Own.BUDGET: 15}
    assert make_block(whole)[Own.DRAFTED] == 7
    for missing in (Own.DRAFT_BLOCK, Own.BUDGET):
        assert make_block(whole | {missing: 0})[Own.DRAFTED] == 0


def test_the_split_of_the_time_is_shown_word_for_word():
    ours = [word.name for word in Own if word.name.startswith("SPLIT")]
    theirs = [word.name for word in Word if word.name.startswith("SPLIT")]
    assert ours == theirs and len(ours) == SPLITS
    for name in ours:
        assert Own[name] - Own.SPLIT_STEPS == Word[name] - Word.SPLIT_STEPS
