"""Options by which experts of a model have copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl.models.registry import read_model_config


def copied(model: Path, folder: Path, **options: Any) -> dict[str, Any]:
    """By counts, which are written into `folder`, the first experts of each layer are the
    busiest."""
    facts = read_model_config(model).facts().experts
    assert facts is not None
    counts = [1000 // (expert + 1) for expert in range(facts.num_experts)]
    file = folder / "counts.json"
    file.write_text(json.dumps({"layers": [counts] * facts.num_layers}))
    return {"ep": True, "redundant_experts": 3, "expert_counts": str(file), **options}
