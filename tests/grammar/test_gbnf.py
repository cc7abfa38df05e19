"""Grammars in GBNF allow the texts that they describe, character by character."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.grammars import ByteMatcher

from minisgl.grammar.gbnf import read
from minisgl.grammar.lexemes import to_lark
from minisgl.request import StructuredOutput

# llama.cpp's examples, in our own words.
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}   # a comment
"""
LIST = r"""
root ::= item+

# A name may stand on a line of its own; so may a choice.
item
  ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
    | "* " . "\n"
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (
            ARITHMETIC,
            ["1=1\n", "a +b*(c -12) = 5 \n\nx=2\n", "a_1 \n*( 2\n) = \t\nb\n"],
            ["a=", "a=1", "a + b=1\n", "(a=1\n"],
        ),
        (
            'num ::= [0-9] ws\nws ::= [ \\n]*\nroot ::= num "\\n"',
            ["5\n", "5 \n\n", "5\n \n"],
            ["5", "5 ", "\n"],
        ),
        (
            JSON,
            ['{"a": 1.5e3,"b":[true, null,{}], "\\u00e4": "ä"}\n', "{}"],
            ["[1]", '{"a": 1,}', '{"a": 012}', '{"a":  1}', '{"a": "\x7f"}'],
        ),
        (LIST, ["- one\n- zwölf\n", "* *\n"], ["- one", "- \n", "* **\n"]),
        ('root ::= "é" root | "e"', ["éée"], ["éé", "Ã"]),
        ('root ::= ("a" | "ab") ("b" root)?', ["a", "ab", "aba", "abba", "abbab"], ["b", "abbb"]),
    ],
)
def test_examples_allow_what_they_describe(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    matcher = ByteMatcher(StructuredOutput(grammar=grammar))
    assert [text for text in texts if not matcher.accepts(text)] == []
    assert [text for text in others if matcher.accepts(text)] == []


def test_what_does_not_compete_stays_one_lexeme() -> None:
    lark = to_lark(read('root ::= "(" root ")" | [a-z]+ [0-9]*'))
    assert len([line for line in lark.splitlines() if line.startswith("T")]) == 3


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('root ::= "a" y', "line 1, column 14: there is no rule `y`"),
        ('a ::= "a"', "it has no rule `root`"),
        ('root ::= "a"\nx ::= [', "line 2, column 7: this has no end, or means nothing there"),
        ('root ::= ("a"', "line 1, column 10: this parenthesis is never closed"),
        ('root ::= "a")', "line 1, column 13: expected a rule"),
        ("root ::= *", "line 1, column 10: expected a text, a class"),
        ('root ::= "a"{3,2}', "at least 3 and at most 2"),
        ("root ::= [z-a]", "upside down"),
        ("root ::= []", "no character is in this class"),
        ("root ::= [^\\x00-\\U0010FFFF]", "no character is in this class"),
        ('root ::= "\\q"', r"line 1, column 11: \q is no escape of GBNF"),
        (r'root ::= "\u12"', r"\u is no escape of GBNF"),
        ('root ::= "\\UFFFFFFFF"', r"\UFFFFFFFF is not a character"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule `root` stands there twice"),
        ("root ::= " + "(" * 2000, "recursion"),
    ],
)
def test_errors_name_the_place(grammar: str, said: str) -> None:
    with pytest.raises((ValueError, RecursionError)) as caught:
        to_lark(read(grammar))
    assert said in str(caught.value)


# -- random grammars against an oracle -------------------------------------------------------------

ALPHABET = "a\nüé"  # two of them begin with the same byte
RULES = ("root", "x", "y")
LENGTH = 4

Node = tuple[Any, ...]


def nodes() -> st.SearchStrategy[Node]:
    classes = st.sets(st.sampled_from(ALPHABET), min_size=1).map(lambda s: ("class", *sorted(s)))
    texts = st.text(ALPHABET, max_size=3).map(lambda text: ("text", text))
    rules = st.sampled_from(RULES).map(lambda name: ("rule", name))
    return st.recursive(
        classes | texts | rules,
        lambda inner: (
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("sequence", *parts))
            | st.lists(inner, min_size=1, max_size=3).map(lambda parts: ("choice", *parts))
            | st.tuples(st.just("repeat"), inner, st.sampled_from("*+?") | st.just("{1,2}"))
        ),
        max_leaves=8,
    )


def written(node: Node) -> str:
    match node:
        case ("class", *chars):
            return f"[{''.join(chars)}]".replace("\n", r"\n")
        case ("text", text):
            return f'"{text}"'.replace("\n", r"\n")
        case ("rule", name):
            return str(name)
        case ("repeat", inner, sign):
            return f"({written(inner)}){sign}"
        case ("choice", *parts):
            return f"({' | '.join(map(written, parts))})"
    return f"({' '.join(map(written, node[1:]))})"


def described(rules: dict[str, Node], length: int) -> set[str]:
    """All texts of `root` up to a length, by the least fixed point."""
    texts: dict[str, set[str]] = {name: set() for name in rules}

    def of(node: Node) -> set[str]:
        match node:
            case ("class", *chars):
                return {*chars}
            case ("text", text):
                return {text}
            case ("rule", name):
                return texts[name]
            case ("choice", *parts):
                return set().union(*map(of, parts))
            case ("repeat", inner, sign):
                once = of(inner)
                least, most = {"*": (0, length), "+": (1, length), "?": (0, 1)}.get(sign, (1, 2))
                found, power = set(), {""}
                for count in range(most + 1):
                    found |= power if count >= least or "" in once else set()
                    power = joined(power, once)
                return found
        whole = {""}
        for part in node[1:]:
            whole = joined(whole, of(part))
        return whole

    def joined(left: set[str], right: set[str]) -> set[str]:
        return {a + b for a in left for b in right if len(a) + len(b) <= length}

    while True:
        grown = {name: {t for t in of(node) if len(t) <= length} for name, node in rules.items()}
        if grown == texts:
            return texts["root"]
        texts = grown


@given(st.tuples(nodes(), nodes(), nodes()))
def test_random_grammars_allow_what_they_describe(bodies: tuple[Node, ...]) -> None:
    rules = dict(zip(RULES, bodies, strict=True))
    expected = described(rules, LENGTH)
    assume(expected)  # llguidance refuses what nothing satisfies
    grammar = "\n".join(f"{name} ::= {written(body)}" for name, body in rules.items())
    matcher = ByteMatcher(StructuredOutput(grammar=grammar))
    texts = {"".join(chars) for n in range(LENGTH + 1) for chars in product(ALPHABET, repeat=n)}
    assert {text for text in texts if matcher.accepts(text)} == expected
