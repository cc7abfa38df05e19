"""Makes exchanges with tools: calls, answers from results, and questions that no tool fits.

The tools are the first message, with a line for each: `name(parameter: type, other?: type): what it
does`, as the chat template writes them. Names, parameters and descriptions vary, so that the model
copies them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from demo_model.skills import REFUSAL, Exchange, draw
from demo_model.world import World, is_held_out, word_list, words

# Of questions that can be asked beside any tool, and of those that only tools for sums answer.
BESIDE_TOOLS = "smalltalk identity option command copy spell sort fact passage json".split()
SUMS = ("add", "multiply")
PREFIXES = ("", "", "get_", "get_", "get_current_", "fetch_", "find_", "look_up_", "tell_", "my_")
OPTIONAL = ("unit", "lang", "format", "style", "limit", "verbose", "units", "precision")


@dataclass(frozen=True, slots=True)
class Tool:
    kind: str  # of words.toml
    thing: str  # what a lookup looks up
    name: str
    parameters: tuple[tuple[str, str], ...]  # (name, type), of the required ones
    line: str

    def call(self, values: list[str]) -> str:
        arguments = {
            name: value if type == "string" else json.loads(value)
            for (name, type), value in zip(self.parameters, values, strict=True)
        }
        call = json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


def make_tool(world: World, kind: str) -> Tool:
    rng, known = world.rng, words()["tools"][kind]
    thing = world.words(1)[0] if kind == "lookup" else ""
    parameters = []
    for names in known["parameters"]:
        name = rng.choice(names.split()) if rng.random() < 0.8 else world.words(1)[0]
        types = ("string",) if kind not in (*SUMS, "timer") else ("number", "integer", "number")
        parameters.append((name, "string" if rng.random() < 0.05 else rng.choice(types)))
    if len({name for name, _ in parameters}) < len(parameters):
        return make_tool(world, kind)
    shown = [f"{name}: {type}" for name, type in parameters]
    if rng.random() < 0.15:
        shown.append(f"{rng.choice(OPTIONAL)}?: {rng.choice(('string', 'boolean', 'integer'))}")
    noun = thing or rng.choice(known["nouns"].split())
    name = _name(world, noun)
    does = world.phrase(f"tool.{kind}_does", thing=thing).text
    if rng.random() < 0.2 and noun.split("_")[-1] in name.lower():
        does = ""  # the name says it
    return Tool(kind, thing, name, tuple(parameters), f"{name}({', '.join(shown)}): {does}")


def _name(world: World, noun: str) -> str:
    """A name for a tool; those of the evaluation are held out from the training."""
    while True:
        name = world.pick(PREFIXES) + noun
        match world.rng.randrange(10):
            case 0 | 1:
                name = "_".join(world.words(world.rng.randint(1, 2)))
            case 2 | 3:
                head, *others = name.split("_")
                name = head + "".join(other.capitalize() for other in others)
            case 4:
                name = f"{noun}_{world.words(1)[0]}"
        if is_held_out(name) == world.evaluates:
            return name


def make_tools(world: World, *kinds: str) -> list[Tool]:
    """A tool of each kind, with different names, in any order."""
    tools = {tool.name: tool for tool in (make_tool(world, kind) for kind in kinds)}
    if len(tools) < len(kinds) or len({tool.thing for tool in tools.values() if tool.thing}) < sum(
        kind == "lookup" for kind in kinds
    ):
        return make_tools(world, *kinds)
    return world.rng.sample(list(tools.values()), len(tools))


def listing(tools: list[Tool]) -> str:
    return "\n".join(tool.line for tool in tools)


# -- questions for a tool -------------------------------------------------------------------------


def _values(world: World, kind: str) -> list[str]:
    """The arguments of a question."""
    rng = world.rng
    match kind:
        case "time" | "weather":
            if kind == "time" and rng.random() < 0.1:
                return [world.pick(("UTC", "CET", f"Europe/{world.city()}"))]
            more = f"{world.pick((' ', ', '))}{world.city()}" if rng.random() < 0.15 else ""
            return [world.city() + more]
        case "add" | "multiply":
            return [_number(world) for _ in range(2)]
        case "timer":
            return [str(rng.randint(1, 90))]
        case "send":
            return [world.name(), " ".join(world.words(rng.randint(1, 4)))]
        case "lookup":
            return [world.pick((world.name, world.city, lambda: " ".join(world.words(1))))()]
        case _:
            return []


def _number(world: World) -> str:
    rng = world.rng
    if rng.random() < 0.08:
        return f"{world.number()}.{rng.randrange(1, 10)}"
    short = rng.random() < 0.4 and not world.evaluates
    return str(rng.randrange(100) if short else world.number())


def _result(world: World, kind: str, values: list[str]) -> tuple[str, str]:
    """What a tool returns, and how an answer says it."""
    rng = world.rng
    found: dict[str, Any] = {"result": " ".join(world.words(rng.randint(1, 3)))}
    if kind in SUMS and rng.random() < 0.9:
        numbers = [json.loads(value) for value in values]
        total = round(sum(numbers) if kind == "add" else prod(numbers), 2)
        found = {world.pick(("result", "value", "sum", "answer")): total}
    elif kind == "time" and rng.random() < 0.8:
        clock = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        found = {world.pick(("time", "now", "result", "local_time")): clock}
    elif kind == "weather" and rng.random() < 0.8:
        sky = world.pick(word_list("skies"))
        degrees = world.pick(
            (rng.randint(-9, 39), f"{rng.randint(0, 39)} degrees", f"{rng.randint(0, 39)}°C")
        )
        pairs = [(world.pick(("sky", "weather", "condition")), sky),
                 (world.pick(("temperature", "degrees", "temp")), degrees)]  # fmt: skip
        found = dict(rng.sample(pairs, rng.randint(1, 2)))
    elif kind == "date" and rng.random() < 0.8:
        day = f"20{rng.randrange(20, 40)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        found = {world.pick(("date", "today", "result")): day}
    elif kind in ("send", "timer") and rng.random() < 0.7:
        found = {
            world.pick(("status", "result")): world.pick(("ok", "sent", "done", "set", "started"))
        }
    elif kind == "lookup":
        found = {
            key: world.pick((world.name(), world.city(), world.number(), *world.words(1)))
            for key in [world.pick(("result", "value", world.words(1)[0])), *world.words(1)]
        }
        found = dict(list(found.items())[: world.pick((1, 1, 2))])
    if rng.random() < 0.5:
        said = [f"{key} {value}" if len(found) > 1 else str(value) for key, value in found.items()]
        return json.dumps(found, ensure_ascii=False), ", ".join(said)
    plain = ", ".join(map(str, found.values()))
    return plain, plain


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, or a part of one, that a tool answers."""

    question: str
    tool: Tool
    values: list[str]

    def answer(self, said: str) -> str:
        template: str = words()["tools"][self.tool.kind]["answer"]
        return template.format(*self.values, thing=self.tool.thing, result=said)


def ask(world: World, tool: Tool) -> list[Asked]:
    """A question for a tool; where it has one parameter, sometimes of two values."""
    values = [_values(world, tool.kind)]
    if len(tool.parameters) == 1 and tool.kind != "timer" and world.rng.random() < 0.2:
        values.append(_values(world, tool.kind))
    if len(values) == 2 and values[0] == values[1]:
        return ask(world, tool)
    shown = [" and ".join(options) for options in zip(*values, strict=True)]
    fields: dict[str, object] = {f"v{number}": value for number, value in enumerate(shown)}
    question = world.phrase(f"tool.{tool.kind}", thing=tool.thing, **fields).text
    return [Asked(question if not number else "", tool, each) for number, each in enumerate(values)]


def called(world: World, parts: list[Asked]) -> Exchange:
    """The exchange of one or more parts, with all calls in one message."""
    results, answers = [], []
    for part in parts:
        if world.rng.random() < 0.04:
            reason = " ".join(world.words(2))
            results.append(world.pick((f"Error: {reason}", json.dumps({"error": reason}))))
            answers.append(f"The tool failed: {reason}.")
        else:
            result, said = _result(world, part.tool.kind, part.values)
            results.append(result)
            answers.append(part.answer(said))
    calls = "\n".join(part.tool.call(part.values) for part in parts)
    steps = (("assistant", calls), *(("tool", result) for result in results))
    question = " ".join(part.question for part in parts if part.question)
    return Exchange(question, " ".join(answers), None, steps)


def chained(world: World, tool: Tool) -> Exchange:
    """The sum of three numbers: the second call needs the result of the first."""
    numbers = [_number(world) for _ in range(3)]
    first, _ = _result(world, "add", numbers[:2])
    between = str(round(sum(map(json.loads, numbers[:2])), 2))
    first = first if first == between else json.dumps({"result": json.loads(between)})
    total = str(round(json.loads(between) + json.loads(numbers[2]), 2))
    calls = [tool.call(numbers[:2]), tool.call([between, numbers[2]])]
    steps = (("assistant", calls[0]), ("tool", first), ("assistant", calls[1]), ("tool", total))
    question = world.phrase("tool.add_three", a=numbers[0], b=numbers[1], c=numbers[2]).text
    return Exchange(question, f"{' + '.join(numbers)} = {total}.", None, steps)


def unanswered(world: World, kind: str, things: Sequence[str] = ()) -> Exchange:
    """A question for a tool that is not listed. things: for which there are tools."""
    thing = world.pick([word for word in world.words(9) if word not in things])
    fields: dict[str, object] = {f"v{n}": value for n, value in enumerate(_values(world, kind))}
    return Exchange(world.phrase(f"tool.{kind}", thing=thing, **fields).text, REFUSAL, None)


def beside(world: World, tools: list[Tool]) -> Exchange:
    """A question that none of the tools fits."""
    listed = {tool.kind for tool in tools} - {"lookup"}
    missing = [kind for kind in words()["tools"] if kind not in (*listed, "add")]
    if world.rng.random() < 0.35:
        return unanswered(world, world.pick(missing), [tool.thing for tool in tools])
    sums = () if "add" in listed else ("arithmetic",)
    return draw(world, world.pick((*BESIDE_TOOLS, *sums)))


def exchange(world: World, tools: list[Tool], way: str) -> Exchange:
    """way: one, two or three calls (the last one after another), or none."""
    if way == "none":
        return beside(world, tools)
    adding = [tool for tool in tools if tool.kind == "add"]
    if way == "three" and adding:
        return chained(world, adding[0])
    parts = ask(world, world.pick(tools))
    if way == "two" and len(parts) == 1:
        other = ask(world, world.pick(tools))[0]
        parts += [other] if (other.tool, other.values) != (parts[0].tool, parts[0].values) else []
    return called(world, parts)


def some_tools(world: World) -> list[Tool]:
    count = world.rng.choice((1, 1, 2, 2, 3, 3, 4, 5))
    kinds = world.rng.choices([*words()["tools"], "lookup", "time", "weather", "add"], k=count)
    kinds = [
        kind for number, kind in enumerate(kinds) if kind == "lookup" or kind not in kinds[:number]
    ]
    return make_tools(world, *kinds)
