"""The HTTP client of the chat and the benchmark for servers of the OpenAI API."""
