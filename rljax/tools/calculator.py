"""The calculator: arithmetic of one expression, by simpleeval; no names but functions of numbers."""

from __future__ import annotations

import ast
import math

from rljax.errors import UserError
from rljax.tools.tool import Tool, ToolFailure

MAX_LENGTH = 500  # characters of an expression
MAX_DIGITS = 1000  # of a whole number: larger ones take seconds, in which nothing else runs
_FUNCTIONS = ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil", "gcd")


def make() -> Tool:
    """Makes the calculator. Raises UserError if simpleeval is missing."""
    try:
        import simpleeval
    except ImportError as error:
        raise UserError(f"the tool calculator needs simpleeval (pip install 'rljax[tools]'): {error}") from error
    operators = {kind: function for kind, function in simpleeval.DEFAULT_OPERATORS.items() if issubclass(kind, _ARITHMETIC)}
    functions = {name: getattr(math, name) for name in _FUNCTIONS} | {"abs": abs, "round": round, "min": min, "max": max}
    names = {"pi": math.pi, "e": math.e}

    async def calculate(expression: str) -> str:
        if not isinstance(expression, str) or len(expression) > MAX_LENGTH:
            raise ToolFailure(f"Error: an expression is text of at most {MAX_LENGTH} characters")
        source = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
        evaluator = simpleeval.SimpleEval({**operators, ast.Pow: _power}, functions, names)
        try:
            return _number_text(evaluator.eval(source))
        except Exception as error:  # simpleeval's own, and those of arithmetic
            raise ToolFailure(f"Error: {' '.join(str(error).split()) or type(error).__name__}") from error

    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 30) * 2.5 or sqrt(2)."}},
        "required": ["expression"],
    }
    return Tool("calculator", "Evaluates an arithmetic expression and returns its value.", parameters, calculate)


_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.UAdd, ast.USub)


def _power(base: float, exponent: float) -> float:
    if isinstance(base, int) and isinstance(exponent, int) and exponent * math.log10(max(abs(base), 1)) > MAX_DIGITS:
        raise OverflowError(f"a power of more than {MAX_DIGITS} digits")
    return base**exponent


def _number_text(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("not an expression of numbers")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))  # 84/2 is 42
    return str(value) if isinstance(value, int) else f"{value:.12g}"
