"""The options of a Ray cluster. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from minisgl.config import check_at_least, check_types, option, refuse

ray_option = partial(option, group="Ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The options as the user gave them; raises ConfigError for an invalid value."""

    ray: bool = ray_option(
        False,
        "Run the engines and the router on a Ray cluster: that of RAY_ADDRESS, or of this machine.",
    )
    ray_max_replicas: int | None = ray_option(
        None,
        "Number of engines up to which Ray starts more under load, from --replicas on (with "
        "--roles of each kind); none if not given.",
    )
    ray_target_requests: int = ray_option(
        64, "Open requests of an engine from which on Ray starts another."
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "ray_max_replicas", 1)
        check_at_least(self, "ray_target_requests", 1)
        if not self.ray:
            for spec in fields(self):
                if getattr(self, spec.name) != spec.default:
                    refuse(self, spec.name, "requires --ray")
