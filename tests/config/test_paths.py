"""Paths of options that nobody can look up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.resolving import MODEL, resolved

from minisgl.drafting.networks.loading import find_network
from minisgl.errors import ConfigError
from minisgl.models.hub import DEMO_FOLDER, locate_model
from minisgl.models.registry import read_model_config
from minisgl.paths import path_of
from minisgl.text.template_file import read_template
from minisgl.tiers.disk.disk_cache import check_folder

NO_USER = "~no-such-user-here/file"
LONG = "x" * 300


def read_drafter(name: str) -> None:
    target = read_model_config(DEMO_FOLDER)
    find_network(name, target, DEMO_FOLDER, load_format="auto")


def open_disk_cache(name: str) -> None:
    check_folder(replace(resolved(MODEL, host_cache=1.0, disk_cache="x"), disk_cache=name))


READERS: dict[str, Callable[[str], object]] = {
    "--model": locate_model,
    "--speculative": read_drafter,
    "--chat-template": read_template,
    "--disk-cache": open_disk_cache,
}


@pytest.mark.parametrize("option", READERS)
def test_options_refuse_a_path_that_nobody_can_look_up(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option} {NO_USER}: there is no such user, .*allowed"):
        READERS[option](NO_USER)
    with pytest.raises(ConfigError, match=f"^{option} {LONG}: File name too long; allowed"):
        READERS[option](LONG)


def test_a_path_that_a_process_may_not_look_up_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stat(path: Path, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", stat)
    with pytest.raises(ConfigError, match=r"--model .*: Permission denied; allowed: a path that"):
        path_of("--model", str(tmp_path))


def test_a_path_may_name_nothing_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert path_of("--model", "~/new") == tmp_path / "new"
