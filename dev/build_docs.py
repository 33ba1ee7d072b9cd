"""Assemble the pages of the documentation and build them as a site, offline.

    PYTHONPATH=src python dev/build_docs.py

The pages stay where they are and link to each other as on disk. Here they are copied beside each
other into build/docs, with results/*/README.md and what they show; links to what is no page become
words. Headings get the anchors that they have in the repository, and zensical makes build/site.
Then every link of the site is followed, and no page may ask another host for anything.
"""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).parent.parent
SOURCE, SITE = ROOT / "build" / "docs", ROOT / "build" / "site"
TOP = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s]+)\)")
SHOWN = (".png", ".svg")


# ---- pages


def pages() -> list[Path]:
    """Every page of the site, from the root of the repository."""
    found = [ROOT / name for name in TOP]
    found += sorted((ROOT / "docs").glob("*.md")) + sorted((ROOT / "results").glob("*/README.md"))
    return [path.relative_to(ROOT) for path in found]


def anchor(heading: str) -> str:
    """The anchor that a heading has in the repository."""
    bare = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]|[²³]", "", bare.lower()).replace(" ", "-")


def assembled(page: Path, known: set[Path], pictures: set[Path]) -> str:
    """A page as it stands in the site; notes the pictures that it shows."""
    out, fenced, seen = [], False, {}
    for line in (ROOT / page).read_text().splitlines():
        fence = line.lstrip().startswith("```")
        fenced ^= fence
        heading = re.match(r"(#+) (.+)$", line)
        if fenced or fence:
            out.append(line)
        elif heading:
            name = anchor(heading[2])
            seen[name] = seen.get(name, -1) + 1
            number = f"-{seen[name]}" if seen[name] else ""
            out.append(f"{line} {{#{name}{number}}}")
        else:
            out.append(LINK.sub(lambda link: _linked(link, page, known, pictures), line))
    return "\n".join(out) + "\n"


def _linked(link: re.Match[str], page: Path, known: set[Path], pictures: set[Path]) -> str:
    """A link as it stands in the site: to a page or a picture of it; else its words alone."""
    path, hash_, part = link["to"].partition("#")
    if re.match(r"\w+:", link["to"]) or not path:
        return link[0]
    there = (ROOT / page.parent / path).resolve()
    target = there.relative_to(ROOT)
    if there.is_dir() and target / "README.md" in known:
        return f"[{link['text']}]({path.rstrip('/')}/README.md{hash_}{part})"
    if target in known:
        return link[0]
    if target.suffix in SHOWN:
        pictures.add(target)
        return link[0]
    return link["text"]


def assemble() -> int:
    """Write build/docs; returns how many pages it has."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    known, pictures = set(pages()), set()
    for page in known:
        (SOURCE / page).parent.mkdir(parents=True, exist_ok=True)
        (SOURCE / page).write_text(assembled(page, known, pictures))
    for picture in pictures:
        (SOURCE / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / picture, SOURCE / picture)
    return len(known)


# ---- the site


def targets(page: str) -> Iterator[tuple[str, str]]:
    """(attribute, address) of everything that a built page names."""
    for attribute, address in re.findall(r"\s(href|src)=\"?([^\"\s>]+)", page):
        yield attribute, html.unescape(address)


def faults(site: Path) -> list[str]:
    """Links of the site that lead nowhere, and what a page would ask other hosts for."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    anchors = {
        path: set(re.findall(r"\sid=\"?([^\"\s>]+)", text)) | {"", "__skip"}
        for path, text in texts.items()
    }
    wrong = []
    for path, text in texts.items():
        where = path.relative_to(site)
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?(https?:[^\"\s>]+)", text)
        loaded += re.findall(
            r"<link[^>]*rel=\"?(?:stylesheet|preconnect)[^>]*(https?:[^\"\s>]+)", text
        )
        wrong += [f"{where} asks for {address}" for address in loaded]
        for _, address in targets(text):
            if re.match(r"\w+:|//", address) or where.name == "404.html":
                continue
            file, _, part = unquote(address).partition("#")
            there = (path.parent / file).resolve() if file else path
            there = there / "index.html" if there.is_dir() else there
            if not there.is_file():
                wrong.append(f"{where}: no {address}")
            elif there.suffix == ".html" and part not in anchors.get(there, set()):
                wrong.append(f"{where}: no place {address}")
    return wrong


def main() -> None:
    """Assemble, build, follow every link."""
    count, began = assemble(), time.monotonic()
    command = [sys.executable, "-m", "zensical", "build", "--config-file", str(ROOT / "mkdocs.yml")]
    subprocess.run([*command, "--clean"], check=True, cwd=ROOT)
    took = time.monotonic() - began
    wrong = faults(SITE)
    print("\n".join(wrong))
    print(f"{count} pages in {took:.1f} s: {SITE}; {len(wrong)} faults")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
