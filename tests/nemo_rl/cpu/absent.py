"""Empty modules in the place of those that older releases import for a loss, a policy or videos, and rows do not need."""

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType


class _Absent(ModuleType):
    """A module that older releases import for a loss, a policy or videos, none of which rows need."""

    NAMES = (
        "decord",
        "megatron",
        "nemo_automodel",
        "transformer_engine",
        "vllm",
        "nemo_gym",
        "zmq",
        "mlflow",
        "swanlab",
    )
    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, self) if name.partition(".")[0] in _Absent.NAMES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())
