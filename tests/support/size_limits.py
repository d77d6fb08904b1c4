"""`make check`'s limits of size: prints every file and function of the product that is longer; exits 1 if any is."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60  # a step loop may reach it; others aim for 40
PACKAGES = ("common", "kernels", "prefill_svc", "decode_svc", "gateway", "cli", "bench", "k8s")
GENERATED = Path("common/pb")


def product_files(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        files = sorted((root / package).rglob("*.py"))
        yield from (file for file in files if not file.is_relative_to(root / GENERATED))


def oversized(file: Path) -> Iterator[str]:
    text = file.read_text()
    num_lines = len(text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield f"{file}: {num_lines} lines; at most {MAX_FILE_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{file}:{node.lineno}: {node.name} has {length} lines; at most {MAX_FUNCTION_LINES}"


def main() -> int:
    root = Path(__file__).resolve().parents[2]
    files = list(product_files(root))
    findings = [finding for file in files for finding in oversized(file)]
    print("\n".join(findings) or f"{len(files)} files and their functions are within the limits of size")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
