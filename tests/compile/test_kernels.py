"""What is refused before anything is compiled, and the cache of what was."""

import re
import subprocess
import sys

import pytest

from cute_kernels.gpu import build
from cute_kernels.gpu.config import product


def test_key_covers_sources_and_choices(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    keys = {build.content_key(w, t, tmp_path) for w in ("a", "b") for t in ("sm_90a", "sm_120a")}
    (tmp_path / "a.py").write_text("x = 2\n")
    keys.add(build.content_key("a", "sm_90a", tmp_path))
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("model", "changes", "says"),
    [
        ("llama-3.2-1b", {"stages": 14}, "over the 232448 B of sm_90a"),
        ("llama-3.2-1b", {"warps": 6, "setmaxnreg": False}, "divides K = 2048"),
        ("llama-3.2-1b", {"warps": 6}, "a multiple of 4"),
        ("llama-3.2-1b", {"ctas": 130}, "a multiple of 4"),
        ("llama-3.2-1b", {"arch": "sm_120a", "stages": 12}, "over the 101376 B of sm_120a"),
        ("llama-9.9-1t", {}, "unknown model 'llama-9.9-1t'; known: smollm2-135m"),
    ],
)
def test_what_does_not_fit_is_refused(model, changes, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        product(model, **changes)


def test_package_imports_without_cutlass():
    code = (
        "import sys, cute_kernels, cute_kernels.gpu, cute_kernels.gpu.config,"
        " cute_kernels.gpu.pack, cute_kernels.gpu.load, cute_kernels.gpu.build,"
        " cute_kernels.gpu.board, cute_kernels.gpu.arguments;"
        "assert not any(m.split('.')[0] in ('cutlass', 'torch') for m in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
