"""The options of a Ray cluster. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass, fields

from minisgl.config import check_at_least, check_types, option, refuse

GROUP = "Ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """The options as the user gave them; raises ConfigError for an invalid value."""

    ray: bool = option(
        False,
        "Run the engines and the router on a Ray cluster: that of RAY_ADDRESS, or of this machine.",
        group=GROUP,
    )
    ray_max_replicas: int | None = option(
        None,
        "Number of engines up to which Ray starts more under load, from --replicas on (with "
        "--roles of each kind); none if not given.",
        group=GROUP,
    )
    ray_target_requests: int = option(
        64, "Open requests of an engine from which on Ray starts another.", group=GROUP
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "ray_max_replicas", 1)
        check_at_least(self, "ray_target_requests", 1)
        if not self.ray:
            for spec in fields(self):
                if getattr(self, spec.name) != spec.default:
                    refuse(self, spec.name, "requires --ray")
