"""The baselines' Triton kernels against torch. On a GPU; or anywhere that has triton, interpreted:

TRITON_INTERPRET=1 python -m pytest --confcutdir=tests/gpu tests/gpu/test_baselines.py
"""

import itertools
import os

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("no CUDA GPU", allow_module_level=True)

from cute_kernels.gpu.board import Desc, make_board  # noqa: E402
from cute_kernels.gpu.kv_layout import swizzle_rows  # noqa: E402
from cute_kernels.gpu.pack import to_fragments  # noqa: E402
from cute_kernels.gpu.tree_rows import put_rows, row_table  # noqa: E402
from experiments.baselines.attention import Sdpa  # noqa: E402
from experiments.baselines.pdl_decisions import Plant, Rank, accept  # noqa: E402
from experiments.baselines.pdl_ends import embed_rows  # noqa: E402
from experiments.baselines.pdl_step_ends import (  # noqa: E402
    describe,
    gather_features,
    move_rows,
)
from experiments.baselines.split_kv import SplitKv  # noqa: E402
from experiments.baselines.trees import DeviceTree, Planted  # noqa: E402

WHERE = "cpu" if INTERPRETED else "cuda"
CASES = [  # heads, kv heads, head_dim, rows, context, window, splits, page
    (9, 3, 64, 16, 1000, None, 44, 0), (9, 3, 64, 8, 1500, 1024, 44, 0),
    (32, 8, 64, 16, 257, None, 16, 0), (9, 3, 64, 16, 5, None, 3, 0),
    (9, 3, 64, 16, 300, None, 5, 64), (9, 3, 64, 16, 130, None, 5, 1),
    (8, 2, 128, 5, 64, None, 200, 0),
]  # fmt: skip


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_split_attention_is_torch_s(case, scalar):
    heads, kv_heads, d, rows, n, window, splits, page = case
    capacity = 2048
    q, k, v = (torch.randn(m, w, d, device=WHERE) for m, w in
               ((rows, heads), (kv_heads, capacity), (kv_heads, capacity)))  # fmt: skip
    tree = (torch.rand(rows, rows, device=WHERE) < 0.4).to(torch.uint8)
    tree.fill_diagonal_(1)
    length = torch.tensor([n], device=WHERE)
    plain = Sdpa(rows, heads, kv_heads, window)
    plain.begin(capacity, length, tree, k)
    kernel = SplitKv(
        rows, heads, kv_heads, d, torch.device(WHERE), splits=splits, window=window, page=page,
        scalar=scalar,
    )  # fmt: skip
    kernel.part.fill_(float("nan"))  # what no split wrote must not be read
    table, keys, values = None, k, v
    if page:
        pages = torch.randperm(capacity // page, device=WHERE)
        at = torch.arange(capacity, device=WHERE)
        to = pages[at // page] * page + at % page
        table, keys, values = pages.int(), torch.empty_like(k), torch.empty_like(v)
        keys[:, to], values[:, to] = k, v
    out = kernel(q, keys, values, tree, length, table)
    torch.testing.assert_close(out, plain(q, k, v), atol=2e-5, rtol=1e-4)


def grown(depth, budget, seed, equal=False):
    """A tree of random candidates by tensor operations, and the candidates."""
    rng = np.random.default_rng(seed)
    scores = -np.sort(rng.exponential(2.0, (depth, budget)), axis=1)
    scores = np.ceil(scores) if equal else scores
    ids = np.stack([rng.permutation(budget * 3)[:budget] for _ in range(depth)])
    scores = torch.from_numpy(scores.astype(np.float32)).to(WHERE)
    ids = torch.from_numpy(ids).to(WHERE)
    tree = blank(budget + 1, depth, 0)
    DeviceTree(depth, budget, budget, False, tree)(scores, ids, torch.tensor([7], device=WHERE))
    return tree, scores, ids


def blank(rows, depth, fill):
    def full(*shape, dtype=torch.int64):
        return torch.full(shape, fill, dtype=dtype, device=WHERE)

    mask = full(rows, rows, dtype=torch.uint8)
    return Planted(full(rows), full(rows), mask, full(rows), full(rows, depth + 1))


@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize(("depth", "budget"), [(1, 1), (3, 4), (7, 15), (15, 15)])
def test_one_kernel_grows_the_same_tree(depth, budget, equal):
    want, scores, ids = grown(depth, budget, 1, equal)
    got = blank(budget + 1, depth, 9)
    Plant(depth, budget, budget, False, got)(scores, ids, torch.tensor([7], device=WHERE))
    for name in ("tokens", "depths", "mask", "parents", "paths"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


@pytest.mark.parametrize("forced", [None, 0, 2])
def test_one_kernel_walks_the_same_path(forced):
    tree, _, _ = grown(7, 15, 2)
    parents, tokens = [-1, *tree.parents[1:].tolist()], tree.tokens.tolist()
    for seed in range(6):
        rng = np.random.default_rng(seed)
        decided = rng.choice(tokens, 16)
        line = tree.paths[int(rng.integers(16))].tolist()
        for a, b in itertools.pairwise(line):
            if a != b:
                decided[a] = tokens[b]
        path = [0]
        if forced is None:
            while True:
                next_ = [r for r in range(16) if parents[r] == path[-1]
                         and tokens[r] == decided[path[-1]]]  # fmt: skip
                if not next_:
                    break
                path.append(next_[0])
        else:
            depth = min(forced, int(tree.depths.max()))
            path = tree.paths[tree.depths.tolist().index(depth)].tolist()[: depth + 1]
        said = [tokens[r] for r in path[1:]] + [int(decided[path[-1]])]
        put = torch.full((10,), 5, dtype=torch.int64, device=WHERE)
        out = torch.full((9,), 5, dtype=torch.int64, device=WHERE)
        count, anchor, rows = put.split((1, 1, 8))
        accept(tree, torch.from_numpy(decided).to(WHERE), count, anchor, rows, out, forced)
        assert int(count) == int(out[0]) == len(said)
        assert out[1 : 1 + len(said)].tolist() == said and int(anchor) == said[-1]
        assert rows.tolist() == path + list(range(len(path), 8))


def test_candidates_are_the_largest_logits_and_their_shares():
    tokens = torch.randperm(49152, device=WHERE)[:16384]
    logits = torch.randn(16, 49152, device=WHERE)
    logits[3, 9000] = logits[3, 5] = 8.0
    logprobs = torch.zeros(7, 15, device=WHERE)
    ids = torch.zeros(7, 15, dtype=torch.int64, device=WHERE)
    Rank(7, 16384, 15, tokens)(logits[1:], logprobs, ids)
    used = logits[1:8, :16384]
    best = used.sort(dim=-1, descending=True, stable=True)
    want = best.values[:, :15] - used.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(logprobs, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(ids, tokens[best.indices[:, :15]])  # of equals the first column


def test_a_descriptor_is_the_engine_s():
    for depth, budget, seed in ((7, 15, 1), (15, 15, 2)):
        tree, _, _ = grown(depth, budget, seed)
        board = torch.from_numpy(make_board()).to(WHERE)
        describe(board, torch.tensor([100], device=WHERE), tree.depths, tree.paths)
        want = np.zeros(96, np.int32)
        parents = [-1, *tree.parents[1:].tolist()]
        put_rows(want, row_table(tree.tokens.tolist(), 100, parents), 16)
        got = board[:96].cpu().numpy()
        for first, n in ((Desc.ROW_POSITION, 16), (Desc.PATH, 32)):
            assert np.array_equal(got[first : first + n], want[first : first + n])
        assert got[[Desc.ROWS, Desc.POSITION, Desc.COMMITTED]].tolist() == [16, 100, 100]


def test_rows_go_in_and_out_of_the_phases_order():
    embed = torch.randn(100, 576, device=WHERE).bfloat16()
    tokens = torch.randint(100, (16,), device=WHERE)
    x = torch.zeros(16 * 576, dtype=torch.bfloat16, device=WHERE)
    residual = torch.zeros(16 * 576, device=WHERE)
    embed_rows(tokens, embed, x, residual)
    assert torch.equal(x, to_fragments(embed[tokens]))
    columns = embed[tokens].float().reshape(16, -1, 8).transpose(0, 1)
    assert torch.equal(residual, columns.reshape(-1))
    path = torch.tensor([0, 3, 9, 3], device=WHERE)
    fresh = torch.zeros(4, 576, dtype=torch.bfloat16, device=WHERE)
    taps = torch.zeros(1, dtype=torch.int32, device=WHERE)
    gather_features(x, 0, 0, taps, path, fresh)
    assert torch.equal(fresh, embed[tokens][path])


def test_accepted_rows_move_across_a_page_s_edge():
    pool = torch.randn(4, 3, 2, 2, 64, 64, device=WHERE).bfloat16()
    pages = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=WHERE)

    def flat():
        return swizzle_rows(pool)[pages.long()].permute(1, 2, 3, 0, 4, 5).flatten(3, 4)

    before, path = flat(), [0, 2, 5, 9, 4, 5, 6, 7]
    want = before.clone()
    for k in range(4):  # four rows are accepted
        want[:, :, :, 60 + k] = before[:, :, :, 60 + path[k]]
    length, count = (torch.tensor([v], device=WHERE) for v in (60, 4))
    move_rows(pool, pages, length, torch.tensor(path, device=WHERE), count)
    assert torch.equal(flat(), want)
