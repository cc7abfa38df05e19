"""Downloads models from the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from minisgl.errors import DownloadError, ModelNotFoundError

_TEXT_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer*", "tiktoken*"]
# Other formats of the same weights: subfolders, and Mistral's consolidated file.
_IGNORED = ["*/*", "consolidated*"]


def download(name: str, *, with_weights: bool) -> Path:
    """The folder of the files of Hub id `name` in the Hub's cache, downloaded if they are missing.

    Raises as `locate_model` does.
    """
    wanted = [*_TEXT_FILES, "*.safetensors"] if with_weights else _TEXT_FILES
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, ignore_patterns=_IGNORED))
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name} is neither a folder nor a Hugging Face id (owner/model)."
        ) from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then set "
            "HF_TOKEN or run `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"{name} is neither a folder nor a public model on Hugging Face; for a private one set "
            "HF_TOKEN or run `hf auth login`."
        ) from error
    except LocalEntryNotFoundError as error:
        # In offline mode another attempt would fail in the same way.
        kind = ModelNotFoundError if constants.HF_HUB_OFFLINE else DownloadError
        raise kind(
            f"{name} is no folder, it is not (wholly) in the local cache, and Hugging Face cannot "
            "be reached; give a local folder, or go online. Without --model the demo model runs."
        ) from error
    except Exception as error:  # the Hub's client lets errors of its HTTP library pass
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = ModelNotFoundError if _is_final(error) else DownloadError
        raise kind(f"{name} cannot be downloaded: {reason}") from error


def _is_final(error: Exception) -> bool:
    """Whether another attempt would fail in the same way."""
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status: int = error.response.status_code
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(error, PermissionError)
