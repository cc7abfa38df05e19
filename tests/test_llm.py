"""`LLM`, the synchronous interface of the engine."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.fake_matcher import held_to
from support.serving import demo_engine, served

from minisgl import LLM, AsyncEngine, MinisglError, RequestOutput, SamplingParams, StructuredOutput
from minisgl.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineError,
    EngineStoppedError,
    InvalidRequestError,
    QueueFullError,
)
from minisgl.models.hub import DEMO_FOLDER
from minisgl.request import EVERYONE, Tenant

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", num_pages=100, max_running_requests=8) as llm:
        yield llm


def test_generate_accepts_one_or_many_texts_or_token_id_lists(llm: LLM) -> None:
    texts = llm.generate(["Hello", "What is"], GREEDY)
    assert [output.finish_reason for output in texts] == ["length", "length"]
    ids = [output.prompt_token_ids for output in texts]
    assert [o.token_ids for o in llm.generate(ids, GREEDY)] == [o.token_ids for o in texts]
    assert llm.generate("Hello", GREEDY)[0].token_ids == texts[0].token_ids
    assert llm.generate(ids[0], GREEDY)[0].token_ids == texts[0].token_ids
    tokenizer = llm.engine.tokenizer
    assert tokenizer is not None and texts[0].text == tokenizer.decode(texts[0].token_ids)
    assert llm.generate([]) == []


def test_each_salt_has_its_own_prefix_cache(llm: LLM) -> None:
    prompt = [*range(3, 60)]

    def cached(**options: Any) -> int:
        return llm.generate(prompt, GREEDY, **options)[0].num_cached_tokens

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    assert cached() == cached(cache_salt="a") == cached(cache_salt="b") > 0
    question = [{"role": "user", "content": "What is the capital of France, if I may ask?"}]
    for salt, found in (("a", False), ("b", False), ("a", True)):
        answer = llm.chat(question, GREEDY, cache_salt=salt)
        assert (answer.num_cached_tokens > 0) == found
    with pytest.raises(InvalidRequestError, match=r"cache_salt: must have 1 to 256 characters"):
        cached(cache_salt="")


def test_images_are_processed_within_the_namespace_of_their_prefix(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, Tenant]] = []
    encode = AsyncEngine.encode_conversation

    async def noted(
        engine: AsyncEngine,
        messages: Any,
        any_length: bool,
        cache_salt: str | None,
        tenant: Tenant,
        /,
        **options: Any,
    ) -> Any:
        seen.append((cache_salt, tenant))
        return await encode(engine, messages, any_length, cache_salt, tenant, **options)

    monkeypatch.setattr(AsyncEngine, "encode_conversation", noted)
    question = [{"role": "user", "content": "Hello"}]
    for salt in (None, "a"):
        llm.chat(question, GREEDY, cache_salt=salt)
        assert list(llm.stream(question, GREEDY, cache_salt=salt))
        assert seen[-2:] == [(salt, EVERYONE)] * 2
    assert seen[0] != seen[-1]


def test_more_prompts_than_slots_run_each_with_its_own_parameters(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=0, max_tokens=1 + n % 5, ignore_eos=True) for n in range(40)
    ]
    outputs = llm.generate([[n, 1, 2] for n in range(40)], params)
    assert [len(output.token_ids) for output in outputs] == [1 + n % 5 for n in range(40)]
    with pytest.raises(InvalidRequestError, match="40 for 1 prompt"):
        llm.generate(["x"], params)
    with pytest.raises(InvalidRequestError, match="either one"):
        llm.generate(cast(Any, [[1, 2], 5, "x"]))
    bools = ([True], [[True]], [[1, False]], np.array([True]), [torch.tensor([True, False])])
    wrong: list[Any] = [[None], [["x"]], [object()], 7, *bools]
    for prompts in wrong:
        with pytest.raises(InvalidRequestError, match="must be texts or token ids"):
            llm.generate(prompts)
    parameters: Any = {"temperature": 0}
    with pytest.raises(InvalidRequestError, match="must be SamplingParams"):
        llm.generate("a", parameters)
    messages: list[Any] = ["hello", [{"rol": "user"}], ["hello"]]
    for message in messages:
        with pytest.raises(InvalidRequestError, match="messages"):
            llm.chat(message)


def test_token_ids_of_numpy_and_torch_are_accepted(llm: LLM) -> None:
    expected = llm.generate([[1, 2]], GREEDY)[0].token_ids
    for prompts in (np.array([1, 2]), [np.array([1, 2])], [torch.tensor([1, 2])]):
        assert llm.generate(cast(Any, prompts), GREEDY)[0].token_ids == expected


def test_the_second_turn_reuses_the_cached_prefix(llm: LLM) -> None:
    history = [{"role": "user", "content": "Tell me about the capital of France and of Japan."}]
    first = llm.chat(history, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    turn = first.prompt_token_ids + first.token_ids
    second = llm.generate([[*turn, 5, 6]], GREEDY)[0]
    assert second.num_cached_tokens == (len(turn) - 1) // 16 * 16


def test_outputs_and_prompts_have_the_requested_logprobs(llm: LLM) -> None:
    [output] = llm.generate(
        [[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=1)
    )
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert len(entry.top) == 3 and entry.top[0] == (entry.token_id, entry.logprob)
        assert entry.rank == 1
    assert output.prompt_logprobs[0] is None
    assert [e.token_id for e in output.prompt_logprobs[1:] if e is not None] == [2, 3]
    [scored] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=0, prompt_logprobs=1))
    assert scored.token_ids == [] and scored.finish_reason == "length"
    assert scored.prompt_logprobs == output.prompt_logprobs


def test_a_seed_fixes_the_output_and_no_seed_does_not(llm: LLM) -> None:
    def run(seed: int | None) -> list[int]:
        params = SamplingParams(max_tokens=12, seed=seed, temperature=2)  # the model is sure at 1
        return llm.generate("Hello", params)[0].token_ids

    assert run(3) == run(3)
    assert run(3) != run(4)
    assert len({tuple(run(None)) for _ in range(5)}) > 1


def test_a_refused_prompt_is_an_error_and_leaves_nothing_running(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="1600 in the prompt"):
        llm.generate([[1], [1] * 1600], GREEDY)
    assert llm.engine.stats().num_running == llm.engine.stats().num_queued == 0
    assert llm.generate("Hello", GREEDY)[0].token_ids


def test_a_call_that_takes_longer_than_its_timeout_ends_and_frees_its_pages(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=1500, ignore_eos=True)
    question = [{"role": "user", "content": "Hello"}]
    late: list[Callable[[], object]] = [
        lambda: llm.generate([[1], [2]], endless, timeout=1e-6),
        lambda: llm.chat(question, endless, timeout=1e-6),
        lambda: [*llm.stream([1], endless, timeout=1e-6)],
    ]
    for call in late:
        with pytest.raises(DeadlineError, match="as long as its timeout allows"):
            call()
    pieces = llm.stream([1], endless, timeout=3600)
    assert next(pieces).token_ids
    with pytest.MonkeyPatch.context() as patched:
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3601)
        patched.setattr("minisgl.llm.time", later)
        with pytest.raises(DeadlineError):
            for _ in pieces:
                pass
    assert llm.generate([1], GREEDY, timeout=3600) and llm.chat(question, GREEDY, timeout=3600)
    assert llm.engine.stats().num_running == llm.engine.stats().num_queued == 0
    for wrong in (0, -1, True, "1", float("nan")):
        with pytest.raises(InvalidRequestError, match=r"^timeout: must be a number of seconds"):
            llm.generate([1], GREEDY, timeout=cast(Any, wrong))


def test_threads_can_share_one_llm(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate([[n, 2] for n in range(6)], GREEDY)]
    results: dict[int, RequestOutput] = {}

    def work(n: int) -> None:
        results[n] = llm.generate([[n, 2]], GREEDY)[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[n].token_ids for n in range(6)] == expected


def test_closing_is_final_and_idempotent() -> None:
    llm = LLM(device="cpu", num_pages=20)
    llm.close()
    llm.close()
    with pytest.raises(EngineStoppedError):
        llm.generate("x")


def test_a_waiting_call_fails_when_the_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(device="cpu", num_pages=100)
    runner, may_collect = llm.engine._runner, threading.Event()
    collect = runner.collect
    monkeypatch.setattr(runner, "collect", lambda step: may_collect.wait() and collect(step))
    errors: list[Exception] = []

    def work() -> None:
        try:
            llm.generate([[1]], SamplingParams(max_tokens=1000, ignore_eos=True))
        except EngineStoppedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not llm.engine.stats().num_running:
        assert thread.is_alive()
        time.sleep(0.001)
    closing = threading.Thread(target=llm.close)
    closing.start()
    thread.join()  # before any step has ended
    may_collect.set()
    closing.join()
    assert [str(error) for error in errors] == ["The engine was closed."]


def test_a_failed_load_leaves_no_thread() -> None:
    before = {*threading.enumerate()}  # of which those of earlier tests may end meanwhile
    with pytest.raises(ConfigError, match="attn='fi'"):
        LLM(attn="fi", device="cpu")
    assert not {*threading.enumerate()} - before


def test_ctrl_c_at_the_very_end_of_a_load_closes_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for = LLM._wait_for

    def interrupted(llm: LLM, work: Any) -> None:
        wait_for(llm, work)
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "_wait_for", interrupted)
    before = {*threading.enumerate()}
    with pytest.raises(KeyboardInterrupt):
        LLM(device="cpu", num_pages=100)
    left = {*threading.enumerate()} - before
    for thread in left:
        if thread.name.startswith("minisgl"):  # it may have done its last work a moment ago
            thread.join(60)
            assert not thread.is_alive(), thread.name


def test_iterators_of_prompts_are_accepted_and_bytes_are_refused(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(cast(Any, ["a", [5, 6]]), GREEDY)]
    made: Iterator[Any] = (prompt for prompt in ("a", iter([5, 6])))
    assert [output.token_ids for output in llm.generate(made, GREEDY)] == expected
    assert llm.generate(iter([5, 6]), GREEDY)[0].token_ids == expected[1]
    assert llm.generate(iter(()), GREEDY) == []
    wrong: list[Any] = [b"abc", [b"abc"], ["a", bytearray(b"abc")], iter([memoryview(b"abc")])]
    for prompts in wrong:
        with pytest.raises(InvalidRequestError, match="bytes are neither a text nor token ids"):
            llm.generate(prompts, GREEDY)
    for mapping in ({"prompt": "a"}, [{1: 2}]):
        with pytest.raises(InvalidRequestError, match="must be texts or token ids: one prompt, or"):
            llm.generate(cast(Any, mapping), GREEDY)


LEFT_OPEN = """
import asyncio
import json, os, sys, threading, time
from minisgl import LLM, SamplingParams
from minisgl.errors import EngineStoppedError

llm = LLM(device="cpu", num_pages=500, max_running_requests=8)
endless = SamplingParams(max_tokens=2000, ignore_eos=True)
if os.fork() == 0:
    for use in (
        lambda: llm.generate([[1]]),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.engine.submit([1], endless),
        lambda: asyncio.run(llm.engine.encode("x")),
    ):
        try:
            use()
        except EngineStoppedError as error:
            print(error)
    llm.close()
    sys.exit()
os.wait()
threading.Thread(target=llm.generate, args=([[1]] * 4, endless), daemon=True).start()

def answer():
    print(len(llm.generate([[2]], SamplingParams(max_tokens=300, ignore_eos=True))[0].token_ids))

threading.Thread(target=answer).start()
while llm.engine.stats().counters.num_prompt_tokens < 5:  # one of each request that runs
    time.sleep(0.001)
"""


def test_an_unclosed_llm_exits_quietly_and_a_forked_one_is_refused() -> None:
    """Other threads get their answers, unless they are daemons, which nobody waits for."""
    command = [sys.executable, "-W", "ignore", "-c", LEFT_OPEN]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    *refusals, answer = done.stdout.splitlines()
    assert len(refusals) == 4
    assert all("of which this one is a fork" in refusal for refusal in refusals)
    assert answer == "300"


class City(BaseModel):
    name: str
    people: int


@pytest.mark.parametrize("response_format", [City, City.model_json_schema()])
def test_the_reply_to_a_response_format_is_parsed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, response_format: Any
) -> None:
    asked: list[SamplingParams] = []

    async def reply(prompts: Any, params: list[SamplingParams], *_: Any) -> list[RequestOutput]:
        asked.extend(params)
        return [RequestOutput([], [], "", "stop", parsed={"name": "Rome", "people": 3})]

    monkeypatch.setattr(llm, "_run", reply)
    city = llm.chat([{"role": "user", "content": "A city?"}], response_format=response_format)
    expected = City(name="Rome", people=3)
    assert city.parsed == (expected if response_format is City else expected.model_dump())
    [params] = asked
    assert params.structured is not None
    assert params.structured.json_schema == City.model_json_schema()


def test_of_a_reply_that_was_cut_nothing_is_parsed(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=1)
    [question] = ({"role": "user", "content": "A city?"},)
    assert llm.chat([question], params, response_format=City).parsed is None


def test_a_response_format_that_is_wrong_is_refused(llm: LLM) -> None:
    question = [{"role": "user", "content": "A city?"}]
    with pytest.raises(InvalidRequestError, match="response_format: must be a JSON schema"):
        llm.chat(question, response_format="json")
    with pytest.raises(InvalidRequestError, match="response_format: at /type: Invalid type"):
        llm.chat(question, response_format={"type": "town"})
    schema = {"name": "city", "schema": City.model_json_schema()}
    for form in ({"type": "json_schema", "json_schema": schema}, {"type": "json_object"}):
        answer = llm.chat(question, response_format=form, max_tokens=20, temperature=0)
        assert answer.text.lstrip().startswith("{")
    params = SamplingParams(structured=StructuredOutput(json_object=True))
    with pytest.raises(InvalidRequestError, match="is not allowed with `structured`"):
        llm.chat(question, params, response_format=City)


CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
ODD = [{"role": "user", "content": "Zebra, blue of them?"}]
SUM = [{"role": "user", "content": "What is 17 + 25?"}]


def test_sampling_parameters_are_taken_by_name_and_replace_the_given_ones(llm: LLM) -> None:
    expected = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    named: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
    assert llm.generate("Hello", **named)[0].token_ids == expected[0].token_ids
    assert llm.generate("Hello", GREEDY, max_tokens=3)[0].token_ids == expected[0].token_ids
    several = llm.generate(["Hello", "Hello"], [GREEDY, GREEDY], max_tokens=3)
    assert [len(output.token_ids) for output in several] == [3, 3]
    assert len(llm.chat(CAPITAL, temperature=0, max_tokens=2).token_ids) == 2
    assert len(llm.chat(CAPITAL, GREEDY, max_tokens=2).token_ids) == 2


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"temprature": 7}, "temprature: is no sampling parameter.*did you mean temperature"),
        ({"foo": "bar"}, r"foo: is no sampling parameter and no variable of the chat template\.$"),
        ({"enable_thinking": False}, "enable_thinking: is no sampling parameter and no variable"),
        ({"temperature": 7}, "temperature: must be from 0 to 2"),
        ({"n": 0}, "n: must be an integer of at least 1"),
        ({"tools": ["f"]}, "tools: "),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
            "tools: f: parameters must be a JSON schema",
        ),
        ({"tools": print}, "tools: must be a list of functions"),
        ({"stop": 5}, "stop: must be a list, not 5"),
        ({"sampling_params": 5}, "sampling_params: must be SamplingParams"),
        ({"chat_template_kwargs": {"foo": 1}}, "foo: is no sampling parameter and no variable of"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: tools is an argument of"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is an argum"),
        ({"chat_template_kwargs": {"lora": "x"}}, "chat_template_kwargs: lora is an argument of"),
        ({"chat_template_kwargs": {"top_k": 1}}, "chat_template_kwargs: top_k is an argument of"),
        ({"chat_template_kwargs": ["foo"]}, "chat_template_kwargs: must be a dict"),
        (
            {
                "add_generation_prompt": True,
                "chat_template_kwargs": {"add_generation_prompt": True},
            },
            "chat_template_kwargs: add_generation_prompt is an argument of its own",
        ),
    ],
)
def test_options_without_effect_are_refused(llm: LLM, named: dict[str, Any], message: str) -> None:
    with pytest.raises(MinisglError, match=message):
        llm.chat(CAPITAL, **named)


def test_tools_that_the_template_does_not_show_are_refused(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused = pytest.raises(InvalidRequestError, match="tools: are not supported")
    with LLM(chat_template=str(template), num_pages=16) as llm, refused:
        llm.chat(CAPITAL, tools=tools)


def test_a_batch_whose_images_do_not_fit_at_once_runs_in_parts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected, other] = llm.chat([CAPITAL, SUM], GREEDY)
    read, run, parts = LLM._read, LLM._run, []
    waiting: list[Any] = []

    async def reads(self: LLM, *args: Any) -> Any:
        if len(waiting) == 2:
            raise QueueFullError("Too many images are in the queue; try again later.")
        waiting.append(args)
        return await read(self, *args)

    async def runs(self: LLM, prompts: Any, *args: Any) -> Any:
        parts.append(len(prompts))
        waiting.clear()
        return await run(self, prompts, *args)

    monkeypatch.setattr(LLM, "_read", reads)
    monkeypatch.setattr(LLM, "_run", runs)
    outputs = llm.chat([CAPITAL, SUM, SUM, CAPITAL, SUM], GREEDY)
    assert parts == [2, 2, 1]
    texts = [output.text for output in (expected, other, other, expected, other)]
    assert [output.text for output in outputs] == texts
    waiting += [None, None]
    with pytest.raises(QueueFullError):
        llm.chat(CAPITAL, GREEDY)


@pytest.mark.parametrize("role", ["usr", 5, None])
def test_a_role_that_no_template_knows_is_refused(llm: LLM, role: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"messages\[1\].role: cannot be .*allowed: sys"):
        llm.chat([*CAPITAL, {"role": role, "content": "x"}])


def test_conversations_are_fitted_to_the_template_as_a_server_does(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(  # takes the first of the system's messages, and no text beside calls
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}<{{ m.role }}>"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
        "{{ call.function.arguments.items() | list }}{% else %}{{ m.content }}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"b": "c"}'}}
    told = [{"role": "system", "content": text} for text in ("Be brief.", "Be kind.")]
    called = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": "18"}
    with LLM(device="cpu", num_pages=100, chat_template=str(template)) as llm:
        answer = llm.chat([*told, *CAPITAL, called, result], GREEDY)
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        text = tokenizer.decode(answer.prompt_token_ids)
        assert text.startswith("<system>Be brief.\n\nBe kind.<user>")
        assert text.endswith("<assistant>I look.<assistant>f[('b', 'c')]<tool>18")
        for wrong, message in (
            ([*CAPITAL, {**result, "tool_call_id": "x"}], r"messages.1.tool_call_id: is the id"),
            (
                [*CAPITAL, {**called, "tool_calls": "f"}],
                r"messages\[1\].tool_calls: must be a list",
            ),
        ):
            with pytest.raises(InvalidRequestError, match=message):
                llm.chat(wrong)


def test_names_that_are_no_sampling_parameter_are_refused_by_generate(llm: LLM) -> None:
    with pytest.raises(MinisglError, match=r"max_token: .*did you mean max_tokens"):
        llm.generate("Hello", max_token=3)


def test_lists_of_conversations_and_n_answers_come_in_their_order(llm: LLM) -> None:
    single = [llm.chat(messages, GREEDY) for messages in (CAPITAL, SUM)]
    together = llm.chat([CAPITAL, SUM], GREEDY)
    assert [output.token_ids for output in together] == [output.token_ids for output in single]
    sampled: dict[str, Any] = {"temperature": 2, "max_tokens": 8, "ignore_eos": True}
    pairs = llm.chat([CAPITAL, SUM], n=2, seed=5, **sampled)
    seeds = [SamplingParams(seed=5).for_choice(k).seed for k in range(2)]
    alone = [llm.chat(each, seed=seed, **sampled) for each in (CAPITAL, SUM) for seed in seeds]
    assert [output.token_ids for output in pairs] == [output.token_ids for output in alone]
    assert len({tuple(output.token_ids) for output in llm.generate("Hello", n=4, **sampled)}) > 1
    seeded = llm.generate("Hello", n=4, seed=3, **sampled)
    assert len({tuple(output.token_ids) for output in seeded}) > 1
    assert [o.token_ids for o in llm.chat(CAPITAL, n=1, seed=5, **sampled)] == [alone[0].token_ids]
    assert len(llm.generate(["a", "b"], n=3, max_tokens=1)) == 6
    assert llm.generate([], n=3) == []


def test_a_server_gives_the_same_answers_to_a_seed(llm: LLM) -> None:
    """Each of n choices, of prompts and of conversations."""
    body = {"n": 3, "seed": 5, "temperature": 2, "max_tokens": 8, "ignore_eos": True}
    with served(demo_engine) as server, server.http() as client:
        for path, prompt, ask in (
            ("completions", {"prompt": ["Hello", "What is"]}, llm.generate),
            ("chat/completions", {"messages": ODD}, llm.chat),
        ):
            answer = client.post(f"/v1/{path}", json={**body, **prompt, "return_token_ids": True})
            found = [choice["token_ids"] for choice in answer.json()["choices"]]
            outputs = cast(Any, ask)(*prompt.values(), **body)
            assert found == [output.token_ids for output in outputs]
            assert len({*map(tuple, found)}) > 1, "the model is too sure of its answer"


def test_an_llm_says_what_it_was_made_with(tmp_path: Path) -> None:
    with LLM(device="cpu", num_pages=40, max_model_len=200) as llm:
        assert repr(llm) == "<LLM(device='cpu', num_pages=40, max_model_len=200)>"
    assert repr(llm) == "<closed LLM(device='cpu', num_pages=40, max_model_len=200)>"
    with LLM(Path(DEMO_FOLDER), dtype=torch.float32, device="cpu", num_pages=40) as llm:
        assert repr(llm).startswith(f"<LLM(model=PosixPath('{DEMO_FOLDER}'), dtype=torch.float32")
        assert llm.generate("Hello", GREEDY)[0].token_ids


def test_a_stream_has_the_pieces_of_the_whole_answer(llm: LLM) -> None:
    whole = llm.chat(CAPITAL, GREEDY)
    for prompt in (CAPITAL, whole.prompt_token_ids):
        pieces = [*llm.stream(cast(Any, prompt), GREEDY)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert [piece.finish_reason is not None for piece in pieces][-1]
    [hello] = llm.generate("Hello", GREEDY)
    assert "".join(piece.text for piece in llm.stream("Hello", GREEDY)) == hello.text
    wrong: list[Any] = [["a", "b"], 7, [1.5]]
    for prompt in wrong:
        with pytest.raises(InvalidRequestError):
            next(llm.stream(prompt))
    with pytest.raises(InvalidRequestError, match="tools: is for conversations"):
        next(llm.stream("Hello", tools=[len]))
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs: is for conversations"):
        next(llm.stream("Hello", chat_template_kwargs={}))


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    for piece in llm.stream(CAPITAL, endless):
        assert piece.token_ids
        break
    llm.generate("Hello", GREEDY)  # the abort is settled before it
    assert llm.engine.stats().num_running == 0
    with LLM(device="cpu", num_pages=100) as other:
        pieces = other.stream(CAPITAL, endless)
        next(pieces)
    with pytest.raises(EngineStoppedError):
        next(pieces)


def get_weather(city: str) -> str:
    """
    Look the weather up.

    Args:
        city: The name of the city.
    """
    return city


TOOL_TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{% if style %}{{ style }}{% endif %}{# comment #}{{ '<think>' }}"
)


def written(arguments: str) -> str:
    """What a reasoning model with tools would write."""
    call = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}'
    return f"I look it up.</think>Wait.{call}" + "}</tool_call>" * arguments.endswith("}")


def hold_to(llm: LLM, text: str, patch: pytest.MonkeyPatch) -> None:
    """Let the model write nothing but `text`."""
    matcher = llm._wait_for(llm.engine.compile(StructuredOutput(choice=[text])))
    submit = llm.engine.submit
    patch.setattr(
        llm.engine,
        "submit",
        lambda *args, **options: submit(*args, **{**options, "extras": held_to(matcher.matcher())}),
    )


def test_reasoning_and_calls_are_taken_out_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(device="cpu", num_pages=100) as llm:
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        tokenizer._tokenizer.chat_template = TOOL_TEMPLATE
        options: dict[str, Any] = {"temperature": 0, "max_tokens": 200}
        variables = {"style": "plain"}
        # Arguments that are no object are as an answer that was cut.
        for arguments, reason in (
            ('{"city": "Paris"}', "stop"),
            ('{"city": Paris}', "length"),
            ('{"city": "Paris', "length"),
        ):
            with monkeypatch.context() as patch:
                hold_to(llm, written(arguments), patch)
                output = llm.chat(
                    CAPITAL, tools=[get_weather], chat_template_kwargs=variables, **options
                )
                events = [
                    event
                    for piece in llm.stream(CAPITAL, tools=[get_weather], **options)
                    for event in piece.events
                ]
            assert (output.reasoning, output.text) == ("I look it up.", "Wait.")
            [call] = output.tool_calls
            assert (call.name, call.arguments) == ("get_weather", arguments)
            assert output.finish_reason == reason
            prompt = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
            assert '"description": "Look the weather up."' in prompt and "plain" in prompt
            assert any(getattr(event, "name", "") == "get_weather" for event in events)
        named = llm.chat(
            CAPITAL, tools=[get_weather], **cast(Any, variables), **{**options, "max_tokens": 1}
        )
        assert named.prompt_token_ids == output.prompt_token_ids
        with monkeypatch.context() as patch:
            hold_to(llm, written('{"city": "Paris"}'), patch)
            untold = llm.chat(CAPITAL, **options)  # calls are parsed where tools were offered
        assert untold.tool_calls == [] and "<tool_call>" in untold.text

        with pytest.raises(MinisglError, match=r"tools: .* cannot be described"):
            llm.chat(CAPITAL, tools=[lambda city: city])
        for name in ("comment", "function", "stile"):
            with pytest.raises(MinisglError, match=f"{name}: is no sampling parameter"):
                llm.chat(CAPITAL, **cast(Any, {name: 1}))


def test_adapters_answer_by_their_names(tmp_path: Path) -> None:
    names: list[str | None] = ["one", "two", None]
    models = [save_demo_adapter(tmp_path / f"{seed}", seed) for seed in range(2)]
    folders = {"one": tmp_path / "0", "two": tmp_path / "1"}
    with LLM(device="cpu", dtype="float32", lora=folders, max_loras=1, max_lora_rank=16) as llm:
        assert f"lora={folders!r}" in repr(llm)
        tokenizer = llm.engine.tokenizer
        assert tokenizer is not None
        prompt, chat = tokenizer.encode("Who are you?"), tokenizer.chat(CAPITAL)
        found = set[tuple[int, ...]]()
        for name, model in zip(names, [*models, None], strict=True):
            told = greedy_tokens(model, prompt, 8)
            asked: Any = {"sampling_params": GREEDY, "lora": name}
            assert [each.token_ids for each in llm.generate(prompt, n=2, **asked)] == [told] * 2
            of_chat = greedy_tokens(model, chat, 8)
            assert llm.chat(CAPITAL, **asked).token_ids == of_chat
            pieces = [*llm.stream(CAPITAL, **asked)]
            assert [token for piece in pieces for token in piece.token_ids] == of_chat
            found.add((*told, *of_chat))
        assert len(found) == 3
        for wrong in ("three", "", 5, ["one"]):
            given: Any = {"lora": wrong}
            for call in (llm.chat, lambda *given, **by: next(llm.stream(*given, **by))):
                with pytest.raises(InvalidRequestError, match=r"^lora: "):
                    call(CAPITAL, **given)
            with pytest.raises(InvalidRequestError, match=r"^lora: "):
                llm.generate(prompt, **given)
        with pytest.raises(InvalidRequestError, match="no adapter three; loaded: one, two"):
            llm.generate("Hello", lora="three")
        llm.unload_lora("one")
        llm.load_lora("three", tmp_path / "0")
        asked = {"sampling_params": GREEDY, "lora": "three"}
        [output] = llm.generate(prompt, **asked)
        assert output.token_ids == greedy_tokens(models[0], prompt, 8)
        with pytest.raises(InvalidRequestError, match="no adapter one; loaded: two, three"):
            llm.generate(prompt, lora="one")
        for folder in (None, 5, b"x"):
            with pytest.raises(InvalidRequestError, match=r"^lora: allowed: a name"):
                llm.load_lora("four", cast(Any, folder))
        with pytest.raises(MinisglError, match="no adapter 'one'; loaded: two, three"):
            llm.unload_lora("one")


def test_vectors_are_of_the_adapter_that_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And an adapter of another model is told of, and works where it fits."""
    model = save_demo_adapter(tmp_path, seed=0)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "me/Other\n"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(tmp_path, later := tmp_path / "later", ignore=shutil.ignore_patterns("later"))
    lora, ids = f"one={tmp_path}", [*range(3, 20)]
    with LLM(device="cpu", dtype="float32", task="embed", lora=(lora,)) as llm:
        [own], [adapted] = llm.embed(ids), llm.embed(ids, lora="one")
        with pytest.raises(InvalidRequestError, match=r"^lora: there is no adapter two"):
            llm.embed(ids, lora="two")
        llm.load_lora("two", later)
    told = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert told == [
        rf"The adapter {name} was trained for 'me/Other\n', not for demo" for name in ("one", "two")
    ]
    wanted = model.base_model(torch.tensor([ids])).last_hidden_state[0, -1]
    found = torch.tensor([own.vector, adapted.vector])
    alike = torch.cosine_similarity(found, wanted[None])
    assert alike[1] > 0.99999 > 0.99 > alike[0]
