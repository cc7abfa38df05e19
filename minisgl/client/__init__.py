"""How the chat and the benchmark ask servers of the OpenAI API. Imports neither of them."""
