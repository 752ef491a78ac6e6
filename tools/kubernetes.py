"""Build a real kube-apiserver and kube-controller-manager from Debian 12's source package.

`make test-kubernetes` runs the contract tests of the Kubernetes client against them. Debian 12
("bookworm") is the last release whose source package holds the whole tree (1.20.2); its binary
package holds only kubectl. Everything goes below build/kubernetes and needs no right but to write
there: packages are unpacked, not installed. It takes some eight minutes of two cores
and 2.5 GB of disk, once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "kubernetes"
PROGRAMS = ("kube-apiserver", "kube-controller-manager")
RELEASE = "bookworm"
SOURCE = "kubernetes"
# The vendored reflect2 reads the runtime's maps in a way that Go 1.18 ended: "fatal error: fault".
PACKAGES = (
    "golang-1.19-go",
    "golang-1.19-src",
    "etcd-server",
    "golang-github-modern-go-reflect2-dev",
)
MIRROR = "http://deb.debian.org/debian"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MODULE = "k8s.io/kubernetes"


class BuildFailed(Exception):
    """A step failed; the text says which, and what to do."""


def main() -> int:
    """Build what is missing; return a status for the shell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        check_release()
        if not all((HOME / "bin" / name).exists() for name in (*PROGRAMS, "etcd")):
            build(options.jobs)
    except BuildFailed as error:
        say(str(error))
        return 2
    say(f"{HOME / 'bin'} is ready after {time.monotonic() - started:.0f} s")
    return 0


def say(text: str) -> None:
    """Tell the user what happens."""
    sys.stderr.write(f"kubernetes: {text}\n")
    sys.stderr.flush()


def check_release() -> None:
    """Refuse where the packages cannot be had.

    Raises:
        BuildFailed: this is not Debian 12, or apt's tools are missing.
    """
    try:
        words = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        words = ""
    found = re.search(r"^VERSION_CODENAME=\"?([a-z]+)", words, re.MULTILINE)
    if found is None or found[1] != RELEASE:
        raise BuildFailed(
            f"this needs Debian 12 ({RELEASE}), this is {found[1] if found else 'something else'}: "
            "later releases have no source of kube-apiserver. Run it in a Debian 12 container; "
            "tests/kubernetes_answers holds what such a server answered"
        )
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing:
        raise BuildFailed(f"{' and '.join(missing)} not found")


def run(*words: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    """What a command prints; its complaints go to build.log.

    Raises:
        BuildFailed: it failed.
    """
    log = HOME / "build.log"
    with log.open("ab") as out:
        out.write(f"\n$ {' '.join(map(str, words))}\n".encode())
        out.flush()
        done = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            check=False,
        )
        out.write(done.stdout)
    if done.returncode:
        raise BuildFailed(f"{words[0]} failed with status {done.returncode}: see {log}")
    return done.stdout.decode(errors="replace")


def build(jobs: int) -> None:
    """Fetch, unpack and compile.

    Raises:
        BuildFailed: a step failed.
    """
    HOME.mkdir(parents=True, exist_ok=True)
    tree, source = HOME / "tree", HOME / "gopath" / "src" / MODULE
    fetch()
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(HOME / "gopath", ignore_errors=True)
    for package in sorted((HOME / "packages").glob("*.deb")):
        run("dpkg-deb", "-x", package, tree, cwd=HOME)
    source.mkdir(parents=True)
    archive = next((HOME / "packages").glob("kubernetes_*.orig.tar.*"))
    run("tar", "-xf", archive, "--strip-components=1", "-C", source, cwd=HOME)
    reflect = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(reflect)
    shutil.copytree(tree / "usr/share/gocode/src/github.com/modern-go/reflect2", reflect)
    go = tree / "usr/lib/go-1.19/bin/go"
    environment = {
        "GOROOT": str(tree / "usr/lib/go-1.19"),
        "GOPATH": str(HOME / "gopath"),
        "GOCACHE": str(HOME / "cache"),
        "GO111MODULE": "off",
        "GOFLAGS": f"-p={jobs}",
        "CGO_ENABLED": "0",
    }
    describe(source, go, environment)
    (HOME / "bin").mkdir(exist_ok=True)
    for name in PROGRAMS:
        say(f"compiling {name}")
        out = HOME / "bin" / name
        run(go, "build", "-o", out, f"./cmd/{name}", cwd=source, environment=environment)
    shutil.copy2(tree / "usr/bin/etcd", HOME / "bin" / "etcd")


def fetch() -> None:
    """Download the packages, with package lists of our own.

    Raises:
        BuildFailed: apt-get failed.
    """
    packages, apt = HOME / "packages", HOME / "apt"
    shutil.rmtree(packages, ignore_errors=True)
    for folder in (packages, apt / "lists/partial", apt / "cache/archives/partial"):
        folder.mkdir(parents=True, exist_ok=True)
    sources = apt / "debian.sources"
    sources.write_text(
        f"Types: deb deb-src\nURIs: {MIRROR}\nSuites: {RELEASE}\nComponents: main\n"
        f"Signed-By: {KEYRING}\n",
        encoding="utf-8",
    )
    settings = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache": apt / "cache",
        "APT::Sandbox::User": "",
    }
    options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    say("fetching packages")
    run("apt-get", "-q", *options, "update", cwd=packages)
    run("apt-get", "-q", *options, "source", "--download-only", SOURCE, cwd=packages)
    run("apt-get", "-q", *options, "download", *PACKAGES, cwd=packages)


def describe(source: Path, go: Path, environment: dict[str, str]) -> None:
    """Write the OpenAPI definitions, the one generated file that the source does not hold.

    Raises:
        BuildFailed: a step failed.
    """
    say("describing the API")
    generator = HOME / "openapi-gen"
    package = f"{MODULE}/vendor/k8s.io/kube-openapi/cmd/openapi-gen"
    run(go, "build", "-o", generator, package, cwd=source, environment=environment)
    marked = run(
        "grep", "-rl", "--include=*.go", r"^// +k8s:openapi-gen=true",
        "staging/src/k8s.io", "pkg", cwd=source,
    )  # fmt: skip
    folders = sorted({str(Path(line).parent) for line in marked.splitlines()})
    inputs = [
        folder.removeprefix("staging/src/")
        if folder.startswith("staging/")
        else f"{MODULE}/{folder}"
        for folder in folders
        if not re.search(r"/(code-generator|sample-[a-z]+|testdata)(/|$)", f"/{folder}")
    ]
    run(
        generator,
        "--go-header-file", "hack/boilerplate/boilerplate.generatego.txt",
        "--output-base", HOME / "gopath/src",
        "--output-file-base", "zz_generated.openapi",
        "--output-package", f"{MODULE}/pkg/generated/openapi",
        "--report-filename", HOME / "violations.txt",
        "--input-dirs", ",".join(inputs),
        cwd=source,
        environment={**environment, "PATH": f"{go.parent}:{os.environ.get('PATH', '')}"},
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
