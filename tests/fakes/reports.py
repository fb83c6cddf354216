"""What a measurement reports, remembered."""


class HeardReports:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps_in_all = self.steps_done = 0

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def total(self, steps: int) -> None:
        self.steps_in_all += steps

    def done(self, steps: int = 1) -> None:
        self.steps_done += steps
