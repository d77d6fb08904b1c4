"""Real text that every installation has: parts of Python and of this project's dependencies, in several styles; and,
since none of them carries another language, a German text of our own. None of it is calibration text."""

import decimal
import difflib
import doctest
import heapq
import inspect
import random
import statistics
import textwrap
from importlib.metadata import distribution, metadata
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType

_MANUAL_TOPICS = ("execmodel", "exceptions", "objects", "import", "with")
_LICENSED = "transformers"
_DESCRIBED = ("fastapi", "redis", "tokenizers")
_CODE: tuple[ModuleType, ...] = (textwrap, statistics, difflib)
_ESSAYS: tuple[ModuleType, ...] = (doctest, difflib, decimal, random)


def bundled_texts() -> dict[str, str]:
    """style -> text of some thousand tokens, the same for the same versions of Python and of the packages."""
    return {
        "manual": "\n".join(topics[name] for name in _MANUAL_TOPICS),
        "essay": "\n\n".join((_heap_essay(), *(inspect.getdoc(module) or "" for module in _ESSAYS))),
        "readme": "\n\n".join(_description(name) for name in _DESCRIBED),
        "code": "\n\n".join(inspect.getsource(module) for module in _CODE),
        "licence": _license(_LICENSED),
        "german": (Path(__file__).parent / "german.txt").read_text(encoding="utf-8"),
    }


def _heap_essay() -> str:
    return str(vars(heapq)["__about__"])


def _description(package: str) -> str:
    return str(metadata(package).json["description"])


def _license(package: str) -> str:
    files = distribution(package).files or []
    texts = [str(file.locate()) for file in files if file.name.upper().startswith("LICEN")]
    with open(texts[0], encoding="utf-8") as license_file:
        return license_file.read()
