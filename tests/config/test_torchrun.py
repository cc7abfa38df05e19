"""The place among the nodes that torchrun's environment gives a process."""

from __future__ import annotations

import pytest

from minisgl.config import EngineConfig, with_torchrun
from minisgl.errors import ConfigError

# Of a process on the second of two machines, with four ranks each.
ENVIRON = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "4",
    "WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_without_torchrun_the_options_stay_as_they_are() -> None:
    config = EngineConfig(tp=8)
    assert with_torchrun(config, {"MASTER_ADDR": "10.0.0.1", "RANK": "4"}) is config


def test_a_process_knows_its_node_and_the_port_beside_that_of_torchrun() -> None:
    config = with_torchrun(EngineConfig(tp=8), ENVIRON)
    assert config == EngineConfig(
        tp=8, nnodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29501
    )
    staged = with_torchrun(EngineConfig(tp=2, pp=4), ENVIRON)
    assert staged is not None and staged.nnodes == 2


def test_options_that_are_given_win() -> None:
    config = with_torchrun(EngineConfig(tp=8, master_port=7000, master_addr="10.0.0.9"), ENVIRON)
    assert config is not None
    assert (config.node_rank, config.master_addr, config.master_port) == (1, "10.0.0.9", 7000)


def test_one_process_of_a_node_starts_all_its_ranks() -> None:
    assert with_torchrun(EngineConfig(tp=8), ENVIRON | {"LOCAL_RANK": "3"}) is None
    one_each = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": "1"}
    assert with_torchrun(EngineConfig(tp=8), ENVIRON | one_each) is not None


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        ({"tp": 4}, {}, r"^--tp 4: torchrun starts 8 processes; allowed: 8$"),
        ({"tp": 4, "pp": 3}, {}, r"^--pp 3: with --tp 4 .* 8 processes .*; --tp times --pp must"),
        ({"tp": 8}, {"GROUP_RANK": "x"}, r"^GROUP_RANK x: allowed: a number"),
        ({"tp": 8}, {"MASTER_PORT": "65535"}, r"^--master-port 65536: allowed: 1 to 65535$"),
        ({"tp": 3}, {"WORLD_SIZE": "3"}, r"^--nnodes 2: the nodes cannot share 3 ranks"),
    ],
)
def test_what_does_not_fit_is_refused(
    options: dict[str, int], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        with_torchrun(EngineConfig(**options), ENVIRON | environ)  # type: ignore[arg-type]
