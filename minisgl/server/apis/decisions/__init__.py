"""The Decisions API: a question becomes a chat whose answer is one label, which is not written but
weighed."""
