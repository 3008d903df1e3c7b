"""The Python tool: code of the policy in a sandbox, a new process for each call."""

from __future__ import annotations

from rljax.tools.sandbox import Limits, Outcome, Sandbox
from rljax.tools.tool import Tool, ToolFailure


def make(
    seconds: float = 5.0,
    memory_mb: int = 512,
    files_mb: int = 16,
    output_bytes: int = 16384,
    concurrent: int | None = None,
) -> Tool:
    """Makes the tool, with the limits of each call (rljax/tools/sandbox.py).

    Raises UserError if there is no sandbox on this machine.
    """
    sandbox = Sandbox(Limits(seconds, memory_mb, files_mb, output_bytes), concurrent=concurrent)

    async def run(code: str) -> str:
        ran = await sandbox.run(code)
        if ran.outcome is Outcome.OK:
            return ran.output
        notes = {
            Outcome.TIMEOUT: f"Error: stopped after {seconds:g} seconds",
            Outcome.OUTPUT: f"Error: stopped after {output_bytes} bytes of output",
            Outcome.ERROR: "" if ran.output else "Error: the process ended without a word",
        }
        raise ToolFailure("\n".join(filter(None, (ran.output, notes[ran.outcome]))))

    parameters = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python 3 code; what it prints is the result."}},
        "required": ["code"],
    }
    description = (
        "Runs Python code and returns what it prints, and the value of a last line that is an expression. Each call is a new"
        " process with the standard library, no network and no files."
    )
    return Tool("python", description, parameters, run)
