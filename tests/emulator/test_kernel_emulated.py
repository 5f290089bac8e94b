"""Steps of the whole kernel, emulated: against torch, and against each other to the bit."""

import pytest

pytest.importorskip("torch")

from tests.emulator.kernel import TINY, EmulatedKernel, pretend

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sorted(TINY))
def kernel(request, folder):
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        from tests.gpu import check_rows

        kernel = EmulatedKernel(TINY[request.param], folder)
        patch.setattr(check_rows, "small", lambda name: kernel.c)
        check_rows.model_of.cache_clear()
        yield kernel


@pytest.mark.parametrize("rows", [3, 16])
def test_decode_steps(kernel, rows):
    from tests.gpu.check_decode import check
    from tests.gpu.model import Model

    model = Model(kernel.c.shape, seed=11)
    r = check(kernel, kernel.c, model, model.packed(kernel.c), rows, 5)
    assert max(r["phases"].values()) < 2
    assert r["layer"] < 1e-2 and r["step"] < 2e-2
    assert not [name for name, value in r.items() if value is False]


@pytest.mark.parametrize(("rows", "committed"), [(17, 0), (40, 70), (66, 3)])
def test_a_tree_in_row_form_is_the_tree_in_decode_form(kernel, rows, committed):
    from tests.gpu.check_rows import check_tree

    assert check_tree(kernel, "tiny", rows, committed).startswith("ok")


@pytest.mark.parametrize(("rows", "position"), [(70, 64)])
def test_a_prompt_leaves_the_drafter_its_context(kernel, rows, position):
    from tests.gpu.check_rows import check_context

    assert check_context(kernel, "tiny", rows, position).startswith("ok")


def test_steps_that_decide_follow_each_other(kernel):
    """The tokens and log-probabilities of steps that leave them to the service warp, whatever the
    warps' turns: nothing of a step is still read when the next one begins, nor when all leave."""
    import torch

    from cute_kernels.gpu.script import decode_step
    from tests.gpu.check_rows import model_of
    from tests.gpu.model import Context
    from tests.gpu.rows_case import make_rig

    c, (model, packed) = kernel.c, model_of("tiny")
    rig, _ = make_rig(kernel, c, model, packed, Context(c.shape, 70, 64, seed=2))
    ids = torch.randint(c.shape.vocab, (16,), generator=model.gen).tolist()

    def step(rows, decide):
        return decode_step(ids[:rows], 70, c.shape.layers, decide=decide)

    sizes = (16, 1, 5, 16)
    want = rig.run([step(rows, False) for rows in sizes])
    for _ in range(5):
        got = rig.run([step(rows, True) for rows in sizes])
        for name in ("token", "logprob", "flags"):
            assert (got[name] == want[name]).all()
        assert rig.clean()


def test_the_drafter(kernel):
    """Context, block, ranks and tree of DRAFT steps, whatever the producer has guessed."""
    from tests.gpu import check_draft
    from tests.gpu.draft_case import random_drafter
    from tests.gpu.model import Model

    c = kernel.c
    r = check_draft.check(kernel, c, Model(c.shape, seed=11), random_drafter(c, 2, (0, 1), 3), 70)
    assert not check_draft.wrong(r), r
