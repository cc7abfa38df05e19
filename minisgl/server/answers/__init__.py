"""From a request to its sequences, and from their tokens to what the APIs render."""
