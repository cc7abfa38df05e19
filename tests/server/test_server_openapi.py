"""/openapi.json agrees with the server on every route, field and answer; and a fuzz run against it,
on a small model, after which no request and no page is left.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from starlette.routing import Route
from support.fake_engine import FakeEngine
from support.pooled_checkpoints import make_pooled, save_modules
from support.serving import Served, demo_engine, served
from support.waiting import LIMIT_S

from minisgl.engine import AsyncEngine
from minisgl.models.config_reader import CONFIG_FILE
from minisgl.models.hub import DEMO_FOLDER
from minisgl.server.apis.openai import answer_types
from minisgl.server.app import create_app
from minisgl.server.config import ServerConfig
from minisgl.server.endpoints import ENDPOINTS, HELLO
from minisgl.server.engine_state import EngineState
from minisgl.server.http.error_bodies import Error, MessagesError
from minisgl.server.openapi import describe
from minisgl.server.pages import PAGES
from minisgl.server.requests.request_types import NUM_LOGPROBS, SAMPLER_DETAILS

JSON = "application/json"
MAX_SEQ_LEN = 64
NUM_PAGES = 513
# The bundled model, cut down to a step that takes a fifth of the time. Its weights are random, so
# many tokens end an answer, for some answers to end.
SMALL = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "eos_token_id": [*range(64)],
}


DESCRIPTION = describe(ENDPOINTS, with_key=False)


def patient() -> dict[str, Any]:
    """The description without deadlines that the answers could not keep."""
    description = copy.deepcopy(DESCRIPTION)
    for schema in description["components"]["schemas"].values():
        if "timeout" in schema.get("properties", {}):
            schema["properties"]["timeout"] = {"type": "number", "minimum": 1000, "maximum": 2000}
    return description


def operations(description: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(description)
    return [operation.ok() for operation in schema.get_all_operations()]


OPERATIONS, PATIENT_OPERATIONS = operations(DESCRIPTION), operations(patient())
# Some rules bind several fields, which a schema cannot say: valid to it is not valid to us.
LEFT_OUT = [CHECKS.get_one("positive_data_acceptance")]


def served_model(folder: Path, **options: Any) -> Iterator[Served[AsyncEngine]]:
    """A server with a model of random weights, in which nothing is left at the end."""
    # Little room, so that what asks for everything is soon done.
    options |= {"load_format": "dummy", "num_pages": NUM_PAGES}
    with served(
        lambda: demo_engine(model=str(folder), **options), served_model_name=("demo",)
    ) as found:
        yield found
        found.on_loop(found.engine.audit)
        stats = found.on_loop(found.engine.stats)
        assert found.engine.failure is None
        assert (stats.num_running, stats.num_queued, stats.num_used_pages) == (0, 0, 0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served[AsyncEngine]]:
    folder = tmp_path_factory.mktemp("models") / "demo"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | SMALL))
    yield from served_model(folder, max_seq_len_override=MAX_SEQ_LEN)


@pytest.fixture(scope="module")
def pooled_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "pooled"
    folder.mkdir()
    make_pooled("qwen3", folder)
    save_modules(folder, "lasttoken")
    return folder


@pytest.fixture(scope="module")
def embedder(pooled_folder: Path) -> Iterator[Served[AsyncEngine]]:
    yield from served_model(pooled_folder)


@pytest.fixture(scope="module")
def reranker(pooled_folder: Path) -> Iterator[Served[AsyncEngine]]:
    yield from served_model(pooled_folder, task="rerank")


@pytest.fixture
def fuzzed(request: pytest.FixtureRequest, operation: Any) -> Served[AsyncEngine]:
    """The server whose model an operation is for."""
    found: Served[AsyncEngine] = request.getfixturevalue(server_of(operation.path))
    return found


def server_of(path: str) -> str:
    [task] = {each.task for each in ENDPOINTS if each.shown_path == path}
    return {"embed": "embedder", "rerank": "reranker"}.get(task, "demo")


@pytest.fixture(scope="module")
def http(demo: Served[AsyncEngine]) -> Iterator[httpx.Client]:
    with demo.http() as client:
        yield client


# -- the description ------------------------------------------------------------------------------


def test_openapi_json_is_served_unchanged(http: httpx.Client) -> None:
    assert http.get("/openapi.json").json() == DESCRIPTION


def test_the_description_lists_every_route() -> None:
    described = {
        (path, method) for path, methods in DESCRIPTION["paths"].items() for method in methods
    }
    app = create_app(EngineState(ServerConfig()))
    served = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if isinstance(route, Route) and route.path not in PAGES
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert described == served
    assert {"/v1/chat/completions", "/tokenize", "/health", "/openapi.json"} <= {
        path for path, _ in described
    }


def test_the_description_gives_errors_the_envelope_of_their_api() -> None:
    for path, methods in DESCRIPTION["paths"].items():
        for operation in methods.values():
            errors = {k: v for k, v in operation["responses"].items() if k != "200"}
            for error in errors.values():
                schema = error["content"][JSON]["schema"]
                name = "MessagesError" if path.startswith("/v1/messages") else "Error"
                assert schema == {"$ref": f"#/components/schemas/{name}"}
            if "requestBody" in operation:
                assert {"400", "404", "413", "415", "500"} <= errors.keys()
                assert ("529" if path.startswith("/v1/messages") else "503") in errors
            if path.endswith("completions"):
                assert "429" in errors
    details = DESCRIPTION["components"]["schemas"]["ErrorDetails"]
    assert details["required"] == ["message", "type", "param", "code"]


def test_each_field_of_a_request_is_described_with_an_example_that_is_accepted() -> None:
    without_value = ("Not supported: ", "Accepted, and without effect.", "Without effect: ")
    without_value += ("Left out: ",)
    for endpoint in ENDPOINTS:
        path, kind = endpoint.path, endpoint.body
        if kind is None:
            continue
        content = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"][JSON]
        begun = content["example"]
        msgspec.convert(begun, kind)
        schema = DESCRIPTION["components"]["schemas"][kind.__name__]
        for name, field in schema["properties"].items():
            if field["description"].startswith(without_value):
                continue
            if name == "model":
                assert "examples" not in field  # it depends on the server
                continue
            [example] = field["examples"]
            beside = {"stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}}
            body = {**begun, **beside.get(name, {}), name: example}
            if path == "/tokenize" and name in ("messages", "tools"):
                body = {"messages": HELLO, name: example}
            if path == "/v1/responses" and name == "top_logprobs":
                del body["logprobs"]
            msgspec.json.decode(msgspec.json.encode(body), type=kind)


def test_types_have_names_of_their_own() -> None:
    """Types of one name in two modules would have the names of the modules too."""
    assert not [name for name in DESCRIPTION["components"]["schemas"] if "." in name]


def test_the_description_states_which_routes_need_the_key() -> None:
    described = describe(ENDPOINTS, with_key=True)
    assert described["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    chat = described["paths"]["/v1/chat/completions"]["post"]
    assert chat["security"] == [{"key": []}, {"x-api-key": []}]
    assert "401" in chat["responses"]
    health = described["paths"]["/health"]["get"]
    assert "security" not in health and "401" not in health["responses"]


def bounded_fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    schemas = DESCRIPTION["components"]["schemas"]
    for path, schema in (
        ("/v1/chat/completions", schemas["ChatRequest"]),
        ("/v1/completions", schemas["CompletionRequest"]),
    ):
        for name, field in schema["properties"].items():
            for option in field.get("anyOf", ()):
                if "minimum" in option:
                    yield path, name, option


@pytest.mark.parametrize(("path", "name", "bounds"), [*bounded_fields()])
def test_described_bounds_equal_the_enforced_ones(
    http: httpx.Client, path: str, name: str, bounds: dict[str, Any]
) -> None:
    low, high = bounds["minimum"], bounds["maximum"]
    integer = bounds["type"] == "integer"
    beyond = 1 if integer else 1e-3 * max(1, abs(high))
    asked: dict[str, Any] = {"max_tokens": 1, "stream": False}
    asked["logprobs"] = path == "/v1/chat/completions" or None
    asked |= {"prompt": "a"} if path == "/v1/completions" else {"messages": hello()}
    for value in (low, high):
        response = http.post(path, json={**asked, "echo": echo(path, name), name: value})
        if response.status_code != 200:  # it is in bounds, and too much for this small model
            code = response.json()["error"]["code"]
            # The model does not reason either.
            other = name in ("min_tokens", "thinking_token_budget")
            assert other or name in ("max_tokens", "max_completion_tokens")
            assert code == "context_length_exceeded" or other
    for value in (low - beyond, high + beyond):
        response = http.post(path, json={**asked, name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_the_most_alternatives_are_those_of_the_engine() -> None:
    schemas = describe(ENDPOINTS, with_key=False, max_logprobs=64)["components"]["schemas"]
    found = {
        (kind, name): option[limit]
        for kind in ("ChatRequest", "CompletionRequest", "ResponsesRequest")
        for name, field in schemas[kind]["properties"].items()
        for option in field.get("anyOf", ())
        for limit in option.keys() & {"maximum", "maxItems"}
        if name in (*NUM_LOGPROBS, "logprob_token_ids")
    }
    assert len(found) == 7 and {*found.values()} == {64}


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest"])
def test_the_description_covers_the_entries_of_logit_bias(name: str) -> None:
    [bias, _] = DESCRIPTION["components"]["schemas"][name]["properties"]["logit_bias"]["anyOf"]
    assert bias["additionalProperties"] == {"type": "number", "minimum": -100, "maximum": 100}
    assert re.match(bias["propertyNames"]["pattern"], "17")


def hello() -> list[dict[str, str]]:
    return [{"role": "user", "content": "a"}]


def echo(path: str, name: str) -> bool | None:
    """0 tokens are allowed with it alone."""
    return True if path == "/v1/completions" and name == "max_tokens" else None


@pytest.mark.parametrize("usage", [None, {"include_usage": True}, {"continuous_usage_stats": True}])
@pytest.mark.parametrize("scored", [False, True])
def test_answers_equal_their_declared_types(
    http: httpx.Client, usage: dict[str, bool] | None, scored: bool
) -> None:
    """No field more or less: each answer is decoded with its type and encoded again."""
    chat: dict[str, Any] = {"messages": hello(), "max_tokens": 3, "n": 2}
    text: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 3, "echo": True}
    if scored:
        chat |= {"logprobs": True, "top_logprobs": 2}
        text |= {"logprobs": 2}
    cases: list[tuple[str, dict[str, Any], Any, Any]] = [
        (
            "/v1/chat/completions",
            chat,
            answer_types.ChatCompletion,
            answer_types.ChatCompletionChunk,
        ),
        ("/v1/completions", text, answer_types.Completion, answer_types.CompletionChunk),
    ]
    for body in (chat, text):
        body["return_token_ids"] = scored
    for path, body, whole, chunk in cases:
        prompt_logprobs = 2 if scored else None
        check_shape(
            http.post(path, json={**body, "prompt_logprobs": prompt_logprobs}).content, whole
        )
        response = http.post(path, json={**body, "stream": True, "stream_options": usage})
        *events, done = response.text.removesuffix("\n\n").split("\n\n")
        assert done == "data: [DONE]"
        assert len(events) > 3
        for event in events:
            check_shape(event.removeprefix("data: ").encode(), chunk)


def test_models_health_version_and_token_answers_equal_their_declared_types(
    http: httpx.Client,
) -> None:
    check_shape(http.get("/v1/models").content, answer_types.ModelList)
    check_shape(http.get("/v1/models/demo").content, answer_types.Model)
    check_shape(http.get("/health").content, answer_types.Health)
    check_shape(http.get("/version").content, answer_types.Version)
    check_shape(http.get("/v1/models/x").content, Error)
    check_shape(http.post("/tokenize", json={"prompt": "a"}).content, answer_types.Tokens)
    check_shape(http.post("/detokenize", json={"tokens": [5]}).content, answer_types.Text)


def check_shape(body: bytes, type: Any) -> None:
    decoded = msgspec.json.decode(body, type=type)
    assert json.loads(msgspec.json.encode(decoded)) == json.loads(body)


@pytest.mark.parametrize("field", ["json_schema", "structural_tag"])
def test_null_counts_as_left_out_and_the_description_says_so(
    http: httpx.Client, field: str
) -> None:
    described = DESCRIPTION["components"]["schemas"]["CompletionRequest"]["properties"][field]
    assert "null" in described["type"]
    body = {"model": "demo", "prompt": "a", "max_tokens": 1, field: None}
    assert http.post("/v1/completions", json=body).status_code == 200


def test_a_tool_may_have_null_for_parameters(http: httpx.Client) -> None:
    function = DESCRIPTION["components"]["schemas"]["FunctionSpec"]["properties"]
    assert "null" in function["parameters"]["type"]
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    }
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


# -- the fuzz run ---------------------------------------------------------------------------------

# The same examples in every run: what fails here fails everywhere.
BOUNDED = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[*HealthCheck],
)


@pytest.mark.parametrize("operation", PATIENT_OPERATIONS, ids=lambda operation: operation.label)
def test_requests_allowed_by_the_schema_are_accepted(
    fuzzed: Served[AsyncEngine], operation: Any
) -> None:
    statuses: set[int] = set()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        response = case.call(base_url=fuzzed.url, timeout=LIMIT_S)
        statuses.add(response.status_code)
        case.validate_response(response, excluded_checks=LEFT_OUT)

    check()
    assert statuses <= {200, 400, 404}
    # Which bodies come up depends on the modules that are loaded, so perhaps none that is taken;
    # test_fuzzed_valid_requests_run_and_leave_nothing_behind has those.
    assert operation.body or statuses & {200, 404}


# A forbidden request may, besides, ask for a model or an answer that is not there.
NOT_FOUND = ("model_not_found", "item_not_found")


@pytest.mark.parametrize(
    "operation",
    [operation for operation in OPERATIONS if operation.body],
    ids=lambda operation: operation.label,
)
def test_requests_forbidden_by_the_schema_are_refused(
    fuzzed: Served[AsyncEngine], operation: Any
) -> None:
    statuses: set[int] = set()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
    def check(case: Any) -> None:
        response = case.call(base_url=fuzzed.url, timeout=LIMIT_S)
        statuses.add(response.status_code)
        case.validate_response(response)
        if response.status_code == 404:  # a second fault, which is as true
            assert response.json()["error"]["code"] in NOT_FOUND
            statuses.discard(404)

    check()
    assert statuses == {400}


REQUESTS = {each.body.__name__ for each in ENDPOINTS if each.body is not None}
LAST_EVENTS = {
    "/v1/messages": 'event: message_stop\ndata: {"type":"message_stop"}',
    "/v1/responses": "event: response.",
}
CONSTRAINTS = (*("response_format", "structured_outputs", "json_schema", "structural_tag"),)


def sharpened() -> dict[str, Any]:
    """The description with what binds several fields, or depends on the model: most of what it
    allows is answered, so that the engine meets it."""
    description = patient()
    schemas = description["components"]["schemas"]
    token_id = {"type": "integer", "minimum": 0, "maximum": 2047}
    text = {"type": "string", "minLength": 1, "maxLength": 20}
    ids = {"type": "array", "items": token_id, "minItems": 1, "maxItems": 20}
    schemas["Message"]["required"] = ["role", "content"]
    for field in ("refusal", "tool_calls", "tool_call_id"):
        schemas["Message"]["properties"][field] = {"type": "null"}
    schemas["Message"]["properties"]["role"] = {"enum": ["system", "user", "assistant"]}
    parts = {"type": "array", "items": {"$ref": "#/components/schemas/ContentPart"}}
    schemas["Message"]["properties"]["content"] = {
        "anyOf": [text, {**parts, "minItems": 1, "maxItems": 2}]
    }
    schemas["ContentPart"]["properties"]["text"] = {**text, "maxLength": 5}
    schemas["ChatRequest"]["properties"]["messages"]["maxItems"] = 2
    schemas["CompletionRequest"]["properties"]["prompt"] = {
        "anyOf": [text, ids, {**ids, "items": text}, {**ids, "items": ids, "maxItems": 3}]
    }
    schemas["TokenizeRequest"]["required"] = ["prompt"]
    schemas["TokenizeRequest"]["properties"]["prompt"] = text
    schemas["TokenizeRequest"]["properties"]["messages"] = {"type": "null"}
    schemas["DetokenizeRequest"]["properties"]["tokens"] = {"type": "array", "items": token_id}
    for name in ("ChatRequest", "CompletionRequest"):
        fields = schemas[name]["properties"]
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 4}
        fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 20}
        fields["stream"] = {"const": True}
        fields["logprobs"] = {"const": True} if name == "ChatRequest" else fields["logprobs"]
        schemas[name]["required"] += ["stream", "logprobs"]
        useless = (
            *("best_of", "chat_template_kwargs", "max_completion_tokens", "suffix"),
            *("prompt_logprobs", "add_generation_prompt"),  # not with stream, or to continue
            # What schemas cannot say: the syntax of grammars; and the model has neither.
            *("tools", "tool_choice", "thinking_token_budget"),
        )
        for field in useless:
            fields.pop(field, None)
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        fields = schemas[name]["properties"]
        fields["stop_token_ids"] = ids
        fields["logit_bias"] = {
            "type": "object",
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,2})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
        fields["min_tokens"] = {"type": "integer", "minimum": 0, "maximum": 1}
    details = [field for group in SAMPLER_DETAILS.values() for field in group]
    for name in REQUESTS:
        for field in (*CONSTRAINTS, *details):
            schemas[name]["properties"].pop(field, None)
    for name in ("tools", "tool_choice"):
        del schemas["TokenizeRequest"]["properties"][name]
    schemas["InputMessage"]["properties"] |= {"role": {"const": "user"}, "content": text}
    prompt = {"type": "array", "items": {"$ref": "#/components/schemas/InputMessage"}}
    for name in ("MessagesRequest", "CountTokensRequest"):
        fields = schemas[name]["properties"]
        fields["messages"] = {**prompt, "minItems": 1, "maxItems": 2}
        fields["stream"] = {"const": True}
        for field in ("tools", "tool_choice", "output_config", "output_format", "system", "stop"):
            fields.pop(field, None)  # `stop` is none beside `stop_sequences`
    schemas["InputItem"] = {
        "type": "object",
        "properties": {"role": {"enum": ["user", "developer"]}, "content": text},
        "required": ["role", "content"],
        "additionalProperties": False,
    }
    fields = schemas["ResponsesRequest"]["properties"]
    fields["max_output_tokens"] = {"type": "integer", "minimum": 1, "maximum": 20}
    fields["stream"] = {"const": True}
    schemas["ResponsesRequest"]["required"] += ["stream"]
    useless = ("tools", "tool_choice", "text", "instructions", "chat_template_kwargs")
    for field in (*useless, "previous_response_id"):
        del fields[field]
    fields = schemas["DecisionRequest"]["properties"]
    letter = {"type": "string", "pattern": "^[a-z]$"}  # prompts are not to be long
    fields["input"] = letter
    fields["questions"]["maxItems"] = 2
    for name in ("PredicateQuestion", "ChoiceQuestion", "ScoreQuestion"):
        schemas[name]["properties"]["instructions"] = letter
    for name, field in (("Choice", "value"), ("Level", "label")):
        schemas[name]["properties"] = {field: letter}
        schemas[name]["additionalProperties"] = False
    schemas["ChoiceQuestion"]["properties"]["choices"]["maxItems"] = 2
    schemas["ScoreQuestion"]["properties"]["levels"]["maxItems"] = 2
    fields = schemas["EmbeddingRequest"]["properties"]
    pooled_id = {"type": "integer", "minimum": 0, "maximum": 400}
    ids = {"type": "array", "items": pooled_id, "minItems": 1, "maxItems": 20}
    fields["input"] = {
        "anyOf": [text, ids, {**ids, "items": text}, {**ids, "items": ids, "maxItems": 3}]
    }
    fields["dimensions"] = {"type": "integer", "minimum": 1, "maximum": 128}
    fields["prompt_name"] = {"enum": ["query", "document"]}
    del fields["instruction"]  # not beside prompt_name
    schemas["RerankRequest"]["properties"]["query"] = text
    schemas["RerankDocument"]["properties"]["text"] = text
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": 3}
    schemas["ScoreRequest"]["properties"] |= {"text_1": text, "text_2": texts}
    for name in ("EmbeddingRequest", "RerankRequest", "ScoreRequest"):
        kept = {"type": "integer", "minimum": 80, "maximum": 500}
        schemas[name]["properties"]["truncate_prompt_tokens"] = kept
    for name in REQUESTS:
        del schemas[name]["properties"]["model"]
        schemas[name]["additionalProperties"] = False
    return description


SHARPENED = schemathesis.openapi.from_dict(sharpened())
SHARPENED.config.max_stream_events = 10_000  # every stream to its end, where 20 are the default
SHARP_OPERATIONS = [
    operation.ok() for operation in SHARPENED.get_all_operations() if operation.ok().body
]


@pytest.mark.parametrize("operation", SHARP_OPERATIONS, ids=lambda operation: operation.label)
def test_fuzzed_valid_requests_run_and_leave_nothing_behind(
    fuzzed: Served[AsyncEngine], operation: Any
) -> None:
    statuses: Counter[int] = Counter()

    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: Any) -> None:
        response = case.call(base_url=fuzzed.url, timeout=LIMIT_S)
        statuses[response.status_code] += 1
        assert 'data: {"error"' not in response.text and "event: error" not in response.text
        if response.headers["content-type"][0].startswith("text/event-stream"):
            [*_, last, end] = response.text.split("\n\n")
            assert end == "" and last.startswith(LAST_EVENTS.get(operation.path, "data: [DONE]"))
        case.validate_response(response, excluded_checks=LEFT_OUT)

    check()
    assert statuses.keys() <= {200, 400}
    assert statuses[200] > statuses[400]


KEYS = sorted(
    {
        name
        for schema in REQUESTS
        for name in DESCRIPTION["components"]["schemas"][schema]["properties"]
    }
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**64) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize("path", [each.path for each in ENDPOINTS if each.body is not None])
def test_any_value_in_any_field_gives_an_answer_or_a_4xx(
    request: pytest.FixtureRequest, path: str
) -> None:
    """Covers values outside of the schema: NaN, huge numbers, several fields at once."""
    [base] = [dict(each.example) for each in ENDPOINTS if each.path == path and each.example]
    base |= {name: 2 for name in base if name.startswith("max_")}

    @settings(BOUNDED, max_examples=30)
    @given(fields=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4))
    def check(fields: dict[str, Any]) -> None:
        body = json.dumps({**base, **fields})
        response = client.post(path, content=body.encode(), headers={"content-type": JSON})
        assert response.status_code in (200, 400, 404, 504)  # which a tiny timeout deserves
        if response.status_code != 200:
            check_shape(response.content, MessagesError if "/messages" in path else Error)

    found: Served[AsyncEngine] = request.getfixturevalue(server_of(path))
    with found.http() as client:
        check()


def test_any_bytes_as_a_body_give_an_answer_or_a_4xx() -> None:
    async def start() -> FakeEngine:
        return FakeEngine(answer_length=1)

    @settings(BOUNDED, max_examples=30)
    @given(body=st.binary(max_size=40), type=st.sampled_from(["", JSON, "text/plain"]))
    def check(body: bytes, type: str) -> None:
        response = client.post("/v1/completions", content=body, headers={"content-type": type})
        assert response.status_code == 400
        check_shape(response.content, Error)

    with served(start) as found, found.http() as client:
        check()
