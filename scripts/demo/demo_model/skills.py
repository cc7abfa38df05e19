"""Makes exchanges of each skill: a question and the one right answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from demo_model.tables import tables
from demo_model.world import Phrase, World, is_held_out, word_list, words

ANSWERS = {
    "smalltalk": {
        "hello": "Hello! How can I help you?",
        "good_morning": "Good morning! How can I help you?",
        "good_evening": "Good evening! How can I help you?",
        "good_night": "Good night! Sleep well.",
        "how_are_you": "I am fine, thank you. How are you?",
        "i_am_fine": "I am glad to hear that.",
        "i_am_happy": "That is good to hear!",
        "i_am_sad": "I am sorry to hear that. I hope it gets better soon.",
        "thanks": "You are welcome!",
        "bye": "Goodbye! Have a nice day.",
        "praise": "Thank you, that is kind of you.",
        "sorry": "No problem at all.",
        "nice_to_meet_you": "Nice to meet you too!",
        "joke": "Why did the GPU cross the road? To get to the other cache.",
        "okay": "Good. What would you like to do next?",
        "are_you_there": "Yes, I am here.",
        "feelings": "I have no feelings, but I like to help.",
        "doing": "I am waiting for your next question.",
        "bored": "We could count, sort or spell together.",
        "no": "All right.",
        "insult": "I am sorry. I am only a small demo model.",
    },
    "identity": {
        "who": "I am the minisgl demo model, a small language model.",
        "what_is_minisgl": "minisgl is a compact and fast inference engine for language models.",
        "maker": "The makers of minisgl trained me.",
        "abilities": "I can chat, remember what you tell me, count, sort, spell, copy, reverse, "
        "add, subtract, call tools, answer in JSON, and answer questions about minisgl.",
        "age": "I am as old as this version of minisgl.",
        "memory": "Yes. Tell me something, and ask me for it later.",
        "size": "I have about five million parameters, which is very small.",
        "human": "No, I am a small language model.",
        "training": "I was trained on conversations that a script made up.",
        "other_model": "Start minisgl with --model and a folder or a Hugging Face id.",
        "languages": "I speak only English.",
        "not_others": "No, I am the minisgl demo model.",
        "licence": "minisgl is free under the Apache 2.0 licence.",
        "hardware": "minisgl runs on NVIDIA GPUs, and on CPUs more slowly.",
        "models": "minisgl runs models of the Llama, Mistral, Qwen, Gemma, gpt-oss, DeepSeek and "
        "Kimi families, and many more.",
        "limits": "I am very small. I know only what I was trained for.",
    },
}
# Skills whose questions do not depend on case.
CASELESS = ("smalltalk", "identity", "fact", "refusal", "command")
REFUSAL = "I am sorry, I do not know that. I am only a small demo model."
TOO_LARGE = "I can add and subtract only numbers up to 99."

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
MONTH_DAYS = ("31", "28 or 29", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh last".split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Exchange:
    question: str
    answer: str
    # Identifies the instance: the question before `wear_down`, or its subject. None if the words
    # already do, as names and numbers, for which training and evaluation have separate lists.
    key: str | None
    # What comes between, as (role, content): calls of tools and their results.
    steps: tuple[tuple[str, str], ...] = ()


def asked(phrase: Phrase, answer: str) -> Exchange:
    """Make an exchange that is identified by its question."""
    return Exchange(phrase.text, answer, phrase.unworn)


# -- closed skills: the question decides ----------------------------------------------------------


def _fixed(world: World, skill: str) -> Exchange:
    intent = world.pick(list(ANSWERS[skill]))
    return asked(world.phrase(f"{skill}.{intent}"), ANSWERS[skill][intent])


def option(world: World) -> Exchange:
    # An option with several meanings (by command) is drawn proportionally more often.
    entry = world.pick([item for item in tables()["options"] for _ in item["helps"]])
    name = entry["names"][0]
    asked_for = world.pick(("does", "does", "default", "which", "commands_of", "how"))
    if asked_for == "which":
        meaning = world.pick(entry["helps"])["text"]
        return asked(world.phrase("option.which", meaning=meaning), f"That is {name}.")

    said = world.pick(entry["names"])
    bare = said[2:].replace("-", " ")
    if world.rng.random() < (1 / 6 if "-" in said[2:] else 1 / 3):
        said = world.pick((f"the {bare} option", f"the option {bare}"))
    command, intent = "", asked_for
    share_in_one = 0.5 if len(entry["helps"]) > 1 else 0.15
    if asked_for != "commands_of" and world.rng.random() < share_in_one:
        command, intent = world.pick(entry["commands"]), f"{asked_for}_in"
    of = f"minisgl {command}" if world.rng.random() < 0.3 else command
    question = world.phrase(f"option.{intent}", option=said, bare=bare, command=of)
    match asked_for:
        case "does":
            answer = _each_sense(entry, entry["helps"], command, _meaning)
        case "default":
            answer = _each_sense(entry, entry["defaults"], command, _default)
        case "how":
            answer = f"With {name}."
        case _:
            answer = f"{name} belongs to {listed(entry['commands'])}."
    return asked(question, answer)


def _each_sense(
    entry: dict[str, Any],
    rows: list[dict[str, Any]],
    command: str,
    sentence: Callable[[str, str], str],
) -> str:
    """The sentence for `command`; without a command, a sentence per row, naming its commands."""
    name = entry["names"][0]
    return " ".join(
        sentence(f"{name} of {listed(row['commands'])}" if len(rows) > 1 else name, row["text"])
        for row in rows
        if not command or command in row["commands"]
    )


def _meaning(option: str, help: str) -> str:
    return f"{option}: {help}"


def _default(option: str, default: str) -> str:
    if default in ("on", "off"):
        return f"{option} is {default} by default."
    return f"The default of {option} is {default}." if default else f"{option} has no default."


def command(world: World) -> Exchange:
    commands, chat_commands = tables()["commands"], tables()["chat_commands"]
    asked_for = world.pick(("does", "does", "does", "does_chat", "does_chat", "how", "how", "all"))
    match asked_for:
        case "does":
            name = world.pick(list(commands))
            said, does = f"minisgl {name}", commands[name]
            question = world.phrase("command.does", command=said)
            return asked(question, f"{said}: {does.rstrip('.')}.")
        case "does_chat":
            name = world.pick(list(chat_commands))
            does = chat_commands[name].rstrip(".")
            if world.rng.random() < 0.4:
                return asked(world.phrase("command.which_chat", does=does), f"That is {name}.")
            return asked(world.phrase("command.does", command=name), f"{name}: {does}.")
        case "how":
            name = world.pick(list(commands))
            intent = name.replace(" ", "_")
            return asked(world.phrase(f"command.{intent}"), f"Run minisgl {name}.")
        case _:
            if world.rng.random() < 0.5:
                chat = f"The commands of the chat are {listed(list(chat_commands))}."
                return asked(world.phrase("command.all_chat"), chat)
            answer = f"The commands of minisgl are {listed(list(commands))}."
            return asked(world.phrase("command.all"), answer)


def refusal(world: World) -> Exchange:
    question = world.phrase(
        "refusal.unknown",
        name=world.name(),
        city=world.city(),
        place=world.pick(word_list("places")),
        thing=world.words(1)[0],
        word=world.words(1)[0],
        number=world.number(),
    )
    return asked(question, REFUSAL)


def fact(world: World) -> Exchange:
    kind = world.pick(
        "capital capital capital country country after after before before nth_month month_days "
        "unit opposite opposite legs sound colour".split()
    )
    fields: dict[str, object]
    match kind:
        case "capital":
            country, city = _listed_pair(world, "capitals")
            fields, answer = {"country": country}, f"The capital of {country} is {city}."
        case "country":
            country, city = _listed_pair(world, "capitals")
            fields, answer = {"city": city}, f"{city} is the capital of {country}."
        case "after" | "before":
            fields, answer = _neighbour(world, kind)
        case "nth_month":
            place = world.rng.randrange(12)
            nth = ORDINALS[place]
            fields, answer = {"nth": nth}, f"The {nth} month is {MONTHS[place]}."
        case "month_days":
            place = world.rng.randrange(12)
            month = MONTHS[place]
            fields, answer = {"month": month}, f"{month} has {MONTH_DAYS[place]} days."
        case "unit":
            large, (count, small) = _listed_pair(world, "units")
            article = "an" if large == "hour" else "a"
            fields = {"small": small, "large": large, "one": f"one {large}"} | _both_cases(article)
            answer = f"There are {count} {small} in {article} {large}."
        case "opposite":
            pair = list(_listed_pair(world, "opposites"))
            world.rng.shuffle(pair)
            fields, answer = {"word": pair[0]}, f"The opposite of {pair[0]} is {pair[1]}."
        case "colour":
            thing, colour = _listed_pair(world, "colours")
            fields, answer = {"object": thing}, f"{thing[0].upper()}{thing[1:]} is {colour}."
        case _:
            animal, known = _listed_pair(world, "legs" if kind == "legs" else "sounds")
            article = "an" if animal[0] in "aeiou" else "a"
            fields = {"animal": animal} | _both_cases(article)
            does = f"has {known} legs" if kind == "legs" else f"says {known}"
            answer = f"{article.capitalize()} {animal} {does}."
    return asked(world.phrase(f"facts.{kind}", **fields), answer)


def _listed_pair(world: World, name: str) -> tuple[str, Any]:
    pair: tuple[str, Any] = world.pick(list(words()[name].items()))
    return pair


def _both_cases(article: str) -> dict[str, object]:
    return {"article": article, "article_upper": article.capitalize()}


def _neighbour(world: World, side: str) -> tuple[dict[str, object], str]:
    """side: after or before."""
    kind = world.pick(("day", "month", "letter", "number"))
    order = {"day": DAYS, "month": MONTHS, "letter": LETTERS, "number": range(100)}[kind]
    wraps = kind in ("day", "month")
    place = world.rng.randrange(len(order)) if wraps else world.rng.randint(1, len(order) - 2)
    item, other = order[place], order[(place + (1 if side == "after" else -1)) % len(order)]
    return {"kind": kind, "item": item}, f"{other} comes {side} {item}."


# -- open skills: the answer is made of what the question brings ----------------------------------


def arithmetic(world: World) -> Exchange:
    def question(intent: str, a: object, b: object) -> Phrase:
        stuff = {"things": world.pick(word_list("things")), "name": world.name()}
        return world.phrase(f"arithmetic.{intent}", a=a, b=b, **stuff)

    if world.rng.random() < 0.05:
        small = world.rng.random() < 0.4
        large = world.number(min_digits=3)
        other = world.rng.randrange(100) if small else world.number()
        return asked(question(world.pick(("plus", "minus")), large, other), TOO_LARGE)
    a, b = world.rng.randrange(100), world.rng.randrange(100)
    if world.rng.random() < 0.2:
        a, b = a % 10, b % 10
    if world.rng.random() < 0.5:
        intent, sign, result = "plus", "+", a + b
    else:
        if world.rng.random() < 0.8:
            a, b = max(a, b), min(a, b)
        told = a >= b and world.rng.random() < 0.3
        intent, sign, result = "minus_story" if told else "minus", "-", a - b
    phrase = question(intent, spoken(world, a), spoken(world, b))
    return Exchange(phrase.text, f"{a} {sign} {b} = {result}.", f"{a}{sign}{b}")


def spoken(world: World, number: int) -> str:
    """A number as people write it: small ones sometimes as a word."""
    as_word = number < len(NUMBER_WORDS) and world.rng.random() < 0.15
    return NUMBER_WORDS[number] if as_word else str(number)


def copy(world: World) -> Exchange:
    # Text that has an answer of its own is quoted; otherwise "Say hello" would be ambiguous.
    answerable = world.rng.random() < 0.1
    text = _answerable(world) if answerable else _some_text(world)
    intent = "copy.repeat" if answerable or world.rng.random() < 0.8 else "copy.bare"
    return Exchange(world.phrase(intent, text=text).text, text, text)


def reverse(world: World) -> Exchange:
    items = _some_items(world, world.rng.randint(2, 8))
    separator = world.pick((" ", ", "))
    question = world.phrase("reverse.items", text=separator.join(items))
    return Exchange(question.text, separator.join(reversed(items)), " ".join(items))


def spell(world: World) -> Exchange:
    word = _listed_word(world)
    match world.pick(("word", "word", "join", "backwards")):
        case "word":
            return asked(world.phrase("spell.word", word=word), "-".join(word))
        case "backwards":
            return asked(world.phrase("spell.backwards", word=word), "-".join(word[::-1]))
        case _:
            letters = world.pick("- ").join(word)
            return asked(world.phrase("spell.join", letters=letters), word)


def _listed_word(world: World) -> str:
    """A word of the vocabulary; in training also invented ones, so that letters are learned."""
    others = not world.evaluates and world.rng.random() < 0.4
    return world.words(1)[0] if others else str(world.pick(word_list("text")))


def count(world: World) -> Exchange:
    return world.pick((_count_range, _count_range, _count_items, _count_times, _count_letters))(
        world
    )


def _count_range(world: World) -> Exchange:
    rng = world.rng
    first = rng.choice((rng.randint(0, 20), rng.randint(0, 90)))
    last = min(first + rng.choice((rng.randint(2, 10), rng.randint(2, 24))), 99)
    if rng.random() < 0.03:
        first, last = 1, rng.randint(20, 99)
    match rng.randrange(4):
        case 0:
            last, intent = last - first + 2, "up_from_one"
            first = 1
        case 1 | 2:
            intent = "up"
        case _:
            first, last, intent = last, first, "down"
    step = 1 if last > first else -1
    numbers = ", ".join(map(str, range(first, last + step, step)))
    fields = {"first": spoken(world, first), "last": spoken(world, last)}
    return asked(world.phrase(f"count.{intent}", **fields), f"{numbers}.")


def _count_items(world: World) -> Exchange:
    kind = world.pick(("words", "letters", "numbers", "names"))
    items = _some_items(world, world.rng.randint(1, 10), kind)
    text = world.pick((" ", ", ")).join(items)
    answer = f"There are {len(items)} {kind}." if len(items) > 1 else f"There is 1 {kind[:-1]}."
    return Exchange(world.phrase("count.items", kind=kind, text=text).text, answer, text)


def _count_times(world: World) -> Exchange:
    rng = world.rng
    item, *others = _some_items(world, rng.randint(2, 4), rng.choice(("words", "letters")))
    times = rng.randint(1, 5)
    listed = [item] * times + [rng.choice(others) for _ in range(rng.randint(1, 5))]
    rng.shuffle(listed)
    text = rng.choice((" ", ", ")).join(listed)
    answer = f"{item} occurs {times} time{'s' if times > 1 else ''}."
    return Exchange(world.phrase("count.times", item=item, text=text).text, answer, text)


def _count_letters(world: World) -> Exchange:
    word = _listed_word(world)
    return asked(world.phrase("count.letters", word=word), f"{word} has {len(word)} letters.")


def sort(world: World) -> Exchange:
    rng = world.rng
    separator = rng.choice((" ", ", "))
    kind = rng.choice(("up", "up", "down", "largest", "smallest", "words"))
    if kind == "words":
        pool = list(LETTERS) if rng.random() < 0.3 else [_listed_word(world) for _ in range(20)]
        by_letter = {item[0]: item for item in pool}
        items = rng.sample(sorted(by_letter.values()), min(rng.randint(3, 6), len(by_letter)))
        ordered = sorted(items)
    else:
        limit = rng.choice((10, 100, 100))
        numbers = rng.sample(range(limit), rng.randint(3, 7))
        items = [str(number) for number in numbers]
        ordered = [str(number) for number in sorted(numbers, reverse=kind in ("down", "largest"))]
    question = world.phrase(f"sort.{kind}", text=separator.join(items))
    answer = separator.join(ordered)
    if kind in ("largest", "smallest"):
        answer = f"The {kind} is {ordered[0]}."
    return Exchange(question.text, answer, " ".join(items))


def passage(world: World) -> Exchange:
    """State who lives where, and ask for one of them in the same message."""
    rng = world.rng
    homes: dict[str, str] = {}
    wanted = rng.randint(1, 4)
    while len(homes) < wanted:
        name, city = world.name(), world.city()
        if city not in homes.values():
            homes[name] = city
    told = [world.phrase("recall.passage_city", name=n, city=c).text for n, c in homes.items()]
    name, city = rng.choice(list(homes.items()))
    intent = rng.choice(("passage_city_ask", "passage_who_ask"))
    question = world.phrase(f"recall.{intent}", name=name, city=city)
    return Exchange(" ".join([*told, question.text]), f"{name} lives in {city}.", None)


# -- answers in JSON ------------------------------------------------------------------------------

# What a key may be called; any other says what it is.
KEY_NAMES = {
    "name": "name name name person who full_name",
    "city": "city city city town home place location",
    "age": "age age age years",
    "job": "job job work profession occupation",
    "answer": "answer answer reply response text message output",
    "result": "result result sum total value number",
    "items": "items list words",
}


def key_name(world: World, what: str) -> str:
    return str(world.pick(KEY_NAMES.get(what, what).split()))


def as_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def keys_phrase(world: World, keys: list[str]) -> str:
    """Ask for JSON with these keys."""
    quoted = world.rng.random() < 0.15
    names = [f'"{key}"' if quoted else key for key in keys]
    shown = listed(names) if world.rng.random() < 0.6 else ", ".join(names)
    return world.phrase("json.keys" if len(keys) > 1 else "json.one", keys=shown).text


def in_json(world: World) -> Exchange:
    kind = world.pick(("record", "record", "record", "sentence", "value", "list"))
    if kind == "record":
        told, wish, answer = record(world)
        return Exchange(
            " ".join((wish, told) if world.rng.random() < 0.3 else (told, wish)), answer, None
        )
    if kind == "list":
        items = _some_items(world, world.rng.randint(2, 6))
        question = world.phrase("json.list", items=", ".join(items))
        values = [int(item) if item.isdigit() else item for item in items]
        return Exchange(question.text, as_json(values), ", ".join(items))
    if kind == "sentence":
        found = SKILLS[world.pick(("smalltalk", "identity", "fact", "arithmetic"))](world)
        plain = world.rng.random() < 0.4
        key = "answer" if plain else key_name(world, "answer")
        wish = world.phrase("json.plain").text if plain else keys_phrase(world, [key])
        values = {key: found.answer}
    else:
        if world.rng.random() < 0.5:
            found = arithmetic(world)
            if found.answer == TOO_LARGE:
                return in_json(world)
            known = {key_name(world, "result"): int(found.answer.rstrip(".").split("= ")[1])}
        else:
            country, city = _listed_pair(world, "capitals")
            intent = world.pick(("capital", "country"))
            found = asked(world.phrase(f"facts.{intent}", country=country, city=city), "")
            known = {"country": country, "capital": city}
        keys = world.rng.sample(list(known), world.rng.randint(1, len(known)))
        wish, values = keys_phrase(world, keys), {key: known[key] for key in keys}
    return Exchange(f"{found.question} {wish}", as_json(values), found.key)


def record(world: World) -> tuple[str, str, str]:
    """What is told of a person, a wish for JSON, and the answer."""
    rng = world.rng
    name, city, thing = world.name(), world.city(), world.pick(world.favourite_kinds())
    value, age, job = (
        world.favourite_of(thing),
        rng.randint(1, 99),
        world.pick(words()["jobs"].split()),
    )
    sentences = {
        "city": world.phrase("recall.passage_city", name=name, city=city).text,
        "age": world.phrase("json.age", name=name, age=age).text,
        "job": world.phrase("json.job", name=name, job=job).text,
        thing: world.phrase("json.favourite", name=name, thing=thing, value=value).text,
    }
    facts: dict[str, object] = {"name": name, "city": city, "age": age, "job": job, thing: value}
    told = rng.sample(list(sentences), rng.randint(1, 3))
    said = [sentences[what] for what in told]
    if told[0] == "city" and rng.random() < 0.3:  # the user speaks
        said[0] = world.phrase("recall.both_tell", name=name, city=city).text
    if rng.random() < 0.15:
        return (
            " ".join(said),
            world.phrase("json.plain").text,
            as_json({what: facts[what] for what in ("name", *told)}),
        )
    wanted = rng.sample(["name", *told], rng.randint(1, len(told) + 1))
    if rng.random() < 0.1:  # also what is not told
        wanted += [what for what in ("age", "job", "city") if what not in told][:1]
    if len(wanted) > 1 and "name" in wanted and rng.random() < 0.6:
        wanted.sort(key=lambda what: what != "name")
    keys = {
        key_name(world, what): facts[what] if what in ("name", *told) else None for what in wanted
    }
    return " ".join(said), keys_phrase(world, list(keys)), as_json(keys)


def _some_items(world: World, count: int, kind: str = "") -> list[str]:
    match kind or world.pick(("words", "words", "letters", "numbers", "names")):
        case "words":
            return world.words(count)
        case "letters":
            return world.rng.sample(LETTERS, count)
        case "numbers":
            short = world.rng.random() < 0.7
            return [str(world.number() % 100 if short else world.number()) for _ in range(count)]
        case _:
            return [world.name() for _ in range(count)]


def _answerable(world: World) -> str:
    skill = world.pick(("smalltalk", "identity", "fact", "arithmetic", "refusal", "command"))
    return SKILLS[skill](world).question


def _some_text(world: World) -> str:
    rng = world.rng
    items = _some_items(world, rng.randint(1, 8))
    if rng.random() < 0.3:
        items = items[:4] + _some_items(world, rng.randint(1, 4))
        rng.shuffle(items)
    if rng.random() < 0.15:
        items = [
            f"{world.name()} {rng.choice(('saw', 'has', 'likes', 'wants', 'found'))} the",
            *items,
        ]
    return rng.choice((" ", " ", ", ")).join(items)


def listed(items: list[str]) -> str:
    """Join items as in a sentence: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


SKILLS: dict[str, Callable[[World], Exchange]] = {
    **{skill: partial(_fixed, skill=skill) for skill in ANSWERS},
    **{each.__name__: each for each in (option, command, copy, reverse, spell, count, sort)},
    **{each.__name__: each for each in (arithmetic, fact, refusal, passage)},
    "json": in_json,
}


def draw(world: World, skill: str) -> Exchange:
    """Draw an exchange of `skill` that belongs to this world: held out or not."""
    while True:
        exchange = SKILLS[skill](world)
        question, key = exchange.question, exchange.key
        if key is None or (world.new_phrases and key == question):
            return exchange  # its words or its phrasing are already held out
        # wear_down may turn a question of the training into a held-out one.
        belongs = is_held_out(key) if world.evaluates else not is_held_out(key, question)
        if belongs:
            if skill in CASELESS and world.rng.random() < world.noise:
                lower = question.lower()
                question = lower.rstrip("?.!") if world.rng.random() < 0.5 else lower
            return replace(exchange, question=question)
