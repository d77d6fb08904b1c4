"""How a command fails. These never cross a seam: `__main__` turns them into one line on stderr and exit code 1."""


class CommandError(Exception):
    """`str(error)` says what went wrong and what to do."""


class ServiceDied(CommandError):
    """A service of a local stack ended by itself. Carries what names it: its exit code and the end of its log."""

    def __init__(self, name: str, exit_code: int, log_path: str, log_end: list[str]) -> None:
        how = how_it_ended(exit_code)
        lines = [f"{name} {how}; its log {log_path} ends with:", *(f"  {line}" for line in log_end)]
        super().__init__("\n".join(lines if log_end else [f"{name} {how}; its log {log_path} is empty"]))
        self.name = name
        self.exit_code = exit_code


def how_it_ended(exit_code: int) -> str:
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
