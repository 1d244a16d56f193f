"""ComfyUI inside this process: its validation and its PromptExecutor, and a census of its functions."""

import asyncio
import hashlib
import inspect
import os
import sys
import types
import uuid
from pathlib import Path

sys.path.insert(0, os.environ["COMFY_APP"])

import comfy.options

comfy.options.enable_args_parsing(False)
from comfy.cli_args import args  # noqa: E402

args.cpu = True
args.use_pytorch_cross_attention = True

import folder_paths  # noqa: E402

H3_EXTRAS = (
    "nodes_custom_sampler", "nodes_minimax_h3", "nodes_audio", "nodes_video", "nodes_images", "nodes_primitive",
    "nodes_math", "nodes_resolution", "nodes_preview_any",
)
CORE = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "execution", "folder_paths", "node_helpers", "nodes",
        "server", "latent_preview", "torch.nn.functional")


def census() -> dict[str, str]:
    """Every function and method of ComfyUI's loaded modules -> a digest of its code, defaults and identity."""
    found = {}
    for module_name, module in sorted(sys.modules.items()):
        if not any(module_name == root or module_name.startswith(root + ".") for root in CORE):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, types.FunctionType):
                found[f"{module_name}.{name}"] = _digest(value)
            elif inspect.isclass(value) and value.__module__ == module_name:
                for attribute, method in list(vars(value).items()):
                    function = getattr(method, "__func__", method)
                    if isinstance(function, types.FunctionType):
                        found[f"{module_name}.{name}.{attribute}"] = _digest(function)
    return found


def _digest(function: types.FunctionType) -> str:
    text = f"{function.__module__}.{function.__qualname__} {id(function)}".encode()
    return hashlib.sha256(text + function.__code__.co_code).hexdigest()


class Executor:
    def __init__(self, base: Path):
        self._use_folders(base)
        import execution
        import server

        import nodes

        self.execution, self.nodes = execution, nodes
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        self.server = server.PromptServer(self.loop)  # never started: packs may ask for its instance
        self.server.send_sync = lambda event, data, sid=None: None
        app = Path(os.environ["COMFY_APP"])
        packs = base / "custom_nodes"
        self.failed = [str(path) for path in (*(app / "comfy_extras" / f"{name}.py" for name in H3_EXTRAS),
                                              packs / "fasth3_fixture") if not self._load(path)]
        before = census()
        pack = next(path for path in packs.iterdir() if path.name != "fasth3_fixture")
        if not self._load(pack):
            self.failed.append(str(pack))
        after = census()
        self.changed_by_import = sorted(name for name in before if after.get(name) != before[name])
        self.before = before
        self.executor = execution.PromptExecutor(
            self.server, cache_type=execution.CacheType.CLASSIC,
            cache_args={"lru": 0, "ram": 0.0, "ram_inactive": 0.0},
        )

    @staticmethod
    def _use_folders(base: Path) -> None:
        folder_paths.base_path = str(base)
        folder_paths.models_dir = str(base / "models")
        for name, (_, extensions) in list(folder_paths.folder_names_and_paths.items()):
            if name != "custom_nodes":
                folder_paths.folder_names_and_paths[name] = ([str(base / "models" / name)], extensions)
        for kind in ("output", "temp", "input"):
            getattr(folder_paths, f"set_{kind}_directory")(str(base / kind))

    def _load(self, path: Path) -> bool:
        parent = "comfy_extras" if path.suffix == ".py" else "custom_nodes"
        return self.loop.run_until_complete(self.nodes.load_custom_node(str(path), module_parent=parent))

    def do_changed(self) -> dict:
        """Which functions differ from what they were before this repository was loaded."""
        now = census()
        return {"changed": sorted(name for name in self.before if now.get(name) != self.before[name])}

    def do_schemas(self, prefix: str) -> dict:
        """What /object_info would say of our nodes."""
        classes = self.nodes.NODE_CLASS_MAPPINGS
        return {name: cls.GET_NODE_INFO_V1() for name, cls in classes.items() if name.startswith(prefix)}

    def do_run(self, prompt: dict) -> dict:
        prompt_id = uuid.uuid4().hex
        valid, error, outputs, node_errors = self.loop.run_until_complete(
            self.execution.validate_prompt(prompt_id, prompt, None)
        )
        if not valid:
            return {"success": False, "error": error, "node_errors": node_errors or {"": error}, "outputs": {}}
        self.loop.run_until_complete(self.executor.execute_async(prompt, prompt_id, {}, outputs))
        errors = [data for name, data in self.executor.status_messages if name == "execution_error"]
        return {
            "success": self.executor.success, "node_errors": node_errors, "error": errors,
            "outputs": self.executor.history_result.get("outputs", {}),
        }
