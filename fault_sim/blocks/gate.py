"""What holds back an engine's runs between two steps: nothing, unless a subclass does."""

from fault_sim.blocks.run import Run


class Gate:
    def allows(self, run: Run, tokens: int) -> int:
        """How many of these tokens the run may compute in the step."""
        return tokens

    def takes_input(self, run: Run) -> bool:
        """Whether its session takes in what has come."""
        return True
