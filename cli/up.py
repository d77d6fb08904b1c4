"""`twostroke up`: a local stack of any shape, until Ctrl-C."""

import argparse

from cli.local_stack import LocalStack
from cli.options import StackOptions, add_stack_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stack_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return LocalStack(StackOptions.of(arguments)).run()
