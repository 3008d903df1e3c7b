"""The page on chat: its examples run, and its record is one."""

import json
import re
from pathlib import Path

from rljax.chat.messages import KEYS, ROLES, parse_messages, parse_tools

PAGE = Path(__file__).resolve().parents[3] / "docs" / "chat.md"


def test_the_pages_examples_run():
    names = {"__name__": "page"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_the_pages_record_is_one_and_the_table_has_every_key_and_role():
    (block,) = re.findall(r"^```json\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    record = json.loads(block)
    messages = parse_messages(record["messages"], "page")
    assert {key for message in messages for key in message} <= set(KEYS)
    assert parse_tools(record["tools"], "page")
    for name in (*KEYS, *ROLES):
        assert f"`{name}`" in PAGE.read_text()
