"""The command line and `megadecode.run`, on the default model."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from command_line import command
from engine_checks import CHILD

import megadecode
from megadecode import ParameterError, PromptError, Request, doctor
from megadecode.cli import app
from megadecode.commands import _common
from megadecode.doctor import checks

CAPITAL = "What is the capital of France?"


def test_run_streams_the_answer_and_reports_on_stderr(model_path):
    """As a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "megadecode", "run", CAPITAL],
        capture_output=True,
        timeout=800,  # a cold compile on a busy machine
        **CHILD,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "1 host round trip," in done.stderr
    assert "finish: stop" in done.stderr


def test_run_json_is_one_object(model_path):
    done = command("run", "--json", "--model", str(model_path), "--max-new-tokens", "5", CAPITAL)
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "length"
    assert len(result["token_ids"]) == result["stats"]["tokens"] == 5


def test_run_json_with_stream_is_a_line_a_chunk_and_the_whole(model_path):
    done = command("run", "--json", "--stream", "--logprobs", "2", "--max-new-tokens", "5", CAPITAL)
    *chunks, end = [json.loads(line) for line in done.stdout.splitlines()]
    assert {chunk["event"] for chunk in chunks} == {"chunk"}
    assert end["event"] == "end"
    assert "".join(chunk["text"] for chunk in chunks) == end["text"]
    assert [i for chunk in chunks for i in chunk["token_ids"]] == end["token_ids"]
    assert [len(top) for top in end["top_logprobs"]] == [2] * 5


def test_run_reads_standard_input_raw(model_path):
    done = command("run", "--raw", "--max-new-tokens", "3", "-", input="Once upon a")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" time")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", ""), "the prompt is empty; give at least one character, token or message"),
        (("run", "--device", "cuda", "--draft", "off", "hi"), "device 'cuda' cannot be used here"),
        (("run", "--max-new-tokens", "-3", "hi"), "max_new_tokens is -3"),
        (("run", "--ctx", "1", "hi"), "ctx is 1; it must be between 2 and 16777216"),
        (("run", "--model", "gpt-9", "hi"), "gpt-9"),
        (
            ("export-drafter", "auto", "--gguf", "/nowhere/draft.gguf"),
            "megadecode: /nowhere/draft.gguf.part: No such file or directory\n",
        ),
    ],
)
def test_errors_are_one_line_and_exit_code_one(words, message):
    done = command(*words)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_interrupt_ends_an_answer_early(model_path, monkeypatch):
    """What has come by then is shown, and the exit code says why there is no more."""
    chunks = Request.__iter__

    def interrupted(self):
        yield next(chunks(self))
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "__iter__", interrupted)
    done = command("run", "--ctx", "1024", "--max-new-tokens", "900", "Tell me a long story.")
    assert done.returncode == 130
    assert done.stdout.strip()
    assert "finish: abort" in done.stderr


def test_a_command_is_a_file():
    names = {info.name for info in app.registered_commands if info.name} | {
        info.callback.__name__ for info in app.registered_commands if info.callback
    }
    assert {"run", "chat", "bench", "doctor"} <= names
    assert "models" in {group.name for group in app.registered_groups}
    done = command("--help")
    assert done.stdout.index(" run ") < done.stdout.index(" chat ") < done.stdout.index(" doctor ")


def test_a_long_prompt_shows_how_far_it_has_been_read(model_path, monkeypatch):
    seen = []
    monkeypatch.setattr(_common.Progress, "update", lambda *_, completed: seen.append(completed))
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    done = command("run", "--max-new-tokens", "1", "--ctx", "4096", "--raw", "a b c d e f " * 190)
    assert done.returncode == 0, done.stderr
    assert seen, "a prompt of 1,140 tokens takes longer than a look"
    assert seen == sorted(seen)
    assert max(seen) <= 1280


# -- models -------------------------------------------------------------------------------------


def test_models_are_listed_fetched_and_removed(model_path, tmp_path, monkeypatch):
    """Against a cache of its own, with the file put there by hand."""
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path))

    def listed():
        (model,) = [
            m
            for m in json.loads(command("models", "list", "--json").stdout)
            if m["name"] == "smollm2-135m"
        ]
        return model

    assert listed()["state"] == "not fetched"
    place = Path(listed()["path"])
    place.parent.mkdir(parents=True)
    place.write_bytes(model_path.read_bytes())
    assert listed()["state"] == "fetched"
    done = command("models", "fetch", "--json", "smollm2-135m")
    assert json.loads(done.stdout) == {"name": "smollm2-135m", "path": str(place)}
    with place.open("r+b") as file:
        file.write(b"x")
    assert listed()["state"] == "damaged"
    assert "damaged" in command("models", "list").stdout
    done = command("models", "remove", "smollm2-135m")
    assert done.stderr == "98 MB freed\n"
    assert not place.exists()
    assert json.loads(command("models", "remove", "--json", "smollm2-135m").stdout) == {
        "name": "smollm2-135m",
        "freed_bytes": 0,
    }


@pytest.mark.parametrize("what", ["fetch", "remove"])
def test_unknown_models_are_refused_by_name(what):
    done = command("models", what, "gpt-9")
    assert done.returncode == 1
    assert done.stderr.startswith("megadecode: unknown model 'gpt-9'; known: smollm2-135m")


# -- doctor -------------------------------------------------------------------------------------


def test_doctor_finds_what_the_default_run_needs(model_path):
    found = {check.what: check for check in checks()}
    assert all(check.ok for check in found.values() if check.needed)
    assert found["model smollm2-135m"].ok
    done = command("doctor", "--json")
    assert done.returncode == 0
    assert [check["what"] for check in json.loads(done.stdout)] == list(found)


def test_doctor_on_an_empty_home_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path / "nothing here"))
    monkeypatch.setattr("megadecode.drafter.find.SHIPPED", tmp_path)
    found = {check.what: check for check in checks()}
    assert not found["model smollm2-135m"].ok
    assert found["model smollm2-135m"].advice
    for what in ("drafters", "compiled GPU kernels"):
        assert not found[what].ok
        assert found[what].advice
    assert not (tmp_path / "nothing here").exists(), "the doctor changes nothing"


def test_doctor_keeps_paths_whole_and_advises_where_no_driver_is(tmp_path, monkeypatch):
    """A path that the terminal's width cuts into pieces cannot be copied."""
    home = tmp_path / "a-long-folder-name" / ("x" * 90)
    home.mkdir(parents=True)
    monkeypatch.setenv("MEGADECODE_HOME", str(home))
    done = command("doctor", columns=60)
    assert f"{home}: empty" in done.stdout
    monkeypatch.setattr("megadecode.doctor._has", lambda module: True)
    for raised, says in (
        (ImportError("libcuda.so.1"), "there is no NVIDIA driver"),
        (doctor._Refused("the driver says CUDA_ERROR_NO_DEVICE"), "the driver says CUDA_ERROR_NO"),
    ):
        monkeypatch.setattr("megadecode.doctor._gpu_names", Mock(side_effect=raised))
        gpu = {check.what: check for check in checks()}["CUDA device"]
        assert not gpu.ok and says in gpu.found
        assert gpu.advice.startswith("install NVIDIA's driver")
    monkeypatch.setattr("megadecode.doctor._gpu_names", list)
    gpu = {check.what: check for check in checks()}["CUDA device"]
    assert gpu.found == "the driver shows no GPU" and "CUDA_VISIBLE_DEVICES" in gpu.advice


def test_doctor_names_the_drafters_there_are(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path))
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "mine.safetensors").write_bytes(b"")
    found = {check.what: check for check in checks()}
    assert found["drafters"].ok
    assert "mine.safetensors" in found["drafters"].found
    assert "drafters 0 MB" in found["cache"].found


def test_run_keeps_its_engine_and_replaces_it(model_path):
    from megadecode.run import close_kept

    first = megadecode.run(CAPITAL, ctx=512)
    again = megadecode.run(CAPITAL, ctx=512)
    other = megadecode.run(CAPITAL, model=model_path, ctx=256, max_new_tokens=4)
    assert "Paris" in first.text
    assert first.token_ids == again.token_ids
    assert first.token_ids[-1] in (2,), "the stop token is part of the ids"
    assert other.token_ids == first.token_ids[:4]
    close_kept()


def test_run_takes_messages_raw_text_and_ids(model_path, tokenizer):
    messages = [{"role": "user", "content": CAPITAL}]
    as_text = megadecode.run(CAPITAL, ctx=512, max_new_tokens=6)
    as_chat = megadecode.run(messages, ctx=512, max_new_tokens=6)
    as_ids = megadecode.run(tokenizer.chat(messages), ctx=512, max_new_tokens=6)
    raw = megadecode.run(CAPITAL, ctx=512, max_new_tokens=6, chat=False)
    assert as_text.token_ids == as_chat.token_ids == as_ids.token_ids != raw.token_ids


def test_run_refuses_by_name():
    with pytest.raises(ParameterError, match="unsupported sampling parameter 'beams': one request"):
        megadecode.run("hi", beams=5)
    with pytest.raises(PromptError, match="the prompt is empty"):
        megadecode.run("", ctx=512)
