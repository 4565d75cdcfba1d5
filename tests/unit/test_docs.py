"""Every module, path and link that the pages name is there."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from docs import build
from docs.schema import MODELS
from scripts.commands.arguments import command_parser
from scripts.recipe.config import Config
from scripts.recipe.load import load_recipe
from tests.conftest import ROOT

PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "config/README.md", "upstream/README.md")
]
PAGES += sorted(ROOT.glob("docs/*.md"))
MODULE = re.compile(r"(?<![\w./-])(?:scripts|tests)(?:\.[a-z]\w*)+(?!\w*[*/])")
FOLDERS = "benchmarks|config|containers|docs|envs|profiles|rules|scripts|tests"
FILE = re.compile(rf"(?<![\w./-])(?:\.\./)?(?:{FOLDERS})(?:/[A-Za-z0-9_][A-Za-z0-9_.-]*)*/?(?![\w<*{{])")
COMMAND = re.compile(r"(?:^|`)stagecoach ([^`#\n]+)", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]+)?\)")
MADE_LATER = {"config/sites/mine.yaml"}


def module_is_there(name: str) -> bool:
    """Whether a module or package, or a name in one, is in the tree."""
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file() or path.parent.with_suffix(".py").is_file()


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    modules = {name for name in MODULE.findall(text) if not name.endswith((".py", ".sh"))}
    assert {name for name in modules if not module_is_there(name)} == set()
    paths = {path.removeprefix("../").rstrip(".") for path in FILE.findall(text)} - MADE_LATER
    assert {path for path in paths if not (ROOT / path).exists()} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        linked = page.parent / target if target else page
        assert linked.exists(), target
        assert not anchor or linked.suffix != ".md" or anchor[1:] in anchors_of(linked), target + anchor


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_commands_have_the_options_that_it_says(page):
    for line in COMMAND.findall(page.read_text()):
        command_parser().parse_args(shlex.split(line))


def test_the_site_has_every_page_and_its_links_leave_docs_for_the_repository():
    nav = re.findall(r"[\w/]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")]
    made = ["index.md", "reference/commands.md", *(f"reference/{name}.md" for name in MODELS)]
    assert sorted(nav) == sorted(pages + made)
    text = "[a](../data.md#check) [b](../../README.md) [c](../../config/recipes/tiny.yaml) [d](#e)"
    linked = build.with_links(text, Path("docs/howto/data.md"), "https://host/repository")
    tiny = "https://host/repository/blob/main/config/recipes/tiny.yaml"
    assert linked == f"[a](../data.md#check) [b](../index.md) [c]({tiny}) [d](#e)"
    assert build.with_links("[a](docs/data.md)", Path("README.md"), "") == "[a](data.md)"


def test_the_reference_has_every_key_and_option():
    keys = set(re.findall(r"^\| `(\w+)` \|", build.settings_page("config"), re.MULTILINE))
    assert keys >= set(Config.model_fields)
    assert "--no-verify" in build.commands_page()


def test_the_reference_names_places_in_the_file_and_no_class():
    headings = re.findall(r"^## (.*) \{#\w+\}$", build.settings_page("recipe"), re.MULTILINE)
    assert "`stages.NAME.policy.optimizer`" in headings and "`stages.NAME` with `algorithm: dpo`" in headings
    assert [heading for heading in headings if not heading.startswith("`")] == []
    assert len(headings) == len(set(headings))


def test_package_changelog_and_pages_name_one_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    pins = re.compile(r"(?:stagecoach-workflow(?:\[\w+\])?==|--tag v|git tag v)(\d[\w.]*\w)")
    named = {pin for page in PAGES for pin in pins.findall(page.read_text())}
    assert (newest, named) == (version, {version})


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:someone/stagecoach.git", "https://github.com/someone/stagecoach"),
        ("https://github.com/someone/stagecoach.git", "https://github.com/someone/stagecoach"),
        ("ssh://git@host.org/group/sub/stagecoach", "https://host.org/group/sub/stagecoach"),
        ("/clones/stagecoach", build.PLACEHOLDER),
        (None, build.PLACEHOLDER),
    ],
)
def test_the_sites_links_lead_to_the_checkouts_origin(remote, address, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.delenv("REPOSITORY", raising=False)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    if remote:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", remote], check=True)
    assert build.repository() == address


def test_the_page_on_the_architecture_names_every_room_and_few_words():
    rooms, _, words = (ROOT / "docs/architecture.md").read_text().partition("## Words")
    folders = {f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / "scripts").glob("[a-z]*")}
    shown = {name for name in folders if name.endswith(("/", ".py"))}
    assert {name for name in shown if f"`{name}`" not in rooms} == set()
    terms = [term for line in words.splitlines()[4:] for term in line.split("|")[1].split(",")]
    assert len(terms) == len(set(terms)) <= 25


def test_the_recipe_on_the_front_page_is_valid(tmp_path):
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(shown)
    assert [*load_recipe(recipe).stages] == ["sft", "rlvr"]


ROOMS = sorted(path.parent for path in (ROOT / "scripts").rglob("__init__.py") if path.parent != ROOT / "scripts")
WITHIN_A_ROOM = {"checks", "environments"}


@pytest.mark.parametrize(
    "room", [room for room in ROOMS if room.name not in WITHIN_A_ROOM], ids=lambda room: str(room.relative_to(ROOT))
)
def test_each_room_says_in_a_screen_what_it_holds_where_to_begin_and_how_to_add_one_more(room):
    text = (room / "README.md").read_text()
    assert len(text.splitlines()) <= 40
    assert re.findall("^#.*", text, re.MULTILINE)[1:] == ["## Where to begin", "## How to add"]
    named = re.findall(r"`([\w/]+\.(?:py|json))[:`]", text)
    assert named and all((room / name).is_file() for name in named)
