"""Commands over clusters that do not exist: scenarios, and how many workers a trace needs."""
