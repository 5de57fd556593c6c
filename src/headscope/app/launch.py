"""Find a port, open the browser, run until Ctrl-C."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from urllib.parse import quote

from headscope.app.guard import is_loopback
from headscope.app.session import Session
from headscope.core.errors import UsageError

PORT = 8642
#: ports that are tried after the default one
TRIES = 50
TOKEN = re.compile(r"[A-Za-z0-9_-]{16,200}")


def check_address(host: str, token: str | None) -> None:
    """Raise UsageError for an address that others can reach without a token, or a token that is no good."""
    if token is not None and not TOKEN.fullmatch(token):
        raise UsageError("--token takes at least 16 letters, digits, - or _; python -c 'import secrets; "
                         "print(secrets.token_urlsafe())' makes a good one.")  # fmt: skip
    if not is_loopback(host) and token is None:
        raise UsageError(
            f"{host} can be reached by other machines; give --token, which every request must then bring, or leave out --host."
        )


def listen(host: str, port: int | None) -> socket.socket:
    """A bound socket: the asked port, or the first free one from the default. Raises UsageError where there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else range(PORT, PORT + TRIES):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, number))
            sock.listen()
            return sock
        except OSError as error:
            sock.close()
            if port is None and error.errno == errno.EADDRINUSE:
                continue
            raise UsageError(f"Port {number} of {host} cannot be used ({error.strerror}).") from None
        except OverflowError:
            sock.close()
            raise UsageError(f"{number} is not a port; ports are 1 to 65535.") from None
    raise UsageError(f"All ports from {PORT} to {PORT + TRIES - 1} are taken; give --port.")


def address(sock: socket.socket, host: str, token: str | None) -> str:
    """What to type into the browser."""
    port = sock.getsockname()[1]
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/" + (f"?token={quote(token)}" if token else "")


def has_screen() -> bool:
    """Whether a browser would open in a window: without one, some systems start one inside the terminal."""
    return not sys.platform.startswith("linux") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def names(sock: socket.socket, host: str) -> set[str] | None:
    """The values of the Host header that this server answers to; None for any where others may call it."""
    if not is_loopback(host):
        return None
    port = sock.getsockname()[1]
    return {f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host)}


def serve(
    session: Session,
    sock: socket.socket,
    *,
    host: str,
    token: str | None,
    url: str,
    browser: bool,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Run until Ctrl-C; `ready` is called as soon as requests are answered."""
    import uvicorn

    from headscope.app.server import create

    app = create(session, hosts=names(sock, host), token=token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", server_header=False,
                            timeout_graceful_shutdown=2)  # fmt: skip
    server = uvicorn.Server(config)

    def announce() -> None:
        while not server.started and not server.should_exit:
            waiting.wait(0.02)
        if server.started:
            ready()
            if browser and has_screen():
                with contextlib.suppress(webbrowser.Error):
                    webbrowser.open(url)

    waiting = threading.Event()
    threading.Thread(target=announce, daemon=True).start()
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended by then, and hands the signal on
            server.run(sockets=[sock])
    finally:
        server.should_exit = True
        session.jobs.close()
        sock.close()
