"""A whole router over fake engines, with keys or without."""

from tests.process.control_plane.access.conftest import keyed, made

__all__ = ["keyed", "made"]
