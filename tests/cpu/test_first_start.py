"""The command line says that it compiles, where nothing compiled is kept yet."""

from contextlib import contextmanager, nullcontext

import pytest

from megadecode.commands import _common


@pytest.mark.parametrize(
    ("kept", "device", "said"),
    [
        ((), "cpu", "compiling for this machine, once: a minute or two"),
        (("cpu_x/loop.run-1.py311.nbi",), "auto", "compiling"),
        (("cpu_x/loop.run-1.py311.1.nbc",), "auto", "loading"),
        ((), "cuda", "loading"),
    ],
)
def test_a_first_start_says_that_it_compiles(kept, device, said, tmp_path, monkeypatch):
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    seen = []

    class Notes:
        @contextmanager
        def status(self, text):
            seen.append(text)
            yield

    monkeypatch.setattr("host.jit.cache_folder", lambda: tmp_path)
    monkeypatch.setattr("megadecode.engine.Engine", lambda *_, **__: nullcontext())
    monkeypatch.setattr(_common, "notes", Notes)
    with _common.opened("m", 64, device=device):
        pass
    assert len(seen) == 1 and seen[0].startswith(said)
