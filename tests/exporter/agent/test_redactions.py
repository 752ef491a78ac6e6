from __future__ import annotations

import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuwarden.exporter.agent.redactions import CODE, REDACTED, redact

PRINTABLE = string.ascii_letters + string.digits + "!#$%&()*+,-./;<>?@[]^_{|}~"
SECRETS = st.text("QXZ0123456789", min_size=6, max_size=6).flatmap(
    lambda core: st.tuples(st.text(PRINTABLE, max_size=8), st.text(PRINTABLE, max_size=8)).map(
        lambda around: f"{around[0]}{core}{around[1]}"
    )
)
"""Passwords of any letters but blanks and quotes."""
NAMES = st.sampled_from(
    [
        "api-key",
        "api_key",
        "apikey",
        "token",
        "hf_token",
        "auth-token",
        "password",
        "passwd",
        "pwd",
        "db.password",
        "key",
        "jwt",
        "client-secret",
        "aws_secret_access_key",
        "private-key",
        "access_key",
        "credentials",
        "auth",
        "oauth",
        "session",
        "cookie",
        "webhook",
        "wandbKey",
        "trainer.api_key",
        "passphrase",
        "bearer",
        "dsn",
        "userpass",
        "license_key",
    ]
)
VARIABLES = st.from_regex(r"[A-Z][A-Z0-9]{0,8}_(KEY|TOKEN|SECRET|URL|X)", fullmatch=True)
WORDS = st.lists(
    st.one_of(
        st.sampled_from(["train", "model=yolov8m.pt", "--epochs", "3", "-c", "conf", "", "=", ":"]),
        st.text(max_size=12),
    ),
    max_size=4,
)
HEX = st.text("0123456789abcdef", min_size=40, max_size=40)
BASE = st.text(string.ascii_letters + string.digits, min_size=20, max_size=36)
AWS = st.text(string.ascii_uppercase + string.digits, min_size=16, max_size=16)

NAMED = [
    ["--NAME=SECRET"],
    ["--NAME", "SECRET"],
    ["-NAME=SECRET"],
    ["NAME=SECRET"],
    ["+NAME=SECRET"],
    ["--NAME=SECRET SECRET"],
    ["--env=NAME=SECRET"],
    ["-e", "NAME=SECRET"],
    ["x=1,NAME=SECRET,y=2"],
    ["-H", "NAME: SECRET SECRET"],
    ["-H", "Authorization: Bearer SECRET"],
    ["Authorization:", "Bearer", "SECRET"],
    ["--header=X-NAME: SECRET"],
    ['{"a": 1, "NAME": "SECRET"}'],
    ['{"NAME":"SECRET","b":2}'],
    ["{'NAME': 'SECRET SECRET'}"],
    ["title --NAME SECRET --epochs 3"],
    ["title --NAME=SECRET x"],
    ["title --NAME 'SECRET SECRET' x"],
    ['os.environ["NAME"]="SECRET" x'],
    ["bash", "-c", "login SECRET x"],
    ["python", "-c", "SECRET"],
]


def shows(arguments: list[str], secret: str) -> bool:
    """Whether a secret can be read from what is shown."""
    shown = redact(arguments)
    assert len(shown) == len(arguments)
    return any(secret in argument for argument in shown)


@given(st.sampled_from(NAMED), NAMES, SECRETS, WORDS, WORDS)
def test_a_named_secret_is_never_shown(
    template: list, name: str, secret: str, before: list, after: list
) -> None:
    """Whatever else a command line holds, what a secret's name announces is hidden."""
    planted = [part.replace("NAME", name).replace("SECRET", secret) for part in template]
    program = [] if planted[0] in ("bash", "python") else ["python", *before]
    assume(not any(secret in word for word in (*before, *after)))
    assert not shows([*program, *planted, *after], secret)


@given(VARIABLES, SECRETS, WORDS)
def test_a_variable_is_never_shown(name: str, secret: str, before: list) -> None:
    """What is set for a program's environment is hidden, unless it is known to be harmless."""
    assume(not any(secret in word for word in before))
    assert not shows(["env", *before, f"{name}={secret}", "python"], secret)


@given(SECRETS.filter(lambda text: "/" not in text), SECRETS, WORDS)
def test_what_an_address_carries_is_never_shown(user: str, secret: str, before: list) -> None:
    """Neither user and password of a URL, nor its query and fragment."""
    assume(not any(secret in word for word in before))
    for address in (
        f"https://{user}:{secret}@host/path",
        f"s3://{secret}@bucket",
        f"--data=https://host/path?x={secret}",
        f"postgresql+psycopg://{user}:{secret}@host:5432/db",
        f"see https://host/#{secret}",
    ):
        assert not shows(["curl", *before, address], secret)


@given(HEX, BASE, AWS, WORDS)
def test_the_shape_of_a_key_is_enough(digits: str, letters: str, upper: str, before: list) -> None:
    """Keys of well-known services are hidden wherever they stand."""
    for key in (
        f"AKIA{upper}",
        f"hf_{letters}",
        f"ghp_{letters}",
        f"github_pat_{letters}",
        f"glpat-{letters}",
        f"sk-{letters}",
        f"xoxb-{letters}",
        f"eyJ{letters}.eyJ{letters}.{letters}",
        digits,
    ):
        for where in (key, f"key:{key}", f"/data/{key}/x", f"say {key} now", f"({key})"):
            assert not shows(["wandb", *before, where], key)


@pytest.mark.parametrize(
    "arguments",
    [
        ["yolo", "train", "model=yolov8m.pt", "data=/data/Coco/Set12/yolo.yaml", "batch=64"],
        ["python", "train.py", "--weights", "yolov5s.pt", "--batch-size", "64", "--img", "640"],
        ["python", "-m", "ipykernel_launcher", "-f",
         "/run/user/1000/jupyter/kernel-8f4f5a0c-1234-4000-8000-000000000001.json"],
        ["torchrun", "--nproc-per-node=4", "--rdzv-endpoint=n1:29500", "train.py", "-p", "80"],
        ["env", "CUDA_VISIBLE_DEVICES=0,1", "OMP_NUM_THREADS=8", "python", "x.py"],
        ["git", "clone", "git@github.com:org/repo.git"],
        ["python", "pose.py", "--keypoints=17", "--tokenizer", "gpt2", "-c", "configs/a.yaml"],
    ],
)  # fmt: skip
def test_what_tells_of_a_training_stays(arguments: list[str]) -> None:
    """Models, data, sizes and devices are why anybody looks at a command line."""
    assert list(redact(arguments)) == arguments


def test_what_is_hidden_says_so() -> None:
    """A reader sees that something was there, and of what name."""
    shown = redact(["bash", "-lc", "x", "--api-key", "a", "--token=b", "mysql://u:p@h/db"])
    assert shown == (
        "bash", "-lc", CODE, "--api-key", REDACTED, f"--token={REDACTED}", f"mysql://{REDACTED}@h/db"
    )  # fmt: skip
    assert redact(["mysql", "-phunter2", "-u", "me", "-p", "x"]) == (
        "mysql", f"-p{REDACTED}", "-u", "me", "-p", REDACTED
    )  # fmt: skip
    assert redact(()) == ()
    assert redact(["x", "-----BEGIN PRIVATE KEY-----\nabc"]) == ("x", REDACTED)


@pytest.mark.parametrize(
    "unit",
    ["a", "-", "=", ":", "a=", "a:", "@", "eyJ", "://", "a://", "a:b@", "'", "SG.", "hf_", "A1a"],
)
def test_a_hostile_line_takes_no_more_than_its_length(unit: str) -> None:
    """The longest line that is read is done at once, whatever a user fills it with.

    Work that grows with the square of the length would run into the test's time limit.
    """
    line = unit * (64 * 1024 // len(unit))
    for arguments in ([line], ["x", f"{line} {line[:9]}"], ["--password", line], line.split("=")):
        assert len(redact(arguments)) == len(arguments)
