"""The console script `twostroke`: picks a command, and turns failures into one line on stderr and an exit code.

0: done; 1: failed; 2: wrong usage. Only the chosen command's module is imported, so that help is instant.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from cli.errors import CommandError
from common.errors import ConfigError, TwostrokeError

COMMANDS = {
    "up": "start a local stack and serve until Ctrl-C",
    "run": "start a local stack, ask it one question, serve until Ctrl-C",
    "demo": "start a local stack, ask it one question, and end after the answer",
    "chat": "talk to a running stack in the terminal",
    "drain": "take a worker out of service without failing a request",
    "trace": "draw where a request's time went",
    "prepare": "convert a model once, ahead of the first start",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments_given = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser(arguments_given).parse_args(arguments_given)
    return exit_code(lambda: importlib.import_module(f"cli.{arguments.command}").run(arguments))


def exit_code(action: Callable[[], int]) -> int:
    """What `action` returns; or its failure in words on stderr, and 1, or 2 for a wrong setting."""
    try:
        return action()
    except ConfigError as error:
        _report(error)
        return 2
    except (CommandError, TwostrokeError) as error:
        _report(error)
        return 1
    except OSError as error:
        _report(error)  # a folder that cannot be written, a full disk: the text names the file and the reason
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("twostroke: interrupted\n")
        return 1


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="twostroke", description="Serves large language models with prefill and decode in separate services."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((argument for argument in argv if argument in COMMANDS), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            importlib.import_module(f"cli.{name}").add_arguments(command)
    return parser


def _report(error: Exception) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"twostroke: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
