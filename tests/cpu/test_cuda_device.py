"""The CUDA device as far as no GPU is needed: what it refuses, which kernel it wants."""

import dataclasses
import hashlib
import json
import os
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import SHAPES, DraftShape, product
from cute_kernels.gpu.rank_plan import RANKED_BYTES, SCRIPT_HEAD, unpack_candidates
from cute_kernels.gpu.service_block import Own, make_block, wire_constants
from host.wire import Word, make_wire
from megadecode import (
    DeviceUnavailable,
    Engine,
    ModelError,
    ParameterError,
    PromptError,
    cuda_kernel,
)
from megadecode.acceptance import propose
from megadecode.cuda_device import CudaParts, _free_bytes, auto_budget, operation_names
from megadecode.device import Settings, prepare
from megadecode.presets import NAMES, Preset, preset_config
from megadecode.prompt import encode

SETTINGS = dict(
    ctx=256,
    slots=1,
    pages=5,
    weights=None,
    chunk_rows=None,
    park_after_s=1.0,
    budget=0,
    chain=False,
)
H200 = cuda_kernel.Gpu("NVIDIA H200", "sm_90a", 132)


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"slots": 4}, {}, "slots is 4; device 'cuda' decodes one request at a time"),
        ({"weights": "fp32"}, {}, "weights is 'fp32'; device 'cuda' keeps them as bf16"),
        (
            {"budget": 128},
            {},
            "budget is 128; device 'cuda' verifies at most 127 nodes a step, 128",
        ),
        ({"chunk_rows": 128}, {}, "chunk_rows is 128; device 'cuda' takes 256"),
        ({}, {"kernels": "/no/such"}, "kernels is '/no/such'; there is no such folder"),
        ({}, {"workers": 3}, "unknown engine option 'workers'"),
    ],
)
def test_settings_it_cannot_serve(changes, options, says):
    with pytest.raises(ParameterError, match=re.escape(says)):
        prepare("cuda", Settings(**(SETTINGS | changes)), options)


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(
        DeviceUnavailable, match=r"^device 'cuda' cannot be used here: .*\. Use dev"
    ):
        Engine(Preset("odd-768"), 256, device="cuda")


def test_models_and_kernels_belong_together():
    for name in NAMES:
        config = preset_config(name)
        assert cuda_kernel.shape_of(config) == SHAPES[name]
        assert cuda_kernel.choose_config(config, H200).ctas <= 132
    shallow = dataclasses.replace(preset_config("odd-768"), layers=2, vocab=100, name="mine")
    assert cuda_kernel.shape_of(shallow).layers == 2
    single = dataclasses.replace(shallow, rms_eps=float(np.float32(1e-5)))
    assert cuda_kernel.shape_of(single) == cuda_kernel.shape_of(shallow)
    for change in ({"ffn": 4096}, {"tied_embeddings": False}, {"qk_norm": True}):
        wrong = dataclasses.replace(shallow, **change)
        with pytest.raises(ModelError, match=r"mine: device 'cuda' has no kernel for hidden=768, "):
            cuda_kernel.shape_of(wrong)
    with pytest.raises(ModelError, match="no biases yet"):
        cuda_kernel.shape_of(dataclasses.replace(shallow, qkv_bias=True))
    small = cuda_kernel.Gpu("a smaller part", "sm_90a", 78)
    assert cuda_kernel.choose_config(preset_config("llama-3.2-1b"), small).ctas == 76


def fake_artefact(folder, what, changes=None):
    """A kernel as another machine leaves it."""
    cubin = b"machine code"
    manifest = {
        "what": what, "key": "k", "sources": build.source_hash(), "dsl": build.dsl_version(),
        "sha256": hashlib.sha256(cubin).hexdigest(),
    }  # fmt: skip
    at = folder / "sm_90a"
    at.mkdir(parents=True, exist_ok=True)
    (at / "k.cubin").write_bytes(cubin)
    (at / "k.json").write_text(json.dumps(manifest | (changes or {})))


def test_a_kernel_built_elsewhere_is_found_and_a_stale_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path / "home"))
    c = cuda_kernel.choose_config(preset_config("odd-768"), H200)
    what = build.kernel_name(c, "wire")
    fake_artefact(tmp_path / "carried", what)
    assert cuda_kernel.find_kernel(c, tmp_path / "carried").cubin == b"machine code"
    fake_artefact(cuda_kernel.kernel_folder(), what)
    assert cuda_kernel.find_kernel(c).cubin == b"machine code"

    monkeypatch.setattr(cuda_kernel, "_has", lambda module: module != "cutlass")
    for change in ({"sources": "older"}, {"what": "another"}, {"sha256": "damaged"}):
        fake_artefact(cuda_kernel.kernel_folder(), what, change)
        with pytest.raises(DeviceUnavailable) as error:
            cuda_kernel.find_kernel(c)
        assert "megadecode build --model odd-768 --target sm_90a" in str(error.value)
    fewer = cuda_kernel.Gpu("a smaller part", "sm_90a", 114)
    other = dataclasses.replace(preset_config("odd-768"), vocab=4000)
    for config, gpu, wanted in (
        (preset_config("odd-768"), fewer, "--model odd-768 --target sm_90a --multiprocessors 114`"),
        (preset_config("llama-3.1-8b"), fewer, "--target sm_90a --multiprocessors 112`"),
        (other, H200, "--model FILE --target sm_90a`"),
    ):
        with pytest.raises(DeviceUnavailable) as error:
            cuda_kernel.find_kernel(cuda_kernel.choose_config(config, gpu))
        assert wanted in str(error.value)
    for name in NAMES:  # what that command builds is what is looked for
        assert cuda_kernel.kernel_of(name, "sm_90a", 114) == cuda_kernel.choose_config(
            preset_config(name), fewer
        )
    monkeypatch.setattr(build, "dsl_version", lambda: "0.0")
    fake_artefact(cuda_kernel.kernel_folder(), what, {"dsl": "4.8.1"})
    assert build.find(what, "sm_90a", [cuda_kernel.kernel_folder()]) is None
    monkeypatch.setattr(build, "dsl_version", lambda: None)
    assert build.find(what, "sm_90a", [cuda_kernel.kernel_folder()]) is not None


def test_the_key_covers_the_layout_of_the_wire(tmp_path, monkeypatch):
    (tmp_path / "wire.py").write_text("PAIRS = 4\n")
    monkeypatch.setattr(build, "WIRE", tmp_path / "wire.py")
    before = build.source_hash()
    (tmp_path / "wire.py").write_text("PAIRS = 5\n")
    assert build.source_hash() != before


def test_presets_are_token_ids_in_and_out():
    torch = pytest.importorskip("torch")
    model = Preset("odd-768", seed=3)
    embed = model.tensor("embed")
    assert (embed == Preset("odd-768", seed=3).tensor("embed")).all()
    assert (embed == model.tensor("head")).all()  # tied
    assert (embed != Preset("odd-768", seed=4).tensor("embed")).any()
    assert abs(float(embed.std()) - 768**-0.5) < 1e-3
    assert abs(float(model.tensor("final_norm").mean()) - 1) < 0.02
    assert torch.is_tensor(embed) is False
    with pytest.raises(PromptError, match="has no tokenizer; give the prompt as token ids"):
        encode("hello", model.config, None, chat=True)


def test_phases_have_names_for_hang_reports():
    names = operation_names(2)
    assert names[4] == "qkv[1]" and names[8] == "head"
    assert names[9:] == ["decide", "rank", "tree", "compaction"]
    draft = DraftShape(layers=2, taps=3)
    drafting = operation_names(2, draft)
    assert len(drafting) == 9 + draft.phases + 4
    assert drafting[9] == "fc of the drafter, tap 0" and drafting[-5] == "head of the drafter"
    assert drafting[13] == "qkv[0] of the drafter"


def test_an_automatic_budget_is_a_constant_of_the_shape():
    small = cuda_kernel.choose_config(preset_config("odd-768"), H200)
    assert auto_budget(small, 7, chain=False) == 15
    assert auto_budget(small, 7, chain=True) == 7
    assert auto_budget(product("smollm2-135m"), 7, chain=False) == 7


def test_a_script_of_candidates_and_a_policy_are_for_measuring():
    """Written into the arrays that the kernel reads; what has no room is refused."""
    torch = pytest.importorskip("torch")
    wire = make_wire(slots=1, workers=1, ctx=64, max_inflight=2)
    constants = wire_constants(
        wire, lambda a: a.ctypes.data, ctx=64, pages=5, park_after_ns=-1, tokens=0
    )
    memory = {
        "SERVICE": torch.from_numpy(make_block(constants)),
        "DRAFT_SCRIPT": torch.zeros(SCRIPT_HEAD + 9 * RANKED_BYTES, dtype=torch.uint8),
    }
    parts = CudaParts(SimpleNamespace(wire=wire), None, None, memory, 64, 7)
    with mock.patch.object(torch.cuda, "synchronize"):
        parts.set_policy(63, chain=True)
        block = memory["SERVICE"]
        assert [int(block[w]) for w in (Own.BUDGET, Own.CHAIN, Own.DRAFTED)] == [63, 1, 7]
        parts.set_policy(0)
        assert [int(block[w]) for w in (Own.BUDGET, Own.CHAIN, Own.DRAFTED)] == [0, 0, 0]
        with pytest.raises(ParameterError, match="budget is 64; at most 63 fit here"):
            parts.set_policy(64)
        said = propose([7, 8, 9], 6, vocab=50, acceptance=1.0, width=5)
        parts.play(said)
        ids, logprobs, widths = unpack_candidates(memory["DRAFT_SCRIPT"][SCRIPT_HEAD:].numpy())
        assert widths.tolist() == [0] * 6 + [5] * 3
        assert ids[6:, 0].tolist() == [7, 8, 9]
        assert np.array_equal(logprobs[:, :5], said.logprobs)
        with pytest.raises(ParameterError, match="the script has 10 positions"):
            parts.play(propose([7, 8, 9], 7, vocab=50, width=5))
    assert parts.acceptance == "scripted"
    assert parts.split().steps == 0 and parts.split().us() == {}
    wire.control[Word.SPLIT_STEPS : Word.SPLIT_TOTAL + 1] = (
        4,
        3,
        60,
        10,
        8e3,
        4e3,
        2e3,
        4e4,
        1e3,
        6e4,
    )
    split = parts.split()
    assert (split.tau, split.rows_per_step, split.step_us) == (2.5, 15, 15)
    assert split.us() == {"draft": 1, "tree": 0.5, "verify": 10, "decide": 0.25, "compact": 2}
    assert (split - split).steps == 0
    lines = split.table().splitlines()
    assert lines[0] == "4 steps of 15.0 us, 15.0 rows each"
    assert lines[3].split() == ["verify", "10.0", "us", "66.7%"]


def test_memory_of_a_closed_engine_counts_as_free(monkeypatch):
    torch = pytest.importorskip("torch")
    for name, value in (
        ("mem_get_info", (5, 100)), ("memory_reserved", 60), ("memory_allocated", 20),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert _free_bytes() == 45
