"""The deployments of Ray Serve: the ingress, and the engines behind it.

With --roles there are two deployments of engines: those that answer, and those that compute prompts
for them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.config import EngineConfig, refuse
from minisgl.distributed.addresses import Address
from minisgl.distributed.cluster_token import OPTION, VARIABLE, read_token
from minisgl.errors import ConfigError
from minisgl.interpreter import favour_steps
from minisgl.ray.config import RayConfig
from minisgl.ray.engine import Answer, EngineReplica
from minisgl.ray.ingress import create_ingress_app
from minisgl.ray.routing import PrefixRouter
from minisgl.router.config import DECODE, PREFILL, RouterConfig
from minisgl.router.exchange import EngineLostError, HTTPRequest
from minisgl.router.process import with_pages_shared
from minisgl.router.replica import start_sharing
from minisgl.server import with_all_keys
from minisgl.server.answers.handover import Handover
from minisgl.server.config import ServerConfig
from minisgl.server.engine_state import NotReadyError, base_names
from minisgl.server.http.hosts import Hosts, allowed_names, is_loopback
from minisgl.server.http.request_ids import HEADER
from minisgl.server.process import start_engine

ENGINE, INGRESS = "engine", "ingress"  # and PREFILL
# Of the address, which is the cluster's.
ADDRESS_OPTIONS = ("host", "port", "uds", "ssl_certfile", "ssl_keyfile")
MAX_OPEN = 1 << 16  # requests of an ingress
MAX_STARTS = 3  # of an engine that fails to start, before the application counts as failed
METRICS_SECONDS = 5


def build(
    engine: EngineConfig,
    server: ServerConfig,
    router: RouterConfig,
    options: RayConfig,
    *,
    owns_address: bool = False,
) -> Any:
    """The application of Ray Serve. Raises ConfigError.

    owns_address: whether the options of the address are those of the cluster, because who calls
    this sets them.
    """
    if not owns_address:
        defaults = ServerConfig()
        for name in ADDRESS_OPTIONS:
            if getattr(server, name) != getattr(defaults, name):
                refuse(server, name, "the address is the cluster's; set it in its http_options")
    if engine.nnodes > 1:
        refuse(engine, "nnodes", "with Ray each engine is on one node; allowed: 1")
    if server.lora_root:
        refuse(server, "lora_root", "with Ray adapters are loaded at the start; allowed: --lora")
    if server.trainer:
        refuse(server, "trainer", "with Ray no engine has an address of its own")
    base_names(server, engine)
    server = with_all_keys(server)
    hosts = allowed_names(server, on_loopback=owns_address and is_loopback(server.host))
    inner = replace(server, **{name: getattr(ServerConfig(), name) for name in ADDRESS_OPTIONS})
    inner = replace(inner, allowed_host=(), cors_origin=(), api_key_file=None)
    if router.roles and ray.is_initialized():
        _pages_address(engine)  # what does not go with them is refused before anything starts
    numbers = Counter(router.role_of_each) or {"": router.replicas}
    engines = {
        _name(role): _engines(role, number, engine, inner, router, options)
        for role, number in numbers.items()
    }
    ingress = serve.deployment(
        serve.ingress()(IngressDeployment),
        name=INGRESS,
        num_replicas=router.router_processes,
        max_ongoing_requests=MAX_OPEN,
        graceful_shutdown_timeout_s=server.drain_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return ingress.bind(engines, server, hosts)


def _name(role: str) -> str:
    """Of the deployment of engines with this role."""
    return PREFILL if role == PREFILL else ENGINE


def _engines(
    role: str,
    number: int,
    engine: EngineConfig,
    server: ServerConfig,
    router: RouterConfig,
    options: RayConfig,
) -> Any:
    """A deployment of so many engines. Raises ConfigError."""
    engines = serve.deployment(
        EngineDeployment,
        name=_name(role),
        # The engine itself refuses requests beyond its limits, in the form of the API.
        max_ongoing_requests=2 * (engine.max_running_requests + engine.max_queued_requests),
        graceful_shutdown_timeout_s=server.drain_timeout,
        max_constructor_retry_count=MAX_STARTS,
        ray_actor_options={"num_cpus": 1, "num_gpus": _num_gpus(engine)},
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_router_kwargs": {"policy": router.router_policy},
        },
        **_scaling(number, options),
    )
    return engines.bind(engine, server, role, router.replicas)


def _num_gpus(engine: EngineConfig) -> int:
    """Of an engine. Without a connection to the cluster, it is taken to have GPUs."""
    has_gpus = not ray.is_initialized() or ray.cluster_resources().get("GPU", 0) > 0
    num_ranks = engine.tp * engine.pp
    return num_ranks if engine.device == "cuda" or (engine.device == "auto" and has_gpus) else 0


def _scaling(number: int, options: RayConfig) -> dict[str, Any]:
    """number: of engines."""
    if options.ray_max_replicas is None:
        return {"num_replicas": number}
    if options.ray_max_replicas < number:
        refuse(
            options, "ray_max_replicas", f"allowed: {number} or more, as many as Ray begins with"
        )
    limits = {"min_replicas": number, "max_replicas": options.ray_max_replicas}
    target = {"target_ongoing_requests": options.ray_target_requests}
    return {"autoscaling_config": {**limits, **target}}


def _pages_address(engine: EngineConfig) -> str:
    """Where an engine of this node exchanges KV pages with the others.

    Raises ConfigError if they may be on other nodes, and there is no secret to know them by.
    """
    if read_token(engine):
        return str(Address(host=ray.util.get_node_ip_address()))
    if sum(node["Alive"] for node in ray.nodes()) > 1:
        raise ConfigError(
            "--roles",
            f"{PREFILL},{DECODE}",
            "on a cluster of several nodes the engines need a shared secret to exchange KV pages: "
            f"set {VARIABLE} or {OPTION} on each node, to the output of `openssl rand -hex 32`",
        )
    return str(Address(host="127.0.0.1"))


def _own_name() -> str:
    """The name of this replica of a deployment."""
    return str(serve.get_replica_context().replica_id.unique_id)


class EngineDeployment(EngineReplica):
    """An engine in a process of Ray's."""

    async def __init__(  # type: ignore[misc]
        self, engine: EngineConfig, config: ServerConfig, role: str, num_engines: int
    ) -> None:
        """role: empty if it does whole requests. num_engines: of the application, by its
        options."""
        _log_with_ray_serve()
        if not role:
            super().__init__(await start_engine(engine), config, name=_own_name(), options=engine)
        else:
            address = _pages_address(engine)
            started = await start_sharing(with_pages_shared(engine, num_engines))
            try:
                address = await started.pages.share(address, always_load=role == DECODE)
            except BaseException:
                await started.close()
                raise
            around = Handover(started, address).around
            super().__init__(started, config, around, _own_name(), engine)
        favour_steps()

    async def labelled_metrics(self, accept: str) -> tuple[str, bytes]:
        """The engine's name and its page of metrics. accept: the format."""
        return _own_name(), await self.metrics(accept)

    async def __del__(self) -> None:
        """Called by Ray Serve when all requests have ended, or their time is over."""
        if hasattr(self, "_engine"):  # which may not have started
            await self.close()


class IngressDeployment:
    """The HTTP application in a process of Ray's."""

    def __init__(
        self, engines: dict[str, DeploymentHandle], config: ServerConfig, hosts: tuple[str, ...]
    ) -> None:
        """engines: by the names of their deployments. hosts: the names that requests may be
        addressed to; empty: any."""
        _log_with_ray_serve()
        self._engines = RayEngines(engines)
        self._config = config
        self._hosts = Hosts(hosts) if hosts else None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Ray Serve after the constructor."""
        return behind_proxy(create_ingress_app(self._engines, self._config, self._hosts))


class RayEngines:
    """The way to the engines, by handles of their deployments."""

    def __init__(self, handles: Mapping[str, DeploymentHandle]) -> None:
        self._handles = handles
        self._answers = handles[ENGINE].options(method_name="answer", stream=True)
        self._prefills: DeploymentHandle | None = None
        if PREFILL in handles:
            self._prefills = handles[PREFILL].options(method_name="prefill", stream=True)

    @property
    def has_prefill(self) -> bool:
        return self._prefills is not None

    def ask(self, request: HTTPRequest) -> Answer:
        return self._ask(self._answers, request)

    def ask_prefill(self, request: HTTPRequest) -> Answer:
        return self._ask(self._prefills, request)

    async def _ask(self, answers: DeploymentHandle, request: HTTPRequest) -> Answer:
        answer = answers.remote(request)
        try:
            async for part in answer:
                yield part
        except RayActorError as error:
            raise EngineLostError from error
        except DeploymentUnavailableError:
            raise NotReadyError("dead", "No engine has started.") from None
        finally:
            answer.cancel()

    async def count(self) -> tuple[int, int]:
        app = serve.get_replica_context().app_name
        found = (await asyncio.to_thread(serve.status)).applications.get(app)
        if found is None or ENGINE not in found.deployments:  # it is being deleted
            return 0, 0
        states = found.deployments[ENGINE].replica_states
        return sum(states.values()), states.get("RUNNING", 0)

    async def metrics(self, accept: str) -> Mapping[str, bytes]:
        asked = [handle.broadcast("labelled_metrics", accept) for handle in self._handles.values()]
        found = [
            await pages.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
            for pages in asked
        ]
        return dict(page for pages in found for page in pages if isinstance(page, tuple))


def behind_proxy(app: ASGIApp) -> ASGIApp:
    """What Ray's proxy talks to: the application, but for what the proxy says or does itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":  # the proxy adds the same id
                del MutableHeaders(scope=message)[HEADER]
            await send(message)

        if scope["type"] == "http":
            await app(scope, receive, send_without_id)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})

    return answer


def _log_with_ray_serve() -> None:
    """Send this process's log lines where Ray Serve's own go, at their level."""
    logger, served = logging.getLogger("minisgl"), logging.getLogger("ray.serve")
    logger.handlers = served.handlers
    logger.propagate = False
    logger.setLevel(served.getEffectiveLevel())
