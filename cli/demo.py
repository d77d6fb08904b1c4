"""`twostroke demo`: `run` that ends after the answer."""

import argparse

from cli.first_question import ask_first_question
from cli.local_stack import LocalStack
from cli.options import StackOptions, add_stack_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stack_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    return LocalStack(StackOptions.of(arguments), ask_first_question, then_serve=False).run()
