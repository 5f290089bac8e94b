"""`megadecode build`, on a machine without a GPU."""

import json
import subprocess
import sys

import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import product
from megadecode import cuda_kernel


def command(*words, home):
    path = ":".join(sys.path)
    return subprocess.run(
        [sys.executable, "-m", "megadecode.cli", "build", *words],
        capture_output=True, text=True, timeout=800,
        env={"MEGADECODE_HOME": str(home), "PATH": "/usr/bin:/bin", "PYTHONPATH": path},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "odd-768", "--target", "sm_80"), "target is 'sm_80'; choose sm_90a, "),
        (("--model", "gpt-9"), "gpt-9"),
        (("--model", "llama-3.1-8b", "--target", "sm_120a"), "llama-3.1-8b: "),
    ],
)
def test_what_cannot_be_built_is_refused(words, says, tmp_path):
    done = command(*words, home=tmp_path)
    assert done.returncode == 1
    assert says in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.slow
def test_it_builds_what_the_engine_looks_for(tmp_path):
    done = command("--model", "odd-768", "--folder", str(tmp_path / "out"), "--json", home=tmp_path)
    said = json.loads(done.stdout)
    c = product("odd-768")
    found = build.find(build.kernel_name(c, "wire"), c.arch, [tmp_path / "out"])
    assert found is not None and found.manifest["key"] + ".cubin" == said["file"]
    assert said["shared_bytes"] == sum(said["shared_plan"].values()) == c.smem_bytes
    assert said["barrier_arrivals"] == cuda_kernel.barriers(c)
    assert done.returncode == 0
