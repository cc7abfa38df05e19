"""Request bodies in the shape that coding agents send, with contents of our own."""

from __future__ import annotations

from typing import Any

WORDS = "Read the whole file before you change it, and say in one line what you have done. "


def claude_code_body(question: str, nonce: str = "a1b2c") -> dict[str, Any]:
    """A first turn of Claude Code: some 78 KB, nearly all of it instructions and 24 tools."""
    reminder = "<system-reminder>\nThe date is 22 November.\n</system-reminder>"
    return {
        "model": "fake",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": reminder},
                    {"type": "text", "text": question, "cache_control": {"type": "ephemeral"}},
                ],
            },
            {"role": "system", "content": "Skills: " + WORDS * 70},
        ],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.197.f21; cch={nonce};",
            },
            {
                "type": "text",
                "text": "You are an agent at a command line.",
                "cache_control": {"type": "ephemeral"},
            },
            {
                "type": "text",
                "text": "\n# Tone\n" + WORDS * 140,
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
            },
        ],
        "tools": [_bash(), *map(_tool, range(23))],
        "metadata": {"user_id": '{"device_id":"0","account_uuid":"","session_id":"1"}'},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }


def _bash() -> dict[str, Any]:
    properties = {
        "command": {"type": "string", "description": "What to run."},
        "timeout": {"type": "number", "exclusiveMinimum": 0, "maximum": 600_000},
        "run_in_background": {"type": "boolean"},
    }
    return _spec("Bash", properties, ["command"])


def _tool(number: int) -> dict[str, Any]:
    properties = {
        "file_path": {"type": "string", "pattern": "^/", "maxLength": 4096},
        "mode": {"anyOf": [{"const": "read"}, {"const": "write"}, {"type": "null"}]},
        "when": {"type": "string", "format": "date-time"},
        "env": {
            "type": "object",
            "propertyNames": {"type": "string", "pattern": "^[A-Z_]+$"},
            "additionalProperties": {"type": "string"},
        },
        "todos": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        },
    }
    return _spec(f"Tool{number}", properties, ["file_path"])


def _spec(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"name": name, "description": f"{name}: " + WORDS * 22, "input_schema": schema}
