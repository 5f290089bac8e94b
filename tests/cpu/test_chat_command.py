"""`megadecode chat`: its memory and commands alone, and a conversation through a pipe."""

import json

import pytest
from command_line import command

from megadecode import Generation, ParameterError, SamplingParams, Stats
from megadecode.commands._conversation import Conversation, Left


@pytest.fixture
def talk():
    return Conversation(SamplingParams(max_new_tokens=5), "Be brief.")


def answer(text="Yes."):
    stats = Stats(3, 2, 0.1, 10.0, 1, (0, 1, 1), 9)
    return Generation(text, [1, 2, 3], [0.0] * 3, "stop", stats)


def test_turns_are_kept_and_forgotten(talk):
    assert talk.command("hello") is None
    assert [m["role"] for m in talk.ask("hello")] == ["system", "user"]
    talk.note(answer())
    assert talk.ask("and?")[1:] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "and?"},
    ]
    talk.take_back()
    talk.take_back()
    assert talk.messages[-1]["content"] == "Yes.", "only a turn without an answer is taken back"
    assert talk.command("/reset") == "the conversation is forgotten"
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


def test_a_slash_can_be_said(talk):
    assert talk.command("//etc/passwd") is None
    assert talk.ask("//etc/passwd")[-1]["content"] == "/etc/passwd"


def test_the_system_message_begins_anew(talk):
    talk.ask("hello")
    assert talk.command("/system") == "Be brief."
    assert talk.command("/system Be long.").startswith("the system message is set")
    assert talk.messages == [{"role": "system", "content": "Be long."}]
    assert Conversation(SamplingParams()).command("/system") == "there is no system message"


def test_parameters_are_set_shown_and_refused(talk):
    assert talk.command("/set temperature 0.5") == "temperature = 0.5"
    assert talk.command('/set stop ["a", "\\n"]') == "stop = ('a', '\\n')"
    assert talk.command("/set stop END") == "stop = ('END',)"
    assert talk.command("/set temperature") == "temperature = 0.5"
    assert "max_new_tokens = 5" in talk.command("/set").splitlines()
    assert (talk.params.temperature, talk.params.max_new_tokens) == (0.5, 5)
    for line, message in {
        "/set temperature hot": "temperature is 'hot'; it must be a number",
        "/set max_tokens 9": "unsupported sampling parameter 'max_tokens': use max_new_tokens",
        "/set warmth": "unknown parameter 'warmth'; there are max_new_tokens, temperature",
        "/bogus": "unknown command /bogus; /help lists them",
        "/save": "say where to: /save PATH",
    }.items():
        with pytest.raises(ParameterError, match=f"^{message}"):
            talk.command(line)
    assert talk.params.temperature == 0.5


def test_figures_and_files(talk, tmp_path):
    assert talk.command("/stats") == "no answer yet"
    talk.ask("hello")
    talk.note(answer())
    said = talk.command("/stats")
    assert "3 tokens, 10.0 tok/s, 1.50 a step, first after 100 ms" in said
    assert "9 prompt tokens; steps by tokens committed: 1 of 1, 1 of 2" in said
    assert "1 answers, 3 tokens in all" in said
    path = tmp_path / "talk.json"
    assert talk.command(f"/save {path}") == f"3 messages written to {path}"
    assert json.loads(path.read_text()) == talk.messages
    with pytest.raises(OSError, match="No such file"):
        talk.command(f"/save {tmp_path}/nowhere/talk.json")
    for word in ("/exit", "/quit"):
        with pytest.raises(Left):
            talk.command(word)
    assert all(f"/{word}" in talk.command("/help") for word in ("reset", "system", "set", "save"))


def test_a_conversation_through_a_pipe(model_path, tmp_path):
    lines = [
        "What is the capital of France?", "", "/stats", "And of Spain?", "/bogus",
        f"/save {tmp_path / 'talk.json'}", "/exit", "never read",
    ]  # fmt: skip
    done = command("chat", "--ctx", "512", "--max-new-tokens", "20", input="\n".join(lines))
    assert done.returncode == 1, "something was refused"
    first, second = done.stdout.splitlines()
    assert "Paris" in first and "Madrid" in second
    assert "steps by tokens committed" in done.stderr
    assert "megadecode: unknown command /bogus; /help lists them" in done.stderr
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2


def test_a_turn_that_does_not_fit_is_refused_and_forgotten(model_path):
    lines = ["one two three " * 200, "Say hi.", "/reset", "Say hi."]
    done = command(
        "chat", "--json", "--stream", "--ctx", "128", "--max-new-tokens", "4", "--system", "Hi.",
        input="\n".join(lines),
    )  # fmt: skip
    assert done.returncode == 1
    assert "tokens; with ctx=128 at most 127 fit" in done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ends = [event for event in events if event["event"] == "end"]
    assert len(ends) == 2
    assert ends[0]["token_ids"] == ends[1]["token_ids"], "the refused turn left nothing behind"
    assert {event["event"] for event in events} == {"chunk", "end"}
