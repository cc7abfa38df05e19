"""The answers of /v1/chat/completions and /v1/completions, whose requests the other APIs become."""
