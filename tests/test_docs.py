"""What README.md and the help pages list is what there is: nodes, inputs, commands, contracts, workflows."""

import re
from pathlib import Path

import pytest
from comfyui_fasth3.cli import COMMANDS
from comfyui_fasth3.fasth3_core.contracts import CONTRACTS
from comfyui_fasth3.nodes import NODES

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
SCHEMAS = {cls.GET_SCHEMA().node_id: cls.GET_SCHEMA() for cls in NODES}
PAGES = ROOT / "web" / "docs"


def first_column(text: str, heading: str) -> list[str]:
    """First cells of the table whose first heading is `heading`, taken apart at commas."""
    table = text.split(f"\n| {heading} |", 1)[1].split("\n\n", 1)[0]
    return [cell.strip(" `") for row in table.splitlines()[2:] for cell in row.split("|")[1].split(",")]


def test_readme_has_every_node():
    names = {schema.display_name.removeprefix("FastH3 ") for schema in SCHEMAS.values()}
    assert set(first_column(README, "node (FastH3 …)")) == names


def test_readme_has_every_command():
    assert re.findall(r"^python -m comfyui_fasth3 (\S+)", README, re.MULTILINE) == list(COMMANDS)


def test_readme_has_every_contract():
    assert set(first_column(README, "contract")) == set(CONTRACTS)
    rows = re.findall(r"^\| `([\w-]+)` \| (\d+) \| ([\d.]+) / ([\d.]+) \| (dense|[\d.]+)(?:, (\d+))? \|", README, re.M)
    for name, forwards, video, audio, sparsity, tile in rows:
        known = CONTRACTS[name]
        assert (int(forwards), float(video), float(audio)) == (known.points - 1, known.shift_video, known.shift_audio)
        assert sparsity == ("dense" if known.sparsity is None else f"{known.sparsity:g}")
        assert not tile or int(tile) == known.tile_size
    assert {name for name, *_ in rows} >= set(CONTRACTS) - {"turbo-4", "turbo-8"}  # these share a row


def test_readme_has_every_workflow():
    assert set(first_column(README, "workflow")) == {path.stem for path in (ROOT / "workflows").glob("*.json")}


def test_every_node_has_a_help_page():
    assert {path.stem for path in PAGES.glob("*.md")} == set(SCHEMAS)


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_a_help_page_lists_every_input(node_id):
    page = (PAGES / f"{node_id}.md").read_text("utf-8")
    assert page.startswith(f"# {SCHEMAS[node_id].display_name}\n")
    assert set(first_column(page, "input")) == {given.id for given in SCHEMAS[node_id].inputs}


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_a_help_page_names_every_choice(node_id):
    """But for the names of files, contracts and backends, which are listed elsewhere."""
    page = (PAGES / f"{node_id}.md").read_text("utf-8")
    for given in SCHEMAS[node_id].inputs:
        if given.io_type == "COMBO" and given.id not in ("contract", "backend", "dtype", "aspect", "adaln_source"):
            assert [option for option in given.options if option not in page] == [], given.id
