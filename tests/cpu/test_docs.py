"""Every example of the README and of the documents runs, type-checks, and does what it says."""

import contextlib
import dataclasses
import io
import re
import shlex
import subprocess
import sys

import pytest
from command_line import command

from cute_kernels.cpu.simd import LANES, PAIR
from experiments import links
from host import wire
from megadecode import SamplingParams, limits
from megadecode.cpu_device import MAX_WORKERS
from megadecode.drafter.config import MAX_BLOCK, MAX_DEPTH
from megadecode.models import gguf_config, hf_config

ROOT = links.ROOT
PAGES = {page.stem: page for page in links.PAGES}


def blocks(page, language):
    text = PAGES[page].read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


PYTHON = [page for page in PAGES if blocks(page, "python")]
# The README's console lines are a test of their own.
CONSOLE = [page for page in PAGES if blocks(page, "console") and page != "README"]


@pytest.fixture
def newcomer(model_path, tmp_path, monkeypatch):
    """An empty folder with a model in it."""
    (tmp_path / "path/to").mkdir(parents=True)
    (tmp_path / "path/to/model.gguf").symlink_to(model_path)
    monkeypatch.chdir(tmp_path)


def shell(line):
    """One `$` line: a megadecode command, or a pipe into one."""
    before, _, after = line.rpartition(" | ")
    text = ""
    if before:
        text = subprocess.run(["bash", "-c", before], capture_output=True, text=True).stdout
    name, *words = shlex.split(after)
    assert name == "megadecode", f"{line}: only this project's commands are examples"
    done = command(*words, input=text)
    assert done.returncode == 0, f"{line}: {done.stderr}"
    return done


def test_there_are_examples():
    assert {"README", "guide"} <= set(PYTHON)
    assert "guide" in CONSOLE


@pytest.mark.parametrize("page", PYTHON)
def test_python_examples_run(page, newcomer):
    """The blocks of a page are one program."""
    out, names = io.StringIO(), {"__name__": "example"}
    for number, code in enumerate(blocks(page, "python")):
        said = len(out.getvalue())
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"{page} block {number}", "exec"), names)
        assert len(out.getvalue()) > said or "assert" in code, f"block {number} shows nothing"


@pytest.mark.parametrize("page", CONSOLE)
def test_console_examples_run(page, newcomer):
    for block in blocks(page, "console"):
        output = ""
        for line in block.splitlines():
            if line.startswith("$ "):
                output = shell(line[2:]).stdout
            else:
                assert line in output, f"{line!r} is not in {output!r}"


def test_examples_type_check(tmp_path):
    files = []
    for page in PYTHON:
        files.append(tmp_path / f"{page.replace('-', '_')}_example.py")
        files[-1].write_text("\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict",
         "--follow-imports=silent",  # strict with the examples, as with any installed package
         "--cache-dir", str(ROOT / ".mypy_cache"), *map(str, files)],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_a_newcomers_first_five_things(newcomer):
    """From the README's lines alone: another model by path, chat, a stop string, a seed, JSON."""
    (block,) = blocks("README", "console")
    path, chat, stop, seed, json_line = [line[2:] for line in block.splitlines()]
    assert "Paris" in shell(path).stdout
    assert shell(f"printf 'Say hi.' | {chat}").stdout.strip()
    whole = shell(stop.replace('--stop "3."', "")).stdout
    assert "3." in whole
    assert shell(stop).stdout.strip() == whole.partition("3.")[0].strip()
    first, again = shell(seed).stdout, shell(seed).stdout
    assert first == again != shell(seed.replace("--seed 7", "--seed 8")).stdout
    assert '"finish_reason": "stop"' in shell(json_line).stdout


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_what_they_name(page):
    text, wrong = links.mended(PAGES[page], links.SCREEN_LINES)
    assert not wrong
    assert text == PAGES[page].read_text(encoding="utf-8"), "python -m experiments.links"


def test_a_wrong_link_is_noticed(tmp_path):
    (tmp_path / "x.py").write_text("A = 1\n\nclass B:\n    c: int\n    def d(self): ...\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[`A`](x.py#L9) [`B.d`](x.py#L5) [`B.c`](x.py#L1) [`e`](x.py#L1) [f](y.md) [g](x.py)"
    )
    text, wrong = links.mended(page)
    assert text.startswith("[`A`](x.py#L1) [`B.d`](x.py#L5) [`B.c`](x.py#L4) [`e`]")
    assert wrong == ["page.md: x.py defines no e", "page.md: y.md does not exist"]
    assert links.mended(page, 8)[0].startswith("[`A`](x.py#L9)")
    assert links.mended(page, 7)[0].startswith("[`A`](x.py#L1)")


def test_the_limits_are_those_of_the_code():
    text = PAGES["limits"].read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M))
    for what, values in {
        "devices": [f"1 to {MAX_WORKERS}"],
        "architectures, GGUF": [f"`{name}`" for name in gguf_config.ARCHITECTURES],
        "architectures, Hugging Face": [f"`{name}`" for name in hf_config.ARCHITECTURES],
        "shapes, CPU": [f"size multiples of {PAIR}", f"size of {LANES}"],
        "slots": [limits.MAX_SLOTS],
        "context": [f"2^{limits.MAX_CTX.bit_length() - 1}"],
        "sampling": [
            f"{wire.MAX_ALTERNATIVES} log", f"{wire.MAX_BIAS} bias",
            f"{wire.MAX_STOP_IDS} stop ids",
            f"{limits.MAX_STOP_STRINGS} stop strings", f"{limits.MAX_STOP_CHARACTERS:,} char",
        ],
        "speculation": [f"2 to {MAX_BLOCK}", f"{limits.MAX_NODES} nodes", f"depth {MAX_DEPTH}"],
    }.items():  # fmt: skip
        for value in values:
            assert str(value) in rows[what], (what, value)
        if what.startswith("architectures"):
            assert len(re.findall("`", rows[what])) == 2 * len(values), what


def test_sampling_defaults_are_those_of_the_code():
    text = PAGES["guide"].read_text(encoding="utf-8").partition("## Sampling")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text.partition("##")[0], re.M)
    params = SamplingParams()
    assert dict(rows) == {f.name: repr(getattr(params, f.name)) for f in dataclasses.fields(params)}


def test_files_that_the_pages_name_exist():
    for page in PAGES.values():
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|experiments|megadecode)/[\w/.*]+)`", text):
            assert list(ROOT.glob(name)), name
        for module in re.findall(r"`python -m ([\w.]+)`", text):
            assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_no_page_names_a_path_of_a_machine():
    for page in PAGES.values():
        assert not re.search(r"(?<![\w.])/(home|root|tmp|work)/", page.read_text()), page
