"""Makes exchanges with tools: calls, answers from results, and questions that no tool fits.

The tools are the first message, with a line for each: `name(parameter: type, other?: type): what it
does`, as the chat template writes them. Names, parameters and descriptions vary, so that the model
copies them. words.toml has the kinds of tools.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from demo_model.skills import REFUSAL, Exchange, as_json, draw
from demo_model.world import World, expand, is_held_out, words

# Questions that can be asked beside any tool.
BESIDE_TOOLS = "smalltalk identity option command copy spell sort fact passage json".split()
PREFIXES = ("", "", "get_", "get_", "get_current_", "fetch_", "find_", "look_up_", "tell_", "my_")
OPTIONAL = ("unit", "lang", "format", "style", "limit", "verbose", "units", "precision")
COUNTS = {"add": sum, "multiply": prod}


@dataclass(frozen=True, slots=True)
class Tool:
    kind: str
    thing: str  # what a lookup looks up
    name: str
    parameters: dict[str, str]  # the required ones and their types
    line: str

    def call(self, values: list[str]) -> str:
        arguments = {
            name: value if type == "string" else json.loads(value)
            for (name, type), value in zip(self.parameters.items(), values, strict=True)
        }
        return f"<tool_call>\n{as_json({'name': self.name, 'arguments': arguments})}\n</tool_call>"


def make_tool(world: World, kind: str) -> Tool:
    rng, known = world.rng, words()["tools"][kind]
    thing = world.words(1)[0] if kind == "lookup" else ""
    types = ("number", "integer", "number") if kind in (*COUNTS, "timer") else ("string",)
    parameters = {
        rng.choice(names.split()) if rng.random() < 0.8 else world.words(1)[0]: (
            "string" if rng.random() < 0.05 else rng.choice(types)
        )
        for names in known["parameters"]
    }
    if len(parameters) < len(known["parameters"]):
        return make_tool(world, kind)  # two of a name
    shown = [f"{name}: {type}" for name, type in parameters.items()]
    if rng.random() < 0.15:
        shown.append(f"{rng.choice(OPTIONAL)}?: {rng.choice(('string', 'boolean', 'integer'))}")
    noun = thing or rng.choice(known["nouns"].split())
    name = _name(world, noun)
    does = world.phrase(f"tool.{kind}_does", thing=thing).text
    if rng.random() < 0.2 and noun.split("_")[-1] in name.lower():
        does = ""  # the name says it
    return Tool(kind, thing, name, parameters, f"{name}({', '.join(shown)}): {does}")


def _name(world: World, noun: str) -> str:
    """A name for a tool; those of the evaluation are held out from the training."""
    name = world.pick(PREFIXES) + noun
    match world.rng.randrange(10):
        case 0 | 1:
            name = "_".join(world.words(world.rng.randint(1, 2)))
        case 2 | 3:
            head, *others = name.split("_")
            name = head + "".join(other.capitalize() for other in others)
        case 4:
            name = f"{noun}_{world.words(1)[0]}"
    return name if is_held_out(name) == world.evaluates else _name(world, noun)


def make_tools(world: World, kinds: Sequence[str]) -> list[Tool]:
    """A tool of each kind, with different names and things, in any order."""
    tools = [make_tool(world, kind) for kind in kinds]
    unlike = {tool.name for tool in tools}, {(tool.kind, tool.thing) for tool in tools}
    if min(map(len, unlike)) < len(tools):
        return make_tools(world, kinds)
    return world.rng.sample(tools, len(tools))


def some_tools(world: World) -> list[Tool]:
    kinds = [*words()["tools"], "lookup", "time", "weather", "add"]
    chosen = world.rng.choices(kinds, k=world.rng.choice((1, 1, 2, 2, 3, 3, 4, 5)))
    return make_tools(
        world, [*sorted({*chosen} - {"lookup"}), *["lookup"] * chosen.count("lookup")]
    )


def _value(world: World, of: str) -> str:
    """An argument, as a question has it."""
    rng = world.rng
    match of:
        case "zone" if rng.random() < 0.1:
            return str(world.pick(("UTC", "CET", f"Europe/{world.city()}")))
        case "zone" | "city":
            more = f"{world.pick((' ', ', '))}{world.city()}" if rng.random() < 0.15 else ""
            return world.city() + more
        case "number" if rng.random() < 0.08:
            return f"{world.number()}.{rng.randrange(1, 10)}"
        case "number":
            short = rng.random() < 0.4 and not world.evaluates
            return str(rng.randrange(100) if short else world.number())
        case "minutes":
            return str(rng.randint(1, 90))
        case "name":
            return world.name()
        case "any":
            return str(world.pick((world.name(), world.city(), *world.words(1))))
        case _:
            return " ".join(world.words(rng.randint(1, 4)))


def _values(world: World, kind: str) -> list[str]:
    return [_value(world, of) for of in words()["tools"][kind]["values"]]


def _result(world: World, kind: str, values: list[str]) -> tuple[str, str]:
    """What a tool returns, and how an answer says it."""
    rng = world.rng
    found: dict[str, Any] = {"result": " ".join(world.words(rng.randint(1, 3)))}
    if kind in COUNTS and rng.random() < 0.9:
        total = round(COUNTS[kind]([json.loads(value) for value in values]), 2)
        found = {world.pick(("result", "value", "sum", "answer")): total}
    elif (known := words()["tools"][kind]["results"]) and rng.random() < 0.8:
        pairs = rng.sample(list(known.items()), rng.randint(1, len(known)))
        found = {rng.choice(keys.split()): _filled(world, value) for keys, value in pairs}
    elif kind == "lookup":
        keys = [world.pick(("result", "value", world.words(1)[0])), *world.words(1)]
        texts = (world.name(), world.city(), world.number(), *world.words(1))
        found = {key: world.pick(texts) for key in keys[: world.pick((1, 1, 2))]}
    plain = ", ".join(map(str, found.values()))
    if rng.random() < 0.5:
        return plain, plain
    said = ", ".join(f"{key} {value}" for key, value in found.items())
    return as_json(found), said if len(found) > 1 else plain


def _filled(world: World, template: str) -> object:
    """A result, with a digit for each #."""
    digits = (str(world.rng.randrange(10)) if c == "#" else c for c in expand(template, world.rng))
    text = "".join(digits)
    return int(text) if text.lstrip("-").isdigit() else text


def ask(world: World, tool: Tool) -> tuple[str, list[list[str]]]:
    """A question for a tool, and the arguments of each call: two where it asks for two places."""
    calls = [_values(world, tool.kind)]
    if tool.kind in ("time", "weather", "lookup") and world.rng.random() < 0.2:
        calls.append(_values(world, tool.kind))
    if calls[0] == calls[-1] and len(calls) > 1:
        return ask(world, tool)
    shown = [" and ".join(both) for both in zip(*calls, strict=True)]
    return _question(world, tool.kind, tool.thing, shown), calls


def _question(world: World, kind: str, thing: str, values: Sequence[str]) -> str:
    fields: dict[str, object] = {f"v{number}": value for number, value in enumerate(values)}
    return world.phrase(f"tool.{kind}", thing=thing, **fields).text


def called(world: World, asked: Sequence[tuple[Tool, str, list[list[str]]]]) -> Exchange:
    """The exchange of one or more questions, with all calls in one message."""
    results, answers = [], []
    calls = [(tool, values) for tool, _, each in asked for values in each]
    for tool, values in calls:
        if world.rng.random() < 0.04:
            reason = " ".join(world.words(2))
            results.append(world.pick((f"Error: {reason}", as_json({"error": reason}))))
            answers.append(f"The tool failed: {reason}.")
        else:
            result, said = _result(world, tool.kind, values)
            results.append(result)
            answer: str = words()["tools"][tool.kind]["answer"]
            answers.append(answer.format(*values, thing=tool.thing, result=said))
    made = "\n".join(tool.call(values) for tool, values in calls)
    steps = (("assistant", made), *(("tool", result) for result in results))
    return Exchange(" ".join(text for _, text, _ in asked), " ".join(answers), None, steps)


def chained(world: World, tool: Tool) -> Exchange:
    """The sum of three numbers: the second call needs the result of the first."""
    a, b, c = (_value(world, "number") for _ in range(3))
    between = str(round(json.loads(a) + json.loads(b), 2))
    total = str(round(json.loads(between) + json.loads(c), 2))
    first = between if world.rng.random() < 0.5 else as_json({"result": json.loads(between)})
    calls = [("assistant", tool.call(values)) for values in ([a, b], [between, c])]
    steps = (calls[0], ("tool", first), calls[1], ("tool", total))
    question = world.phrase("tool.add_three", a=a, b=b, c=c).text
    return Exchange(question, f"{a} + {b} + {c} = {total}.", None, steps)


def unanswered(world: World, kind: str, things: Sequence[str] = ()) -> Exchange:
    """A question for a tool that is not listed. things: for which there are tools."""
    thing = world.pick([word for word in world.words(9) if word not in things])
    return Exchange(_question(world, kind, thing, _values(world, kind)), REFUSAL, None)


def exchange(world: World, tools: list[Tool], way: str) -> Exchange:
    """way: one, two or three calls (the last one after another), or none."""
    listed = {tool.kind: tool for tool in tools}
    if way == "none":
        if world.rng.random() < 0.35:
            missing = [
                kind for kind in words()["tools"] if kind not in {*listed, "add"} - {"lookup"}
            ]
            return unanswered(world, world.pick(missing), [tool.thing for tool in tools])
        return draw(world, world.pick([*BESIDE_TOOLS, *["arithmetic"] * ("add" not in listed)]))
    if way == "three" and "add" in listed:
        return chained(world, listed["add"])
    first, second = ((tool, *ask(world, tool)) for tool in world.rng.choices(tools, k=2))
    both = way == "two" and len(first[2]) == 1 and first[::2] != second[::2]
    return called(world, [first, second] if both else [first])
