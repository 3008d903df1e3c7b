"""Tools that a policy may call: OpenAI definitions with a Python callable.

    tool.py         a tool, made by hand or of a function with hints and a docstring
    toolbox.py      tools by name; calls with a time limit, whose failures are told and counted
    calculator.py   arithmetic
    python.py       Python in a sandbox
    sandbox.py      the sandbox

The workflow is rljax/workflows/tool_use.py.
"""

from rljax.tools.tool import Tool, ToolFailure
from rljax.tools.toolbox import TOOLS, CallOutcome, CallResult, Toolbox, make_tools

__all__ = ["TOOLS", "CallOutcome", "CallResult", "Tool", "ToolFailure", "Toolbox", "make_tools"]
