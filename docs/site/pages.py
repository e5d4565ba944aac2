"""Hook of MkDocs: pages that are not Markdown files of ``docs``, links to them, and globs in the navigation.

The documentation is written for a code host too: a page may link to any file of the repository, to a folder and to a
notebook. On the site,

- Markdown files of the root folder (``CONTRIBUTING.md``, ...) are pages below ``project/``, and ``README.md`` is the
  start page;
- a notebook is a page with its stored outputs, and a file to download;
- other linked files outside ``docs`` are pages that show their text, and linked folders pages that list their files.

An entry of the navigation may be a glob, such as ``howto/*.md``: it stands for the pages that have no entry of their
own.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import DictLoader
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

__all__ = ["expand_globs", "notebook_page", "on_config", "on_files", "on_page_markdown", "rewrite_links", "site_uri"]

PROJECT = "project"  # folder of the site for files from outside of docs
START_PAGE = "index.md"
LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".sh": "sh"}
SEARCH_BOOSTS = {
    2.0: ("faq.md", "glossary.md", "which-norm.md", "concepts/deciding.md"),
    0.3: ("results/*.md", "results/*/*.md", "records/*.md", "project/*.md"),
}
ALT_TEXT = "Figure drawn by the code above"
TEMPLATE = """{%- extends "markdown/index.md.j2" -%}
{% macro printed(text) %}

````` { .text .output }
{{ text | strip_ansi | trim("\\n") }}
`````

{% endmacro %}
{% block stream %}{{ printed(output.text) }}{% endblock stream %}
{% block data_text scoped %}{{ printed(output.data["text/plain"]) }}{% endblock data_text %}
{% block data_html scoped %}

<div class="output-html">
{{ output.data["text/html"] }}
</div>

{% endblock data_html %}
"""  # printed text and tables in blocks of their own, for site.css

_CODE = re.compile(r"^(?P<fence>```+|~~~+).*?^(?P=fence)[ ]*$|(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.M | re.S)
_LINK = re.compile(r"(?<=\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=(?:\s+\"[^\"]*\")?\))")


# --- where a file of the repository is on the site


def site_uri(path: str, root: Path) -> str | None:
    """Return the source URI of the page or file of the site for a path of the repository, or None if there is none.

    Example:
        >>> site_uri("CONTRIBUTING.md", Path("."))
        'project/CONTRIBUTING.md'
        >>> site_uri("docs/tutorials/first-experiment.ipynb", Path("."))
        'tutorials/first-experiment.md'
    """
    if path.startswith("../") or path == ".." or posixpath.isabs(path):
        return None
    if path == "README.md":
        return START_PAGE
    inside = path.startswith("docs/")
    uri = path.removeprefix("docs/") if inside else f"{PROJECT}/{path}"
    if (root / path).is_dir():
        readme = root / path / "README.md"
        return f"{uri}/README.md" if readme.exists() else f"{uri}/index.md"
    if path.endswith(".ipynb"):
        return f"{uri.removesuffix('.ipynb')}.md"
    return uri if inside or path.endswith(".md") else f"{uri}.md"


def repository_path(uri: str) -> str:
    """Return the path in the repository of a page from its source URI: the inverse of `site_uri`, for Markdown."""
    return uri.removeprefix(f"{PROJECT}/") if uri.startswith(f"{PROJECT}/") else f"docs/{uri}"


def linked_path(target: str, page_path: str) -> str | None:
    """Return the path in the repository that a relative link of a page points to, or None for another kind of link."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith(("/", "#", "<")):
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(page_path), target))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply a function to the parts of a Markdown text that are not code."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def links(text: str, page_path: str) -> Iterator[str]:
    """Yield the paths in the repository that the links of a page point to."""
    for match in _LINK.finditer(_CODE.sub("", text)):
        if (path := linked_path(match["target"], page_path)) is not None:
            yield path


def rewrite_links(text: str, page_path: str, page_uri: str, root: Path) -> str:
    """Return the text of a page with links that are valid on the site.

    Links to files that do not exist stay as they are, so that MkDocs reports them.
    """

    def replace(match: re.Match[str]) -> str:
        path = linked_path(match["target"], page_path)
        uri = None if path is None or not (root / path).exists() else site_uri(path, root)
        if uri is None:
            return match[0]
        return posixpath.relpath(uri, posixpath.dirname(page_uri) or ".") + (match["anchor"] or "")

    return _outside_code(text, lambda part: _LINK.sub(replace, part))


# --- pages made of other files


def source_page(path: Path, name: str) -> str:
    """Return a page that shows the text of a file."""
    text = path.read_text()
    fence = "`" * max(3, 1 + max((len(ticks) for ticks in re.findall(r"`{3,}", text)), default=0))
    return f"# {name}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def folder_page(folder: Path, name: str) -> str:
    """Return a page that lists the files of a folder, each with its size."""
    rows = [
        f"| [{file.relative_to(folder).as_posix()}]({file.relative_to(folder).as_posix()}) | {_size(file)} |"
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    ]
    return "\n".join([f"# Files in {name}", "", "| file | size |", "|---|---|", *rows, ""])


def _size(file: Path) -> str:
    size = file.stat().st_size
    return f"{size} B" if size < 1024 else f"{size / 1024:,.0f} KB"


def plain_tables(text: str) -> str:
    """Return the text with tables of pandas as plain ones, which the theme styles and lets scroll on narrow screens.

    Example:
        >>> plain_tables('<style scoped>\\ntd {}\\n</style><table border="1" class="dataframe">')
        '<table>'
    """
    text = re.sub(r"<style scoped>.*?</style>\s*", "", text, flags=re.S)
    return text.replace('<table border="1" class="dataframe">', "<table>")


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown with its stored outputs, and its figures by file name.

    The alternative text of a figure is ``alt`` of the metadata of its cell.
    """
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    prefix = path.stem
    loader = DictLoader({"notebook.md.j2": TEMPLATE})
    exporter = MarkdownExporter(extra_loaders=[loader], template_file="notebook.md.j2")  # type: ignore[no-untyped-call]
    body, resources = exporter.from_notebook_node(notebook)
    figures = {f"{prefix}-{name.removeprefix('output_')}": data for name, data in resources["outputs"].items()}
    alternatives = {str(index): cell.metadata.get("alt") for index, cell in enumerate(notebook.cells)}

    def figure(match: re.Match[str]) -> str:
        alternative = alternatives.get(match["cell"]) or ALT_TEXT
        return f"![{alternative}]({prefix}-{match['cell']}_{match['rest']})"

    body = plain_tables(body)
    body = re.sub(r"!\[\w+\]\(output_(?P<cell>\d+)_(?P<rest>[\w.]+)\)", figure, body)
    title, _, rest = body.lstrip().partition("\n")
    download = f'<a href="{path.name}" download>Download this notebook</a>'  # a link in Markdown leads to the page
    return f"{title}\n\n{download}\n{rest}", figures


def _generated(config: MkDocsConfig, uri: str, content: str | bytes, *, in_nav: bool = False) -> File:
    inclusion = InclusionLevel.INCLUDED if in_nav else InclusionLevel.NOT_IN_NAV
    return File.generated(config, uri, content=content, inclusion=inclusion)


class _Collector:
    """Adds the pages that are made of other files to the files of the site."""

    def __init__(self, files: Files, config: MkDocsConfig, root: Path) -> None:
        self.files, self.config, self.root = files, config, root

    def add(self, path: str) -> str | None:
        """Add the page of a path of the repository; return its Markdown if it may have links, otherwise None."""
        uri = site_uri(path, self.root)
        source = self.root / path
        if uri is None or self.files.get_file_from_path(uri) is not None or not source.exists():
            return None
        if source.is_dir():
            self._append(uri, folder_page(source, path))
        elif path.endswith(".ipynb"):
            return self._add_notebook(source, path, uri)
        elif path.endswith(".md"):
            text = source.read_text()
            self._append(uri, text, in_nav=True)
            return text
        elif not path.startswith("docs/"):
            self._append(uri, source_page(source, path))
        return None

    def _add_notebook(self, source: Path, path: str, uri: str) -> str:
        text, figures = notebook_page(source)
        folder = posixpath.dirname(uri)
        for name, data in figures.items():
            self._append(posixpath.join(folder, name), data)
        if not path.startswith("docs/"):
            self._append(posixpath.join(folder, source.name), source.read_bytes())
        self._append(uri, text, in_nav=path.startswith("docs/"))
        return text

    def _append(self, uri: str, content: str | bytes, *, in_nav: bool = False) -> None:
        self.files.append(_generated(self.config, uri, content, in_nav=in_nav))


@event_priority(100)
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of root Markdown files, notebooks, and linked files and folders."""
    root = Path(config.docs_dir).parent
    collector = _Collector(files, config, root)
    pending: list[tuple[str, str]] = [
        (f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()
    ]
    start = [path.name for path in sorted(root.glob("*.md")) if path.name != "README.md"]
    start += [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".ipynb")]
    pending += [(path, text) for path in start if (text := collector.add(path)) is not None]
    while pending:
        page_path, text = pending.pop()
        for path in links(text, page_path):
            if (added := collector.add(path)) is not None:
                pending.append((path, added))
    return files


def search_rank(uri: str) -> dict[str, Any] | None:
    """Return the settings of the search for a page: answers before long tables, and no source files."""
    if uri.startswith(f"{PROJECT}/") and "/" in uri.removeprefix(f"{PROJECT}/"):
        return {"exclude": True}
    for boost, globs in SEARCH_BOOSTS.items():
        if any(_matches(uri, glob) for glob in globs):
            return {"boost": boost}
    return None


@event_priority(100)
def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to the places of files on the site.

    A comment before the title is removed, since MkDocs takes the title from the first line. The search ranks pages by
    their folder.
    """
    if "search" not in page.meta and (rank := search_rank(page.file.src_uri)) is not None:
        page.meta["search"] = rank
    root = Path(config.docs_dir).parent
    markdown = re.sub(r"\A\s*<!--.*?-->\s*(?=# )", "", markdown, flags=re.S)
    return rewrite_links(markdown, repository_path(page.file.src_uri), page.file.src_uri, root)


# --- navigation


def expand_globs(nav: list[Any], pages: Iterable[str]) -> list[Any]:
    """Return a navigation in which globs are replaced by the pages that have no entry of their own, sorted.

    Example:
        >>> expand_globs(["index.md", {"How-to": ["howto/b.md", "howto/*.md"]}], ["howto/a.md", "howto/b.md"])
        ['index.md', {'How-to': ['howto/b.md', 'howto/a.md']}]
    """
    named = set(_entries(nav))
    free = [page for page in sorted(pages) if page not in named]
    return _expanded(nav, free)


def _entries(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for value in nav.values():
            yield from _entries(value)
    else:
        for item in nav:
            yield from _entries(item)


def _matches(page: str, glob: str) -> bool:
    """Return whether a path matches a glob in which ``*`` stands for a part of one name, not for folders."""
    names, parts = page.split("/"), glob.split("/")
    return len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))


def _expanded(items: list[Any], free: list[str]) -> list[Any]:
    expanded: list[Any] = []
    for item in items:
        if isinstance(item, str) and "*" in item:
            taken = [page for page in free if _matches(page, item)]
            expanded += taken
            free[:] = [page for page in free if page not in taken]
        elif isinstance(item, dict):
            expanded += [
                {title: _expanded(entry, free) if isinstance(entry, list) else entry} for title, entry in item.items()
            ]
        else:
            expanded.append(item)
    return expanded


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand the globs of the navigation."""
    docs = Path(config.docs_dir)
    files = [path.relative_to(docs).as_posix() for path in [*docs.rglob("*.md"), *docs.rglob("*.ipynb")]]
    pages = {f"{file.removesuffix('.ipynb')}.md" if file.endswith(".ipynb") else file for file in files}
    pages |= {f"{PROJECT}/{path.name}" for path in docs.parent.glob("*.md") if path.name != "README.md"}
    config.nav = expand_globs(config.nav or [], pages)
    return config
