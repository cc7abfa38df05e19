"""Locating a model: a local folder, the bundled model, the Hugging Face cache or a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils._paths import filter_repo_objects

from minisgl.errors import (
    DownloadError,
    ModelNotFoundError,
)
from minisgl.models import download, hub
from minisgl.models.hub import locate_model


def hub_error(status: int, kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://huggingface.co")
    response: Any = httpx.Response(status, request=request)  # as good as that of its own client
    return kind(f"The Hub says {status}.", response=response)


def test_a_local_folder_is_located_and_other_paths_are_errors(tmp_path: Path) -> None:
    assert locate_model(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name in ("./nowhere", "/no/where", "a/b/c", str(tmp_path / "file")):
        with pytest.raises(ModelNotFoundError):
            locate_model(name)


@pytest.mark.parametrize(
    ("file", "format", "remedy"),
    [
        ("model-Q4_K_M.gguf", "GGUF", "original model"),
        ("pytorch_model.bin", "pickle", "save_pretrained"),
    ],
)
def test_weights_in_another_format_are_an_error_that_says_what_is_read(
    tmp_path: Path, file: str, format: str, remedy: str
) -> None:
    (tmp_path / file).touch()
    for name in (tmp_path, tmp_path / file):
        with pytest.raises(ModelNotFoundError) as raised:
            locate_model(str(name))
        said = str(raised.value)
        assert said.startswith(f"{name}: ") and format in said and remedy in said
        assert "minisgl reads safetensors" in said
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelNotFoundError, match="minisgl reads safetensors"):
        locate_model(str(tmp_path))
    assert locate_model(str(tmp_path), load_format="dummy") == tmp_path
    (tmp_path / "model.safetensors").touch()
    assert locate_model(str(tmp_path)) == tmp_path


def test_a_repository_of_gguf_files_is_refused_without_a_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download, "snapshot_download", None)
    with pytest.raises(ModelNotFoundError, match=r"^some/Model-GGUF: .*GGUF.*original model"):
        locate_model("some/Model-GGUF")


def test_an_empty_name_locates_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelNotFoundError, match="--model"):
        locate_model("")
    (tmp_path / "config.json").touch()
    assert locate_model("") == tmp_path


def test_an_uncached_model_offline_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(download.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="go online") as raised:
        locate_model("minisgl-tests/no-such-model")
    assert "\n" not in str(raised.value)
    with pytest.raises(ModelNotFoundError, match="neither a folder nor"):
        locate_model("not an id")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_download_fetches_only_the_needed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    assert locate_model("Qwen/Qwen3-0.6B", load_format=load_format) == tmp_path
    wanted = ["config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"]
    weights = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    others = ["original/params.json", "consolidated.safetensors", "model.bin", "onnx/model.onnx"]
    patterns = {
        "allow_patterns": asked["allow_patterns"],
        "ignore_patterns": asked["ignore_patterns"],
    }
    taken = list(filter_repo_objects([*wanted, *weights, *others], **patterns))
    assert asked["name"] == "Qwen/Qwen3-0.6B"
    assert taken == wanted + (weights if load_format == "auto" else weights[:1])


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (OSError("no space left on device\nmore"), 1),
        (LocalEntryNotFoundError("the connection was refused"), 1),
        (TimeoutError(), 1),
        (hub_error(429), 1),
        (hub_error(503), 1),
        (hub_error(400), 2),
        (hub_error(404, RepositoryNotFoundError), 2),
        (hub_error(403, GatedRepoError), 2),
        (PermissionError("the cache is read-only"), 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_download_that_may_succeed_later_has_another_exit_code(
    monkeypatch: pytest.MonkeyPatch, error: Exception, exit_code: int
) -> None:
    """A supervisor restarts after a 1 only."""

    def snapshot_download(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    monkeypatch.setattr(download.constants, "HF_HUB_OFFLINE", False)
    kind = DownloadError if exit_code == 1 else ModelNotFoundError
    with pytest.raises(kind, match=r"^Qwen/Qwen3-0\.6B .*\S$") as caught:
        locate_model("Qwen/Qwen3-0.6B")
    assert caught.value.exit_code == exit_code
    assert "\n" not in str(caught.value)
