"""Steps that decide their rows in the whole kernel: kernels of tests.gpu.kernels.

Greedy tokens and log-probabilities have the bits of a step without decisions; drawn ones are what
the CPU device draws from the logits that the step leaves.
"""

import numpy as np
import pytest

from host.wire import MAX_ALTERNATIVES, SAMPLING
from tests.gpu.kernels import scripted

NAMES = [n for n in scripted() if n.startswith("decode-")]
COMMITTED = 200


@pytest.fixture(scope="module", params=NAMES)
def rig(request, load):
    kernel, c = load(request.param), scripted()[request.param]
    import torch

    from tests.gpu.model import Context, Model
    from tests.gpu.rig import Rig

    model = Model(c.shape, seed=3)
    packed = model.packed(c) | dict(
        SAMPLING=torch.zeros(SAMPLING.itemsize, dtype=torch.uint8, device="cuda"),
        ALTERNATIVES=torch.zeros(128, MAX_ALTERNATIVES, 2, dtype=torch.int32, device="cuda"),
    )
    return Rig(kernel, c, packed, Context(c.shape, COMMITTED, 128, 1))


def set_sampling(rig, **values):
    import torch

    record = np.zeros(1, SAMPLING)
    record["top_p"] = 1
    for name, value in values.items():
        record[name] = value
    rig.held["SAMPLING"].copy_(torch.from_numpy(record.view(np.uint8)).cuda())
    return record


def tokens_of(rig, n):
    return np.random.default_rng(n).integers(rig.c.shape.vocab, size=n).tolist()


@pytest.mark.parametrize("rows", [1, 16])
def test_greedy_bits_are_those_of_a_plain_step(rig, rows):
    from cute_kernels.gpu.script import decode_step

    set_sampling(rig)
    ids, layers = tokens_of(rig, rows), rig.c.shape.layers
    steps = [decode_step(ids, COMMITTED, layers, decide=d) for d in (False, True, False, True)]
    out = rig.run(steps)[:, :rows]
    assert rig.clean()
    for name in ("token", "logprob", "flags"):
        bits = out[name].view(np.int32)
        assert (bits == bits[0]).all(), (name, out[name])


@pytest.mark.parametrize("rows", [1, 16])
def test_drawn_tokens_are_the_cpu_devices(rig, rows):
    pytest.importorskip("numba")
    from cute_kernels.gpu.script import decode_step
    from tests.cpu.sampling_oracle import choose

    ids, s = tokens_of(rig, rows), rig.c.shape
    for values in (dict(temperature=1, seed=5), dict(temperature=0.7, top_p=0.9, top_k=30)):
        record = set_sampling(rig, **values)
        step = decode_step(ids, COMMITTED, s.layers, decide=True)
        out = rig.run([step, step])[:, :rows]
        assert (out["token"][0] == out["token"][1]).all()
        logits = rig.logits[:rows, : s.vocab].cpu().numpy()
        for row in range(rows):  # a chain: row i's token comes behind position COMMITTED + i
            token, logprob = choose(logits[row], record, COMMITTED + row + 1)
            assert out["token"][0, row] == token
            assert abs(out["logprob"][0, row] - logprob) < 5e-5  # the CPU's sum is in fp32
