"""Which kernel serves a model on a GPU, and where it comes from. Imports neither torch nor the DSL.

Kernels are kept by content under `<cache home>/kernels`; `megadecode build` fills that folder on
any machine with the DSL, and its files can be carried to one without.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cute_kernels.gpu import build
from cute_kernels.gpu.config import DEVICE_CTAS, SHAPES, TILE, Config, DraftShape, Shape, product
from cute_kernels.gpu.load import Kernel
from host.cache import cache_home
from host.cuda import check, driver, use_primary_context
from host.errors import DeviceError
from megadecode.config import ModelConfig
from megadecode.drafter.config import DrafterConfig
from megadecode.errors import DeviceUnavailable, ModelError, ParameterError

TARGETS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}
"""Compute capability -> what kernels are compiled for."""

EPSILONS_APART = 1e-5
"""How far a drafter's epsilon may be from its target's, which the kernel takes for both. It changes
less than bf16 does: the smallest mean squares it is added to, those of embeddings, are about 0.01.
Only what is proposed could change."""

GPU_EXTRA = "pip install 'megadecode[gpu]'"


@dataclass(frozen=True)
class Gpu:
    """A device that can be used: its name, compile target and number of multiprocessors."""

    name: str
    arch: str
    multiprocessors: int


def kernel_folder() -> Path:
    """Where kernels are kept."""
    return cache_home() / "kernels"


def find_gpu(ordinal: int = 0) -> Gpu:
    """The GPU, its primary context current. DeviceUnavailable says what is missing."""
    for module in ("torch", "cuda.bindings"):
        if not _has(module):
            raise _unusable(f"{module.split('.')[0]} is not installed; {GPU_EXTRA}")
    try:
        cu = driver()
        count = check(cu.cuDeviceGetCount(), "cuDeviceGetCount")
        if count <= ordinal:
            raise _unusable("there is no CUDA GPU")
        gpu = check(cu.cuDeviceGet(ordinal), "cuDeviceGet")
        name = check(cu.cuDeviceGetName(256, gpu), "cuDeviceGetName").split(b"\0")[0].decode()
        kind = cu.CUdevice_attribute
        major, minor, multiprocessors = (
            check(cu.cuDeviceGetAttribute(which, gpu), "cuDeviceGetAttribute")
            for which in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                kind.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        arch = TARGETS.get((major, minor))
        if arch is None:
            raise _unusable(
                f"{name} has compute capability {major}.{minor}; there are kernels for "
                f"{', '.join(f'{a}.{b}' for a, b in TARGETS)}"
            )
        use_primary_context(cu, ordinal)
    except DeviceError as error:
        raise _unusable(str(error)) from None
    return Gpu(name, arch, int(multiprocessors))


def _unusable(why: str) -> DeviceUnavailable:
    return DeviceUnavailable(f"device 'cuda' cannot be used here: {why}. Use device='cpu'")


def shape_of(config: ModelConfig) -> Shape:
    """The model's sizes as the kernel sees them, under the name of the shape that is built for it.

    Raises ModelError for sizes no kernel has been laid out for, naming those there are.
    """
    if config.qkv_bias:
        raise ModelError(f"{config.name}: device 'cuda' has no biases yet; use device='cpu'")
    wanted = Shape(
        "", config.hidden, config.ffn, config.heads, config.kv_heads, config.head_dim,
        config.vocab, config.layers, _decimal(config.rms_eps), config.tied_embeddings,
        config.qk_norm,
    )  # fmt: skip
    for known in SHAPES.values():
        # layers and vocabulary may differ: they are data, not code
        same = dataclasses.replace(
            wanted, name=known.name, layers=known.layers, vocab=known.vocab, rms_eps=known.rms_eps
        )
        if same == known:
            return dataclasses.replace(wanted, name=known.name)
    raise ModelError(
        f"{config.name}: device 'cuda' has no kernel for hidden={config.hidden}, ffn={config.ffn}, "
        f"{config.heads}/{config.kv_heads} heads of {config.head_dim}; it has those of "
        f"{', '.join(SHAPES)}. Use device='cpu'"
    )


def _decimal(value: float) -> float:
    """The number that was meant where a file holds it in single precision."""
    return float(f"{value:.6g}")


def choose_config(config: ModelConfig, gpu: Gpu) -> Config:
    """The kernel's configuration for a model on a GPU. Raises ModelError."""
    shape = shape_of(config)
    try:
        return _fitted(shape, gpu.arch, gpu.multiprocessors)
    except ValueError as error:
        raise ModelError(f"{config.name} on {gpu.name}: {error}") from None


def _fitted(shape: Shape, arch: str, multiprocessors: int | None) -> Config:
    """The product for a GPU of so many multiprocessors; None: as many as most of its kind have."""
    c = product(shape, arch)
    if multiprocessors is not None and c.ctas > multiprocessors:
        c = product(shape, arch, ctas=multiprocessors // c.team * c.team)
    return c


def draft_shape(drafter: DrafterConfig, c: Config) -> DraftShape:
    """What the kernel needs to know of a drafter, whose layers run through the target's code.

    Raises ModelError, naming the key, for a drafter it has no code for.
    """

    def refuse(key: str, value: object, expected: str) -> ModelError:
        return ModelError(
            f"drafter {drafter.name!r}: {key} is {value}; device 'cuda' expects {expected}. "
            "Use draft='off' or device='cpu'"
        )

    if not c.draft:
        raise ModelError(
            f"drafter {drafter.name!r}: shared memory of {c.arch} is too small for {c.shape.name} "
            "to speculate. Use draft='off' or device='cpu'"
        )
    for key in ("hidden", "heads", "kv_heads", "head_dim", "ffn"):
        found, wanted = getattr(drafter, key), getattr(c.shape, key)
        if found != wanted:
            raise refuse(key, found, f"its target's, {wanted}")
    if abs(drafter.rms_eps - c.shape.rms_eps) > EPSILONS_APART:
        raise refuse(
            "rms_eps", drafter.rms_eps,
            f"its target's, {c.shape.rms_eps}, which its norms use, or one within {EPSILONS_APART}",
        )  # fmt: skip
    for key, plain in (("input_embedding_scale", 1.0), ("final_logit_softcapping", None)):
        if (value := getattr(drafter, key)) != plain:
            raise refuse(key, value, str(plain).lower())
    columns = len(drafter.draft_tokens)
    if columns and columns < TILE * c.ctas:
        raise refuse("draft_tokens", f"a list of {columns}", f"all, or at least {TILE * c.ctas}")
    return DraftShape(drafter.layers, len(drafter.taps), columns)


def find_kernel(c: Config, prebuilt: str | Path | None = None) -> build.Artefact:
    """The engine's kernel: from `prebuilt`, from the cache, or built now if the DSL is here.

    Raises DeviceUnavailable when there is no way to get it.
    """
    folders = [kernel_folder()] if prebuilt is None else [Path(prebuilt), kernel_folder()]
    found = build.find(build.kernel_name(c, "wire"), c.arch, folders)
    if found is not None:
        return found
    if not _has("cutlass"):
        raise DeviceUnavailable(
            f"no kernel for {c.shape.name} on {c.arch} in {', '.join(map(str, folders))}, and the "
            f"compiler is not installed here. Either {GPU_EXTRA}, or run `{_build_command(c)}` "
            "with the same version on another machine and copy its folder here"
        )
    return build.build_kernel(c, "wire", kernel_folder())


def _build_command(c: Config) -> str:
    """What builds this very kernel."""
    model = c.shape.name if c.shape == SHAPES[c.shape.name] else "FILE"
    command = f"megadecode build --model {model} --target {c.arch}"
    if c.ctas != product(c.shape, c.arch).ctas:
        command += f" --multiprocessors {c.ctas}"
    return command


def load_kernel(c: Config, prebuilt: str | None) -> Kernel:
    """The engine's kernel, on the device."""
    artefact = find_kernel(c, prebuilt)
    try:
        return Kernel(artefact.cubin, artefact.manifest)
    except RuntimeError as error:
        raise DeviceUnavailable(f"the driver does not take the kernel: {error}") from None


def kernel_of(model: str, target: str, multiprocessors: int | None = None) -> Config:
    """The configuration that is built for a preset's name or a model file, for a GPU of that many
    multiprocessors where it has fewer than most. Raises ModelError."""
    if target not in DEVICE_CTAS:
        raise ParameterError(f"target is {target!r}; choose {', '.join(DEVICE_CTAS)}")
    if model in SHAPES:
        shape = SHAPES[model]
    else:
        from megadecode.models.load import load_model

        try:
            shape = shape_of(load_model(model).config)
        except ModelError as error:
            if Path(model).exists():
                raise
            raise ModelError(f"{error}; shapes by name: {', '.join(SHAPES)}") from None
    try:
        return _fitted(shape, target, multiprocessors)
    except ValueError as error:
        raise ModelError(str(error)) from None


def barriers(c: Config) -> dict[str, int]:
    """Arrivals that complete each of a CTA's shared-memory barriers, for the reader of a build."""
    return {
        f"full, of {c.stages} stages": 1,
        f"empty, of {c.stages} stages": c.warps,
        "told": 1,
        "gathered": c.warps,
        "cleared": 1,
    }


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def describe(artefact: build.Artefact, c: Config) -> dict[str, Any]:
    """What `megadecode build` prints of a kernel: sizes in bytes."""
    m = artefact.manifest
    return {
        "model": c.shape.name,
        "target": c.arch,
        "file": f"{m['key']}.cubin",
        "cubin_bytes": len(artefact.cubin),
        "ctas": m["grid"],
        "threads": m["block"],
        "registers": m["reg"],
        "spilled_bytes": m["stack"] + m["local"],
        "shared_bytes": m["smem"],
        "shared_plan": c.smem_plan(),
        "barrier_arrivals": barriers(c),
    }
