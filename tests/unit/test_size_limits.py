from pathlib import Path

from tests.support.size_limits import MAX_FILE_LINES, MAX_FUNCTION_LINES, oversized, product_files


def write_function(path: Path, num_lines: int) -> Path:
    path.write_text("def f():\n" + "    pass\n" * (num_lines - 1))
    return path


def test_what_is_at_the_limit_passes(tmp_path: Path) -> None:
    assert list(oversized(write_function(tmp_path / "a.py", MAX_FUNCTION_LINES))) == []
    (tmp_path / "b.py").write_text("x = 1\n" * MAX_FILE_LINES)
    assert list(oversized(tmp_path / "b.py")) == []


def test_what_is_longer_is_named_with_its_length(tmp_path: Path) -> None:
    file = write_function(tmp_path / "a.py", MAX_FUNCTION_LINES + 1)
    assert list(oversized(file)) == [f"{file}:1: f has 61 lines; at most 60"]
    (tmp_path / "b.py").write_text("x = 1\n" * (MAX_FILE_LINES + 1))
    assert list(oversized(tmp_path / "b.py")) == [f"{tmp_path / 'b.py'}: 301 lines; at most 300"]


def test_generated_code_and_tests_are_not_measured(tmp_path: Path) -> None:
    for folder in ("common/pb", "common/kv", "tests", "cli"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").touch()
    measured = {str(file.relative_to(tmp_path)) for file in product_files(tmp_path)}
    assert measured == {"common/kv/module.py", "cli/module.py"}
