"""`minisgl batch`: files of requests, answered in this process or by a server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.demo_adapters import greedy_tokens, save_demo_adapter
from support.forked_programs import minisgl
from support.serving import demo_engine, served

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl_cli import batch_file
from minisgl_cli.batch import BatchConfig, _answer_all
from minisgl_cli.batch_file import BatchRequest, Failure, OutputError, Response, answers_in
from minisgl_cli.batch_images import with_images
from minisgl_cli.batch_post import patient

PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


def request(custom_id: str, body: Any, url: str = CHAT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def batch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return minisgl("batch", folder / "in.jsonl", folder / "out.jsonl", *arguments)


def answer(custom_id: str, status: int | None) -> str:
    """A line of the output; status: None for an answer that there is not."""
    response = status and {"status_code": status, "request_id": "r", "body": {}}
    error = None if status else {"code": "request_failed", "message": "gone"}
    said = {"id": "batch_req_x", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(said)


def answers(folder: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    for line in lines:
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_")
    return found


def test_a_batch_is_answered_and_bad_lines_are_named(tmp_path: Path) -> None:
    lines = [
        *(request(f"hello-{number}", HELLO) for number in range(3)),
        request("text", {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}, COMPLETIONS),
        request("hot", {**HELLO, "temperature": 99}),
        "",
        "{broken",
        request("hello-0", HELLO),
        request("streamed", {**HELLO, "stream": True}),
        request("got", HELLO, method="GET"),
        request("elsewhere", HELLO, url="/v1/embeddings"),
        request("no body", []),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    result = minisgl("batch", "in.jsonl", "out.jsonl", "--device", "cpu", folder=tmp_path)
    assert result.returncode == 1
    found = answers(tmp_path)
    assert found.keys() == {"hello-0", "hello-1", "hello-2", "text", "hot"}
    for number in range(3):
        response = found[f"hello-{number}"]["response"]
        assert response["status_code"] == 200 and response["request_id"]
        [choice] = response["body"]["choices"]
        assert choice["message"]["content"] == "Hello! How can I help you?"
    assert found["text"]["response"]["body"]["usage"]["completion_tokens"] == 4
    hot = found["hot"]["response"]
    assert (hot["status_code"], hot["body"]["error"]["param"]) == (400, "temperature")
    assert all(line["error"] is None for line in found.values())
    said = [line for line in result.stderr.splitlines() if "in.jsonl: line " in line]
    assert [line.partition(": line ")[2].partition(":")[0] for line in said] == [
        *("7", "8", "9", "10", "11", "12"),
    ]
    assert "is that of line 1" in said[1] and "stream" in said[2]
    assert "5 requests, 1 failed, 6 bad lines; 5 asked" in result.stderr


def test_lines_name_the_adapters_that_answer_them(tmp_path: Path) -> None:
    adapted, prompt = save_demo_adapter(tmp_path / "adapter", seed=0), [*range(300, 320)]
    body = {"prompt": prompt, "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
    lines = [
        request(f"{model}", {**body, "temperature": 0, "model": model}, COMPLETIONS)
        for model in ("poems", None, "prose")
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    options = ("--lora", f"poems={tmp_path / 'adapter'}", "--device", "cpu", "--dtype", "float32")
    assert batch(tmp_path, *options).returncode == 1
    found = {name: line["response"] for name, line in answers(tmp_path).items()}
    kinds = set[tuple[int, ...]]()
    for name, model in (("poems", adapted), ("None", None)):
        [choice] = found[name]["body"]["choices"]
        assert choice["token_ids"] == greedy_tokens(model, prompt, 8)
        kinds.add((*choice["token_ids"],))
    assert len(kinds) == 2
    assert found["prose"]["status_code"] == 404
    assert found["prose"]["body"]["error"]["message"].endswith("; adapters: poems.")


def test_a_line_with_a_timeout_ends_alone(tmp_path: Path) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True, "timeout": 1e-6}
    lines = [request("late", body, COMPLETIONS), request("hello", {**HELLO, "timeout": 3600})]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    assert batch(tmp_path, "--device", "cpu").returncode == 1
    found = {name: line["response"] for name, line in answers(tmp_path).items()}
    assert (found["late"]["status_code"], found["hello"]["status_code"]) == (504, 200)
    assert found["late"]["body"]["error"]["code"] == "deadline_exceeded"


async def test_images_of_a_batch_may_be_paths_below_a_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "images", tmp_path / "secret.png"
    (folder / "of").mkdir(parents=True)
    (folder / "of/cat.png").write_bytes(PNG)
    (folder / "text.png").write_text("a text")
    outside.write_bytes(PNG)
    (folder / "link.png").symlink_to(outside)
    asked: list[bytes] = []

    async def post(request: BatchRequest) -> Response | Failure:
        asked.append(request.body)
        return Response(200, "id", msgspec.Raw(b"{}"))

    def body(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        content = [{"type": "text", "text": "image_url"}, part]
        return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()

    async def answer_to(data: bytes) -> Response | Failure:
        return await with_images(post, folder)(BatchRequest("a", CHAT, data))

    url = f"data:image/png;base64,{b64encode(PNG).decode()}"
    for given in ("of/cat.png", str(folder / "of/cat.png"), "of/../of/cat.png", url):
        await answer_to(body(given))
        assert json.loads(asked.pop()) == json.loads(body(url))
    for elsewhere in ("https://a/b.png", "HTTP://a"):  # the server says what it thinks of these
        await answer_to(body(elsewhere))
        assert json.loads(asked.pop()) == json.loads(body(elsewhere))
    for odd in (b'{"image_url": 5}', b'["image_url"]', b'{"messages": ["image_url", {}]}', b"{}"):
        await answer_to(odd)
        assert json.loads(asked.pop()) == json.loads(odd)
    for given, words in (
        ("../secret.png", "is not below the folder of --image-folder"),
        (str(outside), "is not below the folder"),
        ("link.png", "is not below the folder"),
        ("text.png", "is not an image; allowed: PNG"),
        ("none.png", "cannot be read: No such file"),
        ("file:///etc/passwd", "cannot be read"),
        ("\0", "is not the path of a file"),
    ):
        failed = await answer_to(body(given))
        assert isinstance(failed, Failure) and words in failed.message, failed
    assert asked == []
    with pytest.raises(ConfigError, match="--image-folder"):
        BatchConfig(image_folder=str(outside))


def test_a_second_run_asks_only_what_has_no_final_answer(tmp_path: Path) -> None:
    names = ("kept", "torn", "busy", "unreached", "new")
    (tmp_path / "in.jsonl").write_text("\n".join(request(name, HELLO) for name in names))

    earlier = [answer("kept", 200), answer("busy", 429), answer("unreached", None)]
    out = tmp_path / "out.jsonl"
    out.write_text("\n".join([*earlier, answer("torn", 200)[:-9]]))
    with served(demo_engine) as server:
        result = batch(tmp_path, "--url", server.url)
        assert result.returncode == 0, result.stderr
        found = answers(tmp_path)
        assert found.keys() == {*names}
        assert found["kept"]["response"]["request_id"] == "r"
        for name in names[1:]:
            [choice] = found[name]["response"]["body"]["choices"]
            assert choice["message"]["content"] == "Hello! How can I help you?"
        before = out.read_bytes()
        again = batch(tmp_path, "--url", server.url)
    assert again.returncode == 0 and out.read_bytes() == before
    assert "0 asked in" in again.stderr and "5 answered before" in again.stderr
    (tmp_path / "in.jsonl").write_text(request("refused", HELLO))
    out.write_text(answer("refused", 404) + "\n")
    again = batch(tmp_path, "--url", "http://127.0.0.1:1")
    assert again.returncode == 1
    assert "1 request, 1 failed, 0 bad lines; 0 asked" in again.stderr
    assert "1 of the failed were refused before and are not asked again" in again.stderr


def test_a_server_that_cannot_be_reached_is_an_error_in_each_line(
    tmp_path: Path, port: int
) -> None:
    (tmp_path / "in.jsonl").write_text(request("one", HELLO) + "\n" + request("two", HELLO))
    result = batch(tmp_path, "--url", f"http://127.0.0.1:{port}")
    assert result.returncode == 1
    for line in answers(tmp_path).values():
        assert line["response"] is None
        assert line["error"]["code"] == "request_failed"
        assert "cannot be reached" in line["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl", "out.jsonl"), "IN.jsonl missing.jsonl: cannot be read (No such file"),
        (("in.jsonl", "no/where.jsonl"), "OUT.jsonl no/where.jsonl: cannot be written (No such"),
        (("in.jsonl", "dangling"), "OUT.jsonl dangling: cannot be written (No such file"),
        (("in.jsonl", "circle"), "OUT.jsonl circle: cannot be written (Too many levels"),
        (("in.jsonl", "fifo"), "OUT.jsonl fifo: is not a regular file; allowed: one, or a link"),
        (("fifo", "out.jsonl"), "IN.jsonl fifo: is not a regular file; allowed: one, or a link"),
        (("utf-16", "out.jsonl"), "IN.jsonl utf-16: is UTF-16 or UTF-32; allowed: UTF-8"),
        (("utf-16-le", "out.jsonl"), "IN.jsonl utf-16-le: is UTF-16 or UTF-32; allowed: UTF-8"),
        (("utf-32-be", "out.jsonl"), "IN.jsonl utf-32-be: is UTF-16 or UTF-32; allowed: UTF-8"),
        (("in.jsonl", "in.jsonl"), "OUT.jsonl in.jsonl: allowed: another file"),
        (("in.jsonl", "/dev/null"), "OUT.jsonl /dev/null: is not a regular file"),
        (("other.jsonl", "in.jsonl"), "OUT.jsonl in.jsonl: line 1 is no answer; allowed: a new"),
        (("in.jsonl",), "minisgl batch takes IN.jsonl and OUT.jsonl; OUT.jsonl was not given"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    for name in ("in.jsonl", "other.jsonl"):
        (tmp_path / name).write_text(request("one", HELLO))
    for encoding in ("utf-16", "utf-16-le", "utf-32-be"):
        (tmp_path / encoding).write_text(request("one", HELLO), encoding)
    (tmp_path / "dangling").symlink_to(tmp_path / "no" / "where")
    (tmp_path / "circle").symlink_to("circle")
    os.mkfifo(tmp_path / "fifo")
    result = minisgl("batch", *arguments, folder=tmp_path)
    assert result.returncode == 2 and said in result.stderr
    assert (tmp_path / "in.jsonl").read_text() == request("one", HELLO)


@pytest.mark.parametrize(
    "content",
    [
        "Dear Ada,\nthis is a letter.\n",
        "one line that does not end",
        "[]",
        f"{answer('one', 200)}\n{request('two', HELLO)}\n",
        f"{answer('one', 200)}\n{answer('two', 200)[:-9]}\n{answer('three', 200)}\n",
    ],
)
def test_a_file_of_something_else_is_refused_and_stays(tmp_path: Path, content: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(content)
    with pytest.raises(ConfigError, match="is no answer"), answers_in(out):
        pass
    assert out.read_text() == content and [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("torn", ["", "{", '{"id": "bat', answer("torn", 200)[:-1], "\n  "])
def test_a_torn_last_line_is_taken_out(tmp_path: Path, torn: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(f"{answer('one', 200)}\n\n{answer('busy', 429)}\n{answer('two', 404)}\n{torn}")
    with answers_in(out, ["busy"]) as (add, statuses):
        assert statuses == {"one": 200, "two": 404}
        add(b"next\n")
    assert out.read_text() == f"{answer('one', 200)}\n{answer('two', 404)}\nnext\n"


def test_an_answer_to_what_is_not_asked_again_stays(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    content = f"{answer('busy', 429)}\n{answer('one', 200)}\n"
    out.write_text(content)
    with answers_in(out, ["one", "two"]) as (_, statuses):
        assert statuses == {"one": 200}
    assert out.read_text() == content


def test_a_whole_last_line_is_kept_and_ended(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("\ufeff" + answer("one", 200))
    with answers_in(out) as (add, statuses):
        assert statuses == {"one": 200}
        add(b"next\n")
    assert out.read_text() == f"\ufeff{answer('one', 200)}\nnext\n"


def test_a_file_that_is_written_anew_keeps_its_links_and_its_mode(tmp_path: Path) -> None:
    first, hard, soft = (tmp_path / name for name in ("first", "hard", "soft"))
    first.write_text(f"{answer('busy', 429)}\n{answer('one', 200)}\n")
    first.chmod(0o600)
    hard.hardlink_to(first)
    soft.symlink_to(first)
    with answers_in(soft, ["busy"]):
        pass
    assert soft.is_symlink() and hard.samefile(first) and first.stat().st_mode & 0o777 == 0o600
    assert first.read_text() == f"{answer('one', 200)}\n"
    assert {*tmp_path.iterdir()} == {first, hard, soft}


def test_a_second_run_into_one_file_is_refused_while_the_first_one_writes(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    refused = pytest.raises(ConfigError, match="another run writes to it")
    with answers_in(out), refused, answers_in(out):
        pass
    with answers_in(out):
        pass


def test_a_file_without_a_lock_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(*_: object) -> None:
        raise OSError("a file system without locks")

    monkeypatch.setattr(batch_file.fcntl, "flock", no_lock)
    with answers_in(tmp_path / "out.jsonl") as (_, statuses):
        assert statuses == {}


def test_answers_are_safe_while_a_file_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails is the last step, so that both files are as they are at any moment before."""

    def fail(path: str) -> None:
        raise OSError(path)

    out = tmp_path / "out.jsonl"
    out.write_text(f"{answer('busy', 429)}\n{answer('one', 200)}\n")
    monkeypatch.setattr(batch_file.os, "unlink", fail)
    with pytest.raises(OutputError), answers_in(out, ["busy"]):
        pass
    [copy] = set(tmp_path.iterdir()) - {out}
    assert copy.read_text() == f"{answer('one', 200)}\n"
    assert copy.stat().st_mode & 0o777 == 0o600


def test_requests_are_read_past_a_byte_order_mark_at_the_beginning(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    lines = (
        "\ufeff" + request("one", HELLO),
        request("two", HELLO),
        "\ufeff" + request("x", HELLO),
    )
    file.write_text("\n".join(lines))
    requests, bad = batch_file.read_requests(file)
    assert [each.custom_id for each in requests] == ["one", "two"]
    assert [line.number for line in bad] == [3]


def test_a_line_in_another_encoding_is_told_so_in_words(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    said = {"model": "m", "messages": [{"role": "user", "content": "привет"}]}
    line = json.dumps(json.loads(request("one", said)), ensure_ascii=False)
    file.write_bytes(line.encode("koi8-r"))
    requests, [bad] = batch_file.read_requests(file)
    assert not requests and bad.reason == "is not in UTF-8; save the file in UTF-8"


def test_a_link_to_a_file_that_is_not_there_yet_makes_it(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("out.jsonl")
    with answers_in(tmp_path / "link") as (add, statuses):
        add(b"next\n")
    assert statuses == {} and (tmp_path / "out.jsonl").read_text() == "next\n"


@pytest.fixture
def full_at_four_bytes() -> Iterator[None]:
    """Files take only four bytes from this process, as on a disk that is full then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("full_at_four_bytes")
def test_an_answer_that_does_not_fit_names_the_file(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    named = re.escape(f"OUT.jsonl {out}: cannot be written (File too large)")
    with pytest.raises(OutputError, match=named), answers_in(out) as (add, _):
        add(b"answer\n")
    assert out.read_bytes() == b"answ"


def test_a_file_stays_where_its_copy_does_not_fit(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    out = tmp_path / "out.jsonl"
    content = f"{answer('busy', 429)}\n{answer('one', 200)}\n"
    out.write_text(content)
    request.getfixturevalue("full_at_four_bytes")
    with pytest.raises(OutputError, match="File too large"), answers_in(out, ["busy"]):
        pass
    assert out.read_text() == content and [*tmp_path.iterdir()] == [out]


async def test_a_batch_waits_for_itself_where_it_fills_the_queue() -> None:
    asked: list[str] = []
    running: set[str] = set()
    most = 0

    async def post(request: BatchRequest) -> Response | Failure:
        nonlocal most
        asked.append(request.custom_id)
        if len(running) == 3 or request.custom_id == "too large":
            return Response(429, "id", msgspec.Raw(b"{}"))
        running.add(request.custom_id)
        most = max(most, len(running))
        await asyncio.sleep(0)
        running.remove(request.custom_id)
        return Response(200, "id", msgspec.Raw(b"{}"))

    ask, names = patient(post), [*map(str, range(20)), "too large"]
    found = await asyncio.gather(*(ask(BatchRequest(name, CHAT, b"{}")) for name in names))
    statuses = [each.status_code for each in found if isinstance(each, Response)]
    assert statuses == [200] * 20 + [429] and most == 3
    # One for each answer asks again, not all of them.
    assert len(asked) <= 3 * len(names)


async def test_an_answer_that_cannot_be_added_ends_the_batch() -> None:
    def fail(line: bytes) -> None:
        raise OutputError(Path("out.jsonl"), OSError(28, "No space left on device"))

    asked = [BatchRequest(name, CHAT, b"{}") for name in ("one", "two", "three")]
    ask = BatchConfig(url="http://127.0.0.1:1")
    with pytest.raises(OutputError, match=r"out\.jsonl.*No space left"):
        await _answer_all(ask, EngineConfig(), asked, fail)
