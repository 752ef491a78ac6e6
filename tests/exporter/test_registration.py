"""The node's side of registration, against a server that answers as the test decides."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import pytest
import structlog
from tests.exporter.nodes import eventually
from tests.exporter.test_web_configs import Authority
from tests.servers import free_port

from gpuwarden.errors import InvalidInput
from gpuwarden.exporter.processes import boot_id
from gpuwarden.exporter.registration import EngineSettings, Failed, Registrar, check_reachable
from gpuwarden.node_api import LEAVE_PATH, REGISTER_PATH, Registration

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GOOD = (200, {"heartbeat_seconds": 60})


class Engine:
    """What a node talks to; keeps what it heard."""

    def __init__(self, certificate: tuple[Path, Path] | None = None) -> None:
        self.heard: list[tuple[str, str, dict[str, Any]]] = []
        self.answer: tuple[int, object] = GOOD
        self.headers: dict[str, str] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                said = self.headers.get("Authorization", "")
                engine.heard.append((self.path, said, json.loads(body)))
                status, answer = engine.answer
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                for name, value in engine.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Tests have their own words for what happens."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            scheme, context = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            # The handshake belongs to the connection's own thread.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def paths(self) -> list[str]:
        """What was asked for, in order."""
        return [path for path, _, _ in self.heard]


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine that takes everybody."""
    with Engine() as running:
        yield running


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The nodes' token."""
    file = tmp_path / "token"
    file.write_text("secret\n")
    return file


def _registrar(engine: Engine, token: Path, *, advertise: str | None = None) -> Registrar:
    settings = EngineSettings(engine.url, token, advertise)
    return Registrar(settings, host="::", port=9835, chance=lambda: 0.0)


class TestRegistering:
    """What a node says, and what it makes of the answer."""

    def test_what_is_said(self, engine: Engine, token: Path) -> None:
        """The address by which the engine is reached, the boot, and the token as a bearer."""
        assert _registrar(engine, token).register() == 60
        ((path, authorization, body),) = engine.heard
        assert (path, authorization) == (REGISTER_PATH, "Bearer secret")
        said = Registration.decode(body)
        assert (str(said.target), said.boot_id, said.scheme) == (
            "127.0.0.1:9835",
            boot_id(),
            "http",
        )

    def test_an_address_that_was_given(self, engine: Engine, token: Path) -> None:
        """Where another name leads to the node, that is said, with a key of its own."""
        own, other = _registrar(engine, token), _registrar(engine, token, advertise="node7:1")
        own.register()
        other.register()
        first, second = (Registration.decode(body) for _, _, body in engine.heard)
        assert str(second.target) == "node7:1"
        assert first.key != second.key
        own.register()
        assert Registration.decode(engine.heard[-1][2]) == first

    def test_a_token_that_is_replaced(self, engine: Engine, token: Path) -> None:
        """The token file is read each time."""
        one = _registrar(engine, token)
        one.register()
        token.write_text("another")
        one.register()
        assert [said for _, said, _ in engine.heard] == ["Bearer secret", "Bearer another"]

    @pytest.mark.parametrize("content", [b"", b"\n", b"\xff", b"a\nb", None])
    def test_a_token_that_is_none(self, engine: Engine, token: Path, content: bytes | None) -> None:
        """Without a usable token nothing is sent; a line feed cannot become a header."""
        token.unlink()
        if content is not None:
            token.write_bytes(content)
        with pytest.raises(Failed, match="token"):
            _registrar(engine, token).register()
        assert engine.heard == []

    @pytest.mark.parametrize(
        ("answer", "message"),
        [
            ((401, {"error": "unauthorised", "message": "a valid bearer token"}), "valid bearer"),
            ((409, {"message": "another machine's"}), "another machine"),
            ((500, b"<html>"), "HTTP 500"),
            ((200, b"<html>"), "HTTP 200"),
            ((200, b"[" * 60_000), "HTTP 200"),
            ((200, []), "HTTP 200"),
            ((200, {}), "when it wants to hear"),
            ((200, {"heartbeat_seconds": -1}), "when it wants to hear"),
            ((200, b'{"heartbeat_seconds": NaN}'), "when it wants to hear"),
            ((302, {}), "HTTP 302"),
        ],
    )
    def test_answers_that_are_none(
        self, engine: Engine, token: Path, answer: tuple[int, object], message: str
    ) -> None:
        """Whatever is answered, the node knows that it is not registered, and why."""
        engine.answer = answer
        engine.headers = {"Location": f"{engine.url}/elsewhere"}
        with pytest.raises(Failed, match=message):
            _registrar(engine, token).register()
        # Redirects are not followed: the token is for this server only.
        assert engine.paths() == [REGISTER_PATH]

    @pytest.mark.parametrize(("said", "seconds"), [("7", 7.0), ("99999999", None), ("soon", None)])
    def test_when_to_come_back(
        self, engine: Engine, token: Path, said: str, seconds: float | None
    ) -> None:
        """An engine that is busy says for how long, within reason."""
        engine.answer, engine.headers = (429, {"message": "x"}), {"Retry-After": said}
        with pytest.raises(Failed) as caught:
            _registrar(engine, token).register()
        assert caught.value.retry_after == seconds

    @pytest.mark.parametrize(("said", "used"), [(0.001, 1.0), (1e9, 3600.0)])
    def test_a_heartbeat_within_reason(
        self, engine: Engine, token: Path, said: float, used: float
    ) -> None:
        """No engine makes a node speak without pause, or fall silent for ever."""
        engine.answer = (200, {"heartbeat_seconds": said})
        assert _registrar(engine, token).register() == used


class TestTls:
    """An engine that has a certificate."""

    def test_an_engine_that_is_trusted(self, token: Path, tmp_path: Path) -> None:
        """The token goes to the engine that the authority signed for."""
        authority = Authority(tmp_path, "authority")
        with Engine(authority.issue("engine")) as engine:
            settings = EngineSettings(engine.url, token, ca_file=authority.file)
            one = Registrar(settings, host="::", port=9835, scheme="https")
            assert one.register() == 60
        assert engine.heard[0][2]["scheme"] == "https"

    def test_an_engine_that_is_not(self, token: Path, tmp_path: Path) -> None:
        """Whoever stands in the engine's place does not get the token."""
        stranger = Authority(tmp_path, "stranger")
        trusted = Authority(tmp_path, "authority")
        with Engine(stranger.issue("engine")) as engine:
            settings = EngineSettings(engine.url, token, ca_file=trusted.file)
            with pytest.raises(Failed, match="certificate"):
                Registrar(settings, host="::", port=9835).register()
        assert engine.heard == []


class TestLife:
    """From the start to the goodbye."""

    def test_goodbye(self, engine: Engine, token: Path) -> None:
        """A node that ends says so, with the key that it registered by."""
        one = _registrar(engine, token)
        one.start()
        eventually(lambda: engine.heard)
        one.stop()
        assert engine.paths() == [REGISTER_PATH, LEAVE_PATH]
        (_, _, came), (_, said, left) = engine.heard
        assert (left["address"], left["key"], said) == (
            came["address"],
            came["key"],
            "Bearer secret",
        )

    def test_heartbeats(self, engine: Engine, token: Path) -> None:
        """It is heard again and again, as often as the engine asks for."""
        engine.answer = (200, {"heartbeat_seconds": 1})
        one = _registrar(engine, token)
        one.start()
        eventually(lambda: len(engine.heard) >= 3)
        one.stop()

    def test_an_engine_that_comes_later(self, engine: Engine, token: Path) -> None:
        """What was refused is tried again, and said once."""
        engine.answer = (503, {"message": "not yet"})
        with structlog.testing.capture_logs() as said:
            one = _registrar(engine, token)
            one.start()
            eventually(lambda: len(engine.heard) >= 3)
            engine.answer = GOOD
            eventually(lambda: [line for line in said if line["log_level"] == "info"])
            one.stop()
        assert [line["event"] for line in said] == [
            "not registered with the engine",
            "registered with the engine",
            "left the engine",
        ]

    def test_who_was_never_registered_says_no_goodbye(self, engine: Engine, token: Path) -> None:
        """A node that was refused does not speak for its address."""
        engine.answer = (409, {"message": "another machine's"})
        one = _registrar(engine, token)
        one.start()
        eventually(lambda: engine.heard)
        one.stop()
        assert set(engine.paths()) == {REGISTER_PATH}

    def test_an_engine_that_hangs(self, token: Path) -> None:
        """An engine that takes connections and answers nothing keeps no node from ending."""
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            one = Registrar(EngineSettings(url, token), host="::", port=9835)
            one.start()
            silent.accept()[0].close()
            one.stop()


class TestSettings:
    """Flags that are wrong are refused at the start."""

    @pytest.mark.parametrize(
        "url",
        ["engine:9837", "ftp://engine", "http://", "http://a@engine", "http://e?x", "http://e:x"],
    )
    def test_an_engine_that_is_none(self, token: Path, url: str) -> None:
        """An address that is none is named with an example."""
        with pytest.raises(InvalidInput, match=r"--engine\.url"):
            EngineSettings(url, token)

    def test_an_address_that_no_node_has(self, token: Path) -> None:
        """What the engine would refuse is refused here."""
        with pytest.raises(InvalidInput, match=r"--engine\.advertise-address"):
            EngineSettings("http://engine:9837", token, "169.254.169.254:80")

    def test_a_loopback_for_an_engine_elsewhere(self, token: Path) -> None:
        """An exporter that only its own node can reach is not offered to a cluster."""
        settings = EngineSettings("http://engine:9837", token)
        with pytest.raises(InvalidInput, match=r"--web\.listen-address :9835"):
            check_reachable(settings, "127.0.0.1")
        check_reachable(settings, "::")
        check_reachable(EngineSettings("http://127.0.0.1:9837", token), "127.0.0.1")
        check_reachable(EngineSettings("http://engine:9837", token, "node7:9835"), "127.0.0.1")

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--engine.url=http://127.0.0.1:1"], "needs --engine.token-file"),
            (["--engine.token-file=/t"], "need --engine.url"),
            (["--engine.url=x", "--engine.token-file=/t"], "not a base address"),
        ],
    )
    def test_flags(self, flags: list[str], message: str) -> None:
        """Flags that belong together are asked for together."""
        answer = subprocess.run(
            [sys.executable, "-m", "gpuwarden", "exporter", *flags],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (answer.returncode, message in answer.stderr) == (2, True), answer.stderr


def test_an_engine_that_is_down(token: Path) -> None:
    """A refused connection is a failed attempt like any other."""
    one = Registrar(EngineSettings(f"http://127.0.0.1:{free_port()}", token), host="::", port=9835)
    with pytest.raises(Failed, match="does not answer"):
        one.register()
