"""The files of a model and of its adapters as one component, so that one reader serves what they make together."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ..checkpoint.component import Component
from ..checkpoint.files import Stored


@dataclass(frozen=True)
class JoinedComponent(Component):
    """The base's root, configuration and metadata. Tensors of an adapter have a prefix of their own."""

    base: Component | None = None
    adapters: tuple[tuple[str, Component], ...] = ()
    """(prefix, adapter)"""

    @cached_property
    def tensors(self) -> dict[str, Stored]:
        added = {prefix + name: stored for prefix, file in self.adapters for name, stored in file.tensors.items()}
        return {**self.base.tensors, **added}

    @cached_property
    def metadata(self) -> Mapping[str, str]:
        return self.base.metadata


def join(component: Component, adapter: Component) -> tuple[JoinedComponent, str]:
    """(the component with the adapter's files, the prefix of its tensors)."""
    if not isinstance(component, JoinedComponent):
        component = JoinedComponent(component.root, component.files, component.config, component)
    prefix = f"adapter {len(component.adapters)}: "
    files = component.files + tuple(file for file in adapter.files if file not in component.files)
    return replace(component, files=files, adapters=(*component.adapters, (prefix, adapter))), prefix
