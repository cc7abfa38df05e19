"""What the OpenAPI description says of each field of a request: in words, with an example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from minisgl.server.http.paths import COUNT_TOKENS, MESSAGES


class Note(NamedTuple):
    about: str
    default: str = ""  # what applies if the field is left out, in words
    example: Any = None  # None: there is no value to give


NO_EFFECT = "Accepted, and without effect."
CHECKPOINT = "that of the checkpoint"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HELLO = [{"role": "user", "content": "Hello!"}]
FUNCTION = {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA}

NOTES: Mapping[str, Note] = {
    # what is answered
    "model": Note("A name of the model.", "the model that is served"),
    "messages": Note("The conversation, the oldest message first.", example=HELLO),
    "prompt": Note("The text to continue, as text or as token ids.", example="Once upon a time"),
    "input": Note("The question, or the items of a conversation.", example="Hello!"),
    "instructions": Note("The system prompt of this response.", "none", "Be brief."),
    "system": Note("The system prompt.", "none", "Be brief."),
    "previous_response_id": Note("The id of a stored response to go on from.", "none", "resp_1"),
    "tokens": Note("Token ids.", example=[1, 2, 3]),
    # sampling
    "temperature": Note(
        "0 takes the likeliest token; more makes others likelier.", CHECKPOINT, 0.7
    ),
    "top_p": Note(
        "Keeps the likeliest tokens that together have this probability.", CHECKPOINT, 0.9
    ),
    "top_k": Note("Keeps so many of the likeliest tokens; 0 and -1 keep all.", CHECKPOINT, 40),
    "min_p": Note(
        "Keeps tokens with at least this share of the likeliest one's probability.",
        CHECKPOINT,
        0.05,
    ),
    "top_n_sigma": Note(
        "Keeps tokens whose logit is at most so many standard deviations below the largest; "
        "0 or less turns it off.",
        CHECKPOINT,
        1.0,
    ),
    "seed": Note("The same seed gives the same answer to the same request.", "drawn", 42),
    "presence_penalty": Note("Lowers the logits of tokens that the answer has.", CHECKPOINT, 0.5),
    "frequency_penalty": Note(
        "Lowers the logits of tokens by how often the answer has them.", CHECKPOINT, 0.5
    ),
    "repetition_penalty": Note(
        "Divides the logits of tokens that the prompt or the answer has; 1 turns it off.",
        *(CHECKPOINT, 1.1),
    ),
    "logit_bias": Note("Added to the logits of tokens, by token id.", "none", {"11": -5}),
    "allowed_token_ids": Note("The only tokens that the answer may have.", "all", [11, 12, 13]),
    "bad_words": Note("Texts that the answer must not have.", "none", ["certainly"]),
    "n": Note("How many answers to give to each prompt.", "1", 2),
    # where an answer ends
    "max_tokens": Note(
        "How many tokens an answer may have.",
        "the room that is left; 16 for /v1/completions",
        100,
    ),
    "max_completion_tokens": Note("The newer name of max_tokens.", "as max_tokens", 100),
    "max_output_tokens": Note("How many tokens the answer may have.", "the room that is left", 100),
    "min_tokens": Note("How many tokens must come before an answer may end.", "0", 5),
    "stop": Note("Texts that end the answer where they appear.", "none", ["\n\n"]),
    "stop_sequences": Note("Texts that end the answer where they appear.", "none", ["\n\n"]),
    "stop_token_ids": Note("Tokens that end the answer.", "none", [2]),
    "include_stop_str_in_output": Note("Keep the text that ended the answer.", "false", True),
    "ignore_eos": Note("Go on behind the model's own end of the answer.", "false", True),
    # what an answer must look like
    "response_format": Note(
        "Holds the answer to JSON, or to JSON of a schema.", "free text", {"type": "json_object"}
    ),
    "text": Note(
        "Holds the answer to JSON, or to JSON of a schema.",
        *("free text", {"format": {"type": "json_object"}}),
    ),
    "output_format": Note(
        "The older place of output_config.format.",
        *("free text", {"type": "json_schema", "schema": SCHEMA}),
    ),
    "output_config": Note(
        "The form of the answer, and how much to think.", "none", {"effort": "low"}
    ),
    "structured_outputs": Note("One constraint, by its kind.", "none", {"choice": ["yes", "no"]}),
    "json_schema": Note("Holds the answer to JSON of this schema.", "none", SCHEMA),
    "structural_tag": Note(
        "Free text in which each trigger begins a tag whose content has a schema.",
        "none",
        {
            "structures": [{"begin": "<city>", "schema": SCHEMA, "end": "</city>"}],
            "triggers": ["<city>"],
        },
    ),
    # tools
    "tools": Note("What the model may call.", "none", [{"type": "function", "function": FUNCTION}]),
    "tool_choice": Note("Whether the model must call a tool, and which.", "auto", "auto"),
    "parallel_tool_calls": Note("false: at most one call.", "true", False),
    # reasoning
    "reasoning": Note("How much the model thinks.", "as the model does", {"effort": "low"}),
    "reasoning_effort": Note("How much the model thinks.", "as the model does", "low"),
    "thinking": Note("Whether the model thinks.", "as the model does", {"type": "disabled"}),
    "thinking_token_budget": Note("How many tokens the model may think.", "no limit", 200),
    "include_reasoning": Note("false: leave the reasoning out of the answer.", "true", False),
    "separate_reasoning": Note("false: leave the reasoning in the content.", "true", False),
    "stream_reasoning": Note("Only true: reasoning is streamed as it comes.", "true", True),
    # streaming, and what else an answer tells
    "stream": Note("Send the answer as events while it is generated.", "false", True),
    "stream_options": Note(
        "Whether a stream tells its usage; only with stream.", "none", {"include_usage": True}
    ),
    "top_logprobs": Note("How many alternatives each token has; only with logprobs.", "0", 5),
    "prompt_logprobs": Note(
        "Add the logprobs of the prompt, with so many alternatives.", "none", 1
    ),
    "return_token_ids": Note("Add the token ids of prompt and answer.", "false", True),
    "return_token_strs": Note("Add the text of each token.", "false", True),
    "return_tokens_as_token_ids": Note("Name tokens of logprobs by their ids.", "false", True),
    "skip_special_tokens": Note("false: show control tokens in the answer.", "true", False),
    "include": Note("What a response has besides its text.", "nothing", []),
    # the prompt
    "echo": Note("Begin the answer with the prompt.", "false", True),
    "continue_final_message": Note("Go on with the last message, which stays open.", "false", True),
    "add_generation_prompt": Note("Begin the assistant's message in the prompt.", "true", True),
    "add_special_tokens": Note("Begin the prompt as the tokenizer does.", "true", False),
    "chat_template_kwargs": Note(
        "Variables of the chat template.", "none", {"enable_thinking": False}
    ),
    "control_tokens_in_text": Note(
        "Read control tokens that messages spell; otherwise they are text.",
        *("the option --control-tokens-in-text", False),
    ),
    "images": Note(
        "What becomes of images, which the model cannot see.", "the option --images", "placeholder"
    ),
    "truncate_prompt_tokens": Note(
        "Keep only the last tokens of the prompt; -1: as many as leave room.", "all", 1000
    ),
    "truncation": Note("auto: drop the oldest items if there is no room.", "disabled", "auto"),
    # who asks
    "cache_salt": Note("Share cached prefixes only with requests of this salt.", "none", "mine"),
    "extra_key": Note("Divides the cache as cache_salt does.", "none", "mine"),
    "user": Note("The user of a client: takes turns with others of that client.", "none", "ada"),
    # accepted at the value that asks for nothing special
    "modalities": Note('Only ["text"].', '["text"]', ["text"]),
    "function_call": Note('Only "none": tools has replaced it.', "none", "none"),
    "suffix": Note("Only the empty text.", "none", ""),
    "best_of": Note("Only 1, or n.", "n", 1),
    "use_beam_search": Note("Only false.", "false", False),
    "repeat_penalty": Note("Only 1: repetition_penalty does this.", "1", 1),
    "typical_p": Note("Only 1.", "1", 1),
    "mirostat": Note("Only 0.", "0", 0),
    "xtc_probability": Note("Only 0.", "0", 0),
    "dry_multiplier": Note("Only 0.", "0", 0),
    "background": Note("Only false.", "false", False),
    **dict.fromkeys(
        (
            *("mirostat_tau", "mirostat_eta", "xtc_threshold", "dry_base", "dry_allowed_length"),
            *("dry_penalty_last_n", "dry_sequence_breakers"),
        ),
        Note("Without effect: the sampler that it belongs to must be off."),
    ),
    **dict.fromkeys(
        (
            *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
            *("verbosity", "client_metadata", "cache_control"),
            *("metadata", "store", "context_management", "prompt_cache_options", "compaction"),
            *("container", "speed", "inference_geo", "betas", "billing_policy", "diagnostics"),
            *("fallbacks", "fallback_credit_token", "thread", "user_profile_id", "workspace_id"),
        ),
        Note(NO_EFFECT),
    ),
}

ANTHROPIC = {
    "tools": Note(
        "What the model may call.",
        *("none", [{"name": "get_weather", "input_schema": SCHEMA}]),
    ),
    "tool_choice": Note("Whether the model must call a tool, and which.", "auto", {"type": "auto"}),
    "metadata": Note("Its user_id stands for user.", "none", {"user_id": "ada"}),
    "mcp_servers": Note("Left out: this server runs no tools."),
}
CUT = Note(
    "Cut what the model reads to so many tokens; -1: to as many as it takes.",
    "refused if too long",
    512,
)
SCORING = {
    "instruction": Note("What is looked for.", "that of the model's card", "Find what purrs."),
    "truncate_prompt_tokens": CUT,
    "max_tokens_per_doc": Note("Cut each document to so many tokens.", "none", 256),
}
# Where a field is another one in the requests of a type.
NOTES_OF: Mapping[str, Mapping[str, Note]] = {
    "ChatRequest": {"logprobs": Note("Add the logprobs of the answer.", "false", True)},
    "CompletionRequest": {
        "logprobs": Note("Add logprobs, with so many alternatives for each token.", "none", 5)
    },
    "ResponsesRequest": {
        "tools": Note(
            "What the model may call.",
            *("none", [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]),
        ),
        "metadata": Note("Repeated in the answer.", "none", {"topic": "weather"}),
        "store": Note("Whether the answer is kept, to go on from its id.", "true", False),
        "top_logprobs": Note("How many alternatives each token has.", "0", 5),
        **dict.fromkeys(("stream_options", "max_tool_calls"), Note(NO_EFFECT)),
    },
    "MessagesRequest": ANTHROPIC,
    "CountTokensRequest": ANTHROPIC,
    "EmbeddingRequest": {
        "input": Note("The texts, or their token ids.", example=["a text", "another"]),
        "instruction": Note("What the texts ask for.", "none", "Find what answers the question."),
        "truncate_prompt_tokens": CUT,
        "encoding_format": Note("base64: float32 numbers, little-endian.", "float", "base64"),
        "dimensions": Note("How many numbers each vector keeps, the first.", "all", 64),
        "prompt_name": Note(
            "A prompt of the checkpoint, before each text.", "its default", "query"
        ),
        "add_special_tokens": Note("Only true.", "true", True),
    },
    "RerankRequest": SCORING
    | {
        "query": Note("What the documents are scored for.", example="What purrs?"),
        "documents": Note("Texts, or objects with a text.", example=["It rains.", "A cat does."]),
        "top_n": Note("How many documents to answer with, the best.", "all", 1),
        "return_documents": Note("Add the texts of the documents.", "false", True),
        "rank_fields": Note('Only ["text"].', "none", ["text"]),
        "priority": Note(NO_EFFECT),
    },
    "ScoreRequest": SCORING
    | {
        "text_1": Note("A query, or one for each text_2.", example="What purrs?"),
        "text_2": Note("A document, or several.", example=["It rains.", "A cat does."]),
    },
}

RANKED = {"query": "What purrs?", "documents": ["It rains.", "A cat does."]}
# A body to begin with, for each path.
BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 100},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 30},
    "/v1/responses": {"input": "Hello!", "max_output_tokens": 100},
    MESSAGES: {"messages": HELLO, "max_tokens": 100},
    COUNT_TOKENS: {"messages": HELLO},
    "/tokenize": {"prompt": "Hello!", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/embeddings": {"input": ["a text", "another"]},
    "/v1/rerank": RANKED,
    "/v2/rerank": RANKED,
    "/v1/score": {"text_1": "What purrs?", "text_2": ["It rains.", "A cat does."]},
}


def explain(kind: str, fields: dict[str, dict[str, Any]]) -> None:
    """Add to the schemas of the fields of a request, of the type `kind`, what is said of them."""
    notes = {**NOTES, **NOTES_OF.get(kind, {})}
    for name, schema in fields.items():
        note = _plain_note(schema) or notes.get(name)
        if note is None:
            continue
        schema["description"] = note.about
        if note.default:
            schema["description"] += f" Default: {note.default}."
        if note.example is not None:
            schema["examples"] = [note.example]


def _plain_note(schema: dict[str, Any]) -> Note | None:
    """What follows from the schema: a field that is not supported, or takes a single value."""
    if schema.get("type") == "null":
        return Note(schema["description"])
    for choice in schema.get("anyOf", ()):
        values = choice.get("enum", [choice["const"]] if "const" in choice else [])
        if len(values) == 1:
            return Note(f"Only {json.dumps(values[0])}.", "none", values[0])
    return None
