"""Command lines without what they should not tell: who reads why a job runs needs no password.

What is taken for a secret is hidden by its name (`--api-key X`, `HF_TOKEN=X`, `"password": "X"`,
`Authorization: X`), by its place (a URL's user and query, a shell's code), or by its shape (keys of
AWS, Hugging Face, GitHub, Weights & Biases and others; long random words). In doubt it is hidden:
a word too many costs nobody anything. A secret that has no such name, place or shape, such as a
short password given as a plain word, cannot be told from other words: nothing here finds it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

REDACTED = "[redacted]"
CODE = "[code]"

# Part of a name, whatever else is in it.
_IN_NAMES = re.compile(
    r"token(?!iz)|secret|passw|passphrase|passcode|pwd|apikey|accesskey|privatekey|credential|"
    r"bearer|authoriz|oauth|cookie|signature|webhook|connectionstring|dsn"
)
# Whole words of a name: `key` is one of `api-key`, not of `keypoints`.
_WORDS = frozenset(
    {"auth", "authkey", "basic", "cred", "creds", "digest", "jwt", "key", "keys", "login", "otp"}
    | {"pass", "pat", "pin", "pw", "sas", "session", "sessionid", "sig", "token", "tokens"}
)
_OTHERS = frozenset({"bypass", "compass", "hotkey", "monkey", "onepass", "turkey"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAME = re.compile(r"-{0,2}[\w.+-]{1,128}:?")
# The end of what stands before = or : in code and data: `os.environ["API_KEY"]`, `{"token"`.
_NAME_BEFORE = re.compile(r"""[\w.\-"'\[\]()]{1,128}\s?$""")
_LONGEST_NAME = 130
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*")
_HARMLESS = frozenset(
    {"CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES", "GPUWARDEN_JOBS"}
    | {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MKL_NUM_THREADS"}
    | {"NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME"}
    | {"OMP_NUM_THREADS", "PYTHONPATH", "PYTHONUNBUFFERED", "RANK", "WORLD_SIZE"}
)
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]{0,31}://)(?P<rest>\S*)")
_SHAPES = re.compile(
    r"""
      (?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}                        # AWS
    | (?:hf|api_org|npm|gh[a-z]|github_pat|dop_v1|[rs]k_(?:live|test))_[A-Za-z0-9_]{10,}
    | (?:sk|glpat|pypi|nvapi|xox[a-z]|xapp|dckr_pat)-[\w-]{10,}
    | AIza[\w-]{20,} | ya29\.[\w-]+ | SG\.[\w-]+\.[\w-]+         # Google, SendGrid
    | eyJ[\w-]{5,512}\.[\w.-]*                                  # JSON web tokens
    | [0-9a-fA-F]{32,}                                           # Weights & Biases, and hashes
    """,
    re.VERBOSE,
)
_LONG = re.compile(r"[A-Za-z0-9+_=.-]{32,}|(?<![A-Za-z0-9+/=])[A-Za-z0-9+/]{40}(?![A-Za-z0-9+/=])")
_SCHEMES = frozenset({"basic", "bearer", "digest", "negotiate", "token"})
_INTERPRETERS = re.compile(
    r"(?:(?:ba|da|z|k|c|tc|fi)?sh|python[0-9.]*|pypy[0-9.]*|perl|ruby|node|lua|php|julia|Rscript|R)"
)
_CODE_OPTION = re.compile(r"-[A-Za-z]{0,4}[ce]|--(?:eval|command)|-Command")
_USER_OPTIONS = frozenset({"-u", "-U", "--user", "--proxy-user"})
_GLUED = frozenset({"mysql", "mysqldump", "mysqladmin", "mariadb", "sshpass"})


def redact(arguments: Sequence[str]) -> tuple[str, ...]:
    """A command line that may be shown.

    Args:
        arguments: the command line, its program first.

    Returns:
        As many arguments; each as it was, or without what may be a secret.
    """
    program = arguments[0].rpartition("/")[2] if arguments else ""
    plain = bool(_INTERPRETERS.fullmatch(program))
    shown: list[str] = []
    before = ""
    for at, argument in enumerate(arguments):
        if at and _CODE_OPTION.fullmatch(before) and (plain or len(argument.split()) > 1):
            shown.append(CODE)
        elif at and (_announces(before) or _is_login(program, before, argument)):
            shown.append(REDACTED)
        elif at and program in _GLUED and argument.startswith("-p") and len(argument) > 2:
            shown.append(f"-p{REDACTED}")
        else:
            shown.append(_argument(argument))
        plain = plain and (at == 0 or argument.startswith("-"))
        before = argument
    return tuple(shown)


def _is_login(program: str, before: str, argument: str) -> bool:
    """Whether an argument is `user:password`, or a password by the option before it."""
    if before in _USER_OPTIONS:
        return ":" in argument
    if before == "-p":
        return program in _GLUED or not re.fullmatch(r"[0-9:./]{1,21}", argument)
    return False


def _argument(argument: str) -> str:
    if "-----BEGIN" in argument:
        return REDACTED
    end = _secret_from(argument, whole=True)
    if end is not None:
        return _shapes(argument[:end]) + REDACTED
    # A program that sets its title, or code: words as on a command line of their own.
    return "".join(_words(re.split(r"(\s+)", argument)))


def _words(parts: Iterable[str]) -> Iterator[str]:
    """Words and the blanks between them, in turn."""
    before, quote = "", ""
    for at, part in enumerate(parts):
        if at % 2:
            yield part
            continue
        if quote:
            # The rest of a quoted value.
            if quote in part:
                quote = ""
            continue
        if _announces(before):
            yield REDACTED
            quote = _left_open(part)
        else:
            end = _secret_from(part, whole=False)
            if end is None:
                yield _shapes(part)
            else:
                yield _shapes(part[:end]) + REDACTED
                quote = _left_open(part[end:])
        before = part


def _left_open(part: str) -> str:
    """The quote that a word opens and does not close, or an empty string."""
    for quote in ('"', "'"):
        if part.count(quote) % 2:
            return quote
    return ""


def _announces(word: str) -> bool:
    """Whether what follows a word is a secret: `--password`, `Authorization:`, `{"token":`."""
    if word.lower().strip("\"'") in _SCHEMES:
        return True
    if _NAME.fullmatch(word):
        return _is_secret(word)
    if word[-1:] in ("=", ":"):
        found = _NAME_BEFORE.search(word[-_LONGEST_NAME:-1])
        return found is not None and _is_secret(found[0])
    return False


def _secret_from(text: str, *, whole: bool) -> int | None:
    """Where in a text a secret begins that its name announces, or None where there is none.

    Args:
        text: a word, or an argument.
        whole: whether blanks in it may be part of a value: only if it begins with the name.
    """
    for match in re.finditer(r"[=:]", text):
        at = match.start()
        if text[at : at + 3] == "://":
            continue
        # However long a hostile line is, only so much of it is looked at again for each place.
        begin = max(0, at - _LONGEST_NAME)
        found = _NAME_BEFORE.search(text[begin:at])
        if whole and (found is None or begin + found.start() > 0):
            return None
        name = "" if found is None else found[0]
        variable = text[at] == "=" and _VARIABLE.fullmatch(name) and name not in _HARMLESS
        if (variable or _is_secret(name)) and at + 1 < len(text):
            return _before_user(text, at) or at + 1
        if whole:
            return None
    return None


def _before_user(text: str, at: int) -> int:
    """Where the user begins of the address in which a place is; 0 where it is in no user."""
    for address in _ADDRESS.finditer(text):
        if address.start() <= at < address.end() and "@" in text[at : address.end()]:
            return address.start("rest")
    return 0


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if any(word.endswith(("auth", "key", "pass")) and word not in _OTHERS for word in words):
        return True
    return not _WORDS.isdisjoint(words) or _IN_NAMES.search("".join(words)) is not None


def _shapes(word: str) -> str:
    word = _without_user(_ADDRESS.sub(_address, word))
    word = _SHAPES.sub(REDACTED, word)
    return _LONG.sub(lambda match: REDACTED if _is_random(match[0]) else match[0], word)


def _address(match: re.Match[str]) -> str:
    """An address without its user, its query and its fragment."""
    user, at, rest = match["rest"].rpartition("@")
    if at and re.search(r"[?#]", user):
        # Nobody can tell whether a password or a query holds the last @.
        return f"{match['scheme']}{REDACTED}"
    place = re.search(r"[?#]", rest)
    shown = rest if place is None else f"{rest[: place.start()]}?{REDACTED}"
    return f"{match['scheme']}{REDACTED + at if at else ''}{shown}"


def _without_user(word: str) -> str:
    """A word without the `user:password@` of an address that has no scheme."""
    user, at, rest = word.rpartition("@")
    name, colon, _ = user.partition(":")
    if not at or not colon or "://" in user:
        return word
    begin = max(name.rfind(letter) for letter in "/'\"=,;([{ ") + 1
    return f"{word[:begin]}{REDACTED}@{rest}"


def _is_random(run: str) -> bool:
    """Whether a long word has the mixture of a key: both cases and several digits."""
    kinds = (str.isupper, str.islower, str.isdigit)
    return all(sum(map(kind, run)) >= 3 for kind in kinds)
