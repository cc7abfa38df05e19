"""As much of PromQL as the dashboard and the alerts of `scripts/deploy` use, evaluated on scrapes.

Rates are differences of two scrapes, taken to be a minute apart.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

SECONDS = 60.0
LABEL = r'\s*(\w+)\s*(=~|!=|=)\s*"((?:[^"\\]|\\.)*)"\s*,?'
SELECTOR = re.compile(rf"([a-zA-Z_:][\w:]*)\b\s*(?:{{((?:{LABEL})*)}})?(\[\w+\])?(?!\s*\()")
BY = re.compile(r"\s*by\s*\(([^)]*)\)\s*")
NUMBER = re.compile(r"\d+(\.\d+)?")
OPERATOR = re.compile(r"\s*(==|!=|>=|<=|>|<|\+|-|\*|/|and\b)\s*")
FUNCTIONS = ("rate", "increase", "histogram_quantile")
AGGREGATES: Mapping[str, Callable[[Iterable[float]], float]] = {"sum": sum, "max": max, "min": min}
ARITHMETIC: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": lambda left, right: left / right if right else math.nan,
}
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
LEVELS = (("and",), tuple(COMPARISONS), ("+", "-"), ("*", "/"))  # what binds least comes first

Labels = frozenset[tuple[str, str]]
Vector = dict[Labels, float]
Scrape = dict[str, Vector]  # by the name of the samples


def scraped(page: str, **labels: str) -> Scrape:
    """The samples of a page of /metrics, with the labels that Prometheus adds, and `up`."""
    found: Scrape = {"up": {frozenset(labels.items()): 1.0}}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = frozenset({**sample.labels, **labels}.items())
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def selectors(query: str) -> Iterable[tuple[str, list[str]]]:
    """The metrics of a query, each with the labels that it is asked to have."""
    for found in SELECTOR.finditer(BY.sub(" ", query)):
        if found[1] not in ("and", "by"):
            yield found[1], [label for label, _, _ in re.findall(LABEL, found[2] or "")]


def evaluated(query: str, before: Scrape, now: Scrape) -> Vector:
    """What a query gives. Raises ValueError for what is not understood."""
    reader = _Reader(" ".join(query.split()), before, now)
    value = reader.read()
    if reader.rest:
        raise ValueError(f"not understood: {reader.rest}")
    assert isinstance(value, dict)
    return value


@dataclass
class _Reader:
    rest: str
    before: Scrape
    now: Scrape

    def read(self, level: int = 0) -> Vector | float:
        if level == len(LEVELS):
            return self._operand()
        value = self.read(level + 1)
        while (found := OPERATOR.match(self.rest)) and found[1] in LEVELS[level]:
            self.rest = self.rest[found.end() :]
            value = _combined(found[1], value, self.read(level + 1))
        return value

    def _operand(self) -> Vector | float:
        self.rest = self.rest.lstrip()
        if found := NUMBER.match(self.rest):
            self.rest = self.rest[found.end() :]
            return float(found[0])
        if self.rest.startswith("("):
            return self._in_brackets()[0]
        found = SELECTOR.match(self.rest)
        if found and found[1] not in (*AGGREGATES, *FUNCTIONS):
            self.rest = self.rest[found.end() :]
            return self._selected(found, self.now)
        name = re.match(r"\w+", self.rest)
        if name is None:
            raise ValueError(f"not understood: {self.rest}")
        self.rest = self.rest[name.end() :].lstrip()
        if name[0] in AGGREGATES:
            by = BY.match(self.rest)
            self.rest = self.rest[by.end() :] if by else self.rest
            kept = {label.strip() for label in by[1].split(",")} if by else set()
            [vector] = self._in_brackets()
            assert isinstance(vector, dict)
            return _grouped(AGGREGATES[name[0]], vector, kept)
        if name[0] in ("rate", "increase"):
            return self._changed(SECONDS if name[0] == "rate" else 1.0)
        if name[0] == "histogram_quantile":
            quantile, vector = self._in_brackets()
            assert isinstance(quantile, float) and isinstance(vector, dict)
            return _quantile(quantile, vector)
        raise ValueError(f"not understood: {name[0]}")

    def _in_brackets(self) -> list[Vector | float]:
        values = []
        while self.rest.startswith(("(", ",")):
            self.rest = self.rest[1:]
            values.append(self.read())
            self.rest = self.rest.lstrip()
        if not self.rest.startswith(")"):
            raise ValueError(f"not closed: {self.rest}")
        self.rest = self.rest[1:]
        return values

    def _changed(self, seconds: float) -> Vector:
        found = SELECTOR.match(self.rest[1:])
        if found is None or not found[6] or self.rest[1 + found.end()] != ")":
            raise ValueError(f"no range: {self.rest}")
        self.rest = self.rest[found.end() + 2 :]
        before, now = self._selected(found, self.before), self._selected(found, self.now)
        return {key: (value - before.get(key, 0.0)) / seconds for key, value in now.items()}

    def _selected(self, found: re.Match[str], scrape: Scrape) -> Vector:
        wanted = re.findall(LABEL, found[2] or "")
        tests: Mapping[str, Callable[[str, str], object]] = {
            "=": operator.eq,
            "!=": operator.ne,
            "=~": lambda value, pattern: re.fullmatch(pattern, value),
        }
        return {
            key: value
            for key, value in scrape.get(found[1], {}).items()
            if all(tests[sign](dict(key).get(label, ""), text) for label, sign, text in wanted)
        }


def _grouped(
    aggregate: Callable[[Iterable[float]], float], vector: Vector, kept: set[str]
) -> Vector:
    groups: dict[Labels, list[float]] = {}
    for key, value in vector.items():
        groups.setdefault(frozenset(pair for pair in key if pair[0] in kept), []).append(value)
    return {key: aggregate(values) for key, values in groups.items()}


def _combined(sign: str, left: Vector | float, right: Vector | float) -> Vector:
    assert isinstance(left, dict)
    if sign == "and":
        assert isinstance(right, dict)
        return {key: value for key, value in left.items() if key in right}
    others = dict.fromkeys(left, right) if isinstance(right, float) else right
    pairs = {key: (value, others[key]) for key, value in left.items() if key in others}
    if sign in ARITHMETIC:
        return {key: ARITHMETIC[sign](*pair) for key, pair in pairs.items()}
    return {key: pair[0] for key, pair in pairs.items() if COMPARISONS[sign](*pair)}


def _quantile(quantile: float, vector: Vector) -> Vector:
    """Between the bounds of a bucket, in proportion to its counts."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for key, count in vector.items():
        bound = float(dict(key)["le"])
        rest = frozenset(pair for pair in key if pair[0] != "le")
        histograms.setdefault(rest, []).append((bound, count))
    found: Vector = {}
    for key, buckets in histograms.items():
        buckets.sort()
        rank, last, low = quantile * buckets[-1][1], 0.0, 0.0
        if not buckets[-1][1]:
            found[key] = math.nan
            continue
        for bound, count in buckets:
            if count >= rank:
                share = (rank - last) / (count - last) if count > last else 0.0
                found[key] = low if math.isinf(bound) else low + (bound - low) * share
                break
            last, low = count, bound
    return found
