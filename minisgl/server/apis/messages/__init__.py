"""Anthropic's Messages API, as a second language for the conversations that the server answers."""
