"""Who follows a session and its backlog: each follower is called after every change of either."""

from collections.abc import Callable


class Changes:
    """Made before the parts of a session, so that none of them has to be given to another one later."""

    def __init__(self) -> None:
        self._followers: list[Callable[[], None]] = []

    def follow(self, on_change: Callable[[], None]) -> None:
        self._followers.append(on_change)

    def notify(self) -> None:
        for on_change in self._followers:
            on_change()
