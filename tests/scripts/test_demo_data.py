"""The training data of the demo model is right, and disjoint from its evaluation."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

from demo_model.batches import make_batches
from demo_model.conversation import WEIGHTS, any_with_tools, conversation, remembering
from demo_model.data import MAX_TOKENS, NOISE, make_shard
from demo_model.evaluation import FROZEN_HASH, SPLITS, cases, evaluation_hash, tokenized_cases
from demo_model.skills import CASELESS, SKILLS, Exchange, draw
from demo_model.tables import shown_commands, tables, todays_tables
from demo_model.world import (
    OPENINGS,
    World,
    expansions,
    held_out,
    held_out_words,
    is_held_out,
    plain,
    trained_phrases,
    words,
)
from minisgl.bench.config import BenchConfig, LatencyConfig, OfflineConfig, ReportConfig
from minisgl.bench.online.load_config import LoadConfig
from minisgl.bench.workload.config import WorkloadConfig
from minisgl.config import EngineConfig, option_names
from minisgl.models.hub import DEMO_FOLDER
from minisgl.ray.config import RayConfig
from minisgl.router.config import RouterConfig
from minisgl.server.config import ServerConfig
from minisgl.text.tokenizer import Tokenizer
from minisgl_cli.batch import BatchConfig
from minisgl_cli.chat.config import ChatConfig
from minisgl_cli.options import ConfigFile
from minisgl_cli.version import version

BATCH_TOKENS = 6144
BENCH_COMMANDS = ["bench", "bench serve"]
SERVE_COMMANDS = ["serve", "config"]
ENGINE_COMMANDS = [*SERVE_COMMANDS, "chat", "batch", "verify", "bench latency", *BENCH_COMMANDS]
TAKEN_BY: dict[Any, list[str]] = {
    EngineConfig: ENGINE_COMMANDS,
    ServerConfig: SERVE_COMMANDS,
    RouterConfig: SERVE_COMMANDS,
    RayConfig: SERVE_COMMANDS,
    ChatConfig: ["chat"],
    BatchConfig: ["batch"],
    BenchConfig: BENCH_COMMANDS,
    OfflineConfig: ["bench"],
    LatencyConfig: ["bench latency"],
    WorkloadConfig: BENCH_COMMANDS,
    LoadConfig: ["bench serve"],
    ReportConfig: ["bench", "bench latency", "bench serve"],
}
# Skills where the question alone, and no word around it, tells what is right.
CLOSED_SKILLS = (*CASELESS, "option", "spell", "arithmetic")


@pytest.fixture(scope="module")
def trained() -> list[list[dict[str, str]]]:
    """Some of what training sees."""
    world = World(random.Random(1), noise=NOISE)
    return [conversation(world).messages() for _ in range(2000)]


@pytest.fixture(scope="module")
def trained_questions(trained: list[list[dict[str, str]]]) -> set[str]:
    return {
        plain(message["content"])
        for message in chain.from_iterable(trained)
        if message["role"] == "user"
    }


def test_the_evaluation_is_the_frozen_one() -> None:
    assert evaluation_hash() == FROZEN_HASH, (
        "The questions of the evaluation, or the snapshot of options that they ask for, have "
        "changed: set FROZEN_HASH in scripts/demo/demo_model/evaluation.py and retrain the demo "
        "model (see scripts/demo/README.md)."
    )


def test_phrasings_of_the_evaluation_are_not_in_the_training_data() -> None:
    trained = trained_phrases()
    assert trained.keys() == held_out()["phrases"].keys()
    for skill, intents in held_out()["phrases"].items():
        assert trained[skill].keys() == intents.keys()
        for intent, templates in intents.items():
            known = {plain(text) for known in trained[skill][intent] for text in expansions(known)}
            new = {plain(text) for template in templates for text in expansions(template)}
            assert not known & new, (skill, intent)


def test_words_of_the_evaluation_are_not_in_the_training_data(
    trained: list[list[dict[str, str]]],
) -> None:
    new = held_out_words()
    seen = {
        word
        for message in chain.from_iterable(trained)
        for word in re.findall(r"[a-z]+", message["content"].lower())
    }
    assert new & seen == set()


def test_numbers_of_the_evaluation_are_not_in_the_training_data(
    trained_questions: set[str],
) -> None:
    """In no question at all, besides what the options themselves say."""
    world = World(random.Random(0), evaluates=True)
    evaluated = {str(world.number()) for _ in range(5000)}
    known = set(re.findall(r"\d+", str(tables())))
    trained = {number for text in trained_questions for number in re.findall(r"\d+", text)}
    assert len(trained) > 400
    assert not (trained - known) & evaluated


def test_favourites_of_the_evaluation_are_of_known_kinds() -> None:
    world, evaluated = World(random.Random(0)), World(random.Random(0), evaluates=True)
    assert set(evaluated.favourite_kinds()) < set(world.favourite_kinds())


def test_instances_of_the_evaluation_are_not_in_the_training_data(
    trained_questions: set[str],
) -> None:
    asked = {plain(case.messages[-1]["content"]) for case in cases() if case.skill in SKILLS}
    assert not asked & trained_questions
    sums = {
        tuple(re.findall(r"\d+|[+-]", case.answer)[:3])
        for case in cases()
        if case.skill == "arithmetic" and case.split == "instances" and "=" in case.answer
    }
    world = World(random.Random(2))
    trained_sums = {
        tuple(re.findall(r"\d+|[+-]", draw(world, "arithmetic").answer)[:3]) for _ in range(5000)
    }
    assert len(sums) > 40
    assert not sums & trained_sums


def test_normalized_instances_of_the_evaluation_are_not_in_the_training_data(
    trained_questions: set[str],
) -> None:
    """Held-out questions are not in the training data after a removed opening either."""
    asked = {plain(case.messages[-1]["content"]) for case in cases() if case.skill in CLOSED_SKILLS}
    openings = [plain(opening) for opening in OPENINGS]
    assert any(text.startswith(tuple(openings)) for text in trained_questions)
    for text in trained_questions:
        for opening in openings:
            assert text.removeprefix(f"{opening} ") not in asked

    world = World(random.Random(6), noise=1.0)
    num_worn = 0
    for _ in range(300):
        for skill in CLOSED_SKILLS:
            exchange = draw(world, skill)
            assert exchange.key is not None
            assert not is_held_out(exchange.key) and not is_held_out(exchange.question)
            num_worn += plain(exchange.key) != plain(exchange.question)
    assert num_worn > 500


def test_common_first_questions_are_in_the_training_data() -> None:
    templates = chain.from_iterable(
        chain.from_iterable(trained_phrases()[skill].values()) for skill in CASELESS[:2]
    )
    refused = trained_phrases()["refusal"]["unknown"]
    known = {plain(text) for text in chain.from_iterable(map(expansions, [*templates, *refused]))}
    first = words()["first_messages"]
    assert set(first) <= known
    assert not any(is_held_out(text) for text in first)


def test_the_evaluation_has_no_duplicates() -> None:
    for split in SPLITS:
        asked = [
            tuple(plain(message["content"]) for message in case.messages)
            for case in cases()
            if case.split == split
        ]
        assert len(set(asked)) > 0.99 * len(asked)  # two skills may share a system prompt


def test_a_phrasing_belongs_to_one_intent() -> None:
    """Training and evaluation never have different answers to one text."""
    owners: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for phrases in (trained_phrases(), held_out()["phrases"]):
        for skill, intents in phrases.items():
            for intent, templates in intents.items():
                # With and without marks, what is copied is the same.
                owner = (skill, "repeat" if skill == "copy" else intent)
                for text in chain.from_iterable(map(expansions, templates)):
                    owners[plain(text)].add(owner)
    assert {text: found for text, found in owners.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("evaluates", "new_phrases"), [(False, False), (True, False), (True, True)]
)
def test_a_question_has_one_answer(evaluates: bool, new_phrases: bool) -> None:
    world = World(random.Random(5), evaluates, new_phrases)
    answers: dict[str, set[str]] = defaultdict(set)
    for _ in range(2000):
        for skill in CLOSED_SKILLS:
            exchange = draw(world, skill)
            answers[plain(exchange.question)].add(exchange.answer.lower())
    assert {text: found for text, found in answers.items() if len(found) > 1} == {}


def test_a_new_snapshot_has_every_option_of_every_command() -> None:
    today = todays_tables()
    options = {entry["names"][0]: entry for entry in today["options"]}
    expected = {
        (option_names(spec)[0], command, spec.metadata["help"])
        for config, commands in TAKEN_BY.items()
        for spec in fields(config)
        for command in commands
    }
    # The two options that are no field of a config.
    (code_of,) = get_type_hints(version, include_extras=True)["model"].__metadata__
    expected.add(("--model", "version", code_of.help))
    (of_file,) = ConfigFile.__metadata__
    expected |= {("--config", command, of_file.help) for command in ENGINE_COMMANDS}
    found = {
        (name, command, row["text"])
        for name, entry in options.items()
        for row in entry["helps"]
        for command in row["commands"]
    }
    assert found == expected
    for entry in options.values():
        for rows in (entry["defaults"], entry["helps"]):
            assert sorted(chain.from_iterable(row["commands"] for row in rows)) == sorted(
                entry["commands"]
            )
    names = [name for entry in options.values() for name in entry["names"]]
    assert len(set(names)) == len(names)
    assert list(today["commands"]) == list(shown_commands())
    batch_sizes = ",".join(map(str, LatencyConfig().batch_size))
    assert options["--batch-size"]["defaults"][0]["text"] == batch_sizes


def test_the_snapshot_has_one_meaning_for_each_answer() -> None:
    helps = [row["text"] for entry in tables()["options"] for row in entry["helps"]]
    assert len(set(helps)) == len(helps)  # or 'which option is this' had two answers


def test_an_option_that_differs_between_commands_names_its_command() -> None:
    chat = "--temperature of chat has no default."
    bench = "The default of --temperature of bench and bench serve is 0.6."
    world = World(random.Random(7))
    seen = set()
    for _ in range(20_000):
        exchange = draw(world, "option")
        if re.search("temperature.*default|default.*temperature", exchange.question):
            named = re.search(r"\b(chat|bench)\b", exchange.question)
            right = {"chat": chat, "bench": bench}[named[1]] if named else f"{chat} {bench}"
            assert exchange.answer == right
            seen.add(right)
    assert len(seen) == 3


@pytest.mark.parametrize("new_phrases", [False, True])
def test_every_chat_command_is_in_the_training_data(
    new_phrases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tables() | {
        "chat_commands": {"/undo": "takes back {it}: [a|b]", "/set": "sets NAME to VALUE."}
    }
    monkeypatch.setattr("demo_model.skills.tables", lambda: table)
    world = World(random.Random(8), evaluates=new_phrases, new_phrases=new_phrases)
    answers = {draw(world, "command").answer for _ in range(1000)}
    assert {
        *("/undo: takes back {it}: [a|b].", "/set: sets NAME to VALUE."),
        *("That is /undo.", "That is /set.", "The commands of the chat are /undo and /set."),
    } <= answers


def test_every_skill_is_evaluated_on_both_splits() -> None:
    groups = {(case.split, case.skill) for case in cases()}
    skills = (*SKILLS, "tool", "recall", "system")
    assert groups == {(split, skill) for split in SPLITS for skill in skills}
    assert set(WEIGHTS) == set(SKILLS)


@pytest.mark.parametrize("evaluates", [False, True])
def test_generated_answers_are_right(evaluates: bool) -> None:
    """Checked in another way than they are made."""
    world = World(random.Random(3), evaluates=evaluates)
    for _ in range(300):
        sum_ = draw(world, "arithmetic").answer.rstrip(".")
        if "=" in sum_:
            left, right = sum_.split("=")
            assert eval(left) == int(right)

        copied = draw(world, "copy")
        assert copied.answer in copied.question

        turned = draw(world, "reverse")
        separator = ", " if ", " in turned.answer else " "
        assert separator.join(turned.answer.split(separator)[::-1]) in turned.question

        spelled = draw(world, "spell")
        word = spelled.answer.replace("-", "")
        if re.search(
            "backwards|reverse|last to first|turn around|(at|from) the (end|back)|from behind",
            spelled.question,
            re.I,
        ):
            word = word[::-1]
        assert word in re.sub(r"[- ]", "", spelled.question)

        check_sorted(draw(world, "sort"))
        check_counted(draw(world, "count"))
        fact = draw(world, "fact")
        if match := re.fullmatch(r"(\w+) comes (after|before) (\w+)\.", fact.answer):
            assert (match[2] == "before") == ("before" in fact.question.lower())
            order = next(order for order in ORDERS if match[1] in order)
            step = order.index(match[1]) - order.index(match[3])
            assert step % len(order) == (1 if match[2] == "after" else len(order) - 1)


ORDERS = (
    "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    (
        "January February March April May June July August September October November December"
    ).split(),
    list("abcdefghijklmnopqrstuvwxyz"),
    [str(number) for number in range(100)],
)
DOWNWARDS = "descending|large(st)? to small|high to low|downwards|(largest|biggest) first|beginning"


def check_sorted(exchange: Exchange) -> None:
    numbers = [int(number) for number in re.findall(r"\d+", exchange.question)]
    if match := re.fullmatch(r"The (largest|smallest) is (\d+)\.", exchange.answer):
        assert int(match[2]) == (max if match[1] == "largest" else min)(numbers)
    elif numbers:
        downwards = re.search(DOWNWARDS, exchange.question, re.IGNORECASE) is not None
        answered = [int(number) for number in re.findall(r"\d+", exchange.answer)]
        assert answered == sorted(numbers, reverse=downwards)
    else:
        answered_words = re.findall(r"\w+", exchange.answer)
        assert answered_words == sorted(answered_words)
        assert set(answered_words) <= set(re.findall(r"\w+", exchange.question))


def check_counted(exchange: Exchange) -> None:
    """The items of a question are its key; letters and steps are in the answer itself."""
    items = re.findall(r"\w+", exchange.key or "")
    if match := re.fullmatch(r"(\w+) has (\d+) letters\.", exchange.answer):
        assert len(match[1]) == int(match[2])
    elif match := re.fullmatch(r"(\w+) occurs (\d+) times?\.", exchange.answer):
        assert items.count(match[1]) == int(match[2])
    elif match := re.fullmatch(r"There (?:are|is) (\d+) \w+\.", exchange.answer):
        assert len(items) == int(match[1])
    else:
        steps = np.diff([int(number) for number in re.findall(r"\d+", exchange.answer)])
        assert abs(steps[0]) == 1 and (steps == steps[0]).all()
        assert re.search("down|backwards", exchange.question) is None or steps[0] == -1


def test_the_last_stated_fact_is_the_one_recalled() -> None:
    world = World(random.Random(4))
    for _ in range(200):
        *told, last = remembering(world, 300).exchanges
        if match := re.fullmatch(r"Your name is (\w+)\.", last.answer):
            names = [re.findall(r"(?:All right|meet you), (\w+)\.", item.answer) for item in told]
            known = [name for found in names for name in found]
            assert not known or known[-1] == match[1]


def test_a_shard_equals_its_rendered_conversations() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    shard = make_shard(DEMO_FOLDER, 7, 0, 20_000)
    again = make_shard(DEMO_FOLDER, 7, 0, 20_000)
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(shard, again, strict=True))
    for ids, learned in shard[:50]:
        assert len(ids) == len(learned) <= MAX_TOKENS
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", text, re.S)
        messages = [{"role": role, "content": content} for role, content in turns]
        prompt = tokenizer.chat(messages[:-1])
        assert ids[: len(prompt)].tolist() == prompt
        first = [role for role, _ in turns].index("user")
        assert not learned[: len(tokenizer.chat(messages[: first + 1]))].any()
        assert learned[len(prompt) :].all()


CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")


def test_calls_have_the_names_of_the_listed_tools() -> None:
    """And their required parameters; the answer has every result, or says what failed."""
    world = World(random.Random(5), noise=NOISE)
    seen: Counter[str] = Counter()
    for _ in range(400):
        whole = any_with_tools(world)
        listed = dict(re.findall(r"^(\w+)\((.*?)\): ", whole.tools, re.M))
        for exchange in whole.exchanges:
            calls = [text for role, text in exchange.steps if role == "assistant"]
            for call in map(json.loads, CALL.findall("\n".join(calls))):
                shown = [name for name, _ in re.findall(r"(\w+)(\??): ", listed[call["name"]])]
                optional = re.findall(r"(\w+)\?", listed[call["name"]])
                assert list(call["arguments"]) == [name for name in shown if name not in optional]
                for value in call["arguments"].values():
                    chained = len(calls) > 1 and call == json.loads(CALL.findall(calls[1])[0])
                    assert str(value) in exchange.question or chained
                seen[call["name"]] += 1
            results = [text for role, text in exchange.steps if role == "tool"]
            assert len(results) == len(CALL.findall("\n".join(calls)))
            for result in results if len(calls) < 2 else results[-1:]:
                for value in re.findall(r"[\w.-]*\w", re.sub(r'"\w+": ', "", result)):
                    assert value in exchange.answer or value == "Error", (result, exchange.answer)
    assert len(seen) > 150


def test_answers_in_json_have_what_was_told() -> None:
    world, wished = World(random.Random(6)), 0
    for _ in range(400):
        exchange = draw(world, "json")
        values = json.loads(exchange.answer)
        for value in values if isinstance(values, list) else values.values():
            if re.search("name|city|age|job", exchange.question) and value is not None:
                wished += str(value) in exchange.question
    assert wished > 200


def test_the_chat_template_writes_tools_as_the_training_data_does() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"type": "string"}, "n": {}},
        "required": ["city", "n"],
    }
    described = {"name": "get_time", "description": "Tells the time.", "parameters": parameters}
    tools = [{"type": "function", "function": f} for f in (described, {"name": "get_date"})]
    calls = [
        {"id": str(number), "type": "function", "function": {"name": "get_time", "arguments": a}}
        for number, a in enumerate(({"city": "Kyoto", "n": 1}, {"city": "Zürich", "n": 2}))
    ]
    question = {"role": "user", "content": "What time is it?"}
    results = [{"role": "tool", "tool_call_id": n, "content": f"1{n}:05"} for n in "01"]
    answer = {"role": "assistant", "content": None, "tool_calls": calls}
    lines = "get_time(city: string, unit?: string, n: any): Tells the time.\nget_date(): "
    head, tail = '<tool_call>\n{"name": "get_time", "arguments": {"city": ', "}}\n</tool_call>"
    said = "\n".join(f"{head}{given}{tail}" for given in ('"Kyoto", "n": 1', '"Zürich", "n": 2'))
    as_trained = [{"role": "tools", "content": lines}, question]
    as_trained += [{"role": "assistant", "content": said}, *results]
    given = tokenizer.chat([question, answer, *results], tools=tools)
    assert given == tokenizer.chat(as_trained)
    assert tokenizer.token_text(tokenizer.encode(said)[0]) == "<tool_call>"


def test_evaluation_cases_equal_the_prompts_of_the_engine() -> None:
    tokenizer = Tokenizer.load(DEMO_FOLDER)
    for case, tokenized in zip(cases(), tokenized_cases(DEMO_FOLDER), strict=True):
        prompt = tokenized.ids[: -tokenized.num_answer].tolist()
        assert prompt == tokenizer.chat(case.messages)
        assert tokenizer.decode(tokenized.ids[-tokenized.num_answer : -1].tolist()) == case.answer
        assert len(tokenized.ids) <= MAX_TOKENS
    assert max(len(case.ids) for case in tokenized_cases(DEMO_FOLDER)) > 1700


def test_batches_contain_every_conversation_once(tmp_path: Path) -> None:
    shard = make_shard(DEMO_FOLDER, 5, 3, 30_000)
    batches = make_batches(DEMO_FOLDER, 5, 3, 30_000, BATCH_TOKENS)
    rows = []
    for ids, targets, length in zip(batches.ids, batches.targets, batches.lengths, strict=True):
        assert len(ids) == BATCH_TOKENS
        for row, target in zip(ids.reshape(-1, length), targets.reshape(-1, length), strict=True):
            if row.any():
                end = np.flatnonzero(row)[-1] + 1
                rows.append((row[:end].tolist(), np.flatnonzero(target != -100).tolist()))
                learned = target != -100
                assert (target[:-1][learned[:-1]] == row[1:][learned[:-1]]).all()
                assert not learned[end - 1 :].any()
    expected = [(ids.tolist(), (np.flatnonzero(learned) - 1).tolist()) for ids, learned in shard]
    assert sorted(rows) == sorted(expected)
    assert batches.num_tokens == sum(len(ids) for ids, _ in shard)


def test_a_held_out_instance_is_recognized_in_every_spelling() -> None:
    for text in ("What is minisgl?", "12+30", "a b c"):
        assert is_held_out(text) == is_held_out(text.upper() + "!") == is_held_out(f" {text} ")
