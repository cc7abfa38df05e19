"""Parses answers while they are generated: reasoning, content, tool calls."""
