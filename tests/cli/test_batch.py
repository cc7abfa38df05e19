"""`minisgl batch`: files of requests, answered in this process or by a server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.serving import demo_engine, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello!"}], "temperature": 0}


def request(custom_id: str, body: Any, url: str = CHAT, method: str = "POST") -> str:
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body})


def batch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = (str(folder / "in.jsonl"), str(folder / "out.jsonl"))
    return subprocess.run(
        [sys.executable, "-m", "minisgl", "batch", *files, *arguments],
        capture_output=True,
        text=True,
    )


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
    result = batch(tmp_path, "--device", "cpu")
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


def test_a_second_run_asks_only_what_has_no_final_answer(tmp_path: Path) -> None:
    names = ("kept", "torn", "busy", "unreached", "new")
    (tmp_path / "in.jsonl").write_text("\n".join(request(name, HELLO) for name in names))

    def line(name: str, status: int | None) -> str:
        response = status and {"status_code": status, "request_id": "r", "body": {}}
        error = None if status else {"code": "request_failed", "message": "gone"}
        said = {"id": "batch_req_x", "custom_id": name, "response": response, "error": error}
        return json.dumps(said)

    earlier = [line("kept", 200), line("busy", 429), line("unreached", None)]
    out = tmp_path / "out.jsonl"
    out.write_text("\n".join([*earlier, line("torn", 200)[:-9]]))
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
    out.write_text(line("refused", 404) + "\n")
    again = batch(tmp_path, "--url", "http://127.0.0.1:1")
    assert again.returncode == 1
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
        (("missing.jsonl", "out.jsonl"), "IN.jsonl missing.jsonl: allowed: a file that exists"),
        (("in.jsonl", "no/where.jsonl"), "OUT.jsonl no/where.jsonl: allowed: a file in a folder"),
        (("in.jsonl", "in.jsonl"), "OUT.jsonl in.jsonl: allowed: another file"),
        (("in.jsonl",), "minisgl batch takes IN.jsonl and OUT.jsonl; OUT.jsonl was not given"),
    ],
)
def test_files_that_cannot_be_used_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "in.jsonl").write_text(request("one", HELLO))
    result = subprocess.run(
        [sys.executable, "-m", "minisgl", "batch", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and said in result.stderr
