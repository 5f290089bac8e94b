"""One declaration of the phases: the program, the loop, the trace and the costs follow from it."""

import numpy as np
from tiny_model import CONFIG, greedy, prompt, tiny_engine

from cute_kernels.plan import PHASES, Cost, Shape, Work, phase_number, program
from megadecode.cpu_device import operation_names
from megadecode.models.weights import tensor_shapes

SHAPE = Shape(
    CONFIG.layers, CONFIG.hidden, CONFIG.heads, CONFIG.kv_heads, CONFIG.head_dim, CONFIG.ffn,
    CONFIG.vocab,
)  # fmt: skip


def total(work):
    """Cost of a whole step."""
    costs = [PHASES[number].cost(SHAPE, work) for number, _ in program(CONFIG.layers)]
    return Cost(*np.sum(costs, axis=0).tolist())


def names(*arguments):
    return [(PHASES[number].name, int(layer)) for number, layer in program(*arguments)]


BODY = ["qkv", "attend", "merge", "out_proj", "gate_up", "down"]


def test_program_without_a_drafter_is_the_target_alone():
    want = [("rows", 0), ("embed", 0)]
    want += [(name, layer) for layer in range(3) for name in BODY]
    want += [("head", 0), ("decide", 0), ("compact", 0)]
    assert names(3) == want


def test_program_with_a_drafter_has_its_layers_and_taps_in_place():
    got = names(3, 2, (2, 0))
    draft = got[: got.index(("rows", 0))]
    body = ["draft_qkv", "draft_attend", "draft_out_proj", "draft_gate_up", "draft_down"]
    want = [("draft_fuse", 0), ("draft_context", 0), ("draft_embed", 0)]
    want += [(name, layer) for layer in range(2) for name in body]
    want += [("draft_head", 0), ("draft_rank", 0), ("tree", 0)]
    assert draft == want
    # The number of a tap is its place in the drafter's list, not the layer.
    assert got[got.index(("down", 0)) + 1] == ("tap", 1)
    assert got[got.index(("down", 1)) + 1] == ("qkv", 2)
    assert got[got.index(("down", 2)) + 1] == ("tap", 0)


def test_names_are_unique_and_found():
    every = [phase.name for phase in PHASES]
    assert [phase_number(name) for name in every] == list(range(len(every)))
    assert operation_names(program(2))[:4] == ["rows", "embed", "qkv[0]", "attend[0]"]


def test_what_a_phase_reads_has_been_written_before_it():
    known = {"kv", "d.kv", "features"}  # what a step finds from the steps before it
    for phase in PHASES:
        for name in phase.reads:
            assert name in known or name.startswith(("w.", "d.w.")), (phase.name, name)
        known |= set(phase.writes)


def test_weight_count_is_the_models():
    """A step with one head row reads every matrix once; the gathered row is no weight stream."""
    shapes = tensor_shapes(CONFIG)
    matrices = sum(int(np.prod(s)) for n, s in shapes.items() if len(s) == 2 and n != "embed")
    assert total(Work(1, 1, 1, 1)).weights == matrices


def test_flops_are_two_per_weight_and_row_plus_attention():
    shapes = tensor_shapes(CONFIG)
    body = sum(int(np.prod(s)) for n, s in shapes.items() if n.startswith("layers") and len(s) == 2)
    head = CONFIG.vocab * CONFIG.hidden
    cost = total(Work(rows=5, head_rows=2, keys=40, key_reads=12))
    attention = 40 * CONFIG.heads * CONFIG.head_dim * 4 * CONFIG.layers
    decide = 4 * 2 * CONFIG.vocab
    assert cost.flops == 2 * (5 * body + 2 * head) + attention + decide
    assert cost.kv == 2 * 12 * CONFIG.kv_heads * CONFIG.head_dim * CONFIG.layers


def test_the_loop_runs_what_is_declared_and_counts_it():
    with tiny_engine(slots=1) as engine:
        engine._parts.trace[:] = 0
        tokens, _ = greedy(engine, prompt(130), 10)
        decode, prefill = engine._parts.trace
        runs = {phase.name: int(decode[i, 0]) for i, phase in enumerate(PHASES) if decode[i, 0]}
        assert runs == dict.fromkeys(BODY, 9 * CONFIG.layers) | dict.fromkeys(
            ("rows", "embed", "head", "decide"), 9
        )
        keys = sum(range(131, 140))
        number = phase_number("qkv")
        assert decode[number].tolist()[2:] == [
            9 * CONFIG.layers, 9 * CONFIG.layers, keys * CONFIG.layers, keys * CONFIG.layers,
        ]  # fmt: skip
        assert prefill[number, 2] == 130 * CONFIG.layers
        assert prefill[number, 4] == 130 * 131 // 2 * CONFIG.layers
        assert (decode[decode[:, 0] > 0, 1] > 0).all()
        assert len(tokens) == 10


def test_trace_report_names_every_phase_and_its_rates():
    with tiny_engine(slots=1) as engine:
        greedy(engine, prompt(70), 3)
        engine.trace(reset=True)
        greedy(engine, prompt(200), 12)
        figures = engine.trace()
    assert [f.phase for f in figures if f.kind == "decode"] == [
        "rows",
        "embed",
        *BODY,
        "head",
        "decide",
    ]
    for kind in ("decode", "prefill"):
        assert abs(sum(f.share for f in figures if f.kind == kind) - 1) < 1e-9
    down = next(f for f in figures if (f.kind, f.phase) == ("decode", "down"))
    assert down.runs == 11 * CONFIG.layers
    bytes_read = CONFIG.ffn * CONFIG.hidden * 4
    assert abs(down.gb_s - bytes_read / (down.us * 1e3)) < 1e-6 * down.gb_s
    assert abs(down.gflop_s - bytes_read / 2 / (down.us * 1e3)) < 1e-6 * down.gflop_s


def test_a_drafters_phases_are_measured_against_its_own_sizes():
    import tiny_drafter as td

    from megadecode import Engine, SamplingParams

    with Engine(td.target(), ctx=256, slots=1, workers=2, draft=td.drafter(), budget=7) as engine:
        how = SamplingParams(max_new_tokens=20, ignore_eos=True)
        engine.submit(prompt(30), how).result(60)
        figures = {f.phase: f for f in engine.trace() if f.kind == "decode"}
    c = td.DRAFTER
    for name, elements in (
        ("draft_down", c.ffn * c.hidden),
        ("draft_fuse", c.feature_size * c.hidden),
        ("draft_context", 2 * c.layers * c.kv_heads * c.head_dim * c.hidden),
    ):
        figure = figures[name]
        assert abs(figure.gb_s * figure.us * 1e3 / 4 - elements) < 1e-6 * elements, name
