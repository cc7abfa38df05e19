"""What to say of the model that comes with the package."""

from __future__ import annotations

import json
from importlib import resources


def demo_note() -> str | None:
    """One sentence where the bundled model is untrained, None where it is not."""
    facts = json.loads((resources.files("minisgl") / "assets/demo/minisgl.json").read_text())
    if facts["trained"]:
        return None
    return (
        "The bundled demo model is untrained and answers with noise; "
        "--model takes a folder or a Hugging Face id of a real one."
    )
