"""What the simulator predicts of a real cluster, beside what that does: `rachis bench simulator`."""
