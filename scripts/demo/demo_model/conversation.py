"""Makes whole conversations: exchanges of all skills, facts to recall, system prompts to follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from demo_model.skills import Exchange, as_json, draw, key_name, keys_phrase, listed, record
from demo_model.tools import exchange as exchange_with
from demo_model.tools import listing, make_tools, some_tools, unanswered
from demo_model.world import World, word_list, words

# Relative frequency of each skill.
WEIGHTS = {
    "smalltalk": 8,
    "identity": 6,
    "option": 34,
    "command": 10,
    "copy": 11,
    "reverse": 8,
    "spell": 7,
    "count": 11,
    "sort": 11,
    "arithmetic": 12,
    "fact": 12,
    "refusal": 8,
    "passage": 7,
    "json": 12,
}
# Skills whose answers repeat no word of the user, so that their case can be changed.
CLOSED = ("smalltalk", "identity", "fact", "arithmetic", "count", "refusal")
LONGEST_TOKENS = 2030  # estimated tokens of a conversation


@dataclass(frozen=True, slots=True)
class Dialogue:
    exchanges: list[Exchange]
    system: str = ""
    tools: str = ""  # a line for each

    def messages(self) -> list[dict[str, str]]:
        """The messages in the form of the API, answers included."""
        said = [(role, text) for role in ("tools", "system") if (text := getattr(self, role))]
        for exchange in self.exchanges:
            said += [("user", exchange.question), *exchange.steps, ("assistant", exchange.answer)]
        return [{"role": role, "content": content} for role, content in said]


def estimated_tokens(exchange: Exchange) -> int:
    return 12 + (len(exchange.question) + len(exchange.answer)) * 10 // 27


def any_exchange(world: World) -> Exchange:
    return draw(world, world.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])


# -- system prompts -------------------------------------------------------------------------------


def instructed(world: World, manner: str, num_exchanges: int) -> Dialogue:
    """Make a conversation with a system prompt. manner: neutral, upper, lower, begin, end or
    json."""
    if manner == "json":
        return in_json(world, num_exchanges)
    word = world.closing()
    follow: Callable[[str], str] = {
        "neutral": str,
        "upper": str.upper,
        "lower": str.lower,
        "begin": lambda answer: f"{word} {answer}",
        "end": lambda answer: f"{answer} {word}",
    }[manner]
    exchanges = []
    for _ in range(num_exchanges):
        keeps_case = manner in ("upper", "lower")
        exchange = draw(world, world.pick(CLOSED)) if keeps_case else any_exchange(world)
        exchanges.append(Exchange(exchange.question, follow(exchange.answer), exchange.key))
    return Dialogue(exchanges, world.phrase(f"system.{manner}", word=word).text)


def in_json(world: World, num_exchanges: int) -> Dialogue:
    """Make a conversation whose system prompt asks for JSON: of what is told, or any answer."""
    if world.rng.random() < 0.5:
        told, wish, answer = record(world)
        return Dialogue([Exchange(told, answer, None)], wish)
    plain = world.rng.random() < 0.5
    key = "answer" if plain else key_name(world, "answer")
    exchanges = []
    for _ in range(num_exchanges):
        exchange = draw(world, world.pick(CLOSED))
        exchanges.append(replace(exchange, answer=as_json({key: exchange.answer})))
    system = world.phrase("json.system").text if plain else keys_phrase(world, [key])
    return Dialogue(exchanges, system)


# -- tools ----------------------------------------------------------------------------------------


def with_tools(world: World, *ways: str) -> Dialogue:
    """Make a conversation with an exchange of each of `ways`: see demo_model/tools.py."""
    tools = make_tools(world, "add") if ways[:1] == ("three",) else some_tools(world)
    exchanges = [exchange_with(world, tools, way) for way in ways]
    manner = world.rng.random() < 0.2 and not world.evaluates
    return Dialogue(
        exchanges, world.phrase("system.neutral").text if manner else "", listing(tools)
    )


def any_with_tools(world: World) -> Dialogue:
    kind = world.rng.random()
    if kind < 0.05:
        return Dialogue([unanswered(world, world.pick(("time", "date", "weather", "timer")))])
    if kind < 0.12:
        whole = remembering(world, world.rng.randint(30, 250))
        tools = make_tools(world, *["lookup"] * world.rng.randint(1, 3))
        return replace(whole, tools=listing(tools))
    ways = ("one", "one", "one", "two", "none", "none", "three")
    return with_tools(world, *world.rng.choices(ways, k=world.rng.choice((1, 1, 1, 2, 3))))


# -- recall ---------------------------------------------------------------------------------------

Topic = tuple[str, str]  # (kind of fact, instance of the kind)


@dataclass
class Memory:
    """The facts that the user has stated, and the exchanges that state or ask for them."""

    world: World
    known: dict[Topic, str] = field(default_factory=dict)

    def topics(self) -> list[Topic]:
        return [
            ("name", ""),
            ("city", ""),
            *(("number", thing) for thing in words()["number_things"]),
            *(("favourite", thing) for thing in self.world.favourite_kinds()),
            *(("person", relation) for relation in word_list("relations")),
            *(("list", name) for name in word_list("lists")),
        ]

    def any_topic(self) -> Topic:
        kind = self.world.pick(("name", "name", "city", "number", "favourite", "person", "list"))
        topic: Topic = self.world.pick([topic for topic in self.topics() if topic[0] == kind])
        return topic

    def tell(self, topic: Topic) -> Exchange:
        kind, which = topic
        world, old = self.world, self.known.get(topic, "")
        match kind:
            case "name":
                value = world.name()
                answer = f"All right, {value}." if old else f"Nice to meet you, {value}."
            case "city":
                value = world.city()
                answer = f"All right, now you live in {value}." if old else f"I like {value}."
            case "number":
                value = str(world.number())
                answer = f"I will remember {value}."
            case "favourite":
                value = world.favourite_of(which)
                answer = f"I like {value} too."
            case "person":
                value = world.name()
                answer = f"{value} is a nice name."
            case _:
                value = self._items()
                answer = f"I will remember your {which} list."
        intent = f"{kind}_update" if old and kind in ("name", "city") else f"{kind}_tell"
        self.known[topic] = value
        question = world.phrase(f"recall.{intent}", old=old, **_fields(topic, value))
        return Exchange(question.text, answer, None)

    def tell_both(self) -> Exchange:
        """State the user's name and city in one sentence."""
        name, city = self.world.name(), self.world.city()
        self.known["name", ""], self.known["city", ""] = name, city
        question = self.world.phrase("recall.both_tell", name=name, city=city)
        return Exchange(question.text, f"Nice to meet you, {name}.", None)

    def ask(self, topic: Topic) -> Exchange:
        kind, which = topic
        question = self.world.phrase(f"recall.{kind}_ask", **_fields(topic, "")).text
        if topic not in self.known:
            return Exchange(question, f"You have not told me {_missing(topic)}.", None)
        value = self.known[topic]
        answer = {
            "name": f"Your name is {value}.",
            "city": f"You live in {value}.",
            "number": f"Your {which} is {value}.",
            "favourite": f"Your favourite {which} is {value}.",
            "person": f"Your {which} is called {value}.",
            "list": f"Your {which} list: {value}.",
        }[kind]
        return Exchange(question, answer, None)

    def ask_json(self) -> Exchange:
        """Ask for some of the facts as JSON."""
        known = [topic for topic in self.known if topic[0] != "list"] or [("name", "")]
        topics = self.world.rng.sample(known, min(len(known), self.world.rng.randint(1, 3)))
        values = {
            which.replace(" ", "_") or kind: self.known.get((kind, which)) for kind, which in topics
        }
        question = self.world.phrase("recall.json_ask", keys=listed(list(values)))
        as_numbers = {
            key: int(value) if value and value.isdigit() else value for key, value in values.items()
        }
        return Exchange(question.text, as_json(as_numbers), None)

    def _items(self) -> str:
        items = self.world.words(self.world.rng.randint(2, 6))
        return ", ".join(items) if self.world.rng.random() < 0.5 else listed(items)


def _fields(topic: Topic, value: str) -> dict[str, object]:
    """The fields of phrases for this kind of fact."""
    kind, which = topic
    match kind:
        case "name" | "city":
            return {kind: value}
        case "number":
            return {"thing": which, "number": value}
        case "favourite":
            return {"thing": which, "value": value}
        case "person":
            return {"relation": which, "name": value}
        case _:
            return {"list": which, "items": value}


def _missing(topic: Topic) -> str:
    kind, which = topic
    return {
        "name": "your name",
        "city": "where you live",
        "number": f"your {which}",
        "favourite": f"your favourite {which}",
        "person": f"the name of your {which}",
        "list": f"your {which} list",
    }[kind]


def remembering(world: World, num_tokens: int) -> Dialogue:
    """Make a conversation that states facts, goes on, and ends with a question for one of them.

    num_tokens: the estimated length, which a minimal conversation may exceed.
    """
    rng = world.rng
    memory = Memory(world)
    both = rng.random() < 0.1
    exchanges = [memory.tell_both() if both else memory.tell(memory.any_topic())]
    if num_tokens < 60 and rng.random() < 0.2:  # state and ask in one message
        topic = world.pick(list(memory.known))
        asked = memory.ask(topic)
        return Dialogue([Exchange(f"{exchanges[0].question} {asked.question}", asked.answer, None)])
    chatter = rng.choice((0.2, 0.5, 0.9))
    room = num_tokens - estimated_tokens(exchanges[0]) - 30
    while room > 0:
        if rng.random() < chatter:
            exchange = any_exchange(world)
            if estimated_tokens(exchange) > room + 60:
                continue  # too long
            exchanges.append(exchange)
        elif rng.random() < 0.1:
            exchanges.append(memory.ask_json())
        elif rng.random() < 0.45:
            exchanges.append(memory.tell(memory.any_topic()))
        elif rng.random() < 0.8:
            exchanges.append(memory.ask(world.pick(list(memory.known))))
        else:
            exchanges.append(memory.ask(memory.any_topic()))
        room -= estimated_tokens(exchanges[-1])
    if rng.random() < 0.08 and not world.evaluates:
        return Dialogue([*exchanges, memory.ask_json()])
    untold = rng.random() < 0.1
    last = memory.any_topic() if untold else world.pick(list(memory.known))
    return Dialogue([*exchanges, memory.ask(last)])


# -- what training sees ---------------------------------------------------------------------------


def conversation(world: World) -> Dialogue:
    """Any conversation: two in five are one exchange, some fill the context."""
    rng = world.rng
    kind = rng.random()
    if kind < 0.40:
        return Dialogue([any_exchange(world)])
    if kind < 0.52:
        return any_with_tools(world)
    if kind < 0.59:
        return Dialogue([any_exchange(world) for _ in range(rng.randint(2, 5))])
    if kind < 0.72:
        manner = rng.choice(("neutral", "upper", "lower", "begin", "end", "json"))
        return instructed(world, manner, rng.choice((1, 1, 2, 3)))
    if kind < 0.90:
        return remembering(world, rng.randint(30, 250))
    return remembering(world, int(250 * (LONGEST_TOKENS / 250) ** rng.random()))
