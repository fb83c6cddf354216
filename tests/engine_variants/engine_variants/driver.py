"""The half of the backend that would launch."""

from typing import NoReturn

from triton.backends.driver import DriverBase


class InterpretingDriver(DriverBase):
    """Is there, and is never asked for anything: interpreted kernels are not launched."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> NoReturn:
        raise NotImplementedError

    def get_current_target(self) -> NoReturn:
        raise NotImplementedError

    def get_active_torch_device(self) -> NoReturn:
        raise NotImplementedError

    def get_benchmarker(self) -> NoReturn:
        raise NotImplementedError
