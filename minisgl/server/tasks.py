"""What a model was loaded for, and the endpoints that such a model answers."""

from __future__ import annotations

from minisgl.errors import CallerError
from minisgl.server.http.paths import COUNT_TOKENS, MESSAGES

EMBEDDINGS = "/v1/embeddings"
RERANK, RERANK_V2 = "/v1/rerank", "/v2/rerank"
SCORE = "/v1/score"

# By the task of the engine (--task). The endpoints that are in no row are there for every task.
ENDPOINTS = {
    "generate": (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses"),
        *(MESSAGES, COUNT_TOKENS),
    ),
    "embed": (EMBEDDINGS,),
    "rerank": (RERANK, RERANK_V2, SCORE),
}
PURPOSES = {
    "generate": "to generate text",
    "embed": "to make vectors of texts",
    "rerank": "to score documents",
}


class WrongTaskError(CallerError):
    """A request to an endpoint that the model was not loaded for."""

    code = "wrong_task"

    def __init__(self, path: str, loaded: str, needed: str) -> None:
        *others, last = ENDPOINTS[loaded]
        available = f"{', '.join(others)} and {last}" if others else last
        super().__init__(
            f"{path} is not available: this server's model was loaded {PURPOSES[loaded]} "
            f"(--task {loaded}), which {available} is for. Models that {path} can use are served "
            f"by `minisgl serve --task {needed}`."
        )


def check_endpoint(path: str, loaded: str) -> None:
    """Raise WrongTaskError if the endpoint at `path` is not for models of the task `loaded`."""
    for needed, paths in ENDPOINTS.items():
        if path in paths and needed != loaded:
            raise WrongTaskError(path, loaded, needed)
