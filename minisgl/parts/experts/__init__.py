"""The experts that the tokens of requests have taken."""
