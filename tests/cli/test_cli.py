"""The command line: options from dataclasses, errors in one line, nothing heavy for --help."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import typer
from support import forked_programs
from typer.testing import CliRunner

from minisgl import __version__
from minisgl.config import EngineConfig, option, option_names
from minisgl.errors import ConfigError, DeviceMemoryError, DownloadError, ModelNotFoundError
from minisgl_cli import main as cli
from minisgl_cli.logs import set_up_logging
from minisgl_cli.options import takes_options
from minisgl_cli.version import version

# -- options from dataclasses ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    cups: int = option(2, "How many cups.", names=("--cups", "--mugs"), group="Dishes")
    litres: float | None = option(None, "How much water; enough if not given.")
    tea: str = option("green", "Which tea.")
    decaf: bool = option(False, "Without caffeine.")
    spices: tuple[str, ...] = option((), "Repeat for several.")

    def __post_init__(self) -> None:
        if self.cups < 1:
            raise ConfigError("--cups", self.cups, "allowed: 1 or more")


@dataclass(frozen=True, kw_only=True)
class Room:
    guest_name: str = option("nobody", "Who comes.")


def brewed(*arguments: str) -> tuple[Kitchen, Room]:
    """The configs that a command which takes both receives for these arguments."""
    served: list[tuple[Kitchen, Room]] = []

    def brew(kitchen: Kitchen, room: Room) -> int:
        served.append((kitchen, room))
        return 0

    # The annotations are strings in this file, and Python looks them up among its globals.
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(takes_options(brew))
    app(list(arguments), standalone_mode=False)
    return served[0]


def test_options_not_given_have_the_defaults_of_the_dataclass() -> None:
    assert brewed() == (Kitchen(), Room())


def test_every_kind_of_option_reaches_its_dataclass() -> None:
    kitchen, room = brewed(
        *("--mugs", "3", "--litres", "1.5", "--tea", "black", "--decaf"),
        *("--spices", "mint", "--spices", "clove", "--guest-name", "Ada"),
    )
    expected = Kitchen(cups=3, litres=1.5, tea="black", decaf=True, spices=("mint", "clove"))
    assert (kitchen, room) == (expected, Room(guest_name="Ada"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cups", "0"), "--cups 0: allowed: 1 or more"),
        (("--cups", "many"), "--cups many: allowed: a whole number"),
        (("--mugs", "1.5"), "--cups 1.5: allowed: a whole number"),
        (("--litres", "a lot"), "--litres a lot: allowed: a number"),
    ],
)
def test_an_invalid_value_is_refused_with_option_value_and_allowed_values(
    arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        brewed(*arguments)
    assert str(refused.value) == message


@pytest.mark.parametrize(
    "command",
    [
        *("serve", "chat", "batch", "bench", "bench offline", "bench latency", "bench serve"),
        *("verify", "config"),
    ],
)
def test_every_engine_option_is_offered_with_its_help_and_group(command: str) -> None:
    arguments = [*command.split(), "--help"]
    help_text = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "250"}).output
    for spec in fields(EngineConfig):
        assert all(name in help_text for name in option_names(spec))
        assert spec.metadata["help"] in help_text
        assert f"─ {spec.metadata['group']} ─" in help_text
    assert r"\b" not in help_text, "the mark of a block is a control character"


# -- errors in one line ---------------------------------------------------------------------------


def environment_of(**given: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "LOG_LEVEL"}
    return {**inherited, "COLUMNS": "200", **given}


def minisgl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return forked_programs.minisgl(*arguments, environment=environment_of(**environment))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--dtype", "int3"), "--dtype int3: allowed: auto, bfloat16"),
        (("serve", "--port", "x"), "--port x: allowed: a whole number"),
        (("chat", "--page-sise", "4"), "--page-size"),
        *(
            (
                (command, *said),
                "No such option: --revision; download it with `hf download ID --revision REVISION "
                "--local-dir FOLDER`, and give that folder as the model (see minisgl",
            )
            for command, said in (("serve", ["--revision", "v1"]), ("chat", ["--revision=v1"]))
        ),
        (("serve", "--trust-remote-code"), "No such option: --trust-remote-code; leave it out"),
        (("srve",), "There is no command srve. Did you mean serve? Allowed: serve, chat, batch, "),
        (("run", "Qwen/Qwen3-0.6B"), "There is no command run. Did you mean chat? Allowed: serve"),
        (("benchmark",), "There is no command benchmark. Did you mean bench? Allowed: serve, "),
        (("chat", "How", "now?"), "now?"),
        (("chat", " "), "QUESTION ' ': allowed: a text"),
        (("serve", "a/b", "--model", "c/d"), "--model c/d: without it the model is a/b; allowed"),
        (("serve", "./nowhere"), "There is no folder ./nowhere."),
        (("serve", "--max-model-len", "0"), "--max-seq-len-override 0: allowed: 1 or more"),
        (("serve", "--gpu-memory-utilization", "2"), "--memory-ratio 2.0: allowed: above 0"),
        (
            ("bench", "latncy"),
            "There is no command bench latncy. Did you mean bench latency? Allowed: bench, bench l",
        ),
        (("bench", "--num-requests", "1", "latency"), "latency"),
        (("bench", "latency", "--num-requests", "1"), "--num-requests"),
        (("bench", "latency", "--batch-size", "1,two"), "--batch-size 1,two: allowed: whole"),
        (
            ("bench", "compare", "a.json"),
            "minisgl bench compare takes A.json and B.json; B.json was not given (see",
        ),
        (
            ("bench", "--workload", "multi-turn"),
            "each question waits for the answer before it; use `minisgl bench serve`",
        ),
        (
            ("bench", "lat"),
            "no command bench lat. Did you mean bench latency? Allowed: bench, bench la",
        ),
        (("serve", "--open", "--no-ui"), "--open: cannot be combined with --no-ui"),
        (
            ("chat", "--url", "http://x", "--disable-pynccl"),
            "--disable-pynccl: is for an engine of its",
        ),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    result = minisgl(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if " INFO " not in line]  # the log
    assert line.startswith("minisgl: ") and said in line


@pytest.mark.parametrize("package", ["typer", "tokenizers", "uvicorn"])
def test_a_missing_package_is_an_error_that_says_how_to_install_it(package: str) -> None:
    """Some are needed at once, some by what a command does."""
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "sys.argv = ['minisgl', 'serve', '--device', 'cpu', '--port', '0']\n"
        "from minisgl_cli.start import main\n"
        "sys.exit(main())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    [said] = [line for line in result.stderr.splitlines() if line.startswith("minisgl: ")]
    assert said.startswith(f"minisgl: The package {package} is missing, so")
    assert said.partition(": ")[2].partition(": ")[2].startswith(sys.executable)
    assert "Traceback" not in result.stderr


def test_an_invalid_log_level_is_a_usage_error_too() -> None:
    result = minisgl("serve", LOG_LEVEL="loud")
    assert result.returncode == 2
    assert result.stderr == ("minisgl: LOG_LEVEL LOUD: allowed: DEBUG, INFO, WARNING or ERROR\n")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[BaseException]]:
    """The exception in the list is raised by any command."""
    raised: list[BaseException] = []

    def app(*_: object, **__: object) -> int:
        raise raised[0]

    monkeypatch.setattr(cli, "app", app)
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    yield raised


@pytest.mark.parametrize(
    ("error", "exit_code", "said"),
    [
        (DownloadError("The Hub is down."), 1, "The Hub is down."),
        (ModelNotFoundError("No such model."), 2, "No such model."),
        (DeviceMemoryError("Too little memory:\n  4 GiB."), 1, "Too little memory: 4 GiB."),
        (ConfigError("--tp", 0, "allowed: 1 or more"), 2, "--tp 0: allowed: 1 or more"),
        (ZeroDivisionError("oh"), 1, "ZeroDivisionError: oh (LOG_LEVEL=DEBUG shows where)"),
    ],
)
def test_errors_have_an_exit_code_and_no_stack_trace(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    said: str,
) -> None:
    failing.append(error)
    assert cli.main() == exit_code
    assert capsys.readouterr().err == f"minisgl: {said}\n"


def test_debug_shows_the_stack_trace(
    failing: list[BaseException],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    failing.append(ZeroDivisionError("oh"))
    assert cli.main() == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt())
    assert cli.main() == 130


# -- help, version, log ---------------------------------------------------------------------------


def test_without_arguments_the_help_is_shown() -> None:
    command = [sys.executable, "-m", "minisgl"]
    result = subprocess.run(command, env=environment_of(), capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout == minisgl().stdout
    assert all(command in result.stdout for command in ("serve", "chat", "bench", "models"))


def test_subcommands_are_listed_after_their_command() -> None:
    lines = minisgl("--help").stdout.splitlines()
    listed = [line.strip("│").split("  ")[0].strip() for line in lines if line.startswith("│ ")]
    verbs = ["bench latency", "bench serve", "bench compare"]
    assert listed[-11:] == [
        "serve",
        "chat",
        "batch",
        "bench",
        *verbs,
        "verify",
        "config",
        "version",
        "models",
    ]


def test_bench_without_a_subcommand_is_bench_offline() -> None:
    bench, offline = (
        [line for line in minisgl(*verb, "--help").stdout.splitlines() if "Usage" not in line]
        for verb in (("bench",), ("bench", "offline"))
    )
    assert bench == offline
    assert any("--num-requests" in line for line in bench)
    assert not any("--batch-size" in line for line in bench)


@pytest.mark.parametrize(
    "command",
    [
        *(("serve",), ("chat",), ("batch",), ("verify",), ("config",)),
        *(("bench",), ("bench", "latency"), ("bench", "serve")),
    ],
)
def test_help_imports_no_heavy_package(command: tuple[str, ...]) -> None:
    program = (
        f"import sys; sys.argv = ['minisgl', *{command}, '--help']\n"
        "from minisgl_cli.main import main\n"
        "assert main() == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'starlette', 'uvicorn', 'prompt_toolkit'}\n"
        "assert not heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_bench_compare_imports_no_heavy_package() -> None:
    program = (
        "import sys\n"
        "import minisgl.bench.report.compare\n"
        "assert not {'torch', 'transformers', 'starlette'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_common_first_commands_work() -> None:
    assert minisgl("help").stdout == minisgl("--help").stdout == minisgl().stdout
    assert minisgl("--version").stdout.startswith("python ")


def test_a_usage_error_refers_to_the_help_of_its_command() -> None:
    result = minisgl("bench", "latency", "now")
    assert result.returncode == 2
    assert result.stderr.endswith("(see minisgl bench latency --help)\n")


def test_help_shows_square_brackets() -> None:
    assert "[plot]" in "".join(minisgl("bench", "--help").stdout.split())


def test_version_prints_what_a_bug_report_needs() -> None:
    result = minisgl("version")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert f"minisgl {__version__}" in lines  # which runs, whatever is installed
    for named in ("python ", "torch ", "cpu ", "gpu ", "attention prefill "):
        assert any(line.startswith(named) for line in lines), named
    for named in ("fp8 weights ", "int8 weights ", "int4 and nvfp4 weights ", "fp8 kv cache "):
        assert any(line.startswith(named) for line in lines), named


def test_version_says_whose_code_runs_a_model(tmp_path: Path) -> None:
    last = minisgl("version", "--model", "").stdout.splitlines()[-1]
    assert last == "model: Qwen3ForCausalLM with minisgl's own code for this architecture"
    result = minisgl("version", "--model", str(tmp_path))
    assert result.returncode == 2 and "holds no model" in result.stderr


def test_version_works_where_the_gpu_driver_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bool:
        raise RuntimeError("no such device")

    monkeypatch.setattr("torch.cuda.is_available", broken)
    assert version() == 0
    assert capsys.readouterr().out.endswith("hardware unknown, RuntimeError: no such device\n")


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("", "chat"),
        ("chat --ur", "--url"),
        ("bench latency --b", "--batch-size"),
        ("serve --dtype bf", "bfloat16"),
        ("chat --thinking ", "show"),
        ("bench serve --workload multi", "multi-turn"),
    ],
)
def test_shell_completion_offers_commands_and_options(typed: str, completed: str) -> None:
    line = f"minisgl {typed}"
    shell = {"_MINISGL_COMPLETE": "complete_bash", "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert completed in minisgl(**shell, COMP_WORDS=line).stdout.split()


@pytest.mark.parametrize(
    ("command", "first", "last", "example"),
    [
        (("serve",), "--model", "--ray", "minisgl serve Qwen/Qwen3-0.6B --port 8000"),
        (("chat",), "--url", "--disable-pynccl", 'minisgl chat --model Qwen/Qwen3-0.6B "What'),
        (("bench",), "--model", "--disable-pynccl", "minisgl bench --model"),
        (("bench", "serve"), "--model", "--disable-pynccl", "minisgl bench serve --url"),
    ],
)
def test_help_begins_with_examples_and_everyday_options(
    command: tuple[str, ...], first: str, last: str, example: str
) -> None:
    help_text = minisgl(*command, "--help").stdout
    groups = re.findall(r"─ (\w+) ─", help_text)
    assert groups[-1] in ("Parallelism", "Ray")
    assert groups.index("Model") < groups.index("Memory") < groups.index("Parallelism")
    where = [help_text.index(text) for text in (example, f"│ {first}", f"│ {last}")]
    assert where == sorted(where)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(("level", "shown"), [(None, False), ("DEBUG", True), ("error", False)])
def test_the_log_follows_the_log_level(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    level: str | None,
    shown: bool,
) -> None:
    if level is None:
        monkeypatch.delenv("LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("LOG_LEVEL", level)
    set_up_logging(default="WARNING")
    logging.getLogger("minisgl.engine").info("a word")
    assert ("INFO a word" in capsys.readouterr().err) is shown


def test_serve_says_that_it_starts_before_it_loads_libraries() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "sys.argv = ['minisgl', 'serve']\n"
        "from minisgl_cli.main import main\n"
        "try: main()\n"
        "except ModuleNotFoundError: pass\n"
        "else: assert False"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0
    assert result.stderr.endswith("INFO minisgl is loading its libraries\n")


@pytest.mark.usefixtures("logging_as_before")
def test_replicas_and_routing_processes_log_as_the_options_of_serve_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: dict[str, tuple[str, ...]] = {}

    class Process:
        def __init__(self, *_: object, **given: tuple[str, ...]) -> None:
            commands.update(given)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("minisgl.router.process.RouterProcess", Process)
    monkeypatch.setattr("minisgl.router.replica.run_replica", lambda: 0)
    monkeypatch.setattr("minisgl.router.front.run_front", lambda: 0)
    for options in (["--log-level", "ERROR", "--log-format", "json"], ["--log-level", "DEBUG"]):
        asked = CliRunner().invoke(cli.app, ["serve", "--replicas", "2", *options])
        assert asked.exit_code == 0, asked.output
        for kind, name in (("replica", "replica 3"), ("front", "router 3")):
            program, arguments = commands[kind][:3], commands[kind][3:]
            assert program == (sys.executable, "-m", "minisgl")
            started = CliRunner().invoke(cli.app, [*arguments, "3"])
            assert started.exit_code == 0, started.output
            logger = logging.getLogger("minisgl")
            assert logging.getLevelName(logger.level) == options[1]
            record = logging.makeLogRecord({"msg": "a word", "levelname": "ERROR"})
            line = logger.handlers[0].format(record)
            assert name in line and line.startswith("{") == ("json" in options)


@pytest.mark.usefixtures("logging_as_before")
@pytest.mark.parametrize(("images", "image_rows"), [("refuse", 0), ("placeholder", 8192)])
def test_a_server_that_refuses_images_loads_no_tower(
    images: str, image_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[EngineConfig] = []
    monkeypatch.setattr("minisgl.server.run", lambda engine, server: served.append(engine) or 0)
    result = CliRunner().invoke(cli.app, ["serve", "--images", images])
    assert result.exit_code == 0, result.output
    assert [engine.image_rows for engine in served] == [image_rows]
