"""Signing in: by a token, by a session that a token began, or by the word of a trusted proxy.

A session is a signed cookie, so that nothing is kept for it; its key lives as long as the process.
Every comparison with a secret takes the same time, whatever was given.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from itsdangerous import BadData, URLSafeSerializer

from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.base_paths import base_of
from gpuwarden.ruleengine.links import SIGNED
from gpuwarden.ruleengine.roles import EVERYONE, Person, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import HTTPConnection

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.web_settings import Members, ProxySettings, WebSettings

_HOW = {
    Role.OWNER: "web.tokens",
    Role.SCHEDULER: "web.tokens with role: scheduler",
    Role.OPERATOR: "web.operator_token_file or web.tokens",
    Role.ADMIN: "web.tokens with role: admin",
}
MAX_NAME = 200
"""Characters of a name that a proxy may give."""
SHARED = "operator"
"""Name of whoever bears web.operator_token_file and does not say who they are."""


@dataclass(frozen=True, slots=True)
class Token:
    """A secret that its bearer is known by.

    Attributes:
        name: for the audit.
        role: what its bearer may do.
        secret: the token.
        shared: several bear it.
    """

    name: str
    role: Role
    secret: str
    shared: bool = False


class SignIns:
    """Tells who is asking.

    Args:
        web: the settings.
        tokens: every token that is believed.
        directory: the one in force at the time of the call.
        clock: wall time, for the end of sessions.
        external_url: of the engine, as people's browsers see it.
        key: that sessions are signed with; one that nobody else has by default.
    """

    def __init__(
        self,
        web: WebSettings,
        tokens: Sequence[Token],
        *,
        directory: Callable[[], Directory],
        clock: Clock,
        external_url: str,
        key: bytes | None = None,
    ) -> None:
        self._web = web
        self._tokens = tuple(tokens)
        self._directory = directory
        self._clock = clock
        self._origin = _origin(external_url)
        self._key = secret = key or secrets.token_bytes(32)
        self._sessions = URLSafeSerializer(secret, salt="gpuwarden session", signer_kwargs=SIGNED)
        self._forms = URLSafeSerializer(secret, salt="gpuwarden form", signer_kwargs=SIGNED)
        self.secure = web.tls_cert_file is not None or external_url.startswith("https://")
        """Whether browsers are to send the cookie over TLS only."""
        self.cookie_path = base_of(external_url) or "/"
        """Where browsers are to send it: not to others below another path of the same host."""
        prefix = "__Host-" if self.cookie_path == "/" else "__Secure-"
        self.cookie = f"{prefix if self.secure else ''}gpuwarden"
        """Name of the session's cookie."""

    @property
    def possible(self) -> bool:
        """Whether anybody can sign in with a token."""
        return bool(self._tokens)

    @property
    def session_seconds(self) -> int:
        """How long a sign-in lasts."""
        return int(self._web.session)

    # -- who

    def _refuse_unknown(self, connection: HTTPConnection) -> None:
        """Refuse a token that nobody has; a password of another server in front is none.

        Raises:
            Refusal: 401.
        """
        kind = connection.headers.get("Authorization", "").partition(" ")[0]
        if kind.lower() == "bearer":
            raise Refusal(401, "unauthorised", "this token is not known; see web.tokens")

    def _bearing_of(self, connection: HTTPConnection) -> Person | None:
        kind, _, given = connection.headers.get("Authorization", "").partition(" ")
        token = self._token(given.strip()) if kind.lower() == "bearer" else None
        return None if token is None else self._bearing(token)

    def changer(self, connection: HTTPConnection, least: Role) -> Person:
        """Who asks the API for a change: a token, and never a cookie or a header of the proxy.

        Raises:
            Refusal: 401 without a token that is known, 403 for one whose role is not enough or
                where there is none that could be.
        """
        if not any(token.role.includes(least) for token in self._tokens):
            raise Refusal(403, "closed", f"closed until engine.yaml says {_HOW[least]}")
        person = self._bearing_of(connection)
        if person is None:
            raise Refusal(401, "unauthorised", f"this takes the bearer token of {_HOW[least]}")
        if not person.role.includes(least):
            raise Refusal(403, "role", f"{person.name} is {person.role}; this takes {least}")
        return person

    def visitor(self, connection: HTTPConnection) -> Person | None:
        """Whose browser this is, by session or by the proxy's word, or None.

        Raises:
            Refusal: 403, a proxy's header from an address that is not the proxy's.
        """
        return self._proxied(connection) or self._session(connection)

    def reader(self, connection: HTTPConnection, *, cookies: bool) -> Person | None:
        """Who may read: who is known, everyone where pages are open, else None.

        Args:
            connection: the request.
            cookies: whether a session counts; for the API it does not.

        Raises:
            Refusal: what they present is wrong.
        """
        # What else stands in Authorization may be for the proxy, which passes it on as it came.
        person = self._bearing_of(connection) or self._proxied(connection)
        if person is None:
            self._refuse_unknown(connection)
        if person is None and cookies:
            person = self._session(connection)
        if person is None and self._web.readable_by_all:
            return EVERYONE
        return person

    def _bearing(self, token: Token) -> Person:
        teams, sees = self._teams(token.name, token.role)
        return Person(token.name, token.role, teams=teams, sees_teams=sees, shared=token.shared)

    def _token(self, given: str) -> Token | None:
        found = None
        for token in self._tokens:
            # All are compared: when the answer comes must not tell which one it is like.
            if hmac.compare_digest(token.secret.encode(), given.encode()):
                found = token
        return found

    def _teams(self, name: str, role: Role) -> tuple[tuple[str, ...], bool]:
        """Of which teams an owner is a member, and whether they see the jobs of these."""
        if role is not Role.OWNER:
            return (), False
        user = self._directory().user(name)
        return user.member_of, user.sees_team

    # -- sessions

    def begin(self, given: str) -> tuple[Person, str] | None:
        """Sign in with a token.

        Returns:
            Who that is, and the value of the session's cookie; None for a token that is not known.
        """
        token = self._token(given.strip())
        if token is None:
            return None
        session = secrets.token_urlsafe(16)
        value = {
            "token": self._mark(token),
            "until": int(self._clock.wall() + self._web.session),
            "session": session,
        }
        return self._bearing(token), str(self._sessions.dumps(value))

    def _session(self, connection: HTTPConnection) -> Person | None:
        found = _loaded(self._sessions, connection.cookies.get(self.cookie, ""))
        if found is None or found["until"] <= self._clock.wall():
            return None
        # Whose token is gone or is another is signed out, and who has another role has it at once.
        token = next((t for t in self._tokens if self._mark(t) == found["token"]), None)
        if token is None:
            return None
        person = self._bearing(token)
        return replace(person, session=found["session"])

    def _mark(self, token: Token) -> str:
        """What a session remembers of its token: another one for another token or another name."""
        text = f"{token.name}\n{token.secret}".encode()
        return hmac.new(self._key, text, "sha256").hexdigest()[:32]

    # -- the proxy

    def _proxied(self, connection: HTTPConnection) -> Person | None:
        proxy = self._web.proxy
        if proxy is None:
            return None
        names = connection.headers.getlist(proxy.user_header)
        if not names:
            return None
        if not _is_peer(connection, proxy):
            raise Refusal(
                403,
                "not_the_proxy",
                f"{proxy.user_header} comes from an address that web.proxy.peers does not name",
            )
        given = _decoded(names[0]).strip()
        if len(names) > 1 or not given.isprintable() or not 0 < len(given) <= MAX_NAME:
            raise Refusal(403, "not_the_proxy", f"{proxy.user_header} is not one name")
        email = _only(connection, proxy.email_header)
        groups = {group.strip() for group in _only(connection, proxy.groups_header).split(",")}
        name = self._user_name(given, email)
        role = _role(proxy, {given, name}, groups)
        return Person(name, role, f"proxy {given}", *self._teams(name, role))

    def _user_name(self, given: str, email: str) -> str:
        users = self._directory().users
        if given in users or not email:
            return given
        found = [
            name for name, user in users.items() if (user.email or "").lower() == email.lower()
        ]
        return found[0] if len(found) == 1 else given

    # -- forms

    def form(self, person: Person) -> str:
        """What a form carries, to show that it was this person's page that sent it."""
        value = {"session": person.session, "until": int(self._clock.wall() + self._web.session)}
        return str(self._forms.dumps(value)) if person.session else ""

    def check_form(self, connection: HTTPConnection, person: Person, given: str) -> None:
        """Refuse a form that another site's page sent in this person's name.

        Raises:
            Refusal: 403.
        """
        self.check_origin(connection)
        found = _loaded(self._forms, given)
        if (
            not person.session
            or found is None
            or found["until"] <= self._clock.wall()
            or not hmac.compare_digest(found["session"].encode(), person.session.encode())
        ):
            raise Refusal(403, "stale_form", "this form is too old: open the page again")

    def check_origin(self, connection: HTTPConnection) -> None:
        """Refuse what a browser says that another site sent.

        Raises:
            Refusal: 403.
        """
        site = connection.headers.get("Sec-Fetch-Site")
        if site is not None:
            if site in ("same-origin", "none"):
                return
        else:
            # Browsers leave the other header out over plain HTTP.
            own = {self._origin, _origin(str(connection.base_url))}
            if connection.headers.get("Origin") in own:
                return
        raise Refusal(403, "foreign_form", "this form was sent by a page of another site")


def _loaded(serializer: URLSafeSerializer, text: str) -> Any:
    try:
        return serializer.loads(text)
    except BadData:
        return None


def _origin(url: str) -> str:
    """As browsers write it: in small letters, and without the port that goes without saying."""
    parts = urlsplit(url.lower())
    usual = {"http": ":80", "https": ":443"}.get(parts.scheme, "")
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host.removesuffix(usual) if usual else host}"


def _only(connection: HTTPConnection, header: str | None) -> str:
    """What a header of the proxy says, or an empty string where there is none.

    Raises:
        Refusal: 403, it is there twice: the proxy adds its own to what came from outside.
    """
    values = [] if header is None else connection.headers.getlist(header)
    if len(values) > 1:
        raise Refusal(403, "not_the_proxy", f"{header} is there twice: the proxy must replace it")
    return _decoded(values[0]).strip() if values else ""


def _decoded(value: str) -> str:
    """A header as the proxy wrote it: names of people and groups in UTF-8, if it is that."""
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _is_peer(connection: HTTPConnection, proxy: ProxySettings) -> bool:
    try:
        address = ipaddress.ip_address(connection.client.host if connection.client else "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return any((mapped or address) in ipaddress.ip_network(network) for network in proxy.peers)


def _role(proxy: ProxySettings, names: set[str], groups: set[str]) -> Role:
    def has(members: Members) -> bool:
        return bool(names & set(members.users) or groups & set(members.groups))

    if has(proxy.admins):
        return Role.ADMIN
    return Role.OPERATOR if has(proxy.operators) else Role.OWNER
