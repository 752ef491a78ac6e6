"""The web configuration file: what is refused, and who is let in over real connections."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import http.client
import ipaddress
import os
import signal
import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import bcrypt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.exporter.nodes import eventually
from tests.servers import free_port

from gpuwarden.errors import InvalidInput
from gpuwarden.exporter import web_configs
from gpuwarden.exporter.simulated import Card, Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HASH = "$2b$04$Z2m2mzemW3euGkaar/Tm/eOu2OVkYVr7yTJYZxIiba9G1Z8dtYGia"
"""Of `secret`."""

TLS = "tls_server_config:\n  cert_file: a\n  key_file: b\n"


@dataclass
class Authority:
    """Signs certificates."""

    folder: Path
    name: str

    def __post_init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._sign(self.name, self._key, authority=True)
        self.file = self.folder / f"{self.name}.crt"
        self.file.write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool
    ) -> x509.Certificate:
        def common(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = dt.datetime.now(dt.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        return (
            x509.CertificateBuilder()
            .subject_name(common(name))
            .issuer_name(common(self.name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .add_extension(
                x509.KeyUsage(
                    digital_signature=True,
                    content_commitment=False,
                    key_encipherment=False,
                    data_encipherment=False,
                    key_agreement=False,
                    key_cert_sign=authority,
                    crl_sign=authority,
                    encipher_only=False,
                    decipher_only=False,
                ),
                critical=True,
            )
            .sign(self._key, hashes.SHA256())
        )

    def issue(self, name: str) -> tuple[Path, Path]:
        """Files of a new certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, private = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        private.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        signed = self._sign(name, key, authority=False)
        certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return certificate, private

    def trust(self, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.file))
        if client is not None:
            context.load_cert_chain(*client)
        return context


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Signs the node's certificate."""
    return Authority(tmp_path, "authority")


@dataclass
class Server:
    """An exporter with a web configuration file."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, tls: ssl.SSLContext | None = None, **headers: str) -> int:
        """The status of an answer; 0 where there is none."""
        if tls is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        else:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", self.port, context=tls, timeout=10
            )
        try:
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            answer.read()
        except (OSError, http.client.HTTPException):
            return 0
        else:
            return answer.status
        finally:
            connection.close()


def basic(name: str, password: str) -> dict[str, str]:
    """The header of a user."""
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


def test_guesses_keep_nobody_out(tmp_path: Path) -> None:
    """However many guess at a time, who was let in before is let in, and few wait to be checked."""
    file = tmp_path / "web.yml"
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    file.write_text(f"basic_auth_users: {{ann: '{hashed}'}}")
    web = web_configs.Web(file)

    async def guess(number: int) -> bool | None:
        try:
            return await web.allows(basic("ann", f"wrong-{number}")["Authorization"])
        except web_configs.TooManyGuesses:
            return None

    async def crowd() -> list[bool | None]:
        right = basic("ann", "right")["Authorization"]
        assert await web.allows(right)
        guesses = [asyncio.create_task(guess(number)) for number in range(100)]
        await asyncio.sleep(0)
        assert await web.allows(right)
        return await asyncio.gather(*guesses)

    answers = asyncio.run(crowd())
    assert (answers.count(False), answers.count(None)) == (8, 92)


@pytest.fixture
def serve(tmp_path: Path, scenario_file: Path) -> Iterator[Callable[[str], Server]]:
    """Starts an exporter with a web configuration file."""
    started: list[Server] = []

    def start(config: str) -> Server:
        (tmp_path / "web.yml").write_text(config)
        Scenario([Card(0)]).write(scenario_file)
        port, log = free_port(), tmp_path / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gpuwarden", "exporter"),
                    f"--web.listen-address=127.0.0.1:{port}",
                    f"--web.config.file={tmp_path / 'web.yml'}",
                    f"--jobs.directory={tmp_path / 'jobs'}",
                    f"--gpus=simulated:{scenario_file}",
                    "--log.format=json",
                ],
                stderr=file,
            )
        started.append(Server(port, process, log))
        eventually(lambda: "listening" in log.read_text() or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        return started[-1]

    yield start
    for one in started:
        one.process.send_signal(signal.SIGTERM)
        assert one.process.wait(20) == 0


class TestReading:
    """What the file may say."""

    @pytest.mark.parametrize(
        ("content", "place", "message"),
        [
            ("tls_server_conf: {}", "1:1", "tls_server_config"),
            ("tls_server_config: {cert_file: a}", "1:20", "key_file: is missing"),
            ("tls_server_config: {cert_file: a, key_file: 5}", "1:45", "must be text"),
            ("tls_server_config: {cert_file: a, key_file: b, cipher_suites: []}", "1:48", "known"),
            (
                f"{TLS}  client_ca_file: c\n",
                "2:3",
                "go together",
            ),
            (
                f"{TLS}  client_auth_type: RequestClientCert\n",
                "4:21",
                "proves nothing",
            ),
            (
                f"{TLS}  min_version: TLS10\n",
                "4:16",
                "TLS12",
            ),
            ("basic_auth_users: {a: secret}", "1:23", "htpasswd"),
            (f"basic_auth_users: {{a: '{HASH.replace('$04', '$31')}'}}", "1:23", "cost of 4 to 16"),
            (f"basic_auth_users: {{'a:b': '{HASH}'}}", "1:20", "colon"),
            ("basic_auth_users: []", "1:19", "mapping"),
            ("a: 1\na: 2", "2:1", "a"),
            ("[", "1:2", "web.yml"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, content: str, place: str, message: str) -> None:
        """Every mistake stands at its line and column."""
        file = tmp_path / "web.yml"
        file.write_text(content)
        with pytest.raises(InvalidInput, match=message) as caught:
            web_configs.read(file)
        assert f"{file}:{place}" in str(caught.value)

    def test_all_mistakes_at_once(self, tmp_path: Path) -> None:
        """A file with three mistakes is corrected in one go."""
        file = tmp_path / "web.yml"
        file.write_text("x: 1\ntls_server_config: {}\nbasic_auth_users: {a: b}\n")
        with pytest.raises(InvalidInput) as caught:
            web_configs.read(file)
        assert len(caught.value.diagnostics) == 4

    def test_an_empty_file_opens_everything(self, tmp_path: Path) -> None:
        """As with the toolkit: a file that says nothing asks for nothing."""
        (tmp_path / "web.yml").touch()
        assert web_configs.read(tmp_path / "web.yml") == web_configs.WebConfig()

    def test_files_are_beside_it(self, tmp_path: Path) -> None:
        """Relative paths are relative to the file."""
        (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: a, key_file: /b}")
        tls = web_configs.read(tmp_path / "web.yml").tls
        assert tls is not None
        assert (tls.certificate, tls.key) == (tmp_path / "a", Path("/b"))

    def test_a_key_that_is_none(self, tmp_path: Path) -> None:
        """Files that hold no certificate are refused at the start."""
        (tmp_path / "a").touch()
        (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: a, key_file: a}")
        with pytest.raises(InvalidInput, match="cannot be used"):
            web_configs.Web(tmp_path / "web.yml")


class TestServing:
    """Who is let in."""

    def test_tls(self, serve: Callable[[str], Server], authority: Authority) -> None:
        """With TLS nobody is answered in the clear, and the newest certificate is shown."""
        authority.issue("node")
        server = serve("tls_server_config: {cert_file: node.crt, key_file: node.key}")
        assert server.get(authority.trust()) == 200
        assert server.get() == 0
        assert server.get(ssl.create_default_context()) == 0
        newer = Authority(authority.folder, "newer")
        newer.issue("node")
        eventually(lambda: server.get(newer.trust()), until=lambda status: status == 200)
        assert server.get(authority.trust()) == 0
        (authority.folder / "node.crt").write_text("spoilt")
        assert server.get(newer.trust()) == 200
        assert "not taken over" in server.log.read_text()

    def test_client_certificates(
        self, serve: Callable[[str], Server], authority: Authority, tmp_path: Path
    ) -> None:
        """Only who has a certificate of the right authority is answered."""
        authority.issue("node")
        (tmp_path / "others").mkdir()
        stranger = Authority(tmp_path / "others", "stranger").issue("client")
        server = serve(
            "tls_server_config:\n  cert_file: node.crt\n  key_file: node.key\n"
            "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: authority.crt\n"
        )
        assert server.get(authority.trust(authority.issue("client"))) == 200
        assert server.get(authority.trust()) == 0
        assert server.get(authority.trust(stranger)) == 0

    def test_passwords(self, serve: Callable[[str], Server], tmp_path: Path) -> None:
        """Only who knows the password is answered, and a changed file counts at once."""
        pytest.importorskip("bcrypt")
        server = serve(f"basic_auth_users: {{prometheus: '{HASH}'}}")
        assert server.get(**basic("prometheus", "secret")) == 200
        assert server.get(**basic("prometheus", "secret")) == 200
        assert server.get() == 401
        for header in (
            basic("prometheus", "wrong"),
            basic("prometheus", "secret\0"),
            basic("prometheus", "secret" * 20),
            basic("nobody", "secret"),
            {"Authorization": "Basic !"},
            {"Authorization": "Basic " + base64.b64encode(b"\xff:x").decode()},
            {"Authorization": "Bearer x"},
            {"Authorization": "Basic"},
        ):
            assert server.get(**header) == 401, header
        (tmp_path / "web.yml").write_text(f"basic_auth_users: {{another: '{HASH}'}}")
        assert server.get(**basic("prometheus", "secret")) == 401
        assert server.get(**basic("another", "secret")) == 200
        (tmp_path / "web.yml").write_text("basic_auth_users: {another: secret}")
        assert server.get(**basic("another", "secret")) == 200
        assert server.get(**basic("another", "wrong")) == 401

    def test_hashes_of_unknown_users_are_checked_too(self, tmp_path: Path) -> None:
        """What stands for the hash of nobody is one that bcrypt takes, and nobody's password."""
        bcrypt = pytest.importorskip("bcrypt")
        assert not bcrypt.checkpw(b"secret", web_configs._NOBODY.encode())
        (tmp_path / "web.yml").write_text(f"basic_auth_users: {{a: '{HASH}'}}")
        web = web_configs.Web(tmp_path / "web.yml")
        header = basic("nobody", "secret")["Authorization"]
        assert not asyncio.run(web.allows(header))


def test_a_wrong_file_is_told_at_the_start(tmp_path: Path) -> None:
    """The exporter does not start with a file that it would not keep."""
    (tmp_path / "web.yml").write_text("rate_limit: {}\n")
    answer = subprocess.run(
        [
            *(sys.executable, "-m", "gpuwarden", "exporter", "--web.listen-address=127.0.0.1:0"),
            f"--web.config.file={tmp_path / 'web.yml'}",
            f"--jobs.directory={tmp_path}",
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert answer.returncode == 2
    assert "web.yml:1:1" in answer.stderr
