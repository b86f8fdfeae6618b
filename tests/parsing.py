"""Python source as a tree."""

import ast
import contextlib


def parsed(source: str) -> ast.Module:
    """`ast.parse`. CPython 3.11 seldom loses count of its recursion ("AST constructor recursion depth mismatch", a
    SystemError) when the garbage collector runs meanwhile: that says nothing of the source, so it is parsed again."""
    with contextlib.suppress(SystemError):
        return ast.parse(source)
    return ast.parse(source)
