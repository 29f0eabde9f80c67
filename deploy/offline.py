"""Gets an image's needs where no registry or wheel index is reachable: base image and wheels."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

from engine import CACHE, Failure, install, run, say

LOCAL_BASE_IMAGE = "murmuration-base:bookworm"
BASE_PYTHON = (3, 11)  # Debian bookworm's, and the default base image's.
PULL_TIMEOUT_S = 300
DEBOOTSTRAP_TIMEOUT_S = 900
WHEELS_TIMEOUT_S = 900


def have_image(name: str) -> bool:
    """Tells whether the engine has this image."""
    return run(["docker", "image", "inspect", name], timeout_s=30, check=False).returncode == 0


def can_pull(name: str) -> bool:
    """Tells whether the engine has this image or gets it from a registry."""
    return (
        have_image(name)
        or run(["docker", "pull", name], timeout_s=PULL_TIMEOUT_S, check=False).returncode == 0
    )


def reaches(index: str) -> bool:
    """Says whether this machine can read a package index. None (an empty name) is reached."""
    if not index:
        return True
    try:
        with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=10):
            return True
    except (OSError, urllib.error.URLError, ValueError):
        return False


def make_base_image() -> str:
    """Make Debian bookworm with Python a local image, once, and return its name."""
    if have_image(LOCAL_BASE_IMAGE):
        return LOCAL_BASE_IMAGE
    if os.geteuid() != 0:
        raise Failure("no base image can be pulled; set BASE_IMAGE to one that the engine has")
    if shutil.which("debootstrap") is None:
        install(
            ["debootstrap", "debian-archive-keyring"], purpose="debootstrap, to make a base image,"
        )
    say(f"making the base image {LOCAL_BASE_IMAGE} with debootstrap")
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="base-") as folder:
        packages = "ca-certificates,python3,python3-venv"
        command = ["debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", folder]
        run(command, timeout_s=DEBOOTSTRAP_TIMEOUT_S)
        root = Path(folder)
        for name in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale"):
            shutil.rmtree(root / name, ignore_errors=True)
            (root / name).mkdir(parents=True)
        with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
            subprocess.run(
                ["docker", "import", "--change", 'CMD ["bash"]', "-", LOCAL_BASE_IMAGE],
                stdin=tar.stdout,
                stdout=subprocess.DEVNULL,
                timeout=PULL_TIMEOUT_S,
                check=True,
            )
    return LOCAL_BASE_IMAGE


def collect_wheels(repository: Path) -> None:
    """Put the wheels of all dependencies into deploy/wheels, as this machine's pip finds them.

    pip follows its own configuration (indexes, find-links), so a machine with a mirror or with
    wheels on its disk needs no setting here. Nothing is done if they are there for these pins.
    """
    wheels = repository / "deploy" / "wheels"
    with (repository / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    constraints = repository / "constraints.txt"
    key = hashlib.sha256("\n".join([*wanted, constraints.read_text()]).encode()).hexdigest()
    stamp = wheels / ".complete"
    if stamp.exists() and stamp.read_text() == key:
        return
    say("collecting wheels with this machine's pip")
    for old in [*wheels.glob("*.whl"), stamp]:
        old.unlink(missing_ok=True)
    pip = [_python_with_pip(), "-m", "pip"]
    if sys.version_info[:2] == BASE_PYTHON:
        command = [*pip, "wheel", "--wheel-dir", str(wheels)]
    else:
        version = ".".join(map(str, BASE_PYTHON))
        target = ["--python-version", version, "--only-binary", ":all:"]
        command = [*pip, "download", "--dest", str(wheels), *target]
    run([*command, "--quiet", "-c", str(constraints), *wanted], timeout_s=WHEELS_TIMEOUT_S)
    heavy = sorted(wheels.glob("nvidia_*.whl"))
    if heavy:
        say(f"warning: pip chose a CUDA build of torch ({len(heavy)} nvidia wheels): a large image")
    stamp.write_text(key)


def _python_with_pip() -> str:
    if run([sys.executable, "-m", "pip", "--version"], timeout_s=60, check=False).returncode == 0:
        return sys.executable
    environment = CACHE / "pip"
    made = run([sys.executable, "-m", "venv", environment], timeout_s=120, check=False)
    if made.returncode != 0:
        install(["python3-venv"], purpose="pip (python3-venv)")
        run([sys.executable, "-m", "venv", "--clear", environment], timeout_s=120)
    return str(environment / "bin" / "python")
