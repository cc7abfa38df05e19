"""`--dataset`: files in ShareGPT's and MT-Bench's format, and the requests made of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.forked_programs import minisgl

from minisgl.bench.config import BenchConfig, ReportConfig, Sizes, Span
from minisgl.bench.offline import bench_offline
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.serve import bench_serve
from minisgl.bench.workload.config import WorkloadConfig, check_lengths
from minisgl.bench.workload.dataset import Conversation, read_dataset, sample
from minisgl.bench.workload.schedule import schedule_dataset
from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.text.tokenizer import Tokenizer

ANSWERS = ["one", "one two", "one two three", "one two three four five"]


def sharegpt(path: Path, *more: Any) -> str:
    entries = [
        {
            "id": f"x_{index}",
            "conversations": [
                {"from": "human", "value": f"question {index}"},
                {"from": "gpt", "value": answer},
                {"from": "human", "value": "and then?"},
                {"from": "gpt", "value": "no more"},
            ],
        }
        for index, answer in enumerate(ANSWERS)
    ]
    path.write_text(json.dumps([*entries, *more]))
    return str(path)


def mt_bench(path: Path, count: int = 4) -> str:
    lines = [
        {"question_id": 81 + index, "category": "writing", "turns": [f"first {index}", "second"]}
        for index in range(count)
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_of_sharegpt_the_first_question_with_its_answer_is_taken(tmp_path: Path) -> None:
    late = [
        {"from": "system", "value": "be kind"},
        {"from": "gpt", "value": "hello"},
        {"from": "user", "value": "who?"},
        {"from": "chatgpt", "value": "me"},
    ]
    odd = [{"conversations": told} for told in (late, [], late[:3], late[3:])]
    found = read_dataset(Path(sharegpt(tmp_path / "a.json", *odd)))
    asked = [f"question {index}" for index in range(4)]
    assert [one.turns for one in found] == [*((text,) for text in asked), ("who?",)]
    assert [one.answer for one in found] == [*ANSWERS, "me"]


def test_of_mt_bench_all_turns_are_taken(tmp_path: Path) -> None:
    found = read_dataset(Path(mt_bench(tmp_path / "a.jsonl", 2)))
    assert found == [
        Conversation(turns=("first 0", "second")),
        Conversation(turns=("first 1", "second")),
    ]


@pytest.mark.parametrize("make", [sharegpt, lambda path: mt_bench(path, 2)])
def test_a_dataset_is_read_past_a_byte_order_mark(tmp_path: Path, make: Callable[..., str]) -> None:
    file = Path(make(tmp_path / "a.json"))
    plain = read_dataset(file)
    file.write_text("\ufeff" + file.read_text())
    assert read_dataset(file) == plain


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": it has no conversation; allowed: a list of"),
        ("[]", ": it has no conversation; allowed: a list of"),
        ('[{"conversations": []}]', ": it has no conversation"),
        ("[{]", ": it is not valid JSON"),
        ("[[", ": it is not valid JSON"),
        ('[{"conversations": []}, 7]', ", entry 2: Expected `object`, got `int`; allowed: a list"),
        ('[{"items": []}]', ", entry 1: Object missing required field `conversations`; allowed"),
        ('[{"conversations": [{"from": "human"}]}]', ", entry 1: Object missing required field"),
        ('{"turns": ["a"]}\n\n{"prompt": "a"}', ", line 3: Object missing required field `turns`"),
        ('{"turns": []}', ", line 1: Expected `array` of length >= 1"),
        ('{"turns": ["a", 5]}', ", line 1: Expected `str`, got `int`"),
        ("hello", ", line 1: JSON is malformed"),
        ('{"turns": ["\xff"]}', ", line 1: "),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_place_and_what_is_expected(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "data"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as refused:
        read_dataset(file)
    shown = str(refused.value)
    assert shown.startswith(f"--dataset {file}{said}")
    assert ('"turns": [TEXT' in shown) or ('"from": "human"' in shown)


def test_the_sample_follows_the_seed_and_counts_questions() -> None:
    conversations = [Conversation(turns=(f"{index}", "more")) for index in range(20)]
    picked = sample(conversations, 7, 3)
    assert [len(one.turns) for one in picked] == [2, 2, 2, 1]
    assert len({one.turns[0] for one in picked}) == 4
    assert picked == sample(conversations, 7, 3) != sample(conversations, 7, 4)
    everything = sample(conversations, 99, 3)
    assert sorted(one.turns for one in everything) == sorted(one.turns for one in conversations)


def test_questions_wait_for_answers_and_lengths_are_known_or_drawn() -> None:
    conversations = [
        Conversation(turns=("a", "b")),
        Conversation(turns=("c",), answer="x", num_answer_tokens=77),
        Conversation(turns=("d",), answer="", num_answer_tokens=0),
    ]
    schedule = schedule_dataset(conversations, Sizes(9, Span(1, 1), Span(5, 6)), 0)
    assert [request.text for request in schedule] == ["a", "b", "c", "d"]
    assert [request.parent for request in schedule] == [None, 0, None, None]
    assert [request.continues for request in schedule] == [False, True, False, False]
    assert {request.max_tokens for request in schedule[:2]} <= {5, 6}
    assert [request.max_tokens for request in schedule[2:]] == [77, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workload": "dataset"}, "--workload dataset: needs --dataset FILE"),
        ({"dataset": "/no/such"}, "--dataset /no/such: allowed: a file that exists"),
        ({"dataset": __file__, "trace": __file__}, f"--dataset {__file__}: not together with --tr"),
        ({"dataset": __file__, "workload": "embed"}, "--workload embed: allowed with --dataset"),
        ({"dataset": __file__, "input_len": 3}, "--input-len 3: a data set has its own prompts"),
        ({"dataset": __file__, "num_turns": 3}, "--num-turns 3: only with --workload multi-turn"),
    ],
)
def test_options_that_contradict_a_dataset_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkloadConfig(**options)
    assert str(refused.value).startswith(said)


async def test_other_verbs_and_lengths_of_prompts_are_refused(tmp_path: Path) -> None:
    workload = WorkloadConfig(dataset=mt_bench(tmp_path / "a.jsonl"))
    with pytest.raises(ConfigError, match="-prompt-length 9: a data set has its own prompts"):
        check_lengths(BenchConfig(max_prompt_length=9), workload)
    with pytest.raises(ConfigError, match="use `minisgl bench serve`"):
        await bench_offline(EngineConfig(), BenchConfig(), workload, ReportConfig())
    with pytest.raises(ConfigError, match="--endpoint completions: the data set has conv"):
        load = LoadConfig(url="http://127.0.0.1:9", endpoint="completions")
        await bench_serve(EngineConfig(), BenchConfig(), workload, load, ReportConfig())


# -- in a run -------------------------------------------------------------------------------------


class Server:
    """Answers with one event, and counts words as tokens if it has /tokenize."""

    def __init__(self, *, tokenize: bool) -> None:
        self.tokenize = tokenize
        self.bodies: list[dict[str, Any]] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        status, body = "404 Not Found", "{}"
        if head.startswith("post"):
            length = int(head.split("content-length:")[1].split()[0])
            asked = json.loads(await reader.readexactly(length))
            if not head.startswith("post /tokenize"):
                self.bodies.append(asked)
                choice: dict[str, Any] = {"finish_reason": "length", "text": "a"}
                if "messages" in asked:
                    choice = {"finish_reason": "length", "delta": {"content": "a"}}
                chunk = json.dumps({"choices": [choice]})
                status, body = "200 OK", f"data: {chunk}\n\ndata: [DONE]\n\n"
            elif self.tokenize:
                status, body = "200 OK", json.dumps({"count": len(asked["prompt"].split())})
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()


@asynccontextmanager
async def serving(*, tokenize: bool = True) -> AsyncIterator[Server]:
    found = Server(tokenize=tokenize)
    async with await asyncio.start_server(found.serve, "127.0.0.1", 0) as server:
        found.port = server.sockets[0].getsockname()[1]
        yield found


async def measure(server: Server, dataset: str, num_requests: int = 9, **options: Any) -> None:
    load = LoadConfig(
        url=f"http://127.0.0.1:{server.port}", endpoint=options.pop("endpoint", "auto")
    )
    bench = BenchConfig(num_requests=num_requests, repeat=1)
    workload = WorkloadConfig(dataset=dataset, **options)
    assert await bench_serve(EngineConfig(), bench, workload, load, ReportConfig()) == 0


@pytest.mark.parametrize("endpoint", ["auto", "completions"])
async def test_texts_are_sent_with_the_lengths_that_the_server_counts(
    tmp_path: Path, endpoint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as server:
        await measure(server, sharegpt(tmp_path / "a.json"), endpoint=endpoint)
    sent = {}
    for body in server.bodies:
        text = body["prompt"] if endpoint == "completions" else body["messages"][0]["content"]
        sent[text] = body["max_tokens"]
    assert sent == {f"question {index}": count for index, count in enumerate([1, 2, 3, 5])}
    assert "no /tokenize" not in capsys.readouterr().out


async def test_lengths_are_estimated_without_a_tokenizer_and_replaced_by_given_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = sharegpt(tmp_path / "a.json")
    async with serving(tokenize=False) as server:
        await measure(server, file)
        assert sorted(body["max_tokens"] for body in server.bodies) == [1, 1, 3, 5]
        assert "the server has no /tokenize" in capsys.readouterr().out
        server.bodies.clear()
        await measure(server, file, num_requests=2, output_len=6)
        assert [body["max_tokens"] for body in server.bodies] == [6, 6]
        assert "/tokenize" not in capsys.readouterr().out


async def test_a_turn_is_sent_with_the_answer_before_it(tmp_path: Path) -> None:
    async with serving() as server:
        await measure(server, mt_bench(tmp_path / "a.jsonl"), num_requests=3, output_len=2)
    said = [[one["content"] for one in body["messages"]] for body in server.bodies]
    assert sorted(map(len, said)) == [1, 1, 3]
    [longest] = [texts for texts in said if len(texts) == 3]
    assert longest[:1] in said and longest[1:] == ["a", "second"]


def test_our_own_server_counts_the_tokens_of_the_file(tmp_path: Path) -> None:
    file, dataset = tmp_path / "found.json", sharegpt(tmp_path / "a.json")
    options = ("--dataset", dataset, "--repeat", "1", "--json", file)
    result = minisgl("bench", "serve", "--device", "cpu", *options)
    assert (result.returncode, result.stderr) == (0, "")
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    expected = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in ANSWERS)
    [point] = json.loads(file.read_text())["points"]
    assert point["figures"]["num_requests"] == len(ANSWERS)
    assert point["figures"]["num_output_tokens"] == expected
    assert "no /tokenize" not in result.stdout
