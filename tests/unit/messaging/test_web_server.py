"""Who shows the token stays; strangers are few and short-lived, and end nothing."""

import asyncio
import contextlib
import errno
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from aiohttp import web

from rljax.messaging import web_server
from rljax.messaging.web_server import WebServer, proved
from tests.shared import allow_files

TOKEN = b"GET /token HTTP/1.1\r\nHost: x\r\n\r\n"  # a request whose handler calls `proved`
NO_TOKEN = b"GET /none HTTP/1.1\r\nHost: x\r\n\r\n"
END = 20  # seconds


async def _token(request):
    proved(request)
    return web.Response(text="known")


async def _none(request):
    return web.Response(text="stranger")


@contextlib.asynccontextmanager
async def serving():
    app = web.Application()
    app.router.add_get("/token", _token)
    app.router.add_get("/none", _none)
    server = WebServer(app, peers="a test's")
    try:
        yield server, await server.start("127.0.0.1", 0)
    finally:
        await server.close()


@contextlib.contextmanager
def silent(address, count):
    """Opens `count` connections that send nothing."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


async def ask(connection, request):
    """Sends a request over an open connection. Returns the answer's body, b"" if it was closed."""
    reader, writer = connection
    with contextlib.suppress(ConnectionError):
        writer.write(request)
        async with asyncio.timeout(END):
            head = await reader.readuntil(b"\r\n\r\n")
            return await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    return b""


async def is_closed(connection):
    """Waits for the end of a connection."""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(END):
            return await connection[0].read() == b""
    return True


async def until(condition):
    async with asyncio.timeout(END):
        while not condition():
            await asyncio.sleep(0.01)


BROKEN = (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", b"GET / HTTP/9\r\n\r\n", b"GET /none HTTP/1.1\r\nContent-Length: x\r\n\r\n")


def test_what_is_not_http_is_one_line_for_all_of_it(caplog):
    async def main():
        async with serving() as (_, address):
            for request in BROKEN * 4:
                reader, writer = await asyncio.open_connection(*address)
                writer.write(request)
                assert b" 400 " in await reader.readline()
                writer.close()

    asyncio.run(main())
    assert len(caplog.records) == 1 and caplog.records[0].exc_info is None
    line = caplog.records[0].getMessage()
    assert line.startswith("a test's: a request from 127.0.0.1 is not HTTP: ") and "\n" not in line


def test_a_fault_of_a_handler_keeps_its_traceback(caplog):
    async def fails(request):
        raise RuntimeError("a bug")

    async def main():
        app = web.Application()
        app.router.add_get("/", fails)
        server = WebServer(app, peers="a test's")
        connection = await asyncio.open_connection(*await server.start("127.0.0.1", 0))
        connection[1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 500 " in await connection[0].readline()
        connection[1].close()
        await server.close()

    asyncio.run(main())
    assert [record.exc_info[0] for record in caplog.records] == [RuntimeError]


def test_strangers_are_few_and_keep_nobody_out(monkeypatch):
    monkeypatch.setattr(web_server, "TURN", 0.002)

    async def main():
        async with serving() as (server, address):
            known = await asyncio.open_connection(*address)
            assert await ask(known, TOKEN) == b"known"
            with silent(address, 3 * web_server.MAX_STRANGERS):
                await until(lambda: server.strangers == web_server.MAX_STRANGERS)
                assert await ask(await asyncio.open_connection(*address), TOKEN) == b"known"
                assert server.strangers <= web_server.MAX_STRANGERS
            assert await ask(known, NO_TOKEN) == b"stranger"  # it stays, whatever it asks for later
            await until(lambda: server.strangers == 0)

    asyncio.run(main())


def test_who_asks_without_a_token_is_put_out_for_the_next(monkeypatch):
    monkeypatch.setattr(web_server, "TURN", 0.002)

    async def main():
        async with serving() as (server, address):
            first = await asyncio.open_connection(*address)
            assert await ask(first, NO_TOKEN) == b"stranger" and server.strangers == 1
            with silent(address, web_server.MAX_STRANGERS):
                assert await is_closed(first)

    asyncio.run(main())


def test_many_with_the_token_all_get_in_at_once_and_stay():
    async def main():
        async with serving() as (server, address):
            many = [await asyncio.open_connection(*address) for _ in range(4 * web_server.MAX_STRANGERS)]
            for _ in range(2):
                assert set(await asyncio.gather(*(ask(each, TOKEN) for each in many))) == {b"known"}
            assert server.strangers == 0

    asyncio.run(main())


def test_nobody_is_put_out_before_its_request_was_read(monkeypatch):
    """All came, and asked, while the event loop did something else for longer than MIN_TURNS."""
    monkeypatch.setattr(web_server, "TURN", 0.005)

    async def main():
        async with serving() as (server, address):
            with silent(address, 3 * web_server.MAX_STRANGERS) as clients:
                await until(lambda: server.strangers == web_server.MAX_STRANGERS)
                for client in clients:
                    client.sendall(TOKEN)
                time.sleep(2 * web_server.TURN * web_server.MIN_TURNS)
                for client in clients:
                    client.settimeout(END)
                    assert (await asyncio.to_thread(client.recv, 4096)).endswith(b"known")

    asyncio.run(main())


@pytest.mark.parametrize(("code", "is_put_out"), [(errno.EMFILE, True), (errno.ENOBUFS, True), (errno.EPERM, False)])
def test_the_oldest_stranger_makes_room_where_files_run_out_alone(code, is_put_out):
    async def main():
        async with serving() as (server, address):
            first = await asyncio.open_connection(*address)
            await until(lambda: server.strangers == 1)
            await server._survive(OSError(code, "no"))
            assert server.strangers == (0 if is_put_out else 1)
            assert await is_closed(first) if is_put_out else await ask(first, NO_TOKEN) == b"stranger"

    asyncio.run(main())


def test_a_closed_server_lets_nobody_in_and_hangs_up():
    async def main():
        async with serving() as (server, address):
            stranger, known = [await asyncio.open_connection(*address) for _ in range(2)]
            assert await ask(known, TOKEN) == b"known"
            await server.close()
            await server.close()
            assert await is_closed(stranger) and await is_closed(known)
            with pytest.raises(OSError):
                await asyncio.open_connection(*address)

    asyncio.run(main())


def test_all_addresses_of_a_host_have_one_port(monkeypatch):
    """Those of a family that this machine lacks are left out."""
    ours, lacking = ("127.0.0.1", "127.0.0.2"), ("2001:db8::1", 0, 0, 0)

    def resolve(host, port, **options):
        found = [(socket.AF_INET6, lacking), *((socket.AF_INET, (address,)) for address in ours)]
        return [(family, socket.SOCK_STREAM, 6, "", (address[0], port, *address[2:])) for family, address in found]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    made = web_server._listening("a name", 0)
    addresses = [each.getsockname() for each in made]
    assert [address for address, _ in addresses] == list(ours) and len({port for _, port in addresses}) == 1
    with pytest.raises(OSError, match="in use"):
        web_server._listening("a name", addresses[0][1])
    for each in made:
        each.close()


def test_silent_strangers_end_nothing_where_files_run_out():
    """100 strangers connect to a process that may open 60 files, then someone who has the token."""
    code = textwrap.dedent("""
        import asyncio, resource
        from aiohttp import web
        resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
        from rljax.messaging import web_server
        from rljax.messaging.web_server import WebServer, proved
        web_server.TURN = 0.005

        async def token(request):
            proved(request)
            return web.Response(text="known")

        async def main():
            app = web.Application()
            app.router.add_get("/token", token)
            server = WebServer(app, peers="a test's")
            loop, files = asyncio.get_running_loop(), []
            await loop.run_in_executor(None, int)  # its thread and what it imports
            print((await server.start("127.0.0.1", 0))[1], flush=True)
            try:
                while True:  # the process itself uses them up, and later gives some back
                    files.append(open("/dev/null"))
            except OSError:
                pass
            await loop.run_in_executor(None, input)
            del files[:20]
            await loop.run_in_executor(None, input)
            open("/dev/null").close()
            await server.close()

        asyncio.run(main())
    """)
    allow_files(1000)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = "127.0.0.1", int(process.stdout.readline())
        with contextlib.ExitStack() as stack:
            for _ in range(100):
                stranger = stack.enter_context(socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex(address)
            process.stdin.write("\n")
            process.stdin.flush()
            answer, began = b"", time.monotonic()
            while not answer and time.monotonic() < began + 4 * END:
                with contextlib.suppress(OSError), socket.create_connection(address, timeout=END) as client:
                    client.sendall(TOKEN)
                    answer = client.recv(4096)
        _, errors = process.communicate("\n", timeout=END)
        assert answer.endswith(b"known") and process.returncode == 0 and errors.count("listening goes on") <= 1, errors
    finally:
        process.kill()
        process.wait()
