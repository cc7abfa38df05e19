"""What transformers knows of config.json: the model_type of an architecture, and the fields that
its code reads."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

# A field of a class, or what its methods take from themselves or from the values that they get.
_READ_BY_CLASS = re.compile(r"^    (\w+):|\bself\.(\w+)|[\"'](\w+)[\"']", re.MULTILINE)
_READ_BY_MODEL = re.compile(r"\bconfig\.(\w+)|\bconfig, [\"'](\w+)[\"']")


def model_type_of(values: Mapping[str, Any]) -> str | None:
    """The model_type of a config.json: where transformers does not know it, as that of a checkpoint
    with code of its own, the one that it has for the architecture. None: there is none."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind, architectures = values.get("model_type"), values.get("architectures")
    if not isinstance(kind, str):
        return None
    if kind in CONFIG_MAPPING:
        return kind
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    named = architectures if isinstance(architectures, list) else []
    return next((kind for kind, architecture in known if architecture in named), None)


def causal_decoders() -> Collection[str]:
    """The names of the architectures of causal decoders of which transformers has the code."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def fields_read(values: Mapping[str, Any]) -> frozenset[str] | None:
    """The names that transformers' code reads from such a config.json, and some more, as its source
    shows: that of the config's class, of the model and of masks. None: transformers has no code."""
    import transformers
    from transformers import CONFIG_MAPPING

    if (kind := model_type_of(values)) is None:
        return None
    config = CONFIG_MAPPING[kind]
    classes = (each for each in config.__mro__ if each.__module__.startswith("transformers."))
    found = [_READ_BY_CLASS.findall(inspect.getsource(each)) for each in classes]
    models = Path(inspect.getfile(config)).parent.glob("modeling_*.py")
    masks = Path(transformers.__file__).parent / "masking_utils.py"
    found += [_READ_BY_MODEL.findall(path.read_text("utf-8")) for path in (*models, masks)]
    return frozenset(name for matches in found for names in matches for name in names)
