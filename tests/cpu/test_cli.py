"""The command line and `megadecode.run`, on the default model."""

import json
import subprocess
import sys

import pytest

import megadecode
from megadecode import ParameterError, PromptError
from megadecode.doctor import checks

CAPITAL = "What is the capital of France?"


def command(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "megadecode.cli", *words],
        capture_output=True,
        text=True,
        timeout=800,  # a cold compile on a busy machine
        **options,
    )


def test_run_streams_the_answer_and_reports_on_stderr(model_path):
    done = command("run", CAPITAL)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "1 host round trip," in done.stderr
    assert "finish: stop" in done.stderr


def test_run_json_is_one_object(model_path):
    done = command("run", "--json", "--model", str(model_path), "--max-new-tokens", "5", CAPITAL)
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "length"
    assert len(result["token_ids"]) == result["stats"]["tokens"] == 5


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
    ],
)
def test_errors_are_one_line_and_exit_code_one(words, message):
    done = command(*words)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_doctor_finds_what_the_default_run_needs(model_path):
    found = {check.what: check for check in checks()}
    assert all(check.ok for check in found.values() if check.needed)
    assert found["model smollm2-135m"].ok
    done = command("doctor", "--json")
    assert done.returncode == 0
    assert [check["what"] for check in json.loads(done.stdout)] == list(found)


def test_doctor_on_an_empty_home_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGADECODE_HOME", str(tmp_path / "nothing here"))
    found = {check.what: check for check in checks()}
    assert not found["model smollm2-135m"].ok
    assert found["model smollm2-135m"].advice
    assert not (tmp_path / "nothing here").exists(), "the doctor changes nothing"


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
    with pytest.raises(ParameterError, match="unsupported sampling parameter 'beams'"):
        megadecode.run("hi", beams=5)
    with pytest.raises(PromptError, match="the prompt is empty"):
        megadecode.run("", ctx=512)
