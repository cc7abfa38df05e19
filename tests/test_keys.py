"""Sources of the server's API keys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from minisgl.bench.online.load_config import LoadConfig
from minisgl.errors import ConfigError
from minisgl.keys import MAX_FILE_BYTES, VARIABLE, named_key
from minisgl.server import with_all_keys
from minisgl.server.config import ServerConfig
from minisgl_cli.chat.config import ChatConfig


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file for nobody else, and no key in the environment."""
    monkeypatch.delenv(VARIABLE, raising=False)
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


def test_without_key_options_there_are_no_keys(file: Path) -> None:
    assert with_all_keys(ServerConfig()) == ServerConfig()


def test_keys_of_all_sources_are_merged_without_duplicates(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(VARIABLE, " b,c\n\td, ,a ")
    file.write_bytes(b"\xef\xbb\xbf# ours\r\ne\r\n\n   # theirs\n  f#,g  # of Ada\nb\n")
    config = with_all_keys(ServerConfig(api_key=("a", "a"), api_key_file=str(file)))
    assert config.api_key == ("a", "b", "c", "d", "e", "f#,g")
    assert not caplog.records
    assert "f#,g" not in repr(config)


@pytest.mark.parametrize("value", ["", " ", ",\n,"])
def test_an_empty_key_variable_does_not_disable_authentication(
    file: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=r"MINISGL_API_KEY \(without a key\): allowed: one or"):
        with_all_keys(ServerConfig())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"\(without a key\): allowed: one or more keys"),
        (b"# a comment\n", r"\(without a key\): allowed: one or more keys"),
        (b"fine\nsecret and more\n", "line 2 is more than one word; allowed: a key a line"),
        ("fine\nsecrèt\n".encode(), r"\(not shown\): allowed: 1 to 8192 characters of ASCII"),
        ("secrèt\n".encode("latin-1"), "not UTF-8; allowed: a text of up to 1024 KiB"),
        (b"secret\n" * (MAX_FILE_BYTES // 7 + 1), "too large; allowed: a text of up to 1024 KiB"),
    ],
)
def test_an_invalid_key_file_is_refused_without_showing_its_content(
    file: Path, content: bytes, message: str
) -> None:
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        with_all_keys(ServerConfig(api_key_file=str(file)))
    assert str(caught.value).startswith("--api-key-file ")
    assert "secr" not in str(caught.value)


def test_a_missing_key_file_is_refused(file: Path) -> None:
    missing = f"{file}.txt"
    with pytest.raises(ConfigError, match=rf"--api-key-file {missing}: No such file"):
        with_all_keys(ServerConfig(api_key_file=missing))
    with pytest.raises(ConfigError, match="Is a directory"):
        with_all_keys(ServerConfig(api_key_file=str(file.parent)))


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_world_readable_key_file_gives_a_warning(
    file: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text("secret\n")
    file.chmod(mode)
    assert with_all_keys(ServerConfig(api_key_file=str(file))).api_key == ("secret",)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == warned
    assert "secret" not in caplog.text


def test_no_configuration_shows_its_key() -> None:
    shown = [
        repr(ServerConfig(api_key=("secret",))),
        repr(ChatConfig(api_key="secret")),
        repr(LoadConfig(url="http://x", api_key="secret")),
    ]
    assert not any("secret" in text for text in shown)


def test_keys_may_have_names_of_which_the_client_sends_nothing(file: Path) -> None:
    file.write_text("ada: one  # of Ada\nbob: two\nthree\nfour:\nfive: # no name\n")
    given = ServerConfig(api_key=("one", "eve: six"), api_key_file=str(file))
    keys = ("ada: one", "eve: six", "bob: two", "three", "four:", "five:")
    assert with_all_keys(given).api_key == keys
    assert [named_key(key) for key in keys[1:4]] == [("eve", "six"), ("bob", "two"), ("", "three")]
    assert LoadConfig(url="http://x", api_key_file=str(file)).find_key() == "one"


@pytest.mark.parametrize("name", ["", "a b", "1", "ä", "a/b", "a" * 65, "secret:"])
def test_a_name_that_a_log_could_not_show_is_refused(file: Path, name: str) -> None:
    message = r"\(not shown\): allowed for a name: up to 64 letters"
    with pytest.raises(ConfigError, match=message):
        ServerConfig(api_key=(f"{name}: secret",))
    if name and " " not in name:
        file.write_text(f"{name}: secret\n")
        with pytest.raises(ConfigError, match=message):
            with_all_keys(ServerConfig(api_key_file=str(file)))
