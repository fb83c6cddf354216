"""What has been said in a chat, and the turn that is being made; no I/O."""

from dataclasses import dataclass, field

Turn = dict[str, str]


@dataclass
class Turns:
    """system: what comes before everything, or empty. pages: what the open turn begins with, in order."""

    system: str = ""
    said: list[Turn] = field(default_factory=list)
    pages: list[str] = field(default_factory=list)

    def prompt(self, text: str) -> list[Turn]:
        """All turns, with the open one closed by this text."""
        return [*self._before(), {"role": "user", "content": self.opened + text}]

    def open_prefix(self) -> list[Turn]:
        """All turns before the open one, and it, without anything in it."""
        return [*self._before(), {"role": "user", "content": ""}]

    @property
    def opened(self) -> str:
        """What the open turn has so far."""
        return "".join(self.pages)

    def add_page(self, page: str) -> str:
        """Returns what is added to the open turn."""
        self.pages.append(f"{page.rstrip()}\n\n")
        return self.pages[-1]

    def answered(self, text: str, answer: str) -> None:
        """The open turn is closed by this text, and answered."""
        self.said = [*self.prompt(text)[bool(self.system) :], {"role": "assistant", "content": answer}]
        self.pages = []

    def reset(self) -> None:
        self.said, self.pages = [], []

    def _before(self) -> list[Turn]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.said]
