"""The whole production service under seeded faults, in virtual time, over engines that keep what blocks hold."""
