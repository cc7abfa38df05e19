"""Formulas in Markdown, which stay as they were written: a terminal cannot draw them."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, table
from markdown_it.rules_inline import StateInline

# One dollar needs another; other formulas may have been cut, or may still be written. A dollar ends
# a formula neither behind a blank nor in front of a digit: there it is money, as in "$5 and 6$".
FORMULA = re.compile(
    r"""
    \\\( .*? (\\\) | \Z)
    | \\\[ .*? (\\\] | \Z)
    | \\begin\{(?P<name>[a-zA-Z]+\*?)\} .*? (\\end\{(?P=name)\} | \Z)
    | \\[\])]  # of one that began in another block
    | \$\$ .*? ((?<!\\)\$\$ | \Z)
    | (?<![^\W_]) \$ (?! [\s$] | \d[\d.,]*\s+[^\W\d_]{2} ) .{1,500}? (?<![\s\\]) \$ (?!\d)
    """,
    re.DOTALL | re.VERBOSE,
)
DELIMITERS = re.compile(r"[ \t]*[-:|][-:| \t]*")  # of a table, below its head
STROKE = "\0"  # stands for one of a formula; markdown-it has taken it out of the text
BLOCK = re.compile(r"\$\$|\\\[|\\begin\{[a-zA-Z]+\*?\}")


def with_formulas(parser: MarkdownIt) -> None:
    """A plugin for `parser`: LaTeX in `$…$`, `$$…$$`, `\\(…\\)`, `\\[…\\]` and environments
    is text, also where it has the `|` that parts the cells of a table."""
    parser.inline.ruler.before("escape", "formula", _formula)
    others = ["paragraph", "reference", "blockquote", "list"]  # which a formula ends
    parser.block.ruler.before("table", "formula", _formula_lines, {"alt": others})
    parser.block.ruler.at("table", _table, {"alt": ["paragraph", "reference"]})


def _formula(state: StateInline, silent: bool) -> bool:
    found = FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = found[0]
    state.pos = found.end()
    return True


def _formula_lines(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A paragraph that begins with a formula: up to its end, or to an empty line. A line of it is
    neither an item of a list nor a quote, whatever it begins with."""
    begin = state.bMarks[start_line] + state.tShift[start_line]
    found = BLOCK.match(state.src, begin, state.eMarks[start_line])
    if found is None or state.is_code_block(start_line):
        return False
    if silent:
        return True
    end = found[0].replace("[", "]").replace("begin", "end", 1)
    next_line, rest = start_line + 1, found.end()
    while (
        end not in state.src[rest : state.eMarks[next_line - 1]]
        and next_line < end_line
        and not state.isEmpty(next_line)
        and state.sCount[next_line] >= state.blkIndent
    ):
        rest, next_line = state.bMarks[next_line], next_line + 1
    state.line = next_line
    state.push("paragraph_open", "p", 1).map = [start_line, next_line]
    inline = state.push("inline", "", 0)
    inline.content = state.getLines(start_line, next_line, state.blkIndent, False).strip()
    inline.map, inline.children = [start_line, next_line], []
    state.push("paragraph_close", "p", -1)
    return True


def _table(state: StateBlock, start_line: int, end_line: int, silent: bool) -> bool:
    """A table. Where a row has more cells than the table has columns, a `|` of a formula parts
    none."""
    source, num_tokens = state.src, len(state.tokens)
    if start_line + 1 < end_line and DELIMITERS.fullmatch(_line(state, start_line + 1)):
        lines = source.split("\n")
        columns = _num_cells(_line(state, start_line + 1))
        for number in range(start_line, end_line):
            line = _line(state, number)
            if "|" not in line:
                break
            if _num_cells(line) > columns:
                whole = FORMULA.sub(lambda found: found[0].replace("|", STROKE), line)
                lines[number] = lines[number].removesuffix(line) + whole
        state.src = "\n".join(lines)
    found = table(state, start_line, end_line, silent)
    state.src = source
    for token in state.tokens[num_tokens:]:
        token.content = token.content.replace(STROKE, "|")
    return found


def _line(state: StateBlock, number: int) -> str:
    return state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]


def _num_cells(row: str) -> int:
    inner = re.sub(r"^\||(?<!\\)\|$", "", row.strip())
    return 1 + len(re.findall(r"(?<!\\)\|", inner))
