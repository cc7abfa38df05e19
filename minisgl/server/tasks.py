"""What a model was loaded for, and whether an endpoint is for such a model."""

from __future__ import annotations

from minisgl.errors import CallerError
from minisgl.server.endpoint import Endpoint
from minisgl.server.endpoints import ENDPOINTS

# By the task of the engine (--task).
PURPOSES = {
    "generate": "to generate text",
    "embed": "to make vectors of texts",
    "rerank": "to score documents",
}


class WrongTaskError(CallerError):
    """A request to an endpoint that the model was not loaded for."""

    code = "wrong_task"

    def __init__(self, endpoint: Endpoint, loaded: str) -> None:
        path, needed = endpoint.path, endpoint.task
        *others, last = (each.path for each in ENDPOINTS if each.task == loaded)
        available = f"{', '.join(others)} and {last}" if others else last
        super().__init__(
            f"{path} is not available: this server's model was loaded {PURPOSES[loaded]} "
            f"(--task {loaded}), which {available} is for. Models that {path} can use are served "
            f"by `minisgl serve --task {needed}`."
        )


def check_task(endpoint: Endpoint, loaded: str) -> None:
    """Raise WrongTaskError if the endpoint is not for models that were `loaded` for this."""
    if endpoint.task not in ("", loaded):
        raise WrongTaskError(endpoint, loaded)
