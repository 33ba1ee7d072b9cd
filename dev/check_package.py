"""Build sdist and wheel, compare what they hold with the tree, install the wheel in clean
environments, and run commands there.

    python -m pip install build
    python dev/check_package.py python3.11 python3.12 python3.13

Without interpreters it builds and compares only. An environment is made in a temporary folder,
from the wheel with its extra `report` under constraints.txt; each takes some minutes and 1.3 GB.
`--loose` leaves the constraints out, for an interpreter that they were not made for.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = ("__pycache__", ".egg-info")
# What is run in an environment, from an empty folder.
COMMANDS = (
    "headwise --version",
    "headwise cost --set dim=64 depth=2 num_heads=4 causal=true vocab_size=100",
    "headwise plan --params 2M --set vocab_size=512 --page plan.html",
    "headwise explore --output explorer.html",
    "headwise explain --set dim=64 depth=1 num_heads=4 --device cpu",
    "headwise run fig1 --set steps=20 epoch=10 held_out=64 depths=1 --seeds 1",
    "headwise report",
)
FROM_PYTHON = (
    "import headwise, importlib.resources as r; headwise.Attention; "
    "assert r.files('headwise').joinpath('py.typed').is_file(); print(headwise.__version__)"
)


def tree() -> set[str]:
    """Every file of the package, as the wheel names it."""
    paths = [p for p in (ROOT / "src" / "headwise").rglob("*") if p.is_file()]
    names = {str(p.relative_to(ROOT / "src")) for p in paths}
    return {name for name in names if not any(skipped in name for skipped in SKIPPED)}


def built(folder: Path) -> tuple[Path, Path]:
    """sdist and wheel, the wheel made from the sdist."""
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def compare(sdist: Path, wheel: Path) -> None:
    """Refuse an sdist or a wheel that lacks a file of the package, or has another."""
    inside = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("headwise/")}
    assert inside == tree(), sorted(inside ^ tree())
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    missing = {f"src/{name}" for name in tree()} - names
    assert not missing, sorted(missing)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "llms.txt"):
        assert name in names, name
    print(f"{wheel.name}: {len(inside)} files, {wheel.stat().st_size / 1e6:.1f} MB")
    print(f"{sdist.name}: {len(names)} entries, {sdist.stat().st_size / 1e6:.1f} MB")


def check(interpreter: str, wheel: Path, loose: bool) -> None:
    """Install the wheel in a clean environment and run the commands there."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        subprocess.run([interpreter, "-m", "venv", str(home / "venv")], check=True)
        bin_ = home / "venv" / "bin"
        wanted = [f"{wheel}[report]"]
        wanted += [] if loose else ["-c", str(ROOT / "constraints.txt")]
        subprocess.run([bin_ / "pip", "install", "--quiet", *wanted], check=True)
        (home / "empty").mkdir()
        for command in COMMANDS:
            words = [str(bin_ / "headwise"), *command.split()[1:]]
            subprocess.run(words, check=True, cwd=home / "empty", stdout=subprocess.DEVNULL)
        python = [str(bin_ / "python"), "-c", FROM_PYTHON]
        done = subprocess.run(python, check=True, cwd=home / "empty", capture_output=True)
        print(
            f"{interpreter}: headwise {done.stdout.decode().strip()} ran {len(COMMANDS)} commands"
        )


def main() -> None:
    """Build, compare, and check in every interpreter that is named."""
    parser = argparse.ArgumentParser(description="Build, compare, install, run.")
    parser.add_argument("interpreters", nargs="*", metavar="PYTHON")
    parser.add_argument("--loose", action="store_true", help="without constraints.txt")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sdist, wheel = built(Path(folder))
        compare(sdist, wheel)
        for interpreter in args.interpreters:
            check(interpreter, wheel, args.loose)


if __name__ == "__main__":
    main()
