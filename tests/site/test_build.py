"""The built site: links and anchors, no foreign resources, formulas, the search index and the Python API."""

import ast
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test builds the site, or waits until it is built

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "contnorm"
LOADED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("image", "href")}


@dataclass
class Document(HTMLParser):
    """Links, ids and loaded resources of a page."""

    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    loaded: list[str] = field(default_factory=list)
    images_without_text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "img" and not values.get("alt"):
            self.images_without_text.append(values.get("src", ""))
        self.loaded += [value for name, value in values.items() if (tag, name) in LOADED]


@cache
def document(path: Path) -> Document:
    parsed = Document()
    parsed.feed(path.read_text())
    return parsed


def pages(site: Path) -> list[Path]:
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def test_internal_links_and_anchors_exist(site: Path) -> None:
    wrong = [f"{page.relative_to(site)}: {link}" for page in pages(site) for link in broken_links(page)]
    assert len(pages(site)) > 70 and not wrong, "\n".join(wrong)


def broken_links(page: Path) -> Iterator[str]:
    for link in document(page).links:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        anchor = unquote(parts.fragment)
        if not target.is_file() or (anchor and anchor != "__toc" and anchor not in document(target).ids):
            yield link


def test_nothing_is_loaded_from_another_host(site: Path) -> None:
    foreign = [url for page in pages(site) for url in document(page).loaded if re.match(r"(https?:)?//", url)]
    assert not foreign
    for style in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()), style
    assert "unpkg" not in (site / "index.html").read_text()


def test_loaded_files_exist(site: Path) -> None:
    for page in pages(site):
        for url in document(page).loaded:
            if not url.startswith("data:"):
                assert (page.parent / unquote(urlsplit(url).path)).is_file(), f"{page.relative_to(site)} loads {url}"


def test_images_have_alternative_texts(site: Path) -> None:
    missing = {str(page.relative_to(site)): document(page).images_without_text for page in pages(site)}
    assert not {page: images for page, images in missing.items() if images}


def test_no_link_points_to_the_source_tree(site: Path) -> None:
    """Links to Markdown and notebooks lead to pages; only the download of a notebook leads to the file."""
    for page in pages(site):
        raw = [link for link in document(page).links if re.search(r"\.md(#|$)", link) and "://" not in link]
        assert not raw, page


def test_root_pages_examples_and_records_are_on_the_site(site: Path) -> None:
    for path in ("project/CONTRIBUTING.html", "project/CHANGELOG.html", "project/examples/offpolicy_critic.py.html"):
        assert (site / path).is_file(), path
    assert "def main" in (site / "project/examples/offpolicy_critic.py.html").read_text().replace(
        '<span class="k">def</span><span class="w"> </span><span class="nf">main</span>', "def main"
    )
    listing = document(site / "records" / "runs" / "index.html").links
    assert "tables.jsonl.gz" in listing and (site / "records/runs/tables.jsonl.gz").is_file()


def test_formulas_are_mathml(site: Path) -> None:
    page = (site / "concepts" / "rivals.html").read_text()
    assert page.count("<math") > 50 and page.count('<math display="block">') >= 7
    for path in pages(site):
        assert "arithmatex" not in path.read_text(), path


def test_search_index_has_the_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    locations = {entry["location"].partition("#")[0] for entry in index["docs"]}
    expected = {"which-norm.html", "faq.html", "glossary.html", "quickstart.html", "reference/api/norms.html"}
    expected |= {"integrations/timm.html", "howto/run-the-bench.html", "project/CONTRIBUTING.html"}
    assert expected <= locations and len(locations) > 60
    assert not [location for location in locations if location.endswith(".py.html")]
    text = " ".join(entry["text"] for entry in index["docs"] if entry["location"].startswith("faq.html"))
    assert "mini-imagenet" in text
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")


FRAMEWORKS = ("avalanche", "hub", "lightning", "mammoth", "optuna", "timm", "transformers")
PUBLIC_MODULES = [
    "",
    "functional",
    "testing",
    "bench",
    "bench.metrics",
    "paper",
    "report",
    "diagnosis",
    *(f"integrations.{name}" for name in FRAMEWORKS),
]


def public_names(module: str) -> list[str]:
    path = PACKAGE / (module or "api").replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(source.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(statement.value)]
    raise AssertionError(f"{source} has no __all__")


@cache
def inventory(path: Path) -> dict[str, str]:
    """Names and addresses of ``objects.inv``, in the format of Sphinx: four lines, then zlib."""
    data = path.read_bytes()
    body = data.split(b"\n", 4)[4]
    lines = zlib.decompress(body).decode().splitlines()
    return {line.split(" ")[0]: line.split(" ")[3] for line in lines}


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_public_names_have_an_entry(site: Path, module: str) -> None:
    known = inventory(site / "objects.inv")
    package = f"contnorm.{module}" if module else "contnorm"
    names = [f"{package}.{name}" for name in public_names(module)]
    assert not [name for name in names if name not in known]
    for name in names:
        address = known[name].replace("$", name)
        page, _, anchor = address.partition("#")
        assert anchor in document(site / page).ids, address


def test_every_integration_is_listed() -> None:
    frameworks = {path.stem for path in (PACKAGE / "integrations").iterdir() if path.name[0] not in "_."}
    helpers = {"training_data"}
    assert frameworks - helpers == set(FRAMEWORKS)


def test_layers_show_the_arguments_of_their_base_class(site: Path) -> None:
    page = (site / "reference" / "api" / "norms.html").read_text()
    start = page.index('id="contnorm.ContinualNorm2d"')
    entry = page[start : page.index('id="contnorm.ContinualNorm1d"')]
    assert "num_groups" in entry and "Weight of a batch in the running moments" in entry
    assert "&gt;&gt;&gt; " in entry and "<blockquote>" not in page
