"""The error tree: drawn as it is, each class with its statuses, names that travel unharmed."""

import re

import grpc
import pytest

from common import errors
from common.errors import TwostrokeError, all_error_classes

CLASSES = all_error_classes()
OPENAI_TYPES = {"invalid_request_error", "authentication_error", "rate_limit_error", "server_error"}


def drawn_tree() -> dict[str, str]:
    """Class name -> its parent's, read off the drawing at the top of the module."""
    parents: dict[str, str] = {}
    path = ["TwostrokeError"]
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^([│├└─ ]+)(\w+)", line)
        if match and ("├" in line or "└" in line):
            depth = len(match[1]) // 4
            del path[depth:]
            parents[match[2]] = path[-1]
            path.append(match[2])
    return parents


def test_the_drawing_is_the_tree() -> None:
    real = {cls.__name__: cls.__mro__[1].__name__ for cls in CLASSES if cls is not TwostrokeError}
    assert drawn_tree() == real


def test_the_drawing_names_the_http_statuses() -> None:
    for name, status in re.findall(r"[├└]── (\w+) \((\d+)\)", errors.__doc__ or ""):
        assert getattr(errors, name).http_status == int(status), name


def test_names_are_unique_and_ascii() -> None:
    names = [cls.__name__ for cls in CLASSES]
    assert len(set(names)) == len(names)
    assert all(name.isascii() and name.isidentifier() for name in names)


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_class_has_statuses_that_exist(error_class: type[TwostrokeError]) -> None:
    assert 400 <= error_class.http_status < 600
    assert grpc.StatusCode[error_class.grpc_status] is not grpc.StatusCode.OK
    assert error_class.openai_type in OPENAI_TYPES
    assert re.fullmatch(r"[a-z_]+", error_class.code)


@pytest.mark.parametrize("error_class", CLASSES)
def test_a_clients_mistake_and_ours_are_told_apart(error_class: type[TwostrokeError]) -> None:
    assert (error_class.openai_type == "server_error") == (error_class.http_status >= 500)


def test_codes_tell_the_classes_apart() -> None:
    codes = [cls.code for cls in CLASSES]
    assert sorted(codes) == sorted(set(codes))


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_is_its_message(error_class: type[TwostrokeError]) -> None:
    error = error_class("top_p is 2; allowed: 0 to 1", param="top_p", retry_after_s=2.5)
    assert str(error) == error.message == "top_p is 2; allowed: 0 to 1"
    assert (error.param, error.retry_after_s) == ("top_p", 2.5)
    bare = error_class("no")
    assert (bare.param, bare.retry_after_s) == (None, None)
