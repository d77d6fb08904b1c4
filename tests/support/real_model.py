"""The real default model, prepared in the user's cache so that one conversion serves every run of the suite."""

from functools import cache

import pytest

from common.config import cache_dir
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel


@cache
def prepared_smollm2() -> PreparedModel:
    """SmolLM2-135M-Instruct; the first call on a machine converts it, which takes several seconds."""
    return prepare_model("default", cache_dir(), lambda _line: None)


@pytest.fixture(scope="session")
def smollm2() -> PreparedModel:
    return prepared_smollm2()
