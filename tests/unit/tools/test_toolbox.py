"""Tools called as a policy calls them: rightly, wrongly, and for ever."""

import asyncio
import json
import threading
import time

import pytest

from rljax.errors import UserError
from rljax.tools import CallOutcome, Tool, Toolbox, ToolFailure, make_tools


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
      a: the first number.
      b: the second number.
    """
    return a + b


def undocumented(a):
    return a


async def refuse(word: str) -> str:
    """Refuses.

    Args:
      word: anything.
    """
    raise ToolFailure(f"no {word}")


def call(toolbox, name, **arguments):
    result = asyncio.run(toolbox.call(name, arguments))
    return result.outcome, result.content


def test_a_function_with_hints_and_a_docstring_is_a_tool():
    tool = Tool.of(add)
    assert tool.definition["function"]["name"] == "add" and tool.parameters["required"] == ["a"]
    assert tool.parameters["properties"]["b"] == {"type": "integer", "description": "the second number."}
    assert json.loads(json.dumps(tool.definition)) == tool.definition
    with pytest.raises(UserError, match="tool undocumented: "):
        Tool.of(undocumented)


def test_what_goes_wrong_is_told_to_the_policy_by_kind():
    def broken(x: int) -> None:
        raise SystemExit(x)

    toolbox = Toolbox([Tool.of(add), Tool.of(refuse), Tool("broken", "", {}, broken)], max_output=40)
    assert call(toolbox, "add", a=2, b=3) == (CallOutcome.OK, "5")
    told = "Error: no tool named 'ad' (did you mean add?)"
    assert call(toolbox, "ad", a=2) == (CallOutcome.UNKNOWN, f"{told[:40]}... ({len(told) - 40} more characters)")
    assert call(toolbox, "add", c=2)[0] is CallOutcome.ARGUMENTS
    assert call(toolbox, "add")[0] is CallOutcome.ARGUMENTS
    assert call(toolbox, "add", a="x", b=1)[0] is CallOutcome.ERROR
    assert call(toolbox, "refuse", word="way") == (CallOutcome.ERROR, "no way")
    assert call(toolbox, "broken", x=1)[0] is CallOutcome.ERROR
    with pytest.raises(UserError, match="two tools of one name"):
        Toolbox([Tool.of(add), Tool.of(add)])


def test_a_tool_that_never_returns_holds_up_nothing_else():
    release = threading.Event()

    async def never_async() -> None:
        await asyncio.Event().wait()

    tools = [Tool("never", "", {}, release.wait), Tool("never_async", "", {}, never_async), Tool.of(add)]

    async def scenario():
        hung = [asyncio.create_task(Toolbox(tools, timeout=0.2).call(name, {})) for name in ("never", "never_async")]
        quick = await Toolbox(tools, timeout=60.0).call("add", {"a": 1})
        return quick, [(await task).outcome for task in hung]

    quick, hung = asyncio.run(scenario())
    assert quick.content == "2" and hung == [CallOutcome.TIMEOUT] * 2
    release.set()


def test_result_of_a_call_after_its_loop_has_ended_is_dropped():
    """The thread that a hung call keeps must not raise when the call ends at last."""
    release, ended, raised = threading.Event(), threading.Event(), []
    hook, threading.excepthook = threading.excepthook, lambda arguments: raised.append(arguments)

    def slow() -> None:
        release.wait()
        ended.set()

    asyncio.run(Toolbox([Tool("slow", "", {}, slow)], timeout=0.05).call("slow", {}))
    release.set()
    ended.wait()
    while any(thread.name == "tool slow" for thread in threading.enumerate()):
        time.sleep(0.01)
    threading.excepthook = hook
    assert not raised


VALUES = {
    "(12 + 30) * 2": "84", "84 / 2": "42", "7 / 2": "3.5", "2 ^ 10": "1024", "10 % 4": "2", "7 // 2": "3", "-3 + 5": "2",
    "sqrt(16)": "4", "round(2.345, 2)": "2.35", "min(3, 2) + max(1, 5)": "7", "2 * pi": "6.28318530718", "6 × 7": "42",
    "12345678901234567890 * 10": "123456789012345678900", "2**100": str(2**100), "0.1 + 0.2": "0.3",
}  # fmt: skip
NO_VALUES = (
    "1 / 0", "x + 1", "12 +", "", "__import__('os')", "().__class__", "'a' * 3", "[1, 2]", "lambda: 1", "9 ** 9 ** 9",
    "3 ** 99999", "1 if 1 else 2 for", "sqrt(-1)", "exp(1e9)", "1 << 99999999", "open('/etc/passwd')", "1 == 1",
    "(" * 400, "1+" * 400 + "1", "(-8) ** 0.5", "10.0 ** 400",
)  # fmt: skip


def test_the_calculator_computes_and_nothing_else():
    (tool,) = make_tools(["calculator"], {})
    toolbox = Toolbox([tool])
    assert {text: call(toolbox, "calculator", expression=text) for text in VALUES} == {
        text: (CallOutcome.OK, value) for text, value in VALUES.items()
    }
    for text in NO_VALUES:
        outcome, content = call(toolbox, "calculator", expression=text)
        assert outcome is CallOutcome.ERROR and content.startswith("Error: "), text
    assert call(toolbox, "calculator", expression=5)[0] is CallOutcome.ERROR


@pytest.mark.parametrize(
    ("names", "arguments", "line"),
    [
        (["calculater"], {}, "rollout.workflow_args.tools: no tool named 'calculater' (did you mean calculator?"),
        ("calculator", {}, "rollout.workflow_args.tools: a list of names is needed"),
        (["calculator"], {"python": {}}, "rollout.workflow_args.tool_args: 'python' takes none (calculator)"),
        (["calculator"], {"calculator": {"digits": 1}}, "rollout.workflow_args.tool_args.calculator: got an unexpected"),
        (["json:dumps"], {}, "tool dumps: "),
    ],
)
def test_wrong_names_and_arguments_are_refused_in_one_line(names, arguments, line):
    with pytest.raises(UserError) as caught:
        make_tools(names, arguments)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
