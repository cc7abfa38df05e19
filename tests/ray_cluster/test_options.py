"""The options of a Ray cluster, and how Ray Serve's tools pass them. Needs no Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from minisgl.errors import ConfigError
from minisgl.ray.arguments import options_of
from minisgl.ray.command import APP, why_not_started
from minisgl.ray.config import RayConfig
from minisgl.server.config import ServerConfig
from minisgl.server.process import bind


def test_a_failed_start_of_ray_names_a_taken_port_or_what_an_engine_has_said() -> None:
    error = RuntimeError("Traceback:\nActor died")
    with bind(ServerConfig(port=0)) as taken:
        server = ServerConfig(port=taken.getsockname()[1])
        said = why_not_started(error, server, {})
        assert isinstance(said, ConfigError) and f"--port {server.port}" in str(said)
        failed = SimpleNamespace(deployments={"engine": SimpleNamespace(message="a\nno memory")})
        assert "start the engines: no memory" in str(why_not_started(error, server, {APP: failed}))
    assert "start Serve: Actor died" in str(why_not_started(error, server, {}))


def test_options_are_named_as_on_the_command_line_and_take_texts_or_values() -> None:
    engine, server, router, ray = options_of(
        {
            "model": "Qwen/Qwen3-8B",
            "tensor-parallel-size": "2",  # as `serve run` passes them
            "--memory_ratio": "0.5",
            "quantization": "fp8",
            "strict-fields": "true",
            "api_key": "one,two",
            "replicas": 3,  # as a YAML file does
            "drain_timeout": 5,
            "served_model_name": ["a", "b"],
            "ray_max_replicas": "4",
        }
    )
    assert (engine.model, engine.tp, engine.memory_ratio) == ("Qwen/Qwen3-8B", 2, 0.5)
    assert engine.quantization == "fp8" and router.replicas == 3
    assert server.strict_fields and server.api_key == ("one", "two")
    assert server.drain_timeout == 5 and server.served_model_name == ("a", "b")
    assert ray == RayConfig(ray=True, ray_max_replicas=4)
    _, _, router, _ = options_of({"replicas": "2", "roles": "prefill,decode"})
    assert router.role_of_each == ("prefill", "decode")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("modell", "x", "option modell: unknown; allowed: model"),
        ("tp", "two", "--tp two: allowed: a whole number"),
        ("tp", "0", "--tp 0: allowed: 1 or more"),
        ("strict_fields", "perhaps", "--strict-fields perhaps: allowed: True or False"),
        ("served_model_name", 7, "--served-model-name 7: allowed: a list of texts"),
        ("ray_max_replicas", "0", "--ray-max-replicas 0: allowed: 1 or more"),
    ],
)
def test_a_wrong_option_is_refused_with_what_is_allowed(
    name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        options_of({name: value})
    assert said in str(refused.value)


def test_options_of_the_cluster_require_ray() -> None:
    with pytest.raises(ConfigError, match="--ray-target-requests 2: requires --ray"):
        RayConfig(ray_target_requests=2)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_a_user_without_ray_is_told_what_to_install() -> None:
    command = [sys.executable, "-m", "minisgl", "serve", "--ray"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    *_, last = ended.stderr.splitlines()  # behind the log
    assert last == "minisgl: --ray: Ray is not installed; pip install 'ray[serve]>=2.60'"
