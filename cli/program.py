"""What the user typed to get here, for messages that tell what to type next."""

import shutil
import sys
from pathlib import Path


def program() -> str:
    """`twostroke` where the shell finds this very script under that name; else the path that was typed."""
    typed = Path(sys.argv[0])
    if typed.name == "__main__.py":
        return "python -m cli"
    found = shutil.which(typed.name)
    return typed.name if found is not None and typed.exists() and Path(found).samefile(typed) else str(typed)
