"""docs/cli.md is what the parser says."""

from dev.write_cli_reference import FILE, reference
from headwise.cli import COMMANDS


def test_reference_is_what_is_generated() -> None:
    assert FILE.read_text() == reference(), "docs/cli.md is out of date: run `make docs`"


def test_reference_has_every_command_and_its_options() -> None:
    page = FILE.read_text()
    sections = {line.removeprefix("## headwise ") for line in page.splitlines() if "## " in line}
    assert sections == set(COMMANDS)
    run = page.partition("## headwise run\n")[2].partition("\n## ")[0]
    assert "`--preset PRESET`" in run
    assert "--tokenizer" not in run
