"""The options of several replicas. Imports nothing heavy, so that --help is fast."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

from minisgl.config import check_at_least, check_types, option, refuse
from minisgl.errors import one_of

CACHE, LEAST_LOADED, ROUND_ROBIN = "cache", "least-loaded", "round-robin"
POLICIES = (CACHE, LEAST_LOADED, ROUND_ROBIN)

# What a replica does, where they divide the work.
PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)
router_option = partial(option, group="Replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The options as the user gave them; raises ConfigError for an invalid value."""

    replicas: int = router_option(
        1, "Number of engines behind the address, each with --tp times --pp GPUs of its own."
    )
    router_policy: str = router_option(
        CACHE,
        "Which replica gets a request: cache (the one with its longest cached prefix, unless its "
        "load is uneven), least-loaded or round-robin.",
        choices=POLICIES,
    )
    roles: str = router_option(
        "",
        "What each replica does, as in prefill,decode: some compute prompts, and hand them over to "
        "those that generate. Empty: all do both.",
    )
    router_processes: int = router_option(
        1, "Number of processes that route, where one is not enough."
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_at_least(self, "replicas", 1)
        check_at_least(self, "router_processes", 1)
        if self.roles:
            self._check_roles()
        if self.replicas == 1:
            for spec in fields(self):
                if getattr(self, spec.name) != spec.default:
                    refuse(self, spec.name, "requires --replicas 2 or more")

    @property
    def role_of_each(self) -> tuple[str, ...]:
        """The role of each replica; empty if they have none."""
        return tuple(role.strip() for role in self.roles.split(",")) if self.roles else ()

    def _check_roles(self) -> None:
        roles = self.role_of_each
        if not {*roles} <= {*ROLES}:
            refuse(self, "roles", f"{one_of(ROLES)} for each replica, separated by commas")
        if {*roles} != {*ROLES}:
            refuse(self, "roles", "needs at least one replica for prefill and one for decode")
        if self.replicas > 1 and len(roles) != self.replicas:
            refuse(self, "roles", f"has {len(roles)}, and there are --replicas {self.replicas}")
