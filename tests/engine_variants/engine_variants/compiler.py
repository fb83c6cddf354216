"""The half of the backend that would compile."""

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpretingCompiler(BaseBackend):
    """Triton wants these of a backend, and asks for none: interpreted kernels are not compiled."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        return bool(target.backend == "cpu")

    def hash(self) -> str:
        return "interpreted"

    def parse_options(self, options: Any) -> NoReturn:
        raise NotImplementedError

    def add_stages(self, stages: Any, options: Any, language: Any) -> NoReturn:
        raise NotImplementedError

    def load_dialects(self, context: Any) -> NoReturn:
        raise NotImplementedError

    def get_module_map(self) -> dict[str, Any]:
        return {}
