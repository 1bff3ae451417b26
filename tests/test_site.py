"""The site of the documents: every link leads somewhere, every page is in it, and nothing comes from another host."""

import logging
import re
from pathlib import Path

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from support.project import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. mkdocs warns of links, anchors and images that do not exist, and of pages outside the menu."""
    directory = tmp_path_factory.mktemp("site")
    warnings = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("mkdocs").addHandler(handler)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(directory)))
    logging.getLogger("mkdocs").removeHandler(handler)
    assert warnings == []
    return directory


def test_every_page_is_in_the_site(site):
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).with_suffix(".html") for path in docs.rglob("*.md")}
    outside = {Path(f"{name}.html") for name in ("index", "contributing", "changelog", "benchmarks")}
    assert {path.relative_to(site) for path in site.rglob("*.html")} - {Path("404.html")} == pages | outside
    assert not list(site.rglob("*.py"))


def test_links_lead_to_pages_of_other_folders(site):
    index = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="data.html"' in index and 'href="benchmarks.html"' in index and 'href="license.txt"' in index
    assert 'href="index.html"' in (site / "tutorial.html").read_text(encoding="utf-8")
    assert 'href="benchmarks.html#parallelism"' in (site / "parallelism.html").read_text(encoding="utf-8")
    assert 'href="../latent.html#measuring"' in (site / "records/small_runs.html").read_text(encoding="utf-8")
    images = re.findall(r'<img [^>]*src="([^"]+)"', "".join(page.read_text() for page in site.glob("*.html")))
    assert images and all((site / image).exists() for image in images)


def test_nothing_is_loaded_from_another_host(site):
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert {page.suffix for page in pages} == {".html", ".css"}
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"([^\"]*)\"", text)
        loaded += re.findall(r"url\(['\"]?([^)'\"]*)|@import ['\"]([^'\"]*)", text)
        addresses = ["".join(found) for found in loaded]
        assert [a for a in addresses if re.match(r"(https?:)?//", a)] == [], page.name


def test_a_wrong_link_is_a_warning(tmp_path, caplog):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# A\n[no page](absent.md), [no heading](#absent)\n")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    settings = re.sub(r"^(nav|hooks):.*\n((  .*\n)*)", "", settings, flags=re.M)
    (tmp_path / "mkdocs.yml").write_text(settings)
    with caplog.at_level(logging.WARNING):
        build(load_config(str(tmp_path / "mkdocs.yml"), site_dir=str(tmp_path / "site")))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert any("absent.md" in warning for warning in warnings) and any("#absent" in w for w in warnings)
