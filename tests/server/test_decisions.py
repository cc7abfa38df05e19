"""/v1/decisions through the real `openai` client, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types.decision import Decision
from support.scripted_engine import QWEN_TEMPLATE, ScriptedEngine, qwen
from support.serving import Served, demo_engine, served
from transformers import AutoModelForCausalLM

from minisgl.engine import AsyncEngine
from minisgl.errors import InvalidRequestError
from minisgl.models.hub import DEMO_FOLDER
from minisgl.server.apis.decisions.reading import answer_of, labels, prompt_of
from minisgl.server.apis.decisions.request_types import (
    Choice,
    ChoiceQuestion,
    Level,
    PredicateQuestion,
    ScoreQuestion,
)

INPUT = "Paris is the capital of France."
PREDICATE: Any = {"type": "predicate", "name": "city", "instructions": "It is about a city."}
CHOICE: Any = {
    "type": "choice",
    "instructions": [{"type": "input_text", "text": "Which country?"}],
    "choices": [
        {"value": "France", "description": "in Europe"},
        {"value": True},
        {"value": "true"},
    ],
}
SCORE: Any = {
    "type": "score",
    "name": "length",
    "instructions": "How long is it?",
    "levels": [{"label": "short"}, {"label": "long", "description": "more than a line"}],
}
QUESTIONS = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def demo() -> Iterator[Served[AsyncEngine]]:
    with served(lambda: demo_engine(dtype="float32"), api_key=("k",)) as found:
        yield found


@pytest.fixture(scope="module")
def client(demo: Served[AsyncEngine]) -> Iterator[openai.OpenAI]:
    with demo.openai(api_key="k") as found:
        yield found


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.float32).eval()


def decide(client: openai.OpenAI, **fields: Any) -> Decision:
    asked: dict[str, Any] = {"model": "demo", "input": INPUT, "questions": QUESTIONS, **fields}
    return client.decisions.create(**asked)


def test_probabilities_are_those_of_the_labels_in_transformers(
    demo: Served[AsyncEngine], client: openai.OpenAI, model: Any
) -> None:
    found = decide(client)
    tokenizer = demo.engine.tokenizer
    assert tokenizer is not None
    typed = (
        PredicateQuestion(PREDICATE["instructions"], "city"),
        ChoiceQuestion(
            "Which country?", [Choice("France", "in Europe"), Choice(True), Choice("true")]
        ),
        ScoreQuestion("How long is it?", [Level("short"), Level("long", "more than a line")]),
    )
    known = labels(tokenizer, 3)
    assert [text for text, _ in known] == ["A", "B", "C"]
    spelled = [[tokenizer.decode([each]) for each in token_ids] for _, token_ids in known]
    assert all(
        {text.strip() for text in each} == {label}
        for each, (label, _) in zip(spelled, known, strict=True)
    )
    num_tokens = 0
    for question, answer in zip(typed, found.answers, strict=True):
        said = f"{INPUT}\n\n{prompt_of(question, known)}"
        prompt = tokenizer.chat([{"role": "user", "content": said}])
        num_tokens += len(prompt)
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        options = known[: len(question.options)]
        masses = [logits[[*token_ids]].exp().sum() for _, token_ids in options]
        wanted = [float(mass / sum(masses)) for mass in masses]
        if answer.type == "predicate":
            got = [answer.probability, 1 - answer.probability]
        else:
            assert answer.type in ("choice", "score")
            got = [each.probability for each in answer.probabilities]  # type: ignore[union-attr]
        assert got == pytest.approx(wanted, abs=1e-4)
    assert found.usage.input_tokens == found.usage.total_tokens == num_tokens
    assert found.usage.output_tokens == 0


def test_answers_have_what_their_questions_have(client: openai.OpenAI) -> None:
    predicate, choice, score = decide(client).answers
    assert (predicate.type, predicate.name) == ("predicate", "city")
    assert choice.type == "choice" and choice.name is None
    assert [each.value for each in choice.probabilities] == ["France", True, "true"]
    assert sum(each.probability for each in choice.probabilities) == pytest.approx(1)
    best = max(choice.probabilities, key=lambda each: each.probability)
    assert choice.choice == best.value
    assert choice.confidence == pytest.approx((best.probability - 1 / 3) / (2 / 3))
    assert score.type == "score" and score.name == "length"
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "short"), (1, "long")]
    assert score.score == pytest.approx(score.probabilities[1].probability)


def test_an_answer_does_not_depend_on_the_questions_beside_it(client: openai.OpenAI) -> None:
    together = decide(client).answers
    for question, answer in zip(QUESTIONS, together, strict=True):
        [alone] = decide(client, questions=[question]).answers
        assert alone.type == answer.type
        if alone.type == "predicate":
            assert alone.probability == pytest.approx(answer.probability, abs=1e-5)  # type: ignore[union-attr]


def test_a_conversation_may_be_asked_about(client: openai.OpenAI) -> None:
    items: Any = [
        {"role": "system", "content": "Be strict."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"role": "assistant", "content": "Go away."},
    ]
    [answer] = decide(client, input=items, questions=[PREDICATE]).answers
    assert answer.type == "predicate" and 0 < answer.probability < 1
    assert answer != decide(client, questions=[PREDICATE]).answers[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices"),
        ({"questions": [{**SCORE, "levels": [{"label": "a"}] * 11}]}, "questions[0].levels"),
        ({"questions": [{"type": "guess", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, None),
        ({"input": "word " * 5000}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
    ],
)
def test_an_error_names_the_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        decide(client, **fields)
    assert param is None or caught.value.param == param, caught.value.body


def test_a_model_that_thinks_first_is_refused() -> None:
    async def start() -> ScriptedEngine:
        begin, _, _ = QWEN_TEMPLATE.partition("{% if enable_thinking")
        return ScriptedEngine(qwen(begin + "<think>\n{% endif %}"))

    with served(start) as server, httpx.Client(base_url=server.url) as http:
        body = {"input": INPUT, "questions": [PREDICATE]}
        refused = http.post("/v1/decisions", json=body)
        assert refused.status_code == 400 and "thinks" in refused.json()["error"]["message"]


def test_many_options_have_labels_of_two_letters_and_too_many_are_refused() -> None:
    class Letters:
        """Every text of letters is a token; a space is one, too."""

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            letters = text.strip()
            found = (
                [int.from_bytes(letters.encode())]
                if len(letters) == 1 or letters < "BB"
                else [0, 0]
            )
            return [1, *found] if text.startswith(" ") else found

        def token_bytes(self, token_id: int) -> bytes:
            return token_id.to_bytes(2).lstrip(b"\0")

    found = labels(Letters(), 40)  # type: ignore[arg-type]
    texts = [text for text, _ in found]
    assert len({*texts}) == 40 and texts[0] == "A" and texts[-1] == "AN"
    with pytest.raises(InvalidRequestError, match="up to 53 options, not 300"):
        labels(Letters(), 300)  # type: ignore[arg-type]


def test_the_mass_of_a_label_is_that_of_all_its_tokens() -> None:
    question = ChoiceQuestion("?", [Choice("x"), Choice("y")])
    known = [("A", (1, 2)), ("B", (3,))]
    answer = answer_of(question, known, iter([0.0, 0.0, 0.0]))
    assert [each.probability for each in answer.probabilities] == pytest.approx([2 / 3, 1 / 3])  # type: ignore[union-attr]
