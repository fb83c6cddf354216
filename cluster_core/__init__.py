"""What every part shares: clock, ids, errors and the engine protocol. Standard library only."""
