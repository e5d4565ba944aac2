"""Commands of the documentation, also those that are not run: the program has their options and arguments."""

import re
import shlex
from pathlib import Path

import pytest

from contnorm.cli.main import COMMANDS, load_command
from tests.docs.pages import PAGES, SHELLS, blocks, page_name, prose, shell_lines

DOCUMENTED = [page for page in PAGES if page.name != "CHANGELOG.md"]  # a changelog has commands of former versions


@pytest.mark.parametrize("page", DOCUMENTED, ids=page_name)
def test_commands_and_options_exist(page: Path) -> None:
    """Every `contnorm COMMAND --option` in a shell block or in the text is one that the program has.

    Those of blocks that are not run have the types and the number of arguments that it takes.
    """
    lines = [line for block in blocks(page, *SHELLS) for line in shell_lines(block)]
    lines += [" ".join(code.split()) for code in re.findall(r"`(contnorm [^`]+)`", prose(page))]
    for line in lines:
        words = shlex.split(line, comments=True)
        if len(words) < 2 or words[0] != "contnorm" or words[1].startswith("-") or words[1].isupper():
            continue
        assert words[1] in COMMANDS, f"{page_name(page)}: {line}"
        options = {option for parameter in load_command(words[1]).params for option in parameter.opts} | {"--help"}
        unknown = [word for word in words[2:] if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options]
        assert not unknown, f"{page_name(page)}: {line}"
    for block in blocks(page, *SHELLS):
        for line in shell_lines(block) if block.needs else ():
            words = shlex.split(line, comments=True)
            words = words[: words.index("&")] if "&" in words else words
            if words and words[0] == "contnorm":
                load_command(words[1]).make_context(words[1], words[2:])
