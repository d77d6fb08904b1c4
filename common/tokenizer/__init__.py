"""Text to token ids and back: a model's tokenizer, its chat template, streaming detokenization, stop strings.

Stands on the `tokenizers` library and jinja2 alone, so that the gateway needs neither torch nor transformers.
"""

from common.tokenizer.chat_template import ChatTemplate
from common.tokenizer.detokenizer import IncrementalDetokenizer
from common.tokenizer.meta import TokenizerMeta
from common.tokenizer.stop_strings import StopMatcher, StopStrings
from common.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "StopStrings",
    "Tokenizer",
    "TokenizerMeta",
]
