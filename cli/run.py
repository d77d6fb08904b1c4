"""`twostroke run`: a local stack that shows what it does with one question, and then serves until Ctrl-C."""

import argparse

from cli.first_question import ask_first_question
from cli.local_stack import LocalStack
from cli.options import StackOptions, add_stack_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stack_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return LocalStack(StackOptions.of(arguments), ask_first_question).run()
