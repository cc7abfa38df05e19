"""The Responses API: a request becomes a chat, and its answer a list of items."""
