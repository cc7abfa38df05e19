"""Splits Markdown that is still being written into finished blocks, and renders them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableDataElement
from rich.syntax import Syntax
from rich.text import Text

from .formulas import with_formulas

# HTML is text here: it could not be shown, and would vanish.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
PARSER.use(with_formulas)
# The beginning of a line that may yet become a fence, a list, a rule, a heading or a mere text.
# Blanks are matched possessively (*+), since backtracking over many would take too long.
UNDECIDED = re.compile(
    r"[ \t]*+(`{3,}[^`]*|[`~]+|[-=*+_#>|:][-=*+_#>|: \t]*|\d{1,9}([.)][ \t]*)?|(?<=[ \t]))\Z"
)
FENCE = re.compile(r"[ ]{0,3}(`{1,3}|~{1,3})\Z")
CODE_THEME = "ansi_dark"  # the terminal's own colours
TAB_SIZE = 4
HIGHLIGHT_S = 0.5  # for a block
LINE_SIZE = 32  # a line break costs as much time as this many characters
MAX_SIZE = 64 << 10  # of a block, and of what comes at once; a second or two
MAX_CODE_SIZE = 256 << 10  # of a block of code, which is not read as Markdown


def size(text: str) -> int:
    """The cost of drawing `text`, in characters."""
    return len(text) + LINE_SIZE * text.count("\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A paragraph, a heading, a table, …, or one item of a list."""

    source: str
    number: int | None = None  # of an item in an ordered list
    list_markup: str = ""  # of an item: what marks its list
    is_code: bool = False
    is_table: bool = False

    def follows_in_list(self, other: Block | None) -> bool:
        return (
            other is not None and bool(self.list_markup) and self.list_markup == other.list_markup
        )


class Blocks:
    """Takes text in pieces and gives out blocks as they are finished; `last` is the rest."""

    def __init__(self) -> None:
        self._text = ""
        self._before: Block | None = None  # given out last

    @property
    def size(self) -> int:
        """The drawing cost of the unfinished text, in characters."""
        return size(self._text)

    def feed(self, piece: str) -> list[Block]:
        """Adds text; returns the blocks that have become final."""
        self._text += piece
        line = self._text.rpartition("\n")[2]
        # A block is finished once it is decided that another one begins below it.
        undecided = line if UNDECIDED.match(line) else ""
        *finished, last = self._split(self._text.removesuffix(undecided)) or [Block("")]
        if finished:
            self._text = last.source + undecided
            self._before = finished[-1]
        return finished

    def last(self) -> list[Block]:
        """The blocks if the text ended here: one, or two if the second may just have begun."""
        return self._split(self._text)

    def cut(self) -> tuple[list[Block], str]:
        """The blocks up to the last complete line, and the incomplete line."""
        lines, newline, line = self._text.rpartition("\n")
        return (self._split(lines), line) if newline else (self._split(line), "")

    def _split(self, text: str) -> list[Block]:
        lines = text.split("\n")
        openings = list(_openings(PARSER.parse(text)))
        ends = [*(line for _, line, _ in openings[1:]), len(lines)]
        blocks: list[Block] = []
        for (token, line, number), end in zip(openings, ends, strict=False):
            kind, markup = token.type, token.markup
            before = blocks[-1] if blocks else self._before
            # Only the number of the first item counts.
            earlier = before.number if before and before.list_markup == markup else None
            if number is not None and earlier is not None:
                number = earlier + 1
            blocks.append(
                Block(
                    "\n".join(lines[line:end]),
                    number=number,
                    list_markup=markup if kind == "list_item_open" else "",
                    is_code=kind in ("fence", "code_block"),
                    is_table=kind == "table_open",
                )
            )
        return blocks


def _openings(tokens: list[Token]) -> Iterator[tuple[Token, int, int | None]]:
    """The beginning of each block, its line, and the first number of its list if that has any."""
    list_start: int | None = None
    for token in tokens:
        if token.map is None or token.nesting < 0:
            continue
        line, _ = token.map
        if token.level == 1 and token.type == "list_item_open":
            yield token, line, list_start
        elif token.level == 0 and token.type == "ordered_list_open":
            list_start = int(token.attrs.get("start", 1))
        elif token.level == 0 and token.type == "bullet_list_open":
            list_start = None
        elif token.level == 0:
            yield token, line, None


def completed(source: str) -> str:
    """An unfinished block as it will most likely look: without a partial marker at its end, and
    with open emphasis and code closed."""
    head, _, line = source.rpartition("\n")
    if UNDECIDED.match(line):
        return head
    if "```" not in source and "~~~" not in source:
        for mark in ("`", "**"):
            if source.count(mark) % 2 and not source.endswith("*"):
                source = source.rstrip() + mark
    return source


def unfenced(source: str) -> str:
    """An unfinished block of code without a line that may become its closing fence."""
    head, _, line = source.rpartition("\n")
    return head if FENCE.match(line) else source


class LeftHeading(Heading):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = "#" * int(self.tag[1:])
        self.text.justify = "left"
        yield Text.assemble((f"{marks} ", "dim"), self.text, overflow="fold")


class FencedCode(CodeBlock):
    """Code without frame and background, so that it can be copied unchanged."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = "" if self.lexer_name == "text" else self.lexer_name
        yield Text(f"```{shown}", style="dim")
        yield highlighted(str(self.text).rstrip("\n"), self.lexer_name)
        yield Text("```", style="dim")


def highlighted(code: str, lexer_name: str) -> Text:
    """Highlighted code. Stops colouring after HIGHLIGHT_S: some lexers take very long."""
    text = Text(overflow="fold", tab_size=TAB_SIZE)
    lexer = Syntax("", lexer_name, tab_size=0).lexer
    if lexer is not None:
        style_of = Syntax.get_theme(CODE_THEME).get_style_for_token
        until = time.perf_counter() + HIGHLIGHT_S
        for kind, part in lexer.get_tokens(code):
            text.append(part, style_of(kind))
            if time.perf_counter() > until:
                break
    text.append(code[len(text) :])
    text.rstrip()
    return text


class WholeCell(TableDataElement):
    """A cell of a table. What is wider than its column goes on in the next line."""

    def __init__(self, justify: JustifyMethod) -> None:
        super().__init__(justify)
        self.content.overflow = "fold"


class BlockMarkdown(Markdown):
    """Renders one block. Links show their targets, since their text may mislead."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": LeftHeading,
        "fence": FencedCode,
        "code_block": FencedCode,
        "th_open": WholeCell,
        "td_open": WholeCell,
    }

    def __init__(self, block: Block, *, finished: bool) -> None:
        source = block.source
        if not finished:
            source = unfenced(source) if block.is_code else completed(source)
        super().__init__("", code_theme=CODE_THEME, hyperlinks=False)
        self.parsed = PARSER.parse(source)
        if block.number is not None:
            for token in self.parsed[:1]:
                token.attrs["start"] = block.number
