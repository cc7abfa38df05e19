"""The names of the parsers, for options. Imports nothing, so that --help is fast."""

AUTO, NONE = "auto", "none"
TOOL_PARSERS = (
    AUTO,
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "pythonic",
    "mistral",
    "xlam",
    "functionary_v3_1",
    "functionary_v3_2",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "glm45",
    "glm47",
    "gemma4",
    "harmony",
    "kimi_k2",
    "lfm2",
    "minimax_m2",
    "seed_oss",
    NONE,
)
REASONING_PARSERS = (AUTO, "think", NONE)
