"""One exchange of each skill: a question, and the one right answer to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from demo.tables import tables
from demo.world import World, is_held_out, word_list, words

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
        "add, subtract, and answer questions about minisgl.",
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
        "models": "minisgl runs models of the Llama, Mistral, Qwen2 and Qwen3 families.",
        "limits": "I am very small. I know only what I was trained for.",
    },
}
# Skills whose questions mean the same in lower case.
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
    # What tells the instance apart. None where its words already do, as names and numbers to
    # remember, which are from lists of their own in training and evaluation.
    key: str | None


# -- closed skills: the question decides ----------------------------------------------------------


def smalltalk(world: World) -> Exchange:
    return _fixed(world, "smalltalk")


def identity(world: World) -> Exchange:
    return _fixed(world, "identity")


def _fixed(world: World, skill: str) -> Exchange:
    intent = world.pick(list(ANSWERS[skill]))
    question = world.phrase(f"{skill}.{intent}")
    return Exchange(question, ANSWERS[skill][intent], question)


@cache
def known_tables() -> dict[str, Any]:
    return tables()


def option(world: World) -> Exchange:
    entry = world.pick(known_tables()["options"])
    name, help = entry["names"][0], entry["help"]
    said = world.pick(entry["names"])
    bare = said[2:].replace("-", " ")
    match world.pick("----- ") if "-" in said[2:] else world.pick("-- "):
        case " ":
            said = world.pick((f"the {bare} option", f"the option {bare}"))
    match world.pick(("does", "does", "default", "which", "commands_of", "how")):
        case "does":
            question, answer = world.phrase("option.does", option=said), f"{name}: {help}"
        case "default":
            question = world.phrase("option.default", option=said, bare=bare)
            answer = f"The default of {name} is {entry['default']}."
            if entry["default"] in ("on", "off"):
                answer = f"{name} is {entry['default']} by default."
            elif not entry["default"]:
                answer = f"{name} has no default."
        case "how":
            question, answer = world.phrase("option.how", bare=bare), f"With {name}."
        case "which":
            question, answer = world.phrase("option.which", meaning=help), f"That is {name}."
        case _:
            question = world.phrase("option.commands_of", option=said)
            answer = f"{name} belongs to {listed(entry['commands'])}."
    return Exchange(question, answer, question)


def command(world: World) -> Exchange:
    commands, chat_commands = known_tables()["commands"], known_tables()["chat_commands"]
    asked = world.pick(("does", "does", "all", *commands))
    if asked == "does":
        name = world.pick([*commands, *chat_commands])
        said = name if name in chat_commands else f"minisgl {name}"
        question = world.phrase("command.does", command=said)
        does = chat_commands.get(name) or commands[name]
        answer = f"{said}: {does.rstrip('.')}."
    elif asked == "all":
        question = world.phrase("command.all")
        answer = f"The commands of minisgl are {listed(list(commands))}."
    else:
        question, answer = world.phrase(f"command.{asked}"), f"Run minisgl {asked}."
    return Exchange(question, answer, question)


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
    return Exchange(question, REFUSAL, question)


def fact(world: World) -> Exchange:
    kind = world.pick(
        "capital capital capital country country after after before before nth_month month_days "
        "unit opposite opposite legs sound colour".split()
    )
    slots, answer = FACTS[kind](world)
    question = world.phrase(f"facts.{kind}", **slots)
    return Exchange(question, answer, question)


Fact = tuple[dict[str, object], str]


def _capital(world: World) -> Fact:
    country, city = world.pick(list(words()["capitals"].items()))
    return {"country": country}, f"The capital of {country} is {city}."


def _country(world: World) -> Fact:
    country, city = world.pick(list(words()["capitals"].items()))
    return {"city": city}, f"{city} is the capital of {country}."


def _neighbour(world: World, step: int) -> Fact:
    kind = world.pick(("day", "month", "letter", "number"))
    order = {"day": DAYS, "month": MONTHS, "letter": LETTERS, "number": range(100)}[kind]
    wraps = kind in ("day", "month")
    place = world.rng.randrange(len(order)) if wraps else world.rng.randint(1, len(order) - 2)
    item, other = order[place], order[(place + step) % len(order)]
    return {
        "kind": kind,
        "item": item,
    }, f"{other} comes {'after' if step > 0 else 'before'} {item}."


def _nth_month(world: World) -> Fact:
    place = world.rng.randrange(12)
    return {"nth": ORDINALS[place]}, f"The {ORDINALS[place]} month is {MONTHS[place]}."


def _month_days(world: World) -> Fact:
    place = world.rng.randrange(12)
    return {"month": MONTHS[place]}, f"{MONTHS[place]} has {MONTH_DAYS[place]} days."


def _unit(world: World) -> Fact:
    large, (count, small) = world.pick(list(words()["units"].items()))
    article = "an" if large == "hour" else "a"
    return {
        "small": small,
        "large": large,
        "one": f"one {large}",
        "article": article,
        "article_upper": article.capitalize(),
    }, f"There are {count} {small} in {article} {large}."


def _opposite(world: World) -> Fact:
    pair = list(world.pick(list(words()["opposites"].items())))
    world.rng.shuffle(pair)
    return {"word": pair[0]}, f"The opposite of {pair[0]} is {pair[1]}."


def _legs(world: World) -> Fact:
    animal, count = world.pick(list(words()["legs"].items()))
    slots = _with_article(animal)
    return slots, f"{slots['article_upper']} {animal} has {count} legs."


def _sound(world: World) -> Fact:
    animal, sound = world.pick(list(words()["sounds"].items()))
    slots = _with_article(animal)
    return slots, f"{slots['article_upper']} {animal} says {sound}."


def _colour(world: World) -> Fact:
    thing, colour = world.pick(list(words()["colours"].items()))
    return {"object": thing}, f"{thing[0].upper()}{thing[1:]} is {colour}."


def _with_article(animal: str) -> dict[str, object]:
    article = "an" if animal[0] in "aeiou" else "a"
    return {"animal": animal, "article": article, "article_upper": article.capitalize()}


FACTS: dict[str, Callable[[World], Fact]] = {
    "capital": _capital,
    "country": _country,
    "after": lambda world: _neighbour(world, 1),
    "before": lambda world: _neighbour(world, -1),
    "nth_month": _nth_month,
    "month_days": _month_days,
    "unit": _unit,
    "opposite": _opposite,
    "legs": _legs,
    "sound": _sound,
    "colour": _colour,
}


# -- open skills: the answer is made of what the question brings ----------------------------------


def arithmetic(world: World) -> Exchange:
    if world.rng.random() < 0.05:
        slots = {"a": world.number() + 100, "b": world.rng.randrange(1000)}
        question = world.phrase(
            world.pick(("arithmetic.plus", "arithmetic.minus")), **slots, **_stuff(world)
        )
        return Exchange(question, TOO_LARGE, question)
    a, b = world.rng.randrange(100), world.rng.randrange(100)
    if world.rng.random() < 0.2:
        a, b = a % 10, b % 10
    if world.rng.random() < 0.5:
        question = world.phrase(
            "arithmetic.plus", a=spoken(world, a), b=spoken(world, b), **_stuff(world)
        )
        return Exchange(question, f"{a} + {b} = {a + b}.", f"{a}+{b}")
    if world.rng.random() < 0.8:
        a, b = max(a, b), min(a, b)
    told = a >= b and world.rng.random() < 0.3
    intent = "arithmetic.minus_story" if told else "arithmetic.minus"
    question = world.phrase(intent, a=spoken(world, a), b=spoken(world, b), **_stuff(world))
    return Exchange(question, f"{a} - {b} = {a - b}.", f"{a}-{b}")


def spoken(world: World, number: int) -> str:
    """A number as people write it: small ones now and then as a word."""
    as_word = number < len(NUMBER_WORDS) and world.rng.random() < 0.15
    return NUMBER_WORDS[number] if as_word else str(number)


def _stuff(world: World) -> dict[str, object]:
    return {"things": world.pick(word_list("things")), "name": world.name()}


def copy(world: World) -> Exchange:
    text = _some_text(world)
    return Exchange(world.phrase("copy.repeat", text=text), text, text)


def reverse(world: World) -> Exchange:
    items = _some_items(world, world.rng.randint(2, 8))
    separator = world.pick((" ", ", "))
    question = world.phrase("reverse.items", text=separator.join(items))
    return Exchange(question, separator.join(reversed(items)), " ".join(items))


def spell(world: World) -> Exchange:
    word = _listed_word(world)
    match world.pick(("word", "word", "join", "backwards")):
        case "word":
            question, answer = world.phrase("spell.word", word=word), "-".join(word)
        case "backwards":
            question, answer = world.phrase("spell.backwards", word=word), "-".join(word[::-1])
        case _:
            letters = world.pick("- ").join(word)
            question, answer = world.phrase("spell.join", letters=letters), word
    return Exchange(question, answer, question)


def _listed_word(world: World) -> str:
    """A word of the listed vocabulary; in training others as well, so that letters are learned."""
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
    slots = {"first": spoken(world, first), "last": spoken(world, last)}
    question = world.phrase(f"count.{intent}", **slots)
    return Exchange(question, f"{numbers}.", question)


def _count_items(world: World) -> Exchange:
    kind = world.pick(("words", "letters", "numbers", "names"))
    items = _some_items(world, world.rng.randint(1, 10), kind)
    text = world.pick((" ", ", ")).join(items)
    answer = f"There are {len(items)} {kind}." if len(items) > 1 else f"There is 1 {kind[:-1]}."
    return Exchange(world.phrase("count.items", kind=kind, text=text), answer, text)


def _count_times(world: World) -> Exchange:
    rng = world.rng
    item, *others = _some_items(world, rng.randint(2, 4), rng.choice(("words", "letters")))
    times = rng.randint(1, 5)
    listed = [item] * times + [rng.choice(others) for _ in range(rng.randint(1, 5))]
    rng.shuffle(listed)
    text = rng.choice((" ", ", ")).join(listed)
    answer = f"{item} occurs {times} time{'s' if times > 1 else ''}."
    return Exchange(world.phrase("count.times", item=item, text=text), answer, text)


def _count_letters(world: World) -> Exchange:
    word = _listed_word(world)
    question = world.phrase("count.letters", word=word)
    return Exchange(question, f"{word} has {len(word)} letters.", question)


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
    return Exchange(question, answer, " ".join(items))


def passage(world: World) -> Exchange:
    """Who lives where, told and asked at once."""
    rng = world.rng
    homes: dict[str, str] = {}
    wanted = rng.randint(1, 4)
    while len(homes) < wanted:
        name, city = world.name(), world.city()
        if city not in homes.values():
            homes[name] = city
    told = " ".join(world.phrase("recall.passage_city", name=n, city=c) for n, c in homes.items())
    name, city = rng.choice(list(homes.items()))
    asked = rng.choice(("passage_city_ask", "passage_who_ask"))
    question = world.phrase(f"recall.{asked}", name=name, city=city)
    return Exchange(f"{told} {question}", f"{name} lives in {city}.", None)


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


def _some_text(world: World) -> str:
    rng = world.rng
    if rng.random() < 0.1:  # what would have an answer of its own
        skill = rng.choice(("smalltalk", "identity", "fact", "arithmetic", "refusal", "command"))
        return SKILLS[skill](world).question
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
    """As in a sentence: a, b and c."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


SKILLS: dict[str, Callable[[World], Exchange]] = {
    "smalltalk": smalltalk,
    "identity": identity,
    "option": option,
    "command": command,
    "copy": copy,
    "reverse": reverse,
    "spell": spell,
    "count": count,
    "sort": sort,
    "arithmetic": arithmetic,
    "fact": fact,
    "refusal": refusal,
    "passage": passage,
}


def draw(world: World, skill: str) -> Exchange:
    """An exchange of `skill` that belongs to this world."""
    while True:
        exchange = SKILLS[skill](world)
        key = exchange.key
        if key is None or (world.new_phrases and key == exchange.question):
            return exchange  # its words, or its phrasing, are held out already
        if is_held_out(key) == world.evaluates:
            if skill in CASELESS and world.rng.random() < world.noise / 2:
                return Exchange(exchange.question.lower(), exchange.answer, key)
            return exchange
