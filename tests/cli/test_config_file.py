"""Options from a TOML file: what is written is read again, precedence, and errors in one line."""

from __future__ import annotations

import tomllib
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from minisgl.config import EngineConfig, option_names
from minisgl.errors import ConfigError
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig
from minisgl_cli import main as cli
from minisgl_cli.chat.config import ChatConfig
from minisgl_cli.config_file import as_toml, read_options

CONFIGS = (EngineConfig, ServerConfig, RouterConfig, RayConfig)
SPECS = [(config, spec) for config in CONFIGS for spec in fields(config)]
TEXTS = st.text(st.characters(exclude_categories=("Cs",)))  # TOML has no surrogates
# Options of every type, each other than its default.
GIVEN = (
    *("--tp", "2", "--memory-ratio", "0.5", "--host-cache", "3", "--num-pages", "99"),
    *("--dp-attention", "--lora", "a=/x", "--lora", "b=/y z", "--max-model-len", "512"),
    *("--served-model-name", 'it\'s "ö"\\\n', "--port", "0", "--roles", "prefill,decode"),
    *("--replicas", "2", "--ray", "--ray-max-replicas", "4"),
)


def printed(*arguments: str, **environment: str) -> str:
    """What `minisgl config` prints."""
    result = CliRunner().invoke(cli.app, ["config", *arguments], env=environment)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def parsed(*arguments: str, **environment: str) -> dict[str, Any]:
    return tomllib.loads(printed(*arguments, **environment))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "options.toml"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, logging_as_before: None) -> list[tuple[Any, ...]]:
    """The options with which `minisgl serve` would have served."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("minisgl.server.run", lambda *configs: seen.append(configs) or 0)
    return seen


def serve(*arguments: str, **environment: str) -> None:
    result = CliRunner().invoke(cli.app, ["serve", *arguments], env=environment)
    assert result.exit_code == 0, result.output


# -- what is written is read again ----------------------------------------------------------------


def values_of(config: Any, spec: Field[Any]) -> st.SearchStrategy[Any]:
    hint = get_type_hints(config)[spec.name]
    if get_origin(hint) is tuple:
        return st.lists(TEXTS)
    kinds = {int: st.integers(-(2**63), 2**63 - 1), float: st.floats(allow_nan=False)}
    kinds |= {bool: st.booleans(), str: TEXTS}
    return st.one_of(kinds[kind] for kind in get_args(hint) or (hint,) if kind in kinds)


@settings(max_examples=8)  # each has a value of every option
@given(st.data())
def test_any_value_of_every_option_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "every.toml"
    written = {spec.name: data.draw(values_of(config, spec)) for config, spec in SPECS}
    names = {spec.name: option_names(spec)[-1].removeprefix("--") for _, spec in SPECS}
    lines = [f"{names[name]} = {as_toml(value)}" for name, value in written.items()]
    path.write_text("\n".join(lines), "ascii")
    path.chmod(0o600)
    assert {spec.name: value for spec, value in read_options(str(path), CONFIGS)} == written


def test_config_prints_a_file_that_gives_the_same_options_again(path: Path) -> None:
    first = printed(*GIVEN)
    assert first.count("# command line") == sum(key[:2] == "--" for key in GIVEN) - 1  # two --lora
    path.write_text(first)
    again = printed("--config", str(path))
    assert again == first.replace("# command line", "# file")


def test_config_names_every_option_of_serve() -> None:
    plain = printed()
    assert tomllib.loads(plain) == {}
    for _, spec in SPECS:
        name = option_names(spec)[0].removeprefix("--")
        value = "(not set)" if spec.default is None else as_toml(spec.default)
        assert f"\n# {name} = {value}\n" in plain


def test_serve_takes_what_config_printed(path: Path, served: list[tuple[Any, ...]]) -> None:
    options = ("--tp", "2", "--lora", "a=/x", "--no-ui", "--drain-timeout", "3")
    path.write_text(printed("some/model", *options))
    serve("some/model", *options)
    serve("--config", str(path))
    assert served[0] == served[1]
    assert served[1][0].tp == 2 and served[1][0].lora == ("a=/x",)
    assert served[1][1].no_ui and served[1][1].drain_timeout == 3


def test_keys_may_be_in_a_file_and_are_never_printed(
    path: Path, served: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text("tp = 2")
    path.chmod(0o644)
    printed("--config", str(path))  # without keys, everybody may read it
    path.write_text('api-key = ["hush-1", "hush-2"]\nadmin_key = "hush-3"')
    path.chmod(0o600)
    everything = [
        printed("--config", str(path)),
        printed("--api-key", "hush-4", MINISGL_SERVE_ADMIN_KEY="hush-5"),
        printed(MINISGL_ADMIN_KEY="hush-6"),
    ]
    assert all("hush" not in text for text in everything)
    assert "# api-key is not shown  # file" in everything[0]
    assert "# admin-key is not shown  # file" in everything[0]
    assert "# api-key is not shown  # command line" in everything[1]
    assert all("# admin-key is not shown  # environment" in text for text in everything[1:])
    assert not caplog.records
    path.chmod(0o644)
    printed("--config", str(path))
    assert f"Everybody on this machine can read the keys in {path}" in caplog.text
    serve("--config", str(path))
    [(_, server)] = served
    assert (server.api_key, server.admin_key) == (("hush-1", "hush-2"), "hush-3")


# -- precedence -----------------------------------------------------------------------------------


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(path: Path) -> None:
    path.write_text(
        "page-size = 1\nnum_pages = 2\nmax-loras = 3\ndp-attention = true\nhost-cache = 3"
    )
    text = printed(
        *("--config", str(path), "--page-size", "16"),
        MINISGL_SERVE_PAGE_SIZE="4",
        MINISGL_SERVE_NUM_PAGES="5",
        MINISGL_SERVE_DP_ATTENTION="0",
    )
    assert "page-size = 16  # command line\n" in text
    assert "num-pages = 5  # environment\n" in text
    assert "dp-attention = false  # environment\n" in text
    assert "max-loras = 3  # file\n" in text and "host-cache = 3  # file\n" in text
    assert '# dtype = "auto"\n' in text


def test_a_default_on_the_command_line_comes_before_the_file(path: Path) -> None:
    path.write_text("tp = 2")
    assert parsed("--config", str(path), "--tp", "1") == {"tp": 1}


def test_a_list_is_replaced_as_a_whole(path: Path) -> None:
    path.write_text('lora = ["a=/x", "b=/y"]\nserved-model-name = "alone"')
    assert parsed("--config", str(path))["lora"] == ["a=/x", "b=/y"]
    assert parsed("--config", str(path), "--lora", "c=/z")["lora"] == ["c=/z"]
    assert parsed("--config", str(path), MINISGL_SERVE_LORA="d=/u e=/v")["lora"] == [
        *("d=/u", "e=/v")
    ]
    assert parsed("--config", str(path))["served-model-name"] == ["alone"]


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_of_a_file(path: Path, value: bool) -> None:
    path.write_text(f"batch-invariant = {as_toml(value)}")
    assert parsed("--config", str(path)) == {"batch-invariant": value}


def test_a_model_as_an_argument_comes_before_the_file_and_the_environment(path: Path) -> None:
    path.write_text('model = "of/file"')
    assert parsed("--config", str(path))["model"] == "of/file"
    text = printed("--config", str(path), "of/line", MINISGL_SERVE_MODEL="of/environment")
    assert 'model = "of/line"  # command line\n' in text
    with pytest.raises(ConfigError, match="--model c/d: without it the model is of/line"):
        printed("--config", str(path), "of/line", "--model", "c/d")


def test_the_environment_names_the_file_and_keys_before_it(
    path: Path, served: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text('admin-key = "of-file"\ntp = 2')
    path.chmod(0o600)
    monkeypatch.setenv("MINISGL_ADMIN_KEY", "of-environment")
    serve(MINISGL_SERVE_CONFIG=str(path))
    [(engine, server)] = served
    assert (engine.tp, server.admin_key) == (2, "")  # the server reads the variable
    serve("--config", str(path), "--admin-key", "of-line")
    assert served[1][1].admin_key == "of-line"


def test_every_option_of_serve_has_a_variable_of_its_first_name() -> None:
    for _, spec in SPECS:
        assert option_names(spec)[0] == f"--{spec.name.replace('_', '-')}"


def test_the_chat_takes_a_file_too(
    path: Path, monkeypatch: pytest.MonkeyPatch, logging_as_before: None
) -> None:
    path.write_text('thinking = "loud"')
    result = CliRunner().invoke(cli.app, ["chat", "--config", str(path)])
    assert str(result.exception) == "--thinking loud: allowed: fold or show"
    assert [value for _, value in read_options(str(path), [ChatConfig])] == ["loud"]


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("page_sise = 4", "there is no option page_sise; did you mean page-size?"),
        ("max-num-seqs = 4", "there is no option max-num-seqs; did you mean max-running-requests?"),
        ("seed = 1", "there is no option seed; a request has its own, among its sampling"),
        ("zzz = 1", "there is no option zzz; --help lists those there are"),
        ('config = "b.toml"', "there is no option config"),
        ('tp = "2"', "tp has a text; allowed: a whole number"),
        ("tp = 2.0", "tp has a number; allowed: a whole number"),
        ("tp = true", "tp has true or false; allowed: a whole number"),
        ("memory-ratio = []", "memory-ratio has a list; allowed: a number"),
        ("num-pages = 2026-01-01", "num-pages has a date or time; allowed: a whole number"),
        ("ray = 1", "ray has a whole number; allowed: true or false"),
        ("dtype = 16", "dtype has a whole number; allowed: a text"),
        ("lora = {a = '/x'}", "lora has a table; allowed: a text or a list of texts"),
        ("lora = [1]", "lora has a whole number; allowed: a text or a list of texts"),
        ("admin-key = 12345", "admin-key has a whole number; allowed: a text"),
        ("tp = 2\ntp-size = 2", "tp and tp-size are the same option; allowed: one of them"),
        ("page-size = 1\npage_size = 1", "page-size and page_size are the same option; allowed"),
        ("tp = 1\ntp = 1", "not TOML, Cannot overwrite a value"),
        ("tp: 2", "not TOML, Expected '=' after a key"),
        (b"model = '\xff'", "not UTF-8; allowed: a TOML file"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(path: Path, text: str | bytes, said: str) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as refused:
        printed("--config", str(path))
    assert str(refused.value).startswith(f"--config {path}: {said}")
    assert "\n" not in str(refused.value) and "12345" not in str(refused.value)


def test_a_value_out_of_range_is_refused_as_on_the_command_line(path: Path) -> None:
    path.write_text("tp = 0")
    with pytest.raises(ConfigError, match="--tp 0: allowed: 1 or more"):
        printed("--config", str(path))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "no", "No such file or")):
        with pytest.raises(ConfigError, match=f"--config {path}: {said}.*; allowed: a TOML file"):
            printed("--config", str(path))


def test_an_error_in_a_file_is_one_line_and_exit_code_2(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text("tps = 1")
    monkeypatch.setattr("sys.argv", ["minisgl", "serve", "--config", str(path)])
    assert cli.main() == 2
    said = f"minisgl: --config {path}: there is no option tps; did you mean tp?\n"
    assert capsys.readouterr().err == said
