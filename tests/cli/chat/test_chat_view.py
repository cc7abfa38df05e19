"""The display of an answer while it streams: thinking, Markdown, redrawn lines."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from support.screens import Screen

from minisgl.printable import printable
from minisgl.text.parsing.emitter import MAX_HELD_CHARS
from minisgl.text.thinking import ThinkingSplitter
from minisgl_cli.chat.repl import on_interrupt
from minisgl_cli.chat.ui import view
from minisgl_cli.chat.ui.live import LiveLines, ScreenLine
from minisgl_cli.chat.ui.markdown import (
    MAX_SIZE,
    PARSER,
    UNDECIDED,
    Block,
    Blocks,
    completed,
    highlighted,
    size,
)
from minisgl_cli.chat.ui.pipe import Pipe
from minisgl_cli.chat.ui.view import MarkdownView, PlainView

ANSWER = """# A *title*

Some **bold text** and `code`, with <b>HTML</b> that is text, a [link](http://example.org/) too.
A list:
- one
- two
  - inner

1. first
1. second

   more of it
3. third

| col | 値段 |
|---|---:|
| りんご | 120 |
| x | 5 |

```python
def f(x: int) -> str:
    return "a very long line of code, longer than any terminal here is wide"
```
> a quote
> of two

日本語のとても長い行がここにあります。日本語のとても長い行がここにあります。

The sum $a_1 + a_2$ is:
\\[
\\begin{aligned}
a_1 &= b \\\\
- a_2 &= *c*
\\end{aligned}
\\]

The end.
"""


def pieces(text: str, cuts: Sequence[int]) -> Iterator[str]:
    places = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    return (text[start:end] for start, end in itertools.pairwise(places))


CUTS = st.lists(st.integers(0, 10_000), max_size=200)

# -- thinking -------------------------------------------------------------------------------------


def split(text: str, cuts: Sequence[int] = ()) -> tuple[str, str]:
    splitter = ThinkingSplitter()
    parts = [*(splitter.feed(piece) for piece in pieces(text, cuts)), splitter.flush()]
    return "".join(part.thinking for part in parts), "".join(part.text for part in parts)


@pytest.mark.parametrize(
    ("text", "thinking", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("\n<think>Hm</think>Yes.\n", "Hm", "Yes.\n"),
        ("<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("Yes, <think>no</think>", "", "Yes, <think>no</think>"),
        ("<thin", "", "<thin"),
        ("<think>a < b </thin", "a < b </thin", ""),
        ("  indented", "", "  indented"),
        ("<think>Hm</think>Yes </think> no", "Hm", "Yes </think> no"),
    ],
)
@given(cuts=CUTS)
@settings(max_examples=20)
def test_thinking_is_separated_from_the_answer(
    text: str, thinking: str, answer: str, cuts: list[int]
) -> None:
    told = split(text, cuts)
    assert (told[0].rstrip(), told[1]) == (thinking, answer)


# -- blocks ---------------------------------------------------------------------------------------


def blocks_of(text: str, cuts: Sequence[int] = ()) -> list[Block]:
    blocks = Blocks()
    finished = [block for piece in pieces(text, cuts) for block in blocks.feed(piece)]
    return finished + blocks.last()


@given(CUTS)
def test_blocks_are_the_same_however_the_text_is_split(cuts: list[int]) -> None:
    assert blocks_of(ANSWER, cuts) == blocks_of(ANSWER)


def test_each_markdown_block_can_be_drawn_separately() -> None:
    blocks = blocks_of(ANSWER)
    assert [block.source.split()[0] for block in blocks] == [
        *(
            "#",
            "Some",
            "-",
            "-",
            "1.",
            "1.",
            "3.",
            "|",
            "```python",
            ">",
            "日本語のとても長い行がここにあります。日本語のとても長い行がここにあります。",
        ),
        *("The", "\\[", "The"),
    ]
    assert [block.number for block in blocks if block.number is not None] == [1, 2, 3]
    assert [block.is_table for block in blocks].index(True) == 7
    assert [block.is_code for block in blocks].index(True) == 8


def test_a_list_may_begin_at_any_number() -> None:
    assert [block.number for block in blocks_of("0. a\n0. b\n\ntext\n\n7) c\n9) d")] == [
        *(0, 1, None, 7, 8),
    ]


def test_a_block_is_complete_as_soon_as_another_one_begins() -> None:
    blocks = Blocks()
    assert blocks.feed("One.\n\n") == []
    assert blocks.feed("-") == []  # a list, a rule, or a mere dash
    assert [block.source for block in blocks.feed(" T")] == ["One.\n"]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("a **b", "a **b**"),
        ("a **b ", "a **b**"),
        ("a **b*", "a **b*"),
        ("a **b** `c", "a **b** `c`"),
        ("a\n-", "a"),
        ("a\n``", "a"),
        ("- a\n  ```\n  x", "- a\n  ```\n  x"),
    ],
)
def test_an_incomplete_block_looks_as_it_will_when_complete(source: str, shown: str) -> None:
    assert completed(source) == shown


# -- on the screen --------------------------------------------------------------------------------


class Output:
    """A file that is a terminal."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.num_written = 0

    def write(self, text: str) -> None:
        self.num_written += len(text)
        self.screen.write(text)

    def flush(self) -> None:
        pass


def console(width: int, height: int) -> tuple[Console, Output]:
    output = Output(Screen(width, height))
    options = {"force_terminal": True, "color_system": "truecolor", "legacy_windows": False}
    file: object = output
    made = Console(file=file, width=width, height=height, **options)  # type: ignore[arg-type, call-overload]
    return made, output


async def play(terminal: Console, pieces: Iterable[str]) -> None:
    answer = MarkdownView(terminal, show_thinking=True)
    for piece in pieces:
        answer.write(piece)
    answer.close()


def shown(
    text: str, cuts: Sequence[int], *, width: int, height: int, thinking: str = ""
) -> list[str]:
    terminal, output = console(width, height)

    async def play() -> None:
        answer = MarkdownView(terminal, show_thinking=True)
        for piece in pieces(thinking, cuts) if thinking else ():
            answer.think(piece)
        for piece in pieces(text, cuts):
            answer.write(piece)
        answer.close()

    asyncio.run(play())
    return output.screen.lines


@pytest.fixture
def every_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "FRAME_S", 0)
    monkeypatch.setattr(view, "DRAWING_FRACTION", 1e9)


@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize(("width", "height"), [(70, 50), (33, 7), (20, 5)])
def test_the_scrollback_has_the_answer_once_however_it_was_split(width: int, height: int) -> None:
    """Even where a block is higher than the screen."""
    thinking = "First a thought that takes more than a line.\nThen one more.\n"
    whole = shown(ANSWER, (), width=width, height=height, thinking=thinking)
    assert whole[-1] == "The end."
    assert all(cell_len(line) <= width for line in whole)
    for step in (1, 7):
        cuts = range(0, len(ANSWER), step)
        assert shown(ANSWER, cuts, width=width, height=height, thinking=thinking) == whole


def test_an_answer_is_markdown_without_frames() -> None:
    lines = shown(ANSWER, (), width=60, height=100)
    assert lines[0] == "# A title"
    assert " • one" in lines and "    • inner" in lines and " 2 second" in lines
    assert "def f(x: int) -> str:" in lines
    assert any(
        "<b>HTML</b>" in line and "(http://example.org/)" in " ".join(lines) for line in lines
    )


@pytest.mark.parametrize(
    "formula",
    [
        r"\(a_1 * b_1, c_{1} \, d\)",
        r"\[ a_1 \\ *b* \]",
        r"$a_1 * b_1 * c_1$",
        r"$\$5_a + 6_b$",
        r"$$ \{ x_1 \} $$",
        "\\[\nx\n- y_1\n+ *z*\n  = 1. \\\\\n> 2\n# 3\n\\]",
        "$$\n\\begin{aligned}\na_1 &= `b` \\\\\n===\n\\end{aligned}\n$$",
        "\\begin{align*}\na_1 &= *b* \\\\\n- c\n\\end{align*}",
        r"\begin{matrix} a_1 \\ *b* \end{matrix}",
        r"\(a_1 + \sqrt{b_1",  # it was cut
        "\\[\na_1 \\\\",
    ],
)
def test_a_formula_stays_as_it_was_written(formula: str) -> None:
    for before in ("", "So:\n\n", "- ", "1. "):
        text = before + formula.replace("\n", "\n   " if before.endswith(" ") else "\n")
        for cuts in ((), range(len(text))):
            lines = shown(text, cuts, width=60, height=20)
            written = [line.strip() for line in formula.split("\n")]
            assert [line.lstrip(" •1").rstrip() for line in lines][-len(written) :] == written


@pytest.mark.parametrize("before", ["", "> ", "- "])
def test_a_formula_with_strokes_stays_in_its_cell(before: str) -> None:
    rows = [
        "| name | $|x|$ |",
        "|---|---|",
        r"| $|a_1|$ | \(P(A|B)\) *c* |",
        "| $5 | $6 |",
        r"a \| b | $$|d| + |e|$$",
        "| f | g | h |",
    ]
    text = "\n".join(
        (before if before != "- " or not number else "  ") + row for number, row in enumerate(rows)
    )
    for cuts in ((), range(len(text))):
        lines = [line.strip("▌• ") for line in shown(text, cuts, width=60, height=20)]
        cells = [re.split(r"  +", line) for line in lines if line.strip("━─ ")]
        assert cells == [
            ["name", "$|x|$"],
            ["$|a_1|$", r"\(P(A|B)\) c"],
            ["$5", "$6"],
            ["a | b", "$$|d| + |e|$$"],
            ["f", "g"],
        ]


def test_money_code_and_escapes_are_no_formulas() -> None:
    text = r"$5 and *6* $7, US$8 *and* 9$, `$x$`, 5 *or* 6$. \* \_ $5 per *item* and 6$ $ *a* $"
    [line] = shown(text, (), width=120, height=9)
    assert line == "$5 and 6 $7, US$8 and 9$, $x$, 5 or 6$. * _ $5 per item and 6$ $ a $"


def test_the_end_of_a_formula_stays_where_its_block_has_ended() -> None:
    assert shown("- \\[x\n = y\\]", (), width=60, height=9)[-1] == r"= y\]"


LONG = "日本語" * 30 + "x" * 100 + "https://example.org/" + "a/" * 100


@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        "```go\n\tf({})\n```",
        "- {}",
        "> {}",
        "# {}",
        "`{}`",
        "| a |\n|---|\n| {} |",
        "|{}|\n|-|",
    ],
)
@pytest.mark.parametrize("width", [11, 40])
def test_long_lines_are_wrapped_without_loss(frame: str, width: int) -> None:
    lines = shown(frame.format(LONG), (), width=width, height=9)
    assert LONG in "".join(line.strip("▌• ") for line in lines)
    assert all(cell_len(line) <= width for line in lines)


def test_html_character_references_print_no_control_characters() -> None:
    for text in ("&#27;[2J", "`&#155;2J`", "a&#13;b&#7;&#8;"):
        assert not any(printable(line) != line for line in shown(text, (), width=40, height=9))


# -- what is made to take long ---------------------------------------------------------------------

BOUND_S = 20  # where a mistake takes minutes


def test_long_runs_of_blanks_are_scanned_once() -> None:
    began = time.monotonic()
    for line in (" " * 10**5 + "x", "\t" * 10**5 + "x", "```\n" + " \t" * 10**5 + "x"):
        assert completed(line) == line
        assert "".join(block.source for block in blocks_of(line)) == line
    assert time.monotonic() - began < BOUND_S


@pytest.mark.parametrize(
    "undecided", [" ", "\t ", "  -", "- = |", "``", " ```py", "1", " 12) ", "~~"]
)
def test_the_beginning_of_a_line_may_become_any_block(undecided: str) -> None:
    assert UNDECIDED.match(undecided)
    assert not UNDECIDED.match(undecided + "x") or "`" in undecided
    assert not UNDECIDED.match("x" + undecided)


@pytest.mark.usefixtures("every_frame")
@pytest.mark.parametrize(
    "unit",
    [
        "[",
        "*a_",
        "`",
        "![a](",
        "<",
        ">",
        "|",
        "&#",
        "a\n",
        "- a\n  ",
        "- ",
        " ",
        "x",
        "$a",
        "\\(",
        "\\[\n",
    ],
)
def test_only_as_much_is_parsed_as_can_be_drawn(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that does not end is shown as plain text."""
    monkeypatch.setattr(view, "MAX_SIZE", 2000)
    monkeypatch.setattr(view, "MAX_CODE_SIZE", 4000)
    parsed: list[int] = []
    parse = PARSER.parse

    def counted(source: str) -> object:
        parsed.append(len(source))
        return parse(source)

    monkeypatch.setattr(PARSER, "parse", counted)
    text = unit * (40_000 // len(unit)) + "end"
    terminal, output = console(80, 24)
    asyncio.run(play(terminal, pieces(text, range(0, len(text), 500))))
    assert max(parsed) < 5000 and sum(parsed) < 100_000
    assert output.screen.lines[-1].endswith("end")
    if not {" ", "\n"} & set(unit):  # which has no rows of its own
        shown = "".join(output.screen.lines)
        assert shown.endswith(text[-35_000:])


def test_text_that_arrives_at_once_is_drawn_or_shown_plain() -> None:
    terminal, output = console(80, 24)
    text = "".join(f"**{number}**\n\n" for number in range(2000))
    assert size(text) > MAX_SIZE
    asyncio.run(play(terminal, ["*Some*", " text.\nand a li", "ne", text]))
    lines = [line for line in output.screen.lines if line]
    assert lines[:2] == ["Some text.", "and a line**0**"]
    assert lines[2:] == [f"**{number}**" for number in range(1, 2000)]


def test_code_that_takes_too_long_to_highlight_is_shown_plain() -> None:
    began = time.monotonic()
    for name, unit in (("perl", "s{"), ("python", "x = (1,\n"), ("none", "a\tb")):
        code = unit * (60_000 // len(unit))
        assert highlighted(code, name).plain == code.rstrip()
    assert time.monotonic() - began < BOUND_S
    assert highlighted("x = 1", "python").spans


def test_endless_blanks_are_not_held_back_as_thinking() -> None:
    splitter = ThinkingSplitter()
    text = "".join(splitter.feed(" ").text for _ in range(MAX_HELD_CHARS + 100))
    assert text == " " * 100
    assert splitter.feed("<think>").text == " " * MAX_HELD_CHARS + "<think>"


async def test_ctrl_c_works_while_the_loop_is_busy() -> None:
    pressed = asyncio.Event()
    with on_interrupt(pressed.set):
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(pressed.wait(), BOUND_S)


def test_only_what_changes_is_drawn_again() -> None:
    terminal, output = console(40, 20)
    live = LiveLines(terminal)
    lines = [ScreenLine(f"line {number}", f"line {number}") for number in range(10)]
    live.draw(lines)
    before = output.num_written
    live.draw(lines)
    assert output.num_written == before
    live.draw([*lines, ScreenLine("new", "new")])
    assert output.num_written - before < 40
    assert output.screen.lines == [*(line.plain for line in lines), "new"]


def test_drawn_lines_can_be_replaced_by_fewer_or_more() -> None:
    terminal, output = console(40, 20)
    live = LiveLines(terminal)
    for plain in (["a", "b", "c"], ["a"], ["a", "x"], [], ["y"], ["z", "y"]):
        live.draw([ScreenLine(text, text) for text in plain])
        assert output.screen.lines == plain
    live.draw([ScreenLine("z", "z"), ScreenLine("end", "end")], num_final=2)
    live.draw([ScreenLine("next", "next")])
    assert output.screen.lines == ["z", "end", "next"]


def test_a_resize_redraws_the_rest_once() -> None:
    """A terminal wraps what it has; here the screen is cleared instead, as if it were wrapped."""
    terminal, output = console(20, 4)
    live = LiveLines(terminal)
    live.draw([ScreenLine(text, text) for text in ("ab " * 6).split()])
    terminal.width = 10
    live.draw([ScreenLine(text, text) for text in ("ab " * 6 + "cd").split()])
    assert output.screen.scrollback[:3] == ["ab"] * 3
    assert output.screen.lines.count("ab") == 6
    assert output.screen.lines[-1] == "cd"


def test_thinking_is_folded_into_one_line() -> None:
    terminal, output = console(60, 20)

    async def play() -> None:
        answer = MarkdownView(terminal, show_thinking=False)
        answer.think("I wonder. " * 50)
        assert output.screen.lines[0] == "Thinking…"
        assert len(output.screen.lines) == 1 + view.NUM_THOUGHT_LINES
        answer.write("Yes.")
        answer.close()
        assert answer.thoughts == "I wonder. " * 50

    asyncio.run(play())
    folded, blank, text = output.screen.lines
    assert folded.startswith("Thought for 0.") and (blank, text) == ("", "Yes.")


@pytest.mark.parametrize(
    ("show", "lines"),
    [(True, ["Thinking…", "Hm.", "", "**Yes**"]), (False, ["Thinking…", "", "**Yes**"])],
)
def test_a_dumb_terminal_gets_the_plain_text(show: bool, lines: list[str]) -> None:
    terminal, output = console(40, 20)
    answer = PlainView(terminal, show_thinking=show)
    answer.think("Hm.")
    for part in ("**Y", "es**"):
        answer.write(part)
    answer.close()
    assert output.screen.lines == lines


@pytest.mark.parametrize(
    ("show", "text"), [(True, "<think>\nHm.\n</think>\n\nYes\n"), (False, "Yes\n")]
)
def test_a_pipe_gets_the_thinking_only_on_request(
    show: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = Pipe(show_thinking=show)
    with pipe.answering():
        pipe.think("Hm.")
        pipe.write("Yes")
    assert capsys.readouterr().out == text
