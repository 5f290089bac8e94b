"""GPU tests load cubins built beforehand (tests/gpu/kernels.py); they need torch, not cutlass."""

import os
import pathlib

import pytest


@pytest.fixture(scope="session")
def load():
    """load(name) -> Kernel, or a skip that says what is missing."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    folder = os.environ.get("MEGADECODE_CUBINS")
    if not folder:
        pytest.skip("MEGADECODE_CUBINS is not set: python -m tests.gpu.kernels DIR builds them")
    torch.zeros(1, device="cuda")

    def read(name: str):
        from cute_kernels.gpu.load import Kernel

        return Kernel.read(pathlib.Path(folder) / name)

    return read


@pytest.fixture(scope="session")
def echo(load):
    """The echo kernel on the GPU, for a rig."""
    from tests.gpu.echo_rig import OnGpu

    return OnGpu(load("echo"))


def pytest_terminal_summary(terminalreporter):
    """What the tests have measured, last."""
    from tests.gpu import table

    for line in table.lines():
        terminalreporter.write_line(line)
    table.write()
