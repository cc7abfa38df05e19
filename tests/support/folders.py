"""The folders of the checkout that tests read."""

from pathlib import Path

SUPPORT = Path(__file__).parent
ROOT = SUPPORT.parent.parent
SCRIPTS = ROOT / "scripts"
