"""Object stores on loopback, and a proxy before them that injects faults."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import itertools
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_numbers = itertools.count()
KEY, SECRET = "key", "secret"
# Azurite's own, which its documentation has.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURITE = Path(sys.prefix, "node_modules", ".bin", "azurite-blob")


def environment_for(endpoint: str) -> dict[str, str]:
    """What a user sets for a server that is not Amazon's."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


class Moto:
    """moto over HTTP: it enforces conditional requests."""

    def __init__(self, _: Path) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)

    def __enter__(self) -> Moto:
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.environment = environment_for(self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        make_bucket(self.endpoint, name)
        return f"s3://{name}"


def make_bucket(endpoint: str, name: str) -> None:
    there = urllib.parse.urlsplit(endpoint)
    connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=30)
    # The key tells moto the service; it verifies no signature.
    signed = (
        f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request, x=y, Signature=z"
    )
    connection.request("PUT", f"/{name}", headers={"Authorization": signed, "Content-Length": "0"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    connection.close()


def lacks_azurite() -> str:
    """Why Azurite cannot run here; "" if it can."""
    if shutil.which("node") is None:
        return "there is no node on this machine"
    return "" if AZURITE.exists() else f"npm has not installed {AZURITE.name}"


class Azurite:
    """Azure's blobs. It enforces conditional requests, and verifies signatures."""

    def __init__(self, _: Path) -> None:
        self._port = free_port()

    def __enter__(self) -> Azurite:
        command = [str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(self._port)]
        command += ["--inMemoryPersistence", "--disableTelemetry", "--silent"]
        self._process = started(command, "successfully listens", "stdout")
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.environment = {
            "AZURE_STORAGE_ENDPOINT": f"{self.endpoint}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY,
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def new_bucket(self) -> str:
        """A container. The request is signed by hand: obstore makes none."""
        name, now, version = f"bucket-{next(_numbers)}", formatdate(usegmt=True), "2021-12-02"
        own = [f"x-ms-date:{now}", f"x-ms-version:{version}", f"/{ACCOUNT}/{ACCOUNT}/{name}"]
        signed = "\n".join(["PUT", *[""] * 11, *own, "restype:container"]).encode()
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), signed, hashlib.sha256).digest()
        headers = {
            "x-ms-date": now,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
            "Content-Length": "0",
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        connection.request("PUT", f"/{ACCOUNT}/{name}?restype=container", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()
        return f"az://{name}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def started(command: list[str], said: str, where: str) -> subprocess.Popen[str]:
    """A server that has said this word on its standard output or error; the rest is thrown away."""
    process = subprocess.Popen(command, **{where: subprocess.PIPE}, text=True)
    stream = getattr(process, where)
    for line in stream:
        if said in line:
            threading.Thread(target=stream.read, daemon=True).start()
            return process
    raise AssertionError(f"{command[0]} ended with {process.wait()}")


class Rclone:
    """``rclone serve s3``: it ignores conditional requests."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._port = directory, free_port()

    def __enter__(self) -> Rclone:
        program = Path(sys.executable).with_name("rclone")
        command = [str(program), "serve", "s3", "--addr", f"127.0.0.1:{self._port}"]
        command += ["--auth-key", f"{KEY},{SECRET}", "--vfs-cache-mode", "off"]
        self._process = started([*command, str(self._directory)], "Starting s3 server", "stderr")
        self.environment = environment_for(f"http://127.0.0.1:{self._port}")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def new_bucket(self) -> str:
        name = f"bucket-{next(_numbers)}"
        (self._directory / name).mkdir()
        return f"s3://{name}"


Fault = Callable[["Handler", bytes], bool]


@dataclass
class Proxy:
    """Passes requests on to ``target``. A request that fits a rule gets its fault instead.

    A fault gets the handler and the body of the request. It returns True if it has answered.
    """

    target: str
    rules: list[tuple[str, str, Fault, bool]] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.proxy = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.environment = environment_for(self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def once(self, method: str, path: str, fault: Fault) -> None:
        """Let the next request of this method, whose path has this expression, meet ``fault``."""
        self.rules.append((method, path, fault, True))

    def always(self, method: str, path: str, fault: Fault) -> None:
        """Let all such requests meet it, until ``rules`` is cleared."""
        self.rules.append((method, path, fault, False))

    def take(self, method: str, path: str) -> Fault | None:
        self.seen.append((method, path))
        for rule in self.rules:
            if rule[0] == method and re.search(rule[1], path):
                if rule[3]:
                    self.rules.remove(rule)
                return rule[2]
        return None


class Handler(BaseHTTPRequestHandler):
    """A request: see ``Proxy``."""

    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        proxy: Any = self.server.proxy  # type: ignore[attr-defined]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = proxy.take(self.command, self.path)
        try:
            if fault is None or not fault(self, body):
                self.answer(*self.passed_on(body))
        except ConnectionError:  # the client has given it up
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """The answer of the real server: status, headers, body."""
        there = urllib.parse.urlsplit(self.server.proxy.target)  # type: ignore[attr-defined]
        connection = http.client.HTTPConnection(there.hostname or "", there.port, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers.items()))
        answer = connection.getresponse()
        told = answer.status, answer.getheaders(), answer.read()
        connection.close()
        return told

    def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        dropped = {"transfer-encoding", "connection"}
        length = next((v for k, v in headers if k.lower() == "content-length"), None)
        self.send_response_only(status)
        for key, value in headers:
            if key.lower() not in dropped | {"content-length"}:
                self.send_header(key, value)
        size = length if self.command == "HEAD" and length is not None else str(len(body))
        self.send_header("Content-Length", size)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def reset(self) -> None:
        """End the connection in the middle."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def refuses(status: int, code: str = "") -> Fault:
    """Answers with an error of S3; with status 200 it is one that was found late."""

    def fault(handler: Handler, _: bytes) -> bool:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        handler.answer(status, [("Content-Type", "application/xml")], body)
        return True

    return fault


def resets(handler: Handler, _: bytes) -> bool:
    """Does not pass the request on, and ends the connection."""
    handler.reset()
    return True


def hangs(handler: Handler, _: bytes) -> bool:
    """Neither passes the request on nor answers, until the client gives it up."""
    handler.close_connection = True
    handler.connection.recv(1)
    return True


def comes_slowly(handler: Handler, body: bytes) -> bool:
    """Sends the body of the answer in 25 pieces, over 2.5 seconds."""
    status, headers, content = handler.passed_on(body)
    handler.send_response_only(status)
    for key, value in headers:
        if key.lower() not in ("transfer-encoding", "connection"):
            handler.send_header(key, value)
    handler.end_headers()
    for number in range(25):
        handler.wfile.write(
            content[len(content) * number // 25 : len(content) * (number + 1) // 25]
        )
        time.sleep(0.1)
    return True


def loses_the_answer(handler: Handler, body: bytes) -> bool:
    """Passes the request on, and ends the connection before the answer."""
    handler.passed_on(body)
    handler.reset()
    return True


def cuts(handler: Handler, body: bytes) -> bool:
    """Ends the connection in the middle of the body of the answer."""
    status, _, content = handler.passed_on(body)
    handler.send_response_only(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2])
    handler.wfile.flush()
    handler.reset()
    return True


def flips_a_bit(handler: Handler, body: bytes) -> bool:
    """Changes a bit of the body of the answer."""
    status, headers, content = handler.passed_on(body)
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    handler.answer(status, headers, flipped)
    return True
