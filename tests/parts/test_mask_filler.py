"""Many grammars driven together: as each alone, and one that is slow or broken ends by itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
from support.fake_matcher import FakeMatcher, held_to
from support.grammars import GrammarBench, open_bench

from minisgl.grammar.matching import GrammarMatcher, GrammarPool
from minisgl.grammar.reasoning import ReasoningGate
from minisgl.matcher import MASK_LIMIT_S, MaskRows, Matcher, mask_words
from minisgl.parts.masks.filling import POOL_ROWS, MaskFiller
from minisgl.parts.masks.host import matcher_of
from minisgl.request import Request, SamplingParams, StructuredOutput

SHAPE = StructuredOutput(
    json_schema={
        "type": "array",
        "items": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "integer"}]},
        "maxItems": 3,
    }
)
EITHER = StructuredOutput(choice=["yes", "no", "perhaps"])


@pytest.fixture(scope="module")
def bench() -> Iterator[GrammarBench]:
    with open_bench("byte_level") as opened:
        yield opened


def request(matcher: Matcher, index: int) -> Request:
    params = SamplingParams(ignore_eos=index % 5 == 0, min_tokens=3 * (index % 3 == 0))
    return Request(str(index), [1], params, max_tokens=99, seed=0, extras=held_to(matcher))


def stopped() -> float:
    """The time at which no matcher is too slow, whatever the garbage collector does meanwhile."""
    return 0.0


def ids_in(words: MaskRows, size: int) -> list[int]:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:size]).tolist()


def matchers_of(bench: GrammarBench) -> list[Matcher]:
    """Some of each kind: grammars, grammars behind reasoning, and foreign ones."""
    closing = bench.encode("#")
    open, shut = (
        ReasoningGate("#", tuple(closing), is_open=is_open, budget=2) for is_open in (True, False)
    )
    shapes, either = bench.compile(SHAPE), bench.compile(EITHER)
    makers = (
        shapes.matcher,
        either.matcher,
        lambda: shapes.matcher(open),
        lambda: either.matcher(shut),
        lambda: FakeMatcher(lambda output: {5 + len(output) % 7, 11}),
    )
    return [makers[index % len(makers)]() for index in range(POOL_ROWS + 14)]


@pytest.mark.parametrize("seed", range(4))
def test_masks_filled_together_are_those_filled_alone(bench: GrammarBench, seed: int) -> None:
    rng = random.Random(seed)
    eos = sorted(bench.eos)
    requests = [request(matcher, index) for index, matcher in enumerate(matchers_of(bench))]
    twins = [request(matcher, index) for index, matcher in enumerate(matchers_of(bench))]
    filler, alone = (MaskFiller(bench.size, eos, clock=stopped) for _ in "ab")
    for _ in range(25):
        rows = np.full((len(requests), mask_words(bench.size)), 7, np.uint32)
        assert filler.fill(requests, rows) == []
        for index, twin in enumerate(twins):
            row = np.full((1, mask_words(bench.size)), 9, np.uint32)
            assert alone.fill([twin], row) == []
            assert (row[0] == rows[index]).all()
            token = rng.choice(ids_in(row[0], bench.size))
            twin.token_ids.append(token)
            requests[index].token_ids.append(token)
            assert alone.accept([twin]) == []
        assert filler.accept(requests) == []
        kept = [index for index, twin in enumerate(twins) if twin.token_ids[-1] not in bench.eos]
        requests, twins = [requests[i] for i in kept], [twins[i] for i in kept]
        if len(requests) < POOL_ROWS:
            return


def test_a_token_that_a_grammar_refuses_ends_its_request_among_many(bench: GrammarBench) -> None:
    compiled = bench.compile(EITHER)
    requests = [request(compiled.matcher(), 1) for _ in range(POOL_ROWS)]
    yes, wrong = bench.encode("yes"), bench.encode("x")[0]
    for index, each in enumerate(requests):
        each.token_ids.append(wrong if index == 3 else yes[0])
    filler = MaskFiller(bench.size, sorted(bench.eos), clock=stopped)
    [(failed, error)] = filler.accept(requests)
    assert failed is requests[3] and "yes" not in str(error)
    rows = np.zeros((POOL_ROWS, mask_words(bench.size)), np.uint32)
    [(failed, _)] = filler.fill(requests, rows)
    assert failed is requests[3]
    assert ids_in(rows[3], bench.size) == [*range(bench.size)]
    assert {bench.bytes_of([id]) for id in ids_in(rows[4], bench.size)} == {b"e", b"es"}


@pytest.mark.parametrize("what", ["accept", "fill"])
def test_grammars_that_were_slow_together_are_driven_alone_once(
    bench: GrammarBench, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[int] = []
    now = [0.0]

    def drive(pool: GrammarPool, matchers: list[GrammarMatcher], *rest: object) -> None:
        together.append(len(matchers))
        now[0] += MASK_LIMIT_S * (1.01 if len(together) == 1 else 0.99)
        original(pool, matchers, *rest)

    original = getattr(GrammarPool, what)
    monkeypatch.setattr(GrammarPool, what, drive)
    compiled = bench.compile(StructuredOutput(regex="a+"))
    requests = [request(compiled.matcher(), 1) for _ in range(POOL_ROWS)]
    wall_clock = partial(now.__getitem__, 0)
    filler = MaskFiller(bench.size, sorted(bench.eos), clock=stopped, wall_clock=wall_clock)
    rows = np.zeros((POOL_ROWS, mask_words(bench.size)), np.uint32)
    counts = []
    for _ in range(4):
        for each in requests:
            each.token_ids += bench.encode("a")
        assert filler.accept(requests) == filler.fill(requests, rows) == []
        counts.append(len(together))
    assert counts == [1, 1, 2, 3]  # not the second time


BREAKABLE = StructuredOutput(  # by any text
    json_schema={
        "type": "object",
        "properties": {
            "k": {
                "anyOf": [
                    {"const": 1},
                    {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": 5000,
                        "pattern": r"^$|(^(?:\S+\s+){0,99}\S+$)",
                    },
                ]
            }
        },
        "required": ["k"],
        "additionalProperties": False,
    }
)


def follow(
    filler: MaskFiller, bench: GrammarBench, requests: list[Request], texts: list[str]
) -> tuple[list[Request], list[list[int]]]:
    """Let each request go on with its text; returns those that last, and their masks."""
    token_ids = [bench.encode(text) for text in texts]
    rows = np.zeros((len(requests), mask_words(bench.size)), np.uint32)
    failed: list[Request] = []
    for step in range(max(map(len, token_ids))):
        going = []
        for each, theirs in zip(requests, token_ids, strict=True):
            if each not in failed and step < len(theirs):
                each.token_ids.append(theirs[step])
                going.append(each)
        failures = filler.accept(going) + filler.fill(going, rows[: len(going)])
        failed += [each for each, _ in failures]
    left = [each for each in requests if each not in failed]
    assert filler.fill(left, rows[: len(left)]) == []
    return left, [ids_in(row, bench.size) for row in rows[: len(left)]]


@pytest.mark.parametrize("rogues", [[0], [1], [2, 0]])
@pytest.mark.parametrize("number", [3, POOL_ROWS + 3])
@pytest.mark.parametrize("gated", [False, True])
def test_an_answer_that_breaks_a_grammar_breaks_it_for_no_other(
    bench: GrammarBench, number: int, rogues: list[int], gated: bool
) -> None:
    with open_bench("byte_level") as fresh:  # whose cache has no broken grammar of another case
        gate = ReasoningGate("#", tuple(fresh.encode("#")), is_open=True) if gated else None
        compiled = fresh.compile(BREAKABLE)
        requests = [request(compiled.matcher(gate), 5 * i + 1) for i in range(number)]
        filler = MaskFiller(fresh.size, sorted(fresh.eos), clock=stopped)
        begin = "so#" if gated else ""
        assert follow(filler, fresh, requests, [begin + '{"k":'] * number)[0] == requests

        texts = ['"tall' if index in rogues else "1" for index in range(number)]
        left, masks = follow(filler, fresh, requests, texts)
        assert left == [each for i, each in enumerate(requests) if i not in rogues]
        matcher = bench.compile(BREAKABLE).matcher()
        matcher.accept(bench.encode('{"k":1'))
        healthy = sorted(bench.allowed(matcher))
        assert masks == [healthy] * len(left)

        for token_id in (*fresh.encode("}"), min(fresh.eos)):
            for each in left:
                each.token_ids.append(token_id)
            assert filler.accept(left) == []
        assert all(matcher_of(each).finished for each in left)

        later = fresh.compile(BREAKABLE).matcher()
        later.accept(fresh.encode('{"k":1'))
        assert sorted(fresh.allowed(later)) == healthy
