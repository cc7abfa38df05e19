"""Locates the files of a model: bundled, in a local folder, or on the Hugging Face Hub."""

from __future__ import annotations

import reprlib
from pathlib import Path

from minisgl.errors import CheckpointError, ModelNotFoundError
from minisgl.models.config_reader import CONFIG_FILE, read_json
from minisgl.paths import path_of

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "assets" / "demo"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Files with weights that are not read, by their endings.
OTHER_WEIGHTS = {
    ".gguf": "GGUF, the format of llama.cpp and ollama",
    ".bin": "PyTorch's pickle format, which can run any code when it is read",
    ".pt": "PyTorch's pickle format, which can run any code when it is read",
    ".pth": "PyTorch's pickle format, which can run any code when it is read",
}

# Shown to users of the demo model.
DEMO_NOTE = (
    "This is the bundled demo model, small and with few skills; --model takes a real one, as a "
    "folder or a Hugging Face id."
)


def locate_model(name: str, *, load_format: str = "auto") -> Path:
    """The folder of model `name`: '' is the bundled demo model, else a folder or a Hub id.

    A Hub id is downloaded into the Hub's cache, with a progress bar, unless it is cached already;
    with load_format 'dummy' without its weights. Blocks. Raises ModelNotFoundError,
    ConfigError as `path_of` does, or DownloadError for a failure that may be temporary.
    """
    if not name:
        if not (DEMO_FOLDER / CONFIG_FILE).is_file():
            raise ModelNotFoundError(
                "The bundled demo model is missing from this installation; name one with --model."
            )
        return DEMO_FOLDER
    folder = path_of("--model", name)
    if folder.is_dir():
        if load_format != "dummy" or not (folder / CONFIG_FILE).is_file():
            _check_format(folder)
        return folder
    if folder.exists():
        if folder.suffix in OTHER_WEIGHTS:
            raise ModelNotFoundError(_not_read(name, folder.suffix))
        raise ModelNotFoundError(f"{name} is a file; --model takes the folder that holds it.")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"There is no folder {name}.")
    if name.lower().endswith("-gguf"):  # as such repositories are called
        raise ModelNotFoundError(_not_read(name, ".gguf"))
    # Loads the Hub's client, which takes longer than reading a small model.
    from minisgl.models.download import download

    return download(name, with_weights=load_format != "dummy")


def _check_format(folder: Path) -> None:
    """Raise ModelNotFoundError for a folder that has weights only in formats that are not read."""
    suffixes = {path.suffix for path in folder.iterdir()}
    others = [suffix for suffix in OTHER_WEIGHTS if suffix in suffixes]
    if others and ".safetensors" not in suffixes and not (folder / INDEX_FILE).is_file():
        raise ModelNotFoundError(_not_read(str(folder), others[0]))


def _not_read(name: str, suffix: str) -> str:
    """The message for weights in files with this ending."""
    remedy = "give the folder or the Hugging Face id of the original model"
    if suffix != ".gguf":
        remedy = (
            "convert them with save_pretrained of transformers, or give a checkpoint that has them"
        )
    return (
        f"{name}: the weights are in {OTHER_WEIGHTS[suffix]}. minisgl reads safetensors "
        f"(*.safetensors beside {CONFIG_FILE}): {remedy}."
    )


def safetensors_files(folder: Path) -> list[Path]:
    """The files with the weights, sorted. Raises CheckpointError if one is missing."""
    weight_map = read_index(folder)
    if weight_map is None:
        return [folder / SINGLE_FILE]
    files = [folder / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {file.name}, which {INDEX_FILE} names.")
    return files


def read_index(folder: Path) -> dict[str, str] | None:
    """The name of the file of each tensor; None: all are in SINGLE_FILE, which is there. Raises
    CheckpointError."""
    if (folder / SINGLE_FILE).is_file():
        return None
    index = folder / INDEX_FILE
    if not index.is_file():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
        instead = f", not {reprlib.repr(others[0])}" if others else ""
        raise CheckpointError(
            f"{folder} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors "
            f"are read{instead}; --load-format dummy runs without weights."
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    strings = {name for name in weight_map.values() if isinstance(name, str)}
    others = [name for name in weight_map.values() if not isinstance(name, str)]
    for name in (*others[:1], *sorted(strings)):
        if not _is_file_name(name):
            raise CheckpointError(
                f"{index}: weight_map names {reprlib.repr(name)}, which is not the name of a file "
                "in this folder."
            )
    return weight_map


def _is_file_name(name: object) -> bool:
    """Whether `name` is a file name without a folder. (The file itself may be a link, as in the
    Hub's cache.)"""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name.isprintable() and not any(separator in name for separator in "/\\")
