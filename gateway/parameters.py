"""Parameters of the OpenAI API that are not supported: refused by name, unless their value asks for nothing."""

from collections.abc import Mapping
from typing import Any

from common.errors import UnsupportedParameter
from gateway.quote import quote

Harmless = Mapping[str, tuple[Any, ...]]
"""Name -> the values, beside null, with which the parameter changes nothing: they are accepted."""

HARMLESS_IN_COMPLETIONS: Harmless = {
    "suffix": ("",),
    "echo": (False,),
}

HARMLESS_IN_CHAT: Harmless = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),  # without tools both mean: answer with text
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}

HARMLESS_IN_MESSAGES: Harmless = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


def without_unsupported(fields: Mapping[str, Any], harmless: Harmless, prefix: str = "") -> dict[str, Any]:
    """`fields` less those of `harmless`. Raises UnsupportedParameter for one whose value asks for something."""
    for name in harmless.keys() & fields.keys():
        value = fields[name]
        if value is not None and not any(_same(value, allowed) for allowed in harmless[name]):
            path = f"{prefix}{name}"
            raise UnsupportedParameter(f"{path} is not supported here (it is {quote(value)}); leave it out", param=path)
    return {name: value for name, value in fields.items() if name not in harmless}


def _same(value: Any, allowed: Any) -> bool:
    """Equal as JSON: 0 is not false."""
    return type(value) is type(allowed) and value == allowed
